"""Run folders as tables: which run belongs where, and why a run is left out."""

import hashlib
import json
import shutil

import pytest
import yaml
from doors import UsageError, asyncsgd
from scenarios import TARGET, row_of
from synthetic import SyntheticArm, edit_json, planned, straight, write_finetuning, write_plan, write_run, write_study

SYNC = SyntheticArm("sync")
ASYNC = SyntheticArm("async")
CURVE = straight(6.0, 5.0, seconds=10.0)
pytestmark = pytest.mark.filterwarnings("error")


def two_arms(folder, seeds=6, **options):
    curves = {}
    for arm in (SYNC, ASYNC):
        curves[arm.name] = [straight(6.0, 5.0 + 0.01 * seed, seconds=10.0) for seed in range(seeds)]
    return write_study(folder, curves, [SYNC, ASYNC], registration={"num_seeds": seeds} | options)


def test_a_run_has_what_its_files_say(tmp_path):
    write_run(tmp_path / "a", ASYNC, CURVE, seed=7, delays=[1, 3])
    (run,) = asyncsgd.load(tmp_path).runs.itertuples()
    assert run.run == "a"
    assert run.stage == "test"
    assert run.arm == "async-w4-virtual"
    assert run.seed == 7
    assert run.status == "DONE"
    assert run.mode == "async"
    assert run.rule == "asynchronous"
    assert run.workers == 4
    assert run.batch_size == 16
    assert run.clock == "virtual"
    assert run.loss == 5.0
    assert run.metric == 0.5
    assert run.seconds == 10.0
    assert run.samples == 160
    assert run.delay_max == 3
    assert run.machine == "a processor, 2 cores"
    assert run.device == "cpu"
    assert run.threads == 1
    assert run.usable is True
    assert run.diverged is False
    assert run.left_out == ""
    assert run.resumes == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("summary.json", '"schema": 2', '"schema": 1', "UNREADABLE: summary.json has no status of schema 2"),
        (
            "summary.json",
            '"num_samples": 160',
            '"num_samples": "many"',
            "UNREADABLE: its samples is 'many', which is no",
        ),
        ("summary.json", '"num_samples": 160', f'"num_samples": 1{"0" * 400}', "UNREADABLE: "),
        ("summary.json", '"mode": "async"', '"mode": {}', "UNREADABLE: its mode is '{}', which is no text"),
        ("summary.json", '"status": "DONE"', '"status": "FAILED"', "FAILED: it has no evaluation"),
        ("summary.json", '"num_samples": 160', '"num_samples": 200', "UNREADABLE: its evaluations end at 160 of 200"),
        (
            "events.jsonl",
            '"total_samples":160',
            '"total_samples":120',
            "UNREADABLE: the last line of events",
        ),
        ("events.jsonl", '"version":0', '"version":00', "UNREADABLE: events.jsonl has "),
        ("environment.json", '"cpu": "a', '"cpu": [', "UNREADABLE: "),
    ],
)
def test_a_damaged_run_is_in_no_number_and_says_why(tmp_path, file, old, new, told):
    path = write_run(tmp_path / "a", ASYNC, CURVE) / file
    path.write_text(path.read_text().replace(old, new))
    (run,) = asyncsgd.load(tmp_path).runs.itertuples()
    assert run.left_out.startswith(told)
    assert run.usable is False
    assert run.status == told.partition(":")[0]


def test_a_run_without_a_summary_is_unfinished_and_is_of_its_arm(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"s{seed}", ASYNC, CURVE, seed=seed)
    (tmp_path / "s1" / "summary.json").unlink()
    runs = asyncsgd.load(tmp_path).runs
    assert runs["status"].tolist() == ["DONE", "UNFINISHED"]
    assert runs["arm"].nunique() == 1
    assert runs["left_out"].iloc[1] == "UNFINISHED: no summary.json: it was killed or is still running"


def test_a_loss_that_is_no_number_is_a_run_that_diverged(tmp_path):
    write_run(tmp_path / "a", ASYNC, [*CURVE[:3], (120, 8.0, None)])
    (run,) = asyncsgd.load(tmp_path).runs.itertuples()
    assert run.diverged is True
    assert run.usable is True
    assert run.status == "DONE"


