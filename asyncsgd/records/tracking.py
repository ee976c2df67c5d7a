"""Shows a run in trackers while it goes on, and never stops or slows it; see docs/running.md.

Every tracker has a thread of its own."""

from __future__ import annotations

import contextlib
import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncsgd.records.events import Evaluation, Event, Membership, MemoryUsed, Record
from asyncsgd.records.totals import Delays
from asyncsgd.records.trackers import ALL, Identity, Point, opener

OPEN_SECONDS = 20.0
FINISH_SECONDS = 10.0
"""How long a run waits at its beginning, so that importing and opening trackers takes nothing from its training, and at
its end for what they have not written yet."""
FEWEST_ARRIVALS = 10
POINTS_A_RUN = 200
"""A point has at least so many arrivals, so that its percentiles say something, and this part of those so far, so that
a run of any length has about as many points."""


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

        text = settings_yaml or (self._run.folder / "settings.yaml").read_text("utf-8")
        plain = {}
        for key, value in yaml.safe_load(text).items():
            plain[key] = value if isinstance(value, int | float | str | None) else str(value)
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
        seconds_before, samples_before = self._before
        self._before = (last.train_seconds, last.total_samples)
        seconds = last.train_seconds - seconds_before
        samples = last.total_samples - samples_before
        loss = None
        if weight:
            loss = sum(event.weight * event.loss for event in self._arrivals) / weight
        values = {
            "train/loss": loss,
            "train/learning_rate": last.learning_rate,
            "train/gradient_norm": statistics.fmean(norms) if norms else None,
            "train/samples_per_second": samples / seconds if seconds > 0 else None,
        }
        for name, delay in self._delays.summary().items():
            if name != "mean":
                values[f"delay/{name}"] = delay
        self._arrivals = []
        self._delays = Delays()
        self._show(last, values)

    def _show(self, record: Event | Evaluation | MemoryUsed, values: Mapping[str, float | None]) -> None:
        finite = {}
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                finite[name] = float(value)
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
                log, close = opener(self.tracker)(self._run)
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
