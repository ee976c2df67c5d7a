"""A chain of trainings as a study: which run starts from which, with which seed, and every refusal."""

import copy
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
import yaml
from doors import Finished, asyncsgd
from gallery import write_tables

import sweep as sweep_script
from analysis.scores import mean_scores
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError, UsageError
from asyncsgd.studies.check import check
from asyncsgd.studies.plan import make_plan
from asyncsgd.studies.runs import STAGES
from asyncsgd.studies.stages import carry_out
from asyncsgd.studies.study_folder import StudyFolder

SYNC = {"mode": "sync"}
ASYNC = {"mode": "async"}
RATES = {"learning_rate": [5.0e-4, 1.0e-3]}


PAIRS = {"name": "intermediate", "task": "classification", "data": "pydocs:pairs", "samples": 64}
ARMS = {"sync": {"mode": "sync"}, "async": {"mode": "async"}, "none": None}
TARGET = {"name": "target", "task": "classification", "data": "pydocs", "samples": 64, "score": "accuracy"}
CHAIN = {
    "name": "chain",
    "stages": [
        {"name": "further", "task": "masked_lm", "model": "small", "samples": 64},
        {"name": "more", "task": "masked_lm", "samples": 32},
        {**PAIRS, "arms": ARMS, "conditions": {"nproc": 2, "clock": "virtual"}, "tune": RATES},
        {"name": "next", "task": "token_classification", "data": "words.jsonl", "samples": 32},
        {**TARGET, "repetitions": 2},
    ],
    "seeds": [7, 8],
    "tuning": {"seeds": [1]},
    "analysis": {"reference": "sync"},
}


def test_in_a_chain_every_run_starts_from_the_stage_before_which_arms_share_and_the_arm_none_leaves_its_stage_out():
    plan = make_plan(CHAIN)
    parents = {run.folder: run.parent for run in plan.runs}
    assert parents.pop("before/further/s1") is None
    assert len(parents) == len(plan.runs) - 1
    assert parents["before/more/s7"] == "before/further/s7"
    assert parents["tuning/async-w2-virtual/t1-s1"] == "before/more/s1"
    for arm in ("sync-w2-virtual", "async-w2-virtual"):
        assert parents[f"test/{arm}/s8"] == "before/more/s8"
        assert parents[f"after/next/{arm}/s8"] == f"test/{arm}/s8"
        assert parents[f"finetune/{arm}/s8-f1"] == f"after/next/{arm}/s8"
    assert parents["after/next/baseline/s8"] == "before/more/s8"
    assert parents["finetune/baseline/s8-f0"] == "after/next/baseline/s8"
    places = {run.folder: place for place, run in enumerate(plan.runs)}
    for folder, parent in parents.items():
        if parent is not None:
            assert places[parent] < places[folder]
    counts = Counter(run.stage for run in plan.runs)
    assert counts == {"before": 6, "tuning": 4, "test": 4, "after": 6, "finetune": 12}


def test_the_seed_of_a_run_of_a_chain_is_a_function_of_block_stage_and_repetition_equal_for_all_arms():
    plan = make_plan(CHAIN)
    seeds = {}
    for run in plan.runs:
        if run.stage in ("before", "after"):
            part = run.folder.split("/")[1]
        else:
            part = run.folder.partition("-f")[2]
        own = run.seed if run.finetune_seed is None else run.finetune_seed
        place = (run.seed, plan.task(run), part)
        assert seeds.setdefault(place, own) == own
    assert len(set(seeds.values())) == len(seeds)


