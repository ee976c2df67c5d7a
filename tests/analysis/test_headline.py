"""What a reader meets first says no more than was seen: times beyond the first run that ended, margins, lost causes."""

import dataclasses
import json

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reading import ASYNC, SYNC, question, results_of, row_of, trust_of
from synthetic import STRAGGLER, SyntheticArm, edit_json, planned, straight, write_finetuning, write_study

from analysis.findings.judging import FOUND_AFTER_OTHERS, SHOWN_AFTER_OTHERS, RestrictedTimes, judge
from analysis.findings.sentence import conditions as conditions_in_words
from analysis.findings.sentence import supported
from analysis.findings.times import ReachedCurve, ReachedPanel
from analysis.report.figures.arm_names import Cast
from analysis.report.figures.loss_curves import step_curves
from analysis.report.figures.times import time_to_target
from analysis.report.tables.arms import conditions
from analysis.report.tables.arms import settings as settings_table
from analysis.report.tables.comparisons import comparisons, first_tests
from analysis.statistics.intervals import Interval

GROUP = f"4 workers, virtual clock, {STRAGGLER}"


def study_of(folder, treatment, reference, **registration):
    curves = {SYNC.name: reference, ASYNC.name: treatment}
    return results_of(
        write_study(folder, curves, [SYNC, ASYNC], registration={"num_seeds": len(treatment), **registration})
    )


def everything(found):
    """What is said at the top, in the headline and in small type below it."""
    return " ".join(text for headline in found.headlines for text in (headline.text, *headline.details))


def ends_early(missing):
    """Async is watched for 10 s: 8 - `missing` runs are at 5.0 after 6 to 9.5 s, the others never. Sync needs 20 s."""
    there = [straight(6.0, 4.0, seconds=12.0 + number)[:4] for number in range(8 - missing)]
    treatment = [[*curve[:3], (160, 10.0, 4.9)] for curve in there]
    treatment += [straight(6.0, 5.2, seconds=10.0)] * missing
    return treatment, [straight(6.0, 4.0, seconds=40.0, evaluations=21)] * 8


def test_times_are_told_up_to_the_end_of_the_first_run_that_missed_the_target(tmp_path):
    found = study_of(tmp_path, *ends_early(2))
    row = row_of(found, "time_to_target")
    assert row.times is not None
    assert dataclasses.replace(row.times, ratio=None) == RestrictedTimes(10.0, True, 6, 0, 0, 8)
    assert row.times.ratio is not None
    assert row.times.ratio.estimate == pytest.approx(10.0 / row.treatment_mean)
    times = [6.0, 6.5, 7.0, 7.5, 8.0, 8.5, 10.0, 10.0]
    assert (row.treatment_mean, row.reference_mean) == pytest.approx((sum(times) / 8, 10.0))
    assert row.word == "better"
    headline = found.headlines[0]
    assert headline.text == (
        "Asynchronous training was sooner at the target than synchronous training. Within 10 simulated seconds, "
        "asynchronous training reached the target in 6 of 8 runs and synchronous training never reached it (0 of 8 "
        "runs, 8 later). Not registered: its final loss is worse: 1.0 nats higher (8 of 8 seeds)."
    )
    assert headline.details[:2] == (
        "Mean time to the target, counted up to 10 virtual s: 7.9 with async, 10.0 with sync, 2.1 lower (95 % CI 0.8 "
        "to 3.3, p_Holm 0.031).",
        "10 virtual s is where the first run that missed it ended.",
    )


def never_there(seeds=8):
    """Async ends at 5.2 with all its seconds used up; sync reaches the target of 5.0 after 5, 5.5, ... of its 10 s."""
    treatment = [straight(6.0, 5.2, seconds=10.0, samples=320)] * seeds
    return treatment, [straight(6.0, 4.0 + 0.1 * number, seconds=10.0) for number in range(seeds)]


def in_seconds(folder, treatment, reference, seconds=10.0):
    """A study in which every run had the same budget in seconds."""
    budget = {"samples": None, "seconds": seconds}
    arms = [dataclasses.replace(arm, settings=budget) for arm in (SYNC, ASYNC)]
    curves = {SYNC.name: reference, ASYNC.name: treatment}
    return results_of(write_study(folder, curves, arms, registration={"num_seeds": len(treatment)}))


