"""Small studies whose every number can be worked out by hand give these numbers, in any order of the directory."""

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import ASYNC, SYNC, question, results_of, row_of, trust_of
from synthetic import (
    STRAGGLER,
    SyntheticArm,
    edit_json,
    planned,
    straight,
    write_finetuning,
    write_plan,
    write_run,
    write_study,
)

from analysis.findings.comparisons import FROM_SCRATCH, comparisons_of
from analysis.findings.groups import groups_of
from analysis.findings.judging import judge
from analysis.findings.times import sensitivities
from analysis.study.read import load_study

RING = SyntheticArm("ringmaster")
GROUP = f"4 workers, virtual clock, {STRAGGLER}"


def twice_as_fast(seeds=6):
    """Loss falls from 6 to 4: sync needs 10, 12, 14, ... seconds for it, async half of that."""
    return {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0 + 2 * number) for number in range(seeds)],
        ASYNC.name: [straight(6.0, 4.0, seconds=5.0 + number) for number in range(seeds)],
    }


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fast")
    return results_of(write_study(folder, twice_as_fast(), [SYNC, ASYNC], registration={"num_seeds": 6}))


def test_times_to_the_target_are_the_crossings_and_their_exact_test(fast):
    row = row_of(fast, "time_to_target")  # sync crosses 5.0 at 5, 6, ... 10 s, async at 2.5, 3, ... 5 s
    assert (row.family, row.family_size, row.n, row.word) == ("primary", 1, 6, "better")
    assert row.estimate is not None
    assert row.estimate.estimate == pytest.approx(-3.75)
    assert (row.treatment_mean, row.reference_mean) == pytest.approx((3.75, 7.5))
    assert row.relative == pytest.approx(0.5)
    assert (row.p, row.p_holm, row.wins) == (2 / 64, 2 / 64, 6)
    assert row.notes == ("restricted to 20.0 virtual s, the longest run; every run that did not diverge got there",)
    assert row.margin is None
    assert row.unit == "virtual s"


def test_the_headline_says_what_the_primary_row_says(fast):
    (headline,) = fast.headlines
    assert headline.text == (
        "Asynchronous training reached the target 2.00\N{MULTIPLICATION SIGN} sooner than synchronous training "
        "(6 of 6 seeds). Nothing is shown about its final loss: "
        "all 6 differences are 0; nothing varied: nothing was measured."
    )
    assert headline.details[0] == (
        "Time to the target: 2.00\N{MULTIPLICATION SIGN} sooner than sync (95 % CI 2.00\N{MULTIPLICATION SIGN} to "
        "2.00\N{MULTIPLICATION SIGN}, sooner in 6 of 6 seeds, p_Holm 0.031)."
    )
    assert (headline.word, headline.exploratory, fast.exploratory) == ("better", False, False)


def test_a_slower_treatment_is_said_to_be_later_by_the_inverse_ratio(tmp_path):
    curves = twice_as_fast()
    curves[SYNC.name], curves[ASYNC.name] = curves[ASYNC.name], curves[SYNC.name]
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6}))
    assert "reached the target 2.00\N{MULTIPLICATION SIGN} later than synchronous" in found.headlines[0].text


def test_losses_at_equal_seconds_are_read_where_the_shorter_run_of_a_pair_ends_and_say_so(fast):
    row = row_of(fast, "loss_at_equal_seconds")
    assert (row.treatment_mean, row.reference_mean) == pytest.approx((4.0, 5.0))
    assert row.family == "secondary"
    told = "compared at 5.00 to 10.0 virtual s, where the shorter run of each pair ended; the longest is 20.0"
    assert told in row.notes


def test_losses_at_equal_samples_have_the_declared_margin_and_the_share_of_the_improvement(tmp_path):
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0)] * 6,
        ASYNC.name: [straight(6.0, 4.0 + gap, seconds=10.0) for gap in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)],
    }
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6}))
    row = row_of(found, "loss_at_equal_samples")
    assert row.estimate is not None
    assert row.estimate.estimate == pytest.approx(0.35)
    assert (row.p, row.word, row.wins, row.margin) == (2 / 64, "worse", 0, 0.02)
    assert row.relative == pytest.approx(0.35 / 2.0)
    assert row.equivalence is not None
    assert not row.equivalence.equivalent
    assert row.wins == 0


@pytest.mark.parametrize(
    ("longest", "shortest", "noted"),
    [(1600, 1530, True), (160, 120, True), (1664, 1600, False)],  # an update has 64 samples
    ids=["more than a step", "a large part", "one step, a small part"],
)
def test_budgets_that_differ_are_compared_at_the_smallest_and_noted_but_for_a_small_step(
    tmp_path, longest, shortest, noted
):
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0, samples=longest)] * 6,
        ASYNC.name: [straight(6.0, 4.0, seconds=10.0, samples=shortest)] * 6,
    }
    row = row_of(results_of(write_study(tmp_path, curves, [SYNC, ASYNC])), "loss_at_equal_samples")
    assert (row.treatment_mean, row.reference_mean) == pytest.approx((4.0, 6.0 - 2.0 * shortest / longest))
    told = f"compared at {shortest} samples, where the first run ended; the last ended at {longest}"
    assert [note for note in row.notes if note.startswith("compared at")] == [told] * noted


