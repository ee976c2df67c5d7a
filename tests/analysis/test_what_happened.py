"""What happened in runs is said: at the top of a verdict that nothing was learned, in its small type all else."""

import dataclasses
import json
import shutil

import pytest
from doors import Membership, asyncsgd
from scenarios import ASYNC, EIGHT, SOONER, SYNC, reaches, row_of, two_arms
from synthetic import edit_json, straight, write_run

STOPPED = "the run was stopped, and goes on from a checkpoint"
"""Why workers leave where a run of real workers goes on."""
CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]


def small_type(study):
    return " ".join(study.headlines[0].details)


def loose(folder, precisions):
    for arm, precision in zip((SYNC, ASYNC), precisions, strict=True):
        for seed in range(8):
            gained = 0.01 * seed * (1 if arm is ASYNC else -1)
            own = dataclasses.replace(arm, settings={"precision": precision})
            write_run(folder / f"{arm.name}-{seed}", own, straight(9.0, 6.0 - gained, seconds=20.0), seed=seed)
    return asyncsgd.load(folder, arms=["precision"])


def test_what_arms_differ_in_beside_the_algorithm_is_one_line_by_arms_and_by_plan(tmp_path):
    assert "The arms also differ in precision (bf16, fp32)." in small_type(loose(tmp_path / "a", ["fp32", "bf16"]))
    assert "also differ" not in small_type(loose(tmp_path / "b", ["fp32", "fp32"]))
    planned = []
    for arm in (SYNC, ASYNC):
        planned.append(dataclasses.replace(arm, settings={**arm.settings}))
    planned[1].settings["precision"] = "bf16"
    study = two_arms(tmp_path / "c", *CURVES, arms=planned)
    assert "The arms also differ in precision (bf16, fp32)." in small_type(study)


@pytest.mark.parametrize(
    ("reason", "told"),
    [("its process was killed", "During 1 of 8 runs of async-w4-virtual a worker was lost."), ("", ""), (STOPPED, "")],
)
def test_a_worker_that_was_lost_is_said_and_one_that_was_sent_away_is_not(tmp_path, reason, told):
    def left(folder):
        path = of_seed_101(folder)
        shutil.rmtree(path)
        write_run(path, ASYNC, CURVES[1][1], seed=101, records=[Membership(0, 0, 0.0, "leave", 1, reason)])

    study = two_arms(tmp_path, *CURVES, afterwards=left)
    assert row_of(study, "time_to_target").word == "better"
    assert told in small_type(study)
    assert ("a worker was lost" in small_type(study)) == bool(told)


def of_seed_101(folder):
    return folder / f"test/{ASYNC.name}/s101"


def test_an_evaluation_that_was_not_finite_is_said_of_a_run_that_went_on(tmp_path):
    gap = []
    for curve in CURVES[1]:
        broken = list(curve)
        broken[3] = (*curve[3][:2], None)
        gap.append(broken)
    study = two_arms(tmp_path, CURVES[0], gap)
    assert "During 8 of 8 runs of async-w4-virtual an evaluation was not finite." in small_type(study)


@pytest.mark.parametrize("cpu", ["another", "a processor"])
def test_a_run_that_went_on_elsewhere_is_said(tmp_path, cpu):
    def moved(folder):
        path = of_seed_101(folder)
        resumed = path / "environment.resumed-1.json"
        resumed.write_text((path / "environment.json").read_text())
        edit_json(resumed, cpu=cpu)

    study = two_arms(tmp_path, *CURVES, afterwards=moved)
    told = "During 1 of 8 runs of async-w4-virtual another machine took over."
    assert (told in small_type(study)) == (cpu == "another")
    assert row_of(study, "time_to_target").word == "better"


def test_that_neither_arm_has_learned_is_said_before_anything_else(tmp_path):
    worse = []
    for last in (6, 7):
        worse.append([straight(6.0, last + 0.001 * seed, seconds=100.0, samples=1600) for seed in range(8)])
    both = two_arms(tmp_path / "both", *worse)
    one = two_arms(tmp_path / "one", CURVES[0], worse[1])
    told = "Neither arm has learned anything: the loss does not end below its start. "
    assert both.headlines[0].text.startswith(told)
    assert "Neither" not in one.verdict


@pytest.mark.parametrize(
    ("metric", "confusion", "learned"),
    [
        ("macro_f1", [[90, 0], [10, 0]], False),
        ("macro_f1", [[80, 10], [4, 6]], True),
        ("accuracy", [[80, 10], [4, 6]], False),
        ("accuracy", [[86, 4], [3, 7]], True),
        ("matthews", [[90, 0], [10, 0]], False),
        ("perplexity", [[90, 0], [10, 0]], False),
    ],
)
def test_a_classifier_has_learned_what_one_class_for_everything_does_not_give(tmp_path, metric, confusion, learned):
    """With scikit-learn, of the larger class alone: macro F1 0.474, accuracy 0.9. Of the second matrix 0.693 and 0.86,
    of the third an accuracy of 0.93."""

    def of_classes(folder):
        for path in folder.glob("test/*/*/summary.json"):
            edit_json(path, details={"confusion": confusion})
            events = path.with_name("events.jsonl")
            first, _, others = events.read_text().partition("\n")
            header = json.loads(first) | {"better": {metric: "higher"}}
            events.write_text("\n".join([json.dumps(header), others]))
            edit_json(path, events_bytes=None)

    study = two_arms(tmp_path, *CURVES, afterwards=of_classes)
    text = study.headlines[0].text
    said = "Neither arm has learned anything: one class for everything is predicted as well. "
    assert text.startswith(said) != learned
