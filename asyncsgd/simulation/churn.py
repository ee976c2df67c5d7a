"""Churn: workers that leave a run under virtual time and join it, at times that are written down beforehand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from asyncsgd.errors import UsageError
from asyncsgd.settings.choices import Choices, Named, parameter


@dataclasses.dataclass(frozen=True)
class Change(Named):
    """`worker` leaves or joins when the virtual clock shows `seconds`, before anything that arrives then."""

    worker: int = parameter(at_least=0)
    seconds: float = parameter(above=0)


class Leave(Change):
    """A worker leaves. What it computes is lost, and its batches are handed out again.

    Args:
        worker: its number, from 0.
        seconds: on the virtual clock, above 0; it leaves before anything that arrives then.
    """


class Join(Change):
    """A worker joins, for the first time or again. One whose first change this is takes no part before it.

    Args:
        worker: its number, from 0.
        seconds: on the virtual clock, above 0; it joins before anything that arrives then.
    """


_CHOICES = Choices[Change]("change", "changes", "--churn", {"leave": Leave, "join": Join})


def parse_churn(text: str) -> tuple[Change, ...]:
    """The changes that ``leave:worker=1,seconds=20;join:worker=1,seconds=40`` means.

    >>> parse_churn("join:worker=1,seconds=4;leave:worker=0,seconds=2.5")
    (Join(worker=1, seconds=4.0), Leave(worker=0, seconds=2.5))

    Raises:
        UsageError: for what cannot be read.
    """
    parts = map(str.strip, text.split(";"))
    return tuple(_CHOICES.read(part) for part in parts if part)


def in_order(changes: Sequence[Change], num_workers: int) -> tuple[Change, ...]:
    """`changes` of workers 0 to `num_workers` - 1 in the order of their times.

    Raises:
        UsageError: for a worker that is not there, and one that leaves or joins twice in turn.
    """
    ordered = tuple(sorted(changes, key=lambda change: change.seconds))
    last: dict[int, Change] = {}
    for change in ordered:
        if change.worker >= num_workers:
            raise UsageError(f"churn: there is no worker {change.worker}; the workers are 0 to {num_workers - 1}")
        before = last.get(change.worker)
        if type(before) is type(change):
            raise UsageError(f"churn: {before}, then {change}; leaving and joining take turns")
        last[change.worker] = change
    if all(absent_at_first(ordered, worker) for worker in range(num_workers)):
        raise UsageError("churn: nobody is there at the beginning; leave one of the workers out")
    return ordered


def absent_at_first(changes: Sequence[Change], worker: int) -> bool:
    """Whether the first change of a worker is that it joins."""
    for change in changes:
        if change.worker == worker:
            return isinstance(change, Join)
    return False
