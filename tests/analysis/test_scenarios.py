"""Studies in which a verdict could mislead, and the words that a report then says (tests/analysis/approved)."""

import dataclasses
import shutil

import numpy
import pytest
from scenarios import (
    ASYNC,
    EIGHT,
    FIRST_LOSS,
    LOSSES_DECIDE,
    SOONER,
    SYNC,
    TARGET,
    diverges,
    ends_at,
    reaches,
    results_of,
    row_of,
    study_of,
    trust_of,
    two_arms,
)
from synthetic import SyntheticArm, edit_json, write_study

ALMOST = (55, 57.9, 60.8, 60, 63.7, 66.9, 69.8, 77.5)
"""Seconds of a treatment that is sooner than `EIGHT` in all seeds but the last."""
THEIRS, OURS = ([reaches(time) for time in times] for times in (EIGHT, SOONER))
RINGMASTER = SyntheticArm("ringmaster", settings=SYNC.settings)
FINAL = (5.00, 5.01, 4.99, 5.02, 4.98, 5.005, 4.995, 5.015)
MEASURED = tuple(dataclasses.replace(arm, clock="measured", speeds=None) for arm in (SYNC, ASYNC))
NAMES = {"treatment": MEASURED[1].name, "reference": MEASURED[0].name}
OLD = {"cpu": "slow old cpu", "cores": 4}
NEW = {"cpu": "fast new cpu", "cores": 64}
STUDIES = []


def study(write):
    """A function that writes a study whose words were approved."""
    STUDIES.append(write)
    return write


@pytest.mark.parametrize("write", STUDIES, ids=lambda write: write.__name__)
def test_a_study_has_the_approved_words(tmp_path, approved, write):
    approved(write(tmp_path))


@study
def an_arm_that_is_sooner_in_every_seed(folder):
    return two_arms(folder, THEIRS, OURS)


@study
def a_third_arm_that_nobody_registered_and_whose_runs_failed(folder):
    curves = {SYNC.name: THEIRS, ASYNC.name: OURS, RINGMASTER.name: OURS}
    registration = {"num_seeds": 8, "targets": {SYNC.name: TARGET}, "family": [ASYNC.name]}
    write_study(folder, curves, [SYNC, ASYNC, RINGMASTER], registration=registration)
    for seed in (100, 101, 102):
        edit_json(folder / f"test/{RINGMASTER.name}/s{seed}/summary.json", status="FAILED", message="killed")
    return results_of(folder)


def in_two_stretches(first, second):
    """A curve that is halfway to the target after `first` seconds, and at it after `second`."""

    def loss(time):
        half = (FIRST_LOSS - TARGET) / 2
        return FIRST_LOSS - half * (time / first if time < first else 1 + (time - first) / (second - first))

    return [(16 * time, float(time), loss(time)) for time in range(0, 101, 5)]


@study
def two_targets_that_disagree(folder):
    ours = [in_two_stretches(15, 58 + 1.01 * number) for number in range(8)]
    return two_arms(folder, [in_two_stretches(40, 60 + number) for number in range(8)], ours)


def ended(folder, ours, first=FIRST_LOSS):
    """Against a reference that ends at `FINAL`; None: a run that diverged."""
    lost = diverges(ends_at(4.9, first=first), 5)
    curves = [lost if loss is None else ends_at(loss, first=first) for loss in ours]
    return two_arms(folder, [ends_at(loss, first=first) for loss in FINAL], curves)


@study
def a_loss_that_is_worse_with_two_runs_that_diverged(folder):
    lost = [None, None, *(loss + 0.01 * k for k, loss in enumerate(FINAL[2:-1], 1)), FINAL[-1] - 0.005]
    return ended(folder, lost)


@study
def one_run_that_diverged_is_no_equivalence_where_the_improvement_is_small(folder):
    return ended(folder, [None, *(loss + 0.0005 * (-1) ** k for k, loss in enumerate(FINAL[1:]))], first=5.2)


@study
def every_run_of_an_arm_diverged(folder):
    return two_arms(folder, THEIRS, [diverges(reaches(60), 5)] * 8)


@study
def a_reference_with_runs_that_diverged_is_worse_where_a_treatment_is_slower(folder):
    theirs = [diverges(curve, 5) if k < 2 else curve for k, curve in enumerate(THEIRS)]
    return two_arms(folder, theirs, [reaches(80)] * 8)