def test_a_chain_is_compared_by_the_score_of_its_last_stage_and_the_two_stages_of_today_are_a_case_of_it():
    assert make_plan(CHAIN).analysis.primary.endpoint == "accuracy"
    first = {"name": "a", "task": "masked_lm", "data": "pydocs", "samples": 64}
    first |= {"arms": {"sync": SYNC, "async": ASYNC, "none": {}}, "conditions": {"nproc": 2}}
    last = {"name": "b", "task": "classification", "data": "pydocs", "repetitions": 2}
    chain = make_plan({"name": "n", "stages": [first, last], "seeds": [3, 4], "base_model": {"samples": 64}})
    base = {"data": "pydocs", "samples": 64}
    finetune = {"data": "pydocs", "repetitions": 2}
    two = {"algorithms": {"sync": SYNC, "async": ASYNC}, "conditions": {"nproc": 2}, "base": base}
    two = make_plan({**two, "name": "n", "seeds": [3, 4], "base_model": {"samples": 64}, "finetune": finetune})
    assert chain.runs == two.runs
    assert chain.arms == two.arms
    assert chain.finetune == two.finetune


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda stages: stages[2].pop("arms"), "there are arms in none"),
        (lambda stages: stages[4].update(arms=ARMS), "arms in intermediate, target"),
        (lambda stages: stages[2].update(name="further"), "every stage needs a name of its own"),
        (lambda stages: stages[0].update(task="classification", data="pydocs"), "more: masked_lm cannot start from"),
        (lambda stages: stages[1].update(model="tiny"), "stages.more: its model is that of the stage before"),
        (lambda stages: stages[3].update(tune={"mode": ["single"]}), "stages.next.tune: mode is not tuned"),
        (lambda stages: stages[3].update(tune={"learning_rat": [0.1]}), "stages.next: unknown key 'learning_rat'"),
        (lambda stages: stages[0].update(tune={"each": RATES}), "further: tune: {each: ...} is for stages after inter"),
        (lambda stages: stages[1].update(tune={"each": RATES}), "stages.more: tune: {each: ...} is for stages after"),
        (lambda stages: stages[2].update(repetitions=2), "stages.intermediate: repetitions is for the stage target"),
        (lambda stages: stages[3].update(mode="sync", nproc=2), "next: mode: sync needs processes of its own"),
        (lambda stages: stages[3].update(sed=3), "stages.next"),
        (
            lambda stages: stages[1].update(seed=3),
            "stages.more: seed is decided by the study, so take it out: runs have the seeds",
        ),
        (lambda stages: stages[0].update(task="tensors"), "stages.further.task: Invalid enum value 'tensors'"),
        (lambda stages: stages[2].update(arms={"none": None}), "intermediate: arms must name an algorithm"),
        (lambda stages: stages[2].update(arms={**ARMS, "none": SYNC}), "the arm none leaves the stage out"),
    ],
)
def test_what_is_wrong_in_a_chain_is_named_with_its_stage(change, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("words.jsonl").write_text('{"tokens": ["a"], "ner_tags": ["O"]}\n')
    config = copy.deepcopy(CHAIN)
    change(config["stages"])
    with pytest.raises(UsageError, match=re.escape(words)):
        check(make_plan(config))


def test_a_chain_has_no_algorithms_and_is_compared_by_the_score_of_its_last_stage_alone():
    with pytest.raises(UsageError, match="a config with stages has no algorithms"):
        make_plan({**CHAIN, "algorithms": {}})
    other = {"reference": "sync", "primary": {"endpoint": "macro_f1"}}
    with pytest.raises(UsageError, match="macro_f1, and a chain is compared"):
        make_plan({**CHAIN, "analysis": other})


def test_a_study_whose_labels_leave_its_score_undefined_is_refused_when_it_is_planned(tmp_path):
    (tmp_path / "train.csv").write_text("text,label\na a,1\nb b,2\n")
    (tmp_path / "test.csv").write_text("text,label\nc c,3\nd d,3\n")
    target = {"task": "classification", "data": str(tmp_path), "labels": "number", "cache_dir": str(tmp_path / "cache")}
    analysis = {"reference": "sync", "primary": {"endpoint": "pearson"}}
    config = {"algorithms": {"sync": SYNC, "async": ASYNC}, "conditions": {"nproc": 2}}
    refused = r"pearson, which is not defined: all texts to score on have one number in .*; name .* with one of mse$"
    with pytest.raises(UsageError, match=refused):
        check(make_plan({**config, "finetune": target, "analysis": analysis}))
    by_error = {"reference": "sync", "primary": {"endpoint": "mse"}}
    check(make_plan({**config, "finetune": {**target, "score": "mse"}, "analysis": by_error}))


def write_summary(folder, loss, settings, **metrics):
    """What a study looks at of a run that is done."""
    folder.mkdir(parents=True)
    summary = {"status": "DONE", "final_eval_loss": loss, "metrics": metrics}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "settings.yaml").write_text(json.dumps({"settings_format": 2, **settings}))


@pytest.mark.parametrize(("score", "best"), [("accuracy", 1), ("mse", 0)])
def test_a_labelled_stage_is_tuned_by_its_own_score_and_a_trial_without_one_never_wins(score, best, tmp_path):
    config = copy.deepcopy(CHAIN)
    stage = config["stages"][2]
    stage["tune"] = {"learning_rate": [1.0e-4, 2.0e-4, 3.0e-4]}
    stage["score"] = score
    if score == "mse":
        stage |= {"data": "rated", "labels": "number"}
    plan = make_plan(config)
    for run in plan.of_stage("tuning"):
        value = [0.25, 0.75, None][run.trial]
        trial = plan.arm(run.arm).trials[run.trial]
        write_summary(tmp_path / run.folder, 3.0 - run.trial, trial, **{score: value})
    study = StudyFolder(plan, "", tmp_path)
    study.choose()
    assert study.chosen == {arm.name: arm.trials[best] for arm in plan.arms}


