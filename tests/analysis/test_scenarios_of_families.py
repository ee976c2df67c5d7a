"""Studies whose comparisons are several: what a family does to the words, the intervals and the margins of one row."""

import math

import numpy
import pytest
from reading import question, row_of
from scenarios import ASYNC, EIGHT, SOONER, SYNC, reaches, study_of
from synthetic import SyntheticArm

from analysis.findings.judging import FOUND_AFTER_OTHERS, RESTS_ON_MARGIN, SHOWN_AFTER_OTHERS, judge

RINGMASTER = SyntheticArm("ringmaster", settings=SYNC.settings)


def test_two_arms_with_the_same_runs_have_the_same_interval(tmp_path, approved):
    sooner = [reaches(time) for time in SOONER]
    found = study_of(tmp_path, [(SYNC, [reaches(time) for time in EIGHT]), (ASYNC, sooner), (RINGMASTER, sooner)])
    rows = [row_of(found, "time_to_target", arm.name) for arm in (ASYNC, RINGMASTER)]
    assert rows[0].estimate == rows[1].estimate
    assert [(row.estimate.level, row.word, row.reason) for row in rows] == [
        (pytest.approx(1 - 0.05 / 2), "better", "p_Holm = 0.0156 < 0.05, lower is better")
    ] * 2
    approved(found)


ALMOST = (55, 57.9, 60.8, 60, 63.7, 66.9, 69.8, 77.5)
"""Seconds to the target: sooner than `EIGHT` in seven of eight seeds."""


def test_a_difference_that_holms_method_finds_after_another_says_that_its_interval_holds_0(tmp_path, approved):
    arms = [(SYNC, EIGHT), (ASYNC, SOONER), (RINGMASTER, ALMOST)]
    found = study_of(tmp_path, [(arm, [reaches(time) for time in times]) for arm, times in arms])
    first, second = (row_of(found, "time_to_target", arm.name) for arm in (ASYNC, RINGMASTER))
    assert (first.word, second.word) == ("better", "better")
    assert second.p == second.p_holm
    assert 0.025 <= second.p < 0.05
    assert (first.estimate.level, second.estimate.level) == (0.975, 0.975)
    assert not first.estimate.holds(0.0)
    assert second.estimate.holds(0.0)
    assert (FOUND_AFTER_OTHERS in first.notes, FOUND_AFTER_OTHERS in second.notes) == (False, True)
    approved(found)


def test_a_family_at_its_margin_is_called_equivalent_in_at_most_alpha_of_the_studies():
    generator = numpy.random.default_rng(0)
    studies, wrong, alone = 400, 0, 0
    for differences in generator.normal(0.02, 0.02, (studies, 3, 6)):  # whoever says "equivalent" within 0.02 is wrong
        rows = judge([question(values, margin=0.02) for values in differences], generator)
        wrong += any(row.word in RESTS_ON_MARGIN for row in rows)
        alone += any(row.equivalence.p < 0.05 for row in rows)
    assert wrong / studies <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / studies)
    assert alone / studies > 0.1  # what the uncorrected tests say


def test_an_equivalence_that_holms_method_finds_after_another_says_that_its_interval_reaches_further():
    clear = [0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002]
    close = [0.01 + 8 * value for value in clear]
    tight, wide = judge([question(clear, margin=0.02), question(close, margin=0.02)], numpy.random.default_rng(0))
    assert (tight.word, wide.word) == ("equivalent", "equivalent")
    assert (tight.equivalence.interval.level, wide.equivalence.interval.level) == (0.95, 0.95)
    assert (tight.equivalence.equivalent, wide.equivalence.equivalent) == (True, False)
    assert 0.025 <= wide.equivalence.p == wide.p_equivalence < 0.05
    assert (SHOWN_AFTER_OTHERS in tight.notes, SHOWN_AFTER_OTHERS in wide.notes) == (False, True)
