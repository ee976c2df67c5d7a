"""A sweep's folder, a plain folder and a damaged one become the same kind of study, with every run in its place."""

import hashlib
import json

import pytest
import yaml
from synthetic import (
    SyntheticArm,
    edit_json,
    example_study,
    planned,
    straight,
    write_finetuning,
    write_plan,
    write_registration,
    write_run,
    write_study,
)

from analysis.study.read import load_study
from analysis.study.types import MISSING, Pilots
from asyncsgd.errors import UsageError
from asyncsgd.study.plan import BASE, BASELINE

SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")
FALL = straight(6.0, 4.0, seconds=10.0)


def small(folder, *, seeds=2, registration=None):
    curves = {SYNC.name: [FALL] * seeds, ASYNC.name: [FALL] * seeds}
    return write_study(folder, curves, [SYNC, ASYNC], registration=registration)


def test_a_sweeps_folder_has_every_run_in_its_place(example_folder):
    study = load_study(example_folder)
    assert (study.name, study.planned, study.unchanged, study.set_aside) == ("synthetic", True, True, ())
    assert study.problems == ("test/async-w16-virtual/s103: the evaluation at version 83 has no finite loss",)
    assert [arm.name for arm in study.arms][:3] == ["sync-w2-virtual", "async-w2-virtual", "ringmaster-w2-virtual"]
    assert study.arms[-1].name == BASELINE
    assert [len(study.of(stage)) for stage in ("base", "tuning", "test", "finetune")] == [1, 45, 8 * 15 + 8 * 3, 64]
    (run,) = [run for run in study.of("finetune", "async-w4-virtual") if run.finetune_seed == 101001]
    assert (run.seed, run.parent) == (101, "test/async-w4-virtual/s101")
    assert study.of("base")[0].arm == BASE
    assert {run.replicate for run in study.of("test", "sync-w2")} == {0, 1}
    assert [run.name for run in study.of("test") if run.diverged] == ["test/async-w16-virtual/s103"]
    assert [run.name for run in study.runs if run.status == MISSING] == ["test/sync-w2/s107-r1"]


def test_an_arm_has_what_its_runs_say(tmp_path):
    arm = load_study(small(tmp_path / "s")).arm("async-w4-virtual")
    assert (arm.algorithm, arm.num_workers, arm.clock, arm.speeds, arm.batch_size) == (
        "async",
        4,
        "virtual",
        "slow:worker=0,factor=3",
        16,
    )


def test_where_the_plan_and_the_runs_disagree_the_runs_are_believed_and_it_is_told(tmp_path):
    folder = small(tmp_path / "s")
    plan = json.loads((folder / "plan.json").read_text())
    plan["arms"][0]["clock"] = "measured"
    (folder / "plan.json").write_text(json.dumps(plan))
    study = load_study(folder)
    assert study.arm(SYNC.name).clock == "virtual"
    assert study.problems == (
        "sync-w4-virtual: plan.json says clock measured, its runs say virtual; the runs are believed",
    )


def test_without_a_plan_the_runs_say_what_they_are_and_nobody_contradicts_them(tmp_path):
    folder = small(tmp_path / "s")
    (folder / "plan.json").unlink()
    study = load_study(folder)
    assert [(arm.name, arm.clock) for arm in study.arms] == [(arm.name, "virtual") for arm in (ASYNC, SYNC)]
    assert (study.problems, study.set_aside) == ((), ())


def test_a_run_that_is_not_what_its_place_says_is_set_aside(tmp_path):
    tuned = SyntheticArm("ringmaster", learning_rates=(0.001, 0.002), tuning_seeds=(0,))
    tuning, test, fine = (
        f"{stage}/{tuned.name}/{leaf}"
        for stage, leaf in (("tuning", "t1-s0"), ("test", "s100"), ("finetune", "s100-f0"))
    )
    runs = [
        planned(tuning, "tuning", tuned.name, 0, trial=1),
        planned(test, "test", tuned.name, 100),
        planned(fine, "finetune", tuned.name, 100, parent=test, finetune_seed=7),
    ]
    write_plan(tmp_path, [tuned], runs)
    write_run(tmp_path / tuning, tuned, FALL, learning_rate=0.002)
    write_run(tmp_path / test, tuned, FALL, seed=100)
    write_finetuning(tmp_path / fine, seed=7, macro_f1=0.5, parent={"run": "s100"})
    study = load_study(tmp_path)
    assert (study.problems, study.set_aside, len(study.runs)) == ((), (), 3)
    write_run(tmp_path / tuning, tuned, FALL, learning_rate=0.001)
    write_run(tmp_path / test, SyntheticArm("ringmaster", 8), FALL, seed=100)
    write_finetuning(tmp_path / fine, seed=7, macro_f1=0.5, parent={"run": "s100", "parameters_sha256": "ab"})
    study = load_study(tmp_path)
    told = {item.name: item.reason.removeprefix("its folder holds another run: ") for item in study.set_aside}
    assert told[tuning] == "learning_rate 0.001, not 0.002"
    assert told[test] == "nproc 8, not 4"
    assert told[fine].startswith("parameters_sha256 of its start ab, not ")
    assert {run.name for run in study.runs if run.run is None} == set(told)


