"""Shows a run in trackers while it goes on, and never stops or slows it; see docs/tracking.md.

Every tracker has a thread of its own, and its package is imported there and nowhere before."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from asyncsgd.errors import UsageError, nearest
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED, Evaluation, Event, Membership, MemoryUsed, Record
from asyncsgd.records.locks import lock
from asyncsgd.records.totals import Delays

PROJECT = "asyncsgd"
"""Where a tracker keeps runs together, unless the user has named another place in the tracker's own way."""
OPEN_SECONDS, FINISH_SECONDS = 20.0, 10.0
"""How long a run waits at its beginning, so that importing and opening trackers takes nothing from its training, and at
its end for what they have not written yet."""
SEND_SECONDS = 2.0
"""A tracker is given what has come in this time at once, since each time costs the run some of its machine."""
LONGEST_REASON = 200
FEWEST_ARRIVALS, POINTS_A_RUN = 10, 200
"""A point has at least so many arrivals, so that its percentiles say something, and this part of those so far, so that
a run of any length has about as many points."""


class Identity(NamedTuple):
    """Which run it is, and what is said of it beside its points."""

    folder: Path
    name: str
    shared: Path
    """The folder in which the runs stand that belong together."""
    group: str | None = None
    """The study that it belongs to."""
    tags: Mapping[str, str] = {}
    """Its arm and its stage, in a study."""
    settings: Mapping[str, Any] = {}
    """By name; numbers, texts, truth values and None."""

    @classmethod
    def of(cls, folder: Path) -> Identity:
        """A run that belongs to no study."""
        return cls(folder.absolute(), folder.absolute().name, folder.absolute().parent)

    @property
    def labels(self) -> dict[str, str]:
        return {**({} if self.group is None else {"study": self.group}), **self.tags}


class Point(NamedTuple):
    """Values at one moment of a run: the samples that have arrived, which are the horizontal axis, the training clock,
    and finite values by name (``train/loss``, ``eval/loss``, ``delay/p95``, ...)."""

    num_samples: int
    train_seconds: float
    values: Mapping[str, float]


class Tracker(Protocol):
    """One run in one tracker. Made, used and closed by one thread; whatever it raises ends nothing but itself."""

    def send(self, points: Sequence[Point]) -> None: ...
    def close(self, status: str) -> None: ...


class TensorBoard:
    """Writes ``RUN_DIR/tensorboard``. Steps are samples; the relative time is the training clock.

    The file is opened here, since tensorboard's own writer puts the host's name in the file's.
    """

    def __init__(self, identity: Identity) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._api, self._metadata, self._hparams = api_pb2, metadata, plugin_data_pb2
        self._began = time.time()
        folder = identity.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        file = open(folder / f"events.out.tfevents.{time.time_ns()}", "wb")  # noqa: SIM115 - closed by `close`
        self._writer = RecordWriter(file)
        self._write(wall_time=self._began, file_version="brain.Event:2")
        start = plugin_data_pb2.SessionStartInfo(start_time_secs=self._began)
        for name, value in {**identity.settings, **identity.labels}.items():
            kind = "bool" if isinstance(value, bool) else "number" if isinstance(value, int | float) else "string"
            setattr(start.hparams[name], f"{kind}_value", str(value) if kind == "string" else value)
        self._write_session(metadata.SESSION_START_INFO_TAG, session_start_info=start)
        self._writer.flush()

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
            seconds = self._began + point.train_seconds
            self._write(wall_time=seconds, step=point.num_samples, summary=self._summary(value=values))
        self._writer.flush()

    def close(self, status: str) -> None:
        shown = {DONE: "STATUS_SUCCESS", FAILED: "STATUS_FAILURE"}.get(status, "STATUS_UNKNOWN")
        end = self._hparams.SessionEndInfo(status=self._api.Status.Value(shown), end_time_secs=time.time())
        self._write_session(self._metadata.SESSION_END_INFO_TAG, session_end_info=end)
        self._writer.close()

    def _write_session(self, tag: str, **info: object) -> None:
        """For the table of settings (HPARAMS)."""
        content = self._hparams.HParamsPluginData(version=self._metadata.PLUGIN_DATA_VERSION, **info)
        value = self._summary.Value(tag=tag)
        value.metadata.plugin_data.plugin_name = self._metadata.PLUGIN_NAME
        value.metadata.plugin_data.content = content.SerializeToString()
        self._write(wall_time=time.time(), summary=self._summary(value=[value]))

    def _write(self, **event: Any) -> None:
        self._writer.write(self._event(**event).SerializeToString())


