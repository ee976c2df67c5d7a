"""What cannot be meant is refused alike by both doors: the flags of a task's script, and `asyncsgd.train`."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_api import Plane

import asyncsgd
from asyncsgd import InProcess, Processes, UsageError, Virtual
from asyncsgd.experiment import experiment_of
from asyncsgd.settings.flags import flag_of
from asyncsgd.settings.task import task_flags
from asyncsgd.simulation.churn import Join, Leave
from asyncsgd.simulation.speeds import Infinite, Slow

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
        ({"transport": "shared_memory"}, lambda: asyncsgd.Processes(1, via="shared_memory")),
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
