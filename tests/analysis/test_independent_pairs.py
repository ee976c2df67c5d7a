"""Pairs that are copies of each other count once, and an arm that repeats itself confirms nothing."""

import json

import pytest
from doors import asyncsgd
from scenarios import ASYNC, EIGHT, SOONER, SYNC, reaches, row_of, two_arms
from synthetic import edit_json, planned, straight, write_finetuning, write_plan, write_run

SEEDS = range(8)
OWN = [f"{seed:064x}" for seed in SEEDS]


def questions(folder, of_async, of_sync):
    """The questions of eight pairs whose runs end at parameters with these hashes."""
    for seed in SEEDS:
        gained = 0.01 * seed
        for arm, last, ends in ((ASYNC, 5.0 - gained, of_async), (SYNC, 6.0 + gained, of_sync)):
            known = {"parameters_sha256": f"{arm.algorithm} {ends[seed]}" if ends[seed] is not None else None}
            write_run(folder / f"{arm.name}-s{seed}", arm, straight(9.0, last, seconds=20.0), seed=seed, **known)
    return asyncsgd.load(folder).tests


@pytest.mark.parametrize(("number", "copies"), [(1, [0] * 8), (2, [0, 1] * 4), (7, [0, 0, 2, 3, 4, 5, 6, 7])])
def test_pairs_of_which_both_runs_are_those_of_another_pair_count_once(tmp_path, number, copies):
    tests = questions(tmp_path, copies, copies)
    assert set(tests["n"]) == {number}
    for why in tests["left_out"]:
        assert "is a copy of seed 0 and counts once" in why
    assert number >= 6 or not set(tests["word"]) & {"better", "worse", "equivalent"}


def test_an_arm_that_repeats_itself_is_said_and_confirms_nothing(tmp_path):
    tests = questions(tmp_path, OWN, [0, 0, *OWN[2:]])
    assert set(tests["n"]) == {8}
    assert set(tests["family"]) == {"exploratory"}
    said = "The 8 runs of sync-w4-virtual end at 7 different sets of parameters, so they are not independent."
    for caveats in tests["caveats"]:
        assert said in caveats


@pytest.mark.parametrize("ends", [OWN, [None] * 8])
def test_runs_that_end_apart_or_do_not_say_where_are_counted_each(tmp_path, ends):
    tests = questions(tmp_path, ends, ends)
    assert set(tests["n"]) == {8}
    assert set(tests["left_out"]) == {""}
    assert not any("independent" in told for caveats in tests["caveats"] for told in caveats)


def planned_study(folder, afterwards):
    return two_arms(folder, *[[reaches(time) for time in times] for times in (EIGHT, SOONER)], afterwards=afterwards)


@pytest.mark.parametrize(
    ("name", "status", "family"),
    [
        ("s101.before-1", "DONE", "exploratory"),
        ("s101.before-1", "DIVERGED", "exploratory"),
        ("s101.before-1", "FAILED", "primary"),
        ("s101.before-1", None, "primary"),
        ("s101-r1", "DONE", "exploratory"),
        ("s101-r1", "FAILED", "primary"),
    ],
)
def test_a_second_run_with_a_result_confirms_nothing_and_a_killed_one_is_told(tmp_path, name, status, family):
    def again(folder):
        write_run(folder / "test" / ASYNC.name / name, ASYNC, reaches(90), seed=101, status=status)

    study = planned_study(tmp_path, again)
    row = row_of(study, "time_to_target")
    assert row.family == family
    assert row.word == "better"
    assert row.n == 8
    counted = "eside the runs of async-w4-virtual that are counted there are"
    made = f"{counted} others of their seeds with a result (1)."
    assert (made in study.headlines[0].text) == (family == "exploratory")
    killed = f"{counted} earlier ones without a result (1)."
    assert (killed in study.verdict) == (name.endswith("before-1") and family == "primary")


def test_planned_replicates_keep_the_word_and_are_told(tmp_path):
    def replicated(folder):
        at = f"test/{ASYNC.name}/s101-r1"
        write_run(folder / at, ASYNC, reaches(41), seed=101)
        runs = json.loads((folder / "plan.json").read_text())["runs"]
        edit_json(folder / "plan.json", runs=[*runs, planned(at, "test", ASYNC.name, 101, replicate=1)])

    study = planned_study(tmp_path, replicated)
    assert row_of(study, "time_to_target").family == "primary"
    assert "Beside the runs of async-w4-virtual that are counted there are planned replicates (1)." in study.verdict


def test_copies_of_fine_tunings_count_once(tmp_path):
    runs = []
    for seed in range(8):
        for arm, score in ((SYNC, 0.6), (ASYNC, 0.7)):
            test = f"test/{arm.name}/s{seed}"
            at = f"finetune/{arm.name}/s{seed}-f0"
            write_run(tmp_path / test, arm, straight(9.0, 5.0, seconds=20.0), seed=seed)
            write_finetuning(tmp_path / at, seed=seed, macro_f1=score + 0.01 * seed, parent={"run": f"s{seed}"})
            edit_json(tmp_path / at / "summary.json", parameters_sha256=f"{arm.name} {max(seed, 1)}")
            runs.append(planned(test, "test", arm.name, seed))
            runs.append(planned(at, "finetune", arm.name, seed, parent=test, finetune_seed=seed))
    write_plan(tmp_path, [SYNC, ASYNC], runs)
    row = row_of(asyncsgd.load(tmp_path), "macro_f1")
    assert row.n == 7
    assert row.left_out == "seed 1 is a copy of seed 0 and counts once"
