"""The score after fine-tuning: which one, which way is better, and what a model without a score counts as."""

import math

import pandas as pd
import pytest
import yaml
from doors import asyncsgd
from synthetic import (
    SyntheticArm,
    edit_json,
    planned,
    straight,
    write_finetuning,
    write_plan,
    write_registration,
    write_run,
)

from analysis.scores import mean_scores, metric_of
from asyncsgd.errors import UsageError
from asyncsgd.studies.plan import make_plan

RANKED = {"pearson": "higher", "mse": "lower"}
ERRORS = {"mse": "lower", "pearson": "higher"}


def tuned(better, metrics, **details):
    """A fine-tuning run of arm `a` for each score; None: its predictions leave it undefined."""
    of_all = {"stage": "finetune", "arm": "a", "status": "DONE", "diverged": False, "usable": True}
    of_all |= {"parent": "p", "data": "d", "details": {"better": better, **details}}
    rows = []
    for seed, metric in enumerate(metrics):
        if metric is None:
            metric = math.nan
        rows.append({**of_all, "seed": seed, "metric": metric})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(("better", "worst"), [(RANKED, -math.inf), (ERRORS, math.inf)], ids=["pearson", "mse"])
def test_a_collapsed_model_has_the_worst_rank_by_the_direction_of_its_task_s_first_score(better, worst):
    runs = tuned(better, [0.5, None, 0.7])
    assert metric_of(runs) == (next(iter(better)), worst > 0)
    assert mean_scores(runs)["a"].tolist() == [0.5, worst, 0.7]


def test_a_score_that_the_labels_leave_undefined_is_no_result():
    runs = tuned(RANKED, [None, None], undefined_scores={"pearson": "all texts to score on have one number"})
    assert mean_scores(runs)["a"].isna().all()


def config(finetune, **analysis):
    return {
        "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
        "conditions": [{"nproc": 2}],
        "finetune": finetune,
        "analysis": {"reference": "sync", **analysis},
    }


def test_the_endpoint_of_a_study_is_the_first_score_of_its_task():
    number = {"data": "sts", "labels": "number", "text_pair_column": "sentence2"}
    for finetune, endpoint in (
        (number, "pearson"),
        ({**number, "score": "mse"}, "mse"),
        ({"data": "cola", "score": "matthews"}, "matthews"),
        ({"data": "x", "labels": "multi"}, "micro_f1"),
        ({"task": "question_answering", "data": "squad"}, "exact_match"),
    ):
        plan = make_plan(config(finetune, primary={"endpoint": endpoint}, margins={endpoint: 0.01}))
        assert plan.finetune.score == endpoint
        assert plan.analysis.primary.endpoint == endpoint
    with pytest.raises(UsageError, match="endpoint is macro_f1, and finetune is scored by pearson"):
        make_plan(config(number, primary={"endpoint": "macro_f1"}))
    with pytest.raises(UsageError, match="margin of macro_f1, and finetune is scored by pearson"):
        make_plan(config(number, primary={"endpoint": "pearson"}, margins={"macro_f1": 0.01}))


SYNC, ASYNC = SyntheticArm("sync"), SyntheticArm("async")
RATES = {"sync": 0.003, "async": 0.002}
"""Algorithm -> the learning rate of its fine-tunings."""


def tuned_study(folder, arms, rates=RATES, repetition=0):
    """Write six pretrainings of each arm and a fine-tuning of each, whose scores rise from arm to arm.

    Args:
        arms: name -> arm; None is the base model.
        repetition: the number of the fine-tuning.

    Returns:
        The planned runs, and folder -> the planned settings of each fine-tuning.
    """
    runs = []
    settings = {}
    for number, (name, arm) in enumerate(arms.items()):
        for seed in range(6):
            pretraining = None
            own_settings = {}
            if arm is not None:
                pretraining = f"test/{name}/s{seed}"
                runs.append(planned(pretraining, "test", name, seed))
                write_run(folder / pretraining, arm, straight(6.0, 5.0 + 0.01 * seed, seconds=10.0), seed=seed)
                own_settings = {"learning_rate": rates[arm.algorithm]}
            tuned_in = f"finetune/{name}/s{seed}-f{repetition}"
            runs.append(planned(tuned_in, "finetune", name, seed, parent=pretraining, finetune_seed=seed))
            parent = None if pretraining is None else {"run": pretraining}
            score = 0.5 + 0.01 * seed + (0.05 + 0.001 * seed) * number
            write_finetuning(folder / tuned_in, seed=seed, macro_f1=score, parent=parent)
            written = {"settings_format": 2, **own_settings}
            (folder / tuned_in / "settings.yaml").write_text(yaml.safe_dump(written))
            settings[tuned_in] = own_settings | {"seed": seed}
    return runs, settings


