"""Runs that are shown in trackers: what a tracker is told, and that none of them can harm a run.

The tests of one tracker's package skip where it is not installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import socket
import struct
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from gallery import sentences
from torch import nn

import asyncsgd
from asyncsgd import TensorData, seeded
from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, Evaluation, Event, MemoryUsed
from asyncsgd.records.trackers import ALL, names_in
from asyncsgd.records.trackers.base import Point
from asyncsgd.records.trackers.points import Points
from asyncsgd.runtime.processes import fork_server
from asyncsgd.settings.training import FLAGS, make_settings
from asyncsgd.study.plan import make_plan
from asyncsgd.study.runner import Runner
from asyncsgd.study.sweep import Sweep

TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclasses.dataclass(frozen=True)
class Line(asyncsgd.Task):
    name = "line"
    batch_size: int = 10

    def model(self, seed):
        with seeded(seed):
            return nn.Linear(1, 1)

    def data(self, seed):
        x = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)
        return TensorData((x, 3 * x), (x, 3 * x), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


def run(folder, track, **more):
    """A run of 3 virtual workers, and the points that its records make."""
    points, made = Points(), []
    report = more.pop("report", lambda record: None)

    def note(record):
        made.extend(points(record))
        report(record)

    arguments = {"samples": 1000, "runtime": asyncsgd.Virtual(3), "quiet": True} | more
    done = asyncsgd.train(Line(), folder=folder, track=track, report=note, **arguments)
    return done, made + points.rest()


def arrival(number, **more):
    """The `number`-th, counted from 0, with a loss of that number."""
    facts = {
        **{"dispatch": number, "worker": 0, "batches": (), "read_version": number, "version": number + 1},
        **{"arrival_delay": 0, "outcome": "applied", "uses": ((number, number % 10),), "drops": (), "abandoned": ()},
        **{"started": (), "loss": float(number), "weight": 1.0, "num_samples": 4, "learning_rate": 0.5},
        **{"train_seconds": 0.5 * (number + 1), "total_samples": 4 * (number + 1)},
    }
    return Event(**facts | more)


def evaluation(loss, number=0):
    return Evaluation(number, 4 * number, 0.5 * number, loss, 7.0, {"accuracy": 0.25}, 0.1)


class Kept:
    """A tracker that keeps what it is told; some raise or hang."""

    made: ClassVar[list[Kept]] = []

    def __init__(self, identity):
        self.identity, self.points, self.status = identity, list[Point](), ""
        Kept.made.append(self)

    def send(self, points):
        self.points += points

    def close(self, status):
        self.status = status


@pytest.fixture
def kept(monkeypatch):
    """Makes a class a tracker that is called ``kept``."""
    Kept.made.clear()

    def register(kind):
        monkeypatch.setitem(ALL, "kept", kind)  # type: ignore[arg-type]
        return "kept"

    return register


# What a user may type


def test_a_name_that_is_no_tracker_is_refused_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"--track .*'tensorboard'"):
        make_settings({"track": "tensorbord"})
    with pytest.raises(UsageError, match="names wandb twice"):
        make_settings({"track": "wandb,wandb"})
    assert names_in("wandb, mlflow") == ("wandb", "mlflow")


def test_where_a_run_is_shown_is_no_part_of_what_it_is():
    plain, shown = make_settings({}), make_settings({"track": "wandb"})
    assert FLAGS.settings_hash(plain) == FLAGS.settings_hash(shown)
    assert FLAGS.differing_keys(FLAGS.flatten(plain), FLAGS.flatten(shown)) == []
    assert "wandb" not in FLAGS.to_yaml(shown, places=False)


@pytest.mark.parametrize("part", ["base", "base_model", "finetune"])
def test_a_sweep_takes_trackers_from_its_command_line_and_not_from_its_config(part):
    with pytest.raises(UsageError, match="track is decided by the sweep"):
        make_plan({"algorithms": {"single": {"mode": "single"}}, part: {"track": "wandb"}})


def test_a_run_that_writes_nothing_cannot_be_tracked():
    with pytest.raises(UsageError, match="track='wandb' needs a folder"):
        asyncsgd.train(Line(), samples=10, track="wandb")


# What a tracker is told


def test_ten_arrivals_make_a_point():
    points = Points()
    assert [points(arrival(number)) for number in range(9)] == [[]] * 9
    (point,) = points(arrival(9))
    assert (point.num_samples, point.train_seconds) == (40, 5.0)
    assert point.values == {
        **{"train/loss": 4.5, "train/learning_rate": 0.5, "train/samples_per_second": 8.0},
        **{"delay/p50": 4, "delay/p95": 9, "delay/max": 9, "train_seconds": 5.0},
    }


def test_the_loss_of_a_point_is_weighted_by_loss_terms():
    points = Points()
    points(arrival(0, loss=1.0, weight=3.0))
    points(arrival(1, loss=5.0, weight=1.0))
    (point,) = points.rest()
    assert point.values["train/loss"] == 2.0


def test_an_evaluation_is_a_point_and_ends_the_one_before_it():
    points = Points()
    points(arrival(0))
    before, point = points(evaluation(1.5, number=1))
    assert before.values["train/loss"] == 0.0
    assert point.num_samples == 4
    assert point.values == {"eval/loss": 1.5, "eval/accuracy": 0.25, "train_seconds": 0.5}
    assert points.rest() == []


def test_the_memory_of_the_workers_is_a_point_in_gib():
    (point,) = Points()(MemoryUsed(((0, 2**30, 0), (1, 2**31, 2**29)), 3, 12, 1.5))
    expected = {"memory/worker0_gib": 1.0, "memory/worker1_gib": 2.0, "memory/worker1_gpu_gib": 0.5}
    assert (point.num_samples, point.values) == (12, expected | {"train_seconds": 1.5})


def test_a_long_run_has_few_points():
    points = Points()
    number = sum(len(points(arrival(number))) for number in range(50_000))
    assert 200 < number < 200 * (1 + math.log(50_000 / 2000)) + 10


def test_a_tracker_receives_every_point_in_order_and_how_the_run_ended(tmp_path, kept):
    done, points = run(tmp_path / "a", kept(Kept), learning_rate=0.25)
    (tracker,) = Kept.made
    assert tracker.points == points
    assert len(points) > 15
    assert tracker.status == done.status == DONE
    assert done.summary["tracking"] == {"kept": {"points": len(points), "dropped": 0, "failure": None}}
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["tracking"] == done.summary["tracking"]
    assert tracker.identity.name == "a"
    assert tracker.identity.folder == tmp_path / "a"
    assert tracker.identity.settings["learning_rate"] == 0.25


def test_a_sweep_tells_trackers_the_study_the_stage_and_the_arm(tmp_path, kept):
    (tmp_path / "train.txt").write_text(sentences(200, seed=0))
    (tmp_path / "eval.txt").write_text(sentences(20, seed=1))
    text = {"data": str(tmp_path / "train.txt"), "eval_data": str(tmp_path / "eval.txt"), "vocab_size": 512}
    small = {"cache_dir": str(tmp_path / "cache"), "seq_len": 16, "batch_size": 2, "samples": 4, "evaluations": 1}
    plan = make_plan(
        {"name": "seen", "base": text | small | {"warmup": 0}, "algorithms": {"single": {"mode": "single"}}}
    )
    made = Sweep(plan, "", tmp_path / "out", kept(Kept))
    made.open()
    (job,) = made.to_do("test")
    Runner(made, fork_server("tiny"), 1).run([job])
    (tracker,) = Kept.made
    assert tracker.identity.name == "test/single-w1/s0"
    assert tracker.identity.group == "seen"
    assert tracker.identity.tags == {"stage": "test", "arm": "single-w1"}
    assert tracker.identity.shared == tmp_path / "out"
    assert tracker.points
    assert job.command[job.command.index("--track") + 1] == "kept"


# What a tracker cannot do


class Breaks(Kept):
    def send(self, points):
        raise ConnectionError("the server\nis gone")


def test_a_tracker_that_raises_costs_nothing_and_is_said_once(tmp_path, kept, capsys):
    done, points = run(tmp_path / "a", kept(Breaks), quiet=False)
    plain, _ = run(tmp_path / "plain", None)
    assert done.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    failure = "ConnectionError: the server is gone"
    assert done.summary["tracking"] == {"kept": {"points": len(points), "dropped": len(points), "failure": failure}}
    said = [line for line in capsys.readouterr().out.splitlines() if "kept" in line]
    assert said[0] == f"note   tracker kept: {failure}; the run goes on"
    assert len(said) == 2


def test_flags_and_extras_know_the_same_trackers():
    import configparser

    root = Path(__file__).resolve().parents[1]
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg")
    assert tuple(ALL) == TRACKERS
    for name in TRACKERS:
        assert setup["options.extras_require"][name].strip().startswith(f"{name}>=")


# The four packages


def needs(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def curves(points):
    """(samples, value) by the name of the value."""
    found = {}
    for point in points:
        for name, value in point.values.items():
            found.setdefault(name, []).append((point.num_samples, value))
    return found


def single(curve):
    """In single precision, which TensorBoard keeps."""
    return [(step, struct.unpack("f", struct.pack("f", value))[0]) for step, value in curve]


@needs("tensorboard")
def test_tensorboard_reads_every_point_and_the_settings_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    done, points = run(tmp_path / "a", "tensorboard", learning_rate=0.25)
    assert done.summary["tracking"]["tensorboard"]["failure"] is None
    (file,) = (tmp_path / "a" / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name
    read = EventAccumulator(str(file.parent))
    read.Reload()
    expected = curves(points)
    assert set(read.Tags()["scalars"]) == set(expected)
    for name, curve in expected.items():
        assert [(event.step, event.value) for event in read.Scalars(name)] == single(curve)
    times = [event.wall_time for event in read.Scalars("eval/loss")]
    assert times[-1] - times[0] == pytest.approx(done.summary["train_seconds"], abs=1e-3)
    (start,) = (
        plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
        for tag, content in read.PluginTagToContent("hparams").items()
        if tag.endswith("session_start_info")
    )
    assert start.hparams["learning_rate"].number_value == 0.25
    assert start.hparams["clock"].string_value == "virtual"


def wandb_records(path):
    """The records of a .wandb file: LevelDB's log format behind seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record as Written

    data, at, content = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        content += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Written.FromString(content)
            content = b""


