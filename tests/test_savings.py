"""Ways to a gradient in less time or memory: a run with one of them is the run without it."""

import dataclasses
import itertools
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from doors import (
    AllReduce,
    Finished,
    Hogwild,
    InProcess,
    Prefetching,
    Processes,
    RunError,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
    dropout_seed,
)
from marks import slow
from tasks import Classes, Plane, Regression, Steep

MODES = {
    "single": {"mode": "single"},
    "accumulated": {"mode": "single", "accumulate": 2},
    "sync": {"mode": "sync", "nproc": 2},
    "async": {"mode": "async", "nproc": 1},
    "hogwild": {"mode": "hogwild", "nproc": 1},
    "virtual": {"mode": "async", "nproc": 2, "clock": "virtual", "rule": "local_sgd:num_local_steps=2"},
}
BITS, ROUNDING, HALF = 0.0, 1e-5, 0.02  # how far the parameters may be from the others, relatively
DROPOUT = {"dropout": 0.1}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("saving", "distance", "mode", "more"),
    [
        ({"gradient_checkpointing": True}, BITS, "single", DROPOUT),
        ({"gradient_checkpointing": True}, BITS, "single", DROPOUT | {"micro_batches": 2, "precision": "bf16"}),
        ({"prefetch": 3}, BITS, "accumulated", DROPOUT | {"micro_batches": 2}),
        ({"micro_batches": 3}, ROUNDING, "single", {}),
        ({"precision": "bf16"}, HALF, "single", {}),
        *slow(
            *(({"gradient_checkpointing": True}, BITS, mode, DROPOUT) for mode in MODES if mode != "single"),
            *(({"prefetch": 3}, BITS, mode, DROPOUT) for mode in ("sync", "async", "hogwild")),
            *(({"micro_batches": 3}, ROUNDING, mode, {}) for mode in MODES if mode != "single"),
            *(({"precision": "fp16"}, HALF, mode, {}) for mode in ("single", "sync", "async")),
        ),
    ],
    ids=str,
)
def test_a_run_that_saves_is_the_run_that_does_not(saving, distance, mode, more, train):
    values = MODES[mode] | {"optimizer": "sgd", "learning_rate": 0.1} | more
    without = train(**values)
    saves = train(**values, **saving)
    same_bits = without.summary["parameters_sha256"] == saves.summary["parameters_sha256"]
    assert same_bits == (distance == BITS)
    difference = saves.parameters() - without.parameters()
    relative = difference.norm() / without.parameters().norm()
    assert float(relative) <= distance
    loss = without.summary["final_eval_loss"]
    assert saves.summary["final_eval_loss"] == pytest.approx(loss, rel=10 * distance, abs=0)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch 2.13 generates code for vectors here that its own headers do not compile",
)
def test_a_compiled_run_is_the_run_that_is_not():
    steps = {"samples": 80, "learning_rate": 0.1, "quiet": True}
    without = asyncsgd.train(Regression(), **steps)
    torch._dynamo.utils.counters.clear()
    compiled = asyncsgd.train(Regression(), compile=True, **steps)
    assert torch._dynamo.utils.counters["inductor"]  # it is other code
    torch.testing.assert_close(compiled.model().state_dict(), without.model().state_dict(), rtol=1e-4, atol=1e-6)
    assert compiled.summary["final_eval_loss"] == pytest.approx(without.summary["final_eval_loss"], rel=1e-3)


def test_batches_that_were_made_ahead_and_nobody_asked_for_are_not_kept():
    kept = weakref.WeakSet()

    class Batch:
        def __init__(self, index):
            self.index = index
            kept.add(self)

    batches = Prefetching(Batch, ahead=2)
    for index in (0, 10, 3, 40, 7, 90):
        assert batches.take(index).index == index
    assert len(kept) <= 3  # two ahead, and the one that is being made; of 12 that nobody has asked for


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_a_gradient_in_parts_weighs_each_part_by_its_loss_terms(micro_batches):
    task = Classes()
    parts = task.split(task.data(0).batch(0, 0), micro_batches)
    assert len({task.weight(part) for part in parts}) > 1  # otherwise a mean of means would do
    step = {"optimizer": asyncsgd.SGD(), "learning_rate": 1.0, "samples": task.batch_size, "quiet": True}
    initial = task.model(0).weight.detach()
    weights = []
    for number in (1, micro_batches):
        run = asyncsgd.train(task, micro_batches=number, **step)
        weights.append(run.model().weight.detach())
    whole, in_parts = weights
    assert float((whole - initial).norm()) > 0.1
    torch.testing.assert_close(in_parts, whole, rtol=0, atol=1e-6)


def test_every_part_has_dropout_of_its_own_and_the_whole_batch_that_of_its_first_part():
    seeds = set()
    for index in range(5):
        of_batch = [dropout_seed(0, 0, index, part) for part in range(5)]
        assert of_batch[0] == dropout_seed(0, 0, index)
        seeds.update(of_batch)
    assert len(seeds) == 25


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loss_scale_halves_until_no_part_overflows_and_doubles_after_2000_gradients(micro_batches):
    records = []
    steps = {"samples": 8 * 2100, "learning_rate": 1e-4, "optimizer": asyncsgd.SGD(), "evaluations": 1}
    more = {"precision": "fp16", "micro_batches": micro_batches, "quiet": True, "report": records.append}
    asyncsgd.train(Steep(), **steps, **more)
    scales = [record.loss_scales for record in records if record.kind == "arrival"]
    assert all(len(of_gradient) == 1 for of_gradient in scales)  # all parts have the same
    values = []
    lengths = []
    for (scale,), group in itertools.groupby(scales):
        values.append(scale)
        lengths.append(len(list(group)))
    *falling, lowest, last = values
    assert lowest < 2.0**16
    assert last == 2 * lowest
    assert lengths[-2] == 2000
    assert falling == sorted(falling, reverse=True)
    for scale, following in itertools.pairwise(values):
        assert math.log2(scale / following).is_integer()


