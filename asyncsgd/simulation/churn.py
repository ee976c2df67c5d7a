"""Churn: workers that leave a run under virtual time and join it, at times that are written down beforehand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from asyncsgd.errors import UsageError
from asyncsgd.named_choices import Kind


@dataclasses.dataclass(frozen=True)
class Change:
    """`worker` leaves or joins when the virtual clock shows `seconds`, before anything that arrives then."""

    name: ClassVar[str]

    worker: int
    seconds: float

    def __post_init__(self) -> None:
        if self.worker < 0:
            raise ValueError(f"worker must be 0 or more, got {self.worker}")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds must be above 0, got {self.seconds:g}")

    def __str__(self) -> str:
        return f"{self.name}:worker={self.worker},seconds={self.seconds}"


class Leave(Change):
    """What the worker computes is lost, and its batches are handed out again."""

    name: ClassVar[str] = "leave"


class Join(Change):
    """A worker whose first change this is takes no part before it."""

    name: ClassVar[str] = "join"


_BY_NAME: Mapping[str, type[Change]] = {"leave": Leave, "join": Join}
_KIND = Kind("change", "changes", "--churn")


def parse_churn(text: str) -> tuple[Change, ...]:
    """The changes that ``leave:worker=1,seconds=20;join:worker=1,seconds=40`` means.

    >>> parse_churn("join:worker=1,seconds=4;leave:worker=0,seconds=2.5")
    (Join(worker=1, seconds=4.0), Leave(worker=0, seconds=2.5))

    Raises:
        UsageError: for what cannot be read.
    """
    return tuple(_KIND.read(part.strip(), _BY_NAME) for part in text.split(";") if part.strip())


def in_order(changes: Sequence[Change], num_workers: int) -> tuple[Change, ...]:
    """`changes` in the order of their times.

    >>> in_order(parse_churn("join:worker=1,seconds=4;leave:worker=0,seconds=2.5"), num_workers=2)
    (Leave(worker=0, seconds=2.5), Join(worker=1, seconds=4.0))

    Args:
        num_workers: N, workers 0 to N - 1.

    Raises:
        UsageError: for a worker that is not there, and one that leaves or joins twice in turn.
    """
    ordered = tuple(sorted(changes, key=lambda change: change.seconds))
    last: dict[int, Change] = {}
    for change in ordered:
        if change.worker >= num_workers:
            raise UsageError(f"churn: there is no worker {change.worker}; the workers are 0 to {num_workers - 1}")
        before = last.get(change.worker)
        if before is not None and type(before) is type(change):
            done = {"leave": "left", "join": "joined"}[change.name]
            raise UsageError(
                f"churn: worker {change.worker} has {done} at {before.seconds:g} already; leaving and joining take "
                f"turns"
            )
        last[change.worker] = change
    if all(absent_at_first(ordered, worker) for worker in range(num_workers)):
        raise UsageError("churn: nobody is there at the beginning; leave one of the workers out")
    return ordered


def absent_at_first(changes: Sequence[Change], worker: int) -> bool:
    """Whether `worker`'s first change is to join."""
    return next((isinstance(change, Join) for change in changes if change.worker == worker), False)
