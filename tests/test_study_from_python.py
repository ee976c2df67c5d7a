"""`asyncsgd.study`: the plan, the runs, the registration and the verdict are those of a study by command."""

import dataclasses
import importlib
import io
import json
import math
import os
import signal
import sys
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pandas
import pytest
import torch
import yaml
from doors import (
    SGD,
    AllReduce,
    Asynchronous,
    Defaults,
    InProcess,
    Processes,
    Ringmaster,
    Slow,
    Synchronous,
    Task,
    TensorData,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
    make_plan,
    seeded,
)
from marks import slow
from tasks import Plane
from torch import nn

STOP = {}
"""What of a task stops the study, and at which call of it."""


def reached(what):
    """Press Ctrl-C at the call that `STOP` names."""
    if what in STOP:
        STOP[what] -= 1
        if STOP[what] == 0:
            os.kill(os.getpid(), signal.SIGINT)


@dataclasses.dataclass(frozen=True)
class Line(Task):
    """A slope, from noisy points."""

    name: ClassVar[str] = "line"
    batch_size: int = 4
    noise: float = 0.1
    layers: tuple[int, ...] = ()

    def model(self, seed):
        reached("model")
        with seeded(seed):
            return nn.Linear(1, 1)

    def data(self, seed):
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(40, 1, generator=draw)
        y = 2 * x + self.noise * torch.randn(40, 1, generator=draw)
        return TensorData((x, y), (x, y), self.batch_size, seed)

    def outputs(self, model, batch):
        if model.training:
            reached("gradient")
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


@dataclasses.dataclass(frozen=True)
class Warmed(Line):
    """Its rate rises over a share of the samples, unless somebody says otherwise."""

    defaults = Defaults(warmup=0.1)


ARMS = {"sync": Synchronous(), "async": Asynchronous()}
FOUR = Virtual(4, speeds=Slow(worker=0, factor=3.0, seconds=1.0))
RATES = [0.001, 0.1]
ASKED = {
    "runtime": FOUR,
    "samples": 96,
    "evaluations": 4,
    "base": {"optimizer": SGD()},
    "tune": {"learning_rate": RATES},
    "pilots": [3, 4],
}
CONFIG = """
name: line
task: test_study_from_python:Line
base: {noise: 0.2, samples: 96, evaluations: 4, optimizer: sgd, momentum: 0.0}
algorithms:
  sync:  {mode: async, nproc: 4, clock: virtual, speeds: "slow:worker=0,factor=3.0,seconds=1.0", rule: synchronous}
  async: {mode: async, nproc: 4, clock: virtual, speeds: "slow:worker=0,factor=3.0,seconds=1.0", rule: asynchronous}
seeds: [0, 1]
tuning: {grid: {learning_rate: [0.001, 0.1]}, seeds: [2]}
pilots: [3, 4]
analysis: {reference: sync, primary: {endpoint: time_to_target}}
"""


def study(folder, **changes):
    return asyncsgd.study(Line(noise=0.2), ARMS, range(2), folder=folder, **{**ASKED, **changes})


def hashes(folder):
    """The parameters that every run of the study came to."""
    plan = make_plan(yaml.safe_load((folder / "config.yaml").read_text()))
    summaries = {}
    for run in plan.runs:
        summaries[run.folder] = json.loads((folder / run.folder / "summary.json").read_text())
    assert {one["status"] for one in summaries.values()} == {"DONE"}
    return {folder: one["parameters_sha256"] for folder, one in summaries.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, result) of a study that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("study") / "whole"
    return folder, study(folder)


def test_the_plan_is_that_of_the_config_that_a_person_would_write(whole):
    folder, _ = whole
    planned = make_plan(yaml.safe_load((folder / "config.yaml").read_text()))
    by_hand = make_plan(yaml.safe_load(CONFIG))
    for field in dataclasses.fields(planned):
        assert getattr(planned, field.name) == getattr(by_hand, field.name), field.name


