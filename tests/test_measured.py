"""What a run says of its cost: gradient norms, memory, what time went to, rates, the machine's use, and a trace."""

import collections
import dataclasses
import gzip
import itertools
import json
import os

import psutil
import pytest
import torch
from doors import SGD, Finished, TensorData, asyncsgd, cli, seeded
from tasks import Plane
from transformers import BertConfig, BertForMaskedLM

FULL_SECOND = {"seconds": 1.2, "evaluations": 1, "device": "cpu", "quiet": True}  # a shorter run says no rates


class LooksAtValues(Plane):
    """Its work depends on what it computes."""

    def outputs(self, model, batch):
        if float(batch[0].sum()) > 0:
            return model(batch[0])
        return model(-batch[0])


@dataclasses.dataclass(frozen=True)
class Masked(Plane):
    """Two texts of 16 tokens through a BERT of three layers."""

    batch_size: int = 2

    def model(self, seed):
        sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        with seeded(seed):
            return BertForMaskedLM(BertConfig(vocab_size=100, **sizes))

    def data(self, seed):
        return TensorData(*[(torch.ones(4, 16, dtype=torch.int64), torch.zeros(4, 1, 1))] * 2, self.batch_size, seed)

    def outputs(self, model, batch):
        return model(input_ids=batch[0]).logits


def bert_operations(hidden=48, inner=96, layers=3, vocabulary=100, length=16):
    """A layer has 4 H^2 + 2 H I weights, and 2 L H products of attention per token; then the head's H^2 + H V."""
    weights = layers * (4 * hidden**2 + 2 * hidden * inner + 2 * length * hidden) + hidden**2 + hidden * vocabulary
    return 3 * 2 * weights * length


def test_the_gradient_norm_is_that_of_the_direction_before_it_is_clipped():
    task = Plane()
    arrivals = []

    def note(record):
        arrivals.extend([record] if record.kind == "arrival" else [])

    step = {"optimizer": SGD(), "learning_rate": 0.01, "quiet": True, "report": note}
    asyncsgd.train(task, samples=24, clip_norm=0.5, **step)
    plain = task.model(0)
    data = task.data(0)
    for index, event in enumerate(arrivals):
        plain.zero_grad()
        task.loss(task.outputs(plain, data.batch(0, index)), data.batch(0, index)).backward()
        norm = float(plain.weight.grad.norm())
        assert norm > 0.5
        assert event.gradient_norm == pytest.approx(norm, rel=1e-5)
        with torch.no_grad():
            plain.weight -= event.learning_rate * plain.weight.grad * 0.5 / (norm + 1e-6)
    arrivals.clear()
    asyncsgd.train(task, samples=24, clip_norm=0.0, **step)
    assert [event.gradient_norm for event in arrivals] == [None] * 3


MODES = ["single", "sync", "async", "hogwild", "pipeline"]
PIPELINE = {"stages": 2, "clip_norm": 0, "micro_batches": 2}


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_a_run_says_what_time_went_to_how_much_memory_it_needed_and_what_else_used_the_machine(train, mode):
    num_workers = 1 if mode == "single" else 2
    run = train(mode=mode, nproc=num_workers, **PIPELINE if mode == "pipeline" else {})
    summary = run.summary
    if mode != "pipeline":  # whose stages have records of their own
        arrivals = run.records("arrival")
        seconds = dict.fromkeys(summary["seconds"], 0.0)
        for part in ("compute", "wait", "apply"):
            seconds[part] = sum(record[f"{part}_seconds"] for record in arrivals)
        seconds["communicate"] = sum(record["pull_seconds"] + record["push_seconds"] for record in arrivals)
        seconds["evaluate"] = sum(record["eval_seconds"] for record in run.records("evaluate"))
        assert summary["seconds"] == pytest.approx(seconds)
    records = run.records("memory")
    assert [record["version"] for record in records] == [e["version"] for e in run.records("evaluate")]
    needed = (8 if mode != "pipeline" else 1) * summary["num_parameters"]  # float32 parameters and gradients
    for record in records:
        assert [worker for worker, _, _ in record["workers"]] == list(range(num_workers))
        for _, resident, cuda in record["workers"]:
            assert needed < resident < 2**40
            assert cuda == 0
    assert summary["memory"]["workers"] == [[worker, peaks] for worker, *peaks in records[-1]["workers"]]
    assert summary["memory"]["leader"][0] > needed
    load = summary["machine_load"]
    assert load.pop("cores") == os.cpu_count()
    assert load.keys() == {"own_share", "others_share", "stolen_share"}
    for share in load.values():
        assert 0 <= share <= 1
    assert load["own_share"] > 0


