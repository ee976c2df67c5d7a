"""Words that could mislead: what was found from outside, each a study with the word and the sentence it must have."""

import dataclasses
import math
import shutil

import numpy as np
import pytest
import scipy.stats
from doors import asyncsgd, cli
from scenarios import (
    ASYNC,
    EIGHT,
    LOSSES_DECIDE,
    SOONER,
    SYNC,
    ends_at,
    reaches,
    results_of,
    row_of,
    study_of,
    two_arms,
)
from synthetic import (
    SyntheticArm,
    edit_json,
    edit_yaml,
    planned,
    straight,
    write_finetuning,
    write_plan,
    write_registration,
    write_run,
)

CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]


def of_arm(folder, arm, file="summary.json"):
    return sorted((folder / "test" / arm.name).glob(f"s*/{file}"))


def changed(folder, **changes):
    """Two of eight runs of an arm are of something else."""

    def change(study):
        for path in of_arm(study, ASYNC)[:2]:
            edit_json(path, **changes)

    return two_arms(folder, *CURVES, afterwards=change)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": "causal_lm"}, "task of async-w4-virtual: causal_lm; of sync-w4-virtual: masked_lm"),
        ({"data_fingerprint": "beef"}, "data of async-w4-virtual: beef; of sync-w4-virtual: f00d"),
        ({"eval_masking": "word:0.3"}, "evaluation masks of async-w4-virtual: word:0.3; of sync-w4-virtual: not known"),
        ({"eval_weight": 24.0}, "evaluated terms of async-w4-virtual: 24; of sync-w4-virtual: 300"),
        ({"init_sha256": None}, "initial parameters of async-w4-virtual: not known; of sync-w4-virtual: "),
        ({"init_sha256": "ab" * 32}, f"initial parameters of async-w4-virtual: {'ab' * 6}; of sync-w4-virtual: "),
        ({"from_scratch": True}, "random start of async-w4-virtual: True; of sync-w4-virtual: False"),
    ],
)
def test_runs_that_differ_in_what_decides_a_result_are_not_comparable(tmp_path, changes, told):
    study = changed(tmp_path, **changes)
    assert set(study.tests["word"]) == {"not comparable"}
    for reason in study.tests["reason"]:
        assert reason.startswith(told)


@pytest.mark.parametrize(
    ("key", "what"), [("task", "task"), ("data_fingerprint", "data"), ("init_sha256", "initial parameters")]
)
def test_what_is_known_of_neither_run_is_not_the_same(tmp_path, key, what):
    def change(study):
        for path in study.glob("test/*/s*/summary.json"):
            edit_json(path, **{key: None})
            events = path.with_name("events.jsonl")
            if key == "task":
                told = events.read_text()
                events.write_text(told.replace('"masked_lm"', "null       ", 1))

    study = two_arms(tmp_path, *CURVES, afterwards=change)
    assert set(study.tests["word"]) == {"not comparable"}
    assert set(study.tests["reason"]) == {f"{what} of async-w4-virtual: not known; of sync-w4-virtual: not known"}


@pytest.mark.parametrize(
    ("key", "value"), {"samples": 1650, "seconds": 150, "epochs": 2, "target_loss": 4.1, "patience": 3}.items()
)
def test_runs_of_unlike_budgets_are_not_comparable_unless_the_plan_says_that_they_differ_in_it(tmp_path, key, value):
    def change(study):
        for path in of_arm(study, ASYNC, "settings.yaml"):
            edit_yaml(path, **{key: value})

    arms = [dataclasses.replace(arm, settings={}) for arm in (SYNC, ASYNC)]
    study = two_arms(tmp_path / "unsaid", *CURVES, arms=arms, afterwards=change)
    assert set(study.tests["word"]) == {"not comparable"}
    for reason in study.tests["reason"]:
        assert reason.startswith(f"{key} of async-w4-virtual: {value}; of sync")
    arms[1] = dataclasses.replace(ASYNC, settings={"samples": 1600, key: value})
    study = two_arms(tmp_path / "said", *CURVES, arms=arms, afterwards=change)
    assert row_of(study, "loss_at_equal_samples").word == "better"


