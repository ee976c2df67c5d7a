"""Whatever is wrong with a study, its message is told, the rest of the results is still made, and nothing is silent."""

import json
import shutil

import numpy
import pytest
from synthetic import SyntheticArm, edit_json, planned, straight, write_finetuning, write_plan, write_run, write_study

from analysis.findings.results import results
from analysis.study.read import load_study

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")
SEEDS = 7
FIRST = f"test/{SYNC.name}/s100"
GROUP = "4 workers, virtual clock, slow:worker=0,factor=3"


def results_of(folder):
    return results(load_study(folder), numpy.random.default_rng(0))


@pytest.fixture
def folder(tmp_path):
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0 + number) for number in range(SEEDS)],
        ASYNC.name: [straight(6.0, 4.0, seconds=5.0 + 0.9 * number) for number in range(SEEDS)],
    }
    delays = {SYNC.name: [0] * 8, ASYNC.name: [3] * 8}
    return write_study(tmp_path / "s", curves, [SYNC, ASYNC], registration={"num_seeds": SEEDS}, delays=delays)


def pairs(found):
    return next(row.n for row in found.tests if row.endpoint == "loss_at_equal_samples")


def reasons(found):
    return {item.name: item.reason for item in found.left_out}


def test_the_study_is_sound_before_anything_is_damaged(folder):
    found = results_of(folder)
    assert (found.problems, pairs(found), found.exploratory) == ((), SEEDS, False)


def test_a_torn_line_after_the_last_evaluation_costs_nothing(folder):
    with open(folder / FIRST / "events.jsonl", "a") as file:
        file.write('{"kind": "leave", "wor')
    found = results_of(folder)
    assert (found.problems, pairs(found)) == ((), SEEDS)


def test_losses_are_not_compared_where_one_run_ended_far_from_its_arms_budget(folder):
    path = folder / FIRST
    shutil.rmtree(path)
    write_run(path, SYNC, straight(6.0, 5.0, seconds=5.0, samples=80), seed=100)
    rows = {row.endpoint: row for row in results_of(folder).tests}
    for endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds"):
        row = rows[endpoint]
        assert (row.word, row.reason, row.n) == (
            "undecided",
            f"refused: {FIRST} ended at 80 of the 160 samples of its arm",
            0,
        )
    assert rows["time_to_target"].n == SEEDS


def test_a_run_in_the_folder_of_another_is_set_aside_with_what_differs(folder):
    path = folder / FIRST
    shutil.rmtree(path)
    shutil.copytree(folder / f"test/{SYNC.name}/s101", path)
    other = folder / f"test/{SYNC.name}/s102"
    shutil.rmtree(other)
    shutil.copytree(folder / f"test/{ASYNC.name}/s102", other)
    found = results_of(folder)
    wrong_seed = "its folder holds another run: seed 101, not 100"
    wrong_arm = "its folder holds another run: rule asynchronous, not synchronous"
    assert found.problems == (
        f"{FIRST}: {wrong_seed}; it is set aside",
        f"test/{SYNC.name}/s102: {wrong_arm}; it is set aside",
    )
    assert (reasons(found)[FIRST], reasons(found)[f"test/{SYNC.name}/s102"]) == (wrong_seed, wrong_arm)
    assert {f"seed {seed}, async vs sync, {GROUP}" for seed in (100, 102)} <= set(reasons(found))
    assert pairs(found) == SEEDS - 2
    assert next(run.remark for run in found.runs if run.name == FIRST) == wrong_seed
    (counts,) = [counts for counts in found.counts if (counts.arm, counts.stage) == (SYNC.name, "test")]
    assert (counts.planned, counts.finished, counts.missing, counts.set_aside) == (SEEDS, SEEDS - 2, 2, 2)


def test_a_missing_summary_is_a_run_without_a_result(folder):
    (folder / FIRST / "summary.json").unlink()
    found = results_of(folder)
    assert pairs(found) == SEEDS - 1
    told = "no summary.json: the run crashed, was killed or is still running"
    assert found.problems == (f"{FIRST}: {told}",)
    assert reasons(found)[FIRST] == f"UNFINISHED: {told}"
    assert f"seed 100, async vs sync, {GROUP}" in reasons(found)


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (ASYNC, "6 runs of async, 4 workers, virtual clock"),
        (SYNC, "6 runs of sync, 4 workers, virtual clock"),
    ],
)
def test_one_mode_only_is_described_without_a_comparison(tmp_path, kept, told):
    curves = {kept.name: [straight(6.0, 4.0, seconds=10.0)] * 6}
    found = results_of(write_study(tmp_path, curves, [kept], delays={kept.name: [1, 1]}))
    (headline,) = found.headlines
    assert headline.text == (
        f"{told}: evaluation loss 6.00, and 4.00 after 10.0 simulated seconds. Add a second arm for a comparison: the "
        "same command with another --mode or --rule."
    )
    assert found.tests == ()
    assert "no comparison: " in reasons(found)[kept.name]
    assert (len(found.curves), len(found.table), len(found.delays), len(found.runs)) == (2, 1, 1, 6)


