"""What the scripts under ``experiments/published/`` share: flags and exit codes, runs on several cores, an interval, a
table beside the paper's numbers, a figure."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import numpy
import seaborn
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from analysis.report.tables.text import as_csv, markdown
from analysis.statistics.intervals import Interval, t_interval
from asyncsgd.errors import RunError, UsageError
from asyncsgd.runtime.launch import end_with_parent
from asyncsgd.scripts import base
from asyncsgd.signals import StopRequest

Task = TypeVar("Task")
Done = TypeVar("Done")

COLOURS = seaborn.color_palette("colorblind")
"""Ten colours that stay apart for most colour-blind readers; one per method, the same in every panel of a script."""


def interval(values: Sequence[float]) -> Interval:
    """The mean of `values`, one per seed, and its 95 % t interval. A run may have diverged: its loss is infinite.

    >>> f"{interval([1.0, math.inf]):.4g}"
    'inf [nan, nan]'

    Raises:
        ValueError: if there are none.
    """
    if numpy.isfinite(values).all():
        return t_interval(values)
    end = math.nan if len(values) > 1 else None  # nan is not drawn
    return Interval(float(numpy.mean(values)), end, end, 0.95, len(values))


def write_table(folder: Path, name: str, headings: Sequence[str], rows: Sequence[Sequence[object]], note: str) -> str:
    """Write ``NAME.csv`` and ``NAME.md`` into `folder` and return the Markdown text, with `note` under the table."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [[f"{cell:.4g}" if isinstance(cell, Interval) else cell for cell in row] for row in rows]
    (folder / f"{name}.csv").write_text(as_csv([headings, *rows]), encoding="utf-8", newline="\r\n")
    lines = markdown([headings, *(list(map(str, row)) for row in rows)], [False] * len(headings))
    text = "\n".join([*lines, "", note, ""])
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return text


@contextmanager
def picture(path: Path, columns: int = 1, *, title: str = "", small_print: str = "") -> Iterator[list[Axes]]:
    """Give `columns` axes side by side to draw on; on the way out the figure is saved as a PNG at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(5.6 * columns, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for each in axes:
        each.grid(visible=True, alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    yield axes
    if title:
        figure.suptitle(title)
    if small_print:
        wrapped = "\n".join(textwrap.fill(line, 75 * columns) for line in small_print.splitlines())
        figure.supxlabel(wrapped, fontsize=8, color="0.35")
    figure.savefig(path)


def draw_curve(
    axes: Axes, x: Sequence[float], curves: Sequence[Sequence[float]], label: str, colour: object, style: str = "-"
) -> None:
    """Draw over `x` the mean of `curves`, one per seed, and its 95 % interval as a band, from three seeds on."""
    ends = [interval(column) for column in zip(*curves, strict=True)]
    axes.plot(x, [end.estimate for end in ends], style, label=label, color=colour, linewidth=1.6)
    if len(curves) > 2:  # with two, Student's t makes it nine standard deviations wide to either side
        low, high = numpy.array([(end.low, end.high) for end in ends]).T
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


# ---------------------------------------------------------------------------------------------------------------------
# The command line


def script_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """The flags that all the scripts have; `name` is the folder below ``runs/published``."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smaller set-up, in under a minute")
    parser.add_argument("--out", type=Path, default=Path("runs/published") / name, help="folder (default %(default)s)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the script's own)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default %(default)s)")
    return parser


def run_script(
    run: Callable[[argparse.Namespace], None], parser: argparse.ArgumentParser, argv: list[str] | None
) -> int:
    """Read the flags and run; return the exit code."""

    def checked(argv: list[str], stop: StopRequest) -> int:
        arguments = parser.parse_args(argv)
        for flag in ("seeds", "jobs"):
            value = getattr(arguments, flag)
            if value is not None and value < 1:
                raise UsageError(f"--{flag} must be 1 or more, got {value}")
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {arguments.out} cannot be made ({error.strerror}); type another folder") from error
        run(arguments)
        return 0

    return base.run_script(checked, argv)


def each(function: Callable[[Task], Done], tasks: Sequence[Task], jobs: int) -> Iterator[Done]:
    """Yield ``function(task)`` of every task, in order, computed by `jobs` processes; by this one if `jobs` is 1.

    `function` is a function of the script's module, and tasks and results can be pickled.
    """
    if jobs == 1:
        yield from map(function, tasks)
        return
    for library in ("OPENBLAS", "MKL", "OMP"):  # else numpy and torch start a thread per core in every process
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin_process) as pool:
        # Not `pool.map`: it cancels what has not begun, and a pool whose processes end then dies with a traceback.
        futures = [pool.submit(function, task) for task in tasks]
        try:
            for future in futures:
                yield future.result()
        except BrokenProcessPool:
            raise RunError("a process died, perhaps for want of memory; type --jobs 1") from None
        except BaseException:
            for process in multiprocessing.active_children():  # else the pool waits for the tasks that are running
                process.terminate()
            raise


def _begin_process() -> None:
    end_with_parent()  # every process of a pool holds both ends of its queue, so that none would see its end
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process; one of them is to speak of it


def progress(message: str) -> None:
    """One line per finished arm, at once."""
    print(message, file=sys.stderr, flush=True)