def test_what_fails_again_is_made_once_although_a_chain_has_several_rounds(tmp_path):
    config = copy.deepcopy(CHAIN)
    config["stages"][0]["data"] = "nowhere"
    study = StudyFolder(make_plan(config), "", tmp_path)
    with pytest.raises(RunError, match="6 before runs are not finished"):
        carry_out(study, None, StopRequest(), jobs=None, retry=True, shard=(1, 1))
    assert not list(tmp_path.rglob("*.before-1"))


def ended(job, score, parent_of):
    """Write what a run leaves that is scored so, and check the run that it starts from."""
    write_summary(job.path, score, job.values, accuracy=-score, macro_f1=-score)
    model = job.values["model"]
    parent_of[job.folder] = None
    if "/" in model:
        parent_of[job.folder] = str(Path(model).relative_to(job.out))


@pytest.mark.parametrize("each", [False, True])
def test_on_tuning_seeds_every_trial_starts_from_the_chosen_trial_of_the_stage_before(each, tmp_path):
    config = copy.deepcopy(CHAIN)
    grid = {"learning_rate": [1.0e-3, 2.0e-3, 3.0e-3]}
    config["stages"][0]["tune"] = grid
    if each:
        config["stages"][4]["tune"] = {"each": grid}
    else:
        config["stages"][4]["tune"] = grid
    config["stages"][4]["repetitions"] = 1
    plan = make_plan(config)
    study = StudyFolder(plan, "", tmp_path)
    # the lower the better: the third trial is chosen, but for the asynchronous arm's target, which has its second one
    worst_first = {0: 3.0, 1: 2.0, 2: 1.0, None: 0.0}
    best_in_the_middle = {0: 3.0, 1: 1.0, 2: 2.0}
    trials = {run.folder: run.trial for run in plan.runs}
    parents = {}
    rates = {}
    order = []
    for stage in STAGES:
        for _ in range(plan.chain.rounds(stage)):
            study.choose()
            for job in study.to_do(stage, (1, 1)):
                scores = worst_first
                if job.folder.startswith("trial/target/async"):
                    scores = best_in_the_middle
                ended(job, scores[trials[job.folder]], parents)
                rates[job.folder] = job.values.get("learning_rate")
                order.append(job.folder)
    assert sorted(order) == sorted(run.folder for run in plan.runs)
    arms = ("sync-w2-virtual", "async-w2-virtual")
    for number in range(3):
        assert parents[f"before/further/t{number}-s1"] is None
    assert parents["before/more/s1"] == "before/further/t2-s1"
    assert parents["before/more/s7"] == "before/further/s7"
    assert rates["before/further/t1-s1"] == 2e-3
    assert rates["before/further/s7"] == 3e-3
    for arm in arms:
        assert parents[f"tuning/{arm}/t0-s1"] == "before/more/s1"
        if each or arm == arms[0]:
            assert parents[f"trial/next/{arm}/s1"] == f"tuning/{arm}/t1-s1"
            for number in range(3):
                assert parents[f"trial/target/{arm}/t{number}-s1"] == f"trial/next/{arm}/s1"
        chosen = 2e-3 if each and arm == arms[1] else 3e-3
        assert rates[f"finetune/{arm}/s8-f0"] == chosen
    assert ("trial/next/baseline/s1" in parents) == each
    assert (f"trial/target/{arms[1]}/t0-s1" in parents) == each
    assert rates["finetune/baseline/s7-f0"] == 3e-3
    assert Counter(run.stage for run in plan.runs)["trial"] == (12 if each else 4)
    study.write_plan()
    written = json.loads((tmp_path / "plan.json").read_text())
    assert all("?" not in (run["parent"] or "") for run in written["runs"])
    chosen_of = {stage["name"]: stage["chosen"]["learning_rate"] for stage in written["stages"]}
    if each:
        targets = {"target/sync-w2-virtual": 3e-3, "target/async-w2-virtual": 2e-3, "target/baseline": 3e-3}
    else:
        targets = {"target": 3e-3}
    assert chosen_of == {"further": 3e-3, **targets}