def test_a_plan_says_which_runs_there_should_be(tmp_path):
    folder = two_arms(tmp_path)
    shutil.rmtree(folder / f"test/{ASYNC.name}/s105")
    shutil.copytree(folder / f"test/{ASYNC.name}/s104", folder / f"test/{ASYNC.name}/s999")
    shutil.copytree(folder / f"test/{ASYNC.name}/s104", folder / f"test/{ASYNC.name}/s104.before-1")
    runs = asyncsgd.load(folder).runs
    assert runs.loc[f"test/{ASYNC.name}/s105", ["status", "seed"]].tolist() == ["MISSING", 105]
    assert runs.loc[f"test/{ASYNC.name}/s999", ["left_out", "usable"]].tolist() == ["not in plan.json", False]
    assert len(runs) == 13


@pytest.mark.parametrize(
    ("key", "value", "status", "told"),
    [
        ("weight_decay", 0.5, "MISPLACED", "its folder holds another run: weight_decay 0.5, not 0.01"),
        ("optimizer", "sgd", "MISPLACED", "its folder holds another run: optimizer sgd, not adamw"),
        ("threads", 2, "DONE", "beside its plan: threads 2, not 1"),
        ("warmup", 640.0, "DONE", ""),
        ("cache_dir", "elsewhere", "DONE", ""),
    ],
)
def test_a_run_has_every_setting_that_was_planned_or_is_told_or_leaves_its_place_empty(
    tmp_path, key, value, status, told
):
    folder = two_arms(tmp_path)
    run = f"test/{ASYNC.name}/s104"
    planned = yaml.safe_load((folder / run / "settings.yaml").read_text())
    edit_json(folder / "plan.json", settings={run: planned | {"weight_decay": 0.01, "cache_dir": None}})
    (folder / run / "settings.yaml").write_text(yaml.safe_dump(planned | {key: value}))
    row = asyncsgd.load(folder).runs.loc[run]
    assert row["status"] == status
    assert (row["left_out"] or row["notes"]) == told


def test_a_run_that_is_not_what_its_place_says_leaves_its_place_empty(tmp_path):
    folder = two_arms(tmp_path)
    shutil.rmtree(folder / f"test/{ASYNC.name}/s105")
    shutil.copytree(folder / f"test/{ASYNC.name}/s104", folder / f"test/{ASYNC.name}/s105")
    run = asyncsgd.load(folder).runs.loc[f"test/{ASYNC.name}/s105"]
    assert run["status"] == "MISPLACED"
    assert run["left_out"] == "its folder holds another run: seed 104, not 105"


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 99}'])
def test_without_a_plan_that_can_be_read_folders_are_placed_by_their_names(tmp_path, damage):
    folder = two_arms(tmp_path)
    (folder / "plan.json").write_text(damage)
    study = asyncsgd.load(folder)
    assert study.runs["arm"].value_counts().to_dict() == {SYNC.name: 6, ASYNC.name: 6}
    assert "there is no plan.json that could be read" in study.exploratory
    assert study.plan.problems[0].startswith("plan.json cannot be read")


ON_TEST_SEEDS = "the target is of runs on seeds that test it: 101"


