"""The commands that a worker was sent and has not carried out; used by both transports that have workers."""

from __future__ import annotations

import collections

from asyncsgd.runtime.transport.messages import Command, Compute, Stop


class Backlog:
    """Commands for one worker, oldest first. Of several requests for a gradient only the last is kept.

    Whoever asks for another gradient has abandoned the one before. So a worker that stands still never has more to do
    than what is still wanted. Not locked: the caller sees to it that one thread at a time is in here.

    >>> backlog = Backlog()
    >>> for dispatch in range(1000):
    ...     backlog.put(Compute(dispatch, ()))
    >>> len(backlog), backlog.take().dispatch
    (1, 999)
    """

    def __init__(self) -> None:
        self._commands: collections.deque[Command] = collections.deque()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: Command) -> None:
        """Add `command` behind the others; `Compute` and `Stop` take the place of every `Compute` before them."""
        if isinstance(command, Compute | Stop):
            self._commands = collections.deque(c for c in self._commands if not isinstance(c, Compute))
        self._commands.append(command)

    def take(self) -> Command:
        """Remove and return the oldest command.

        Raises:
            IndexError: if there is none.
        """
        return self._commands.popleft()

    @property
    def abandons(self) -> bool:
        """Whether a command is here that abandons the gradient being computed."""
        return any(isinstance(command, Compute | Stop) for command in self._commands)

    @property
    def stops(self) -> bool:
        """Whether the last command is here."""
        return bool(self._commands) and isinstance(self._commands[-1], Stop)