@pytest.mark.parametrize(("samples", "refused"), [(152, False), (151, True)])
def test_losses_are_compared_at_no_less_than_95_percent_of_the_planned_samples(tmp_path, samples, refused):
    curves = twice_as_fast()
    curves[ASYNC.name][3] = straight(6.0, 4.0, seconds=8.0, samples=samples)
    folder = write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6})
    found = results_of(folder)
    rows = [row_of(found, endpoint) for endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds")]
    told = f"refused: test/{ASYNC.name}/s103 ended at {samples} of the 160 samples of its arm"
    assert [(row.word, row.reason) == ("undecided", told) for row in rows] == [refused] * 2
    assert (f"no verdict on its final loss: {told}" in found.headlines[0].text) == refused


@pytest.mark.parametrize("limit", [{"seconds": 60.0}, {"target_loss": 4.0}, {"patience": 3}])
def test_a_run_that_something_else_may_end_has_no_planned_samples(tmp_path, limit):
    curves = twice_as_fast()
    curves[ASYNC.name][3] = straight(6.0, 4.0, seconds=8.0, samples=80)
    arms = [dataclasses.replace(arm, settings=limit) for arm in (SYNC, ASYNC)]
    row = row_of(results_of(write_study(tmp_path, curves, arms)), "loss_at_equal_samples")
    assert row.n == 6
    assert "compared at 80 samples, where the first run ended; the last ended at 160" in row.notes


def test_a_diverged_run_shortens_nobodys_budget(tmp_path):
    curves = twice_as_fast()
    curves[ASYNC.name][3] = [(0, 0.0, 6.0), (40, 2.0, None)]
    row = row_of(results_of(write_study(tmp_path, curves, [SYNC, ASYNC])), "loss_at_equal_samples")
    assert (row.n, row.ties, row.by_divergence) == (6, 5, (1, 0))
    assert not any("compared at" in note for note in row.notes)


def test_the_budget_is_the_shortest_run_that_ended_without_the_target(tmp_path):
    curves = twice_as_fast()
    curves[SYNC.name][0] = straight(6.0, 5.5, seconds=7.0)
    row = row_of(
        results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6})), "time_to_target"
    )
    assert "restricted to 7.00 virtual s, the shortest of 1 run that ended without reaching the target" in row.notes
    assert row.reference_mean == pytest.approx((7 + 6 + 7 + 7 + 7 + 7) / 6)
    assert (row.wins, row.ties, row.n) == (6, 0, 6)


def diverging(seeds=6, which=5):
    curves = twice_as_fast(seeds)
    curves[ASYNC.name][which] = [(0, 0.0, 6.0), (40, 2.0, 7.0), (80, 4.0, None)]
    return curves


def test_a_diverged_run_is_worse_than_any_loss_and_takes_infinitely_long(tmp_path):
    found = results_of(write_study(tmp_path, diverging(), [SYNC, ASYNC], registration={"num_seeds": 6}))
    loss, time = row_of(found, "loss_at_equal_samples"), row_of(found, "time_to_target")
    assert (loss.word, loss.reason, loss.p) == ("undecided", "p_Holm = 1.00", 1.0)  # the other losses are equal
    assert (loss.estimate, loss.treatment_mean, loss.reference_mean, loss.equivalence) == (None,) * 4
    assert (loss.by_divergence, loss.wins, loss.ties) == ((1, 0), 0, 5)
    assert loss.test == "exact signed-rank test"
    assert loss.notes == (
        "async: diverged 1/6",
        "a diverged run is worse than any other, so the pairs are compared by ranks",
    )
    assert time.treatment_mean == pytest.approx((2.5 + 3 + 3.5 + 4 + 4.5 + 20) / 6)
    assert time.n == 6
    (counts,) = [counts for counts in found.counts if counts.arm == ASYNC.name and counts.stage == "test"]
    assert (counts.planned, counts.finished, counts.diverged) == (6, 5, 1)
    assert trust_of(found, "test runs").value == "12 planned, 11 finished, 1 diverged, 0 failed, 0 missing"
    (panel,) = found.reached
    curve = panel.curves[1]
    assert (curve.reached, curve.n, curve.median) == (5, 6, pytest.approx(3.75))


def test_a_run_that_diverged_after_it_reached_the_target_never_reached_it(tmp_path):
    curves = twice_as_fast()
    curves[ASYNC.name][5] = [(0, 0.0, 6.0), (40, 2.0, 4.0), (80, 4.0, None)]
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6}))
    row = row_of(found, "time_to_target")
    assert row.treatment_mean == pytest.approx((2.5 + 3 + 3.5 + 4 + 4.5 + 20) / 6)
    assert (row.wins, row.ties) == (5, 0)


def test_a_failed_or_missing_run_takes_its_pair_with_it_and_is_listed(tmp_path):
    curves = twice_as_fast(8)
    curves[RING.name] = curves[ASYNC.name]
    write_study(tmp_path, curves, [SYNC, ASYNC, RING], registration={"num_seeds": 8})
    lost = tmp_path / "test" / ASYNC.name / "s102"
    edit_json(lost / "summary.json", status="FAILED", message="a worker was killed")
    shutil.rmtree(tmp_path / "test" / SYNC.name / "s106")
    found = results_of(tmp_path)
    assert {row.n for row in found.tests if row.treatment == ASYNC.name} == {6}
    assert {row.n for row in found.tests if row.treatment == RING.name} == {7}
    note = row_of(found, "time_to_target").notes[0]
    assert (note.startswith("2 pairs left out"), note.endswith("102, 106)")) == (True, True)
    listed = {item.name: item.reason for item in found.left_out}
    assert listed[f"test/{ASYNC.name}/s102"] == "FAILED: a worker was killed"
    assert listed[f"test/{SYNC.name}/s106"] == "planned, and no folder there"
    for seed, arm in ((102, ASYNC.name), (106, SYNC.name)):
        reason = f"no pair, because no result came of test/{arm}/s{seed}"
        assert listed[f"seed {seed}, async vs sync, {GROUP}"] == reason
    in_tests = {run.name for run in found.runs if run.in_tests}
    assert f"test/{RING.name}/s102" in in_tests
    assert f"test/{RING.name}/s106" not in in_tests  # its reference has no result
    (run,) = [run for run in found.runs if run.status == "MISSING"]
    assert (run.exists, run.remark) == (False, "planned, and no folder there")
    assert trust_of(found, "test runs").value.endswith("1 failed, 1 missing")
    assert found.headlines[0].text.startswith("Exploratory: ")
    lost = [
        f"1 of 8 runs of {arm} is {status}, and in no number."
        for arm, status in ((ASYNC.name, "FAILED"), (SYNC.name, "MISSING"))
    ]
    assert found.headlines[0].text.endswith(" ".join(lost))


def test_when_all_runs_diverge_nothing_is_called_equivalent(tmp_path):
    curve = [(0, 0.0, 6.0), (40, 2.0, None)]
    curves = {SYNC.name: [curve] * 6, ASYNC.name: [curve] * 6}
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6}))
    assert {(row.word, row.reason) for row in found.tests if row.endpoint != "time_to_target"} == {
        ("undecided", "every run of both arms diverged")
    }
    assert row_of(found, "time_to_target").reason == "no run reached the target of 5.00"
    assert found.headlines[0].text.startswith("Nothing is shown about the time to the target: no run reached")


