"""Shows a run in trackers while it goes on, and never stops or slows it; see docs/running.md.

Every tracker has a thread of its own, and its package is imported there and nowhere before."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncsgd.errors import UsageError, nearest
from asyncsgd.extensions import TRACKERS, Registry
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Evaluation, Event, Membership, MemoryUsed, Record
from asyncsgd.records.locks import lock
from asyncsgd.records.totals import Delays
from asyncsgd.settings.choices import Choices, Named

PROJECT = "asyncsgd"
"""Where a tracker keeps runs together, unless the user has named another place in the tracker's own way."""
OPEN_SECONDS = 20.0
FINISH_SECONDS = 10.0
"""How long a run waits at its beginning, so that importing and opening trackers takes nothing from its training, and at
its end for what they have not written yet."""
FEWEST_ARRIVALS = 10
POINTS_A_RUN = 200
"""A point has at least so many arrivals, so that its percentiles say something, and this part of those so far, so that
a run of any length has about as many points."""


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
        _opener(name)
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


def _opener(text: str) -> Callable[[Identity], Opened]:
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
    opener: Callable[[Identity], Opened] = NAMED[name]
    if name not in ALL:
        return CHOICES.read(text).open
    if colon:
        raise UsageError(f"tracker {name!r} takes no parameters; type --track {name}")
    return opener


class Tracking:
    """Shows one run in trackers of `ALL`. Call it with each record; it never waits. Without names nothing happens.

    A point of n arrivals holds their mean loss, weighted by loss terms, the percentiles of the delays of the gradients
    that were applied, the mean norm of the directions of the steps, and the samples per second. n is 10 at first, and
    one in 200 of all arrivals later. An evaluation is a point of its own, and so is the memory of the workers, in GiB.
    """

    def __init__(self, names: Sequence[str] = (), run: Identity | None = None) -> None:
        self._names = names
        self._run = run
        self._threads: list[_Thread] = []
        self._num_points = self._num_arrivals = 0
        self._arrivals: list[Event] = []
        """Since the last point, as are the delays."""
        self._delays = Delays()
        self._before = (0.0, 0)

    def start(self, tell: Callable[[str], None], settings_yaml: str | None = None) -> None:
        """Open the trackers, for at most `OPEN_SECONDS`; they are shown `settings_yaml`, or the run's settings.yaml.

        `tell` says a line to the user; other threads call it too."""
        if self._run is None or not self._names:
            return
        import yaml

        settings = yaml.safe_load(settings_yaml or (self._run.folder / "settings.yaml").read_text("utf-8")).items()
        plain = {key: value if isinstance(value, int | float | str | None) else str(value) for key, value in settings}
        self._threads = [_Thread(name, self._run._replace(settings=plain), tell) for name in self._names]
        deadline = time.monotonic() + OPEN_SECONDS
        for thread in self._threads:
            thread.opened.wait(max(0.0, deadline - time.monotonic()))

    def __call__(self, record: Record) -> None:
        if not self._threads:
            return
        if isinstance(record, Event | Membership):
            self._delays.update(delay for _, delay in record.uses)
        if isinstance(record, Event):
            self._num_arrivals += 1
            self._arrivals.append(record)
            if len(self._arrivals) >= max(FEWEST_ARRIVALS, self._num_arrivals // POINTS_A_RUN):
                self._show_arrivals()
        elif isinstance(record, Evaluation):
            self._show_arrivals()
            metrics = {f"eval/{name}": value for name, value in record.metrics.items() if value is not None}
            self._show(record, {"eval/loss": record.loss, **metrics})
        elif isinstance(record, MemoryUsed) and record.workers:
            values = {f"memory/worker{worker}_gib": resident / 2**30 for worker, resident, _ in record.workers}
            values |= {f"memory/worker{worker}_gpu_gib": cuda / 2**30 for worker, _, cuda in record.workers if cuda}
            self._show(record, values)

    def _show_arrivals(self) -> None:
        if not self._arrivals:
            return
        last = self._arrivals[-1]
        weight = sum(event.weight for event in self._arrivals)
        norms = [event.gradient_norm for event in self._arrivals if event.gradient_norm is not None]
        (seconds_before, samples_before), self._before = self._before, (last.train_seconds, last.total_samples)
        seconds = last.train_seconds - seconds_before
        samples = last.total_samples - samples_before
        values = {
            "train/loss": sum(event.weight * event.loss for event in self._arrivals) / weight if weight else None,
            "train/learning_rate": last.learning_rate,
            "train/gradient_norm": statistics.fmean(norms) if norms else None,
            "train/samples_per_second": samples / seconds if seconds > 0 else None,
            **{f"delay/{name}": value for name, value in self._delays.summary().items() if name != "mean"},
        }
        self._arrivals = []
        self._delays = Delays()
        self._show(last, values)

    def _show(self, record: Event | Evaluation | MemoryUsed, values: Mapping[str, float | None]) -> None:
        finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
        finite["train_seconds"] = record.train_seconds
        self._num_points += 1
        for thread in self._threads:
            thread.waiting.put(Point(record.total_samples, record.train_seconds, finite))

    def finish(self, status: str) -> dict[str, Any]:
        """End all trackers, in at most `FINISH_SECONDS`, with the run's status. Return, for the summary, the number of
        points, of those that a tracker has not taken, and its first failure or None; empty without trackers."""
        self._show_arrivals()
        threads = self._threads
        self._threads = []
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in threads:
            thread.waiting.put(status)
        with contextlib.suppress(KeyboardInterrupt):  # the user has waited long enough; the summary has to be written
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        said = {}
        for thread in threads:
            if thread.is_alive():
                thread.fail(f"it was not ready {FINISH_SECONDS:g} s after the run")
            dropped = self._num_points - thread.num_taken
            said[thread.tracker] = {"points": self._num_points, "dropped": dropped, "failure": thread.failure}
        return {"tracking": said} if said else {}


class _Thread(threading.Thread):
    """Shows points in one tracker. A daemon: a tracker that hangs keeps neither the process nor another tracker."""

    def __init__(self, tracker: str, run: Identity, tell: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker = tracker
        self._run = run
        self._tell = tell
        self.num_taken = 0
        self.failure: str | None = None
        self.opened = threading.Event()
        self.waiting: queue.SimpleQueue[Point | str] = queue.SimpleQueue()
        """Points, and the run's status at their end."""
        self.start()

    def run(self) -> None:
        try:
            try:
                log, close = _opener(self.tracker)(self._run)
            finally:
                self.opened.set()
            while isinstance(point := self.waiting.get(), Point):
                try:
                    log(point)
                    self.num_taken += 1
                except Exception as error:
                    self.fail(f"{type(error).__name__}: {error}")
            close(point)
        except ModuleNotFoundError as error:
            hint = f"; type python -m pip install -e '.[{self.tracker}]'" if self.tracker in ALL else ""
            self.fail(f"{error}{hint}")
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")

    def fail(self, why: str) -> None:
        """Say the first failure, and no other."""
        if self.failure is None:
            self.failure = " ".join(why.split())[:200]
            self._tell(f"note   tracker {self.tracker}: {self.failure}; the run goes on")
