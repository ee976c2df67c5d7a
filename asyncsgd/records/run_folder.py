"""The run folder: settings, environment, events and summary of one run; docs/run_folder.md lists its files.

Analysis reads these files and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, SCHEMA, Record, encoded, end_of, sha256_of_first
from asyncsgd.records.locks import lock

FLUSH_SECONDS = 0.5
FULL_SECONDS = 5.0
"""How long a record may wait to be written, and how long it waits for space on a full disk before the run ends."""
RUNS = Path("runs")
"""Where runs get their folders unless ``--runs-dir`` says otherwise."""
LAST_MODEL = "model"
BEST_MODEL = "best_model"
DISCARDED = "events.discarded.jsonl"


def find_run(name: str | Path) -> Path:
    """The folder of the run that a command names: by its path or name in ``runs/``, or else the beginning of one, if
    no other run begins so; ``last`` is the run in ``runs/`` that was written to last.

    Raises:
        UsageError: if no run begins so, or several.
    """
    path = Path(name)
    if path.is_dir():
        return path
    parent = RUNS if path.parent == Path() else path.parent
    runs = sorted(parent.glob(f"*/{EVENTS}"), key=lambda events: events.stat().st_mtime)
    if not runs:
        raise UsageError(f"{name} is no folder, and there is no run in {parent}/ yet")
    if str(name) == "last":
        return runs[-1].parent
    found = [events.parent for events in runs if events.parent.name.startswith(path.name)]
    if parent / path.name in found:
        return parent / path.name
    if len(found) == 1:
        return found[0]
    begin_so = f"these runs begin so: {', '.join(map(str, found))}; type more of one"
    raise UsageError(f"{name} is no folder, and {begin_so if found else f'no run in {parent}/ begins so'}")


class RunFolder:
    """Writes one run folder; owned by the process that holds the server (rank 0 in synchronous runs).

    A killed run loses the records of its last second at most: they are written at every evaluation, fault and
    membership change, and by a thread every `FLUSH_SECONDS`. All other files are renamed into place.

    Args:
        path: of a folder that holds no records worth keeping.
        events: what `own` has returned for `path`; None calls it here.
        task, better, loss_unit, sample_order: for the header, see docs/run_folder.md.
        resume: an `asyncsgd.core.checkpoints.Found` to go on from. The folder stays as it is until `go_on`. None: a new
            run.
        settings_yaml: what `go_on` writes into settings.yaml; None: nothing.
    """

    def __init__(
        self,
        path: Path,
        events: BinaryIO | None = None,
        *,
        task: str | None = None,
        better: Mapping[str, str] | None = None,
        sample_order: int | None = None,
        loss_unit: str = "nats",
        resume: Any = None,
        settings_yaml: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.resume = resume
        self.settings_yaml = settings_yaml
        self._events = own(self.path) if events is None else events
        self._sha256 = hashlib.sha256()
        """Of all records, those of before a checkpoint too."""
        self.is_taken_up = resume is None
        """Whether the folder is this start's: from then on it has no summary until this start writes one."""
        if resume is None:
            self._events.truncate(0)
            header = {"kind": "header", "schema": SCHEMA, "task": task, "better": dict(better or {})}
            header["loss_unit"] = loss_unit
            if sample_order is not None:
                header["sample_order"] = sample_order
            line = json.dumps(header).encode() + b"\n"
            self._events.write(line)
            self._sha256.update(line)
            self._events.flush()
        self._failure: OSError | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._flush_regularly, name="records", daemon=True).start()

    def go_on(self) -> int:
        """Take the run up at its checkpoint; how many arrivals after it are computed again.

        What a full disk can refuse comes first. A kill meanwhile loses no record; it may leave some in both files."""
        num_bytes = self.resume.checkpoint.events_bytes
        with open(self.path / EVENTS, "rb") as file:
            self._sha256 = sha256_of_first(file, num_bytes)
            rest = file.read()
        whole_lines = rest[: rest.rfind(b"\n") + 1]
        if whole_lines:
            discarded = self.path / DISCARDED
            with open(discarded, "ab") as file:
                file.write(whole_lines)
            sync(discarded)
        settings = self.path / "settings.yaml"
        partial = None if self.settings_yaml is None else _written_partial(settings, self.settings_yaml)
        self.resume.forget_later()
        self.is_taken_up = True
        # Before the settings, or a kill leaves a run of these settings that is DONE.
        (self.path / "summary.json").unlink(missing_ok=True)
        if partial is not None:
            os.replace(partial, settings)
        self._events.truncate(num_bytes)
        return whole_lines.count(b'"kind":"arrival"}\n')

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        """Write environment.json, or beside that of an earlier start ``environment.resumed-N.json``."""
        earlier = 0 if self.resume is None else len(list(self.path.glob("environment*.json")))
        write_json(self.path / f"environment{f'.resumed-{earlier}' if earlier else ''}.json", environment)

    def append(self, record: Record) -> None:
        """Append one record as one line.

        Raises:
            OSError: if this record, or one before it, cannot be written.
        """
        line = encoded(record)
        self._patiently(lambda: self._events.write(line))
        self._sha256.update(line)
        if record.kind != "arrival":
            self._patiently(self._events.flush)

    def flush(self) -> tuple[int, str]:
        """Write all records; the length of events.jsonl with them, and the sha256 of what it holds."""
        self._patiently(self._events.flush)
        return os.fstat(self._events.fileno()).st_size, self._sha256.hexdigest()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write all records, then the summary, which outlives a power cut only where they and the models do.

        Raises:
            OSError: if any of it cannot be written.
        """
        self.flush()
        folder = self.path
        events = folder / EVENTS
        sync(events)
        for model in (folder / LAST_MODEL, folder / BEST_MODEL):
            if model.exists():  # a run may keep no model
                sync(model)
                for path in model.rglob("*"):
                    sync(path)
        sync(folder)
        with contextlib.suppress(PermissionError):  # it may be a folder that this user cannot list
            sync(folder.absolute().parent)
        write_json(folder / "summary.json", {"schema": SCHEMA, **summary, **end_of(events)})
        sync(folder)

    def close(self) -> None:
        """Give the folder up, to be called when all else is in it; a second call does nothing."""
        self._closed.set()
        with contextlib.suppress(OSError):  # what cannot be written was said by `write_summary`
            self._events.close()

    def _patiently(self, write: Callable[[], object]) -> None:
        """Write, and try again for `FULL_SECONDS` where the disk is full: somebody may free some space."""
        end = time.monotonic() + FULL_SECONDS
        while self._failure is None:
            try:
                write()
                return
            except OSError as error:  # what could not be written is still in the buffer
                if error.errno != errno.ENOSPC or time.monotonic() >= end:
                    raise
                time.sleep(0.1)
        raise self._failure

    def _flush_regularly(self) -> None:
        with contextlib.suppress(ValueError):  # closed meanwhile
            try:
                while not self._closed.wait(FLUSH_SECONDS):
                    self._patiently(self._events.flush)
            except OSError as error:
                self._failure = error


def own(path: Path) -> BinaryIO:
    """Make `path` if it is not there, and own it until the returned file, its events.jsonl, is closed or this process
    ends. What the file holds stays as it is.

    Raises:
        UsageError: if a live run owns it.
    """
    while True:
        path.mkdir(parents=True, exist_ok=True)
        file = open(path / EVENTS, "ab")  # noqa: SIM115 - closed by the caller
        if not lock(file):
            file.close()
            raise UsageError(f"another run is at work in {path}; wait for it, or stop it, or name another folder")
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path / EVENTS)):
                return file
        file.close()  # its owner has renamed it after we opened it, so another folder is in its place now


def sync(path: Path) -> None:
    """Make what a file holds, or the names in a folder, outlive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems cannot do so with a folder
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON so that `path` holds either the old content or all of the new one.

    Non-finite numbers become null, since JSON has no name for them.
    """
    write_text(path, json_text(content) + "\n")


def json_text(content: Mapping[str, Any]) -> str:
    """The text of `write_json`, without the end of its last line."""
    plain = json.loads(json.dumps(content, default=dict), parse_constant=lambda name: None)
    return json.dumps(plain, indent=2)


def write_text(path: Path, content: str) -> None:
    """Write `content` so that `path` holds either the old content or all of the new one."""
    os.replace(_written_partial(path, content), path)


def _written_partial(path: Path, content: str) -> Path:
    """Write `content` into a file beside `path`, to be renamed."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    sync(partial)
    return partial
