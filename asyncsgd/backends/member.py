"""The side of a host that follows rank 0: `asyncsgd.backends.hosts` is the other side, and says what the two send."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from asyncsgd.backends import mirror
from asyncsgd.backends.copies import ListedFolder, found_here, receive
from asyncsgd.backends.host import SignsOfLife, ThisHost, name_of_address, own_address, versions
from asyncsgd.backends.link import Alive, Begin, Gone, Hello, Lacking, Prepared, Refused, Stop
from asyncsgd.backends.pair import Pair
from asyncsgd.errors import RunError


class Member:
    """The part of another host than that of rank 0 in a run, taken by the first rank of that host.

    Args:
        this_host: the host of this process.
        token, interface, signs: as in `Hosts`.
        hardware: the hardware of this host.
    """

    def __init__(
        self, this_host: ThisHost, token: bytes, interface: str | None, signs: SignsOfLife, hardware: dict[str, Any]
    ) -> None:
        self.this_host = this_host
        self._signs = signs
        address = own_address(interface, this_host.leader)
        self.rendezvous = this_host.rendezvous(address, token)
        self.rendezvous.open().set(name_of_address(this_host.number), address)
        self._link = signs.through(Pair(self.rendezvous, f"host{this_host.number}", serves=False))
        hello = Hello(socket.gethostname(), this_host.first_worker, this_host.num_workers, versions(), hardware)
        self._link.send(hello)

    def wait_for_begin(self) -> Begin:
        """Wait for what rank 0 has prepared, and return it.

        Raises:
            RunError: if rank 0 is gone, or refuses this host.
        """
        try:
            message = self._link.receive()
        except Gone as gone:
            raise RunError(f"rank 0 on {self.this_host.leader} does not begin: {gone}") from gone
        if isinstance(message, Begin):
            return message
        if isinstance(message, Refused):
            raise RunError(message.reason)
        raise RunError(f"rank 0 on {self.this_host.leader} has stopped before the run began")

    def fetch_folders(
        self, folders: Sequence[ListedFolder], cache: Path, tell: Callable[[str], None]
    ) -> dict[str, str]:
        """Find folders of rank 0 on this host, and receive those that it lacks into `cache`.

        Args:
            tell: says a line to the user.

        Returns:
            The paths on this host, by the paths on the host of rank 0.

        Raises:
            RunError: if rank 0 is gone, or a file was changed or damaged on its way.
            UsageError: if the cache folder cannot be written.
        """
        places = {}
        lacking = []
        for number, folder in enumerate(folders):
            here = found_here(folder, cache)
            if here is None:
                lacking.append(number)
            else:
                places[folder.path] = here
        if not lacking:
            return places
        take = functools.partial(self._link.until_given_up, self._link.receive_vector)
        try:
            self._link.send(Lacking(tuple(lacking)))
            for number in lacking:
                folder = folders[number]
                size = f"{len(folder.files)} files, {folder.num_bytes / 1e6:.1f} MB"
                tell(f"host {self.this_host.number}: receives {Path(folder.path).name} from rank 0 ({size})")
                places[folder.path] = receive(folder, cache, take)
        except Gone as gone:
            raise RunError(f"rank 0 on {self.this_host.leader} does not begin: {gone}") from gone
        return places

    def answer(self, message: Prepared | Refused | Stop) -> None:
        """Send rank 0 an answer, and wait until it is sent. Nothing happens if rank 0 is gone."""
        with contextlib.suppress(Gone):
            self._link.send(message)
            self._link.until_given_up(self._link.flush)

    def mirror(self) -> Pair:
        """The pair with rank 0 through which copies of checkpoints come."""
        return self._signs.through(Pair(self.rendezvous, mirror.PAIR, serves=False))

    def stay(self, left: Callable[[], str], how_it_ended: Callable[[int, float], str | None]) -> bool:
        """Tell rank 0 which workers have ended, and return when it lets this host go; whether the run is done.

        Args:
            left: says what is left of the run if rank 0 is lost.
            how_it_ended: that of the host's `ChildProcesses`. Gloo does not always notice that a worker has ended.

        Raises:
            RunError: if rank 0 is lost.
        """
        ended: tuple[tuple[int, str], ...] = ()
        while True:
            try:
                # Those that had ended at the sign before: their last messages have come by now.
                self._link.send(Alive(ended))
                ended = self._ended(how_it_ended)
                if wait([self._link.fileno()], self._signs.interval):
                    last_word = self._link.receive()
                    self.answer(Stop())
                    return isinstance(last_word, Stop)
            except Gone as gone:
                raise RunError(
                    f"rank 0 on {self.this_host.leader} is lost ({gone}), and with it the run; {left()}"
                ) from gone

    def _ended(self, how_it_ended: Callable[[int, float], str | None]) -> tuple[tuple[int, str], ...]:
        ended = []
        for worker in self.this_host.workers:
            how = how_it_ended(worker, 0.0)
            if how is not None:
                ended.append((worker, how))
        return tuple(ended)
