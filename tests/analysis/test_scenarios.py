"""Studies in which a verdict could mislead: the verdict, its reason, and the words (tests/analysis/approved)."""

import pytest
from reading import results_of, row_of
from scenarios import ASYNC, BUDGET_SECONDS, EIGHT, SOONER, SYNC, TARGET, reaches, two_arms
from synthetic import SyntheticArm, edit_json, write_study


def test_an_arm_that_is_sooner_in_every_seed(tmp_path, approved):
    found = two_arms(tmp_path, [reaches(time) for time in EIGHT], [reaches(time) for time in SOONER])
    row = row_of(found, "time_to_target")
    assert (row.family, row.word, row.wins) == ("primary", "better", 8)
    assert row.times is not None
    assert row.times.ratio is not None
    assert row.times.ratio.estimate == pytest.approx(sum(EIGHT) / sum(SOONER))
    approved(found)


def test_a_third_arm_that_nobody_registered_and_whose_runs_failed(tmp_path, approved):
    third = SyntheticArm("ringmaster", settings={"seconds": BUDGET_SECONDS})
    curves = {SYNC.name: EIGHT, ASYNC.name: SOONER, third.name: SOONER}
    registration = {"num_seeds": 8, "targets": {SYNC.name: TARGET}, "family": [ASYNC.name]}
    drawn = {name: [reaches(time) for time in times] for name, times in curves.items()}
    write_study(tmp_path, drawn, [SYNC, ASYNC, third], registration=registration)
    for seed in (100, 101, 102):
        edit_json(tmp_path / f"test/{third.name}/s{seed}/summary.json", status="FAILED", message="killed")
    found = results_of(tmp_path)
    row = row_of(found, "time_to_target")
    assert (row.family, row.word, row.n) == ("primary", "better", 8)
    other = row_of(found, "time_to_target", third.name)
    assert (other.family, other.word, other.n) == ("exploratory", "too few seeds", 5)
    approved(found)