def test_when_one_arm_diverges_in_every_seed_it_is_worse(tmp_path):
    curves = twice_as_fast()
    curves[SYNC.name] = [straight(6.0, 4.0 + number / 100, seconds=10.0 + 2 * number) for number in range(6)]
    curves[ASYNC.name] = [[(0, 0.0, 6.0), (40, 2.0, None)]] * 6
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], registration={"num_seeds": 6}))
    assert {row.word for row in found.tests} == {"worse"}


def test_holm_corrects_inside_a_family_and_a_question_without_pairs_still_counts():
    generator = numpy.random.default_rng(0)
    six, seven = [1.0, 2, 3, 4, 5, 6], [1.0, 2, 3, 4, 5, 6, 7]
    rows = judge(
        [question(values, family=family) for family, values in (("a", six), ("b", seven), ("a", seven), ("b", []))],
        generator,
    )
    assert [row.p for row in rows] == [2 / 64, 2 / 128, 2 / 128, None]
    assert [row.p_holm for row in rows] == [2 / 64, 4 / 128, 4 / 128, None]
    assert [row.family_size for row in rows] == [2, 2, 2, 2]
    assert rows[3].word == "too few seeds"
    assert [row.least_p_holm for row in rows] == [2 / 64, 4 / 128, 2 / 64, None]
    same = [1.0, -1, 1, -1, 1, -1]
    hopeless = "no difference of any size can be found with 6 pairs and 2 comparisons (no p_Holm is below 0.0625)"
    alike = judge([question(six), question(same, margin=2.0)], generator)
    assert (alike[0].reason, alike[0].notes) == (f"p_Holm = 0.0625; {hopeless}", ())
    assert (alike[1].word, alike[1].notes) == ("equivalent", (hopeless,))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-3, 3), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_the_order_of_the_seeds_and_turns_with_its_sides(values, shift, order):
    generator = numpy.random.default_rng(0)
    shuffled = list(values)
    order.shuffle(shuffled)
    there, again = judge([question(values, margin=0.5)], generator) + judge([question(shuffled, margin=0.5)], generator)
    assert there == again
    (turned,) = judge([question([0.0] * len(values), values, margin=0.5)], generator)
    assert turned.p == there.p
    if there.p is None:
        assert (there.estimate, turned.estimate) == (None, None)
        return
    assert turned.estimate.estimate == pytest.approx(-there.estimate.estimate, abs=1e-12)
    assert {there.word, turned.word} in ({"better", "worse"}, {there.word})
    moved = question([value + shift for value in values], [shift] * len(values))
    (same,) = judge([moved], generator)
    if same.p is not None:  # adding the shift may round tiny differences away
        assert same.estimate.estimate == pytest.approx(there.estimate.estimate, abs=1e-9)


def test_the_primary_family_is_first_and_every_other_one_is_per_endpoint_and_workers(example):
    families = [row.family for row in example.tests]
    assert families == sorted(families, key=["primary", "secondary", "exploratory"].index)
    assert {row.family_size for row in example.tests} == {1, 2}  # one reference against the baseline, else two arms
    primary = [row for row in example.tests if row.family == "primary"]
    assert [(row.treatment, row.endpoint, row.family_size) for row in primary] == [
        ("async-w4-virtual", "time_to_target", 2),
        ("ringmaster-w4-virtual", "time_to_target", 2),
    ]


@pytest.mark.parametrize(
    ("registration", "seeds", "why"),
    [
        (None, 6, "there is no analysis.yaml"),
        ({"num_seeds": 5}, 6, "6 seeds were run and 5 registered: seeds added after looking are no confirmation"),
        ({"num_seeds": 8}, 6, "8 seeds were registered and an arm of the primary comparison has 6"),
        (
            {"num_seeds": 6, "primary": {"endpoint": "time_to_target", "num_workers": 8}},
            6,
            "the folder has no sync arm",
        ),
    ],
)
def test_a_study_that_was_not_registered_like_this_is_exploratory_everywhere(tmp_path, registration, seeds, why):
    found = results_of(write_study(tmp_path, twice_as_fast(seeds), [SYNC, ASYNC], registration=registration))
    assert found.exploratory
    assert found.exploratory_reason.startswith(why)
    assert {row.family for row in found.tests} == {"exploratory"}
    assert all(headline.exploratory and headline.text.startswith("Exploratory: ") for headline in found.headlines)
    assert found.exploratory_reason in trust_of(found, "analysis.yaml").detail


def test_holm_is_over_the_registered_family_whatever_arms_are_still_there(tmp_path):
    registration = {"num_seeds": 8, "family": [ASYNC.name, RING.name]}
    found = results_of(write_study(tmp_path, twice_as_fast(8), [SYNC, ASYNC], registration=registration))
    row = row_of(found, "time_to_target")
    assert (row.family, row.family_size, row.p_holm) == ("primary", 2, 4 / 256)
    assert found.problems == (
        f"analysis.yaml registers {RING.name} in the primary family, and nothing of it is here: it counts as a "
        "comparison that shows nothing (p = 1)",
    )
    assert not found.exploratory
    assert row_of(found, "loss_at_equal_samples").family_size == 1


def test_a_registered_arm_without_a_single_run_counts_too(tmp_path):
    registration = {"num_seeds": 8, "family": [ASYNC.name, RING.name]}
    found = results_of(write_study(tmp_path, twice_as_fast(8), [SYNC, ASYNC, RING], registration=registration))
    assert row_of(found, "time_to_target").family_size == 2


def test_an_arm_that_was_not_registered_is_in_no_registered_family(tmp_path):
    curves = twice_as_fast(8)
    curves[RING.name] = curves[ASYNC.name]
    registration = {"num_seeds": 8, "family": [ASYNC.name]}
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC, RING], registration=registration))
    rows = [row_of(found, "time_to_target", arm) for arm in (ASYNC.name, RING.name)]
    assert [(row.family, row.family_size) for row in rows] == [("primary", 1), ("exploratory", 1)]


@pytest.mark.parametrize(
    ("registration", "plan", "why"),
    [
        ({}, False, "there is no plan.json that could be read"),
        ({"config_sha256": "99"}, True, "plan.json is of another config"),
        ({"seeds": [100]}, True, "analysis.yaml registers test seeds 100, plan.json has 100, 101, 102, 103, 104, 105"),
    ],
)
def test_a_registration_that_cannot_be_checked_confirms_nothing(tmp_path, registration, plan, why):
    folder = write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC], registration={"num_seeds": 6} | registration)
    if not plan:
        (folder / "plan.json").unlink()
    found = results_of(folder)
    assert found.exploratory_reason.startswith(why)
    assert {row.family for row in found.tests} == {"exploratory"}


