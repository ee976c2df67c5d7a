"""What a run shows while it goes on and keeps in ``console.log``, and the one object through which its records go."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from asyncsgd.records.events import Evaluation, Event, Fault, Membership, Parts, Record, RuleActed
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.records.totals import Totals

HEADINGS = f"{'samples':>10} {'updates':>9} {'train_s':>9} {'eval_loss':>10} {'samples/s':>10}   delay p50/p95/max"


LOG = "console.log"


class BestEffort:
    """A stream whose text is shown where it can be: no reader that has gone away (``| head``), full disk, closed
    terminal or character that its encoding lacks ends a run.

    After a text that could not be written none is shown any more.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = _nowhere() if stream is None else stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "backslashreplace").decode())
        except (OSError, ValueError):
            self._give_up()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        # What the stream holds back would be refused again at the end of the process, with an exit code of its own.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        self._stream = _nowhere()


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


@contextlib.contextmanager
def best_effort() -> Iterator[None]:
    """Within it whatever this process prints is `BestEffort`."""
    out: Any = BestEffort(sys.stdout)
    err: Any = BestEffort(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()


def say(line: str, out: TextIO | None = None) -> None:
    """Print a line at once, as well as can be; see `BestEffort`."""
    shown = BestEffort(sys.stdout if out is None else out)
    shown.write(line + "\n")
    shown.flush()


def keep(line: str, folder: RunFolder | None) -> None:
    """Add a line to the folder's ``console.log``. What cannot be written is not: the records say the same."""
    if folder is not None:
        path = folder.path / LOG
        with contextlib.suppress(OSError), open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(line + "\n")


def teller(folder: RunFolder | None) -> Callable[[str], None]:
    """What says a line to the user and keeps it in the folder; None: it only says it."""

    def tell(line: str) -> None:
        say(line)
        keep(line, folder)

    return tell


def shown_metrics(metrics: Mapping[str, float]) -> str:
    """Names and values, for the console.

    >>> shown_metrics({"accuracy": 0.1234, "perplexity": 456.71})
    'accuracy 0.123   perplexity 456.7'
    >>> shown_metrics({"perplexity": math.inf})
    'perplexity -'
    """
    return "   ".join(f"{name} {_shown(value)}" for name, value in metrics.items())


def _shown(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


class Console:
    """Tells the user what happens; call it with each record, after `totals`.

    On a terminal a bar runs on stderr; the line per evaluation goes to stdout either way.

    Args:
        totals: of the same records.
        samples: the budget; None: there is no bar.
        folder: keeps the lines too; None: they are only shown.
    """

    def __init__(
        self, totals: Totals, samples: int | None, out: TextIO | None = None, folder: RunFolder | None = None
    ) -> None:
        self._totals, self._folder = totals, folder
        self._out = out or sys.stdout
        self._bar = None
        if samples and BestEffort(sys.stderr).isatty():
            from tqdm import tqdm

            stream = BestEffort(sys.stderr)
            self._bar = tqdm(total=samples, file=stream, unit="sample", leave=False, dynamic_ncols=True)
        self._say(HEADINGS)

    def __call__(self, record: Record) -> None:
        if isinstance(record, Event):
            if self._bar is not None:
                self._bar.update(record.num_samples)
        elif isinstance(record, Evaluation):
            self._evaluated(record)
        elif isinstance(record, Membership) and record.reason:
            self._say(f"worker {record.worker} is lost: {record.reason}; the others go on")
        elif isinstance(record, Parts):
            self._say(f"memory a batch is computed in {record.micro_batches} parts, {record.before} before")
        elif isinstance(record, Fault):
            self._say(f"fault: {record.message}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _evaluated(self, evaluation: Evaluation) -> None:
        seconds, delays = evaluation.train_seconds, self._totals.delays
        rate = f"{evaluation.total_samples / seconds:.0f}" if seconds > 0 else "-"
        delay = "-"
        if delays.number:
            delay = f"{delays.quantile(0.5)} / {delays.quantile(0.95)} / {delays.quantile(1.0)}"
        counts = f"{evaluation.total_samples:>10} {evaluation.version:>9}"
        loss = f"{evaluation.loss:>10.4f}" if evaluation.loss >= 0.1 else f"{evaluation.loss:>10.3e}"
        self._say(f"{counts} {seconds:>9.1f} {loss} {rate:>10}   {delay}")

    def _say(self, line: str) -> None:
        if self._bar is not None:
            self._bar.write(line, file=BestEffort(self._out))
        else:
            say(line, self._out)
        keep(line, self._folder)


class Recorder:
    """The one object through which every record of a run goes, in order: to its folder, its totals, the console and
    other receivers.

    Args:
        folder: None: nothing is written.
        samples: the budget, for the console.
        quiet: whether the user is told nothing.
        receivers: called with each record after the others.
        micro_batches: the parts of a batch that the run begins with.
    """

    def __init__(
        self,
        folder: RunFolder | None,
        samples: int | None,
        *,
        quiet: bool = False,
        receivers: Sequence[Callable[[Record], None]] = (),
        out: TextIO | None = None,
        micro_batches: int = 1,
    ) -> None:
        self.folder, self.totals, self.quiet = folder, Totals(), quiet
        self.totals.micro_batches = micro_batches
        self.rule_acted: RuleActed | None = None
        """Of the server, which counts in it; None where there is no server."""
        self._console = None if quiet else Console(self.totals, samples, out, folder)
        console = [] if self._console is None else [self._console]
        written = [] if folder is None else [folder.append]
        self._sinks: list[Callable[[Record], None]] = [*written, self.totals, *console, *receivers]

    def __call__(self, record: Record) -> None:
        for sink in self._sinks:
            sink(record)

    def close(self) -> None:
        if self._console is not None:
            self._console.close()
