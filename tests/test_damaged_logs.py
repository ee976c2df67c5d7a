"""A replay of any log whatever ends in one of three ways: identical, different, or refused with a message."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Train

from replay import main as replay
from simulate import main as simulate

RUNS = tempfile.TemporaryDirectory()
"""Removed when the tests' process ends; the runs are shared by all tests of this module."""

RULES = (
    "asynchronous",
    "synchronous",
    "ringmaster:threshold=2,stops=true",
    "fedbuff:buffer=2,num_local_steps=2",
    "fixed_delay:delay=2",
    "rennala:batch=3",
    "k_sync:quorum=2",
    "ssp:slack=1",
    "dana",
    "ringleader",
    "rescaled",
    "downpour:n_push=1,n_fetch=2",
    "async_local_sgd:dynamic=true",
)


@functools.cache
def recorded(rule: str) -> tuple[Path, tuple[str, ...]]:
    """A run of three workers, and the lines of its log."""
    parent = Path(tempfile.mkdtemp(dir=RUNS.name))
    arguments = [
        "--rule",
        rule,
        "--workers",
        "3",
        "--samples",
        "24",
        "--problem",
        "heterogeneous",
        "--evaluations",
        "3",
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        assert simulate([*arguments, "--runs-dir", str(parent)]) == 0
    (folder,) = parent.iterdir()
    return folder, tuple((folder / "events.jsonl").read_text().splitlines(keepends=True))


def answer(folder: Path, log: str, *arguments: str) -> tuple[int, str, str]:
    """Replay `folder` with `log` as its log: exit code, output and errors."""
    (folder / "events.jsonl").write_text(log)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        code = replay([str(folder), *arguments])
    return code, out.getvalue(), errors.getvalue()


def assert_one_of_three(folder: Path, code: int, out: str, errors: str) -> None:
    digest = json.loads((folder / "summary.json").read_text())["parameters_sha256"]
    if code == 0:
        assert f"recorded   {digest}\nreplayed   {digest}\nidentical\n" in out
    elif code == 1:
        assert "different  " in out
        assert "the runs part at update " in out
        assert "identical" not in out
    else:
        assert code == 2
        assert errors.startswith("error: ")
        assert errors.count("\n") == 1
        assert not out


ABSURD = st.sampled_from(
    [
        -1,
        10**9,
        2**63 - 1,
        10**30,
        1e308,
        -1.0,
        5e-324,
        1e400,
        float("nan"),
        None,
        True,
        "",
        "x",
        [],
        [[]],
        {},
        [-1, 0, 1],
    ]
)
VALUES = st.integers(0, 30) | st.sampled_from([0.5, 1.0, "applied", "held", "dropped", "join", "leave"]) | ABSURD


def places_in(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to everything inside nested lists and objects."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (key,)
        if isinstance(item, list | dict):
            yield from ((key, *rest) for rest in places_in(item))


def change(draw: st.DrawFn, record: dict[str, Any]) -> None:
    """Give one field, at any depth, another value, or take it away."""
    *outer, last = draw(st.sampled_from(list(places_in(record))))
    inner: Any = record
    for key in outer:
        inner = inner[key]
    if draw(st.integers(0, 4)) == 0:
        del inner[last]
    elif isinstance(inner[last], int | float) and draw(st.booleans()):
        inner[last] += draw(st.sampled_from([-1, 1, 1e-9]))
    else:
        inner[last] = draw(VALUES)


@st.composite
def damaged(draw: st.DrawFn, log: tuple[str, ...]) -> str:
    """The log after one to three edits."""
    lines = list(log)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        edit = draw(st.sampled_from(["swap", "double", "delete", "change", "change", "change", "replace", "move"]))
        if edit == "swap":
            other = draw(st.integers(0, len(lines) - 1))
            lines[at], lines[other] = lines[other], lines[at]
        elif edit == "double":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif edit == "delete" and len(lines) > 1:
            del lines[at]
        elif edit == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif edit == "replace":
            lines[at] = json.dumps(draw(ABSURD | st.just({"kind": "arrival"}) | st.just({"worker": 0}))) + "\n"
        elif isinstance(record := json.loads(lines[at]), dict) and record:
            change(draw, record)
            lines[at] = json.dumps(record) + "\n"
    text = "".join(lines)
    return text[: draw(st.integers(0, len(text)))] if draw(st.integers(0, 4)) == 0 else text


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=60)
@given(data=st.data())
def test_any_log_gets_one_of_three_answers(rule: str, data: st.DataObject) -> None:
    folder, log = recorded(rule)
    assert_one_of_three(folder, *answer(folder, data.draw(damaged(log))))


@pytest.mark.parametrize("rule", RULES)
def test_a_log_without_its_last_arrivals_is_never_identical(rule: str) -> None:
    folder, log = recorded(rule)
    kinds = [json.loads(line)["kind"] for line in log]
    last = max(number for number, kind in enumerate(kinds) if kind == "arrival")
    for end in range(last + 1):
        code, out, errors = answer(folder, "".join(log[:end]))
        assert code == 1, errors
        assert_one_of_three(folder, code, out, errors)
    assert answer(folder, "".join(log[: last + 1]))[0] == 0


def test_a_log_with_keys_and_kinds_of_another_version_is_identical() -> None:
    folder, log = recorded("asynchronous")
    records = [json.loads(line) | {"newer": [1, {"key": None}]} for line in log]
    records.insert(5, {"kind": "newer"})
    for record in records:
        record.pop("total_samples", None)
        record.pop("outcome", None)
    assert answer(folder, "\n".join(map(json.dumps, records)))[0] == 0


def test_a_worker_lost_in_the_last_evaluation_changes_nothing() -> None:
    """It is recorded as a `leave` of which the rule was not told: under `synchronous` it would step."""
    parent = Path(tempfile.mkdtemp(dir=RUNS.name))
    words = ["--rule", "synchronous", "--workers", "3", "--speeds", "slow:worker=0,factor=3", "--budget-seconds", "5.5"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert simulate([*words, "--runs-dir", str(parent)]) == 0
    (folder,) = parent.iterdir()
    log = (folder / "events.jsonl").read_text()
    last = json.loads(log.splitlines()[-1])
    leave = {"kind": "leave", "worker": 0, "reason": "lost", "uses": [], "started": [], "drops": [], "abandoned": []}
    leave |= {name: last[name] for name in ("version", "total_samples", "train_seconds")}
    assert answer(folder, log + json.dumps(leave) + "\n")[0] == 0


def edited(rule: str, number: int, **fields: Any) -> tuple[Path, str, int]:
    """A run's folder, its log with other values in one of its arrivals, and that arrival's line."""
    folder, log = recorded(rule)
    lines = list(log)
    at = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"][number]
    record = json.loads(lines[at]) | fields
    lines[at] = json.dumps({name: value for name, value in record.items() if value != "removed"}) + "\n"
    return folder, "".join(lines), at + 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"read_version": "removed"}, "there is no read_version, it must be a whole number from 0 up"),
        ({"read_version": -3}, "read_version is -3, it must be a whole number from 0 up"),
        ({"worker": True}, "worker is True, it must be a whole number from 0 up"),
        ({"dispatch": 2.0}, "dispatch is 2.0, it must be a whole number from 0 up"),
        ({"version": 2**63}, "version is 9223372036854775808, it must be a whole number from 0 up"),
        ({"loss": float("nan")}, "loss is nan, it must be a finite number"),
        ({"loss": "low"}, "loss is 'low', it must be a finite number"),
        ({"flight_seconds": -1.0}, "flight_seconds is -1.0, it must be 0 or a number from 1e-300 up"),
        ({"batches": [[0, 1]]}, "batches is a list, it must be a list of ranges: stream, first, after last"),
        ({"started": [[0, 1, []], 5]}, "started is a list, it must be a list of starts"),
        ({"uses": [[1, 0, 0]]}, "uses is a list, it must be a list of pairs: dispatch, delay"),
        ({"kind": None}, "kind is None, it must be a text"),
    ],
    ids=str,
)
def test_a_field_that_no_run_writes_is_refused_with_its_line(fields: dict[str, Any], message: str) -> None:
    folder, log, line = edited("asynchronous", 4, **fields)
    code, out, errors = answer(folder, log)
    assert (code, out) == (2, "")
    assert errors.startswith(f"error: events.jsonl, line {line}: {message}")
    assert errors.endswith("; give the log as the run wrote it\n")