def test_an_undeclared_target_is_chosen_after_the_fact_and_says_so(tmp_path):
    found = results_of(write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC]))
    row = row_of(found, "time_to_target")
    assert "target 4.10: 95 % of the improvement of sync-w4-virtual's own runs, chosen after the fact" in row.notes
    assert row.family == "exploratory"
    # at 4.1, sync is 0.95 through
    assert row.reference_mean == pytest.approx(0.95 * 15.0)


def test_fewer_than_six_seeds_give_no_verdict(tmp_path):
    found = results_of(write_study(tmp_path, twice_as_fast(5), [SYNC, ASYNC], registration={"num_seeds": 5}))
    assert {row.word for row in found.tests} == {"too few seeds"}
    assert "too few seeds for a verdict" in found.headlines[0].text
    assert trust_of(found, "seeds").level == "bad"


def test_measured_and_virtual_seconds_share_no_group_panel_or_comparison(example):
    clock = {arm.name: arm.clock for arm in example.arms}
    group_clock = {group.name: group.clock for group in example.groups}
    assert set(group_clock.values()) == {"measured", "virtual"} == set(example.clocks)
    for group in example.groups:
        assert {clock[arm] for arm in group.arms} == {group.clock}
    for row in example.tests:
        assert clock[row.treatment] == group_clock[row.group]
        assert row.reference == "baseline" or clock[row.reference] == clock[row.treatment]
    for panel in example.curves:
        assert {clock[curve.arm] for curve in panel.curves} == {group_clock[panel.group]}
        if panel.axis == "seconds":
            assert (
                panel.x_label
                == {"measured": "training seconds", "virtual": "virtual seconds"}[group_clock[panel.group]]
            )
    for scaling in example.scaling:
        assert {clock[point.arm] for point in scaling.points} == {scaling.clock}


@pytest.mark.parametrize(
    ("other", "told"),
    [({"eval_masking": "word:0.15"}, "f00d, f00d masked word:0.15"), ({"data_fingerprint": "beef"}, "beef, f00d")],
    ids=["masks", "data"],
)
def test_runs_on_different_data_or_evaluation_masks_are_not_compared(tmp_path, other, told):
    write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC], registration={"num_seeds": 6})
    for seed in range(100, 106):
        edit_json(tmp_path / f"test/{ASYNC.name}/s{seed}/summary.json", **other)
    found = results_of(tmp_path)
    assert found.tests == ()
    assert found.headlines[0].text.startswith("No verdict: no arm has a sync arm with the same workers")
    listed = {item.name: item.reason for item in found.left_out}
    assert listed[f"async vs sync, {GROUP}"] == (
        f"refused: its runs were evaluated on different data or masks ({told})"
    )
    assert listed[f"test/{ASYNC.name}/s100"].startswith("evaluated on other data (")
    assert trust_of(found, "data").level == "bad"
    assert [len(curve.seeds) for panel in found.curves for curve in panel.curves] == [6, 6]


def test_oversubscribed_timings_are_flagged_where_there_are_seconds(tmp_path):
    arms = [SyntheticArm(name, 4, "measured", None) for name in ("sync", "async")]
    curves = dict(zip((arm.name for arm in arms), twice_as_fast().values(), strict=True))
    write_study(tmp_path, curves, arms)
    for path in tmp_path.glob("test/*/*/summary.json"):
        edit_json(path, oversubscription=2.0)
    found = results_of(tmp_path)
    flagged = {row.endpoint for row in found.tests if row.caveats}
    assert flagged == {"time_to_target", "loss_at_equal_seconds"}
    assert "The machine had more threads than cores" in found.headlines[0].text
    assert trust_of(found, "oversubscribed").value == "12 of 12 measured runs"
    assert all(arm.oversubscribed for arm in found.arms)


def test_an_arm_whose_rule_never_acted_is_flagged_as_asynchronous(tmp_path):
    lazy = SyntheticArm("koloskova", 4, "virtual", None)
    curves = dict(zip((SYNC.name, lazy.name), twice_as_fast().values(), strict=True))
    write_study(tmp_path, curves, [SYNC, lazy])
    assert trust_of(results_of(tmp_path), "rules that acted").value == "not known"
    for arm, altered in ((SYNC, 600), (lazy, 0)):
        for path in tmp_path.glob(f"test/{arm.name}/*/summary.json"):
            edit_json(path, rule_acted={"arrivals": 600, "altered": altered})
    item = trust_of(results_of(tmp_path), "rules that acted")
    assert (item.value, item.level) == ("not in 1 of 2 arms", "bad")
    assert item.detail == (
        "koloskova-w4-virtual (0 of 3600 arrivals): the rule altered nothing, so these are runs of asynchronous SGD"
    )
    edit_json(next(tmp_path.glob(f"test/{lazy.name}/*/summary.json")), rule_acted={"arrivals": 600, "altered": 1})
    assert trust_of(results_of(tmp_path), "rules that acted").value == "all"


def test_runs_from_random_weights_carry_the_mark_everywhere(tmp_path):
    found = results_of(write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC], from_scratch=True))
    assert found.from_scratch
    assert all(FROM_SCRATCH in row.notes for row in found.tests)
    assert all("From scratch: not STILT." in headline.details for headline in found.headlines)
    assert all(FROM_SCRATCH in arm.label and arm.from_scratch for arm in found.arms)
    assert all(row.from_scratch for row in found.table)
    assert FROM_SCRATCH in trust_of(found, "initial weights").value


def test_the_run_that_made_the_base_model_does_not_mark_the_study(example):
    assert not example.from_scratch
    assert [run.from_scratch for run in example.runs if run.stage == "base"] == [True]


