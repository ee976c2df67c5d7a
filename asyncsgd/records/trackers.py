"""The trackers by name; `asyncsgd.records.tracking` shows a run in them. ``--help`` lists them, so that little is
imported here. The package of a tracker is imported when the tracker is opened."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncsgd.errors import UsageError, nearest
from asyncsgd.extensions import TRACKERS, Registry
from asyncsgd.records.locks import lock
from asyncsgd.settings.choices import Choices, Named

PROJECT = "asyncsgd"
"""Where a tracker keeps runs together, unless the user has named another place in the tracker's own way."""


class Identity(NamedTuple):
    """Which run it is, and what is said of it beside its points: its name below a folder that it shares with others,
    its study, arm and stage, and its settings: numbers, texts, truth values and None."""

    shared: Path
    """The folder."""
    name: str
    """The run's folder, below `shared`."""
    tags: Mapping[str, str] = {}
    """Study, arm and stage, as far as there are any."""
    settings: Mapping[str, Any] = {}
    """By name, as in settings.yaml."""

    @classmethod
    def of(cls, folder: Path) -> Identity:
        """A run that belongs to no study."""
        return cls(folder.absolute().parent, folder.absolute().name)

    @property
    def folder(self) -> Path:
        return self.shared / self.name


class Point(NamedTuple):
    """Finite values by name (``train/loss``, ``delay/p95``, ...) when so many samples had arrived."""

    num_samples: int
    """That had arrived, over all workers."""
    train_seconds: float
    """The training clock."""
    values: Mapping[str, float]
    """By name."""


Opened = tuple[Callable[[Point], object], Callable[[str], object]]
"""What shows a point of one run, and what ends it with the run's status. One thread calls both; whatever they raise
ends nothing but themselves."""


@dataclass(frozen=True)
class Tracker(Named):
    """Base of the trackers that installed packages bring; its fields are parameters, as in ``--track mine:every=3``."""

    def open(self, run: Identity) -> Opened:
        """Begin to show a run. A thread of the tracker's own calls this, so slow imports belong here.

        Returns:
            What shows a point, and what ends the run with its status.
        """
        raise NotImplementedError


def tensorboard(run: Identity) -> Opened:
    """Writes ``RUN_DIR/tensorboard``. Steps are samples; the relative time is the training clock.

    The file is opened here, since tensorboard's own writer puts the host's name in the file's."""
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    from asyncsgd.records.events import DONE, FAILED

    began = time.time()
    folder = run.folder / "tensorboard"
    folder.mkdir(exist_ok=True)
    writer = RecordWriter(open(folder / f"events.out.tfevents.{time.time_ns()}", "wb"))  # noqa: SIM115

    def write(wall_time: float, **event: Any) -> None:
        writer.write(event_pb2.Event(wall_time=wall_time, **event).SerializeToString())
        writer.flush()

    def write_session(tag: str, **info: Any) -> None:
        """For the table of settings (HPARAMS)."""
        about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**info))
        write(time.time(), summary=Summary(value=[Summary.Value(tag=tag, metadata=about)]))

    def log(point: Point) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        write(began + point.train_seconds, step=point.num_samples, summary=Summary(value=scalars))

    def close(status: str) -> None:
        shown = {DONE: "STATUS_SUCCESS", FAILED: "STATUS_FAILURE"}.get(status, "STATUS_UNKNOWN")
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.Status.Value(shown), end_time_secs=time.time())
        write_session(metadata.SESSION_END_INFO_TAG, session_end_info=end)
        writer.close()

    write(began, file_version="brain.Event:2")
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=began)
    for name, value in {**run.settings, **run.tags}.items():
        kind = "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "string"
        setattr(start.hparams[name], f"{kind}_value", str(value) if kind == "string" else value)
    write_session(metadata.SESSION_START_INFO_TAG, session_start_info=start)
    return log, close


def weights_and_biases(run: Identity) -> Opened:
    """Writes below ``RUN_DIR/wandb``; offline, unless the user has set WANDB_MODE.

    It is told nothing of the host, the user, the code or git, as the run folder does not hold them either."""
    import wandb

    from asyncsgd.records.events import DONE

    # By default W&B waits without end, and keeps the process until then. These seconds are less than a run waits for a
    # tracker. What is not sent in them stays on the disk for ``wandb sync``.
    seconds = {"init_timeout": 15.0, "finish_timeout": 8.0, "finish_timeout_raises": True}
    nothing_told = {"disable_code": True, "disable_git": True, "host": "-"}  # it finds out the host's name itself
    nothing_told |= {f"x_disable_{kind}": True for kind in ("meta", "stats", "machine_info")}
    shown = wandb.init(
        project=os.environ.get("WANDB_PROJECT", PROJECT),
        name=run.name,
        group=run.tags.get("study"),
        tags=[tag[:64] for tag in run.tags.values()],  # it takes no longer one
        config={**run.settings, **run.tags},
        dir=str(run.folder),
        mode=os.environ.get("WANDB_MODE", "offline"),
        settings=wandb.Settings(console="off", silent=True, reinit="create_new", **seconds, **nothing_told),
    )
    shown.define_metric("*", step_metric="num_samples")

    def log(point: Point) -> None:
        shown.log({"num_samples": point.num_samples, **point.values})

    def close(status: str) -> None:
        shown.summary["status"] = status
        shown.finish(exit_code=0 if status == DONE else 1)

    return log, close


