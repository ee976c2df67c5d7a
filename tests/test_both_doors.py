"""What cannot be meant is refused alike by both doors: the flags of a task's script, and `asyncsgd.train`."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from test_api import Plane

import asyncsgd
from asyncsgd import InProcess, Processes, UsageError, Virtual
from asyncsgd.experiment import experiment_of
from asyncsgd.scripts.task import adapt
from asyncsgd.settings.finetuning import make_finetune_settings
from asyncsgd.settings.flags import flag_of
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.training import Settings, Steps, make_settings
from asyncsgd.simulation.churn import Join, Leave
from asyncsgd.simulation.speeds import Infinite, Slow
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification

Runtime = Callable[..., asyncsgd.InProcess | asyncsgd.Virtual | asyncsgd.Processes]


def refusal_of_flags(**settings: object) -> str:
    with pytest.raises(UsageError) as refused:
        experiment_of("plane", task_flags(Plane).make(settings))
    return str(refused.value)


def refusal_of_python(**arguments: Any) -> str:
    with pytest.raises(UsageError) as refused:
        asyncsgd.train(Plane(), quiet=True, **{"samples": 8, **arguments})
    return str(refused.value)


def in_python(message: str, setting: str, argument: str) -> str:
    flag = flag_of(setting)
    return message.replace(f"type e.g. {flag} ", f"give e.g. {argument}=").replace(flag, argument)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("samples", -1, "samples must be 0 or more, got -1; give e.g. samples=9600"),
        ("samples", True, "samples must be a whole number, got True"),
        ("seconds", -1.0, "seconds must be more than 0, got -1.0; give e.g. seconds=60"),
        ("seconds", float("nan"), "seconds must be a number, got nan"),
        ("evaluations", 0, "evaluations must be 1 or more, got 0; give e.g. evaluations=8"),
        ("patience", 0, "patience must be 1 or more, got 0; give e.g. patience=3"),
        ("learning_rate", -1.0, "learning_rate must be more than 0, got -1.0; give e.g. learning_rate=0.0005"),
        (
            "schedule",
            "lineal",
            "schedule must be one of constant, linear, cosine, got 'lineal'; did you mean 'linear'?",
        ),
        ("warmup", -100, "warmup must be 0 or more, got -100; give e.g. warmup=640"),
        ("weight_decay", -0.1, "weight_decay must be 0 or more, got -0.1; give e.g. weight_decay=0.01"),
        ("clip_norm", -1.0, "clip_norm must be 0 or more, got -1.0; give e.g. clip_norm=1.0"),
        ("seed", 2**32, "seed must be 0 or more and less than 4294967296, got 4294967296; give e.g. seed=0"),
        ("precision", "fp8", "precision must be one of fp32, bf16, fp16, got 'fp8'"),
        ("micro_batches", 0, "micro_batches must be 1 or more, got 0; give e.g. micro_batches=4"),
        ("prefetch", -1, "prefetch must be 0 or more, got -1; give e.g. prefetch=4"),
        ("compile", 1, "compile must be true or false, got 1"),
        ("checkpoint_seconds", 0.0, "checkpoint_seconds must be more than 0, got 0.0; give e.g. checkpoint_seconds=60"),
        ("keep", 0, "keep must be 1 or more, got 0; give e.g. keep=2"),
    ],
)
def test_a_value_out_of_bounds_is_refused_in_the_words_of_each_door(name: str, value: object, message: str) -> None:
    assert in_python(refusal_of_flags(**{name: value}), name, name) == message
    folder = {"folder": "never_made"} if name == "checkpoint_seconds" else {}
    assert refusal_of_python(**{name: value}, **folder) == message


def test_a_number_of_epochs_is_more_than_none() -> None:
    flags = refusal_of_flags(epochs=0.0)
    assert in_python(flags, "epochs", "epochs") == refusal_of_python(epochs=0, samples=None)


@pytest.mark.parametrize("name", ["checkpoint_every", "evaluate_every"])
def test_between_two_of_something_is_a_sample_at_least(name: str) -> None:
    assert f"{flag_of(name)} must be a number of samples from 1 up" in refusal_of_flags(**{name: 0})
    assert refusal_of_python(**{name: 0}, folder="never_made").startswith(f"{name} must be a number of samples from 1")


@pytest.mark.parametrize(
    ("setting", "argument", "runtime"),
    [
        ("nproc", "num_workers", Virtual),
        ("threads", "threads", lambda threads: Virtual(2, threads=threads)),
        ("accumulate", "accumulate", InProcess),
    ],
)
def test_a_runtime_of_nothing_is_refused_where_it_is_made(setting: str, argument: str, runtime: Runtime) -> None:
    with pytest.raises(UsageError) as refused:
        runtime(**{argument: 0})
    assert in_python(refusal_of_flags(**{setting: 0}), setting, argument) == str(refused.value)
    assert str(refused.value).startswith(f"{argument} must be 1 or more, got 0; give e.g. {argument}=")


@pytest.mark.parametrize(
    ("settings", "runtime", "message"),
    [
        (
            {"clock": "virtual", "nproc": 2, "churn": "leave:worker=7,seconds=4"},
            lambda: Virtual(2, churn=(Leave(7, 4.0),)),
            "churn: there is no worker 7; the workers are 0 to 1",
        ),
        (
            {"clock": "virtual", "nproc": 2, "churn": "leave:worker=1,seconds=4;leave:worker=1,seconds=2"},
            lambda: Virtual(2, churn=(Leave(1, 4.0), Leave(1, 2.0))),
            "churn: worker 1 has left at 2 already; leaving and joining take turns",
        ),
        (
            {"nproc": 2, "speeds": "slow:worker=5,factor=2"},
            lambda: Processes(2, speeds=Slow(worker=5, factor=2.0)),
            "there is no worker 5",
        ),
        (
            {"mode": "sync", "nproc": 1025},
            lambda: asyncsgd.AllReduce(1025),
            "--nproc 1025 would be as many processes; type --nproc 1024 or less, or --mode async --clock virtual",
        ),
        (
            {"nproc": 2, "speeds": "infinite:0.5"},
            lambda: Processes(2, speeds=Infinite(0.5)),
            "--speeds infinite is for --clock virtual: a run whose real worker never answers would never end",
        ),
    ],
)
def test_workers_and_speeds_that_cannot_be_are_refused(
    settings: dict[str, object], runtime: Callable[[], asyncsgd.Virtual], message: str
) -> None:
    def python() -> None:
        asyncsgd.train(Plane(), runtime=runtime(), samples=8, quiet=True)

    with pytest.raises(UsageError) as refused:
        python()
    assert refusal_of_flags(**settings) == str(refused.value)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "runtime"),
    [
        ({"mode": "async", "transport": "shared_memory"}, lambda: asyncsgd.Processes(1, via="shared_memory")),
        ({"mode": "hogwild"}, lambda: asyncsgd.Hogwild(1)),
    ],
)
def test_shared_memory_is_refused_on_processors_that_reorder_stores(
    settings: dict[str, object], runtime: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UsageError, match="needs an x86 processor") as refused:
        runtime()
    assert refusal_of_flags(**settings) == str(refused.value)


def test_hogwild_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = refusal_of_python(runtime=asyncsgd.Hogwild(2))
    assert message.startswith("--mode hogwild needs --device cpu")
    assert refusal_of_flags(mode="hogwild", nproc=2) == message


def test_churn_may_be_given_in_any_order() -> None:
    unsorted = (Leave(1, 40.0), Leave(2, 5.0), Join(1, 50.0))
    seconds: list[float] = []
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


def by_flags(kind: type[asyncsgd.Task], **settings: object) -> dict[str, object]:
    """What a script trains the task with, where nobody says anything."""
    return vars(task_flags(kind).make({"samples": 8, **settings}).optimization)


def in_settings_of_train(kind: type[asyncsgd.Task], folder: Path, **arguments: Any) -> dict[str, Any]:
    """What `train` trains the task with; the library's own tasks find no data, and are refused after it is written."""
    own = kind.__module__.startswith("asyncsgd")
    task = kind(**{"data_name": str(folder / "nowhere.txt")} if own else {})
    with pytest.raises(UsageError) if own else contextlib.nullcontext():
        asyncsgd.train(task, quiet=True, folder=folder / "run", device="cpu", **{"samples": 8, **arguments})
    settings: dict[str, Any] = yaml.safe_load((folder / "run" / "settings.yaml").read_text())
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
def test_a_task_is_trained_alike_through_both_doors(
    kind: type[asyncsgd.Task], defaults: tuple[object, ...], tmp_path: Path
) -> None:
    names = ("learning_rate", "schedule", "warmup", "weight_decay", "clip_norm")
    ours, theirs = by_flags(kind), in_settings_of_train(kind, tmp_path)
    assert tuple(ours[name] for name in names) == tuple(theirs[name] for name in names) == defaults