def test_a_control_arm_with_a_budget_in_samples_is_compared_with_arms_that_have_seconds(tmp_path):
    small = SyntheticArm("sync_small")
    curves = [reaches(time) for time in EIGHT]
    arms = [(SYNC, curves), (ASYNC, CURVES[1]), (small, curves)]
    study = study_of(tmp_path, arms, registration={"control": "sync_small"})
    row = row_of(study, "loss_at_equal_samples", reference=small.name)
    assert row.family == "secondary"
    assert row.word == "better"


@pytest.mark.parametrize(
    ("key", "values", "told"),
    [
        ("seconds", (100.0, 90.0), "seconds of async-w4-virtual: 90; of sync-w4-virtual: 100 "),
        ("learning_rate", (1e-3, 2e-3), "learning_rate of async-w4-virtual: 0.002; of sync-w4-virtual: 0.001 "),
    ],
)
def test_loose_runs_that_differ_in_a_setting_are_compared_where_the_reader_says_that_they_are_meant_to(
    tmp_path, key, values, told
):
    for arm, times, value in zip((SYNC, ASYNC), (EIGHT, SOONER), values, strict=True):
        own = dataclasses.replace(arm, settings={**arm.settings, key: value})
        end = value if key == "seconds" else 100.0
        for seed, time in enumerate(times):
            curve = reaches(time, end=end)
            write_run(tmp_path / f"{arm.algorithm}{seed}", own, curve, seed=seed)
    row = row_of(results_of(tmp_path), "loss_at_equal_samples")
    assert row.word == "not comparable"
    assert row.reason == f"{told}(if the arms are meant to differ in it: --arms {key})"
    said = asyncsgd.load(tmp_path, arms=[key])
    assert row_of(said, "loss_at_equal_samples").word == "better"
    command = cli(["analysis.report", str(tmp_path), "--format", "sentence", "--arms", key])
    assert command.out.strip() == said.verdict


def test_another_model_is_not_comparable_although_the_plan_says_it(tmp_path):
    arms = []
    for arm, model in ((SYNC, "small"), (ASYNC, "tiny")):
        arms.append(dataclasses.replace(arm, settings={"seconds": 100.0, "model": model}))
    study = two_arms(tmp_path, *CURVES, arms=arms)
    for reason in study.tests["reason"]:
        assert reason.startswith("model of async-w4-virtual: tiny; of sync-w4-virtual: small; initial parameters of ")


MEASURED = [dataclasses.replace(arm, clock="measured", speeds=None) for arm in (SYNC, ASYNC)]


def test_machines_that_nobody_knows_are_not_the_same(tmp_path):
    def change(study):
        for arm in MEASURED:
            for path in of_arm(study, arm, "environment.json"):
                path.unlink()

    study = two_arms(tmp_path, *CURVES, arms=MEASURED, afterwards=change)
    row = row_of(study, "time_to_target", "async-w4", "sync-w4")
    assert row.word == "not comparable"
    assert row.reason == "machine of async-w4: not known; of sync-w4: not known"
    assert "reached" not in study.table("arms")  # there is no pair to count


def tuned(folder, scores, lost=None, status="FAILED", each=1):
    """Six seeds of two arms with macro-F1 registered; `lost`: a fine-tuning, or a pretraining, without a result."""
    declared = {"primary": {"endpoint": "macro_f1", "num_workers": 4, "clock": "virtual"}, "targets": {}}
    runs = []
    for arm, of_seeds in zip((SYNC, ASYNC), scores, strict=True):
        for seed, score in enumerate(of_seeds):
            name = f"test/{arm.name}/s{seed}"
            runs.append(planned(name, "test", arm.name, seed))
            curve = straight(6.0, 5.0 + 0.01 * seed, seconds=10.0)
            write_run(folder / name, arm, curve, seed=seed)
            for again in range(each):
                own = f"finetune/{arm.name}/s{seed}-f{again}"
                own_seed = seed + 100 * again
                runs.append(planned(own, "finetune", arm.name, seed, parent=name, finetune_seed=own_seed))
                write_finetuning(folder / own, seed=own_seed, macro_f1=score, parent={"run": name})
    write_registration(folder, num_seeds=7, **declared)
    write_plan(folder, [SYNC, ASYNC], runs)
    if lost is None:
        return results_of(folder)
    if status == "MISSING":
        shutil.rmtree(folder / lost)
    elif status == "UNFINISHED":
        (folder / lost / "summary.json").unlink()
    else:
        edit_json(folder / lost / "summary.json", status=status)
    return results_of(folder)