def test_all_runs_diverged(folder):
    for path in folder.glob("test/*/*"):
        arm = SYNC if path.parent.name == SYNC.name else ASYNC
        seed = int(path.name[1:])
        shutil.rmtree(path)
        write_run(path, arm, [(0, 0.0, 6.0), (40, 2.0, None)], seed=seed, status="DIVERGED")
    found = results_of(folder)
    assert {row.word for row in found.tests} == {"undecided"}
    assert "Nothing is shown about" in found.headlines[0].text
    assert {row.num_diverged for row in found.table} == {SEEDS}
    assert all(curve.band is None for panel in found.curves for curve in panel.curves)


@pytest.mark.parametrize(
    "damage",
    ["{", "[]", '{"schema": 1, "study": "s", "arms": [3], "runs": []}', '{"schema": 9, "arms": [], "runs": []}'],
)
def test_a_damaged_plan_is_told_and_the_folders_names_are_used(folder, damage):
    whole = results_of(folder)
    (folder / "plan.json").write_text(damage)
    found = results_of(folder)
    assert found.problems[0].startswith("plan.json ")
    assert found.problems[0].endswith("and runs that are missing cannot be counted")
    key = lambda row: (row.treatment, row.endpoint)  # noqa: E731
    assert [(key(row), row.estimate, row.p_holm, row.word) for row in found.tests] == [
        (key(row), row.estimate, row.p_holm, row.word) for row in whole.tests
    ]


def test_fine_tuning_on_other_data_or_without_a_score_is_left_out_and_told(folder):
    plan = json.loads((folder / "plan.json").read_text())
    for arm in (SYNC, ASYNC):
        for seed in range(100, 107):
            path = f"finetune/{arm.name}/s{seed}-f0"
            parent = f"test/{arm.name}/s{seed}"
            plan["runs"].append(planned(path, "finetune", arm.name, seed, parent=parent, finetune_seed=seed))
            write_finetuning(folder / path, seed=seed, macro_f1=0.6 + 0.001 * seed, parent={"run": parent})
    (folder / "plan.json").write_text(json.dumps(plan))
    edit_json(folder / f"finetune/{ASYNC.name}/s101-f0/summary.json", data_fingerprint="dead")
    edit_json(folder / f"finetune/{ASYNC.name}/s102-f0/summary.json", metrics={"macro_f1": "high", "accuracy": 0.8})
    edit_json(folder / f"finetune/{SYNC.name}/s103-f0/summary.json", details={"confusion": [[1]]})
    found = results_of(folder)
    unusable = "UNREADABLE: summary.json is damaged: its macro_f1 is 'high'"
    assert reasons(found)[f"finetune/{ASYNC.name}/s101-f0"].startswith("fine-tuned or scored on other data")
    assert reasons(found)[f"finetune/{ASYNC.name}/s102-f0"] == unusable
    assert (
        f"finetune/{SYNC.name}/s103-f0: its confusion matrix is damaged; there is none of {SYNC.name}" in found.problems
    )
    assert reasons(found)["baseline"].startswith("no fine-tuning run of the base model")
    assert [row.n for row in found.tests if row.endpoint == "macro_f1"] == [5]
    assert [arm.confusion == () for arm in found.downstream] == [True, False]


def test_a_plan_of_which_nothing_has_run_says_so(tmp_path):
    runs = [planned(f"test/{arm.name}/s{seed}", "test", arm.name, seed) for arm in (SYNC, ASYNC) for seed in (0, 1)]
    write_plan(tmp_path, [SYNC, ASYNC], runs)
    found = results_of(tmp_path)
    assert found.headlines[0].text == "No verdict: none of 4 test runs has a result yet."
    assert {run.status for run in found.runs} == {"MISSING"}


def test_parts_without_data_are_named_with_their_reason(folder):
    found = results_of(folder)
    assert reasons(found)["learning rate"] == "the folder holds no tuning trials"
    assert reasons(found)["downstream"] == "no run was fine-tuned on a labelled task"