@study
def only_a_diverged_run_missed_the_target_of_runs_without_a_common_budget(folder):
    arms = [dataclasses.replace(arm, settings={}) for arm in (SYNC, ASYNC)]
    found = two_arms(folder, THEIRS, [diverges(OURS[0], 5), *OURS[1:]], arms=arms)
    assert "may have missed" in trust_of(found, "common budget in seconds").detail
    return found


@study
def a_run_that_diverged_after_it_was_at_the_target_does_not_hold_it(folder):
    return two_arms(folder, THEIRS, [diverges(curve, 19) for curve in OURS])


@study
def two_arms_with_the_same_runs_have_the_same_interval(folder):
    return study_of(folder, [(SYNC, THEIRS), (ASYNC, OURS), (RINGMASTER, OURS)])


@study
def a_difference_that_holms_method_finds_after_another_says_that_its_interval_holds_0(folder):
    almost = [reaches(time) for time in ALMOST]
    return study_of(folder, [(SYNC, THEIRS), (ASYNC, OURS), (RINGMASTER, almost)])


@study
def an_equivalence_that_holms_method_finds_after_another_says_that_its_interval_is_too_wide(folder):
    near = [ends_at(loss) for loss in FINAL]
    wide = [ends_at(5.0 + 1.7 * (loss - 5.0)) for loss in FINAL]
    return study_of(folder, [(SYNC, [ends_at(5.0)] * 8), (ASYNC, near), (RINGMASTER, wide)], registration=LOSSES_DECIDE)


def gained(tenths, folder, **registration):
    """A study in which both arms gain so many tenths of a nat, within 0.002 of each other; the margin is 0.02."""
    gaps = (0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002)
    theirs, ours = ([ends_at(6 - tenths / 10 + gap) for gap in side] for side in ([0.0] * 8, gaps))
    return two_arms(folder, theirs, ours, registration=LOSSES_DECIDE | registration)


@study
def a_margin_of_a_fifth_of_the_improvement_without_a_reason_is_not_used(folder):
    return gained(1, folder)


@study
def a_margin_of_a_fifth_of_the_improvement_is_used_with_the_reason_of_the_plan(folder):
    return gained(1, folder, margin_reasons={"loss": "less than what another seed changes"})


def test_a_margin_of_a_tenth_of_the_improvement_needs_no_reason_and_seeds_outside_are_counted(tmp_path):
    assert row_of(gained(2, tmp_path / "tenth"), "loss_at_equal_samples").word == "equivalent"
    found = gained(10, tmp_path, margins={"loss": 0.0019})
    row = row_of(found, "loss_at_equal_samples")
    assert row.word == "equivalent"
    assert row.outside == 4
    told = "4 of 8 seeds were outside the margin, and with 95 % confidence at most 81 % of seeds are."
    assert f"Loss at equal samples: {told}" in found.headlines[0].details


def test_a_table_for_a_paper_has_the_word_of_the_registered_endpoint_where_all_is_exploratory_too(tmp_path):
    found = gained(2, tmp_path, num_seeds=9)
    assert found.table("paper")["verdict"].to_list() == ["equivalent", "reference"]


@study
def a_catastrophe_that_eight_seeds_did_not_show(folder):
    """Nine seeds of ten gain a little and one loses much, so that the true mean is no better: eight may all gain."""
    losses = [ends_at(5.0 - gain) for gain in (0.010, 0.012, 0.014, 0.011, 0.013, 0.015, 0.016, 0.012)]
    return two_arms(folder, [ends_at(5.0)] * 8, losses, registration=LOSSES_DECIDE | {"margins": {}})


def falls(generator, evaluations):
    """One true curve, whose plateau is just below the target, with the fluctuation of every evaluation."""
    shares = numpy.linspace(0.0, 1.0, evaluations)
    losses = 4.98 + 1.02 * numpy.exp(-4 * shares) + generator.normal(0.0, 0.03, evaluations) * (shares > 0)
    return [(round(1600 * share), 100.0 * share, loss) for share, loss in zip(shares, losses, strict=True)]


@study
def an_arm_that_was_evaluated_eight_times_as_often(folder):
    generator = numpy.random.default_rng(5)
    return two_arms(folder, *([falls(generator, number) for _ in range(12)] for number in (11, 81)))


