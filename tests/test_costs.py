"""What a run says of its cost: gradient norms, memory, what time went to, rates, the machine's use, and a trace."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import asyncsgd
from analysis.findings.costs import cost_of
from analysis.study.run import Run
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import SGD, Optimizer
from asyncsgd.records.events import Checkpointed, Evaluation, Event, MemoryUsed, Resumed
from asyncsgd.records.machine_load import Look, MachineLoad
from asyncsgd.records.totals import PARTS, Totals
from asyncsgd.records.usage import USAGE, Usage
from asyncsgd.runtime.memory import forget_peaks, peak_bytes
from asyncsgd.throughput import flops_per_sample, peak_flops, throughput


@dataclasses.dataclass(frozen=True)
class Linear(asyncsgd.Task):
    """Least squares with a matrix of 6 x 5, on batches of 4."""

    name = "linear"
    batch_size: int = 4

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return nn.Linear(5, 6, bias=False)

    def data(self, seed):
        return self

    def batch(self, stream, index):
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(1000 * stream + index))

    @property
    def evaluation(self):
        return {"main": [self.batch(1, index) for index in range(2)]}

    def outputs(self, model, batch):
        return model(batch)

    def loss(self, outputs, batch):
        return outputs.square().sum(1).mean()


class LookingAtValues(nn.Module):
    """Its work depends on what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 6, bias=False)

    def forward(self, batch):
        return self.linear(batch) if float(batch.sum()) > 0 else self.linear(-batch)


def batches(number=3):
    return [Linear().batch(0, index) for index in range(number)]


def arrivals(run):
    assert run.folder is not None
    return [json.loads(line) for line in (run.folder / "events.jsonl").read_text().splitlines() if '"arrival"' in line]


def test_the_gradient_norm_is_that_of_the_direction_before_it_is_clipped(tmp_path):
    task = Linear()
    run = asyncsgd.train(
        task,
        samples=12,
        folder=tmp_path / "run",
        optimizer=asyncsgd.SGD(),
        learning_rate=0.1,
        clip_norm=0.5,
        quiet=True,
    )
    plain = task.model(0)
    for index, event in enumerate(arrivals(run)):
        plain.zero_grad()
        task.loss(plain(task.batch(0, index)), task.batch(0, index)).backward()
        norm = float(plain.weight.grad.norm())
        assert norm > 0.5
        assert event["gradient_norm"] == pytest.approx(norm, rel=1e-5)
        with torch.no_grad():
            plain.weight -= event["learning_rate"] * plain.weight.grad * 0.5 / (norm + 1e-6)


def test_there_is_no_gradient_norm_where_nothing_is_clipped(tmp_path):
    run = asyncsgd.train(Linear(), samples=8, folder=tmp_path / "run", clip_norm=0.0, quiet=True)
    assert {event["gradient_norm"] for event in arrivals(run)} == {None}


def test_an_optimizer_knows_the_norm_of_the_direction_it_was_given():
    flat = FlatModel(nn.Linear(3, 1, bias=False))
    optimizer = Optimizer(flat.parameters, 3, SGD(), clip_norm=1.0)
    direction = torch.zeros_like(flat.parameters)
    direction[:2] = torch.tensor([3.0, 4.0])
    optimizer.step(direction, 0.0)
    assert optimizer.norm == 5.0


@pytest.mark.processes
@pytest.mark.parametrize(
    "values", [{"mode": "single"}, {"mode": "sync", "nproc": 2}, {"mode": "async", "nproc": 2}], ids=str
)
def test_every_worker_says_how_much_memory_it_has_needed(train, values):
    trained = train(**values)
    records, summary = trained.records("memory"), trained.summary
    assert [record["version"] for record in records] == [e["version"] for e in trained.records("evaluate")]
    num_workers = values.get("nproc", 1)
    needed = 8 * summary["num_parameters"]  # float32 parameters and gradients
    for record in records:
        assert [worker for worker, _, _ in record["workers"]] == list(range(num_workers))
        assert all(needed < resident < 2**40 and cuda == 0 for _, resident, cuda in record["workers"])
    peaks = [[worker, [resident, cuda]] for worker, resident, cuda in records[-1]["workers"]]
    assert summary["memory"]["workers"] == peaks
    assert summary["memory"]["leader"][0] > needed


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc, which Linux has")
def test_a_peak_is_of_the_run_and_not_of_the_process():
    device = torch.device("cpu")
    large = torch.ones(50_000_000)
    before = peak_bytes(device)[0]
    del large
    forget_peaks(device)
    assert peak_bytes(device)[0] < before - 100_000_000