class WandB:
    """Writes below ``RUN_DIR/wandb``; offline, unless the user has set WANDB_MODE.

    It is told nothing of the host, the user, the code or git, as the run folder does not hold them either.
    """

    def __init__(self, identity: Identity) -> None:
        import wandb

        # By default W&B waits without end, and keeps the process until then. These seconds are less than a run waits
        # for a tracker. What is not sent in them stays on the disk for ``wandb sync``.
        seconds = {"init_timeout": 15.0, "finish_timeout": 8.0, "finish_timeout_raises": True}
        nothing_told = {"disable_code": True, "disable_git": True, "host": "-"}  # it finds out the host's name itself
        nothing_told |= {f"x_disable_{kind}": True for kind in ("meta", "stats", "machine_info")}
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=identity.name,
            group=identity.group,
            tags=[tag[:64] for tag in identity.tags.values()],  # it takes no longer one
            config={**identity.settings, **identity.tags},
            dir=str(identity.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(console="off", silent=True, reinit="create_new", **seconds, **nothing_told),
        )
        self._run.define_metric("*", step_metric="num_samples")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({"num_samples": point.num_samples, **point.values})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == DONE else 1)


class MLflow:
    """Sends to MLFLOW_TRACKING_URI. Without it, to ``mlflow.db`` in the folder that the run folder is in.

    The step is the samples; the time of a point is the beginning plus the training clock.
    """

    def __init__(self, identity: Identity) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{identity.shared / 'mlflow.db'}"
        self._began = time.time()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with open(identity.shared / ".lock-mlflow", "a", encoding="utf-8") as file:
            lock(file, fcntl.LOCK_EX)  # two runs that begin together would both make the database, and one would fail
            self._client = MlflowClient(uri)
            experiment = self._client.get_experiment_by_name(name)
            experiment_id = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        run = self._client.create_run(experiment_id, run_name=identity.name, tags=identity.labels)
        self._run_id = run.info.run_id
        self._log("params", 100, [Param(key, str(value)) for key, value in identity.settings.items()])

    def send(self, points: Sequence[Point]) -> None:
        metrics = []
        for samples, seconds, values in points:
            when = int(1000 * (self._began + seconds))
            metrics += [self._metric(name, value, when, samples) for name, value in values.items()]
        self._log("metrics", 1000, metrics)

    def close(self, status: str) -> None:
        shown = {DONE: "FINISHED", INTERRUPTED: "KILLED"}.get(status, "FAILED")
        self._client.set_terminated(self._run_id, status=shown)

    def _log(self, kind: str, most: int, items: Sequence[Any]) -> None:
        """In requests of at most `most`; MLflow takes no more."""
        for first in range(0, len(items), most):
            self._client.log_batch(self._run_id, **{kind: items[first : first + most]})


class Trackio:
    """Writes where trackio writes by default, or where its own variables say (TRACKIO_DIR)."""

    def __init__(self, identity: Identity) -> None:
        import trackio

        config = {**identity.settings, **identity.tags}
        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(PROJECT, name=identity.name, group=identity.group, config=config, **quiet)

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.values), step=point.num_samples)

    def close(self, status: str) -> None:
        self._run.finish()


