"""The campaign of kills: its plan, and what it takes for a broken promise."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import resume
from damages import DAMAGES, FOREIGN, Damage, descriptions, foreign_files, go_on, learning_rate, one_bit
from test_faults import needs_proc
from test_resume import sha256, train, wait_for_checkpoint

from asyncsgd import UsageError
from asyncsgd.checkpoints import find
from asyncsgd.records.events import DONE


def arrival(first: int, total: int, num_samples: int = 2, **others: Any) -> dict[str, Any]:
    """The record of one batch of stream 0."""
    batches = [[0, first, first + 1]]
    return {"kind": "arrival", "batches": batches, "num_samples": num_samples, "total_samples": total, **others}


def went_on(discarded: int) -> dict[str, Any]:
    return {"kind": "resume", "discarded": discarded}


def test_a_seed_and_a_number_say_what_a_trial_does() -> None:
    assert resume.plan(40, 0) == resume.plan(40, 0)
    assert resume.plan(40, 0)[:17] == resume.plan(17, 0)
    assert resume.plan(40, 0) != resume.plan(40, 1)


def test_forty_trials_have_every_case_and_all_else_that_is_drawn() -> None:
    trials = resume.plan(40, 0)
    assert [trial.number for trial in trials] == list(range(40))
    for block in range(0, 36, 6):
        assert {trial.case for trial in trials[block : block + 6]} == set(resume.CASES)
    assert {trial.rule for trial in trials if trial.case == "async"} == set(resume.RULES)
    assert {trial.rule for trial in trials if trial.case != "async"} == {""}
    assert {trial.by_command for trial in trials if trial.case != "sweep"} == {True, False}
    assert {kill.trains for trial in trials for kill in trial.kills} == {True, False}
    assert {len(trial.kills) for trial in trials} >= {1, 2, 3}
    damaged = [trial for trial in trials if trial.damage]
    assert len(damaged) == 15
    assert {trial.damage for trial in damaged} == {*DAMAGES}
    assert {trial.case for trial in damaged} == {*resume.CASES} - {"sweep"}
    assert all(kill.trains and kill.share >= 0.4 for trial in damaged for kill in trial.kills)
    assert all(0 <= each < 1 for trial in trials for kill in trial.kills for each in (kill.share, kill.later))


def test_every_batch_arrives_once_and_the_budget_is_spent_exactly() -> None:
    whole = [arrival(1, 2), {"kind": "leave"}, arrival(0, 4), arrival(2, 6)]
    assert resume.wrongly_used(whole, 6) == []
    assert resume.wrongly_used(whole, 8) == ["6 samples arrived, counted as [6], of 8"]
    assert resume.wrongly_used([arrival(0, 2), arrival(0, 4)], 4) == ["batch 0 of stream 0 arrived twice"]
    others = {**arrival(0, 4), "batches": [[1, 0, 1]]}
    assert resume.wrongly_used([arrival(0, 2), others], 4) == []  # of another stream
    assert resume.wrongly_used([arrival(0, 2), arrival(1, 2)], 4) != []  # the second is not counted
    assert resume.wrongly_used([], 4) == ["0 samples arrived, counted as [], of 4"]


def test_what_is_discarded_is_counted_by_the_run_that_goes_on() -> None:
    lost, more = [arrival(3, 8), arrival(4, 10)], [went_on(2), arrival(3, 8)]
    assert resume.wrongly_discarded([went_on(2)], [lost]) == []
    assert resume.wrongly_discarded([went_on(0)], []) == []
    assert resume.wrongly_discarded([went_on(1)], [lost, more]) == []  # the first record was discarded with more
    assert resume.wrongly_discarded([went_on(3)], [lost, more[1:]]) == []  # killed before it could say that it went on
    wrong = "resume records count {} discarded arrivals, the files hold {}"
    assert resume.wrongly_discarded([went_on(1)], [lost]) == [wrong.format(1, 2)]
    assert resume.wrongly_discarded([went_on(2)], []) == [wrong.format(2, 0)]


def test_records_are_compared_but_for_checkpoints_and_measured_seconds() -> None:
    one = [arrival(0, 2, train_seconds=1.0, apply_seconds=0.1), {"kind": "checkpoint"}, went_on(0), arrival(1, 4)]
    other = [arrival(0, 2, train_seconds=2.0, apply_seconds=0.2), arrival(1, 4)]
    measured = [resume.comparable(records, virtual=False) for records in (one, other)]
    assert resume.first_difference(*measured) == ""
    virtual = [resume.comparable(records, virtual=True) for records in (one, other)]
    assert resume.first_difference(*virtual).startswith("record 0 is ")
    assert resume.first_difference(measured[0], measured[1][:1]).endswith("without a stop None")


def test_the_table_counts_what_was_done_and_what_was_kept() -> None:
    result = {"kills": 2, "damaged": 1, "resumes": 3, "anew": 0, "discarded": 14, "wrong": []}
    lines = resume.table([{"case": "sync", **result}, {"case": "sync", **result, "wrong": ["late"]}]).splitlines()
    assert lines[0].split() == ["trials", "kills", "damaged", "resumes", "anew", "discarded", "kept"]
    assert lines[1 + resume.CASES.index("sync")].split() == ["sync", "2", "4", "2", "6", "0", "28", "1/2"]
    assert lines[1 + resume.CASES.index("async")].split() == ["async", "0", "0", "0", "0", "0", "0", "0/0"]


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was stopped when it had four checkpoints."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(folder, stop_at=150, checkpoint_every=48, also=wait_for_checkpoint, keep=9)
    assert len(descriptions(folder)) == 4
    return folder


@pytest.fixture(scope="module")
def sha256_of_the_unbroken(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    train(folder)
    return sha256(folder)


def going_on(run: Path) -> tuple[int, str]:
    """As a command does it."""
    try:
        (run / "console.log").write_text("\n".join(find(run).notes))
        return int(train(run, resume=True).status != DONE), ""
    except UsageError as error:
        (run / "console.log").unlink()
        return 2, f"error: {error}\n"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_keeps_every_promise(
    damage: Damage, stopped_once: Path, sha256_of_the_unbroken: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_once, run)
    assert go_on(run, damage, 7, lambda: going_on(run)) == (0, [])
    assert sha256(run) == sha256_of_the_unbroken


TWO_LINES = "two\nlines, of learning_rate"


@pytest.mark.parametrize(
    ("damage", "broken"),
    [
        (one_bit, ["does not name {newest}"]),
        (
            learning_rate,
            [f"exit code 1, promised 2 and one line: {TWO_LINES}", "a refused resume has changed the folder"],
        ),
        (foreign_files, [f"checkpoints/{name} was changed" for name in FOREIGN]),
    ],
)
def test_a_promise_that_a_damaged_run_breaks_is_told(
    damage: Damage, broken: list[str], stopped_once: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(stopped_once, run)
    newest = descriptions(run)[0].stem

    def changes_everything() -> tuple[int, str]:
        for path in [*filter(Path.is_file, run.rglob("*")), run / "console.log"]:
            path.write_text("changed")
        return 1, TWO_LINES

    code, wrong = go_on(run, damage, 0, changes_everything)
    assert code == 1
    assert sorted(wrong) == sorted(each.format(newest=newest) for each in broken)


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
def test_a_killed_run_goes_on_as_promised(tmp_path: Path) -> None:
    trial = resume.Trial(0, "single", "", (resume.Kill(True, 0.6, 0.5),), by_command=False)
    result = resume.try_once(trial, resume.Lab(tmp_path, [trial.case]))
    assert result["wrong"] == []
    assert (result["kills"], result["resumes"], result["anew"]) == (1, 1, 0)
