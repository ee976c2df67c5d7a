"""What a run shows while it goes on and keeps in ``console.log``, and the one object through which its records go."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from asyncsgd.records.best_effort import BestEffort, say
from asyncsgd.records.events import STOPPED, Evaluation, Event, Fault, Membership, Parts, Record, RuleActed
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.totals import Totals

HEADINGS = f"{'samples':>10} {'updates':>9} {'train_s':>9} {'eval_loss':>10} {'samples/s':>10}   delay p50/p95/max"
LOG = "console.log"


def teller(folder: RunFolder | None, show: Callable[[str], None] = say) -> Callable[[str], None]:
    """What says a line to the user and adds it to the folder's ``console.log``, where that can be written."""

    def tell(line: str) -> None:
        show(line)
        if folder is not None:
            path = folder.path / LOG
            with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(line + "\n")

    return tell


def shown_metrics(metrics: Mapping[str, float | None]) -> str:
    """Names and values, for the console; a dash where there is no finite one.

    >>> shown_metrics({"accuracy": 0.1234, "perplexity": 456.71, "loss": math.inf, "pearson": None})
    'accuracy 0.123   perplexity 456.7   loss -   pearson -'
    """

    def shown(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return "-"
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"

    return "   ".join(f"{name} {shown(value)}" for name, value in metrics.items())


class Recorder:
    """The one object through which every record of a run goes, in order: to its folder, its totals, the user and other
    receivers. On a terminal a bar runs on stderr.

    Args:
        folder: keeps records and lines; None: nothing is written.
        samples: the budget; None: there is no bar.
        quiet: whether the user is told nothing.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        samples: int | None,
        *,
        quiet: bool = False,
        receivers: Sequence[Callable[[Record], None]] = (),
    ) -> None:
        self.folder = folder
        self.totals = Totals()
        self.quiet = quiet
        self.rule_acted: RuleActed | None = None
        """Of the server, which counts in it; None where there is no server."""
        self._sinks: list[Callable[[Record], None]] = []
        if folder is not None:
            self._sinks.append(folder.append)
        self._sinks.append(self.totals)
        if not quiet:
            self._sinks.append(self._show)
        self._sinks += receivers
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a run that ends by os._exit would leave
        hidden = quiet or not samples or None  # None: unless it is a terminal
        self._bar = tqdm(total=samples, file=BestEffort(sys.stderr), unit="sample", leave=False, disable=hidden)
        self._tell = teller(folder, self._say)
        if not quiet:
            self._tell(HEADINGS)

    def _say(self, line: str) -> None:
        self._bar.clear()
        say(line)

    def __call__(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)

    def _show(self, record: Record) -> None:
        if isinstance(record, Event):
            self._bar.update(record.num_samples)
        elif isinstance(record, Evaluation):
            seconds = record.train_seconds
            delay = self.totals.delays.summary()
            rate = f"{record.total_samples / seconds:.0f}" if seconds > 0 else "-"
            delays = "-" if delay["max"] is None else f"{delay['p50']} / {delay['p95']} / {delay['max']}"
            loss = f"{record.loss:>10.4f}" if record.loss >= 0.1 else f"{record.loss:>10.3e}"
            self._tell(f"{record.total_samples:>10} {record.version:>9} {seconds:>9.1f} {loss} {rate:>10}   {delays}")
        elif isinstance(record, Membership) and record.reason not in ("", STOPPED):
            self._tell(f"worker {record.worker} is lost: {record.reason}; the others go on")
        elif isinstance(record, Parts):
            self._tell(f"memory a batch is computed in {record.micro_batches} parts, {record.before} before")
        elif isinstance(record, Fault):
            self._tell(f"fault: {record.message}")

    def close(self) -> None:
        self._bar.close()