def test_async_that_never_reaches_a_target_that_sync_always_reaches_is_later(tmp_path):
    found = in_seconds(tmp_path, *never_there())
    row, reached = row_of(found, "time_to_target"), row_of(found, "target_reached")
    assert row.times is not None
    assert dataclasses.replace(row.times, ratio=None) == RestrictedTimes(10.0, False, 0, 8, 0, 0, common=True)
    assert (row.word, row.p, row.family) == ("worse", 2 / 2**8, "primary")
    assert (reached.word, reached.p, reached.wins, reached.ties) == ("worse", 2 / 2**8, 0, 0)
    assert reached.estimate is not None
    assert (reached.estimate.estimate, reached.family, reached.family_size) == (-1.0, "secondary", 1)
    assert (reached.estimate.low, reached.estimate.high) == pytest.approx((-1.0, 1 - 2 * 0.025 ** (1 / 8)))
    assert reached.test.startswith("exact McNemar test")
    headline = found.headlines[0]
    assert headline.text.startswith(
        "Within 10 simulated seconds, asynchronous training never reached the target (0 of 8 runs) and synchronous "
        "training always reached it (8 of 8 runs). Not registered: its loss at equal samples is worse: "
    )
    assert headline.details[1:3] == (
        "10 virtual s is the budget of every run.",
        "Runs that reached it, fewer than with sync: exact McNemar test, p_Holm 0.0078.",
    )


def test_where_every_run_reaches_the_target_mcnemars_test_has_nothing_to_test(tmp_path):
    reference = never_there()[1]
    treatment = [straight(6.0, 3.6 + 0.1 * number, seconds=10.0, samples=320) for number in range(8)]
    found = in_seconds(tmp_path, treatment, reference)
    reached = row_of(found, "target_reached")
    assert (reached.word, reached.estimate, reached.p, reached.p_holm) == ("undecided", None, None, None)
    assert reached.reason.startswith("none of 8 pairs has one run that reached the target and one that did not")
    assert row_of(found, "time_to_target").word == "better"
    assert "McNemar" not in everything(found)


def test_times_that_differ_by_the_same_in_every_seed_measure_nothing_within_common_seconds_either(tmp_path):
    found = in_seconds(tmp_path, never_there()[0], [straight(6.0, 4.0, seconds=10.0)] * 8)
    row, reached = row_of(found, "time_to_target"), row_of(found, "target_reached")
    assert (row.word, row.estimate, row.p) == ("undecided", None, None)
    assert row.reason == "all 8 differences are 5.00; nothing varied: nothing was measured"
    assert row.times is not None
    assert (row.times.common, row.times.ratio) == (True, None)
    assert (reached.word, reached.p) == ("worse", 2 / 2**8)
    assert found.headlines[0].text.startswith(
        "Within 10 simulated seconds, asynchronous training never reached the target (0 of 8 runs) and synchronous "
        "training always reached it (8 of 8 runs). Nothing is shown about the time to the target: all 8 differences "
    )
    assert (
        "Runs that reached it, fewer than with sync: exact McNemar test, p_Holm 0.0078." in found.headlines[0].details
    )


def test_the_same_losses_with_budgets_in_samples_say_nothing_of_the_time(tmp_path):
    treatment = [straight(6.0, 5.2, seconds=4.0)] * 8  # its samples are used up before sync is there
    found = study_of(tmp_path, treatment, never_there()[1])
    row = row_of(found, "time_to_target")
    assert (row.word, row.estimate) == ("undecided", None)
    assert not [row for row in found.tests if row.endpoint == "target_reached"]


def test_a_run_that_ended_before_the_common_budget_leaves_none(tmp_path):
    treatment, reference = never_there()
    found = in_seconds(tmp_path, [*treatment[:-1], straight(6.0, 5.2, seconds=9.0)], reference)
    row = row_of(found, "time_to_target")
    assert row.times is not None
    assert (row.times.budget, row.times.common) == (9.0, False)


def test_where_no_run_reaches_the_target_within_the_common_budget_nothing_is_shown(tmp_path):
    late = [straight(6.0, 4.9, seconds=11.0)] * 8  # measured runs end with the update after their budget
    row = row_of(in_seconds(tmp_path, never_there()[0], late), "time_to_target")
    assert row.estimate is None
    assert row.reason.endswith("no run reached the target of 5.00 within the 10.0 virtual s of every run")


def test_losses_between_two_evaluations_are_said_to_be_read_there(tmp_path):
    row = row_of(in_seconds(tmp_path, *never_there()), "loss_at_equal_samples")
    assert row.treatment_mean == pytest.approx(5.6)  # at 160 of 320 samples
    assert row.notes[:1] == ("compared at 160 samples, where the first run ended; the last ended at 320",)
    three = [[*straight(6.0, 5.2, seconds=10.0, samples=480, evaluations=3)]] * 8
    row = row_of(in_seconds(tmp_path / "three", three, never_there()[1]), "loss_at_equal_samples")
    assert "read on straight lines between evaluations up to 240 samples apart" in row.notes


SMALL = SyntheticArm("sync_small", batch_size=4)


