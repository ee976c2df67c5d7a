"""How far a study can be trusted: one check after another says what it has to, at its level."""

import dataclasses

import pytest
from scenarios import ASYNC, EIGHT, SOONER, SYNC, ends_at, reaches, results_of, study_of, trust_of, two_arms
from synthetic import edit_json, edit_yaml, planned, straight, write_finetuning, write_plan, write_run

ARMS = (SYNC, ASYNC)
MEASURED = tuple(dataclasses.replace(arm, clock="measured", speeds=None) for arm in ARMS)
CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]


def summaries(folder, arm):
    return sorted((folder / "test" / arm).glob("s*/summary.json"))


def every(arm, **changes):
    """Change the summaries of all runs of an arm."""

    def change(folder):
        for path in summaries(folder, arm.name):
            edit_json(path, **changes)

    return change


@pytest.mark.parametrize(
    ("title", "arms", "change", "value", "level"),
    [
        ("oversubscribed", MEASURED, every(MEASURED[0], oversubscription=2.0), "8 of 16 measured runs", "bad"),
        ("oversubscribed", MEASURED, None, "no", "good"),
        ("comparable runs", ARMS, every(ASYNC, data_fingerprint="beef"), "not in 4 of 4 tests", "bad"),
        (
            "different seeds, different models",
            ARMS,
            every(ASYNC, parameters_sha256="00"),
            "not in 1 of 2 arms",
            "bad",
        ),
        ("test runs", ARMS, every(ASYNC, status="FAILED"), "16 planned, 8 finished, 8 FAILED", "warning"),
        ("seeds", ARMS, None, "8 complete pairs", "good"),
        ("common budget in seconds", ARMS, None, "in every group", "good"),
        ("equal batches per update", ARMS, every(ASYNC, num_updates=400), "no", "warning"),
        ("tuning", ARMS, None, "not tuned", "warning"),
        ("code", ARMS, None, "c0ffee (16 runs)", "good"),
    ],
)
def test_a_check_says_what_is_so(tmp_path, title, arms, change, value, level):
    study = two_arms(tmp_path, *CURVES, arms=arms, afterwards=change)
    item = trust_of(study, title)
    assert item.value == value
    assert item.level == level


@pytest.mark.parametrize(
    ("num_workers", "altered", "value"),
    [
        (4, 0, "not in 1 of 1 arms"),
        (4, 3, "all"),
        (2, 0, "not in 1 of 1 arms"),
        (1, 0, "does not apply"),  # there is no delay that a rule could act on
    ],
)
def test_a_rule_that_never_acted_is_asynchronous_sgd(num_workers, altered, value, tmp_path):
    arms = []
    for algorithm in ("sync", "ringmaster"):
        arms.append(dataclasses.replace(ASYNC, algorithm=algorithm, num_workers=num_workers))
    change = every(arms[1], rule_acted={"arrivals": 9, "altered": altered})
    study = two_arms(tmp_path, *CURVES, arms=arms, afterwards=change)
    assert trust_of(study, "rules that acted").value == value
    is_told = any(line.startswith("Rules that acted: not in 1 of 1 arms.") for line in study.headlines[0].details)
    assert is_told == (value != "all" and num_workers > 1)


def test_a_fixed_delay_that_altered_nothing_was_there_by_itself(tmp_path):
    arms = []
    for algorithm in ("sync", "delayed"):
        arms.append(dataclasses.replace(ASYNC, algorithm=algorithm, num_workers=4))
    change = every(arms[1], rule="fixed_delay:delay=3", rule_acted={"arrivals": 9, "altered": 0})
    study = two_arms(tmp_path, *CURVES, arms=arms, afterwards=change)
    assert trust_of(study, "rules that acted").value == "does not apply"


def tuned(arm, rates, losses, seeds=(0,)):
    return dataclasses.replace(arm, learning_rates=rates, trial_losses=losses, tuning_seeds=seeds)


