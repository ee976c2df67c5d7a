"""What differs on purpose, or only by rounding, keeps its word: the gate stops what misleads, and nothing else."""

import dataclasses
import json
import shutil

import pytest
from scenarios import ASYNC, BUDGET_SECONDS, EIGHT, SOONER, SYNC, reaches, row_of, study_of, two_arms
from synthetic import SyntheticArm, edit_json, planned, went_on, write_run

CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]
TIME = "time_to_target"


def word_of(folder, reference=SYNC, treatment=ASYNC, afterwards=None):
    found = two_arms(folder, *CURVES, arms=(reference, treatment), afterwards=afterwards)
    row = row_of(found, TIME, treatment.name, reference.name)
    return row.word, row.family


@pytest.mark.parametrize(
    "own",
    [
        {"learning_rates": (2e-3, 1e-3), "trial_losses": ((4.0,), (5.0,)), "tuning_seeds": (0,)},
        {"settings": {**ASYNC.settings, "optimizer": "sgd", "momentum": 0.9}},
        {"settings": {**ASYNC.settings, "beta1": 0.8}},
        {"settings": {**ASYNC.settings, "rule": "ringmaster:threshold=4"}},
        {"settings": {**ASYNC.settings, "weight_decay": 0.1, "clip_norm": 0.5, "schedule": "constant"}},
        {"algorithm": "ringmaster"},
        {"algorithm": "single"},
    ],
    ids=["tuned rate", "optimizer", "its betas", "rule with parameters", "settings of an arm", "rule", "one process"],
)
def test_arms_of_a_plan_that_differ_on_purpose_keep_their_word(tmp_path, own):
    assert word_of(tmp_path, treatment=dataclasses.replace(ASYNC, **own)) == ("better", "primary")


def _elsewhere(path):
    """The seeds from 104 on ran on another machine, with another commit and another torch."""
    other = {"cpu": "another", "commit": "beef", "versions": {"torch": "2.14.0", "asyncsgd": "0.1.1"}}
    for seed in range(104, 108):
        for arm in (SYNC, ASYNC):
            environment = path / "test" / arm.name / f"s{seed}" / "environment.json"
            edit_json(environment, **other)


def _older(path):
    """Runs of one arm name none of the newer facts of a beginning."""
    for summary in (path / "test" / SYNC.name).glob("s*/summary.json"):
        edit_json(summary, initial_model_sha256=None, train_fingerprint=None, normalises_over_batch=None)
    for summary in (path / "test" / ASYNC.name).glob("s*/summary.json"):
        edit_json(summary, initial_model_sha256="ab", train_fingerprint="cd/16", normalises_over_batch=False)


def _replicated(path):
    """Every seed of one arm has a planned replicate."""
    runs = json.loads((path / "plan.json").read_text())["runs"]
    for seed, time in enumerate(SOONER, 100):
        at = f"test/{ASYNC.name}/s{seed}-r1"
        write_run(path / at, ASYNC, reaches(time), seed=seed)
        runs.append(planned(at, "test", ASYNC.name, seed, replicate=1))
    edit_json(path / "plan.json", runs=runs)


def _resumed(path):
    """Three runs of one arm were stopped and went on, on the machine where they began, with the same bits."""
    for seed in (100, 103, 106):
        run = path / f"test/{ASYNC.name}/s{seed}"
        environment = (run / "environment.json").read_text()
        shutil.rmtree(run)
        write_run(run, ASYNC, reaches(SOONER[seed - 100]), seed=seed, records=[went_on(50.0, 800)])
        (run / "environment.resumed-1.json").write_text(environment)


@pytest.mark.parametrize("afterwards", [_elsewhere, _older, _replicated, _resumed])
def test_seeds_from_elsewhere_replicates_and_runs_that_went_on_keep_their_word(tmp_path, afterwards):
    assert word_of(tmp_path, afterwards=afterwards) == ("better", "primary")


def test_one_process_that_accumulates_is_compared_with_workers_in_step(tmp_path):
    """Two workers with a batch of 16, and one process that adds up two batches of 16."""
    step = {"seconds": BUDGET_SECONDS, "batch_size": 16}
    sync = SyntheticArm("sync", 2, settings=step)
    single = SyntheticArm("single", 2, settings={**step, "nproc": 1, "accumulate": 2})
    registration = {"primary": {"endpoint": TIME, "num_workers": 2, "clock": "virtual"}}
    found = two_arms(tmp_path, *CURVES, arms=(sync, single), registration=registration)
    row = row_of(found, TIME, single.name, sync.name)
    assert row.word == "better"
    assert row.family == "primary"


def test_an_arm_keeps_its_word_beside_a_control_with_another_batch_and_budget(tmp_path):
    small = SyntheticArm("sync_small", batch_size=4, settings={"samples": 1600, "batch_size": 4})
    later = [reaches(time + 9) for time in EIGHT]
    arms = [(SYNC, CURVES[0]), (ASYNC, CURVES[1]), (small, later)]
    found = study_of(tmp_path, arms, registration={"control": "sync_small"})
    beside_control = found.tests["reference"] == small.name
    rows = found.tests[beside_control & (found.tests["treatment"] == ASYNC.name)]
    assert rows["word"].to_list() == ["better"]