@needs("wandb")
def test_wandb_keeps_every_point_offline_in_the_run_folder(tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.startswith("WANDB_"):
            monkeypatch.delenv(name)
    done, points = run(tmp_path / "a", "wandb", learning_rate=0.25)
    assert done.summary["tracking"]["wandb"] == {"points": len(points), "dropped": 0, "failure": None}
    (path,) = (tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(path))
    (begun,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in begun.config.update}
    assert (begun.project, begun.display_name, config["learning_rate"]) == ("asyncsgd", "a", 0.25)
    assert socket.gethostname().encode() not in path.read_bytes()
    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    assert rows == [{"num_samples": point.num_samples, **point.values} for point in points]
    (ended,) = (record.exit for record in records if record.WhichOneof("record_type") == "exit")
    assert ended.exit_code == 0


def mlflow_curves(uri, name):
    """A run and its curves, as MLflow's client reads them."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (experiment,) = client.search_experiments(filter_string="name = 'asyncsgd'")
    (found,) = client.search_runs([experiment.experiment_id], f"attributes.run_name = '{name}'")
    histories = {key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics}
    return found, {key: [(metric.step, metric.value) for metric in history] for key, history in histories.items()}


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_reads_every_point_and_the_settings_back_from_its_database(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done, points = run(tmp_path / "a", "mlflow", learning_rate=0.25)
    assert done.summary["tracking"]["mlflow"] == {"points": len(points), "dropped": 0, "failure": None}
    found, read = mlflow_curves(f"sqlite:///{tmp_path}/mlflow.db", "a")
    # Two points of one moment and one value are one for MLflow: the last arrival before an evaluation, and it.
    assert {key: set(curve) for key, curve in read.items()} == {
        key: set(curve) for key, curve in curves(points).items()
    }
    assert found.info.status == "FINISHED"
    assert found.data.params["learning_rate"] == "0.25"


@needs("trackio")
def test_trackio_keeps_every_point_in_its_database(tmp_path, monkeypatch):
    import sqlite3

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported, once
    assert "trackio" not in sys.modules
    done, points = run(tmp_path / "a", "trackio", learning_rate=0.25)
    assert done.summary["tracking"]["trackio"] == {"points": len(points), "dropped": 0, "failure": None}
    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "asyncsgd.db")) as database:
        rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'a' ORDER BY id").fetchall()
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    assert [(step, json.loads(values)) for step, values in rows] == [
        (point.num_samples, dict(point.values)) for point in points
    ]
    assert json.loads(config)["learning_rate"] == 0.25
