"""Times to a target that could mislead: how often each arm was looked at, and dips that do not hold."""

import numpy
import pytest
from reading import results_of, row_of
from scenarios import ASYNC, EIGHT, SOONER, SYNC, reaches, two_arms
from synthetic import SyntheticArm, write_study


def falls(generator, evaluations):
    """One true curve, whose plateau is just below the target, with the fluctuation of every evaluation."""
    shares = numpy.linspace(0.0, 1.0, evaluations)
    losses = 4.98 + 1.02 * numpy.exp(-4 * shares) + generator.normal(0.0, 0.03, evaluations) * (shares > 0)
    return [(round(1600 * share), 100.0 * share, loss) for share, loss in zip(shares, losses, strict=True)]


def seconds_of(found):
    row = row_of(found, "time_to_target")
    return sum(row.treatment_values), sum(row.reference_values)


def test_an_arm_that_was_evaluated_eight_times_as_often(tmp_path, approved):
    generator = numpy.random.default_rng(5)
    reference, treatment = ([falls(generator, number) for _ in range(12)] for number in (11, 81))
    found = two_arms(tmp_path, reference, treatment)
    row = row_of(found, "time_to_target")
    assert (row.family, row.word) == ("primary", "undecided")
    assert row.reason.startswith("p_Holm = ")
    approved(found)


def test_a_dip_below_the_target_for_one_evaluation(tmp_path, approved):
    def dips(seconds):
        curve = [(80 * k, 5.0 * k, 6.0 - 0.85 * min(1.0, k / 10)) for k in range(21)]
        curve[seconds // 5] = (*curve[seconds // 5][:2], 4.999)
        return curve

    found = two_arms(
        tmp_path, [reaches(time) for time in range(70, 78)], [dips(t) for t in (30, 35, 30, 35, 40, 35, 30, 35)]
    )
    row = row_of(found, "time_to_target")
    assert (row.word, row.reached) == ("worse", (0, 8))
    assert row_of(found, "target_reached").word == "worse"
    approved(found)


@pytest.mark.parametrize(("ours", "theirs"), [(21, 81), (81, 21), (31, 21), (21, 21), (2, 21)])
def test_straight_curves_have_one_ratio_however_often_an_arm_was_evaluated(tmp_path, ours, theirs):
    found = two_arms(
        tmp_path,
        [reaches(time, evaluations=theirs) for time in EIGHT],
        [reaches(time, evaluations=ours) for time in SOONER],
    )
    row = row_of(found, "time_to_target")
    assert (row.word, row.wins) == ("better", 8)
    assert row.ratio == pytest.approx(sum(EIGHT) / sum(SOONER))


def test_another_arm_that_was_seldom_evaluated_takes_no_look_from_a_comparison(tmp_path):
    generator = numpy.random.default_rng(7)
    curves = {
        SYNC.name: [falls(generator, 21) for _ in range(8)],
        ASYNC.name: [falls(generator, 41) for _ in range(8)],
    }
    other = SyntheticArm("ringmaster", settings=SYNC.settings)
    alone = two_arms(tmp_path / "alone", *curves.values())
    curves[other.name] = [reaches(50, evaluations=3)] * 8
    declared = {"targets": {SYNC.name: 5.0}, "num_seeds": 8}
    both = write_study(tmp_path / "both", curves, [SYNC, ASYNC, other], registration=declared)
    assert seconds_of(alone) == seconds_of(results_of(both))
