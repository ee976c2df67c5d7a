"""Whatever is wrong with a study, its message is told, the rest of the results is still made, and nothing is silent."""

import json
import shutil
from pathlib import Path

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import SyntheticArm, edit_json, planned, straight, write_finetuning, write_plan, write_run, write_study

from analysis.findings.results import Results, results
from analysis.study.read import load_study

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")
SEEDS = 7
FIRST = f"test/{SYNC.name}/s100"
GROUP = "4 workers, virtual clock, slow:worker=0,factor=3"


def results_of(folder: Path) -> Results:
    return results(load_study(folder), numpy.random.default_rng(0))


@pytest.fixture
def folder(tmp_path) -> Path:
    curves = {
        SYNC.name: [straight(6.0, 4.0, seconds=10.0 + number) for number in range(SEEDS)],
        ASYNC.name: [straight(6.0, 4.0, seconds=5.0 + 0.9 * number) for number in range(SEEDS)],
    }
    delays = {SYNC.name: [0] * 8, ASYNC.name: [3] * 8}
    return write_study(tmp_path / "s", curves, [SYNC, ASYNC], registration={"num_seeds": SEEDS}, delays=delays)


def pairs(found: Results) -> int:
    return next(row.n for row in found.tests if row.endpoint == "loss_at_equal_samples")


def reasons(found: Results) -> dict[str, str]:
    return {item.name: item.reason for item in found.left_out}


def test_the_study_is_sound_before_anything_is_damaged(folder):
    found = results_of(folder)
    assert (found.problems, pairs(found), found.exploratory) == ((), SEEDS, False)


def tear(lines: list[bytes]) -> list[bytes]:
    return [*lines[:-1], lines[-1][:-20]]


def damage_line_4(lines: list[bytes]) -> list[bytes]:
    return [*lines[:3], lines[3][:15] + b"\n", *lines[4:]]


@pytest.mark.parametrize(
    ("damage", "told", "last"),
    [
        (tear, "events.jsonl: the last line is torn and was left out", 120),
        (damage_line_4, "events.jsonl: line 4 is damaged", 0),
        (lambda lines: lines[:-1], "", 120),
    ],
)
def test_a_finished_run_whose_curve_lost_its_end_is_no_result_and_moves_no_other_comparison(folder, damage, told, last):
    whole = {row.endpoint: row for row in results_of(folder).tests}
    events = folder / FIRST / "events.jsonl"
    events.write_bytes(b"".join(damage(events.read_bytes().splitlines(keepends=True))))
    found = results_of(folder)
    lost = f"its evaluations in events.jsonl end at {last} of 160 samples"
    assert found.problems[0] == f"{FIRST}: {lost}"
    assert "".join(found.problems[1:]).startswith(f"{FIRST}: {told}" * (told != ""))
    assert len(found.problems) == 1 + (told != "")
    assert pairs(found) == SEEDS - 1
    assert reasons(found)[FIRST] == f"UNREADABLE: {lost}"
    assert lost in next(run.remark for run in found.runs if run.name == FIRST)
    assert f"seed 100, async vs sync, {GROUP}" in reasons(found)
    row = next(row for row in found.tests if row.endpoint == "loss_at_equal_samples")
    assert (row.treatment_mean, row.reference_mean) == pytest.approx((4.0, 4.0))
    assert whole["time_to_target"].word == "better"
    assert next(row for row in found.tests if row.endpoint == "time_to_target").word == "better"


def test_a_torn_line_after_the_last_evaluation_costs_nothing(folder):
    with open(folder / FIRST / "events.jsonl", "a") as file:
        file.write('{"kind": "leave", "wor')
    found = results_of(folder)
    assert found.problems == (f"{FIRST}: events.jsonl: the last line is torn and was left out",)
    assert pairs(found) == SEEDS


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


def test_one_run_copied_as_several_seeds_counts_once(folder):
    for seed in (101, 102):
        path = folder / f"test/{SYNC.name}/s{seed}"
        shutil.rmtree(path)
        shutil.copytree(folder / FIRST, path)
        edit_json(path / "summary.json", seed=seed)
        settings_file = path / "settings.yaml"
        settings_file.write_text(settings_file.read_text().replace("seed: 100", f"seed: {seed}"))
    found = results_of(folder)
    assert pairs(found) == SEEDS - 2
    assert [problem.partition(" (")[0] for problem in found.problems] == [
        f"test/{SYNC.name}/s{seed}: a copy of {FIRST}: it has another seed, and ended with the same parameters"
        for seed in (101, 102)
    ]


def test_a_missing_summary_is_a_run_without_a_result(folder):
    (folder / FIRST / "summary.json").unlink()
    found = results_of(folder)
    assert pairs(found) == SEEDS - 1
    told = "no summary.json: the run crashed, was killed or is still running"
    assert found.problems == (f"{FIRST}: {told}",)
    assert reasons(found)[FIRST] == f"UNFINISHED: {told}"
    assert f"seed 100, async vs sync, {GROUP}" in reasons(found)


def test_a_summary_of_a_newer_schema_is_unreadable_and_an_older_one_is_mixed_in_with_a_message(folder):
    edit_json(folder / FIRST / "summary.json", schema=99)
    edit_json(folder / f"test/{SYNC.name}/s101/summary.json", schema=0)
    found = results_of(folder)
    assert found.problems == (
        f"{FIRST}: summary.json has schema 99, this version reads up to 2",
        "mixed schema versions of summary.json: 0 (1 runs), 2 (12 runs); "
        "keys that the older ones lack are missing values",
    )
    assert pairs(found) == SEEDS - 1
    assert "UNREADABLE" in reasons(found)[FIRST]