def test_a_second_seed_with_the_parameters_of_the_first_is_told_as_a_copy(tmp_path):
    folder = small(tmp_path / "s")
    for seed in (100, 101):
        edit_json(folder / f"test/{SYNC.name}/s{seed}/summary.json", parameters_sha256="ab" * 32)
    (told,) = load_study(folder).problems
    assert told.startswith(f"test/{SYNC.name}/s101: a copy of test/{SYNC.name}/s100: ")


def test_test_runs_of_an_arm_that_differ_where_the_plan_is_silent_are_told(tmp_path):
    folder = small(tmp_path / "s")
    write_run(folder / f"test/{ASYNC.name}/s101", ASYNC, FALL, seed=101, learning_rate=0.9)
    study = load_study(folder)
    assert study.problems == (f"{ASYNC.name}: its test runs differ in learning_rate: 0.0005 (1 runs), 0.9 (1 runs)",)


def test_a_planned_run_without_a_folder_is_missing_and_an_unplanned_one_is_set_aside(tmp_path):
    folder = small(tmp_path / "s")
    (folder / "test/sync-w4-virtual/s101").rename(folder / "test/sync-w4-virtual/s999")
    study = load_study(folder)
    (missing,) = [run for run in study.runs if run.status == MISSING]
    assert (missing.name, missing.usable) == ("test/sync-w4-virtual/s101", False)
    assert missing.unusable_because == "planned, and no folder there"
    assert [(item.name, item.reason) for item in study.set_aside] == [("test/sync-w4-virtual/s999", "not in plan.json")]


def test_a_plan_of_which_nothing_has_run_is_a_study_of_missing_runs(tmp_path):
    write_plan(tmp_path, [SYNC], [planned("test/sync-w4-virtual/s100", "test", SYNC.name, 100)])
    study = load_study(tmp_path)
    assert [run.status for run in study.runs] == [MISSING]


@pytest.mark.parametrize("make", [lambda folder: None, lambda folder: folder.mkdir()])
def test_a_folder_with_neither_a_run_nor_a_plan_is_a_usage_error(tmp_path, make):
    make(tmp_path / "s")
    with pytest.raises(UsageError, match="make a run with"):
        load_study(tmp_path / "s")


def test_replaced_attempts_are_counted_and_otherwise_ignored(tmp_path):
    folder = small(tmp_path / "s")
    write_run(folder / "test/sync-w4-virtual/s100.before-1", SYNC, FALL, seed=100, status=None)
    study = load_study(folder)
    assert (study.num_replaced, study.problems, study.set_aside) == (1, (), ())


def test_the_registration_is_read_with_the_hash_of_its_bytes(tmp_path):
    folder = small(tmp_path / "s", registration={})
    registration = load_study(folder).registration
    assert registration is not None
    assert registration.sha256 == hashlib.sha256((folder / "analysis.yaml").read_bytes()).hexdigest()
    assert (registration.reference, registration.endpoint, registration.num_workers, registration.clock) == (
        "sync",
        "time_to_target",
        4,
        "virtual",
    )
    assert (registration.alpha, registration.num_seeds, dict(registration.margins)) == (
        0.05,
        8,
        {"loss": 0.02, "macro_f1": 0.01},
    )
    assert dict(registration.targets) == {"sync-w4-virtual": 5.0}


