"""Shows a run in trackers while it goes on, and never stops or slows it. Standard library only, and PyYAML.

Every tracker has a thread of its own. What a tracker raises is said once. What it is too slow for, or has lost, is
counted and said at the end."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncsgd.records.events import Record
from asyncsgd.records.trackers import ALL
from asyncsgd.records.trackers.base import Identity, Point
from asyncsgd.records.trackers.points import Points

OPEN_SECONDS = 20.0
"""How long a run waits at its beginning, so that importing and opening trackers takes nothing from its training."""

FINISH_SECONDS = 10.0
"""How long a run waits at its end for what trackers have not written yet."""

SEND_SECONDS = 2.0
"""A tracker is given what has come in this time at once, since each time costs the run some of its machine."""

LONGEST_REASON = 200


class Tracking:
    """Some trackers of one run.

    Args:
        names: of `asyncsgd.records.trackers.ALL`; none: nothing happens.
        folder: the run's, with its settings.yaml.
        name: None: the folder's.
        shared: None: the folder that the run's is in.
        group, tags: see `Identity`.
    """

    def __init__(
        self,
        names: tuple[str, ...] = (),
        folder: Path = Path(),
        *,
        name: str | None = None,
        shared: Path | None = None,
        group: str | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        folder = folder.absolute()
        self._names = names
        self._identity = Identity(folder, name or folder.name, (shared or folder.parent).absolute(), group, tags or {})
        self._points = Points()
        self._threads: list[_Thread] = []
        self._tell: Callable[[str], None] = lambda line: None

    def start(self, tell: Callable[[str], None], settings_yaml: str | None = None) -> None:
        """Open every tracker; return when they are open, or after `OPEN_SECONDS`.

        Args:
            tell: says a line to the user; called from other threads too.
            settings_yaml: the run's settings; None: what its settings.yaml says.
        """
        if not self._names:
            return
        self._tell = tell
        if settings_yaml is None:
            settings_yaml = (self._identity.folder / "settings.yaml").read_text(encoding="utf-8")
        identity = dataclasses.replace(self._identity, settings=_settings_of(settings_yaml))
        self._threads = [_Thread(name, identity, tell) for name in self._names]
        deadline = time.monotonic() + OPEN_SECONDS
        for thread in self._threads:
            thread.opened.wait(max(0.0, deadline - time.monotonic()))

    def __call__(self, record: Record) -> None:
        """Take a record; never waits."""
        if self._threads:
            self._offer(self._points(record))

    def _offer(self, points: list[Point]) -> None:
        for thread in self._threads:
            for point in points:
                thread.offer(point)

    def finish(self, status: str) -> dict[str, Any]:
        """End all trackers, in at most `FINISH_SECONDS`; say what they lack.

        Args:
            status: how the run ended.

        Returns:
            For the summary, ``{"tracking": {name: {"points": ..., "dropped": ..., "failure": ...}}}``: the points there
            were, those that the tracker has not taken, and its first failure or None. Empty without trackers.
        """
        if not self._threads:
            return {}
        self._offer(self._points.rest())
        deadline = time.monotonic() + FINISH_SECONDS
        for thread in self._threads:
            thread.end(status)
        try:
            for thread in self._threads:
                thread.join(deadline)
        except KeyboardInterrupt:
            pass  # the user has waited long enough; the run's own folder is still to be written
        reports = {thread.name: thread.report() for thread in self._threads}
        self._threads = []
        for name, report in reports.items():
            if report["dropped"]:
                self._tell(f"note   {name} lacks {report['dropped']} of {report['points']} points")
        return {"tracking": reports}


class _Thread:
    """One tracker, its thread and what waits for it."""

    def __init__(self, name: str, identity: Identity, tell: Callable[[str], None]) -> None:
        self.name = name
        self.opened = threading.Event()
        """Or failed to."""
        self._identity, self._tell = identity, tell
        self._waiting: queue.SimpleQueue[Point | str] = queue.SimpleQueue()
        """Points; at last how the run ended."""
        self._ended = threading.Event()
        self._offered = self._taken = 0
        self._failure: str | None = None
        # A daemon: a tracker that hangs does not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def offer(self, point: Point) -> None:
        self._offered += 1
        if self._thread.is_alive():
            self._waiting.put(point)

    def end(self, status: str) -> None:
        self._waiting.put(status)
        self._ended.set()

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it was not ready {FINISH_SECONDS:g} s after the run")

    def report(self) -> dict[str, Any]:
        return {"points": self._offered, "dropped": self._offered - self._taken, "failure": self._failure}

    def _work(self) -> None:
        try:
            tracker = ALL[self.name](self._identity)
        except ModuleNotFoundError as error:
            if error.name == self.name:
                self._fail(f"it is not installed; type python -m pip install -e '.[{self.name}]'")
            else:
                self._fail(error)
            return
        except Exception as error:
            self._fail(error)
            return
        finally:
            self.opened.set()
        status = None
        while status is None:
            points, status = self._take()
            try:
                tracker.send(points)
                self._taken += len(points)
            except Exception as error:
                self._fail(error)
            self._ended.wait(SEND_SECONDS)
        try:
            tracker.close(status)
        except Exception as error:
            self._fail(error)

    def _take(self) -> tuple[list[Point], str | None]:
        """Wait for a point, and take what waits with it; and how the run ended, where that is known."""
        points: list[Point] = []
        item = self._waiting.get()
        while isinstance(item, Point):
            points.append(item)
            try:
                item = self._waiting.get_nowait()
            except queue.Empty:
                return points, None
        return points, item

    def _fail(self, error: BaseException | str) -> None:
        """Say the first failure, and no other."""
        if self._failure is not None:
            return
        text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
        line = " ".join(text.split())
        self._failure = line if len(line) <= LONGEST_REASON else line[:LONGEST_REASON] + "..."
        self._tell(f"note   tracker {self.name}: {self._failure}; the run goes on")


def _settings_of(settings_yaml: str) -> dict[str, Any]:
    """What settings.yaml says, without groups; a value that is no number, text, truth value or None becomes text."""
    import yaml

    settings = yaml.safe_load(settings_yaml)
    return {
        name: value if isinstance(value, int | float | str | None) else str(value) for name, value in settings.items()
    }
