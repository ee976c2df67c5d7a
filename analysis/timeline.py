"""``python -m analysis timeline RUN``: who did what when, a row for each worker and one for the server.

Writes ``timeline.json`` (Chrome trace format: open it in ui.perfetto.dev or chrome://tracing) and ``timeline.png``,
a window of two seconds from the middle of the run, into the run folder. Times are seconds of the training clock,
which stands still during evaluations; an evaluation is a mark, with its seconds in the trace's arguments. In mode
sync there is no server: its row shows the ranks' common step, and their compute holds the waiting in the all-reduce.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from analysis.commands import begun
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_events
from asyncsgd.records.run_folder import find_run

COLOURS = {"compute": "#029e73", "wait": "#dddddd", "pull": "#0173b2", "push": "#de8f05", "apply": "#cc78bc"}
"""Of seaborn's colour-blind-safe palette, and a light grey for waiting."""
SERVER = "server"


class Span(NamedTuple):
    """What one row does from `start` on, for `seconds`; seconds of the training clock."""

    row: str
    kind: str
    start: float
    seconds: float
    arguments: dict[str, Any]


def spans_of(records: Iterable[dict[str, Any]]) -> Iterator[Span]:
    """The spans of a log. A worker's are laid backwards from its arrival: push, compute, pull, and the wait before."""
    for record in records:
        if record["kind"] == "evaluate":
            arguments = {"version": record["version"], "loss": record["loss"], "eval_seconds": record["eval_seconds"]}
            yield Span(SERVER, "evaluate", record["train_seconds"], 0.0, arguments)
        if record["kind"] != "arrival":
            continue
        worker = f"worker {record['worker']}"
        arguments = {name: record[name] for name in ("dispatch", "read_version", "version", "arrival_delay", "outcome")}
        end = record["train_seconds"] - record["apply_seconds"]
        yield Span(SERVER, "apply", end, record["apply_seconds"], arguments)
        for kind in ("push", "compute", "pull", "wait"):
            seconds = record[f"{kind}_seconds"]
            end -= seconds
            if seconds > 0:
                yield Span(worker, kind, end, seconds, arguments)


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans in Chrome's trace format, in microseconds, one thread per row."""
    rows: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for span in spans:
        thread = rows.setdefault(span.row, len(rows))
        event = {"name": span.kind, "pid": 0, "tid": thread, "ts": 1e6 * span.start, "args": span.arguments}
        instant = span.kind == "evaluate"
        events.append(event | ({"ph": "i", "s": "g"} if instant else {"ph": "X", "dur": 1e6 * span.seconds}))
    names = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": thread, "args": {"name": row}}
        for row, thread in rows.items()
    ]
    return {"traceEvents": names + events, "displayTimeUnit": "ms"}


def draw(spans: list[Span], begin: float, seconds: float, path: Path) -> None:
    """Save a picture of the window [begin, begin + seconds]."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = sorted({span.row for span in spans if span.row != SERVER}, key=lambda row: int(row.split()[1]))
    rows.append(SERVER)
    figure = Figure(figsize=(10, 0.55 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    inside = [span for span in spans if span.start < begin + seconds and span.start + span.seconds > begin]
    for kind, colour in COLOURS.items():
        for place, row in enumerate(rows):
            bars = [(span.start, span.seconds) for span in inside if span.kind == kind and span.row == row]
            axes.broken_barh(bars, (place - 0.4, 0.8), facecolors=colour, edgecolor="white", linewidth=0.3)
    axes.set(xlim=(begin, begin + seconds), xlabel="training seconds", yticks=range(len(rows)), yticklabels=rows)
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
    try:
        spans = list(spans_of(read_events(run / "events.jsonl")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{run} holds no event log that can be read: {error}") from error
    if all(span.kind == "evaluate" for span in spans):
        raise UsageError(f"{run} has no arrival: nothing to draw")
    last = max(span.start + span.seconds for span in spans)
    if begin is None:
        begin = max(0.0, (last - seconds) / 2)
    if not 0 <= begin < last:
        raise UsageError(f"--begin {begin:g} is outside the run, which trained for {last:.1f} seconds")
    (run / "timeline.json").write_text(json.dumps(chrome_trace(spans)), encoding="utf-8")
    draw(spans, begin, min(seconds, last), run / "timeline.png")
    print(f"{run / 'timeline.json'}\n{run / 'timeline.png'}")


def main(argv: Sequence[str] | None = None) -> int:
    flags: dict[str, dict[str, Any]] = {
        "run": {"metavar": "RUN", "help": "a run folder, the beginning of its name in runs/, or last"},
        "--seconds": {"type": float, "default": 2.0, "help": "length of the picture's window (default 2)"},
        "--begin": {"type": float, "help": "its beginning, in training seconds (default: the middle)"},
    }
    return begun(write, __doc__, argv, flags)


if __name__ == "__main__":
    sys.exit(main())
