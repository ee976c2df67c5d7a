"""Scores of a task's own code: what is a number is written as one, and code that fails costs the score, not the run."""

import contextlib
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from doors import SGD, AllReduce, Finished, InProcess, Processes, UsageError, Virtual, cli, load_run, train
from marks import slow
from tasks import Plane

GIVEN = {"learning_rate": 0.05, "evaluations": 4, "quiet": True}


@dataclasses.dataclass(frozen=True)
class Scored(Plane):
    """Its loss falls, so what is below a loss fails later than the first evaluation."""

    name = "scored"
    better = {"error": "lower", "share": "higher"}  # noqa: RUF012
    value: Any = 1.0
    fails: str = ""
    below: float = 8.0

    def check(self, name, sums):
        if self.fails == name and (sums is None or sums["loss"] / sums["weight"] < self.below):
            raise LookupError("the scorer was not found")

    def metrics(self, sums):
        self.check("metrics", sums)
        return {"error": sums["loss"] / sums["weight"], "share": np.float32(0.5)}

    def details(self, sums):
        self.check("details", sums)
        return {"x": self.value, "count": np.int64(3)}

    def final(self, model):
        self.check("final", None)
        return {"y": self.value}


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (torch.tensor(0.25), 0.25),
        (torch.tensor([1, 2]), [1, 2]),
        (np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
        (float("nan"), None),
        (np.float64("inf"), None),
        ({"a": (np.float32(0.5), {"b": torch.tensor(2.0)}), 3: None}, {"a": [0.5, {"b": 2.0}], "3": None}),
        ("text", "text"),
    ],
    ids=repr,
)
def test_numbers_of_numpy_and_torch_are_numbers_and_nan_is_null(value, written, tmp_path):
    run = train(Scored(value=value), samples=16, folder=tmp_path / "run", **GIVEN)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["details"] == {"x": written, "count": 3}
    assert summary["y"] == written
    assert summary["metrics"]["share"] == 0.5
    assert summary["score_error"] is None
    assert load_run(tmp_path / "run", Scored).evaluations == run.evaluations


@pytest.mark.processes
@pytest.mark.parametrize(
    "runtime", [InProcess(), Virtual(2), *slow(Processes(2), AllReduce(2))], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("task", [Scored(fails="metrics", below=9e9), Scored(value={1})], ids=["raises", "a set"])
def test_a_scorer_that_fails_at_the_first_evaluation_is_told_before_anything_is_trained(task, runtime, tmp_path):
    arrived = []
    words = "metrics.*LookupError: the scorer was not found" if task.fails else r"details.*\{1\} is no number"
    with pytest.raises(UsageError, match=words):
        train(task, runtime=runtime, samples=80, folder=tmp_path / "run", report=arrived.append, **GIVEN)
    assert not any(record.kind == "arrival" for record in arrived)


class Misspelled(Scored):
    better = {"eror": "lower", "share": "higher"}  # noqa: RUF012


def test_a_score_that_no_metric_has_the_name_of_is_told_before_anything_is_trained(tmp_path):
    with pytest.raises(UsageError, match=r"it gives error, share and not eror, which `better` names"):
        train(Misspelled(), samples=64, folder=tmp_path / "run", **GIVEN)


@pytest.mark.parametrize("fails", ["metrics", "details", "final"])
def test_a_scorer_that_fails_later_costs_the_score_alone(fails, tmp_path):
    given = GIVEN | {"samples": 400, "runtime": Virtual(1)}
    whole = train(Scored(), **given)
    with pytest.warns(UserWarning, match=rf"without score: the task's {fails}\(\).*not found"):
        run = train(Scored(fails=fails), folder=tmp_path / "run", **given)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "DONE"
    assert run.status == "DONE"
    assert f"{fails}() gave no score (LookupError" in summary["score_error"]
    loaded = load_run(tmp_path / "run", Scored)
    assert summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    torch.testing.assert_close(loaded.model().state_dict(), whole.model().state_dict(), rtol=0, atol=0)
    assert [one.loss for one in run.evaluations] == [one.loss for one in whole.evaluations]
    first, *_, last = run.evaluations
    assert first.metrics["error"] == first.loss
    assert first.loss >= 8 > last.loss
    if fails == "metrics":
        assert summary["metrics"] == {"error": None, "share": None}
        for score in loaded.evaluations[-1].metrics.values():
            assert math.isnan(score)
    if fails == "details":
        assert summary["details"] == {}
    assert ("y" in summary) == (fails != "final")


def test_a_run_goes_on_behind_scores_that_could_not_be_computed(tmp_path):
    given = GIVEN | {"folder": tmp_path / "run", "runtime": Virtual(1), "checkpoint_every": 80}
    with pytest.warns(UserWarning, match="without score"):
        train(Scored(fails="metrics"), samples=400, **given)
    with pytest.warns(UserWarning, match="without score"):
        resumed = train(Scored(fails="metrics"), samples=480, resume=True, **given)
    assert resumed.summary["num_samples"] == 480


@dataclasses.dataclass(frozen=True)
class Unsaved(Plane):
    name = "unsaved"

    def save(self, model, folder):
        raise LookupError("no writer")


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({}, "FAILED", r"the model .*; mend that and run again"),
        ({"checkpoint_every": 8}, "FAILED", r"the model .*; mend that and type --resume .*/run"),
        ({"optimizer": SGD(), "learning_rate": 1e30}, "DIVERGED", r"the loss of .*; the model .*no writer\)"),
    ],
)
def test_a_model_that_cannot_be_saved_leaves_a_summary_of_how_the_run_ended(given, status, said, tmp_path):
    with contextlib.suppress(RuntimeError):
        train(Unsaved(), samples=400, folder=tmp_path / "run", **GIVEN | given)
    summary = Finished(tmp_path / "run").summary
    assert summary["status"] == status
    assert re.fullmatch(said, summary["message"])


@dataclasses.dataclass(frozen=True)
class Late(Plane):
    name = "late"

    def final(self, model):
        raise LookupError("no scorer")


def test_a_script_ends_with_1_and_says_why(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    ended = cli(f"train.py test_scorers:Late --mode single --samples 16 --run-dir {tmp_path / 'run'}")
    assert ended.code == 1
    assert "without score: the task's final() gave no score (LookupError: no scorer)" in ended.err
    assert Finished(tmp_path / "run").summary["status"] == "DONE"