def test_without_a_registration_the_study_says_why_it_is_exploratory(tmp_path):
    study = load_study(small(tmp_path / "s"))
    assert study.registration is None
    assert study.unregistered_because == "there is no analysis.yaml: nothing was declared before the runs"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("reference: [", "it is not YAML"),
        ("- 1", "cannot be used"),
        ("schema: 9\nreference: sync", "has schema 9, this version reads 1"),
        ("primary: {endpoint: time_to_target}", "it has no 'reference'"),
        ("reference: sync\nprimary: {endpoint: macro_f1}\nmargins: {loss: -1}", "margins must be above 0"),
        ("reference: sync\nprimary: {endpoint: macro_f1}\nmargins: {loss: big}", "could not convert"),
        ("reference: sync\nprimary: {endpoint: speed}", "names no primary endpoint"),
        *(
            (
                f"reference: sync\nprimary: {{endpoint: macro_f1}}\nalpha: {alpha}",
                f"its alpha must be a number above 0 and below 0.5, got {alpha!r}; write alpha: 0.05",
            )
            for alpha in (0, 0.5, 1, True, "5e-2")
        ),
    ],
)
def test_a_damaged_registration_is_none_with_its_reason(tmp_path, content, told):
    folder = small(tmp_path / "s")
    (folder / "analysis.yaml").write_text(content)
    study = load_study(folder)
    assert study.registration is None
    assert told in study.unregistered_because
    assert study.problems == (study.unregistered_because,)


@pytest.mark.parametrize(
    ("recorded", "unchanged"),
    [({"targets": {"sync-w4-virtual": 5.0}}, True), ({"targets": {"sync-w4-virtual": 4.9}}, False), ({}, None)],
)
def test_the_registration_is_checked_against_what_the_plan_recorded(tmp_path, recorded, unchanged):
    folder = small(tmp_path / "s", registration={})
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | recorded))
    study = load_study(folder)
    assert study.unchanged is unchanged
    assert len(study.problems) == (unchanged is False)


def test_a_recorded_hash_is_checked_too(tmp_path):
    folder = small(tmp_path / "s")
    digest = write_registration(folder)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps(plan | {"analysis_sha256": digest}))
    assert load_study(folder).unchanged is True
    with open(folder / "analysis.yaml", "a") as file:
        file.write("# a comment added afterwards\n")
    assert load_study(folder).unchanged is False


def test_the_registered_family_seeds_and_pilots_are_read(tmp_path):
    pilots = {SYNC.name: {"runs": 10, "first_loss": 7.08, "best_loss": 6.09}}
    folder = small(
        tmp_path / "s",
        registration={"family": [ASYNC.name], "seeds": [100, 101], "config_sha256": "00", "pilots": pilots},
    )
    study = load_study(folder)
    assert study.registration is not None
    assert (study.registration.family, study.registration.seeds, study.registration.config_sha256) == (
        (ASYNC.name,),
        (100, 101),
        "00",
    )
    assert dict(study.registration.pilots) == {SYNC.name: Pilots(10, 7.08, 6.09)}
    assert (study.problems, study.unverified_because) == ((), "")


def test_a_registration_of_before_has_no_family_and_no_pilots(tmp_path):
    study = load_study(small(tmp_path / "s", registration={}))
    assert study.registration is not None
    assert (study.registration.family, study.registration.seeds, study.registration.config_sha256) == (None, None, None)
    assert (dict(study.registration.pilots), study.unverified_because) == ({}, "")


@pytest.mark.parametrize(
    ("registration", "told"),
    [
        ({"config_sha256": "99"}, "plan.json is of another config than the one that analysis.yaml registers"),
        ({"seeds": [100, 101, 102]}, "analysis.yaml registers test seeds 100, 101, 102, plan.json has 100, 101"),
    ],
)
def test_a_plan_that_is_not_the_registered_one_is_told(tmp_path, registration, told):
    study = load_study(small(tmp_path / "s", registration=registration))
    assert (study.unverified_because, study.problems) == (told, (told,))


def test_without_a_plan_nothing_says_that_all_that_was_registered_is_there(tmp_path):
    folder = small(tmp_path / "s", registration={})
    (folder / "plan.json").unlink()
    study = load_study(folder)
    assert study.unverified_because.startswith("there is no plan.json that could be read")


def test_a_sweep_inside_a_folder_of_runs_is_a_study_of_its_own(tmp_path):
    small(tmp_path / "quick")
    with pytest.raises(UsageError, match=r"holds no runs of its own, but sweeps; give one of them: .*quick"):
        load_study(tmp_path)
    write_run(tmp_path / "one", SYNC, FALL)
    study = load_study(tmp_path)
    assert [run.name for run in study.runs] == ["one"]
    assert study.problems == (
        f"quick: a sweep of its own with 4 runs, which are not in this study; give {tmp_path / 'quick'} itself",
    )


