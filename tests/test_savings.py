"""Ways to a gradient in less time or memory: each gives the gradient that there is without it."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doors import prepared_task
from marks import slow
from tasks import Plane

import asyncsgd
from asyncsgd.errors import NOT_ONE_SAMPLE, UsageError
from asyncsgd.experiment import Course, Experiment, Setup
from asyncsgd.fitting import find_batch_size
from asyncsgd.flat import FlatModel
from asyncsgd.optimizers import SGD, OptimizerRecipe
from asyncsgd.prefetching import Prefetching
from asyncsgd.replaying import PreparedReplay
from asyncsgd.rules.synchronous import Synchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.processes import fork_server
from asyncsgd.schedules import constant
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.settings.training import make_settings
from asyncsgd.worker import Savings, Worker, check_compiler

INDEX = 5


def worker_of(task, savings, **values):
    return Worker(FlatModel(task.model(0)), task, task.data(0), seed=0, savings=savings, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_checkpointed_activations_give_the_same_bits(dropout, micro_batches, precision, train):
    task = prepared_task("masked_lm", train(mode="single", dropout=dropout, samples=0))

    def gradient_of(savings):
        worker = worker_of(task, savings, micro_batches=micro_batches, precision=precision)
        calls = []
        layer = worker.flat.model.base_model.encoder.layer[0]  # type: ignore[union-attr]
        layer.intermediate.register_forward_hook(lambda *_: calls.append(None))
        loss = worker.gradient(INDEX).loss
        return loss, worker.flat.gradients, len(calls) // micro_batches

    kept, again = gradient_of(Savings()), gradient_of(Savings(gradient_checkpointing=True))
    assert (kept[2], again[2]) == (1, 2)
    assert kept[0] == again[0]
    assert torch.equal(kept[1], again[1])


def test_a_model_that_cannot_compute_again_is_refused_with_the_reason():
    with pytest.raises(UsageError, match="a Linear has no method gradient_checkpointing_enable, as transformers"):
        asyncsgd.train(Plane(), samples=8, gradient_checkpointing=True, quiet=True)


IN_EVERY_MODE = [
    {"mode": "single"},
    *slow(
        {"mode": "sync", "nproc": 2},
        {"mode": "async", "nproc": 1},
        {"mode": "hogwild", "nproc": 1},
        {"mode": "async", "nproc": 3, "clock": "virtual", "rule": "local_sgd:num_local_steps=2"},
    ),
]


@pytest.mark.parametrize("values", IN_EVERY_MODE, ids=str)
def test_a_run_with_checkpointed_activations_ends_at_the_same_bits(values, train):
    values = values | {"dropout": 0.1}
    kept, again = train(**values), train(**values, gradient_checkpointing=True)
    assert again.summary["parameters_sha256"] == kept.summary["parameters_sha256"]


def test_a_thread_makes_the_guessed_batches_in_their_order_and_throws_wrong_ones_away():
    made = []
    prefetching = Prefetching(lambda index: (made.append(index), index)[1], ahead=2)
    taken = [prefetching.take(index) for index in (0, 1, 2, 5, 8, 3)]
    prefetching._thread.shutdown()
    assert taken == [0, 1, 2, 5, 8, 3]
    once = [index for index in dict.fromkeys(made) if index in (0, 1, 2, 5, 8)]
    assert once == [0, 1, 2, 5, 8]  # each before it was asked for, or then
    assert set(made) <= {0, 1, 2, 3, 4, 5, 8, 11, 14}
    assert made[-3:] == [3, 4, 5]


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "single", "accumulate": 2},
        *slow(
            {"mode": "sync", "nproc": 2},
            {"mode": "async", "nproc": 1, "rule": "local_sgd:num_local_steps=2"},
            {"mode": "hogwild", "nproc": 1},
        ),
    ],
    ids=str,
)
def test_a_run_whose_batches_are_made_ahead_ends_at_the_same_bits(values, train):
    values = values | {"dropout": 0.1, "micro_batches": 2}
    without, ahead = train(**values), train(**values, prefetch=3)
    assert ahead.summary["parameters_sha256"] == without.summary["parameters_sha256"]


def test_the_virtual_clock_has_no_next_batch_to_guess():
    with pytest.raises(UsageError, match="--prefetch 2 guesses a worker's next batch, and on the virtual clock"):
        make_settings({"clock": "virtual", "prefetch": 2})
    with pytest.raises(UsageError, match="prefetch=2 guesses a worker's next batch, and on the virtual clock"):
        asyncsgd.train(Plane(), runtime=asyncsgd.Virtual(2), samples=8, prefetch=2)


@pytest.mark.slow
def test_a_compiled_loss_has_the_gradient_of_the_plain_one(train):
    task = prepared_task("masked_lm", train(mode="single", samples=0))
    plain, compiled = worker_of(task, Savings()), worker_of(task, Savings(compile=True))
    assert compiled.compile_seconds > 0 == plain.compile_seconds
    with torch.compiler.set_stance("fail_on_recompile"):
        for index in (8, 16, 24):  # each of another length
            compiled.gradient(index)
    for index in (0, 9):
        assert compiled.gradient(index).loss == pytest.approx(plain.gradient(index).loss, rel=1e-5)
        difference = (compiled.flat.gradients - plain.flat.gradients).norm()
        assert float(difference / plain.flat.gradients.norm()) < 1e-5


def test_a_compiled_run_is_not_replayed_and_needs_a_compiler(train, monkeypatch):
    run = train(mode="single", samples=0)
    values = run.settings | {"cache_dir": str(run.cache)}
    with pytest.raises(UsageError, match="a run with --compile cannot be replayed: which code computes a batch"):
        PreparedReplay(pretraining(make_settings(values | {"compile": True})), [])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"there is no compiler here; install g\+\+, or drop it"):
        check_compiler("cpu")
    check_compiler("cuda")


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
class Wide(asyncsgd.Task):
    """A line that keeps 128 MiB of activations per sample, in processes with little memory.

    Every process calls `model` first, and may have `megabytes` more from there on; 0: as much as there is.
    """

    name = "wide"
    batch_size: int = 8
    megabytes: int = 0

    def model(self, seed):
        if self.megabytes:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + self.megabytes * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        with asyncsgd.seeded(seed):
            return torch.nn.Linear(1, 1)

    def data(self, seed):
        x = torch.linspace(-1.0, 1.0, 64).unsqueeze(1)
        return asyncsgd.TensorData((x, 3 * x), (x, 3 * x), self.batch_size, seed)

    def outputs(self, model, batch):
        outputs = model(batch[0])
        return Keeping.apply(outputs) if model.training else outputs  # type: ignore[no-untyped-call]

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


def train_wide(kind, num_workers, megabytes, auto_batch, folder):
    """The losses of a run in this process, and its parts."""
    runtime = {
        "single": asyncsgd.InProcess(),
        "sync": asyncsgd.AllReduce(num_workers),
        "async": asyncsgd.Processes(num_workers),
        "hogwild": asyncsgd.Hogwild(num_workers),
        "virtual": asyncsgd.Virtual(num_workers),
    }[kind]
    run = asyncsgd.train(
        Wide(megabytes=megabytes),
        runtime=runtime,
        samples=64,
        evaluations=4,
        learning_rate=0.1,
        device="cpu",
        auto_batch=auto_batch,
        folder=folder,
    )
    return {"losses": [evaluation.loss for evaluation in run.evaluations], "parts": run.summary["micro_batches"]}


def wide(kind, num_workers, megabytes, folder, auto_batch=True):
    """`train_wide` in a process of its own, and what it said; text where it has failed."""
    call = f"test_savings.train_wide({kind!r}, {num_workers}, {megabytes}, {auto_batch}, {str(folder)!r})"
    # Another thread's arena would take 64 MiB of the addresses.
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    code = f"import json, test_savings; print('RESULT', json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if "RESULT" not in done.stdout:
        return done.stdout + done.stderr
    return json.loads(done.stdout.partition("RESULT")[2]) | {"said": done.stdout}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "num_workers"), [("single", 1), ("sync", 2), ("async", 1), ("hogwild", 1), ("virtual", 3)]
)
def test_a_run_short_of_memory_has_the_loss_curve_of_one_that_is_not(kind, num_workers, tmp_path):
    full = wide(kind, num_workers, 0, tmp_path / "full", auto_batch=False)
    short = wide(kind, num_workers, 600, tmp_path / "short")
    assert short["losses"] == pytest.approx(full["losses"], rel=1e-5)
    assert full["parts"] == 1 < short["parts"]
    lines = [line for line in short["said"].splitlines() if line.startswith("memory ")]
    assert lines[-1].split()[-1] == str(short["parts"])
    if kind in ("single", "async", "virtual"):
        assert asyncsgd.replay(tmp_path / "short", Wide()).identical


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "num_workers"), [("single", 1), ("sync", 2), ("async", 2)])
def test_a_run_with_no_memory_for_one_sample_says_so_once(kind, num_workers, tmp_path):
    said = wide(kind, num_workers, 100, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "FAILED"
    assert NOT_ONE_SAMPLE in said.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.processes
def test_the_largest_batch_that_fits_is_found_by_trying():
    tries = []
    setup = Setup(asyncsgd.InProcess(), Synchronous(), OptimizerRecipe(SGD()))
    experiment = Experiment("tests", Wide(megabytes=600), setup, lambda task: Course(Budget(8), 1, constant), Path())
    found = find_batch_size(experiment, fork_server(None), tries.append)
    assert found in (3, 4)
    assert tries[:2] == ["try    1 sample: fit", "try    2 samples: fit"]
    assert tries[-2:] == [
        f"fits   {found} samples at once; {found + 1} do not",
        f"type   --batch-size {found} --micro-batches 1, or --batch-size 8 --micro-batches {-(-8 // found)} for the "
        f"batch that was asked for",
    ]


@pytest.mark.parametrize("values", [{"run_dir": "runs/a"}, {"profile": 5}, {"track": "tensorboard"}], ids=str)
def test_what_a_search_for_a_batch_size_would_not_do_is_refused(values):
    flag = "--" + next(iter(values)).replace("_", "-")
    with pytest.raises(UsageError, match=f"{flag} does nothing with --find-batch-size, which trains nothing; drop"):
        make_settings({"find_batch_size": True, **values})