SCORES = [0.5 + 0.01 * k for k in range(7)]
BETTER = [score + 0.05 + 0.001 * k for k, score in enumerate(SCORES)]


def test_scores_after_fine_tuning_are_compared_by_pretraining_seed(tmp_path):
    study = tuned(tmp_path, (SCORES, BETTER))
    row = row_of(study, "macro_f1")
    assert row.family == "primary"
    assert row.word == "better"
    assert row.n == 7
    assert row.wins == 7
    assert row.estimate == pytest.approx(0.053)


@pytest.mark.parametrize("status", ["FAILED", "MISSING", "UNFINISHED"])
@pytest.mark.parametrize("stage", ["finetune", "test"])
def test_lost_fine_tunings_are_counted_named_and_make_the_row_exploratory(tmp_path, stage, status):
    if stage == "finetune":
        lost = f"finetune/{ASYNC.name}/s6-f0"
        num_pairs = 6
    else:
        lost = f"test/{ASYNC.name}/s6"
        num_pairs = 7
    study = tuned(tmp_path, (SCORES, BETTER), lost, status)
    row = row_of(study, "macro_f1")
    assert row.family == "exploratory"
    assert any(status in caveat and "left out" in caveat for caveat in row.caveats)
    assert row.n == num_pairs


def test_a_seed_that_lost_one_of_two_fine_tunings_is_in_no_pair(tmp_path):
    study = tuned(tmp_path, (SCORES, BETTER), f"finetune/{ASYNC.name}/s6-f1", "FAILED", each=2)
    row = row_of(study, "macro_f1")
    assert row.n == 6
    assert row.estimate == pytest.approx(0.05 + 0.001 * 2.5)


def test_fine_tunings_may_differ_in_what_tuning_chose_for_each_arm_or_the_reader_names(tmp_path):
    tuned(tmp_path, (SCORES, BETTER))
    settings = {}
    for path in tmp_path.glob("finetune/*/*"):
        rate = 0.002 if path.parent.name == ASYNC.name else 0.003
        (path / "settings.yaml").write_text(f"settings_format: 2\nlearning_rate: {rate}\n")
        settings[str(path.relative_to(tmp_path))] = {"learning_rate": rate}
    plan = tmp_path / "plan.json"
    edit_json(plan, settings=settings)
    row = row_of(results_of(tmp_path), "macro_f1")
    assert row.word == "better"
    assert "the arms also differ in learning_rate of the fine-tuning (0.002, 0.003)" in row.notes
    plan.unlink()
    assert row_of(results_of(tmp_path), "macro_f1").reason.endswith("--arms learning_rate)")
    assert row_of(asyncsgd.load(tmp_path, arms=["learning_rate"]), "macro_f1").word == "better"


def test_fine_tunings_on_two_data_are_no_one_score(tmp_path):
    tuned(tmp_path, (SCORES, BETTER), each=2)
    for path in tmp_path.glob("finetune/*/*-f1/summary.json"):
        edit_json(path, data_fingerprint="beef")
    study = results_of(tmp_path)
    row = row_of(study, "macro_f1")
    assert row.word == "not comparable"
    assert row.reason.startswith("the fine-tunings are scored by macro_f1 on data beef and macro_f1 on data feed;")
    assert len(study.table("downstream")) == 4


def test_the_interval_of_a_score_is_over_pretraining_seeds_however_often_each_was_fine_tuned(tmp_path):
    table = tuned(tmp_path, (SCORES, BETTER), each=2).table("downstream").set_index("arm")
    for arm, scores in ((SYNC, SCORES), (ASYNC, BETTER)):
        mean = np.mean(scores)
        low, high = scipy.stats.t.interval(0.95, 6, mean, scipy.stats.sem(scores))
        row = table.loc[arm.name]
        assert [row.score, row.score_low, row.score_high] == pytest.approx([mean, low, high])


