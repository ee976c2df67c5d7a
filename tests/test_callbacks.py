"""Callbacks look at a run at its evaluations: they add metrics, may end it, and change nothing else."""

import json
import math
import random

import numpy as np
import pytest
import torch
from doors import (
    AllReduce,
    Asynchronous,
    Exponential,
    Hogwild,
    InProcess,
    Processes,
    UsageError,
    Virtual,
    asyncsgd,
)
from marks import slow
from tasks import Classes, Plane, points

GIVEN = {"samples": 320, "learning_rate": 0.01, "quiet": True}


def own_loss(look):
    """The evaluation loss, computed from the model that is shown."""
    x, y = points(30, 2)
    with torch.no_grad():
        return {"own": (look.model(x) - y).square().mean()}


def meddle(look):
    """Draws from every generator, and spoils the model."""
    torch.rand(3)
    np.random.rand()  # noqa: NPY002 - as code of others does
    random.random()
    with torch.no_grad():
        look.model.weight.zero_()
    look.model.train()


class AfterSamples:
    """Ends a run at the first evaluation with so many samples."""

    def __init__(self, samples):
        self.samples = samples

    def __call__(self, look):
        assert not look.model.training
        if look.evaluation.total_samples >= self.samples:
            look.stop("enough")


@pytest.mark.processes
@pytest.mark.parametrize(
    "runtime",
    [InProcess(), Virtual(3, Exponential(1.0)), Processes(2), *slow(AllReduce(2), Hogwild(2))],
    ids=lambda one: type(one).__name__,
)
def test_the_model_is_that_of_the_evaluation_on_every_runtime(runtime):
    run = asyncsgd.train(Plane(), runtime=runtime, callbacks=[meddle, own_loss], **GIVEN)
    assert len(run.evaluations) == 9
    for evaluation in run.evaluations:
        assert evaluation.metrics["own"] == pytest.approx(evaluation.loss, rel=1e-5)
        assert set(evaluation.metrics) == {"error", "own"}


def test_a_model_that_a_callback_keeps_or_rebinds_stays_that_of_its_evaluation():
    kept = []

    def keep(look):
        kept.append(look)

    def rebind(look):
        look.model.double()

    run = asyncsgd.train(Plane(), runtime=InProcess(), callbacks=[rebind, keep, own_loss], **GIVEN)
    assert len(kept) == len(run.evaluations) == 9
    for look, evaluation in zip(kept, run.evaluations, strict=True):
        assert own_loss(look)["own"] == pytest.approx(evaluation.loss, rel=1e-5)
        assert evaluation.metrics["own"] == pytest.approx(evaluation.loss, rel=1e-5)


def test_a_run_that_is_looked_at_trains_as_one_that_is_not():
    bare = asyncsgd.train(Classes(), runtime=Virtual(2, Exponential(1.0)), **GIVEN)
    looked_at = asyncsgd.train(
        Classes(), runtime=Virtual(2, Exponential(1.0)), callbacks=[lambda look: random.seed(1)], **GIVEN
    )
    assert looked_at.summary["parameters_sha256"] == bare.summary["parameters_sha256"]
    assert [one.train_seconds for one in looked_at.evaluations] == [one.train_seconds for one in bare.evaluations]


def test_a_callback_ends_the_run_and_the_record_says_who(tmp_path):
    given = {"callbacks": [own_loss, AfterSamples(100)], "folder": tmp_path / "run", "checkpoint_every": 40}
    run = asyncsgd.train(Plane(), runtime=Virtual(2), rule=Asynchronous(), **GIVEN | given)
    assert run.status == "DONE"
    assert run.summary["num_samples"] == 120
    assert run.summary["stopped_early"] == {"by": "test_callbacks:AfterSamples", "reason": "enough"}
    assert run.summary["message"] == "stopped early at 120 samples by test_callbacks:AfterSamples: enough"
    assert asyncsgd.replay(tmp_path / "run", Plane()).identical
    records = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert [record["metrics"]["own"] for record in records if record["kind"] == "evaluate"] == [
        evaluation.metrics["own"] for evaluation in run.evaluations
    ]
    again = asyncsgd.train(
        Plane(), runtime=Virtual(2), rule=Asynchronous(), **GIVEN | given | {"samples": 640, "resume": True}
    )
    assert again.summary["parameters_sha256"] == run.summary["parameters_sha256"]


def test_at_the_end_of_the_budget_nothing_ends_early():
    run = asyncsgd.train(Plane(), callbacks=[AfterSamples(320)], **GIVEN)
    assert run.status == "DONE"
    assert run.summary["stopped_early"] is None


def is_wrong(look):
    return ["no", "mapping"]


def fails_later(look):
    if look.evaluation.total_samples > 100:
        raise ZeroDivisionError("no")
    return {"norm": math.inf}


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([is_wrong], r"callback test_callbacks:is_wrong: TypeError: it must return None or numbers by name"),
        ([lambda look: {"own": "text"}], "its 'own' is 'text', which is no number"),
        ([lambda look: {"error": 1.0}], "there is a metric 'error' already"),
        ([own_loss, own_loss], "there is a metric 'own' already"),
        (own_loss, r"give callbacks=\[look\]"),
        ([3], "a callback must be a function of what it is to look at, got 3"),
    ],
    ids=range(6),
)
def test_a_mistake_that_shows_at_the_first_evaluation_is_told_before_training(callbacks, said):
    with pytest.raises(UsageError, match=said):
        asyncsgd.train(Plane(), callbacks=callbacks, **GIVEN)


def test_a_later_mistake_costs_the_score_alone():
    with pytest.warns(UserWarning, match="without score: callback test_callbacks:fails_later: ZeroDivisionError: no"):
        run = asyncsgd.train(Plane(), callbacks=[fails_later, own_loss], **GIVEN)
    assert run.status == "DONE"
    assert run.evaluations[0].metrics["norm"] is None
    assert "norm" not in run.evaluations[-1].metrics
    assert run.evaluations[-1].metrics["own"] == pytest.approx(run.evaluations[-1].loss, rel=1e-5)
    assert run.summary["parameters_sha256"] == asyncsgd.train(Plane(), **GIVEN).summary["parameters_sha256"]