def scores_of(study):
    tests = study.tests[study.tests["endpoint"] == "macro_f1"]
    return {(row.treatment, row.reference): row for row in tests.itertuples()}


PRIMARY = {"primary": {"endpoint": "macro_f1", "num_workers": 4, "clock": "virtual"}, "num_seeds": 6, "targets": {}}


def test_arms_are_compared_whose_last_stage_was_tuned_for_each(tmp_path):
    arms = {SYNC.name: SYNC, ASYNC.name: ASYNC}
    runs, settings = tuned_study(tmp_path, arms)
    write_registration(tmp_path, **PRIMARY)
    write_plan(tmp_path, arms.values(), runs, settings=settings)
    (row,) = scores_of(asyncsgd.load(tmp_path)).values()
    assert (row.family, row.word) == ("primary", "better")
    assert "the arms also differ in learning_rate of the fine-tuning (0.002, 0.003)" in row.notes
    for folder in settings:
        settings[folder] = {"seed": settings[folder]["seed"], "learning_rate": 0.003}
    write_plan(tmp_path, arms.values(), runs, settings=settings)  # the runs of async are not what it says
    (row,) = scores_of(asyncsgd.load(tmp_path)).values()
    assert row.n == 0


def test_loose_fine_tunings_may_differ_in_what_the_reader_names(tmp_path):
    tuned_study(tmp_path, {SYNC.name: SYNC, ASYNC.name: ASYNC})
    (row,) = scores_of(asyncsgd.load(tmp_path)).values()
    assert row.word == "not comparable"
    assert row.reason.endswith("(if the arms are meant to differ in it: --arms learning_rate)")
    (row,) = scores_of(asyncsgd.load(tmp_path, arms=["learning_rate"])).values()
    assert (row.n, row.word) == (6, "better")


def test_a_score_is_compared_with_that_of_the_reference_of_its_own_variant(tmp_path):
    arms = {"baseline": None}
    entries = []
    for decay in (0.0, 0.1):
        for algorithm in ("sync", "async"):
            arm = SyntheticArm(algorithm, settings={"weight_decay": decay})
            arms[f"{algorithm}-{decay}"] = arm
            entries.append(arm.as_json() | {"name": f"{algorithm}-{decay}"})
    runs, settings = tuned_study(tmp_path, arms, rates={"sync": 0.003, "async": 0.003})
    write_registration(tmp_path, **PRIMARY, family=["async-0.0", "async-0.1"])
    write_plan(tmp_path, entries, runs, settings=settings)
    rows = scores_of(asyncsgd.load(tmp_path))
    families = {pair: (row.family, row.family_size, row.word) for pair, row in rows.items()}
    assert families == {
        ("async-0.0", "sync-0.0"): ("primary", 2, "undecided"),
        ("async-0.1", "sync-0.1"): ("primary", 2, "undecided"),
        ("sync-0.0", "baseline"): ("secondary", 2, "undecided"),
        ("sync-0.1", "baseline"): ("secondary", 2, "undecided"),
    }


def test_fine_tunings_on_two_data_are_one_score_nowhere(tmp_path):
    arms = {SYNC.name: SYNC, ASYNC.name: ASYNC}
    for repetition in (0, 1):
        tuned_study(tmp_path, arms, rates={"sync": 0.003, "async": 0.003}, repetition=repetition)
    assert list(asyncsgd.load(tmp_path).table("downstream")["arm"]) == [ASYNC.name, SYNC.name]
    for file in tmp_path.glob("finetune/*/*-f1/summary.json"):
        edit_json(file, data_fingerprint="beef")
    study = asyncsgd.load(tmp_path)
    (row,) = scores_of(study).values()
    assert row.word == "not comparable"
    assert row.reason.startswith("the fine-tunings are scored by macro_f1 on data beef and macro_f1 on data feed;")
    table = study.table("downstream")
    assert list(table["scored_by"]) == ["macro_f1 on data feed", "macro_f1 on data beef"] * 2
