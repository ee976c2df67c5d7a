"""Diverged runs: worse than any loss, never at a target, and no gain for their arm."""

import math

import pytest
from reading import row_of
from scenarios import EIGHT, SOONER, diverges, ends_at, reaches, two_arms

FINAL = (5.00, 5.01, 4.99, 5.02, 4.98, 5.005, 4.995, 5.015)


def ended(folder, ours, first=6.0):
    """Against a reference that ends at `FINAL`; None: a run that diverged."""
    curves = [diverges(ends_at(4.9, first=first), 5) if loss is None else ends_at(loss, first=first) for loss in ours]
    return two_arms(folder, [ends_at(loss, first=first) for loss in FINAL], curves)


def test_a_loss_that_is_worse_with_two_runs_that_diverged(tmp_path, approved):
    found = ended(
        tmp_path, [None, None, *(loss + 0.01 * k for k, loss in enumerate(FINAL[2:-1], 1)), FINAL[-1] - 0.005]
    )
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.wins, row.ties, row.n, row.diverged) == ("worse", 1, 0, 8, (2, 0))
    assert row.p == pytest.approx(4 / 256)  # the smallest difference alone is the other way
    assert math.isnan(row.estimate)
    assert math.isnan(row.p_equal)
    approved(found)


def test_one_run_that_diverged_is_no_equivalence_where_the_improvement_is_small(tmp_path, approved):
    ours = [None, *(loss + 0.0005 * (-1) ** k for k, loss in enumerate(FINAL[1:]))]
    found = ended(tmp_path, ours, first=5.2)
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.diverged, math.isnan(row.p_equal)) == ("undecided", (1, 0), True)
    approved(found)


def test_every_run_of_an_arm_diverged(tmp_path, approved):
    found = two_arms(tmp_path, [reaches(time) for time in EIGHT], [diverges(reaches(60), 5)] * 8)
    time, loss = row_of(found, "time_to_target"), row_of(found, "loss_at_equal_samples")
    assert (time.word, time.reached) == ("worse", (0, 8))
    assert (loss.word, loss.p, loss.diverged) == ("worse", 2 / 256, (8, 0))
    approved(found)


def test_a_reference_with_runs_that_diverged_is_worse_where_a_treatment_is_slower(tmp_path, approved):
    curves = [reaches(time) for time in EIGHT]
    found = two_arms(
        tmp_path, [diverges(curve, 5) if k < 2 else curve for k, curve in enumerate(curves)], [reaches(80)] * 8
    )
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.diverged, row.wins) == ("undecided", (0, 2), 2)
    approved(found)


def test_a_pair_in_which_both_runs_diverged_is_a_tie(tmp_path):
    curves = [diverges(ends_at(loss), 5) if k == 0 else ends_at(loss) for k, loss in enumerate(FINAL)]
    ours = [diverges(ends_at(5.0), 9), *(ends_at(loss + 0.01 * k) for k, loss in enumerate(FINAL[1:], 1))]
    row = row_of(two_arms(tmp_path, curves, ours), "loss_at_equal_seconds")
    assert (row.ties, row.wins, row.n, row.diverged, row.word) == (1, 0, 8, (0, 0), "worse")
    assert row.p == 2 / 2**7


def test_a_run_that_diverged_after_it_was_at_the_target_does_not_hold_it(tmp_path, approved):
    found = two_arms(tmp_path, [reaches(time) for time in EIGHT], [diverges(reaches(time), 19) for time in SOONER])
    row = row_of(found, "time_to_target")
    assert (row.word, row.reached) == ("worse", (0, 8))
    approved(found)
