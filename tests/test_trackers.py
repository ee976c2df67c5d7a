"""Runs that are shown in trackers: what a tracker is told, and that none of them can harm a run.

The tests of one tracker's package skip where it is not installed."""

import importlib.util
import json
import os
import re
import socket
import sqlite3
import struct

import pytest
from doors import TRACKERS, UsageError, Virtual, asyncsgd, cli
from tasks import Classes, Plane


class Kept:
    """A tracker that keeps what it is told."""

    def __init__(self, identity):
        self.identity, self.points, self.status = identity, [], ""
        KEPT.append(self)

    def __iter__(self):
        return iter((self.send, self.close))

    def send(self, points):
        self.points += points

    def close(self, status):
        self.status = status


class Breaks(Kept):
    def send(self, points):
        raise ConnectionError("the server\nis gone")


KEPT = []


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of 3 virtual workers, the points that its tracker was to be told, and what it has printed."""

    def made(track, kind=Kept, task=Plane(), **more):  # noqa: B008 - frozen
        monkeypatch.setitem(TRACKERS, "kept", kind)
        KEPT.clear()
        records = []
        arguments = {"samples": 8 * 105, "runtime": Virtual(3), "quiet": True, "learning_rate": 0.001} | more
        done = asyncsgd.train(task, folder=tmp_path / track, track=track, report=records.append, **arguments)
        return done, told(records)

    return made


def percentile(delays, share):
    return next(delay for delay in sorted(delays) if sum(d <= delay for d in delays) >= share * len(delays))


def told(records):
    """(samples, seconds, values) of each point, written down from the records: ten arrivals make one, an evaluation
    ends the one before it, and so does the end of the run."""
    points, arrivals, before = [], [], (0, 0.0)

    def end():
        nonlocal before
        if arrivals:
            last, weights = arrivals[-1], [event.weight for event in arrivals]
            delays = [delay for event in arrivals for _, delay in event.uses]
            now = (last.total_samples, last.train_seconds)
            values = {
                "train/loss": sum(event.loss * event.weight for event in arrivals) / sum(weights),
                "train/learning_rate": last.learning_rate,
                "train/samples_per_second": (now[0] - before[0]) / (now[1] - before[1]) if now[1] > before[1] else None,
                **{f"delay/p{share}": percentile(delays, share / 100) for share in (50, 95)},
                "delay/max": max(delays),
            }
            points.append((*now, {name: value for name, value in values.items() if value is not None}))
            before = now
            arrivals.clear()

    for record in records:
        if record.kind == "arrival":
            arrivals.append(record)
            if len(arrivals) == 10:
                end()
        elif record.kind == "evaluate":
            end()
            metrics = {f"eval/{name}": value for name, value in record.metrics.items()}
            points.append((record.total_samples, record.train_seconds, {"eval/loss": record.loss, **metrics}))
        elif record.kind == "memory" and record.workers:
            gib = {f"memory/worker{worker}_gib": size / 2**30 for worker, size, _ in record.workers}
            points.append((record.total_samples, record.train_seconds, gib))
    end()
    return [(samples, seconds, values | {"train_seconds": seconds}) for samples, seconds, values in points]


@pytest.mark.parametrize("task", [Plane(), Classes()], ids=lambda task: task.name)
def test_a_tracker_receives_every_point_in_order_and_how_the_run_ended(run, task):
    done, points = run("kept", task=task)
    (tracker,) = KEPT
    assert [(point.num_samples, point.train_seconds) for point in tracker.points] == [point[:2] for point in points]
    for point, (*_, values) in zip(tracker.points, points, strict=True):
        assert point.values == pytest.approx(values)
    assert len(points) > 15
    assert tracker.status == done.status == "DONE"
    assert done.summary["tracking"] == {"kept": {"points": len(points), "dropped": 0, "failure": None}}
    assert tracker.identity.folder == done.folder
    assert (tracker.identity.name, tracker.identity.settings["learning_rate"]) == ("kept", 0.001)


def test_a_tracker_that_raises_costs_nothing_and_is_said_once(run, capsys):
    done, points = run("kept", Breaks, quiet=False)
    plain = asyncsgd.train(Plane(), samples=8 * 105, runtime=Virtual(3), learning_rate=0.001, quiet=True)
    assert done.summary["parameters_sha256"] == plain.summary["parameters_sha256"]
    failure = "ConnectionError: the server is gone"
    assert done.summary["tracking"] == {"kept": {"points": len(points), "dropped": len(points), "failure": failure}}
    said = [line for line in capsys.readouterr().out.splitlines() if "kept" in line and line.startswith("note")]
    assert said[0] == f"note   tracker kept: {failure}; the run goes on"


def test_a_name_that_is_no_tracker_and_a_run_without_a_folder_are_refused():
    ended = cli(["stilt_mlm.py", "--track", "wandb,tensorbord"])
    assert (ended.code, "'tensorboard'" in ended.err) == (2, True)
    with pytest.raises(UsageError, match="track='wandb' needs a folder"):
        asyncsgd.train(Plane(), samples=10, track="wandb")


def test_where_a_run_is_shown_is_no_part_of_what_it_is(train, tmp_path):
    run = train(mode="single", samples=8)
    shown = ["--config", run.path / "settings.yaml", "--cache-dir", run.cache, "--run-dir", run.path]
    ended = cli(["stilt_mlm.py", *shown, "--track", "tensorboard"])
    assert "holds this run already, DONE" in ended.err  # and none with other settings


def needs(name):
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def curves(points):
    """The set of (samples, value) by the name of the value, in single precision, which TensorBoard keeps."""
    found = {}
    for samples, _, values in points:
        for name, value in values.items():
            found.setdefault(name, set()).add((samples, single(value)))
    return found


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


@needs("tensorboard")
def test_tensorboard_reads_every_point_back(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    done, points = run("tensorboard")
    assert done.summary["tracking"]["tensorboard"] == {"points": len(points), "dropped": 0, "failure": None}
    (file,) = (done.folder / "tensorboard").iterdir()
    assert socket.gethostname() not in file.name
    read = EventAccumulator(str(file.parent))
    read.Reload()
    found = {name: {(event.step, event.value) for event in read.Scalars(name)} for name in read.Tags()["scalars"]}
    assert found == curves(points)


@needs("wandb")
def test_wandb_keeps_the_run_offline_in_its_folder(run, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    done, points = run("wandb")
    assert done.summary["tracking"]["wandb"] == {"points": len(points), "dropped": 0, "failure": None}
    (path,) = (done.folder / "wandb").glob("offline-run-*/*.wandb")
    assert not re.search(rb"\b%s\b" % re.escape(socket.gethostname().encode()), path.read_bytes())


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_reads_every_point_and_the_settings_back_from_its_database(run, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done, points = run("mlflow")
    assert done.summary["tracking"]["mlflow"] == {"points": len(points), "dropped": 0, "failure": None}
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'asyncsgd'")
    (found,) = client.search_runs([experiment.experiment_id], "attributes.run_name = 'mlflow'")
    histories = {key: client.get_metric_history(found.info.run_id, key) for key in found.data.metrics}
    read = {key: {(metric.step, single(metric.value)) for metric in history} for key, history in histories.items()}
    assert read == curves(points)
    assert (found.info.status, found.data.params["learning_rate"]) == ("FINISHED", "0.001")


@needs("trackio")
def test_trackio_keeps_every_point_in_its_database(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when trackio is imported, once
    done, points = run("trackio")
    assert done.summary["tracking"]["trackio"] == {"points": len(points), "dropped": 0, "failure": None}
    database = sqlite3.connect(tmp_path / "trackio" / "asyncsgd.db")
    rows = database.execute("SELECT step, metrics FROM metrics WHERE run_name = 'trackio' ORDER BY id").fetchall()
    database.close()
    assert curves([(step, 0.0, json.loads(values)) for step, values in rows]) == curves(points)