def test_an_arm_with_two_reference_arms_is_compared_with_the_one_that_has_its_setting(tmp_path):
    arms, runs = [], []
    for length in (64, 128):
        for name in ("sync", "async"):
            arm = SyntheticArm(f"{name}{length}", settings={"seq_len": length})
            own = dataclasses.replace(SYNC if name == "sync" else ASYNC, settings=arm.settings)
            arms.append(own.as_json() | {"name": arm.name})
            for number, curve in enumerate(twice_as_fast()[SYNC.name if name == "sync" else ASYNC.name]):
                path = f"test/{arm.name}/s{number}"
                runs.append(planned(path, "test", arm.name, number))
                write_run(tmp_path / path, own, curve, seed=number)
    write_plan(tmp_path, arms, runs)
    found = results_of(tmp_path)
    assert [(row.treatment, row.reference) for row in found.tests if row.endpoint == "time_to_target"] == [
        ("async128-w4-virtual", "sync128-w4-virtual"),
        ("async64-w4-virtual", "sync64-w4-virtual"),
    ]
    assert [group.variant for group in found.groups] == [(("seq_len", "128"),), (("seq_len", "64"),)]


def test_a_band_is_the_mean_with_its_t_interval_where_all_seeds_have_a_value(fast):
    panel = next(panel for panel in fast.curves if panel.axis == "seconds")
    sync = panel.curves[0]
    assert sync.arm == SYNC.name
    assert sync.band is not None
    assert (sync.band.n, sync.band.x[0], sync.band.x[-1]) == (6, 0.0, 10.0)
    assert sync.band.mean[0] == 6.0
    expected = numpy.mean([6 - 2 * 10 / (10 + 2 * number) for number in range(6)])
    assert sync.band.mean[-1] == pytest.approx(expected)
    assert sync.band.low[-1] < expected < sync.band.high[-1]
    samples = next(panel for panel in fast.curves if panel.axis == "samples").curves[0]
    assert samples.band is not None
    assert samples.band.x == (0.0, 40.0, 80.0, 120.0, 160.0)
    assert samples.band.mean == pytest.approx((6.0, 5.5, 5.0, 4.5, 4.0))


def test_the_seconds_at_which_runs_reached_the_target_are_in_order(fast):
    (panel,) = fast.reached
    sync = panel.curves[0]
    assert sync.seconds == pytest.approx((5, 6, 7, 8, 9, 10))
    assert (sync.reached, sync.n, sync.median, panel.budget) == (6, 6, pytest.approx(7.5), 20.0)
    assert sync.restricted_mean is not None
    assert sync.restricted_mean.estimate == pytest.approx(7.5)


def test_the_targets_of_the_sensitivity_are_those_of_the_registered_pilots(tmp_path):
    pilots = {SYNC.name: {"runs": 10, "first_loss": 6.0, "best_loss": 5.0}}
    registration = {"num_seeds": 6, "pilots": pilots}
    study = load_study(write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC], registration=registration))
    comparisons, _ = comparisons_of(study, groups_of(study)[0])
    (item,) = sensitivities(study, comparisons, numpy.random.default_rng(0))
    assert [point.target for point in item.points] == pytest.approx([5.75, 5.5, 5.2, 5.1, 5.05, 5.02])
    assert [point.speed_up.estimate for point in item.points] == pytest.approx([2.0] * 6)  # of straight lines
    assert [point.restricted_ratio for point in item.points] == pytest.approx([0.5] * 6)


def test_delays_are_counted_over_the_applied_gradients_of_all_runs(tmp_path):
    delays = {SYNC.name: [0, 0, 0, 0], ASYNC.name: [0, 1, 1, 6]}
    curves = twice_as_fast(2)
    curves[ASYNC.name][0] = straight(6.0, 4.5, seconds=5.0)
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], delays=delays))
    sync, late = found.delays
    assert (sync.arm, sync.delays, sync.counts, sync.p95) == (SYNC.name, (0,), (8,), 0)
    assert (late.delays, late.counts, late.num_runs) == ((0, 1, 6), (2, 4, 2), 2)
    assert (late.mean, late.p50, late.p95, late.max) == (2.0, 1, 6, 6)
    (gap,) = found.delay_gaps
    assert (gap.treatment, gap.delay_p95, gap.gap.estimate) == (ASYNC.name, 6.0, 0.25)
    (row,) = [row for row in found.table if row.arm == ASYNC.name]
    assert (row.compute_share, row.wait_share, row.communication_share) == pytest.approx((0.7, 0.2, 0.1))


def test_timelines_show_the_same_window_of_a_sync_and_an_async_run(tmp_path):
    delays = {SYNC.name: [0] * 80, ASYNC.name: [1] * 80}
    curves = twice_as_fast(2)
    curves[ASYNC.name][0] = straight(6.0, 4.5, seconds=5.0)
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], delays=delays))
    sync, late = found.timelines
    assert [sync.arm, late.arm] == [SYNC.name, ASYNC.name]
    # a gradient is in flight for 0.8 of a worker's cycle; six flights of the slower run
    assert sync.seconds == late.seconds == pytest.approx(6 * 0.8 * 10.0 * 4 / 80)
    assert sync.begin == pytest.approx((10.0 - sync.seconds) / 2)
    for timeline in (sync, late):
        assert timeline.workers == (0, 1, 2, 3)
        assert all(span.seconds > 0 for span in timeline.spans)
        assert min(span.start for span in timeline.spans) >= timeline.begin
        assert max(span.start + span.seconds for span in timeline.spans) <= timeline.begin + timeline.seconds + 1e-9
        compute = math.fsum(span.seconds for span in timeline.spans if span.kind == "compute")
        assert compute == pytest.approx(0.7 * 4 * timeline.seconds, rel=0.1)


def test_throughput_has_a_point_for_each_number_of_workers(example):
    virtual = next(item for item in example.scaling if (item.algorithm, item.clock) == ("sync", "virtual"))
    assert [point.num_workers for point in virtual.points] == [2, 4, 8, 16]
    rates = [6 * workers / (1 + 0.03 * workers) for workers in (2, 4, 8, 16)]  # as the example was made
    assert [point.throughput.estimate for point in virtual.points] == pytest.approx(rates, rel=0.05)


def test_tuning_tells_what_was_chosen_and_whether_it_lies_at_the_edge(tmp_path):
    inside = SyntheticArm(
        "sync", learning_rates=(0.002, 0.001, 0.004), trial_losses=((5.0,), (5.2,), (5.4,)), tuning_seeds=(0,)
    )
    edge = SyntheticArm("async", learning_rates=(0.001, 0.002), trial_losses=((5.0,), (None,)), tuning_seeds=(0,))
    found = results_of(write_study(tmp_path, twice_as_fast(2), [inside, edge]))
    sync, late = found.tuning
    assert [(trial.learning_rate, trial.score, trial.chosen) for trial in sync.trials] == [
        (0.001, 5.2, False),
        (0.002, 5.0, True),
        (0.004, 5.4, False),
    ]
    assert not sync.at_edge
    assert late.at_edge
    assert late.trials[1].losses == (None,)
    assert trust_of(found, "tuning").value == "UNEQUAL budgets"
    assert trust_of(found, "tuned values inside their grids").value == "not in 1 of 2 arms"