def of_unequal_batches(folder):
    """Async and the control arm make 40 updates of 16 samples, sync 10 of 64."""
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0, samples=640)] * 8,
        ASYNC.name: [straight(6.0, 4.1 + 0.01 * number, seconds=5.0, samples=640) for number in range(8)],
        SMALL.name: [straight(6.0, 4.1, seconds=40.0, samples=640)] * 8,
    }
    write_study(folder, curves, [SYNC, ASYNC, SMALL], registration={"control": SMALL.algorithm, "family": [ASYNC.name]})
    for path in folder.glob(f"test/{SYNC.name}/*/summary.json"):
        edit_json(path, num_updates=10)
    return folder


def test_the_settings_that_differ_within_a_group_are_a_table_and_none_where_nothing_does(tmp_path):
    """The arms of a group differ in their learning rate, the control arm in its batches; seeds are no setting."""
    arms = [dataclasses.replace(arm, learning_rates=(rate,)) for arm, rate in ((SYNC, 0.001), (ASYNC, 0.0005))]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in (*arms, SMALL)}
    control = {"control": SMALL.algorithm, "family": [ASYNC.name], "num_seeds": 6}
    table = settings_table(results_of(write_study(tmp_path / "differ", curves, [*arms, SMALL], registration=control)))
    assert [column.title for column in table.columns] == ["arm", "batch size", "learning rate"]
    assert sorted([cell.text for cell in row[1:]] for row in table.rows) == [
        ["16", "0.0005"],
        ["16", "0.001"],
        ["4", "0.0005"],
    ]
    alike = study_of(tmp_path / "alike", *never_there(6))
    assert [row.arm for row in alike.settings] == [SYNC.name, ASYNC.name]  # in their samples
    same = study_of(tmp_path / "same", never_there(6)[1], never_there(6)[1])
    assert (same.settings, settings_table(same).rows) == ((), ())


def test_the_learning_rate_of_one_run_of_every_arm_is_drawn_over_its_samples(tmp_path):
    arms = [dataclasses.replace(arm, learning_rates=(rate,)) for arm, rate in ((SYNC, 0.001), (ASYNC, 0.0005))]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in arms}
    delays = {arm.name: [0, 1, 1, 2] for arm in arms}
    (found,) = results_of(write_study(tmp_path, curves, arms, registration={"num_seeds": 6}, delays=delays)).steps
    assert [(curve.arm, curve.samples, curve.values) for curve in found.curves] == [
        (SYNC.name, (40.0, 80.0, 120.0, 160.0), (0.001,) * 4),
        (ASYNC.name, (40.0, 80.0, 120.0, 160.0), (0.0005,) * 4),
    ]
    made = results_of(tmp_path)
    picture = step_curves(Cast(made), made.steps[0])
    assert [line.get_ydata().tolist() for line in picture.figure.axes[0].lines] == [[0.001] * 4, [0.0005] * 4]
    assert "async: at most 0.0005, at the end 0.0005" in picture.caption


def test_the_gradient_norm_is_drawn_as_means_over_parts_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("analysis.findings.curves.GRID_POINTS", 80)
    norms = ((SYNC, 0.5), (ASYNC, None))
    arms = [dataclasses.replace(arm, gradient_norm=norm) for arm, norm in norms]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in arms}
    delays = {arm.name: [0] * 160 for arm in arms}
    rates, found = results_of(write_study(tmp_path, curves, arms, registration={"num_seeds": 6}, delays=delays)).steps
    assert (rates.quantity, found.quantity) == ("learning rate", "gradient norm")
    (curve,) = found.curves
    assert (curve.arm, len(curve.values)) == (SYNC.name, 80)
    assert (curve.samples[0], curve.samples[-1]) == (2.0, 160.0)
    assert curve.values[:2] == (0.75, 1.75)  # of steps 1 and 2, of steps 3 and 4
    picture = step_curves(Cast(results_of(tmp_path)), found)
    assert "at most 79.75, at the end 79.75" in picture.caption


def test_the_control_arm_is_drawn_beside_what_it_is_compared_with_and_moves_no_number_of_it(tmp_path):
    found = results_of(of_unequal_batches(tmp_path))
    primary = next(group for group in found.groups if group.primary)
    assert {panel.group for panel in found.curves} == {primary.name}
    for panel in found.curves:
        assert [curve.arm for curve in panel.curves] == [SYNC.name, ASYNC.name, SMALL.name]
        assert f"{SMALL.name} is the control arm, with batches of another size" in panel.notes
    (table,) = conditions(found)
    place = [column.title for column in table.columns].index("loss, equal seconds (nats)")
    ends = {row[0].text.split(",")[0]: row[place].small.split("at ")[-1] for row in table.rows}
    assert ends == {"sync": "5.000 virtual s", "async": "5.000 virtual s", "sync_small": "40.00 virtual s"}