def test_tuning_is_equal_or_not_and_its_edges_are_told(tmp_path):
    three = tuned(SYNC, (1e-3, 5e-4, 2e-3), ((5.0,), (5.2,), (5.4,)))
    two = tuned(ASYNC, (2e-3, 1e-3), ((5.0,), (5.2,)))
    study = two_arms(tmp_path, *CURVES, arms=(three, two))
    assert trust_of(study, "tuning").value == "UNEQUAL budgets"
    assert "in a labelled task by its score" in trust_of(study, "tuning").detail
    assert trust_of(study, "tuned values inside their grids").value == "not in 1 of 2 arms"
    assert any("Tuning: UNEQUAL budgets" in line for line in study.headlines[0].details)


def guarded(folder, ends, batch=64, rate=5e-4, afterwards=None):
    """Two sync workers beside one process with a batch of its own; curves end at `ends`."""
    sync = dataclasses.replace(MEASURED[0], num_workers=2, batch_size=32)
    single = dataclasses.replace(sync, algorithm="single", num_workers=1, batch_size=batch, learning_rates=(rate,))
    other = dataclasses.replace(MEASURED[1], num_workers=2, batch_size=32)
    curves = [ends_at(5.0 + 0.01 * seed) for seed in range(6)]
    of_single = [ends_at(end + 0.01 * seed) for seed, end in enumerate(ends)]
    arms = [(sync, curves), (other, curves), (single, of_single)]
    study = study_of(folder, arms, afterwards=afterwards)
    return trust_of(study, "sync guard")


def test_sync_is_checked_against_one_process_with_the_same_global_batch_and_rate(tmp_path):
    assert guarded(tmp_path / "same", [5.0] * 6).value == "passed"
    assert guarded(tmp_path / "slower", [5.4] * 6).value == "failed"
    assert guarded(tmp_path / "noisy", [4.4, 5.6, 5.0, 5.5, 4.6, 5.0]).value == "not shown"
    assert guarded(tmp_path / "batch", [5.0] * 6, batch=32).value == "not run"
    assert guarded(tmp_path / "rate", [5.0] * 6, rate=1e-3).value == "not run"


def test_the_sync_guard_is_not_passed_by_runs_that_were_given_something_else(tmp_path):
    def change(folder):
        for path in folder.glob("test/single-w1/*/settings.yaml"):
            edit_yaml(path, weight_decay=0.5)

    found = guarded(tmp_path, [5.0] * 6, afterwards=change)
    assert found.value == "not shown"
    assert "not comparable: weight_decay of sync-w2: 0.01; of single-w1: 0.5" in found.detail


@pytest.mark.parametrize(("schedule", "word"), [("constant", "passed"), ("linear", "not shown")])
def test_the_sync_guard_compares_by_samples_runs_of_unlike_budgets_whose_rates_do_not_follow_them(
    tmp_path, schedule, word
):
    def change(folder):
        for path in folder.glob("test/*/*/settings.yaml"):
            edit_yaml(path, schedule=schedule)
            if "single" in str(path):
                edit_yaml(path, samples=5000, seconds=None)

    found = guarded(tmp_path, [5.0] * 6, afterwards=change)
    assert found.value == word, found.detail


def test_a_guard_that_failed_stands_in_the_small_type_of_the_headline(tmp_path):
    guarded(tmp_path, [5.4] * 6)
    details = results_of(tmp_path).headlines[0].details
    assert any(line.startswith("Sync guard: failed.") for line in details)


def test_classifiers_that_predict_one_class_are_flagged(tmp_path):
    runs = [planned(f"test/{SYNC.name}/s0", "test", SYNC.name, 0), planned("ft", "finetune", SYNC.name, 0)]
    write_run(tmp_path / runs[0]["folder"], SYNC, straight(6.0, 5.0, seconds=10.0))
    write_finetuning(tmp_path / "ft", seed=0, macro_f1=0.3, parent=None, confusion=((50, 0), (50, 0)))
    write_plan(tmp_path, [SYNC], runs)
    item = trust_of(results_of(tmp_path), "fine-tuned models that learned")
    assert item.value == "not in 1 of 1 arms"
    assert item.level == "bad"