@pytest.mark.parametrize(("seed", "value"), [(50, "not tuned"), (101, "seeds shared")])
def test_pilot_runs_are_counted_and_their_seeds_must_not_be_tested(tmp_path, seed, value):
    folder = write_study(tmp_path, twice_as_fast(2), [SYNC, ASYNC])
    path = f"pilot/{SYNC.name}/s{seed}"
    write_run(folder / path, SYNC, straight(6.0, 4.0, seconds=10.0), seed=seed)
    runs = json.loads((folder / "plan.json").read_text())["runs"]
    edit_json(folder / "plan.json", runs=[*runs, planned(path, "pilot", SYNC.name, seed)])
    found = results_of(folder)
    assert trust_of(found, "tuning").value == value
    assert trust_of(found, "test runs").detail == "beside the test runs: 1 pilot runs"
    counts = {(item.arm, item.stage): (item.planned, item.finished) for item in found.counts}
    assert counts[SYNC.name, "pilot"] == (1, 1)
    (folder / "plan.json").unlink()  # what is left is where the folders lie
    assert [run.name for run in load_study(folder).of("pilot")] == [path]


def test_the_largest_value_of_a_grid_is_an_edge_too(tmp_path):
    arms = [
        SyntheticArm("sync", learning_rates=(0.002, 0.001), trial_losses=((5.0,), (5.1,)), tuning_seeds=(0,)),
        SyntheticArm("async", learning_rates=(0.002,), trial_losses=((5.0,),), tuning_seeds=(0,)),
    ]
    sync, late = results_of(write_study(tmp_path, twice_as_fast(2), arms)).tuning
    assert (sync.at_edge, late.at_edge) == (True, False)  # one value has no edge


def test_table_1_has_the_reference_of_each_group_first(fast):
    sync, late = fast.table
    assert (sync.arm, sync.reached, sync.n, sync.median_seconds) == (SYNC.name, 6, 6, pytest.approx(7.5))
    assert late.train_seconds is not None
    assert late.train_seconds.estimate == pytest.approx(7.5)
    assert late.loss_at_equal_seconds is not None
    # all runs of the group reached 5 s: there async runs of 5, 6, ... 10 s are at 6 - 2 * 5 / T
    assert late.loss_at_equal_seconds.estimate == pytest.approx(numpy.mean([6 - 10 / (5 + k) for k in range(6)]))
    assert (late.metric.estimate, late.learning_rate, late.from_scratch) == (0.5, 5e-4, False)


def test_equal_environments_are_one_row_and_mixed_commits_are_told(tmp_path):
    write_study(tmp_path, twice_as_fast(2), [SYNC, ASYNC])
    edit_json(tmp_path / f"test/{SYNC.name}/s100/environment.json", commit="badc0de", modified=True)
    found = results_of(tmp_path)
    assert [(row.num_runs, dict(row.values)["commit"]) for row in found.hardware] == [(3, "c0ffee"), (1, "badc0de")]
    item = trust_of(found, "code")
    assert (item.value, item.level) == ("badc0de (1 runs), c0ffee (3 runs)", "warning")
    assert item.detail.startswith("1 runs with a modified working tree; runs of different commits are compared")


@pytest.mark.parametrize(("samples", "value"), [(160, "passed"), (320, "failed")])
def test_sync_is_checked_against_one_process_with_the_same_global_batch(tmp_path, samples, value):
    single = SyntheticArm("single", 1, "measured", None, batch_size=64)
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0, samples=samples + number) for number in range(6)],
        single.name: [straight(6.0, 4.0, seconds=10.0, samples=160 + number) for number in range(6)],
    }
    found = results_of(write_study(tmp_path, curves, [SYNC, single], registration={"num_seeds": 6}))
    item = trust_of(found, "sync guard")
    assert (item.value, item.level) == (value, {"passed": "good", "failed": "bad"}[value])
    assert item.detail.startswith("sync-w4-virtual against single-w1, 64 samples an update: samples to the target, 5: ")
    told = {"passed": "on 6 common seeds; the difference, 0 in all of them, lies inside ±64.0", "failed": "slower than"}
    assert told[value] in item.detail


def test_a_guard_that_shows_nothing_is_not_passed(tmp_path):
    single = SyntheticArm("single", 1, "measured", None, batch_size=64)
    ends = [4.0, 5.0, 4.9, 4.1, 4.2, 4.8]
    curves = {
        SYNC.name: [straight(6.0, end, seconds=10.0, samples=1600) for end in ends],
        single.name: [straight(6.0, end, seconds=10.0, samples=1600) for end in reversed(ends)],
    }
    value, level, detail = guarded_study(tmp_path, curves, [SYNC, single])
    assert (value, level) == ("not shown", "warning")
    assert "does not lie inside ±64.0" in detail


def guarded_study(folder, curves, arms):
    found = results_of(write_study(folder, curves, arms, registration={"num_seeds": 6}))
    item = trust_of(found, "sync guard")
    return item.value, item.level, item.detail


def test_the_guard_takes_the_one_process_arm_with_the_same_global_batch_and_names_sync_arms_without_one(tmp_path):
    two, four = SyntheticArm("sync", 2, "measured", STRAGGLER, 8), SyntheticArm("sync", 4, "virtual", STRAGGLER, 8)
    single = SyntheticArm("single", 1, "measured", None, batch_size=16)
    curves = {
        arm.name: [straight(6.0, 4.0 + 0.01 * number, seconds=10.0, samples=samples) for number in range(6)]
        for arm, samples in ((two, 1600), (four, 3200), (single, 1600))
    }
    value, level, detail = guarded_study(tmp_path, curves, [two, four, single])
    assert (value, level) == ("passed", "good")
    assert detail == (
        "sync-w2 against single-w1, 16 samples an update: samples to the target, 4.124: 1520.11 against 1520.11 on 6 "
        "common seeds; the difference, 0 in all of them, lies inside ±16.0; no one-process arm has the global batch of "
        "sync-w4-virtual (32)"
    )
    rows = results_of(tmp_path).tests
    assert not any("single" in (row.treatment, row.reference) for row in rows)
    assert {row.treatment for row in rows} == set()  # one process is in no family