def test_unequal_batches_are_said_wherever_they_bear_on_a_difference(tmp_path):
    found = results_of(of_unequal_batches(tmp_path))
    told = (
        f"unequal batches: {ASYNC.name} makes 4 times as many updates of the same samples as {SYNC.name} (16 and 64 "
        "samples an update)"
    )
    assert f"{told[0].upper()}{told[1:]}." in found.headlines[0].details
    assert told in row_of(found, "loss_at_equal_samples").notes
    item = trust_of(found, "equal batches per update")
    assert (item.value, item.level) == ("not in 1 of 1 comparisons", "warning")
    assert item.detail.endswith(f". With equal batches: {ASYNC.name} against {SMALL.name}")
    (table,) = conditions(found)
    names = [column.title for column in table.columns]
    cells = [[row[names.index(name)].text for name in ("updates", "samples/update")] for row in table.rows]
    assert [(cell[0].split()[0], cell[1]) for cell in cells] == [("10.00", "64"), ("40.00", "16"), ("40.00", "16")]


def test_the_control_arm_is_not_compared_with_the_baseline(tmp_path):
    folder = of_unequal_batches(tmp_path)
    told = json.loads((folder / "plan.json").read_text())
    for arm in ("baseline", SYNC.name, SMALL.name):
        for seed in range(100, 108):
            path = f"finetune/{arm}/s{seed}-f0"
            parent = None if arm == "baseline" else f"test/{arm}/s{seed}"
            told["runs"].append(planned(path, "finetune", arm, seed, parent=parent, finetune_seed=1000 * seed))
            write_finetuning(folder / path, seed=1000 * seed, macro_f1=0.5, parent=None)
    (folder / "plan.json").write_text(json.dumps(told))
    compared = {(row.treatment, row.family_size) for row in results_of(folder).tests if row.endpoint == "macro_f1"}
    assert compared == {(SYNC.name, 1)}


def test_the_control_arm_is_compared_at_equal_samples_alone_in_a_family_of_its_own(tmp_path):
    found = results_of(of_unequal_batches(tmp_path))
    (row,) = [row for row in found.tests if row.reference == SMALL.name]
    assert (row.treatment, row.endpoint, row.family, row.family_size) == (
        ASYNC.name,
        "loss_at_equal_samples",
        "secondary",
        1,
    )
    assert row.estimate is not None
    assert row.estimate.estimate == pytest.approx(0.035)
    assert not [note for note in row.notes if note.startswith("unequal batches")]
    assert row_of(found, "loss_at_equal_samples").family_size == 1
    assert "Against sync_small, with equal batches, loss at equal samples: " in everything(found)
    assert not [item for item in found.left_out if SMALL.name in item.name]


@pytest.mark.parametrize(
    ("confusion", "value", "level"),
    [
        (((40, 10), (10, 40)), "all", "good"),
        (((0, 50), (0, 50)), "not in 2 of 3 fine-tuning runs", "bad"),
        ((), "not known", "unknown"),
    ],
)
def test_classifiers_that_predict_one_class_are_flagged(confusion, value, level, tmp_path):
    write_study(tmp_path, {SYNC.name: [straight(6.0, 4.0, seconds=10.0)]}, [SYNC])
    told = json.loads((tmp_path / "plan.json").read_text())
    for number in range(3):
        path = f"finetune/{SYNC.name}/s100-f{number}"
        told["runs"].append(
            planned(path, "finetune", SYNC.name, 100, parent=f"test/{SYNC.name}/s100", finetune_seed=number)
        )
        own = ((40, 10), (10, 40)) if number == 0 else confusion
        write_finetuning(tmp_path / path, seed=number, macro_f1=0.33, parent=None, confusion=own)
    (tmp_path / "plan.json").write_text(json.dumps(told))
    item = trust_of(results_of(tmp_path), "classifiers that tell classes apart")
    assert (item.value, item.level) == (value, level)
    assert item.detail.startswith(f"{SYNC.name} 2: they predict one class for every text") == (level == "bad")


def test_a_pair_in_which_neither_arrived_while_both_were_watched_is_no_loss(tmp_path):
    row = row_of(study_of(tmp_path, *ends_early(2)), "time_to_target")
    assert (row.wins, row.ties, row.n) == (6, 2, 8)  # sync got there at 20 s, when async was no longer watched


def test_the_speed_up_has_the_interval_of_the_test_that_its_word_is_from(tmp_path):
    found = study_of(tmp_path, *ends_early(2))
    ratio = row_of(found, "time_to_target").times.ratio
    assert (ratio.n, f"{ratio.estimate:.1f}") == (8, "1.3")
    assert ratio.low > 1
    (first, *_) = first_tests(found).rows
    assert first[2].small.endswith("in mean time, won 6 of 8, 2 even")


