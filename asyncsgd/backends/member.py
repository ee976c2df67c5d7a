"""The first rank of another host than that of rank 0; see `asyncsgd.backends.hosts` for what the two say."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from asyncsgd.backends import mirror
from asyncsgd.backends.copies import ListedFolder, found_here, receive
from asyncsgd.backends.host import Host, Signs, name_of_address, own_address, versions
from asyncsgd.backends.link import Alive, Begin, Gone, Hello, Lacking, Prepared, Refused, Stop
from asyncsgd.backends.pair import Pair
from asyncsgd.core.awake import awake
from asyncsgd.core.limits import POLL_SECONDS
from asyncsgd.errors import RunError


class Member:
    """Another host than that of rank 0, in its first rank.

    Args:
        place: of this process.
        token, interface, signs: as of `Hosts`.
        hardware: of this host.
    """

    def __init__(
        self, place: Host, token: bytes, interface: str | None, signs: Signs, hardware: dict[str, Any]
    ) -> None:
        self.place = place
        self._signs = signs
        address = own_address(interface, place.leader)
        self.meeting = place.meeting(address, token)
        self.meeting.open().set(name_of_address(place.number), address)
        self._link = Pair(self.meeting, f"host{place.number}", serves=False)
        hello = Hello(socket.gethostname(), place.first, place.num_workers, versions(), hardware)
        self._link.send(hello)

    def told(self) -> Begin:
        """Wait for what rank 0 has prepared.

        Raises:
            RunError: if it is gone, or refuses this host.
        """
        try:
            message = self._link.receive()
        except Gone as gone:
            raise RunError(f"rank 0 on {self.place.leader} does not begin: {gone}") from gone
        if isinstance(message, Begin):
            return message
        if isinstance(message, Refused):
            raise RunError(message.reason)
        raise RunError(f"rank 0 on {self.place.leader} has stopped before the run began")

    def places_of(self, folders: Sequence[ListedFolder], cache: Path, tell: Callable[[str], None]) -> dict[str, str]:
        """Where this host has folders of rank 0, by their paths there; what it lacks it receives into `cache`.

        Args:
            tell: says a line to the user.

        Raises:
            RunError: if rank 0 is gone, or a file comes otherwise than it is there.
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
        try:
            self._link.send(Lacking(tuple(lacking)))
            for number in lacking:
                folder = folders[number]
                size = f"{len(folder.files)} files, {folder.num_bytes / 1e6:.1f} MB"
                tell(f"host {self.place.number}: receives {Path(folder.path).name} from rank 0 ({size})")
                places[folder.path] = receive(folder, cache, self._link.receive_vector)
        except Gone as gone:
            raise RunError(f"rank 0 on {self.place.leader} does not begin: {gone}") from gone
        return places

    def answer(self, message: Prepared | Refused | Stop) -> None:
        with contextlib.suppress(Gone):
            self._link.send(message)
            self._link.flush()

    def mirror(self) -> Pair:
        """The pair with rank 0 through which copies of checkpoints come."""
        return Pair(self.meeting, mirror.PAIR, serves=False)

    def stay(self, left: Callable[[], str]) -> None:
        """Return when rank 0 lets this host go.

        Args:
            left: says what is left of the run where rank 0 is lost.

        Raises:
            RunError: if rank 0 is lost.
        """
        heard = awake()
        said = 0.0
        while True:
            try:
                if awake() - said > self._signs.between:
                    self._link.send(Alive())
                    said = awake()
                if wait([self._link.fileno()], POLL_SECONDS):
                    if isinstance(self._link.receive(), Stop):
                        self.answer(Stop())
                        return
                    heard = awake()
            except Gone as gone:
                raise RunError(self._lost(str(gone), left())) from gone
            if awake() - heard > self._signs.deadline:
                raise RunError(self._lost(f"no sign of life for {self._signs.deadline:g} s", left()))

    def _lost(self, reason: str, left: str) -> str:
        return f"rank 0 on {self.place.leader} is lost ({reason}), and with it the run; {left}"