def test_a_compiled_run_is_not_replayed_and_needs_a_compiler(train, tmp_path, monkeypatch):
    run = train(mode="single", samples=8)
    path = shutil.copytree(run.path, tmp_path / "run")
    settings = (path / "settings.yaml").read_text()
    (path / "settings.yaml").write_text(settings.replace("compile: false", "compile: true"))
    ended = cli(["asyncsgd", "replay", path, "--cache-dir", run.cache])
    assert ended.code == 2
    assert "a run with --compile cannot be replayed: which code computes a batch" in ended.err
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"there is no compiler here; install g\+\+, or drop it"):
        asyncsgd.train(Plane(), samples=8, compile=True, device="cpu", quiet=True)


class Keeping(torch.autograd.Function):
    """The sum of its input and 0, for whose gradient it keeps 128 MiB per sample; nobody writes into them."""

    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(torch.empty(len(inputs), 2**25))
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert len(ctx.saved_tensors) == 1
        return gradient


@dataclasses.dataclass(frozen=True)
class Wide(Plane):
    """It keeps 128 MiB of activations per sample, in processes with little memory.

    Every process calls `model` first, and may have `megabytes` more from there on; 0: as much as there is.
    """

    megabytes: int = 0

    def model(self, seed):
        if self.megabytes:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        return super().model(seed)

    def outputs(self, model, batch):
        outputs = super().outputs(model, batch)
        if model.training:
            return Keeping.apply(outputs)
        return outputs


RUNTIMES = {
    "single": InProcess(),
    "sync": AllReduce(2),
    "async": Processes(1),
    "hogwild": Hogwild(1),
    "virtual": Virtual(3),
}


def train_wide(kind, folder, megabytes=0):
    steps = {"samples": 64, "evaluations": 4, "learning_rate": 0.1, "device": "cpu", "auto_batch": megabytes > 0}
    asyncsgd.train(Wide(megabytes=megabytes), runtime=RUNTIMES[kind], folder=folder, **steps)


def wide(kind, megabytes, folder):
    """Train `Wide` in a process of its own; what it printed."""
    return alone("-c", f"import test_savings as its; its.train_wide({kind!r}, {str(folder)!r}, {megabytes})")


def alone(*words):
    """What Python prints that is given these words."""
    # Another thread's arena would take 64 MiB of the addresses.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", RUNTIMES)
def test_a_run_short_of_memory_has_the_loss_curve_of_one_that_is_not(kind, tmp_path):
    train_wide(kind, tmp_path / "full")
    said = wide(kind, 800, tmp_path / "short")
    full = Finished(tmp_path / "full")
    short = Finished(tmp_path / "short")
    losses = []
    for run in (short, full):
        losses.append([record["loss"] for record in run.records("evaluate")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert full.summary["micro_batches"] == 1
    assert short.summary["micro_batches"] > 1
    assert f"memory a batch is computed in {short.summary['micro_batches']} parts, 1 before" in said
    if kind in ("single", "async", "virtual"):
        assert asyncsgd.replay(short.path, Wide()).identical


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["single", "sync", "async"])
def test_a_run_with_no_memory_for_one_sample_says_so_once(kind, tmp_path):
    said = wide(kind, 100, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "FAILED"
    assert "there is not enough memory for one sample of a batch; type" in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.processes
def test_the_largest_batch_that_fits_is_found_by_trying():
    said = alone("experiments/train.py", "test_savings:Wide", "--megabytes", "600", "--find-batch-size")
    assert "try    1 sample: fit\ntry    2 samples: fit\n" in said
    found = int(said.partition("fits   ")[2].split()[0])
    assert found in (3, 4)
    assert f"type   --batch-size {found} --micro-batches 1, or --batch-size 8 --micro-batches {-(-8 // found)} " in said


@dataclasses.dataclass(frozen=True)
class OfThree(Plane):
    name = "of_three"

    def facts(self):
        return {"num_train_samples": 3}


@pytest.mark.processes
def test_no_batch_is_tried_that_is_larger_than_the_data():
    ended = cli("train.py test_savings:OfThree --batch-size 1 --find-batch-size --device cpu")
    assert ended.code == 0, ended.err
    assert re.findall(r"try +(\d+)", ended.out + ended.err) == ["1", "2", "3"]
    assert "fits   3 samples at once; the data have no more" in ended.out + ended.err


@dataclasses.dataclass(frozen=True)
class Greedy(Plane):
    """Out of memory at a gradient of more than four rows at once, when `room` has given 60."""

    name = "greedy"
    room = itertools.count(0)

    def loss(self, outputs, batch):
        if len(outputs) > 4 and outputs.requires_grad and next(self.room) > 60:
            raise MemoryError
        return super().loss(outputs, batch)


def test_a_run_that_is_out_of_memory_later_says_how_to_go_on_and_does(tmp_path):
    def go_on(micro_batches):
        return asyncsgd.train(
            Greedy(batch_size=8),
            samples=640,
            checkpoint_every=80,
            micro_batches=micro_batches,
            folder=tmp_path / "run",
            resume=True,
            quiet=True,
        )

    with pytest.raises(RunError, match=f"type --resume {tmp_path}/run --micro-batches 2$"):
        go_on(1)
    assert go_on(2).summary["num_samples"] == 640
    with pytest.raises(UsageError, match="micro_batches 2 -> 1"):
        go_on(1)
    assert asyncsgd.replay(tmp_path / "run", Plane()).identical