def test_killed_runs_of_a_loose_folder_are_counted(tmp_path):
    for arm, times in ((SYNC, EIGHT), (ASYNC, SOONER)):
        for seed, time in enumerate(times):
            write_run(tmp_path / f"{arm.algorithm}{seed}", arm, reaches(time), seed=seed)
    (tmp_path / "async7" / "summary.json").unlink()
    study = results_of(tmp_path)
    assert "1 of 8 runs of async-w4-virtual is UNFINISHED, and left out." in study.headlines[0].text


def test_a_run_that_ends_far_above_its_start_never_reached_a_target_and_one_that_rises_again_is_told(tmp_path):
    blown = [*CURVES[1][0][:15], (1400, 87.5, 600.0), (1600, 100.0, 600.0)]
    risen = [*CURVES[1][1][:15], (1400, 87.5, 5.5), (1600, 100.0, 5.5)]
    study = two_arms(tmp_path, CURVES[0], [blown, risen, *CURVES[1][2:]])
    row = row_of(study, "time_to_target")
    assert row.reached == (7, 8)
    assert "1 of 8 runs of async-w4-virtual was at the target and is above it at its end." in study.headlines[0].text


def stopped(folder, reference, treatment):
    """Runs that ended where they were first seen at their target: seconds to it, and seconds between two looks."""
    arms = [dataclasses.replace(arm, settings={"target_loss": 5.0, "samples": 4000}) for arm in (SYNC, ASYNC)]
    curves = []
    for times, every in (reference, treatment):
        of_arm = []
        for time in times:
            num_looks = math.ceil(time / every) + 1
            looks = [every * k for k in range(num_looks)]
            of_arm.append([(16 * x, float(x), 6.0 - x / time) for x in looks])
        curves.append(of_arm)
    return two_arms(folder, *curves, arms=arms)


def test_a_run_that_stopped_at_its_target_was_there(tmp_path):
    soon = [6 + k / 2 for k in range(8)]
    study = stopped(tmp_path / "often", (EIGHT, 20), (soon, 1))
    row = row_of(study, "time_to_target")
    assert row.word == "better"
    assert row.reached == (8, 8)
    assert row.family == "exploratory"
    assert any("async-w4-virtual was evaluated 20 times as often as sync-w4-virtual" in one for one in row.caveats)
    assert row.treatment_ends.tolist() == [[0.0, math.ceil(time)] for time in soon]
    ends = [20 * math.ceil(time / 20) for time in EIGHT]
    assert row.reference_ends.tolist() == [[end - 20, end] for end in ends]
    a_second_sooner = [time - 1 for time in EIGHT]
    study = stopped(tmp_path / "near", (EIGHT, 20), (a_second_sooner, 1))
    row = row_of(study, "time_to_target")
    assert row.word == "undecided"
    assert row.reached == (8, 8)
    assert row.reason.startswith("evaluated every 20 virtual s (type evaluations=40 for a narrower answer); p_Holm")
    study = stopped(tmp_path / "alike", (EIGHT, 5), (SOONER, 5))
    row = row_of(study, "time_to_target")
    assert row.word == "better"
    assert row.family == "primary"
    assert row.ratio_ends[0] < sum(EIGHT) / sum(SOONER) < row.ratio_ends[1]


def test_a_ratio_without_an_interval_has_no_open_end(tmp_path):
    row = row_of(two_arms(tmp_path, CURVES[0][:5], [*CURVES[1][:4], reaches(130)]), "time_to_target")
    assert row.reached == (4, 5)
    assert math.isnan(row.ratio_low)
    assert math.isnan(row.ratio_high)


def test_runs_that_were_evaluated_at_their_start_alone_are_not_later_than_others(tmp_path):
    arms = [dataclasses.replace(arm, settings={"samples": 1600}) for arm in (SYNC, ASYNC)]
    row = row_of(two_arms(tmp_path, [[(0, 0.0, 6.0)]] * 8, CURVES[1], arms=arms), "time_to_target")
    assert row.budget == 0.0
    assert row.word == "undecided"


ENDED = "where the first run ended; the last ended at 1600"
SHARED = "the last evaluation that all runs share; the last ended at 1600"
PAIRED = "where the shorter run of each pair ended or both have an evaluation; the longest is 100"