def test_a_study_by_command_goes_on_in_the_folder_and_says_the_same(whole, tmp_path):
    folder, result = whole
    before = hashes(folder)
    (tmp_path / "study.yaml").write_text(CONFIG)
    ended = cli(["sweep.py", tmp_path / "study.yaml", "--out", folder])
    assert ended.code == 0, ended
    assert "10 of 10 runs" in ended.out, ended
    assert hashes(folder) == before
    assert cli(["analysis.report", folder, "--format", "sentence"]).out == f"{result.verdict}\n"
    by_command = pandas.read_csv(io.StringIO(cli(["analysis.report", folder, "--format", "csv"]).out))
    from_python = pandas.read_csv(io.StringIO(result.table("tests").to_csv(index=False)))
    pandas.testing.assert_frame_equal(by_command, from_python)
    assert len(from_python)
    page = result.report()
    assert page == folder / "report.html"
    assert page.stat().st_size > 10_000


def test_the_question_is_registered_before_the_test_runs_and_the_target_is_that_of_the_pilots(whole):
    folder, _ = whole
    registered = yaml.safe_load((folder / "analysis.yaml").read_text())
    curves = []
    seconds = []
    for seed in (3, 4):
        run = asyncsgd.load_run(folder / f"pilot/sync-w4-virtual/s{seed}")
        curves.append([one.loss for one in run.evaluations])
        seconds.append(run.summary["train_seconds"])
    first = sum(curve[0] for curve in curves) / 2
    best = sum(min(curve) for curve in curves) / 2
    assert registered["targets"]["sync-w4-virtual"] == pytest.approx(first - 0.95 * (first - best), abs=1e-6)
    assert registered["budget_seconds"] == {"sync-w4-virtual": sum(seconds) / 2}
    assert registered["reference"] == "sync"
    assert registered["seeds"] == [0, 1]
    assert registered["primary"] == {"num_workers": 4, "clock": "virtual", "endpoint": "time_to_target"}
    written = (folder / "analysis.yaml").stat().st_mtime_ns
    for path in folder.glob("test/*/*/summary.json"):
        assert written < path.stat().st_mtime_ns


def test_an_arm_takes_the_learning_rate_that_ends_at_the_lowest_loss(whole):
    folder, _ = whole
    for name, rule in ARMS.items():
        losses = []
        for rate in RATES:
            run = asyncsgd.train(
                Line(noise=0.2),
                rule=rule,
                runtime=FOUR,
                optimizer=SGD(),
                samples=96,
                evaluations=4,
                learning_rate=rate,
                seed=2,
                quiet=True,
            )
            losses.append(run.evaluations[-1].loss)
        best = RATES[losses.index(min(losses))]
        assert math.isfinite(min(losses))
        for seed in (0, 1):
            settings = yaml.safe_load((folder / f"test/{name}-w4-virtual/s{seed}/settings.yaml").read_text())
            assert settings["learning_rate"] == best


@pytest.mark.parametrize(("what", "call"), [("gradient", 30), ("model", 5), *slow(("gradient", 200))])
def test_a_study_that_was_stopped_and_goes_on_ends_at_the_same_parameters(whole, tmp_path, what, call):
    folder, result = whole
    STOP[what] = call
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path / "cut")
    assert STOP.pop(what) <= 0
    assert len(list((tmp_path / "cut").rglob("summary.json"))) < 10
    with pytest.raises(UsageError, match="give resume=True"):
        study(tmp_path / "cut")
    again = study(tmp_path / "cut", resume=True)
    assert hashes(tmp_path / "cut") == hashes(folder)
    assert again.verdict == result.verdict


def test_seeds_that_nobody_names_lie_behind_those_of_the_test_and_the_first_arm_is_the_reference(tmp_path):
    tune = {"layers": [(2,), (3, 4)], "learning_rate": np.array([0.1])}
    base = {"optimizer": None, "cache": tmp_path / "cache"}
    study(tmp_path / "study", tune=tune, pilots=None, samples=16, evaluations=1, base=base)
    config = yaml.safe_load((tmp_path / "study" / "config.yaml").read_text())
    assert config["seeds"] == [0, 1]
    assert config["tuning"]["seeds"] == [2]
    assert config["pilots"] == [3, 4, 5]
    assert config["analysis"]["reference"] == "sync"
    study(tmp_path / "beside", pilots=[2, 3], samples=16, evaluations=1)
    config = yaml.safe_load((tmp_path / "beside" / "config.yaml").read_text())
    assert (config["tuning"]["seeds"], config["pilots"]) == ([4], [2, 3])


