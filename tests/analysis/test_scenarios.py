"""Studies in which a verdict could mislead: the verdict, its reason, and the words (tests/analysis/approved)."""

import dataclasses

import pytest
from reading import results_of, row_of
from scenarios import ASYNC, BUDGET_SECONDS, EIGHT, FIRST_LOSS, SOONER, SYNC, TARGET, reaches, two_arms
from synthetic import SyntheticArm, edit_json, write_study


def test_an_arm_that_is_sooner_in_every_seed(tmp_path, approved):
    found = two_arms(tmp_path, [reaches(time) for time in EIGHT], [reaches(time) for time in SOONER])
    row = row_of(found, "time_to_target")
    assert (row.family, row.word, row.wins) == ("primary", "better", 8)
    assert row.ratio == pytest.approx(sum(EIGHT) / sum(SOONER))
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


def in_two_stretches(first, second):
    """A curve that is halfway to the target after `first` seconds, and at it after `second`."""

    def loss(time):
        half = (FIRST_LOSS - TARGET) / 2
        return FIRST_LOSS - half * (time / first if time < first else 1 + (time - first) / (second - first))

    return [(16 * time, float(time), loss(time)) for time in range(0, 101, 5)]


def test_two_targets_that_disagree(tmp_path, approved):
    reference = [in_two_stretches(40, 60 + number) for number in range(8)]
    treatment = [in_two_stretches(15, 58 + 1.01 * number) for number in range(8)]
    found = two_arms(tmp_path, reference, treatment)
    row = row_of(found, "time_to_target")
    assert (row.family, row.word) == ("primary", "better")
    assert "This depends on the target: " in found.headlines[0].text
    approved(found)


@pytest.mark.parametrize("edge", ["sync", "async"])
def test_a_learning_rate_at_the_edge_of_its_grid(tmp_path, edge):
    grid = {"tuning_seeds": (0,), "trial_losses": ((5.0,), (5.2,), (5.4,))}
    rates = {True: (2e-3, 1e-3, 5e-4), False: (1e-3, 2e-3, 5e-4)}
    sync, other = (
        dataclasses.replace(arm, learning_rates=rates[arm.algorithm == edge], **grid) for arm in (SYNC, ASYNC)
    )
    curves = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]
    text = two_arms(tmp_path, *curves, arms=(sync, other)).headlines[0].text
    told = f"The learning rate of {edge}-w4-virtual lies at the edge of its grid, so a better one may lie beyond."
    assert text.count("edge of its grid") == text.count(told) == 1
