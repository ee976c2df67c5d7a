"""What cannot be meant is refused alike by both doors: the flags of a task's script, and `asyncsgd.train`."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import yaml
from tasks import Plane

import asyncsgd
from asyncsgd import InProcess, Processes, UsageError, Virtual
from asyncsgd.scripts.task import adapt
from asyncsgd.settings.run import run_of
from asyncsgd.settings.task import task_flags
from asyncsgd.simulation.churn import Join, Leave
from asyncsgd.simulation.speeds import Infinite, Slow
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification


@pytest.mark.parametrize(
    ("flags", "python", "words"),
    [
        ({"samples": -1}, {"samples": -1}, "samples 0 or more -1"),
        ({"seconds": -1.0}, {"seconds": -1.0}, "seconds more than 0 -1.0"),
        ({"evaluations": 0}, {"evaluations": 0}, "evaluations 1 or more 0"),
        ({"epochs": 0.0}, {"epochs": 0, "samples": None}, "epochs more than 0"),
        ({"schedule": "lineal"}, {"schedule": "lineal"}, "schedule 'lineal' 'linear'"),
        ({"seed": 2**32}, {"seed": 2**32}, "seed less than 4294967296"),
        ({"compile": 1}, {"compile": 1}, "compile true false 1"),
        ({"evaluate_every": 0}, {"evaluate_every": 0}, "samples from 1 up"),
        ({"checkpoint_every": 0}, {"checkpoint_every": 0, "folder": "never_made"}, "samples from 1 up"),
        ({"nproc": 0}, lambda: {"runtime": Virtual(0)}, "1 or more 0"),
        ({"threads": 0}, lambda: {"runtime": Virtual(2, threads=0)}, "threads 1 or more 0"),
        ({"accumulate": 0}, lambda: {"runtime": InProcess(accumulate=0)}, "accumulate 1 or more 0"),
        (
            {"clock": "virtual", "churn": "leave:worker=7,seconds=4"},
            lambda: {"runtime": Virtual(1, churn=(Leave(7, 4.0),))},
            "worker 7",
        ),
        (
            {"nproc": 2, "speeds": "slow:worker=5,factor=2"},
            lambda: {"runtime": Processes(2, speeds=Slow(worker=5, factor=2.0))},
            "worker 5",
        ),
        ({"mode": "sync", "nproc": 1025}, lambda: {"runtime": asyncsgd.AllReduce(1025)}, "1025 1024"),
        (
            {"nproc": 2, "speeds": "infinite:0.5"},
            lambda: {"runtime": Processes(2, speeds=Infinite(0.5))},
            "infinite --clock virtual",
        ),
        ({"seconds": 1.0, "warmup": 0.25}, {"samples": None, "seconds": 1.0, "warmup": 0.25}, "0.25 share"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_both_doors(flags, python, words):
    with pytest.raises(UsageError) as typed:
        run_of("plane", task_flags(Plane).make(flags))
    with pytest.raises(UsageError) as called:
        asyncsgd.train(Plane(), quiet=True, **{"samples": 8, **(python() if callable(python) else python)})
    for refused in (typed, called):
        assert all(word in str(refused.value) for word in words.split())


def test_churn_may_be_given_in_any_order():
    unsorted = (Leave(1, 40.0), Leave(2, 5.0), Join(1, 50.0))
    seconds = []
    asyncsgd.train(
        Plane(),
        runtime=Virtual(3, churn=unsorted),
        samples=1600,
        quiet=True,
        report=lambda record: seconds.append(record.train_seconds),
    )
    assert seconds == sorted(seconds)
    assert Virtual(3, churn=unsorted).churn == (Leave(2, 5.0), Leave(1, 40.0), Join(1, 50.0))


@dataclasses.dataclass(frozen=True)
class OwnDefaults(Plane):
    defaults = asyncsgd.Defaults(learning_rate=0.02, schedule="cosine", warmup=0.25, weight_decay=0.1, clip_norm=2.0)


def by_flags(kind, **settings):
    """What a script trains the task with, where nobody says anything."""
    return vars(task_flags(kind).make({"samples": 8, **settings}).optimization)


def in_settings_of_train(kind, folder, **arguments):
    """What `train` trains the task with; the library's own tasks find no data, and are refused after it is written."""
    own = kind.__module__.startswith("asyncsgd")
    task = kind(**{"data_name": str(folder / "nowhere.txt")} if own else {})
    with pytest.raises(UsageError) if own else contextlib.nullcontext():
        asyncsgd.train(task, quiet=True, folder=folder / "run", device="cpu", **{"samples": 8, **arguments})
    settings = yaml.safe_load((folder / "run" / "settings.yaml").read_text())
    return settings


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (MaskedLM, (5e-4, "linear", 640, 0.01, 1.0)),
        (CausalLM, (5e-4, "linear", 640, 0.01, 1.0)),
        (TokenClassification, (5e-4, "linear", 640, 0.01, 1.0)),
        (QuestionAnswering, (5e-4, "linear", 640, 0.01, 1.0)),
        (Classification, (5e-4, "linear", 0.1, 0.01, 1.0)),
        (Plane, (1e-3, "constant", 0, 0.0, 0.0)),
        (OwnDefaults, (0.02, "cosine", 0.25, 0.1, 2.0)),
    ],
)
def test_a_task_is_trained_alike_through_both_doors(kind, defaults, tmp_path):
    names = ("learning_rate", "schedule", "warmup", "weight_decay", "clip_norm")
    ours, theirs = by_flags(kind), in_settings_of_train(kind, tmp_path)
    assert tuple(ours[name] for name in names) == tuple(theirs[name] for name in names) == defaults


def test_sgd_and_a_run_without_a_number_of_samples_have_the_same_defaults_through_both_doors(tmp_path):
    timed = {"samples": None, "seconds": 0.01}
    ours = by_flags(OwnDefaults, optimizer="sgd", warmup=0, **timed)
    theirs = in_settings_of_train(OwnDefaults, tmp_path, optimizer=asyncsgd.SGD(), **timed)
    for settings in (ours, theirs):
        assert (settings["learning_rate"], settings["schedule"], settings["warmup"]) == (0.1, "constant", 0)


def test_a_warmup_below_1_is_a_share_through_both_doors():
    schedule = run_of("plane", task_flags(Plane).make({"samples": 80, "warmup": "0.25"})).schedule
    assert schedule(10) == pytest.approx(0.5 * schedule(80))
    python = asyncsgd.train(Plane(), samples=80, warmup=0.25, quiet=True).summary["parameters_sha256"]
    assert python == asyncsgd.train(Plane(), samples=80, warmup=20, quiet=True).summary["parameters_sha256"]


def test_the_processes_of_torchrun_are_workers_of_mode_async(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    flags = task_flags(Plane)

    def adapted(*argv):
        job = adapt(flags.parse(argv, prog="", description="", examples=""), flags)[0].job
        return job.mode, job.nproc

    assert adapted() == ("async", 2)
    assert adapted("--mode", "sync") == ("sync", 2)
    with pytest.raises(UsageError, match="--accumulate 2 is for --mode single, got --mode async"):
        adapted("--accumulate", "2")