ALL: dict[str, Callable[[Identity], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Every tracker, by the name that ``--track`` takes."""


def names_in(text: str | None) -> tuple[str, ...]:
    """The trackers that ``--track`` names, separated by commas.

    >>> names_in("tensorboard,wandb"), names_in(None)
    (('tensorboard', 'wandb'), ())

    Raises:
        UsageError: for a name that is no tracker's, or is there twice.
    """
    names = () if text is None else tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in ALL:
            raise UsageError(f"--track must be one of {', '.join(ALL)}, got {name!r}{nearest(name, ALL)}")
        if names.count(name) > 1:
            raise UsageError(f"--track names {name} twice; name it once")
    return names


class Points:
    """From records to points. Call it with each record, in order; it returns the points that are complete.

    Arrivals are put together: a point of n arrivals holds their mean loss, weighted by loss terms, the percentiles of
    the delays of the gradients that were applied, the mean norm of the directions of the steps, and the samples per
    second between the first and the last. n is 10 at first, and one in 200 of all arrivals later. An evaluation is a
    point of its own, and so is the memory of the workers, in GiB.
    """

    def __init__(self) -> None:
        self._num_arrivals = 0
        self._before = (0.0, 0)
        self._arrivals: list[Event] = []
        self._delays = Delays()

    def __call__(self, record: Record) -> list[Point]:
        if isinstance(record, Event | Membership):
            self._delays.update(delay for _, delay in record.uses)
        if isinstance(record, Event):
            self._num_arrivals += 1
            self._arrivals.append(record)
            enough = max(FEWEST_ARRIVALS, self._num_arrivals // POINTS_A_RUN)
            return self.rest() if len(self._arrivals) >= enough else []
        if isinstance(record, Evaluation):
            values = {"eval/loss": record.loss} | {f"eval/{name}": value for name, value in record.metrics.items()}
            return [*self.rest(), _point(record, values)]
        if isinstance(record, MemoryUsed) and record.workers:
            values = {f"memory/worker{worker}_gib": resident / 2**30 for worker, resident, _ in record.workers}
            values |= {f"memory/worker{worker}_gpu_gib": cuda / 2**30 for worker, _, cuda in record.workers if cuda}
            return [_point(record, values)]
        return []

    def rest(self) -> list[Point]:
        """The arrivals since the last point, as a point; nothing where there are none."""
        if not self._arrivals:
            return []
        last, weight = self._arrivals[-1], sum(event.weight for event in self._arrivals)
        norms = [event.gradient_norm for event in self._arrivals if event.gradient_norm is not None]
        (seconds_before, samples_before), self._before = self._before, (last.train_seconds, last.total_samples)
        seconds, samples = last.train_seconds - seconds_before, last.total_samples - samples_before
        values = {
            "train/loss": sum(event.weight * event.loss for event in self._arrivals) / weight if weight else None,
            "train/learning_rate": last.learning_rate,
            "train/gradient_norm": statistics.fmean(norms) if norms else None,
            "train/samples_per_second": samples / seconds if seconds > 0 else None,
            **{f"delay/{name}": value for name, value in self._delays.summary().items() if name != "mean"},
        }
        self._arrivals, self._delays = [], Delays()
        return [_point(last, values)]


def _point(record: Event | Evaluation | MemoryUsed, values: Mapping[str, float | None]) -> Point:
    finite = {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}
    return Point(record.total_samples, record.train_seconds, finite | {"train_seconds": record.train_seconds})


class Tracking:
    """Some trackers of one run. Call it with each record; it never waits.

    Args:
        names: of `ALL`; none: nothing happens.
        run: what they show, without its settings, which `start` finds; None where there are none.
    """

    def __init__(self, names: Sequence[str] = (), run: Identity | None = None) -> None:
        self._names, self._run = names, run
        self._gather = Points()
        self._threads: list[_Thread] = []
        self.points: list[Point] = []
        self.ended, self.status = threading.Event(), ""

    def start(self, tell: Callable[[str], None], settings_yaml: str | None = None) -> None:
        """Open every tracker; return when they are open, or after `OPEN_SECONDS`.

        Args:
            tell: says a line to the user; called from other threads too.
            settings_yaml: the run's settings; None: what its settings.yaml says.
        """
        if self._run is None or not self._names:
            return
        import yaml

        settings = yaml.safe_load(settings_yaml or (self._run.folder / "settings.yaml").read_text("utf-8")).items()
        plain = {key: value if isinstance(value, int | float | str | None) else str(value) for key, value in settings}
        self._threads = [_Thread(self, name, self._run._replace(settings=plain), tell) for name in self._names]
        deadline = time.monotonic() + OPEN_SECONDS
        for thread in self._threads:
            thread.opened.wait(max(0.0, deadline - time.monotonic()))

    def __call__(self, record: Record) -> None:
        if self._threads:
            self.points += self._gather(record)

    def finish(self, status: str) -> dict[str, Any]:
        """End all trackers, in at most `FINISH_SECONDS`; say what they lack.

        Args:
            status: how the run ended.

        Returns:
            For the summary, ``{"tracking": {name: {"points": ..., "dropped": ..., "failure": ...}}}``: the points there
            were, those that the tracker has not taken, and its first failure or None. Empty without trackers.
        """
        threads, self._threads = self._threads, []
        if not threads:
            return {}
        self.points += self._gather.rest()
        self.status, deadline = status, time.monotonic() + FINISH_SECONDS
        self.ended.set()
        with contextlib.suppress(KeyboardInterrupt):  # the user has waited long enough; the summary has to be written
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        return {"tracking": {thread.tracker: thread.report() for thread in threads}}


class _Thread(threading.Thread):
    """Shows the points of a `Tracking` in one tracker. A daemon: a tracker that hangs does not keep the process."""

    def __init__(self, tracking: Tracking, tracker: str, run: Identity, tell: Callable[[str], None]) -> None:
        super().__init__(name=f"tracker {tracker}", daemon=True)
        self.tracker = tracker
        self.opened = threading.Event()
        """Or failed to."""
        self._tracking, self._run, self._tell = tracking, run, tell
        self._taken, self._failure = 0, ""
        self.start()

    def run(self) -> None:
        with self._surviving():
            try:
                tracker = ALL[self.tracker](self._run)
            finally:
                self.opened.set()
            ended, shown = False, 0
            while not ended:
                ended = self._tracking.ended.wait(SEND_SECONDS)
                points = self._tracking.points[shown:]
                shown += len(points)
                with self._surviving():
                    tracker.send(points)
                    self._taken += len(points)
            tracker.close(self._tracking.status)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except ModuleNotFoundError as error:
            self._fail(f"{error}; type python -m pip install -e '.[{self.tracker}]'")
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        """Say the first failure, and no other."""
        if not self._failure:
            self._failure = " ".join(why.split())[:LONGEST_REASON]
            self._tell(f"note   tracker {self.tracker}: {self._failure}; the run goes on")

    def report(self) -> dict[str, Any]:
        if self.is_alive():
            self._fail(f"it was not ready {FINISH_SECONDS:g} s after the run")
        points = len(self._tracking.points)
        return {"points": points, "dropped": points - self._taken, "failure": self._failure or None}