def test_stilt_mlm_and_stilt_finetune_have_the_defaults_of_their_tasks() -> None:
    assert vars(Settings().optimization) == by_flags(MaskedLM)
    tuning = vars(make_finetune_settings({"init_from": "tiny"}).tuning)
    assert {name: tuning[name] for name in vars(Steps())} == by_flags(Classification)


def test_sgd_and_a_run_without_a_number_of_samples_have_the_same_defaults_through_both_doors(tmp_path: Path) -> None:
    timed: dict[str, Any] = {"samples": None, "seconds": 0.01}
    ours = by_flags(OwnDefaults, optimizer="sgd", warmup=0, **timed)
    theirs = in_settings_of_train(OwnDefaults, tmp_path, optimizer=asyncsgd.SGD(), **timed)
    for settings in (ours, theirs):
        assert (settings["learning_rate"], settings["schedule"], settings["warmup"]) == (0.1, "constant", 0)


def test_a_warmup_below_1_is_a_share_through_both_doors() -> None:
    course = experiment_of("plane", task_flags(Plane).make({"samples": 80, "warmup": "0.25"})).course(Plane())
    assert course.schedule(10) == pytest.approx(0.5 * course.schedule(80))
    python = asyncsgd.train(Plane(), samples=80, warmup=0.25, quiet=True).summary["parameters_sha256"]
    assert python == asyncsgd.train(Plane(), samples=80, warmup=20, quiet=True).summary["parameters_sha256"]
    message = refusal_of_python(samples=None, seconds=1.0, warmup=0.25)
    assert message.startswith("warmup=0.25 is a share of the samples, and there is no number of them")
    assert refusal_of_flags(seconds=1.0, warmup=0.25).startswith("--warmup 0.25 is a share of the samples")


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({}, "single"),
        ({"nproc": 2}, "async"),
        ({"clock": "virtual"}, "async"),
        ({"rule": "ringmaster:threshold=2"}, "async"),
        ({"nproc": 2, "mode": "sync"}, "sync"),
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda given: make_settings(given),
        lambda given: make_finetune_settings({"init_from": "tiny", **given}),
        lambda given: task_flags(Plane).make(given),
    ],
)
def test_every_script_has_one_default_of_its_mode(make: Callable[..., Any], given: Any, mode: str) -> None:
    assert make(given).job.mode == mode


def test_the_processes_of_torchrun_are_workers_of_mode_async(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29400")
    flags = task_flags(Plane)

    def adapted(*argv: str) -> tuple[str, int]:
        job = adapt(flags.parse(argv, prog="", description="", examples=""), flags)[0].job
        return job.mode, job.nproc

    assert adapted() == ("async", 2)
    assert adapted("--mode", "sync") == ("sync", 2)
    with pytest.raises(UsageError, match="--accumulate is for --mode single, got --mode async"):
        adapted("--accumulate", "2")
