"""The score after fine-tuning: which one, which way is better, and what a model without a score counts as."""

import math

import pandas as pd
import pytest

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