def test_in_a_plain_folder_arms_are_conditions_and_the_settings_that_differ(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"a{seed}", SYNC, FALL, seed=seed)
        write_run(tmp_path / f"b{seed}", ASYNC, FALL, seed=seed, learning_rate=0.001)
        write_run(tmp_path / f"c{seed}", ASYNC, FALL, seed=seed, learning_rate=0.002)
    study = load_study(tmp_path)
    assert not study.planned
    assert [(arm.name, arm.algorithm) for arm in study.arms] == [
        ("async, 4 workers, virtual clock, learning_rate 0.001", "async"),
        ("async, 4 workers, virtual clock, learning_rate 0.002", "async"),
        ("sync, 4 workers, virtual clock", "sync"),
    ]
    assert [run.seed for run in study.of("test", study.arms[0].name)] == [0, 1]
    assert {run.stage for run in study.runs} == {"test"}
    assert [arm.settings for arm in study.arms] == [{"learning_rate": rate} for rate in (0.001, 0.002, 0.0005)]


def test_measured_and_virtual_runs_of_a_plain_folder_are_different_arms(tmp_path):
    write_run(tmp_path / "a", SyntheticArm("async", clock="measured", speeds=None), FALL)
    write_run(tmp_path / "b", ASYNC, FALL)
    assert [arm.clock for arm in load_study(tmp_path).arms] == ["measured", "virtual"]


def test_the_budget_does_not_make_an_arm(tmp_path):
    write_run(tmp_path / "a", ASYNC, FALL, seed=0)
    write_run(tmp_path / "b", ASYNC, straight(6.0, 4.0, seconds=10.0, samples=320), seed=1)
    assert len(load_study(tmp_path).arms) == 1


def test_a_second_run_of_a_seed_is_a_replicate_in_a_plain_folder_and_it_is_told(tmp_path):
    for name in ("b", "a"):
        write_run(tmp_path / name, ASYNC, FALL, seed=7)
    study = load_study(tmp_path)
    assert [(run.name, run.replicate) for run in study.runs] == [("a", 0), ("b", 1)]
    (told,) = study.problems
    assert told.startswith("duplicate runs: 2 runs of async, 4 workers, virtual clock have seed 7 (a, b): the first")


def test_fine_tuning_runs_of_a_plain_folder_belong_to_the_arm_of_their_parent(tmp_path):
    write_run(tmp_path / "parent", ASYNC, FALL, seed=5)
    write_finetuning(tmp_path / "ft", seed=77, macro_f1=0.6, parent={"run": "/elsewhere/parent", "seed": 5})
    write_finetuning(tmp_path / "base", seed=77, macro_f1=0.5, parent=None)
    write_finetuning(tmp_path / "lost", seed=77, macro_f1=0.5, parent={"run": "gone"})
    study = load_study(tmp_path)
    assert [(run.name, run.arm, run.seed, run.finetune_seed) for run in study.of("finetune")] == [
        ("ft", "async, 4 workers, virtual clock", 5, 77),
        ("base", BASELINE, 77, 77),
    ]
    assert [(item.name, item.reason) for item in study.set_aside] == [
        ("lost", "the run it was fine-tuned from (gone) is not in this folder")
    ]


def test_a_plain_run_that_does_not_say_what_it_is_is_set_aside(tmp_path):
    write_run(tmp_path / "a", ASYNC, FALL)
    write_run(tmp_path / "b", ASYNC, FALL, status=None)
    study = load_study(tmp_path)
    assert [run.name for run in study.runs] == ["a"]
    assert study.set_aside[0].reason == ("UNFINISHED: no summary.json: the run crashed, was killed or is still running")


def place_of(run):
    return (
        run.name,
        run.arm,
        run.stage,
        run.seed,
        run.replicate,
        run.trial or 0,
        run.parent or "",
        run.finetune_seed or 0,
    )


def test_a_sweeps_folder_without_its_plan_is_placed_by_the_names_of_its_folders(tmp_path):
    folder = example_study(tmp_path / "s", seeds=2)
    whole = load_study(folder)
    (folder / "plan.json").write_text("{torn")
    study = load_study(folder)
    assert study.problems[0].startswith("plan.json cannot be read (JSONDecodeError('Expecting property name")
    assert sorted(map(place_of, study.runs)) == sorted(place_of(run) for run in whole.runs if run.status != MISSING)
    assert {arm.name: arm.algorithm for arm in study.arms} == {arm.name: arm.algorithm for arm in whole.arms}
    assert study.registration is not None


def test_settings_of_simulate_are_read_one_level_deeper(tmp_path):
    for seed, rate in ((0, 0.1), (1, 0.2)):
        path = write_run(tmp_path / f"r{seed}", ASYNC, FALL, seed=seed)
        (path / "settings.yaml").write_text(yaml.safe_dump({"simulate": {"learning_rate": rate, "seed": seed}}))
    assert [arm.settings for arm in load_study(tmp_path).arms] == [{"learning_rate": 0.1}, {"learning_rate": 0.2}]