def mlflow(run: Identity) -> Opened:
    """Sends to MLFLOW_TRACKING_URI. Without it, to ``mlflow.db`` in the folder that the run folder is in.

    The step is the samples; the time of a point is the beginning plus the training clock."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    from asyncsgd.records.events import DONE, INTERRUPTED

    began = time.time()
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    with open(run.shared / ".lock-mlflow", "a", encoding="utf-8") as file:
        lock(file, fcntl.LOCK_EX)  # two runs that begin together would both make the database, and one would fail
        client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.shared / 'mlflow.db'}")
        known = client.get_experiment_by_name(name)
        experiment_id = known.experiment_id if known else client.create_experiment(name)
    run_id = client.create_run(experiment_id, run_name=run.name, tags=dict(run.tags)).info.run_id
    client.log_batch(run_id, params=[Param(key, str(value)) for key, value in run.settings.items()])

    def log(point: Point) -> None:
        milliseconds = int(1000 * (began + point.train_seconds))
        metrics = [Metric(name, value, milliseconds, point.num_samples) for name, value in point.values.items()]
        client.log_batch(run_id, metrics)

    def close(status: str) -> None:
        client.set_terminated(run_id, {DONE: "FINISHED", INTERRUPTED: "KILLED"}.get(status, "FAILED"))

    return log, close


def trackio(run: Identity) -> Opened:
    """Writes where trackio writes by default, or where its own variables say (TRACKIO_DIR)."""
    import trackio

    config = {**run.settings, **run.tags}
    quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    shown = trackio.init(PROJECT, name=run.name, group=run.tags.get("study"), config=config, **quiet)

    def log(point: Point) -> None:
        shown.log(dict(point.values), step=point.num_samples)

    return log, lambda status: shown.finish()


ALL: dict[str, Callable[[Identity], Opened]] = {
    "tensorboard": tensorboard,
    "wandb": weights_and_biases,
    "mlflow": mlflow,
    "trackio": trackio,
}
"""The library's own trackers, by the name that ``--track`` takes."""

NAMED = Registry[Any]("tracker", TRACKERS, ALL, Tracker)
"""Those of installed packages too."""
CHOICES = Choices[Tracker]("tracker", "trackers", "--track", NAMED)


def names_in(text: str | None) -> tuple[str, ...]:
    """The trackers that ``--track`` names, separated by commas, each with its parameters.

    >>> names_in("tensorboard, wandb"), names_in(None)
    (('tensorboard', 'wandb'), ())

    Raises:
        UsageError: for a name that is no tracker's, or parameters that it does not take.
    """
    names = [] if text is None else list(_parted(text))
    for name in names:
        opener(name)
    return tuple(dict.fromkeys(names))


def _parted(text: str) -> Iterator[str]:
    """The trackers in a text. A comma stands between parameters too.

    >>> list(_parted("wandb, mine:every=3,file=a.csv,tensorboard"))
    ['wandb', 'mine:every=3,file=a.csv', 'tensorboard']
    """
    tracker = ""
    for part in map(str.strip, text.split(",")):
        is_parameter = "=" in part.partition(":")[0]
        if tracker and not is_parameter:
            yield tracker
        tracker = f"{tracker},{part}" if is_parameter else part
    yield tracker


def opener(text: str) -> Callable[[Identity], Opened]:
    """What opens the tracker ``NAME[:key=value,...]``.

    Raises:
        UsageError: if there is none, or it does not take these parameters.
    """
    name, colon, _ = text.partition(":")
    if name not in NAMED:
        raise UsageError(
            f"--track must be one of {', '.join(NAMED)}, got {name!r}{nearest(name, NAMED)}; if it came with a "
            f"package, install that package"
        )
    if name not in ALL:
        return CHOICES.read(text).open
    if colon:
        raise UsageError(f"tracker {name!r} takes no parameters; type --track {name}")
    own: Callable[[Identity], Opened] = NAMED[name]
    return own
