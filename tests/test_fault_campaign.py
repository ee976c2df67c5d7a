"""The campaign of faults: its plan, what it promises, and how it reads a log that was torn."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import fault_trials
import pytest
from campaign import read_lines
from fault_trials import CONSOLE, FILE, PYTHON, SEVERAL, TERMINAL, TORCHRUN_ONE, TORCHRUN_RANKS

from asyncsgd.records.events import DONE, FAILED, INTERRUPTED


def test_a_seed_and_a_number_say_what_a_trial_does() -> None:
    assert fault_trials.plan(60, 0) == fault_trials.plan(60, 0)
    assert fault_trials.plan(60, 0)[:17] == fault_trials.plan(17, 0)
    assert fault_trials.plan(60, 0) != fault_trials.plan(60, 1)


@pytest.mark.parametrize("seed", [0, 1])
def test_sixty_trials_have_every_fault_in_every_mode_and_all_else_that_is_drawn(seed: int) -> None:
    trials = fault_trials.plan(60, seed)
    assert [trial.number for trial in trials] == list(range(60))
    pairs = itertools.product(fault_trials.FAULTS, fault_trials.MODES)
    assert {(trial.fault, trial.mode) for trial in trials} == set(pairs)
    assert {trial.moment for trial in trials} == set(fault_trials.MOMENTS)
    assert {trial.target for trial in trials} == {"leader", "worker", "group", "agent"}
    assert {trial.launcher for trial in trials} == {PYTHON, TORCHRUN_ONE, TORCHRUN_RANKS}
    assert {trial.transport for trial in trials if trial.mode == "async"} == {"shared_memory", "process_group"}
    assert {trial.rule for trial in trials if trial.mode == "async"} == set(fault_trials.RULES)
    assert {trial.console for trial in trials} == {FILE, TERMINAL, *fault_trials.LOST_CONSOLES}
    several = [trial for trial in trials if trial.fault == SEVERAL]
    assert {len(trial.stops) for trial in several} == {2, 3}
    assert {each for trial in several for each in trial.stops} == set(fault_trials.STOPS)
    assert {trial.gap_seconds is None for trial in several} == {True, False}  # None: while the model is saved


def test_no_trial_asks_for_what_there_is_not() -> None:
    for trial in fault_trials.plan(500, 2):
        assert 0 <= trial.share < 1
        if trial.mode in ("single", "virtual"):  # one process, without workers
            assert trial.target != "worker"
            assert trial.launcher != TORCHRUN_RANKS
        if trial.target == "agent":
            assert trial.launcher != PYTHON
        if trial.fault == "SIGSTOP":
            assert trial.gap_seconds is not None
            assert 0.5 <= trial.gap_seconds <= 3
        if trial.console != FILE:  # a closed terminal is a SIGHUP to all that was started in it
            assert trial.fault == CONSOLE or (trial.stops[0], trial.target) == ("SIGHUP", "group")


def test_the_promises_are_those_of_the_documentation() -> None:
    trial = dataclasses.replace(fault_trials.plan(1, 0)[0], fault="SIGKILL", target="worker", launcher="python")
    for changed, promised in (
        ({"mode": "async"}, ({DONE}, 0)),
        ({"mode": "hogwild"}, ({DONE}, 0)),
        ({"mode": "sync"}, ({FAILED}, 1)),
        ({"mode": "sync", "fault": "SIGTERM"}, ({DONE}, 0)),  # workers leave it to the leader
        ({"mode": "sync", "launcher": TORCHRUN_RANKS}, ({DONE, FAILED, INTERRUPTED}, None)),
        ({"mode": "single", "target": "leader", "fault": "SIGTERM"}, ({INTERRUPTED}, 130)),
        ({"mode": "async", "target": "group", "fault": "SIGHUP"}, ({INTERRUPTED}, 130)),
        ({"mode": "async", "target": "group", "fault": SEVERAL}, ({INTERRUPTED}, 130)),
        ({"mode": "async", "target": "group", "fault": CONSOLE}, ({DONE}, 0)),
        ({"target": "group", "fault": "SIGINT", "launcher": TORCHRUN_ONE}, ({INTERRUPTED}, None)),
        ({"target": "leader"}, ({None, DONE, FAILED, INTERRUPTED}, None)),
        ({"target": "leader", "fault": "SIGSTOP"}, ({DONE}, 0)),
    ):
        assert fault_trials.promised(dataclasses.replace(trial, **changed)) == promised, changed


def test_a_line_without_its_end_is_damaged_though_it_is_json(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    assert read_lines(log) == ([], [])
    log.write_text('{"a":1}\n{"b":\n{"c":3}')
    assert read_lines(log) == ([{"a": 1}], [-2, -1])