def test_no_command_believes_that_it_has_the_class_of_a_notebook(tmp_path):
    (tmp_path / "study.yaml").write_text(CONFIG.replace("test_study_from_python:Line", "__main__:Line"))
    ended = cli(["sweep.py", tmp_path / "study.yaml", "--out", tmp_path / "study"])
    assert ended.code == 2
    assert "go on where it was begun, with asyncsgd.study(..., resume=True)" in ended.err


def test_the_name_is_the_function_also_where_its_modules_are_imported():
    for module in ("asyncsgd.studies", "asyncsgd.studies.from_python"):
        importlib.import_module(module)
        assert asyncsgd.study.__module__ == "asyncsgd.studies.from_python"


@dataclasses.dataclass(frozen=True)
class Twice(Asynchronous):
    """A rule that is none of the library's."""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tune": {"learning_rat": [1.0, 2.0]}}, "unknown key 'learning_rat'; did you mean 'learning_rate'"),
        ({"tune": {"learning_rate": 0.1}}, "tune: learning_rate needs a list of values to try, e.g. [1e-3, 1e-2]"),
        ({"tune": {"samples": [8, 16]}}, "samples is not tuned"),
        ({"tune": None, "tuning_seeds": [7]}, "tuning_seeds does nothing where nothing is tuned; give tune="),
        ({"arms": {"sync": Synchronous()}}, 'two arms or more, and arms names sync; write arms={"sync"'),
        ({"arms": {"sync": Synchronous(), "a b": Asynchronous()}}, "'a b' is no name of a folder; write letters"),
        ({"arms": {"sync": Synchronous(), "async": "asynchronous"}}, "arms: async must be a rule or a dict of arg"),
        ({"arms": {"sync": Synchronous(), "own": Twice()}}, "arms: own: Twice is a rule of your own"),
        ({"arms": {"one": {"runtime": InProcess()}, "two": ARMS["async"]}}, "compared with one: give all arms as many"),
        ({"tune": ["learning_rate"]}, "tune must be lists of values by name"),
        ({"tuning_seeds": []}, "tuning_seeds names none; name one or more, e.g. range(8)"),
        ({"seeds": []}, "seeds names none; name one or more, e.g. range(8)"),
        ({"seeds": [0.5, 1.5]}, "seeds must be whole numbers, e.g. range(8), got [0.5, 1.5]"),
        ({"question": {"primary": "time_to_target"}}, "question.primary: expected keys with values, got a text"),
        ({"seeds": [1, 2, 1]}, "seeds has 1 more than once; name each seed once, e.g. range(8)"),
        ({"pilots": [1]}, "must name each seed once, they share [1]"),
        ({"samples": None}, "a run needs an end; give samples=10_000 or seconds=60"),
        ({"base": {"optimizer": torch.optim.NAdam}}, "give asyncsgd.SGD(0.9) or asyncsgd.AdamW()"),
        ({"base": {"schedule": math.sin}}, "base: schedule must be a number or text"),
        ({"base": {"quiet": True}}, "base: quiet is for a single run of asyncsgd.train; take it out"),
        ({"base": {"seed": 3}}, "base: seed is an argument of the study"),
        ({"question": "time_to_targe"}, "the other endpoints are loss_at_equal_samples, loss_at_equal_seconds"),
        ({"question": {"refrence": "sync"}}, "`refrence`"),
        ({"jobs": 0}, "jobs must be a whole number from 1 on, got 0"),
        ({"runtime": AllReduce(2)}, "AllReduce is synchronous by definition"),
        ({"runtime": "virtual"}, "runtime must be an object such as asyncsgd.Processes(4), got 'virtual'"),
        ({"task": Warmed()}, "warmup: in samples and not as a share of them"),
        ({"task": Line}, "task must be an object such as MyTask()"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_type_before_anything_is_written(tmp_path, changes, words):
    asked = {"task": Line(), "arms": ARMS, "seeds": range(2), "folder": tmp_path / "study", **ASKED, **changes}
    with pytest.raises(UsageError) as error:
        asyncsgd.study(**asked)
    assert words in str(error.value)
    assert not (tmp_path / "study").exists()


def test_a_class_within_a_function_is_refused_since_no_config_finds_it(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Inner(Line):
        pass

    with pytest.raises(UsageError, match=r"lies within a function or a class.* move it to the top of the file"):
        asyncsgd.study(Inner(), ARMS, range(2), folder=tmp_path / "study", **ASKED)


def test_a_folder_with_another_study_or_other_things_is_refused_by_what_is_other(whole, tmp_path):
    folder, _ = whole
    with pytest.raises(UsageError, match=r"holds this study already; give resume=True to go on"):
        study(folder)
    with pytest.raises(UsageError, match=r"holds a study with other base, pilots, see .*config.yaml"):
        study(folder, pilots=[5], samples=8, resume=True)
    (tmp_path / "mine" / "letters").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds other things"):
        study(tmp_path / "mine", resume=True)


NOTEBOOK = (
    Path(__file__).read_text().partition("ARMS = ")[0]
    + """
from doors import *
arms = {"sync": Synchronous(), "async": Asynchronous()}
asked = {"samples": 32, "evaluations": 2, "question": "loss_at_equal_samples"}
for changes in ({"runtime": Processes(2)}, {"runtime": Virtual(2), "jobs": 2}):
    try:
        asyncsgd.study(Line(), arms, range(2), folder="refused", **asked, **changes)
    except UsageError as error:
        print(error)
done = asyncsgd.study(Line(), arms, range(2), folder="done", runtime=Virtual(2), **asked)
print(len(done.runs))
"""
)


def test_a_class_of_a_notebook_is_studied_in_this_process_and_in_no_other_one(tmp_path, monkeypatch, capsys):
    """As a notebook's, the code is in no file."""
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    monkeypatch.chdir(tmp_path)
    exec(NOTEBOOK, vars(notebook))
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("Line is not defined in a file that worker processes can import; put it into one")
    assert second.startswith("jobs=2 makes runs in other processes, which cannot import Line from a script")
    assert last == "4"
    assert not (tmp_path / "refused").exists()
    assert yaml.safe_load((tmp_path / "done" / "config.yaml").read_text())["task"] == "__main__:Line"


@pytest.mark.slow
def test_runs_side_by_side_end_at_the_same_parameters(tmp_path):
    asked = {**ASKED, "base": {"optimizer": SGD(), "batch_size": 4}}
    for jobs in (1, 2):
        asyncsgd.study(Plane(), ARMS, range(2), folder=tmp_path / str(jobs), jobs=jobs, **asked)
    assert hashes(tmp_path / "1") == hashes(tmp_path / "2")


@pytest.mark.slow
@pytest.mark.processes
def test_arms_may_differ_in_more_than_the_rule(tmp_path):
    arms = {"sync": {"runtime": AllReduce(2)}, "ringmaster": {"runtime": Processes(2), "rule": Ringmaster(2)}}
    result = asyncsgd.study(
        Plane(),
        arms,
        range(2),
        folder=tmp_path / "study",
        samples=64,
        evaluations=2,
        base={"learning_rate": 0.01},
        question={"primary": {"endpoint": "loss_at_equal_samples"}, "margins": {"loss": 0.1}},
    )
    assert set(result.runs["status"]) == {"DONE"}
    assert set(result.runs["arm"]) == {"sync-w2", "ringmaster-w2"}
    registered = yaml.safe_load((tmp_path / "study" / "analysis.yaml").read_text())
    assert registered["margins"] == {"loss": 0.1}
    assert registered["targets"] == {}
