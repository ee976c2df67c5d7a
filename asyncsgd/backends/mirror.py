"""A mirror: another host that keeps a copy of each checkpoint, since the host of rank 0 may be lost with its disk.

The two have a pair for it, beside all others:

    rank 0                      mirror
    Copy            ->                     a checkpoint is durable; the parts of files follow as vectors
                    <-          CopyDone   so is its copy; or Refused, with the reason

Of events.jsonl only what is new is sent, up to the end that the checkpoint names. All other files are sent whole and
renamed into place, the description of the checkpoint as the last. So a run goes on from the mirror's folder at any
time, from the newest checkpoint that has come whole."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from asyncsgd.backends.copies import received_part, send_part
from asyncsgd.backends.link import Copy, CopyDone, Gone, PartOfFile, Refused
from asyncsgd.backends.pair import Pair
from asyncsgd.core.checkpoints import FOLDER, Checkpoint
from asyncsgd.errors import RunError, reason
from asyncsgd.records.events import EVENTS
from asyncsgd.records.run_folder import sync

PAIR = "mirror"
"""The name of the pair."""
_NAMES = re.compile(rf"settings\.yaml|environment(\.resumed-\d+)?\.json|events\.jsonl|{FOLDER}/\d{{12}}\.(pt|json)")
"""The names of the files in a run folder from which the run goes on."""


class Sender:
    """The end of the pair at rank 0, which sends copies of checkpoints.

    Args:
        link: the end of the pair.
        host: the number of the mirror.
        folder: the run folder.
        tell: says a line to the user.
    """

    def __init__(self, link: Pair, host: int, folder: Path, tell: Callable[[str], None]) -> None:
        self._link = link
        self._host = host
        self._folder = folder
        self._tell = tell
        self._events_bytes = 0
        """The mirror has so many bytes of events.jsonl."""
        self._is_lost = False

    def send(self, checkpoint: Checkpoint) -> None:
        """Have a durable checkpoint copied, and wait until its copy is durable. If that fails, the user is told and the
        run goes on."""
        if self._is_lost:
            return
        failure = None
        try:
            answer = self._send_parts(checkpoint)
            if isinstance(answer, Refused):
                failure = answer.reason
        except Gone as gone:
            self._is_lost = True
            failure = f"{gone}; no more copies are made"
        except (OSError, RunError) as error:
            self._is_lost = True
            self._link.give_up("rank 0 could not read a file of the run")
            failure = f"{error}; no more copies are made"
        if failure is not None:
            self._tell(f"host {self._host} has no copy of checkpoint {checkpoint.name} ({failure}); the run goes on")

    def _send_parts(self, checkpoint: Checkpoint) -> object:
        """Send a checkpoint, and return the mirror's answer."""
        parts = list(self._parts(checkpoint))
        kept = sorted(path.stem for path in (self._folder / FOLDER).glob("[0-9]*.json"))
        self._link.send(Copy(checkpoint.name, tuple(parts), tuple(kept)))
        for part in parts:
            send_part(self._folder / part.name, part.first, part.num_bytes, self._link.deliver)
        answer = self._link.receive()
        if isinstance(answer, CopyDone):
            self._events_bytes = checkpoint.events_bytes
        return answer

    def _parts(self, checkpoint: Checkpoint) -> Iterator[PartOfFile]:
        environments = sorted(path.name for path in self._folder.glob("environment*.json"))
        for name in ["settings.yaml", *environments]:
            yield self._whole(name)
        yield PartOfFile(EVENTS, self._events_bytes, checkpoint.events_bytes - self._events_bytes)
        for suffix in ("pt", "json"):  # in this order, so that no description is there before its state
            yield self._whole(f"{FOLDER}/{checkpoint.name}.{suffix}")

    def _whole(self, name: str) -> PartOfFile:
        return PartOfFile(name, 0, (self._folder / name).stat().st_size)


class Keeper:
    """The end of the pair at the mirror, which writes the copies.

    Args:
        link: the end of the pair.
        folder: the folder for the copies.
        events: the open events.jsonl of this folder; who holds it owns the folder.
    """

    def __init__(self, link: Pair, folder: Path, events: BinaryIO) -> None:
        self.folder = folder
        self._link = link
        self._events = events
        self.last: str | None = None
        """The name of the newest checkpoint that has a copy here."""
        self._thread = threading.Thread(target=self.keep, name="mirror", daemon=True)

    def start(self) -> None:
        """Start a thread that keeps copies."""
        self._thread.start()

    def wait(self) -> None:
        """Wait for the copies that are still to come: until rank 0 is gone."""
        self._thread.join()

    def keep(self) -> None:
        """Write copies until rank 0 is gone, or sends something else than a copy."""
        with contextlib.suppress(Gone):
            while isinstance(copy := self._link.receive(), Copy):
                failure = self._write(copy)
                self._link.send(CopyDone() if failure is None else Refused(failure))

    def _write(self, copy: Copy) -> str | None:
        """Receive the parts of a copy and write them. Return why the copy is not whole; None: it is."""
        failure = None
        for part in copy.parts:
            pieces = received_part(part.num_bytes, self._link.receive_vector)
            if failure is None:
                failure = self._write_part(part, pieces)
            for _ in pieces:
                pass  # what is not written has to be received all the same
        if failure is None:
            self.last = copy.name
            self._remove_all_but(copy.kept)
        return failure

    def _write_part(self, part: PartOfFile, pieces: Iterator[bytes]) -> str | None:
        """Write a part. Return why it cannot be written; None: it is."""
        if _NAMES.fullmatch(part.name) is None:
            return f"no run has a file called {part.name!r}"
        try:
            if part.name == EVENTS:
                return self._append(part.first, pieces)
            self._write_whole(self.folder / part.name, pieces)
        except OSError as error:
            return f"{error.filename or self.folder}: {reason(error)}"
        return None

    def _append(self, first: int, pieces: Iterator[bytes]) -> str | None:
        """Write records from byte `first` on. Return why they do not belong there; None: they are written."""
        events = self._events
        num_bytes = os.fstat(events.fileno()).st_size
        if num_bytes < first:
            return f"{self.folder / EVENTS} has {num_bytes} bytes, and what came belongs behind byte {first}"
        events.truncate(first)
        for piece in pieces:
            events.write(piece)
        events.flush()
        os.fsync(events.fileno())
        return None

    def _write_whole(self, path: Path, pieces: Iterator[bytes]) -> None:
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync(path.parent)

    def _remove_all_but(self, kept: tuple[str, ...]) -> None:
        for suffix in ("json", "pt"):
            for path in (self.folder / FOLDER).glob(f"*.{suffix}"):
                if path.stem not in kept:
                    with contextlib.suppress(OSError):  # an old one that stays harms nobody, and rank 0 waits
                        path.unlink()
