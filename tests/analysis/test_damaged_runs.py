"""Damaged runs in a folder are named and left out, and the others are compared as without them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from synthetic import SyntheticArm, straight, write_run

from analysis import compare, lab_notes, watch
from analysis.study.read import load_study
from analysis.study.run import load_runs

ONE, OTHER = SyntheticArm("async"), SyntheticArm("sync")
DEEP = "[" * 100_000


def study(folder: Path) -> Path:
    for arm in (ONE, OTHER):
        for seed in range(3):
            write_run(folder / f"{arm.name}-s{seed}", arm, straight(4.0, 2.0 + 0.1 * seed, seconds=8.0), seed=seed)
    return folder


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes))


KEYS = (
    "mode",
    "experiment",
    "task",
    "rule",
    "speeds",
    "clock",
    "data_fingerprint",
    "seed",
    "status",
    "schema",
)
DAMAGE: dict[str, Callable[[Path], object]] = {
    **{f"{key} {value}": lambda path, k=key, v=value: edit(path, **{k: v}) for key in KEYS for value in ({}, [[1]])},
    **{f"text {text[:5]}": lambda path, t=text: path.write_text(t) for text in (DEEP, '{"a":' * 100_000, "", "[]")},
}


@pytest.mark.parametrize("file", ["summary.json", "environment.json", "events.jsonl", "settings.yaml", "usage.jsonl"])
def test_a_file_that_is_nested_too_deeply_is_told_and_hides_no_other_run(file: str, tmp_path: Path) -> None:
    good = study(tmp_path)
    (good / f"{ONE.name}-s0" / file).write_text(DEEP + "\n")
    runs, _ = load_runs(good)
    assert len([run for run in runs if run.done and not run.problems]) >= 5
    assert load_study(good).runs


def test_every_damaged_summary_is_told_and_the_good_runs_are_as_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = study(tmp_path)
    good, _ = load_runs(folder)
    for number, damage in enumerate(DAMAGE.values()):
        path = folder / f"damaged-{number}"
        write_run(path, ONE, straight(4.0, 2.0, seconds=8.0), seed=50 + number)
        damage(path / "summary.json")
    runs, messages = load_runs(folder)
    damaged = {run.name for run in runs if run.problems}
    assert damaged == {f"damaged-{number}" for number in range(len(DAMAGE))}
    assert {message.partition(":")[0] for message in messages} == damaged
    assert [run.summary for run in runs if not run.problems] == [run.summary for run in good]
    assert load_study(folder).runs
    for command in (compare, lab_notes):
        assert command.main([str(folder)]) in (0, 2)
        assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_whose_summary_is_damaged_is_watched_or_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", ONE, straight(4.0, 2.0, seconds=8.0), seed=0)
    DAMAGE[name](tmp_path / "a" / "summary.json")
    assert watch.main([str(tmp_path / "a"), "--once"]) in (0, 2)
