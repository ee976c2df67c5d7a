"""Runs that are shown in trackers: what a tracker is told, and that none of them can harm a run.

The tests of one tracker's package skip where it is not installed."""

import importlib.util
import json
import math
import os
import re
import signal
import socket
import sqlite3
import struct
import time

import pytest
from doors import TRACKERS, UsageError, Virtual, asyncsgd, cli
from tasks import Classes, Plane


class Kept(list):
    """A tracker that keeps what it is told: points, and the status at the end."""

    def open(self, identity):
        self.identity = identity
        return self.append, self.append


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of 3 virtual workers with 105 arrivals, and the points that its tracker was to be told."""

    def made(track, opened=None, task=Plane(), **more):  # noqa: B008 - frozen
        monkeypatch.setitem(TRACKERS, "kept", opened)
        records = []
        arguments = {"samples": 8 * 105, "evaluations": 1, "runtime": Virtual(3), "quiet": True, "learning_rate": 0.001}
        done = asyncsgd.train(task, folder=tmp_path / track, track=track, report=records.append, **arguments | more)
        return done, told(records)

    return made


def told(records):
    """(samples, seconds, values) of each point: ten arrivals make one, and the last evaluation ends that of five."""
    arrivals = [record for record in records if record.kind == "arrival"]
    points = []
    before = 0.0
    for first in range(0, 105, 10):
        row = arrivals[first : first + 10]
        last = row[-1]
        samples = 0
        loss = 0.0
        weight = 0.0
        delays = []
        for event in row:
            samples += event.num_samples
            loss += event.loss * event.weight
            weight += event.weight
            delays += [delay for _, delay in event.uses]
        delays.sort()
        values = {
            "train/loss": loss / weight,
            "train/learning_rate": last.learning_rate,
            "train/samples_per_second": samples / (last.train_seconds - before),
            "delay/max": delays[-1],
        }
        for share in (50, 95):
            place = math.ceil(len(delays) * share / 100) - 1
            values[f"delay/p{share}"] = delays[place]
        points.append((last.total_samples, last.train_seconds, values))
        before = last.train_seconds
    around = []  # the evaluations before the first arrival and after the last, and the memory of real workers
    for record in records:
        values = {}
        if record.kind == "evaluate":
            values["eval/loss"] = record.loss
            for name, value in record.metrics.items():
                values[f"eval/{name}"] = value
        elif record.kind == "memory":
            for worker, size, _ in record.workers:
                values[f"memory/worker{worker}_gib"] = size / 2**30
        if values:
            around.append((record.total_samples, record.train_seconds, values))
    half = len(around) // 2
    points = [*around[:half], *points, *around[half:]]
    return [(samples, seconds, values | {"train_seconds": seconds}) for samples, seconds, values in points]


@pytest.mark.parametrize(("task", "runtime"), [(Plane(), Virtual(3)), (Classes(), None)], ids=["virtual", "measured"])
def test_a_tracker_receives_every_point_in_order_and_how_the_run_ended(run, task, runtime):
    kept = Kept()
    done, points = run("kept", kept.open, task=task, runtime=runtime)
    *received, status = kept
    assert received == [(samples, seconds, pytest.approx(values)) for samples, seconds, values in points]
    assert status == "DONE"
    assert done.status == "DONE"
    assert done.summary["tracking"] == {"kept": {"points": len(points), "dropped": 0, "failure": None}}
    who = kept.identity
    assert who.folder == done.folder
    assert who.name == "kept"
    assert who.settings["learning_rate"] == 0.001


def test_a_tracker_receives_the_last_arrivals_of_a_run_that_the_user_stops(tmp_path, monkeypatch):
    kept = Kept()
    monkeypatch.setitem(TRACKERS, "kept", kept.open)

    def stop(record):
        if record.kind == "arrival" and record.total_samples == 8 * 25:
            os.kill(os.getpid(), signal.SIGTERM)

    arguments = {"samples": 8 * 105, "evaluations": 1, "runtime": Virtual(3), "quiet": True}
    asyncsgd.train(Plane(), folder=tmp_path / "run", track="kept", report=stop, **arguments)
    *received, status = kept
    assert status == "INTERRUPTED"
    assert [point.num_samples for point in received] == [0, 8 * 10, 8 * 20, 8 * 25]


def breaks(*anything):
    raise ConnectionError("the server\nis gone")


def hangs(*anything):
    time.sleep(60)


BAD = {
    "is no package": (lambda identity: __import__("no_tracker"), "No module named 'no_tracker'; type python -m pip"),
    "cannot be opened": (breaks, "ConnectionError: the server is gone"),
    "raises": (lambda identity: (breaks, breaks), "ConnectionError: the server is gone"),
    "hangs when it is opened": (hangs, "it was not ready 0.2 s after the run"),
    "hangs": (lambda identity: (hangs, hangs), "it was not ready 0.2 s after the run"),
}


@pytest.mark.parametrize(("opened", "failure"), BAD.values(), ids=BAD)
def test_a_bad_tracker_costs_a_run_nothing_and_is_said_once(run, opened, failure, capsys, monkeypatch):
    for name in ("OPEN_SECONDS", "FINISH_SECONDS"):
        monkeypatch.setattr(f"asyncsgd.records.tracking.{name}", 0.2)
    done, points = run("kept", opened, quiet=False)
    plain = asyncsgd.train(Plane(), samples=8 * 105, runtime=Virtual(3), learning_rate=0.001, quiet=True)
    assert done.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    said = done.summary["tracking"]["kept"]
    assert said["points"] == len(points)
    assert said["dropped"] == len(points)
    assert said["failure"].startswith(failure)
    notes = []
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("note   tracker"):
            notes.append(line)
    assert notes == [f"note   tracker kept: {said['failure']}; the run goes on"]


def test_a_name_that_is_no_tracker_and_a_run_without_a_folder_are_refused():
    ended = cli(["stilt_mlm.py", "--track", "wandb,tensorbord"])
    assert ended.code == 2
    assert "'tensorboard'" in ended.err
    with pytest.raises(UsageError, match="track='wandb' needs a folder"):
        asyncsgd.train(Plane(), samples=10, track="wandb")


def test_where_a_run_is_shown_is_no_part_of_what_it_is(train):
    run = train(mode="single", samples=8)
    shown = ["--config", run.path / "settings.yaml", "--cache-dir", run.cache, "--run-dir", run.path]
    ended = cli(["stilt_mlm.py", *shown, "--track", "tensorboard"])
    assert "holds this run already, DONE" in ended.err  # and none with other settings


def single(value):
    """In single precision, which TensorBoard keeps."""
    return struct.unpack("f", struct.pack("f", value))[0]


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = (folder / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name
    read = EventAccumulator(str(file.parent))
    read.Reload()
    return {name: {(event.step, event.value) for event in read.Scalars(name)} for name in read.Tags()["scalars"]}


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parent}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'asyncsgd'")
    (found,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'mlflow'")
    assert found.info.status == "FINISHED"
    assert found.data.params["learning_rate"] == "0.001"
    histories = {}
    for key in found.data.metrics:
        histories[key] = client.get_metric_history(found.info.run_id, key)
    return {key: {(metric.step, single(metric.value)) for metric in history} for key, history in histories.items()}


def read_trackio(folder):
    database = sqlite3.connect(folder.parent / "trackio-database" / "asyncsgd.db")
    read = {}
    for step, values in database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'trackio'").fetchall():
        for name, value in json.loads(values).items():
            read.setdefault(name, set()).add((step, single(value)))
    database.close()
    return read


def read_wandb(folder):
    """Its file is its own; nothing in it names the host."""
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    assert not re.search(rb"\b%s\b" % re.escape(socket.gethostname().encode()), path.read_bytes())


READ = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "mlflow")) for name in READ])
def test_a_tracker_keeps_every_point(name, run, tmp_path, monkeypatch):
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    for variable in [variable for variable in os.environ if variable.startswith(("WANDB_", "MLFLOW_TRACKING_URI"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio-database"))  # read when trackio is imported, once
    done, points = run(name)
    assert done.summary["tracking"][name] == {"points": len(points), "dropped": 0, "failure": None}
    curves = {}
    for samples, _, values in points:
        for key, value in values.items():
            curves.setdefault(key, set()).add((samples, single(value)))
    read = READ[name](done.folder)
    assert read == curves or name == "wandb"