@pytest.mark.parametrize(
    ("registered", "plan", "stage", "told"),
    [
        ({}, {"analysis_sha256": None}, None, "plan.json has no hash of analysis.yaml"),
        ({"num_seeds": None}, {}, None, "analysis.yaml registers no number of seeds"),
        ({}, {}, "pilot", ON_TEST_SEEDS),
        ({}, {}, "tuning", ON_TEST_SEEDS),
        ({"target_from": "given in the config"}, {}, "tuning", ""),
        ({}, {"targets": {SYNC.name: TARGET + 0.1}}, None, "analysis.yaml is not what it was when the test runs began"),
        ({}, {"targets": {SYNC.name: TARGET}}, None, ""),
        ({}, {}, None, ""),
    ],
)
def test_what_nobody_fixed_before_the_runs_confirms_nothing(tmp_path, registered, plan, stage, told):
    folder = two_arms(tmp_path)
    file = folder / "analysis.yaml"
    runs = json.loads((folder / "plan.json").read_text())["runs"]
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | registered))
    if stage is not None:
        runs.append(planned(f"{stage}/{SYNC.name}/s101", stage, SYNC.name, 101))
    hashed = {"analysis_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
    edit_json(folder / "plan.json", **{"runs": runs, **hashed, **plan})
    why = asyncsgd.load(folder).exploratory
    assert why.startswith(told)
    assert bool(why) == bool(told)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda file: file.unlink(), "there is no analysis.yaml: nothing was declared before the runs"),
        (lambda file: file.write_text("{"), "analysis.yaml cannot be used: it is not YAML"),
        (
            lambda file: file.write_text("reference: sync"),
            "analysis.yaml cannot be used: Object missing required field `primary`",
        ),
        (lambda file: file.write_text(file.read_text() + "#\n"), "analysis.yaml was changed after it was written"),
        (lambda file: file.write_text(file.read_text() + "seeds: [1]\n"), "analysis.yaml registers test seeds 1"),
        (lambda file: file.write_text(file.read_text() + "config_sha256: ff\n"), "plan.json is of another config"),
        (
            lambda file: file.write_text(file.read_text().replace("loss: 0.02", "loss: -1")),
            "analysis.yaml cannot be used",
        ),
    ],
)
def test_a_registration_that_does_not_stand_makes_everything_exploratory(tmp_path, change, told):
    folder = two_arms(tmp_path)
    file = folder / "analysis.yaml"
    change(file)
    if file.is_file() and "was changed" not in told:
        edit_json(folder / "plan.json", analysis_sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    study = asyncsgd.load(folder)
    assert study.exploratory.startswith(told)
    assert set(study.tests["family"]) == {"exploratory"}
    assert study.headlines[0].text.startswith("Exploratory: ")


def test_seeds_beyond_the_registered_ones_or_fewer_make_a_study_exploratory(tmp_path):
    more = two_arms(tmp_path / "more", num_seeds=5)
    fewer = two_arms(tmp_path / "fewer", num_seeds=7)
    told = "6 seeds were planned and 5 registered"
    assert told in asyncsgd.load(more).exploratory
    for path in more.glob("test/*/s105"):
        shutil.rmtree(path)
    assert told in asyncsgd.load(more).exploratory  # five seeds were run, and which of the six may be a choice
    assert "7 seeds were registered and an arm of the primary comparison has 6" in asyncsgd.load(fewer).exploratory


def test_loose_runs_are_arms_by_their_settings_but_not_by_budget_seed_or_machine(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"a{seed}", ASYNC, CURVE, seed=seed)
        write_run(tmp_path / f"b{seed}", SYNC, straight(6.0, 5.0, seconds=20.0, samples=320), seed=seed)
    write_run(tmp_path / "c", ASYNC, CURVE, seed=5, learning_rate=0.1)
    arms = asyncsgd.load(tmp_path).runs["arm"]
    assert arms.groupby(arms).size().to_dict() == {
        "async-w4-virtual-learning_rate 0.0005": 2,
        "async-w4-virtual-learning_rate 0.1": 1,
        "sync-w4-virtual": 2,
    }


def test_loose_runs_under_two_speeds_are_arms_of_their_own(tmp_path):
    for speeds in ("constant:1", "constant:1.0", "exponential:1"):
        write_run(tmp_path / speeds, SyntheticArm("async", speeds=speeds), CURVE)
    arms = asyncsgd.load(tmp_path).runs["arm"]
    of_constant = "async-w4-virtual-constant:1"
    assert arms.to_list() == [of_constant, of_constant, "async-w4-virtual-exponential:1"]
    for speeds in ("constant:1", "exponential:1"):
        write_run(tmp_path / f"s{speeds}", SyntheticArm("sync", speeds=speeds), CURVE)
    texts = [headline.text.partition(". ")[0] for headline in asyncsgd.load(tmp_path).headlines]
    assert texts == ["4 workers, simulated, constant:1", "4 workers, simulated, exponential:1"]


def test_a_second_loose_run_of_a_seed_is_in_no_test(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, ASYNC, CURVE, seed=3)
    assert asyncsgd.load(tmp_path).runs["replicate"].tolist() == [0, 1]


def test_loose_fine_tunings_belong_to_the_arm_of_their_parent(tmp_path):
    write_run(tmp_path / "pre", ASYNC, CURVE, seed=3)
    write_finetuning(tmp_path / "tuned", seed=11, macro_f1=0.5, parent={"run": "/elsewhere/pre"})
    write_finetuning(tmp_path / "alone", seed=12, macro_f1=0.5, parent=None)
    write_finetuning(tmp_path / "orphan", seed=13, macro_f1=0.5, parent={"run": "gone"})
    runs = asyncsgd.load(tmp_path).runs
    assert runs.loc["tuned", ["arm", "seed", "parent"]].tolist() == ["async-w4-virtual", 3, "pre"]
    assert runs.loc["alone", "arm"] == "baseline"
    assert "is no test run in this folder" in runs.loc["orphan", "left_out"]


@pytest.mark.parametrize("parent", [None, {"run": "base"}])
def test_loose_runs_of_a_task_with_a_head_are_compared_where_their_beginning_is_one(parent, tmp_path):
    write_run(tmp_path / "base", ASYNC, CURVE)
    facts = {"task": "classification", "parent": parent}
    for seed in range(6):
        for arm, end in ((SYNC, 5.0), (ASYNC, 5.2 + 0.01 * seed)):
            write_run(tmp_path / f"{arm.name}-s{seed}", arm, straight(6.0, end, seconds=10.0), seed=seed, **facts)
    study = asyncsgd.load(tmp_path)
    (answer,) = study.tests[study.tests["endpoint"] == "loss_at_equal_samples"].itertuples()
    assert (answer.n, answer.estimate) == (6, pytest.approx(0.225))


def test_loose_runs_of_a_task_with_a_head_have_their_scores_whatever_the_summary_lacks(tmp_path):
    for seed, score in enumerate((0.5, 0.7)):
        write_finetuning(tmp_path / f"s{seed}", seed=seed, macro_f1=score, parent=None)
    (row,) = asyncsgd.load(tmp_path).table("downstream").itertuples()
    assert row.score == pytest.approx(0.6)
    write_run(tmp_path / "own", ASYNC, CURVE, task="finetuning")  # as a task of one's own may be called
    edit_json(tmp_path / "s1" / "summary.json", task=None)
    assert asyncsgd.load(tmp_path).runs.loc[["s0", "s1"], "stage"].tolist() == ["test", "test"]


@pytest.mark.parametrize(("written", "told"), [("", "in format 1, of an older"), ("3", "in format 3, of a newer")])
def test_settings_in_the_format_of_another_version_are_not_read(written, told, tmp_path):
    path = write_run(tmp_path / "a", ASYNC, CURVE) / "settings.yaml"
    text = path.read_text()
    path.write_text(text.replace("settings_format: 2\n", f"settings_format: {written}\n" if written else ""))
    assert path.read_text() != text
    row = asyncsgd.load(tmp_path).runs.iloc[0]
    assert row["status"] == "UNREADABLE"
    assert told in row["left_out"]


def test_what_was_predicted_of_a_run_is_no_run_of_its_own_unless_it_is_named(tmp_path):
    write_run(tmp_path / "a", ASYNC, CURVE)
    write_run(tmp_path / "a" / "predicted-1", ASYNC, CURVE)
    assert list(asyncsgd.load(tmp_path).runs.index) == ["a"]
    assert list(asyncsgd.load(tmp_path / "a" / "predicted-1").runs.index) == ["predicted-1"]


def test_a_sweep_inside_a_folder_of_runs_is_a_study_of_its_own(tmp_path):
    two_arms(tmp_path / "inner")
    with pytest.raises(UsageError, match="holds no runs of its own, but studies; give one of them"):
        asyncsgd.load(tmp_path)
    write_run(tmp_path / "a", ASYNC, CURVE)
    assert list(asyncsgd.load(tmp_path).runs.index) == ["a"]


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_a_folder_without_runs_is_an_error_that_says_how_to_make_one(tmp_path, make):
    make(tmp_path / "x")
    with pytest.raises(UsageError, match="make one: asyncsgd train masked_lm"):
        asyncsgd.load(tmp_path / "x")


def test_a_planned_arm_without_a_run_counts_in_the_registered_family(tmp_path):
    folder = two_arms(tmp_path)
    third = SyntheticArm("ringmaster")
    plan = json.loads((folder / "plan.json").read_text())
    write_plan(folder, [SYNC, ASYNC, third], [*plan["runs"], planned("x", "test", third.name, 100)])
    study = asyncsgd.load(folder)
    assert row_of(study, "time_to_target").family_size == 2
    assert row_of(study, "time_to_target", third.name).word == "too few seeds"


def test_without_registered_conditions_none_are_named_where_the_reference_is_missing(tmp_path):
    registered = {"reference": "other", "primary": {"endpoint": "time_to_target"}}
    why = asyncsgd.load(two_arms(tmp_path, **registered)).exploratory
    assert why == "the folder has no other arm"


def test_a_folder_of_the_reference_alone_is_told_to_be_one(tmp_path):
    for rate in (0.1, 0.2):
        write_run(tmp_path / f"{rate}", SYNC, CURVE, learning_rate=rate)
    assert asyncsgd.load(tmp_path).verdict.startswith("No verdict: every arm is sync; add another algorithm")