def test_time_is_what_the_records_add_up_to():
    totals = Totals()
    facts = {**dict.fromkeys(("batches", "uses", "drops", "abandoned", "started"), ()), "outcome": "held"}
    numbers = dict.fromkeys(("worker", "read_version", "version", "arrival_delay", "num_samples", "total_samples"), 0)
    parts = {
        "pull_seconds": 1.0,
        "compute_seconds": 2.0,
        "push_seconds": 4.0,
        "wait_seconds": 8.0,
        "apply_seconds": 16.0,
    }
    for dispatch in range(2):
        event = Event(
            **facts, **numbers, **parts, dispatch=dispatch, loss=0.0, weight=1.0, learning_rate=0.0, train_seconds=0.0
        )
        totals(event)
    totals(Evaluation(0, 0, 0.0, 1.0, 1.0, {}, eval_seconds=32.0))
    totals(Checkpointed("1", 0, 0, 0.0, copy_seconds=64.0))
    totals(MemoryUsed(((0, 5, 0), (1, 7, 3)), 0, 0, 0.0))
    totals(MemoryUsed(((1, 6, 4),), 0, 0, 0.0))
    expected = {"compute": 4.0, "wait": 16.0, "communicate": 10.0, "apply": 32.0, "evaluate": 32.0, "checkpoint": 64.0}
    assert totals.seconds == expected
    assert tuple(expected) == PARTS
    assert totals.peak_bytes == {0: (5, 0), 1: (7, 4)}
    again = Totals()
    again.load_state(json.loads(json.dumps(totals.state())))
    assert (again.seconds, again.peak_bytes) == (totals.seconds, totals.peak_bytes)


def test_operations_of_a_linear_layer_are_three_times_two_per_weight():
    assert flops_per_sample(Linear(), Linear().model(0), batches()) == 3 * 2 * 5 * 6


def test_a_model_whose_work_depends_on_values_is_not_counted():
    assert flops_per_sample(Linear(), LookingAtValues(), batches()) is None


def test_a_count_changes_no_parameter_and_no_mode():
    model = Linear().model(0).train()
    before = model.weight.clone()
    flops_per_sample(Linear(), model, batches())
    assert torch.equal(model.weight, before)
    assert model.training
    assert model.weight.grad is None


def test_operations_of_bert_are_those_of_the_published_shapes():
    """Of a layer: 4 H^2 + 2 H I weights, and 2 L H products of attention per token; then the head's H^2 + H V."""

    @dataclasses.dataclass(frozen=True)
    class Masked(Linear):
        batch_size: int = 2

        def outputs(self, model, batch):
            return model(input_ids=batch).logits

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    hidden, inner, layers, vocabulary, length = 48, 96, 3, 100, 16
    model = BertForMaskedLM(BertConfig(vocab_size=vocabulary, **sizes))
    tokens = torch.ones(2, length, dtype=torch.int64)
    weights = layers * (4 * hidden**2 + 2 * hidden * inner + 2 * length * hidden) + hidden**2 + hidden * vocabulary
    assert flops_per_sample(Masked(), model, [tokens]) == 3 * 2 * weights * length


def test_utilisation_is_operations_over_what_the_devices_can_do():
    found = throughput(
        Linear(),
        Linear().model(0),
        {"samples_per_second": 50.0, "train_seconds": 2.0},
        seed=0,
        device="cpu",
        num_devices=2,
        precision=torch.float32,
    )
    peak = peak_flops("cpu", torch.float32)
    assert found["tokens_per_second"] is None
    assert found["model_flops_utilisation"] == pytest.approx(180 * 50 / (2 * peak))


class FewBatches(Linear):
    def batch(self, stream, index):
        return [super().batch(stream, index)][index if stream == 0 else 0]


def test_data_that_end_soon_have_no_rates_and_do_not_fail_the_run():
    found = throughput(
        FewBatches(),
        Linear().model(0),
        {"samples_per_second": 50.0, "train_seconds": 2.0},
        seed=0,
        device="cpu",
        num_devices=1,
        precision=torch.float32,
    )
    assert set(found.values()) == {None}