@pytest.mark.parametrize(
    ("rule", "fields", "message"),
    [
        (
            "asynchronous",
            {"read_version": 9},
            "arrives now, but the log says that it has read version 9",
        ),
        ("asynchronous", {"dispatch": 23}, "dispatch 23 of worker 1 arrives, which is not in flight"),
        ("asynchronous", {"worker": 7}, "of worker 7 arrives, which is not in flight"),
        (
            "asynchronous",
            {"started": [[1, 9, [[1, 0, 1]], None]]},
            "gets batches ((1, 1, 2),), the log has ((1, 0, 1),)",
        ),
        ("asynchronous", {"started": [[2, 9, [[2, 0, 1]], None]]}, "dispatch 9 of worker 2 was not started here"),
        ("asynchronous", {"total_samples": 2}, "5 samples have arrived, the log has 2"),
        ("asynchronous", {"weight": 2.0}, "the weight of dispatch"),
        (
            "fedbuff:buffer=2,num_local_steps=2",
            {"batches": [[0, 0, 2**62]]},
            "the log has ((0, 0, 4611686018427387904),)",
        ),
    ],
    ids=str,
)
def test_a_record_that_cannot_follow_is_a_difference(rule: str, fields: dict[str, Any], message: str) -> None:
    folder, log, _ = edited(rule, 4, **fields)
    code, out, errors = answer(folder, log)
    assert_one_of_three(folder, code, out, errors)
    assert code == 1
    assert message in out