def test_duplicate_runs_are_told_and_the_first_by_name_is_taken(folder):
    plan = json.loads((folder / "plan.json").read_text())
    plan["runs"].append(planned(f"test/{SYNC.name}/s100-again", "test", SYNC.name, 100))
    (folder / "plan.json").write_text(json.dumps(plan))
    write_run(folder / f"test/{SYNC.name}/s100-again", SYNC, straight(6.0, 1.0, seconds=1.0), seed=100)
    found = results_of(folder)
    again = f"test/{SYNC.name}/s100-again"
    assert found.problems == (
        f"duplicate runs: 2 runs of {SYNC.name} have seed 100 ({FIRST}, {again}); the first by name is taken",
    )
    assert reasons(found)[again] == f"duplicate of {FIRST}"
    assert pairs(found) == SEEDS
    row = next(row for row in found.tests if row.endpoint == "loss_at_equal_samples")
    assert row.reference_mean == pytest.approx(4.0)
    assert next(run.in_tests for run in found.runs if run.name == again) is False
    (counts,) = [counts for counts in found.counts if (counts.arm, counts.stage) == (SYNC.name, "test")]
    assert (counts.planned, counts.set_aside) == (7, 1)


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


def test_unknown_keys_and_kinds_are_told_or_ignored(folder):
    edit_json(folder / FIRST / "summary.json", flavour="sweet", colour="red")
    with open(folder / FIRST / "events.jsonl", "a") as file:
        file.write('{"kind": "telemetry", "watts": 3}\n')
    edit_json(folder / "plan.json", mood="good")
    found = results_of(folder)
    assert found.problems == (
        "plan.json has unknown keys, which are ignored: mood",
        "unknown keys of summary.json, which are ignored: colour (1 runs), flavour (1 runs)",
    )
    assert pairs(found) == SEEDS


def test_a_run_without_an_evaluation_is_no_result(folder):
    events = folder / FIRST / "events.jsonl"
    events.write_text(events.read_text().splitlines()[0] + "\n")
    found = results_of(folder)
    told = "events.jsonl has no evaluation: it has no curve in the figures"
    assert reasons(found)[FIRST] == f"UNREADABLE: {told}"
    assert pairs(found) == SEEDS - 1
    assert found.problems == (f"{FIRST}: {told}",)
    events.unlink()
    assert reasons(results_of(folder))[FIRST] == "DONE, but it has no evaluation that can be used"


def test_a_run_whose_evaluations_lie_nowhere_is_no_result(folder):
    events = folder / FIRST / "events.jsonl"
    events.write_text(events.read_text().replace('"total_samples":', '"samples_in_all":'))
    found = results_of(folder)
    assert reasons(found)[FIRST] == "UNREADABLE: the evaluation at version 0 has no finite total_samples"
    assert pairs(found) == SEEDS - 1


@pytest.mark.parametrize("damage", ["{", "[]", '{"arms": 3}', '{"schema": 9, "arms": [], "runs": []}'])
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


def test_damaged_entries_of_a_plan_are_told_one_by_one(folder):
    plan = json.loads((folder / "plan.json").read_text())
    plan["arms"] += [3, {"name": ASYNC.name}]
    plan["arms"][0]["trials"] = [{"settings": 1}]
    plan["runs"] += ["x", planned("test/other-w4/s1", "test", "other-w4", 1)]
    (folder / "plan.json").write_text(json.dumps(plan))
    found = results_of(folder)
    assert found.problems == (
        "plan.json: arm sync-w4-virtual has damaged trials, which were left out",
        "plan.json: an arm is damaged and was left out: 3",
        "plan.json names the arm async-w4-virtual twice; the first entry is taken",
        "plan.json: run 14 is damaged and was left out: x",
        "plan.json has no arm other-w4, but runs of it; it has no settings of its own",
    )
    assert pairs(found) == SEEDS


def test_a_damaged_environment_or_settings_file_is_told(folder):
    (folder / FIRST / "environment.json").write_text("{")
    (folder / FIRST / "settings.yaml").write_text("a: [")
    found = results_of(folder)
    assert len(found.problems) == 2
    assert found.problems[0].startswith(f"{FIRST}: settings.yaml cannot be read: ")
    assert found.problems[1].startswith(f"{FIRST}: environment.json cannot be read: ")
    # The settings may say that the run is no run of this arm.
    assert reasons(found)[FIRST].startswith("UNREADABLE: settings.yaml cannot be read: ")
    assert pairs(found) == SEEDS - 1
    (folder / FIRST / "settings.yaml").unlink()
    assert pairs(results_of(folder)) == SEEDS


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
    unusable = "UNREADABLE: summary.json has an unusable macro_f1: 'high'"
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


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_any_file_stops_the_results(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 2 for arm in (SYNC, ASYNC)}
    write_study(folder, curves, [SYNC, ASYNC], registration={"num_seeds": 2}, delays={ASYNC.name: [1, 2]})
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    victim = data.draw(st.sampled_from(files))
    content = victim.read_bytes()
    if data.draw(st.booleans()):
        victim.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    else:
        at = data.draw(st.integers(0, len(content) - 1))
        victim.write_bytes(content[:at] + bytes([data.draw(st.integers(0, 255))]) + content[at + 1 :])
    found = results_of(folder)
    assert found.headlines
    assert {run.name for run in found.runs} >= {
        f"test/{arm.name}/s{seed}" for arm in (SYNC, ASYNC) for seed in (100, 101)
    }