TASKS = [(Plane(), 3 * 2 * 16), (LooksAtValues(), 3 * 2 * 16), (Masked(), bert_operations())]


def test_what_the_machine_did_is_parted_into_the_run_others_and_other_machines(monkeypatch):
    looks = itertools.count()
    own_looks = itertools.count()
    times = collections.namedtuple("times", "user system idle iowait steal guest")

    def of_machine():
        look = next(looks)
        return times(20.0 * look, 5.0 * look, 70.0 * look, 3.0 * look, 2.0 * look, 11.0 * look)

    monkeypatch.setattr(psutil, "cpu_times", of_machine)
    monkeypatch.setattr(psutil.Process, "children", lambda process, recursive=False: [])
    monkeypatch.setattr(psutil.Process, "cpu_times", lambda process: (6.0 * next(own_looks), 0.0, 0.0, 0.0))
    load = asyncsgd.train(Plane(), samples=40, evaluations=4, device="cpu", quiet=True).summary["machine_load"]
    # Of 100 s between two looks the machine was busy for 25, 6 of them for the run; a guest's are among the user's.
    assert (load["own_share"], load["others_share"], load["stolen_share"]) == pytest.approx((0.06, 0.19, 0.02))


@pytest.mark.parametrize(("task", "operations"), TASKS, ids=["plane", "looks at values", "masked"])
def test_operations_and_utilisation_are_counted_from_the_shapes(task, operations):
    summary = asyncsgd.train(task, **FULL_SECOND).summary
    found = summary["throughput"]
    rate = summary["samples_per_second"]
    assert found["model_flops_per_sample"] == operations
    assert found["tokens_per_second"] is None  # the task does not count them
    peak = found["peak_flops_per_second"]
    assert found["model_flops_utilisation"] == pytest.approx(operations * rate / peak)


def test_a_short_run_without_a_folder_has_no_rates_and_is_not_looked_at():
    summary = asyncsgd.train(Plane(), samples=8, quiet=True).summary
    assert set(summary["throughput"].values()) == {None}
    assert summary["usage"] is None


def test_the_machine_is_looked_at_while_a_run_with_a_folder_goes_on(tmp_path):
    run = Finished(tmp_path / "run")
    asyncsgd.train(Plane(), folder=run.path, **FULL_SECOND | {"seconds": 2.5})
    lines = []
    for line in (run.path / "usage.jsonl").read_text().splitlines():
        lines.append(json.loads(line))
    assert run.summary["usage"]["looks"] == len(lines)
    assert len(lines) >= 2
    assert lines[-1]["processes"]["leader"][1] > 2**20
    assert 0.1 < run.summary["usage"]["cores"]["leader"] < 64
    assert [line["seconds"] for line in lines] == sorted(line["seconds"] for line in lines)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_trace_has_the_gradients_that_were_asked_for_and_changes_no_bit(train, compiles, monkeypatch):
    """The compiler, where there is one, changes nothing, since the usual one takes a minute."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *arguments, **named: None)
    traced = train(mode="single", profile=4, compile=compiles)
    plain = train(mode="single")
    with gzip.open(traced.path / "profile" / "worker0.json.gz") as file:
        names = [str(event.get("name")) for event in json.load(file)["traceEvents"]]
    assert {name for name in names if name.startswith("gradient of")} == {f"gradient of batch {k}" for k in range(3, 7)}
    assert traced.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    assert "perfetto" in (traced.path / "console.log").read_text()


@pytest.mark.processes
def test_a_run_too_short_for_its_trace_says_so_and_its_process_ends_well(tmp_path):
    run = ["--mode", "single", "--samples", "320", "--profile", "1000", "--run-dir", tmp_path / "run"]
    ended = cli(["own_model.py", *run], alone=True)
    assert ended.code == 0, ended.err  # torch's profiler ended it with a segmentation fault
    assert "fewer than 1003 gradients" in (tmp_path / "run" / "console.log").read_text()