@study
def a_dip_below_the_target_for_one_evaluation(folder):
    def dips(seconds):
        curve = []
        for k in range(21):
            curve.append((80 * k, 5.0 * k, 6.0 - 0.85 * min(1.0, k / 10)))
        curve[seconds // 5] = (*curve[seconds // 5][:2], 4.999)
        return curve

    ours = [dips(seconds) for seconds in (30, 35, 30, 35, 40, 35, 30, 35)]
    return two_arms(folder, [reaches(seconds) for seconds in range(70, 78)], ours)


@pytest.mark.parametrize(("ours", "theirs"), [(21, 81), (81, 21), (31, 21), (21, 21)])
def test_the_ratio_of_straight_curves_lies_between_both_ends_however_often_an_arm_was_evaluated(tmp_path, ours, theirs):
    sides = [[reaches(time, evaluations=n) for time in times] for times, n in ((EIGHT, theirs), (SOONER, ours))]
    row = row_of(two_arms(tmp_path, *sides), "time_to_target")
    assert row.word == "better"
    assert row.wins == 8
    for times, ends in ((SOONER, row.treatment_ends), (EIGHT, row.reference_ends)):
        assert all(early < time <= late for time, (early, late) in zip(times, ends, strict=True))
    late, early = row.ratio_ends
    assert row.ratio_low < late < sum(EIGHT) / sum(SOONER) < early < row.ratio_high
    assert row.p == max(row.p_ends)


def test_a_word_stands_where_both_ends_say_it(tmp_path):
    sides = []
    for times in (EIGHT, ALMOST):
        sides.append([reaches(time, evaluations=161) for time in times])
    row = row_of(two_arms(tmp_path, *sides), "time_to_target")
    late, early = row.p_ends
    assert early < 0.05 < late == row.p
    assert row.word == "undecided"
    assert row.reason.startswith(
        "evaluated every 0.625 virtual s (type evaluations=1600 for a narrower answer); p_Holm"
    )


def test_a_run_that_was_seen_at_its_end_alone_may_have_been_at_the_target_at_any_time(tmp_path):
    sides = []
    for times, n in ((EIGHT, 21), (SOONER, 2)):
        sides.append([reaches(time, evaluations=n) for time in times])
    study = two_arms(tmp_path, *sides)
    row = row_of(study, "time_to_target")
    assert row.word == "undecided"
    assert row.p == 1.0
    assert row.wins == 0
    assert row.treatment_ends.tolist() == [[0.0, 100.0]] * 8
    assert "is undecided: evaluated every 100 virtual s (type evaluations=10 for a narrower" in study.headlines[0].text


def test_a_time_that_may_be_0_is_sooner_by_more_than_a_number(tmp_path):
    sides = []
    for times, n in ((EIGHT, 11), ([5] * 8, 11)):
        sides.append([reaches(time, evaluations=n) for time in times])
    study = two_arms(tmp_path, *sides)
    row = row_of(study, "time_to_target")
    assert row.ratio_ends[1] == numpy.inf
    assert row.ratio_high == numpy.inf
    assert row.ratio_ends[0] == sum(10 * ((time - 1) // 10) for time in EIGHT) / 80
    assert "asynchronous training reached the target more than 6" in study.headlines[0].text.lower()


def test_another_arm_that_was_seldom_evaluated_takes_no_look_from_a_comparison(tmp_path):
    generator = numpy.random.default_rng(7)
    sides = []
    for number in (21, 41):
        sides.append([falls(generator, number) for _ in range(8)])
    arms = [*zip((SYNC, ASYNC), sides, strict=True), (RINGMASTER, [reaches(50, evaluations=3)] * 8)]
    alone, both = (row_of(study_of(tmp_path / f"{n}", arms[:n]), "time_to_target") for n in (2, 3))
    assert [*both.treatment_values, *both.reference_values] == [*alone.treatment_values, *alone.reference_values]


def changed(folder, change, arms=(0, 1), seeds=slice(None), *, file="environment.json"):
    """The measured study in which async is 1.54 times sooner, with one file of some runs changed."""

    def edit(study):
        for arm in arms:
            for path in sorted((study / "test" / MEASURED[arm].name).glob(f"s*/{file}"))[seeds]:
                edit_json(path, **(change[arm] if isinstance(change, tuple) else change))

    return two_arms(folder, THEIRS, OURS, arms=MEASURED, afterwards=edit)


@study
def all_runs_of_an_arm_on_a_faster_machine(folder):
    found = changed(folder, (OLD, NEW))
    assert trust_of(found, "comparable runs").value == "not in 2 of 3 tests"
    assert sorted(found.table("environments")["arms"]) == ["async-w4", "sync-w4"]
    return found


@study
def two_pairs_of_eight_on_unlike_machines(folder):
    return changed(folder, NEW, arms=[1], seeds=slice(6, None))


def test_pairs_on_two_machines_each_on_one_are_compared(tmp_path):
    row = row_of(changed(tmp_path, NEW, seeds=slice(None, None, 2)), "time_to_target", **NAMES)
    assert row.family == "primary"
    assert row.word == "better"
    assert row.n == 8


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"threads_per_worker": 2}, "runs of sync-w4 had 1 thread a worker on "),
        ({"device": "cuda"}, "runs of sync-w4 had 1 thread a worker on "),
        (
            ({}, {"versions": {"torch": "2.13.0+cu130"}}),
            "torch of async-w4: 2.13.0+cu130; of sync-w4: 2.13.0",
        ),
    ],
)
def test_threads_devices_and_builds_of_torch_decide_whether_seconds_are_compared(tmp_path, change, why):
    seeds, arms = (slice(None), (0, 1)) if isinstance(change, tuple) else (slice(1), [0])
    row = row_of(changed(tmp_path, change, arms, seeds), "time_to_target", **NAMES)
    assert row.word == "not comparable"
    assert row.n == 0
    assert row.reason.startswith(why)