def test_a_process_that_accumulates_the_batches_of_the_workers_has_their_global_batch(tmp_path):
    two, single = SyntheticArm("sync", 2, "measured", None, 8), SyntheticArm("single", 1, "measured", None, 8)
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in (two, single)}
    assert guarded_study(tmp_path, curves, [two, single])[0] == "not run"
    for number in range(6):
        edit_json(tmp_path / "test" / single.name / f"s{100 + number}" / "summary.json", accumulate=2)
    item = trust_of(results_of(tmp_path), "sync guard")
    assert (item.value, "sync-w2 against single-w1, 16 samples an update" in item.detail) == ("passed", True)


def test_every_sync_arm_is_guarded_and_one_that_fails_is_told_first(tmp_path):
    two, again = SyntheticArm("sync", 2, "measured", None, 8), SyntheticArm("sync", 2, "virtual", STRAGGLER, 8)
    single = SyntheticArm("single", 1, "measured", None, batch_size=16)
    curves = {
        arm.name: [straight(6.0, 4.0 + 0.01 * number, seconds=10.0, samples=samples) for number in range(6)]
        for arm, samples in ((two, 1600), (again, 1200), (single, 1600))
    }
    value, level, detail = guarded_study(tmp_path, curves, [two, again, single])
    assert (value, level) == ("failed for 1 of 2 arms", "bad")
    assert detail.startswith(
        "sync-w2-virtual against single-w1, 16 samples an update: samples to the target, 4.124: faster"
    )


def test_where_a_run_misses_the_target_the_guard_takes_the_lowest_loss_that_all_reach(tmp_path):
    single = SyntheticArm("single", 1, "measured", None, batch_size=64)
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in (SYNC, single)}
    curves[SYNC.name] = [*curves[SYNC.name][:5], straight(6.0, 5.5, seconds=10.0)]
    assert "samples to the lowest loss that all reach, 5.5: " in guarded_study(tmp_path, curves, [SYNC, single])[2]


def test_a_diverged_run_or_one_that_learns_nothing_leaves_the_guard_without_an_answer(tmp_path):
    single = SyntheticArm("single", 1, "measured", None, batch_size=64)
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in (SYNC, single)}
    ended = {**curves, SYNC.name: [*curves[SYNC.name][:5], [(0, 0.0, 6.0), (80, 5.0, None)]]}
    value, _, detail = guarded_study(tmp_path / "diverged", ended, [SYNC, single])
    assert (value, detail.endswith(f"test/{SYNC.name}/s105 diverged")) == ("not run", True)
    flat = {**curves, SYNC.name: [*curves[SYNC.name][:5], straight(6.0, 6.0, seconds=10.0)]}
    value, _, detail = guarded_study(tmp_path / "flat", flat, [SYNC, single])
    assert (value, detail.endswith("a run never gets below its first loss")) == ("not run", True)


def test_the_guard_does_not_compare_different_learning_rates(tmp_path):
    single = SyntheticArm("single", 1, "measured", None, batch_size=64, learning_rates=(0.5,))
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in (SYNC, single)}
    found = results_of(write_study(tmp_path, curves, [SYNC, single], registration={"num_seeds": 6}))
    item = trust_of(found, "sync guard")
    assert (item.value, item.detail) == (
        "not run",
        "not run: sync-w4-virtual: the learning rates differ (0.0005; single-w1 0.5)",
    )


def test_without_a_one_process_arm_the_guard_is_not_run(fast):
    assert trust_of(fast, "sync guard").value == "not run"


def write_scored(folder, gains, *, seeds=6, repetitions=2, **more):
    """Fine-tuning runs whose macro-F1 is 0.5 + 0.01 seed + gain, ± 0.005 by repetition; a gain grows with the seed."""
    runs = []
    for number in range(seeds):
        growth = 1 + (number - (seeds - 1) / 2) / 100
        seed = 100 + number
        for repetition in range(repetitions):
            for arm, gain in gains.items():
                path = f"finetune/{arm}/s{seed}-f{repetition}"
                parent = None if arm == "baseline" else f"test/{arm}/s{seed}"
                runs.append(planned(path, "finetune", arm, seed, parent=parent, finetune_seed=1000 * seed + repetition))
                score = 0.5 + 0.01 * number + gain * growth + (0.005 if repetition else -0.005)
                write_finetuning(folder / path, seed=1000 * seed + repetition, macro_f1=score, parent=None, **more)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"runs": plan["runs"] + runs}))


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    folder = write_study(
        tmp_path_factory.mktemp("scored"),
        twice_as_fast(7),
        [SYNC, ASYNC],
        registration={"num_seeds": 7, "margin_reasons": {"macro_f1": "a fifth of the gain"}},
    )
    write_scored(folder, {"baseline": 0.0, SYNC.name: 0.05, ASYNC.name: 0.055}, seeds=7)
    return results_of(folder)


def test_downstream_scores_are_means_over_fine_tuning_seeds_and_intervals_over_pretraining_seeds(scored):
    base, sync, late = scored.downstream
    assert [arm.arm for arm in (base, sync, late)] == ["baseline", SYNC.name, ASYNC.name]
    assert (base.baseline, base.num_finetuning_runs, base.score.n) == (True, 14, 7)
    assert base.score.estimate == pytest.approx(0.53)
    expected = [0.5 + 0.01 * number + 0.055 * (1 + (number - 3) / 100) for number in range(7)]
    assert [score for _, score in late.per_seed] == pytest.approx(expected)
    assert late.confusion == ((560, 140), (140, 560))
    assert [(score.label, score.f1.n) for score in late.classes] == [("hate", 7), ("other", 7)]