def test_where_nobody_arrived_in_time_there_is_no_difference_and_no_interval(tmp_path):
    found = study_of(tmp_path, *ends_early(8))
    row = row_of(found, "time_to_target")
    told = "no run reached the target of 5.00 before 10.0 virtual s, when the first run that missed it ended "
    assert row.reason == f"{told}(later: async 0 of 8, sync 8 of 8)"
    assert (row.word, row.estimate, row.treatment_mean) == ("undecided", None, None)
    assert found.headlines[0].text.startswith(f"Nothing is shown about the time to the target: {told}(later: ")
    assert (first_tests(found).rows[0][2].text, first_tests(found).rows[0][2].small) == ("-", row.reason)
    (table,) = conditions(found)
    assert [(row[3].text, row[3].small) for row in table.rows] == [("-", "none before 10.00 virtual s")] * 2


def test_runs_that_all_arrive_with_their_last_evaluation_are_compared(tmp_path):
    alike = [straight(6.0, 5.0, seconds=10.0)] * 7
    row = row_of(study_of(tmp_path, [*alike, straight(6.0, 5.0, seconds=9.0)], [*alike, alike[0]]), "time_to_target")
    assert row.estimate is not None
    assert (row.estimate.estimate, row.ties) == (-0.125, 7)
    assert dataclasses.replace(row.times, ratio=None) == RestrictedTimes(10.0, False, 8, 8, 0, 0)


@pytest.mark.parametrize("gap", [0.0, 0.003])
def test_differences_that_are_all_the_same_measure_nothing_and_are_not_equivalent(tmp_path, gap):
    reference = [straight(6.0, 5.0 + seed / 64, seconds=10.0 + seed) for seed in range(8)]
    treatment = [straight(6.0, 5.0 + seed / 64 + gap, seconds=9.0 + seed) for seed in range(8)]
    found = study_of(tmp_path, treatment, reference)
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.estimate, row.p, row.p_holm, row.equivalence) == ("undecided", *(None,) * 4)
    assert row.reason == f"all 8 differences are {gap:.5g}{'00' * bool(gap)}; nothing varied: nothing was measured"
    assert "othing is shown about" in found.headlines[0].text
    assert f"final loss{' of asynchronous training' * bool(gap)}: {row.reason}." in found.headlines[0].text
    assert "equivalent" not in everything(found)


def test_table_1_says_up_to_which_second_and_at_which(tmp_path):
    (table,) = conditions(study_of(tmp_path, *ends_early(2)))
    assert [row[3].small for row in table.rows] == ["none before 10.00 virtual s", "n = 8; up to 10.00 virtual s"]
    assert {row[5].small for row in table.rows} == {"n = 8; at 10.00 virtual s"}


def close(improvement):
    """Both arms end alike after an improvement of so much; the margin is 0.02."""
    gaps = [0.001, -0.001, 0.002, -0.002, 0.001, -0.001, 0.002, -0.002]
    reference = [straight(6.0, 6.0 - improvement, seconds=10.0)] * 8
    return [straight(6.0, 6.0 - improvement + gap, seconds=10.0) for gap in gaps], reference


def test_a_margin_wider_than_half_of_the_improvement_makes_nothing_equivalent(tmp_path):
    found = study_of(tmp_path, *close(0.03))
    row = row_of(found, "loss_at_equal_samples")
    assert (row.word, row.equivalence, row.margin_share) == ("undecided", None, pytest.approx(0.02 / 0.03))
    assert row.reason.endswith(
        "the margin of ±0.0200 is 67 % of the reference's improvement, too wide to mean anything"
    )
    assert "The margin of ±0.0200 is 67 % of the reference's improvement, too wide to mean anything." in everything(
        found
    )
    cell = next(row[5] for row in first_tests(found).rows if row[1].text == "evaluation loss at equal samples")
    assert (cell.text, cell.small) == (
        "±0.02",
        "the margin of ±0.0200 is 67 % of the reference's improvement, too wide to mean anything",
    )


def test_a_narrow_margin_is_said_as_a_share_of_the_improvement(tmp_path):
    found = study_of(tmp_path, *close(1.0))
    assert row_of(found, "loss_at_equal_samples").word == "equivalent"
    assert "Not registered: its final loss is equivalent within ±0.02 nats." in found.headlines[0].text
    assert "The margin of ±0.02 is 2 % of sync's improvement." in found.headlines[0].details


def test_a_margin_means_nothing_where_the_reference_did_not_improve(tmp_path):
    row = row_of(study_of(tmp_path, *close(-0.5)), "loss_at_equal_samples")
    assert (row.word, row.equivalence, row.margin_share, row.relative) == ("undecided", None, None, None)
    assert row.reason.endswith("the reference did not improve, so a margin of ±0.0200 cannot be judged")