def load(others, stolen):
    return {"machine_load": {"cores": 2, "own_share": 0.05, "others_share": others, "stolen_share": stolen}}


@pytest.mark.parametrize(("others", "stolen", "family"), [(0.05, 0.04, "primary"), (0.02, 0.09, "exploratory")])
def test_a_tenth_of_the_machine_may_be_used_by_others_or_stolen(tmp_path, others, stolen, family):
    found = changed(tmp_path, load(others, stolen), [0], slice(3, 4), file="summary.json")
    assert row_of(found, "time_to_target", **NAMES).family == family


@study
def a_machine_that_others_used(folder):
    found = changed(folder, load(0.9, 0.0), [0], file="summary.json")
    assert trust_of(found, "others on the machine").value == "8 of 16 measured runs"
    return found


def lost(folder, lose):
    """The slowest two runs of async are lost; without them it would be sooner in every seed."""

    def afterwards(study):
        for run in sorted((study / "test" / ASYNC.name).glob("s*"))[6:]:
            lose(run)

    ours = [reaches(time) for time in (*SOONER[:6], 160, 160)]
    return two_arms(folder, THEIRS, ours, afterwards=afterwards)


@study
def the_slowest_runs_of_an_arm_failed(folder):
    return lost(folder, lambda run: edit_json(run / "summary.json", status="FAILED", message="worker died"))


@study
def the_slowest_runs_of_an_arm_are_missing(folder):
    return lost(folder, shutil.rmtree)


def test_a_pair_in_which_both_runs_diverged_is_a_tie(tmp_path):
    curves = [diverges(ends_at(FINAL[0]), 5), *(ends_at(loss) for loss in FINAL[1:])]
    ours = [diverges(ends_at(5.0), 9), *(ends_at(loss + 0.01 * k) for k, loss in enumerate(FINAL[1:], 1))]
    row = row_of(two_arms(tmp_path, curves, ours), "loss_at_equal_seconds")
    assert row.ties == 1
    assert row.wins == 0
    assert row.n == 8
    assert row.diverged == (0, 0)
    assert row.word == "worse"
    assert row.p == 2 / 2**7


@pytest.mark.parametrize("edge", ["sync", "async"])
def test_a_learning_rate_at_the_edge_of_its_grid(tmp_path, edge):
    grid = {"tuning_seeds": (0,), "trial_losses": ((5.0,), (5.2,), (5.4,))}
    rates = {True: (2e-3, 1e-3, 5e-4), False: (1e-3, 2e-3, 5e-4)}
    arms = [dataclasses.replace(arm, learning_rates=rates[arm.algorithm == edge], **grid) for arm in (SYNC, ASYNC)]
    text = two_arms(tmp_path, THEIRS, OURS, arms=arms).headlines[0].text
    told = f"The learning rate of {edge}-w4-virtual lies at the edge of its grid, so a better one may lie beyond."
    assert text.count("edge of its grid") == 1
    assert text.count(told) == 1