@pytest.mark.parametrize("worker", [1, 3])
def test_a_worker_that_cannot_join_is_a_difference(worker: int) -> None:
    folder, log = recorded("asynchronous")
    join = {"kind": "join", "worker": worker, "version": 0, "total_samples": 0, "started": []}
    at = next(i for i, line in enumerate(log) if json.loads(line)["kind"] == "arrival")
    code, out, errors = answer(folder, "".join([*log[:at], json.dumps(join) + "\n", *log[at:]]))
    assert_one_of_three(folder, code, out, errors)
    assert f"worker {worker} joins, " in out


@pytest.mark.processes
def test_a_damaged_log_of_a_trained_model_gets_one_of_three_answers(train: Train, tmp_path: Path) -> None:
    run = train(mode="async", nproc=3)
    shutil.copytree(run.path, tmp_path / "run")
    lines = (run.path / "events.jsonl").read_text().splitlines(keepends=True)
    cache = ("--cache-dir", str(run.settings.data.cache_dir))
    arrivals = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "arrival"]
    middle = json.loads(lines[arrivals[9]])
    huge = {"batches": [[0, 2**62, 2**63 - 1]]}
    logs = {
        "whole": (0, lines),
        "cut": (1, lines[: arrivals[-1]]),
        "swapped": (1, [*lines[: arrivals[3]], lines[arrivals[4]], lines[arrivals[3]], *lines[arrivals[4] + 1 :]]),
        "doubled": (1, [*lines[: arrivals[9]], lines[arrivals[9]], *lines[arrivals[9] :]]),
        "version to come": (1, [*lines[: arrivals[9]], json.dumps(middle | {"read_version": 15}) + "\n"]),
        "huge range": (1, [*lines[: arrivals[9]], json.dumps(middle | huge) + "\n"]),
        "no number": (2, [*lines[: arrivals[9]], json.dumps(middle | {"version": None}) + "\n"]),
        "no record": (2, ["{}\n", *lines]),
    }
    for name, (code, damaged_lines) in logs.items():
        replayed = answer(tmp_path / "run", "".join(damaged_lines), *cache)
        assert replayed[0] == code, (name, replayed)
        assert_one_of_three(tmp_path / "run", *replayed)
