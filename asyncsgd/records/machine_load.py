"""What else used the machine while a run trained, from Linux's ``/proc``. Standard library only.

The summary of a run on the measured clock says

    {"cores": 4, "own_share": 0.71, "others_share": 0.02, "stolen_share": 0.0}

where each share is a part of the time that all cores of the machine had from the end of the run's first evaluation to
the end of its last one. Only the leader's host is looked at."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from asyncsgd.records.events import Evaluation, Record, Resumed


@dataclasses.dataclass(frozen=True)
class Look:
    """The clock ticks of all cores since the machine started; None of it is known without ``/proc/stat``."""

    cores: int
    total: int
    busy: int
    stolen: int
    """By other machines on the same hardware."""
    own: int
    """Of the processes of the run, also of those that have ended."""

    @classmethod
    def of(cls, stat: str, own: int) -> Look:
        """
        Args:
            stat: the text of ``/proc/stat``.

        >>> Look.of("cpu  40 5 20 300 10 2 3 20 40 5\\ncpu0 0\\ncpu1 0\\nintr 7\\n", own=31)
        Look(cores=2, total=400, busy=70, stolen=20, own=31)
        """
        rows = [line.split() for line in stat.splitlines() if line.startswith("cpu")]
        ticks = [int(number) for number in rows[0][1:9]]  # the two that follow, of guests, are a part of user and nice
        user, nice, system, _idle, _waiting, irq, softirq, stolen = ticks
        return cls(len(rows) - 1, sum(ticks), user + nice + system + irq + softirq, stolen, own)

    @classmethod
    def now(cls, root: int, proc: Path = Path("/proc")) -> Look | None:
        """This moment; None where the system does not tell.

        Args:
            root: the process that all processes of the run descend from, itself among them.
        """
        try:
            return cls.of((proc / "stat").read_text(encoding="ascii"), ticks_of_tree(root, _stats(proc)))
        except (OSError, ValueError, IndexError):
            return None

    def load_until(self, later: Look) -> dict[str, float] | None:
        """What the machine's cores did between this look and `later`; None where no time has passed.

        >>> before, after = Look(2, 1000, 400, 10, 200), Look(2, 1400, 700, 30, 360)
        >>> before.load_until(after)
        {'cores': 2, 'own_share': 0.4, 'others_share': 0.35, 'stolen_share': 0.05}
        """
        total = later.total - self.total
        if total <= 0:
            return None
        # The ticks of the machine and of a process are counted in different ways, so their difference may be below 0.
        own, busy = min(total, later.own - self.own), later.busy - self.busy
        return {
            "cores": later.cores,
            "own_share": own / total,
            "others_share": max(0, busy - own) / total,
            "stolen_share": (later.stolen - self.stolen) / total,
        }


def ticks_of_tree(root: int, stats: Iterable[str]) -> int:
    """The clock ticks of process `root` and all that descend from it, with those that have ended.

    Args:
        stats: the texts of ``/proc/PID/stat`` of all processes. Each has the ticks of its own and of its children that
            have ended.

    >>> row = "{} (a) b) S {} 0 0 0 0 0 0 0 0 0 {} {} {} {} 20"
    >>> ticks_of_tree(7, [row.format(1, 0, 9, 9, 9, 9), row.format(7, 1, 1, 2, 3, 4), row.format(8, 7, 10, 20, 0, 0)])
    40
    """
    ticks, children = {}, defaultdict(list)
    for stat in stats:
        pid = int(stat.split(maxsplit=1)[0])
        fields = stat.rpartition(")")[2].split()  # its name, in brackets, may hold anything
        ticks[pid] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(pid)
    tree = [root]
    for pid in tree:
        tree += children[pid]
    return sum(ticks.get(pid, 0) for pid in tree)


def _stats(proc: Path) -> Iterator[str]:
    for folder in proc.iterdir():
        if folder.name.isdigit():
            try:
                yield (folder / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                continue  # it has ended meanwhile


class MachineLoad:
    """Looks at the machine at every evaluation, when nobody trains. Call it with each record of the run.

    Args:
        root: see `Look.now`.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._first: Look | None = None
        self._last: Look | None = None
        self._resumed = False

    def __call__(self, record: Record) -> None:
        self._resumed |= isinstance(record, Resumed)
        if isinstance(record, Evaluation):
            self._last = Look.now(self._root)
            self._first = self._first or self._last

    def summary(self) -> dict[str, float] | None:
        """For the summary. None where it is not known: not on Linux, in a run without training, or resumed."""
        if self._first is None or self._last is None or self._resumed:
            return None
        return self._first.load_until(self._last)
