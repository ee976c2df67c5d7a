"""``python -m analysis timeline RUN``: who did what when, a row for each worker and one for the server.

Writes ``timeline.json`` (Chrome trace format: open it in ui.perfetto.dev or chrome://tracing) and ``timeline.png``,
a window of two seconds from the middle of the run, into the run folder. Times are seconds of the training clock,
which stands still during evaluations; an evaluation is a mark, with its seconds in the trace's arguments. In mode
sync there is no server: its row shows the ranks' common step, and their compute holds the waiting in the all-reduce.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from analysis.commands import run_command
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_events
from asyncsgd.records.run_folder import find_run

COLOURS = {"compute": "#029e73", "wait": "#dddddd", "pull": "#0173b2", "push": "#de8f05", "apply": "#cc78bc"}
"""Colours of seaborn's palette for the colour-blind, and a light grey for waiting."""
SERVER = "server"


class Span(NamedTuple):
    """What one row does from `start` on, for `seconds`; seconds of the training clock."""

    row: str
    kind: str
    start: float
    seconds: float
    arguments: dict[str, Any]


def spans_of(records: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """The spans of a log; those of a worker lie backwards from an arrival: push, compute, pull, and the wait."""
    for record in records:
        if record["kind"] == "evaluate":
            arguments = {"version": record["version"], "loss": record["loss"], "eval_seconds": record["eval_seconds"]}
            yield Span(SERVER, "evaluate", record["train_seconds"], 0.0, arguments)
        if record["kind"] != "arrival":
            continue
        worker = f"worker {record['worker']:d}"
        arguments = {name: record[name] for name in ("dispatch", "read_version", "version", "arrival_delay", "outcome")}
        end = record["train_seconds"] - record["apply_seconds"]
        yield Span(SERVER, "apply", end, record["apply_seconds"], arguments)
        for kind in ("push", "compute", "pull", "wait"):
            seconds = record[f"{kind}_seconds"]
            end -= seconds
            if seconds > 0:
                yield Span(worker, kind, end, seconds, arguments)


@dataclasses.dataclass
class TraceSummary:
    """What is kept of the spans while they are written: all spans of a log may be more than memory holds."""

    rows: dict[str, int] = dataclasses.field(default_factory=dict)
    """Name of a row -> its number in the trace."""
    end: float = 0.0
    """Where the last span ends, in seconds of the training clock."""
    has_arrival: bool = False


def write_trace(spans: Iterable[Span], file: BinaryIO) -> TraceSummary:
    """Write the spans in Chrome's trace format, in microseconds, one thread per row."""
    encode = msgspec.json.Encoder().encode
    found = TraceSummary()
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
    for span in spans:
        thread = found.rows.setdefault(span.row, len(found.rows))
        event = {"name": span.kind, "pid": 0, "tid": thread, "ts": 1e6 * span.start, "args": span.arguments}
        if span.kind == "evaluate":
            event |= {"ph": "i", "s": "g"}
        else:
            event |= {"ph": "X", "dur": 1e6 * span.seconds}
            found.has_arrival = True
        found.end = max(found.end, span.start + span.seconds)
        file.write(encode(event) + b",\n")
    names = []
    for row, thread in found.rows.items():
        names.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": row}})
    file.write(encode(names)[1:-1] + b"]}\n")  # the items alone: the list was opened above
    return found


def draw(rows: Iterable[str], spans: Iterable[Span], begin: float, seconds: float, path: Path) -> None:
    """Save a picture of the window [begin, begin + seconds]."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    workers = sorted((row for row in rows if row != SERVER), key=lambda row: int(row.split()[1]))
    shown = [*workers, SERVER]
    figure = Figure(figsize=(10, 0.55 * len(shown) + 1.2), layout="constrained")
    axes = figure.subplots()
    inside = [span for span in spans if span.start < begin + seconds and span.start + span.seconds > begin]
    for kind, colour in COLOURS.items():
        for row_number, row in enumerate(shown):
            bars = [(span.start, span.seconds) for span in inside if span.kind == kind and span.row == row]
            axes.broken_barh(bars, (row_number - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set(xlim=(begin, begin + seconds), xlabel="training seconds", yticks=range(len(shown)), yticklabels=shown)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(facecolor=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, ncols=len(handles), loc="outside upper center", frameon=False)
    figure.savefig(path, dpi=150)


def write(run: str | Path, seconds: float, begin: float | None) -> None:
    """Write the trace and the picture of a run into its folder.

    Args:
        seconds: length of the picture's window.
        begin: its beginning, in training seconds; None: it lies in the middle of the run.
    """
    run = find_run(run)
    if seconds <= 0:
        raise UsageError(f"--seconds must be more than 0, got {seconds:g}")
    events = run / EVENTS
    trace = run / "timeline.json"
    partial = trace.with_name(f"{trace.name}.partial")
    try:
        summary = _read(events, partial)
        if not summary.has_arrival:
            raise UsageError(f"{run} has no arrival: nothing to draw")
        if begin is None:
            begin = max(0.0, (summary.end - seconds) / 2)
        if not 0 <= begin < summary.end:
            raise UsageError(f"--begin {begin:g} is outside the run, which trained for {summary.end:.1f} seconds")
        draw(summary.rows, spans_of(read_events(events)), begin, min(seconds, summary.end), run / "timeline.png")
        os.replace(partial, trace)
    finally:
        partial.unlink(missing_ok=True)
    print(f"{trace}\n{run / 'timeline.png'}")


def _read(events: Path, trace: Path) -> TraceSummary:
    with open(trace, "wb") as file:
        try:
            return write_trace(spans_of(read_events(events)), file)
        except FileNotFoundError as error:
            raise UsageError(f"{events.parent} holds no run: it has no {events.name}; name a run's folder") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{events.parent} holds no event log that can be read: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(
        write,
        __doc__,
        argv,
        {
            "run": {"metavar": "RUN", "help": "a run folder, the beginning of its name in runs/, or last"},
            "--seconds": {"type": float, "default": 2.0, "help": "length of the picture's window (default 2)"},
            "--begin": {"type": float, "help": "its beginning, in training seconds (default: the middle)"},
        },
    )


if __name__ == "__main__":
    sys.exit(main())
