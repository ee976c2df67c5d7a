"""Pairs that are copies of each other count once, and an arm that repeats itself confirms nothing."""

import pytest
from doors import asyncsgd
from synthetic import SyntheticArm, straight, write_run

SYNC, ASYNC = (SyntheticArm(name, 4, "virtual") for name in ("sync", "async"))
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
    assert all("is a copy of seed 0 and counts once" in why for why in tests["left_out"])
    assert number >= 6 or not set(tests["word"]) & {"better", "worse", "equivalent"}


def test_an_arm_that_repeats_itself_is_said_and_confirms_nothing(tmp_path):
    tests = questions(tmp_path, OWN, [0, 0, *OWN[2:]])
    assert set(tests["n"]) == {8}
    assert set(tests["family"]) == {"exploratory"}
    said = "The 8 runs of sync-w4-virtual end at 7 different sets of parameters, so they are not independent."
    assert all(said in caveats for caveats in tests["caveats"])


@pytest.mark.parametrize("ends", [OWN, [None] * 8])
def test_runs_that_end_apart_or_do_not_say_where_are_counted_each(tmp_path, ends):
    tests = questions(tmp_path, ends, ends)
    assert set(tests["n"]) == {8}
    assert set(tests["left_out"]) == {""}
    assert not any("independent" in told for caveats in tests["caveats"] for told in caveats)