@pytest.mark.parametrize(("majority", "word"), [(0.0, "better"), (0.545, "undecided")])
def test_span_f1_is_tested_where_all_taggers_beat_the_commonest_tag(majority, word, tmp_path):
    registration = {"primary": {"endpoint": "span_f1", "num_workers": 4, "clock": "virtual"}, "margins": {}}
    folder = write_study(tmp_path, twice_as_fast(7), [SYNC, ASYNC], registration={"num_seeds": 7, **registration})
    gains = {"baseline": -0.2, SYNC.name: 0.0, ASYNC.name: 0.05}
    write_scored(folder, gains, seeds=7, majority={"tag": "O", "span_f1": majority, "accuracy": 0.7})
    found = results_of(folder)
    row = row_of(found, "span_f1")
    assert (row.n, row.unit, row.family, row.word) == (7, "span F1", "primary", word)
    assert [arm.metric for arm in found.downstream] == ["span_f1"] * 3
    assert [(score.label, score.f1.n) for score in found.downstream[0].classes] == [("MAT", 7)]
    trusted = trust_of(found, "taggers that beat the commonest tag")
    (headline,) = found.headlines
    if majority:
        assert (row.p, row.estimate) == (None, None)
        told = f"{SYNC.name} is no better than a tagger that gives every word the commonest tag"
        assert row.reason == told
        assert told in headline.text
        assert (trusted.value, trusted.level) == ("not 2 of 3 arms", "bad")
    else:
        assert row.p == 2 / 128
        assert headline.text.startswith("The span F1 after fine-tuning of asynchronous training is better than")
        assert trusted.level == "good"


def test_macro_f1_is_tested_against_the_reference_and_against_the_baseline(scored):
    against = row_of(scored, "macro_f1")
    assert against.estimate is not None
    assert against.estimate.estimate == pytest.approx(0.005)
    assert (against.n, against.p, against.margin, against.word) == (7, 2 / 128, 0.01, "different but negligible")
    gain = row_of(scored, "macro_f1", SYNC.name, "baseline")
    assert gain.estimate is not None
    assert (gain.estimate.estimate, gain.word, gain.family) == (pytest.approx(0.05), "better", "secondary")
    assert gain.family_size == 1
    assert [row.treatment for row in scored.tests if row.reference == "baseline"] == [SYNC.name]


def test_macro_f1_can_be_the_registered_endpoint(tmp_path):
    primary = {"endpoint": "macro_f1", "num_workers": 4, "clock": "virtual"}
    write_study(tmp_path, twice_as_fast(), [SYNC, ASYNC], registration={"num_seeds": 6, "primary": primary})
    write_scored(tmp_path, {"baseline": 0.0, SYNC.name: 0.05, ASYNC.name: 0.09})
    found = results_of(tmp_path)
    assert [(row.endpoint, row.reference) for row in found.tests if row.family == "primary"] == [
        ("macro_f1", SYNC.name)
    ]
    (headline,) = found.headlines
    assert headline.text.startswith(
        "The macro-F1 after fine-tuning of asynchronous training is better than that of synchronous training: 0.040 "
    )
    assert headline.details[0] == (
        "Macro-F1 after fine-tuning: 0.0400 higher than sync (95 % CI 0.0390 to 0.0410, n = 6, p_Holm 0.031)."
    )


def test_a_lost_fine_tuning_run_takes_its_own_pair_alone_and_a_diverged_parent_is_a_result(tmp_path):
    curves = diverging(8, which=7)
    curves[RING.name] = twice_as_fast(8)[ASYNC.name]
    write_study(tmp_path, curves, [SYNC, ASYNC, RING], registration={"num_seeds": 8})
    write_scored(tmp_path, {"baseline": 0.0, SYNC.name: 0.05, ASYNC.name: 0.09, RING.name: 0.02}, seeds=8)
    shutil.rmtree(tmp_path / f"finetune/{RING.name}/s100-f1")
    for repetition in range(2):  # nothing can be fine-tuned from a run that diverged
        shutil.rmtree(tmp_path / f"finetune/{ASYNC.name}/s107-f{repetition}")
    found = results_of(tmp_path)
    row = row_of(found, "macro_f1")
    assert (row.n, row.treatment_mean, row.by_divergence, row.wins) == (8, None, (1, 0), 7)
    assert f"{ASYNC.name}: diverged 1/8" in row.notes
    (scores,) = [item for item in found.downstream if item.arm == ASYNC.name]
    assert (scores.score.n, scores.num_diverged) == (7, 1)
    assert scores.score.estimate == pytest.approx(sum(0.59 + 0.01 * k - 0.09 * (3.5 - k) / 100 for k in range(7)) / 7)
    other = row_of(found, "macro_f1", RING.name)
    assert (other.n, other.notes[0]) == (7, "1 pair left out (seed 100)")
    listed = {item.name: item.reason for item in found.left_out}
    assert listed[f"finetune/{RING.name}/s100-f1"] == "planned, and no folder there"
    assert f"seed 100, fine-tuning, ringmaster vs sync, {GROUP}" in listed


def test_hatecheck_is_shown_per_functionality(example):
    late = next(arm for arm in example.downstream if arm.arm == "async-w4-virtual")
    named = ("counter_quote_nh", "derog_neg_attrib_h", "negate_neg_nh", "slur_h", "spell_char_swap_h")
    assert [(score.functionality, score.num_cases, score.accuracy.n) for score in late.functionalities] == [
        (name, 100, 8) for name in named
    ]
    assert late.hatecheck is not None


def test_the_order_of_the_directory_and_of_the_plans_runs_changes_nothing(
    tmp_path, example_folder, example, monkeypatch
):
    shuffle = random.Random(1).shuffle
    listed = Path.rglob

    def shuffled(folder, pattern):
        found = list(listed(folder, pattern))
        shuffle(found)
        return iter(found)

    folder = tmp_path / example_folder.name
    shutil.copytree(example_folder, folder)
    runs = json.loads((folder / "plan.json").read_text())["runs"]
    shuffle(runs)
    edit_json(folder / "plan.json", runs=runs)
    monkeypatch.setattr(Path, "rglob", shuffled)
    assert results_of(folder) == example


def test_every_arm_that_is_named_anywhere_is_described(example):
    arms = {arm.name for arm in example.arms}
    named = {row.treatment for row in example.tests} | {row.reference for row in example.tests}
    named |= {curve.arm for panel in example.curves for curve in panel.curves}
    named |= {row.arm for row in example.table} | {result.arm for result in example.tuning}
    named |= {arm.arm for arm in example.downstream} | {run.arm for run in example.runs if run.stage != "base"}
    assert named <= arms
    groups = {group.name for group in example.groups}
    assert {row.group for row in example.tests} <= groups
    assert {arm.group for arm in example.arms} <= groups | {""}