@pytest.mark.parametrize(
    ("alpha", "value", "detail"),
    [
        (0.05, "1.18 SD of the differences", "with 8 pairs this test at 0.05 finds a difference of 1.18 SD"),
        (0.499, "0.54 SD of the differences", "with 8 pairs this test at 0.499 finds a difference of 0.54 SD"),
        (0.01, "1.91 SD of the differences", "with 8 pairs this test at 0.01 finds a difference of 1.91 SD"),
        (0.005, "none of any size", "no difference of any size can be found with 8 pairs (no p_Holm is below 0.00781)"),
    ],
)
def test_what_could_be_found_is_said_for_the_registered_level(tmp_path, alpha, value, detail):
    item = trust_of(study_of(tmp_path, *ends_early(2), alpha=alpha), "smallest detectable difference")
    assert item.value.startswith(value)
    assert item.detail.startswith(detail)
    assert item.level == ("bad" if value.startswith("none") else "good")


def test_a_family_that_is_too_large_for_its_seeds_is_said_to_find_nothing(tmp_path):
    ring, late = SyntheticArm("ringmaster"), ends_early(0)
    curves = {SYNC.name: late[1][:6], ASYNC.name: late[0][:6], ring.name: late[0][:6]}
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC, ring], registration={"num_seeds": 6}))
    item = trust_of(found, "smallest detectable difference")
    assert (item.value, item.level) == ("none of any size", "bad")
    told = "no difference of any size can be found with 6 pairs and 2 comparisons (no p_Holm is below 0.0625)"
    assert " is undecided, and so few seeds cannot show it. " in found.headlines[0].text
    assert f"{told[0].upper()}{told[1:]}." in found.headlines[0].details


def test_columns_of_intervals_are_headed_by_the_registered_level(tmp_path):
    found = study_of(tmp_path, *ends_early(2), alpha=0.1)
    row = row_of(found, "time_to_target")
    assert row.estimate.level == 0.9
    for table in (comparisons(found), first_tests(found)):
        assert not any("95 %" in column.title for column in table.columns)
        assert any("90 % CI" in cell.small for cell in table.rows[0])


def test_references_against_the_baseline_are_one_family_and_comparisons_in_a_group_another(tmp_path):
    other = [SyntheticArm("sync", 2), SyntheticArm("async", 2)]
    arms = [SYNC, ASYNC, *other]
    write_study(
        tmp_path,
        {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in arms},
        arms,
        registration={"num_seeds": 6},
    )
    runs = []
    for seed in range(100, 106):
        for arm, gain in [("baseline", 0.0), *((arm.name, 0.01) for arm in arms)]:
            path = f"finetune/{arm}/s{seed}-f0"
            parent = None if arm == "baseline" else f"test/{arm}/s{seed}"
            runs.append(planned(path, "finetune", arm, seed, parent=parent, finetune_seed=seed))
            write_finetuning(tmp_path / path, seed=seed, macro_f1=0.5 + gain, parent=None)
    plan = json.loads((tmp_path / "plan.json").read_text())
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"runs": plan["runs"] + runs}))
    found = results_of(tmp_path)
    sizes = {(row.reference, row.family_size) for row in found.tests if row.endpoint == "macro_f1"}
    assert sizes == {("baseline", 2), (SYNC.name, 1), (other[0].name, 1)}
    against_baseline = {row.treatment for row in found.tests if row.reference == "baseline"}
    assert against_baseline == {SYNC.name, other[0].name}
    against = row_of(found, "macro_f1")
    assert against.margin_share == pytest.approx(1.0)  # 0.01 of the 0.01 that intermediate training gave sync
    assert (against.word, against.equivalence) == ("undecided", None)


@pytest.mark.parametrize(("endpoint", "told"), [("time_to_target", True), ("loss_at_equal_samples", False)])
def test_a_tuning_criterion_that_is_not_the_endpoint_is_told(tmp_path, endpoint, told):
    arms = [
        dataclasses.replace(arm, learning_rates=(0.001, 0.002), trial_losses=((5.0,), (4.0,)), tuning_seeds=(0,))
        for arm in (SYNC, ASYNC)
    ]
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 6 for arm in arms}
    primary = {"endpoint": endpoint, "num_workers": 4, "clock": "virtual"}
    found = results_of(write_study(tmp_path, curves, arms, registration={"num_seeds": 6, "primary": primary}))
    item = trust_of(found, "tuning")
    assert item.value == "equal budgets"
    assert ("chosen by the final loss at equal samples, not by the primary endpoint" in item.detail) is told


@pytest.fixture
def drawn(example):
    def draw(*curves):
        panel = ReachedPanel(example.groups[0].name, 5.0, "pilots", 20.0, "of every run", None, curves, ())
        picture = time_to_target(Cast(example), panel)
        assert picture is not None
        return picture, picture.figure.axes[0]

    return draw