def test_arms_that_are_not_tuned_have_one_trial_where_a_later_stage_is_tuned_on_their_models():
    config = copy.deepcopy(CHAIN)
    del config["stages"][2]["tune"]
    config["stages"][3]["tune"] = RATES
    plan = make_plan(config)
    assert [arm.trials for arm in plan.arms] == [({},), ({},)]
    parents = {}
    for run in plan.runs:
        if run.stage in ("tuning", "trial"):
            parents[run.folder] = run.parent
    assert parents == {
        "tuning/sync-w2-virtual/t0-s1": "before/more/s1",
        "tuning/async-w2-virtual/t0-s1": "before/more/s1",
        "trial/next/sync-w2-virtual/t0-s1": "tuning/sync-w2-virtual/t?-s1",
        "trial/next/sync-w2-virtual/t1-s1": "tuning/sync-w2-virtual/t?-s1",
    }
    del config["analysis"]
    with pytest.raises(UsageError, match=r"stages.next: tune needs analysis: {reference: ARM}, whose models it tries"):
        make_plan(config)


@pytest.mark.slow
def test_a_chain_is_made_by_one_command_and_its_last_run_names_every_run_before_it(tmp_path, monkeypatch, capsys):
    draw = random.Random(0)
    for side, number in (("train", 40), ("test", 20)):
        rows = []
        for _ in range(number):
            words = draw.choices(("bada", "gimo", "sune", "lopi"), k=6)
            rows.append({"text": " ".join(words), "more": " ".join(words[::-1]), "label": words[0]})
        write_tables(tmp_path, **{side: rows})
    of_all = {"data": str(tmp_path), "cache_dir": str(tmp_path / "cache"), "seq_len": 16, "batch_size": 4}
    of_all |= {"samples": 16, "evaluations": 1, "device": "cpu"}
    labelled = {**of_all, "task": "classification"}
    pairs = {**labelled, "text_pair_column": "more"}
    config = {
        "name": "chain",
        "stages": [
            {"name": "further", "task": "masked_lm", "model": "tiny", "vocab_size": 256, **of_all, "tune": RATES},
            {"name": "pairs", **pairs, "arms": ARMS, "conditions": {"nproc": 2, "clock": "virtual"}},
            {"name": "next", **pairs},
            {"name": "target", **labelled, "score": "accuracy", "tune": {"each": RATES}},
        ],
        "seeds": [7],
        "tuning": {"seeds": [1]},
        "analysis": {"reference": "sync"},
    }
    path = tmp_path / "config.yaml"
    out = tmp_path / "out"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr(sys, "argv", ["sweep.py", str(path), "--out", str(out)])
    assert sweep_script.main() == 0
    assert "22 of 22 runs" in capsys.readouterr().out
    names = {"async-w2-virtual": ["before/further", "test/async-w2-virtual", "after/next/async-w2-virtual"]}
    names["baseline"] = ["before/further", "after/next/baseline"]
    for arm, parents in names.items():
        parent = Finished(out / f"finetune/{arm}/s7-f0").summary["parent"]
        for folder in reversed(parents):
            summary = Finished(out / folder / "s7").summary
            assert parent["parameters_sha256"] == summary["parameters_sha256"]
            parent = parent.get("parent")
        assert parent is None
    study = asyncsgd.load(out)
    assert study.plan.problems == ()
    assert not study.runs["left_out"].any()
    tests = study.tests[study.tests["endpoint"] == "accuracy"]
    pairs_of_arms = set(zip(tests["treatment"], tests["reference"], strict=True))
    assert pairs_of_arms == {("async-w2-virtual", "sync-w2-virtual"), ("sync-w2-virtual", "baseline")}
    assert set(tests["word"]) == {"too few seeds"}


def test_an_arm_that_diverged_upstream_has_the_worst_score_after_every_stage_in_between():
    rows = [
        ("test/async/s1", "test", "async", "DIVERGED", None),
        ("after/next/async/s1", "after", "async", "MISSING", "test/async/s1"),
        ("finetune/async/s1-f0", "finetune", "async", "MISSING", "after/next/async/s1"),
        ("finetune/sync/s1-f0", "finetune", "sync", "DONE", "after/next/sync/s1"),
    ]
    runs = pd.DataFrame(rows, columns=["run", "stage", "arm", "status", "parent"]).set_index("run")
    runs = runs.assign(seed=1, replicate=0, data="", metric=0.5, details=[{"metrics": {"accuracy": 0.5}}] * 4)
    runs["diverged"] = runs["status"] == "DIVERGED"
    runs["usable"] = runs["status"] == "DONE"
    assert mean_scores(runs).loc[1].to_dict() == {"async": -float("inf"), "sync": 0.5}
