"""Studies whose comparisons are several: what a family does to the words, the intervals and the margins of one row."""

from reading import row_of
from scenarios import ASYNC, EIGHT, SOONER, SYNC, ends_at, reaches, study_of, two_arms
from synthetic import SyntheticArm

RINGMASTER = SyntheticArm("ringmaster", settings=SYNC.settings)


def test_two_arms_with_the_same_runs_have_the_same_interval(tmp_path, approved):
    sooner = [reaches(time) for time in SOONER]
    found = study_of(tmp_path, [(SYNC, [reaches(time) for time in EIGHT]), (ASYNC, sooner), (RINGMASTER, sooner)])
    rows = [row_of(found, "time_to_target", arm.name) for arm in (ASYNC, RINGMASTER)]
    assert rows[0].estimate == rows[1].estimate
    assert [(row.family_size, row.word, row.reason) for row in rows] == [
        (2, "better", "p_Holm = 0.0156 < 0.05, lower is better")
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
    assert first.high < 0 < second.high
    assert [any("Holm's method found it" in note for note in row.notes) for row in (first, second)] == [False, True]
    approved(found)


GAPS = (0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002)
LOSSES_DECIDE = {"primary": {"endpoint": "loss_at_equal_samples", "num_workers": 4, "clock": "virtual"}, "targets": {}}


def gained(tenths, tmp_path, **registration):
    """A study in which both arms gain so many tenths of a nat, within 0.002 of each other; the margin is 0.02."""
    ours, theirs = ([ends_at(6 - tenths / 10 + gap) for gap in gaps] for gaps in (GAPS, [0.0] * 8))
    return two_arms(tmp_path, theirs, ours, registration=LOSSES_DECIDE | registration)


def test_a_margin_of_a_fifth_of_the_improvement_without_a_reason_is_not_used(tmp_path, approved):
    found = gained(1, tmp_path)
    row = row_of(found, "loss_at_equal_samples")
    told = "the margin of ±0.02 is 20 % of the reference's improvement, and the plan gives no reason for it"
    assert (row.word, row.refused) == ("undecided", f"{told} (margin_reasons)")
    assert row.reason.endswith(row.refused)
    approved(found)


def test_a_margin_of_a_fifth_of_the_improvement_is_used_with_the_reason_of_the_plan(tmp_path, approved):
    reason = "less than what another seed changes"
    found = gained(1, tmp_path, margin_reasons={"loss": reason})
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.margin_reason, row.refused) == ("equivalent", reason, "")
    assert (
        f"The margin of ±0.02 is 20 % of the improvement of synchronous training: {reason}."
        in found.headlines[0].details
    )
    approved(found)


def test_a_margin_of_a_tenth_of_the_improvement_needs_no_reason(tmp_path):
    assert row_of(gained(2, tmp_path), "loss_at_equal_samples").word == "equivalent"


def test_a_catastrophe_that_eight_seeds_did_not_show(tmp_path, approved):
    """Nine seeds of ten gain a little and one loses much, so that the true mean is no better: eight may all gain."""
    gains = (0.010, 0.012, 0.014, 0.011, 0.013, 0.015, 0.016, 0.012)
    losses = [ends_at(5.0 - gain) for gain in gains]
    found = two_arms(tmp_path, [ends_at(5.0)] * 8, losses, registration=LOSSES_DECIDE | {"margins": {}})
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.wins, row.n) == ("better", 8, 8)
    details = "\n".join(found.headlines[0].details)
    assert "0 of 8 seeds were worse, and with 95 % confidence at most 31 % of seeds are." in details
    assert "if a few runs of one arm can go far wrong, a mean can be worse although most seeds are better." in details
    approved(found)


def test_seeds_outside_the_margin_are_counted_beside_an_equivalence(tmp_path):
    found = gained(10, tmp_path, margins={"loss": 0.0019})
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.outside) == ("equivalent", 4)
    told = "4 of 8 seeds were outside the margin, and with 95 % confidence at most 81 % of seeds are."
    assert f"Loss at equal samples: {told}" in found.headlines[0].details