def test_a_stop_while_the_rates_are_counted_leaves_a_run_that_is_done(tmp_path, monkeypatch):
    def interrupted(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("asyncsgd.training.throughput", interrupted)
    asyncsgd.train(Linear(), samples=8, folder=tmp_path / "run", quiet=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "DONE"
    assert "throughput" not in summary
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_run_of_less_than_a_second_has_no_rates(train):
    summary = train(mode="single", samples=8, eval_samples=8).summary
    assert summary["train_seconds"] < 1
    assert set(summary["throughput"].values()) == {None}


def test_the_machine_is_looked_at_while_a_run_goes_on(tmp_path, monkeypatch):
    pytest.importorskip("psutil", reason="needs the extra usage: python -m pip install psutil")
    monkeypatch.setattr("asyncsgd.records.usage.SECONDS", 0.02)
    usage = Usage(tmp_path)
    usage.start()
    while len(usage._rows) < 3:
        sum(range(100_000))
    found = usage.finish()
    assert found is not None
    lines = [json.loads(line) for line in (tmp_path / USAGE).read_text().splitlines()]
    assert len(lines) == found["looks"] >= 3
    assert lines[-1]["processes"]["leader"][1] > 2**20
    assert 0.1 < found["cores"]["leader"] < 64
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


def test_a_run_without_a_folder_is_not_looked_at():
    usage = Usage(None)
    usage.start()
    assert usage.finish() is None


def proc_stat(*ticks, cores=2):
    """A text of ``/proc/stat``: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice."""
    of_cores = "".join(f"cpu{core} 1 1 1 1 1 1 1 1 1 1\n" for core in range(cores))
    return f"cpu  {' '.join(map(str, ticks))}\n{of_cores}intr 99 0 1\nctxt 5\nbtime 7\n"


def test_what_the_cores_did_is_split_into_the_run_the_others_and_what_was_stolen():
    before = Look.of(proc_stat(1000, 200, 300, 5000, 40, 10, 20, 30, 100, 100), own=500)
    after = Look.of(proc_stat(1400, 300, 400, 5280, 60, 30, 40, 110, 190, 190), own=900)
    # 1020 ticks: 640 busy, 300 of them neither idle nor busy nor the guests', which are in user and nice already
    assert before.load_until(after) == {
        "cores": 2,
        "own_share": 400 / 1020,
        "others_share": 240 / 1020,
        "stolen_share": 80 / 1020,
    }
    assert after.load_until(after) is None


def test_without_proc_stat_and_after_a_resume_the_load_is_unknown(tmp_path):
    assert Look.now(os.getpid(), tmp_path) is None
    load = MachineLoad(os.getpid())
    load(Resumed("8", 2, 8, 1.0, 0))
    for version in (2, 4):
        load(Evaluation(version, 4 * version, 1.0, 0.5, 1.0, {}, 0.1))
        sum(range(2_000_000))
    assert load.summary() is None


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="the system has no /proc/stat")
@pytest.mark.parametrize(
    "values",
    [
        {"mode": "single"},
        {"mode": "sync", "nproc": 2},
        {"mode": "async", "nproc": 2},
        {"mode": "hogwild", "nproc": 2},
        {"mode": "pipeline", "nproc": 2, "stages": 2, "clip_norm": 0, "micro_batches": 2},
    ],
    ids=str,
)
def test_a_measured_run_says_what_else_used_the_machine(train, values):
    load = train(**values).summary["machine_load"]
    assert load.pop("cores") == os.cpu_count()
    assert set(load) == {"own_share", "others_share", "stolen_share"}
    assert 0 < load["own_share"] <= 1
    assert all(0 <= share <= 1 for share in load.values())


def test_virtual_seconds_are_of_no_machine(train):
    assert "machine_load" not in train(mode="async", nproc=2, clock="virtual").summary


def test_a_trace_has_the_gradients_that_were_asked_for_and_changes_no_bit(train):
    traced, plain = train(mode="single", profile=4), train(mode="single")
    with gzip.open(traced.path / "profile" / "worker0.json.gz") as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith("gradient of")} == {f"gradient of batch {k}" for k in range(3, 7)}
    assert traced.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    assert "perfetto" in (traced.path / "console.log").read_text()


@pytest.mark.processes
def test_a_process_ends_well_whose_run_was_too_short_for_its_trace(tmp_path):
    script = Path(__file__).parents[1] / "experiments" / "own_model.py"
    flags = ["--mode", "single", "--samples", "320", "--profile", "1000", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr  # torch's profiler ended it with a segmentation fault


def test_a_run_too_short_for_its_trace_says_so(train):
    traced = train(mode="single", profile=1000)
    assert "fewer than 1003 gradients" in (traced.path / "console.log").read_text()


def recorded(**summary):
    return Run(Path("run"), "run", {"status": "DONE", **summary}, pandas.DataFrame(), ())


def test_shares_of_the_time_are_of_all_workers_and_memory_is_of_all_processes():
    memory = {"leader": [100, 0], "workers": [[0, [10, 3]], [1, [20, 4]]]}
    seconds = {"compute": 12.0, "wait": 6.0, "communicate": 2.0, "apply": 1.0, "evaluate": 5.0, "checkpoint": 0.5}
    usage = {"cores": {"leader": 0.5, "worker 0": 1.0}}
    said = {"num_workers": 2, "train_seconds": 10.0, "seconds": seconds, "memory": memory, "usage": usage}
    cost = cost_of([recorded(mode="async", **said)])
    assert (cost.compute, cost.wait, cost.communicate, cost.apply) == (0.6, 0.3, 0.1, 0.1)
    assert (cost.evaluate, cost.checkpoint, cost.cores) == (5.0, 0.5, 1.5)
    assert (cost.resident_bytes, cost.gpu_bytes) == (130, 7)
    evaluated = cost_of([recorded(mode="async", **said | {"train_seconds": 8.0})])  # workers go on meanwhile
    assert (evaluated.compute, evaluated.wait, evaluated.communicate, evaluated.apply) == (0.6, 0.3, 0.1, 0.125)


def test_one_process_is_leader_and_worker_at_once():
    memory = {"leader": [100, 7], "workers": [[0, [100, 7]]]}
    assert cost_of([recorded(mode="single", memory=memory)]).resident_bytes == 100


def test_an_older_run_says_nothing_of_its_cost():
    cost = cost_of([recorded(mode="async", num_workers=2, train_seconds=10.0)])
    assert {value for name, value in vars(cost).items() if name != "n"} == {None}