def test_a_step_is_the_share_of_runs_that_are_there_and_the_caption_counts_those_that_are_not(drawn):
    none, every = ReachedCurve("a", 6, (), None, None), ReachedCurve("b", 2, (3.0, 10.0), 6.5, None)
    picture, axes = drawn(none, every)
    steps = [line.get_xydata().tolist() for line in axes.lines if line.get_drawstyle() == "steps-post"]
    assert steps == [
        [[0.0, 0.0], [pytest.approx(20.4), 0.0]],
        [[0.0, 0.0], [3.0, 0.5], [10.0, 1.0], [pytest.approx(20.4), 1.0]],
    ]
    assert "Reached by 0 of 6 a runs; by all runs of the others. " in picture.caption
    assert picture.caption.endswith(" counts as not there. Dashed: the common budget, 20 s (of every run).")
    assert "Reached by 0 of 6 a runs. " in drawn(none)[0].caption
    assert "Reached by every run. " in drawn(every)[0].caption


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([-3.0, -1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.25, 4.0]), min_size=6, max_size=9),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0.05, 0.1, 0.15]),
    st.sampled_from([None, 0.5, 2.0, 5.0]),
)
def test_no_row_has_an_interval_and_a_word_that_disagree(family, alpha, margin):
    declared = {"alpha": alpha, "margin": margin}
    rows = judge(
        [
            question([10.0 + value for value in differences], [10.0] * len(differences), **declared, budget=budget)
            for differences in family
            for budget in (None, 12.0)
        ],
        numpy.random.default_rng(0),
    )
    for row in rows:
        found = row.deciding
        if found is None or found.low is None or found.high is None:
            assert row.word in ("undecided", "too few seeds")
            continue
        assert found.low <= found.estimate <= found.high
        assert row.estimate.level == pytest.approx(1 - alpha / row.family_size)
        holds_0 = found.holds(0.0)
        if row.word in ("better", "worse"):
            assert holds_0 == (FOUND_AFTER_OTHERS in row.notes) == (row.family_size * row.p >= alpha)
            assert (found.estimate < 0) == (row.word == "better")
        if row.word == "undecided":
            assert holds_0
        if row.word == "different but negligible":
            assert not holds_0
        if row.word in ("equivalent", "different but negligible"):
            inside = -row.margin < found.low <= found.high < row.margin
            assert inside == (SHOWN_AFTER_OTHERS not in row.notes) == (row.family_size * row.equivalence.p < alpha)
        if row.times is not None and row.times.ratio is not None and row.times.ratio.low is not None:
            assert row.times.ratio.holds(1.0) == row.estimate.holds(0.0)


def test_a_difference_is_told_with_a_word_and_positive_numbers(tmp_path):
    reference = [straight(6.0, 5.0, seconds=10.0)] * 8
    gains = [0.42, 0.43, 0.44, 0.45, 0.46, 0.47, 0.48, 0.49]
    found = study_of(tmp_path, [straight(6.0, 5.0 - gain, seconds=10.0) for gain in gains], reference)
    assert found.headlines[0].text.endswith(
        " Not registered: its final loss is better: 0.46 nats lower (8 of 8 seeds)."
    )
    told = "Loss at equal samples: 0.455 nats lower than sync (95 % CI 0.433 to 0.477, n = 8, p_Holm 0.0078)."
    assert told in found.headlines[0].details


def test_an_interval_that_holds_0_says_which_end_is_on_which_side(tmp_path):
    gaps = [0.1, -0.1, 0.2, -0.2, 0.3, -0.1, 0.2, -0.3]
    reference = [straight(6.0, 5.0, seconds=10.0)] * 8
    found = study_of(tmp_path, [straight(6.0, 5.0 + gap, seconds=10.0) for gap in gaps], reference)
    row = row_of(found, "loss_at_equal_samples")
    assert row.word == "undecided"
    assert found.headlines[0].text.endswith(" Whether its final loss is better or worse is undecided.")
    assert "0.01 nats higher than sync (95 % CI 0.20 lower to 0.20 higher, n = 8" in found.headlines[0].details[-1]


def test_a_headline_is_a_sentence_that_a_newspaper_could_print(tmp_path):
    """From the smallest sound example: sooner in every seed, a final loss that nothing can be said about."""
    gaps = [0.1, -0.1, 0.2, -0.2, 0.3, -0.1, 0.2, -0.3]
    treatment = [straight(6.0, 4.0 + gap, seconds=6.0) for gap in gaps]
    found = study_of(tmp_path, treatment, [straight(6.0, 4.0, seconds=10.0)] * 8)
    assert found.headlines[0].text == (
        "Asynchronous training reached the target 1.6\N{MULTIPLICATION SIGN} sooner than synchronous training (8 of 8 "
        "seeds). Whether its final loss is better or worse is undecided."
    )