@pytest.mark.parametrize(
    ("evaluations", "samples", "end", "others", "told"),
    [
        (21, 1600, 100.0, 21, []),
        (21, 800, 100.0, 21, [f"compared at 800 samples, {ENDED}"]),  # both have a look there
        (6, 1000, 100.0, 6, [f"compared at 1000 samples, {ENDED}"]),  # they share no look after half of that
        (6, 1000, 100.0, 5, [f"compared at 800 samples, {SHARED}"]),
        (21, 1600, 50.0, 21, [f"compared at 50 virtual s, {PAIRED}"]),
    ],
    ids=["at the end", "at a look", "between looks", "at an earlier look", "in seconds"],
)
def test_where_losses_are_compared_is_said_unless_it_is_the_end_of_all(
    evaluations, samples, end, others, told, tmp_path
):
    """Looks lie evenly over a run; those of the treatment over 1600 samples and 100 s."""
    shorter = [reaches(time, evaluations=evaluations, samples=samples, end=end) for time in EIGHT]
    longer = [reaches(time, evaluations=others) for time in SOONER]
    study = two_arms(tmp_path, shorter, longer)
    notes = []
    for endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds"):
        notes += [note for note in row_of(study, endpoint).notes if note.startswith("compared at")]
    assert notes == told


def test_a_single_letter_is_no_reason_for_a_margin_and_half_of_the_gain_is_never_negligible(tmp_path):
    theirs = [ends_at(5.9)] * 8
    ours = [ends_at(5.94 + 0.0001 * k) for k in range(8)]
    for number, reason in enumerate(("x", "less than another seed changes")):
        declared = LOSSES_DECIDE | {"margins": {"loss": 0.049}, "margin_reasons": {"loss": reason}}
        study = two_arms(tmp_path / str(number), theirs, ours, registration=declared)
        row = row_of(study, "loss_at_equal_samples")
        assert row.word == "worse", row.reason
    assert "within the margin of ±0.049, but 40 % of the reference's improvement" in row.reason
    wide = LOSSES_DECIDE | {"margins": {"loss": 0.06}, "margin_reasons": {"loss": "less than another seed changes"}}
    study = two_arms(tmp_path / "wide", theirs, ours, registration=wide)
    row = row_of(study, "loss_at_equal_samples")
    assert row.refused.endswith("too wide to mean anything")


GAPS = (0.1, -0.2, 0.3, -0.1, 0.2, -0.3, 0.1, -0.2)


@pytest.mark.parametrize(
    ("theirs", "ours", "told"),
    [
        (
            [reaches(60 + k, end=100.0) for k in range(8)],
            [reaches(70 + 2 * k, end=50.0) for k in range(8)],
            "only to where the first run that missed it ended: give every run the same seconds=100",
        ),
        (
            [ends_at(5.0)] * 8,
            [ends_at(4.99 + 0.0001 * k) for k in range(8)],
            "is better than that of synchronous training by less than the margin of 0.02 nats: 0.00965 nats lower.",
        ),
        ([ends_at(5.0)] * 8, [ends_at(5.0 + gap) for gap in GAPS], "is undecided (-0.01 nats, 95 % CI -0.2"),
    ],
    ids=["a budget that ended first", "a difference within the margin", "an undecided difference"],
)
def test_a_headline_says_what_to_type_which_way_and_how_far(tmp_path, theirs, ours, told):
    arms = [dataclasses.replace(arm, settings={}) for arm in (SYNC, ASYNC)]
    study = two_arms(tmp_path, theirs, ours, arms=arms, registration=LOSSES_DECIDE)
    assert told in study.headlines[0].text


def test_throughput_over_one_worker_is_of_one_machine(tmp_path):
    one = SyntheticArm("single", 1, "measured", None)
    four = SyntheticArm("async", 4, "measured", None)
    for arm, seconds in ((one, 40.0), (four, 20.0)):
        write_run(tmp_path / arm.algorithm, arm, straight(6.0, 5.0, seconds=seconds))
    table = results_of(tmp_path).table("arms").set_index("workers")
    assert table.loc[4, "speed_up"] == 2.0
    assert table.loc[4, "efficiency"] == 0.5
    edit_json(tmp_path / "async" / "environment.json", cpu="another")
    table = results_of(tmp_path).table("arms").set_index("workers")
    assert math.isnan(table.loc[4, "speed_up"])
