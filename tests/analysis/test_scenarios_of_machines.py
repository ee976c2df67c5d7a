"""Measured seconds of unlike or busy machines, and runs that were lost: the verdict, its reason, and the words."""

import dataclasses
import shutil

import pytest
from reading import row_of, trust_of
from scenarios import ASYNC, EIGHT, SOONER, SYNC, reaches, two_arms
from synthetic import edit_json

ARMS = tuple(dataclasses.replace(arm, clock="measured", speeds=None) for arm in (SYNC, ASYNC))
NAMES = {"treatment": ARMS[1].name, "reference": ARMS[0].name}
OLD = {"cpu": "slow old cpu", "cores": 4}
NEW = {"cpu": "fast new cpu", "cores": 64}


def measured(folder, afterwards):
    """Async is 1.54 times sooner in every seed, by seconds that were measured."""
    curves = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]
    return two_arms(folder, *curves, arms=ARMS, afterwards=afterwards)


def folders(study, arm):
    return sorted((study / "test" / arm).glob("s*"))


def test_all_runs_of_an_arm_on_a_faster_machine(tmp_path, approved):
    def two_machines(study):
        for arm, machine in zip(ARMS, (OLD, NEW), strict=True):
            for run in folders(study, arm.name):
                edit_json(run / "environment.json", **machine)

    found = measured(tmp_path, two_machines)
    for endpoint in ("time_to_target", "loss_at_equal_seconds"):
        row = row_of(found, endpoint, **NAMES)
        assert (row.word, row.n) == ("not comparable", 0)
        machines = "fast new cpu, 64 cores, torch 2.13.0", "slow old cpu, 4 cores, torch 2.13.0"
        assert row.reason == "machine of async-w4: {}; of sync-w4: {}".format(*machines)
    assert row_of(found, "loss_at_equal_samples", **NAMES).word == "better"
    assert trust_of(found, "comparable runs").value == "not in 2 of 3 tests"
    assert sorted(found.table("environments")["arms"]) == ["async-w4", "sync-w4"]
    approved(found)


def test_pairs_on_two_machines_each_on_one_are_compared(tmp_path):
    def by_seed(study):
        for arm in ARMS:
            for number, run in enumerate(folders(study, arm.name)):
                edit_json(run / "environment.json", **(OLD if number % 2 else NEW))

    row = row_of(measured(tmp_path, by_seed), "time_to_target", **NAMES)
    assert (row.family, row.word, row.n) == ("primary", "better", 8)


def test_two_pairs_of_eight_on_unlike_machines(tmp_path, approved):
    def two_of_async(study):
        for run in folders(study, ARMS[1].name)[6:]:
            edit_json(run / "environment.json", **NEW)

    found = measured(tmp_path, two_of_async)
    row = row_of(found, "time_to_target", **NAMES)
    told = "The runs of seed 106, 107 were made on different hardware, so their seconds are not compared."
    assert (row.family, row.n, row.caveats) == ("exploratory", 6, (told,))
    assert row_of(found, "loss_at_equal_samples", **NAMES).n == 8
    approved(found)


@pytest.mark.parametrize("change", [{"threads_per_worker": 2}, {"device": "cuda"}])
def test_threads_and_devices_are_a_part_of_an_arm(tmp_path, change):
    def one_of_sync(study):
        edit_json(folders(study, ARMS[0].name)[0] / "environment.json", **change)

    row = row_of(measured(tmp_path, one_of_sync), "time_to_target", **NAMES)
    assert (row.word, row.n) == ("not comparable", 0)
    assert row.reason.startswith("runs of sync-w4 had 1 threads a worker on ")


def test_other_builds_of_torch_are_other_machines(tmp_path):
    def newer(study):
        for run in folders(study, ARMS[1].name):
            edit_json(run / "environment.json", versions={"torch": "2.13.0+cu130"})

    assert row_of(measured(tmp_path, newer), "time_to_target", **NAMES).word == "not comparable"


def load(others, stolen):
    return {"machine_load": {"cores": 2, "own_share": 0.05, "others_share": others, "stolen_share": stolen}}


@pytest.mark.parametrize(("others", "stolen", "family"), [(0.05, 0.04, "primary"), (0.02, 0.09, "exploratory")])
def test_a_tenth_of_the_machine_may_be_used_by_others_or_stolen(tmp_path, others, stolen, family):
    def busy(study):
        edit_json(folders(study, ARMS[0].name)[3] / "summary.json", **load(others, stolen))

    assert row_of(measured(tmp_path, busy), "time_to_target", **NAMES).family == family


def test_a_machine_that_others_used(tmp_path, approved):
    def busy(study):
        for run in folders(study, ARMS[0].name):
            edit_json(run / "summary.json", **load(0.9, 0.0))

    found = measured(tmp_path, busy)
    told = (
        "Other programs used up to 90 % of the machine during 8 of 16 runs, so their seconds are no speed comparison."
    )
    for endpoint in ("time_to_target", "loss_at_equal_seconds"):
        row = row_of(found, endpoint, **NAMES)
        assert (row.family, row.word, row.caveats) == ("exploratory", "better", (told,))
    assert row_of(found, "loss_at_equal_samples", **NAMES).family == "secondary"
    assert trust_of(found, "others on the machine").value == "8 of 16 measured runs"
    approved(found)


def test_the_slowest_runs_of_an_arm_failed(tmp_path, approved):
    def two_fail(study):
        for run in folders(study, ASYNC.name)[6:]:
            edit_json(run / "summary.json", status="FAILED", message="worker died")

    curves = [[reaches(time) for time in times] for times in (EIGHT, (*SOONER[:6], 160, 160))]
    found = two_arms(tmp_path, *curves, afterwards=two_fail)
    for endpoint in ("time_to_target", "loss_at_equal_samples"):
        row = row_of(found, endpoint)
        told = "2 of 8 runs of async-w4-virtual are FAILED, and in no number."
        assert (row.family, row.n, row.caveats) == ("exploratory", 6, (told,))
    approved(found)


def test_the_slowest_runs_of_an_arm_are_missing(tmp_path, approved):
    def two_vanish(study):
        for run in folders(study, ASYNC.name)[6:]:
            shutil.rmtree(run)

    curves = [[reaches(time) for time in times] for times in (EIGHT, (*SOONER[:6], 160, 160))]
    found = two_arms(tmp_path, *curves, afterwards=two_vanish)
    assert row_of(found, "time_to_target").family == "exploratory"
    approved(found)