def test_a_headline_says_how_many_runs_diverged_and_the_small_type_what_they_count_as(tmp_path):
    treatment = [straight(6.0, 4.0 + number / 100, seconds=6.0) for number in range(7)]
    treatment += [[(0, 0.0, 6.0), (40, 2.0, None)]]
    headline = study_of(tmp_path, treatment, [straight(6.0, 4.0, seconds=10.0)] * 8).headlines[0]
    assert headline.text.endswith(" 1 of 8 runs of asynchronous training diverged.")
    assert "its final loss is worse: higher in 7 of 8 seeds, 1 of them because the run diverged. " in headline.text
    assert "A diverged run is worse than any other, so the pairs are compared by ranks." in headline.details


def test_seconds_of_a_machine_with_too_few_cores_are_called_no_comparison_in_the_headline_itself(tmp_path):
    arms = [SyntheticArm(name, 4, "measured", None) for name in ("sync", "async")]
    curves = {arms[0].name: [straight(6.0, 4.0, seconds=10.0)] * 6}
    curves[arms[1].name] = [straight(6.0, 4.0 + number / 100, seconds=5.0) for number in range(6)]
    write_study(tmp_path, curves, arms, from_scratch=True)
    for path in tmp_path.glob("test/*/*/summary.json"):
        edit_json(path, oversubscription=2.0)
    headline = results_of(tmp_path).headlines[0]
    assert "The machine had more threads than cores, so its seconds are no speed comparison." in headline.text
    assert "From scratch: not STILT." in headline.details


def test_seconds_of_a_resumed_run_are_called_no_comparison_where_there_are_seconds(tmp_path):
    arms = [SyntheticArm(name, 4, "measured", None) for name in ("sync", "async")]
    curves = {arms[0].name: [straight(6.0, 4.0, seconds=10.0)] * 6}
    curves[arms[1].name] = [straight(6.0, 4.0 + number / 100, seconds=5.0) for number in range(6)]
    write_study(tmp_path, curves, arms)
    with open(next(tmp_path.glob("test/async*/*/events.jsonl")), "a") as file:
        file.write('{"name":"1","version":1,"total_samples":1,"train_seconds":1.0,"discarded":0,"kind":"resume"}\n')
    found = results_of(tmp_path)
    assert {row.endpoint for row in found.tests if row.caveats} == {"time_to_target", "loss_at_equal_seconds"}
    assert "Some runs were stopped and resumed, so their seconds are no speed comparison." in found.headlines[0].text


def test_too_few_seeds_are_said_once_and_what_was_seen_so_far_is_in_small_type(tmp_path):
    treatment = [straight(6.0, 4.0 + number / 10, seconds=6.0) for number in range(3)]
    headline = study_of(tmp_path, treatment, [straight(6.0, 4.0, seconds=10.0)] * 3).headlines[0]
    assert headline.text == (
        "There are too few seeds for a verdict on asynchronous training against synchronous training: 3 of the 6 "
        "pairs that a verdict needs."
    )
    assert [detail.startswith("So far, without a verdict") for detail in headline.details] == [True, True]


@pytest.mark.parametrize(
    ("speeds", "clock", "batch", "told"),
    [
        (STRAGGLER, "virtual", "", "one of 4 workers 3\N{MULTIPLICATION SIGN} slower, simulated"),
        (None, "measured", ", batch 8", "4 workers, measured, batches of 8"),
        ("power", "virtual", "", "4 workers, simulated, speeds power"),
        ("of a later version", "virtual", "", "4 workers, simulated, speeds of a later version"),
    ],
)
def test_conditions_are_named_in_words(tmp_path, speeds, clock, batch, told):
    group = study_of(tmp_path, *never_there(2)).groups[0]
    group = dataclasses.replace(group, speeds=speeds, clock=clock, batch_size=8, name=f"4 workers{batch}")
    assert conditions_in_words(group) == told


@settings(max_examples=200, deadline=None)
@given(
    st.floats(-1e3, 1e3).filter(lambda value: abs(value) > 1e-6),
    st.floats(1e-6, 1e3),
    st.floats(1e-6, 1e3),
    st.sampled_from([0, 1]),
)
def test_a_rounded_number_stays_on_its_side_of_0_where_the_interval_does(estimate, below, above, further):
    found = Interval(estimate, estimate - below, estimate + above, 0.95, 8)
    form = supported(found, further=further)
    if not found.low <= 0 <= found.high:
        assert (float(form(estimate)) > 0) == (estimate > 0)
        assert float(form(estimate)) != 0
        if further:
            assert 0 not in (float(form(found.low)), float(form(found.high)))
    largest = max(abs(end) for end in (found.low, estimate, found.high))
    assert abs(float(form(estimate)) - estimate) <= max(above + below, 0.01 * largest) / 2 + 1e-9
