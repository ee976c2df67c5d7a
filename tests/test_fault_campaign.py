"""The campaign of faults: its plan, what it promises, and how it reads a log that was torn."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from pathlib import Path
from types import ModuleType

import pytest

from asyncsgd.records.events import DONE, FAILED, INTERRUPTED

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "benchmarks" / "faults.py"


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("faults", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_a_seed_and_a_number_say_what_a_trial_does(faults: ModuleType) -> None:
    assert faults.plan(60, 0) == faults.plan(60, 0)
    assert faults.plan(60, 0)[:17] == faults.plan(17, 0)
    assert faults.plan(60, 0) != faults.plan(60, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_sixty_trials_have_every_fault_in_every_mode_and_all_else_that_is_drawn(faults: ModuleType, seed: int) -> None:
    trials = faults.plan(60, seed)
    assert [trial.number for trial in trials] == list(range(60))
    assert {(trial.fault, trial.mode) for trial in trials} == set(itertools.product(faults.FAULTS, faults.MODES))
    assert {trial.moment for trial in trials} == set(faults.MOMENTS)
    assert {trial.target for trial in trials} == {"leader", "worker", "group", "agent"}
    assert {trial.launcher for trial in trials} == {faults.PYTHON, faults.TORCHRUN_ONE, faults.TORCHRUN_RANKS}
    assert {trial.transport for trial in trials if trial.mode == "async"} == {"shared_memory", "process_group"}
    assert {trial.rule for trial in trials if trial.mode == "async"} == set(faults.RULES)


def test_no_trial_asks_for_what_there_is_not(faults: ModuleType) -> None:
    for trial in faults.plan(500, 2):
        assert 0 <= trial.share < 1
        if trial.mode in ("single", "virtual"):  # one process, without workers
            assert trial.target != "worker"
            assert trial.launcher != faults.TORCHRUN_RANKS
        if trial.target == "agent":
            assert trial.launcher != faults.PYTHON
        if trial.fault == "SIGSTOP":
            assert 0.5 <= trial.gap_seconds <= 3


def test_the_promises_are_those_of_the_documentation(faults: ModuleType) -> None:
    trial = dataclasses.replace(faults.plan(1, 0)[0], fault="SIGKILL", target="worker", launcher="python")
    for changed, promised in (
        ({"mode": "async"}, ({DONE}, 0)),
        ({"mode": "hogwild"}, ({DONE}, 0)),
        ({"mode": "sync"}, ({FAILED}, 1)),
        ({"mode": "sync", "fault": "SIGTERM"}, ({DONE}, 0)),  # workers leave it to the leader
        ({"mode": "sync", "launcher": faults.TORCHRUN_RANKS}, ({DONE, FAILED, INTERRUPTED}, None)),
        ({"mode": "single", "target": "leader", "fault": "SIGTERM"}, ({INTERRUPTED}, 130)),
        ({"mode": "async", "target": "group", "fault": "SIGINT twice"}, ({INTERRUPTED}, 130)),
        ({"target": "group", "fault": "SIGINT", "launcher": faults.TORCHRUN_ONE}, ({INTERRUPTED}, None)),
        ({"target": "leader"}, ({None, DONE, FAILED, INTERRUPTED}, None)),
        ({"target": "leader", "fault": "SIGSTOP"}, ({DONE}, 0)),
    ):
        assert faults.promised(dataclasses.replace(trial, **changed)) == promised, changed


def test_a_line_without_its_end_is_damaged_though_it_is_json(faults: ModuleType, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert faults.read_lines(log) == ([], [])
    log.write_text('{"a":1}\n{"b":\n{"c":3}')
    assert faults.read_lines(log) == ([{"a": 1}], [-2, -1])
