"""What the scripts of this folder share: arms on seeds, an interval, a table beside the paper's numbers, a picture,
flags and exit codes."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import math
import multiprocessing
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy
import pandas
import seaborn
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy import stats

from analysis.stats import Interval, t_interval
from asyncsgd.errors import RunError, UsageError
from asyncsgd.rules.base import Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.launch import end_with_parent
from asyncsgd.scripts import base
from asyncsgd.simulation.instance import Instance
from asyncsgd.simulation.sampler import Sampler
from asyncsgd.simulation.simulate import simulate

Task = TypeVar("Task")
Done = TypeVar("Done")

COLOURS = seaborn.color_palette("colorblind")
"""Ten colours that stay apart for most colour-blind readers."""


def fixed_times(seconds: Sequence[float]) -> Sampler:
    """The same seconds for every gradient of a worker."""
    return Sampler(len(seconds), lambda worker, block: seconds[worker])


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rule with its learning rate, on ``problem(workers, seed)`` under ``speeds(workers, seed)``."""

    name: str
    rule: Rule
    learning_rate: float | Callable[[int], float]
    problem: Callable[[int, int], Instance]
    speeds: Callable[[int, int], Sampler]
    workers: int
    budget: Budget
    evaluations: int
    panel: str = ""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Other arguments of `simulate`."""


def curve(arm: Arm, seed: int) -> pandas.DataFrame:
    """One row for each evaluation; the last loss of a run that diverged is infinite."""
    done = simulate(
        arm.rule,
        arm.problem(arm.workers, seed),
        arm.speeds(arm.workers, seed),
        num_workers=arm.workers,
        learning_rate=arm.learning_rate,
        budget=arm.budget,
        evaluations=arm.evaluations,
        **arm.more,
    )
    rows = [(look.train_seconds, look.total_samples, look.version, look.loss) for look in done.evaluations]
    table = pandas.DataFrame(rows, columns=["seconds", "samples", "updates", "loss"])
    if done.result.status != "DONE":
        table.loc[table.index[-1], "loss"] = math.inf
    return table.assign(arm=arm.name, panel=arm.panel, seed=seed, look=table.index)


def _curve(task: tuple[Arm, int]) -> pandas.DataFrame:
    return curve(*task)


def run(arms: Sequence[Arm], seeds: Sequence[int], jobs: int) -> pandas.DataFrame:
    """The curves of all arms on all seeds, in this order."""
    return pandas.concat(each(_curve, list(itertools.product(arms, seeds)), jobs), ignore_index=True)


def each(function: Callable[[Task], Done], tasks: Sequence[Task], jobs: int) -> Iterator[Done]:
    """Yield ``function(task)`` of every task, in order, computed by `jobs` processes; by this one if `jobs` is 1.

    `function` is a function of the script's module, and tasks and results can be pickled.
    """
    if jobs == 1:
        yield from map(function, _counted(tasks))
        return
    for library in ("OPENBLAS", "MKL", "OMP"):  # else numpy and torch start a thread per core in every process
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin_process) as pool:
        # Not `pool.map`: it cancels what has not begun, and a pool whose processes end then dies with a traceback.
        futures = [pool.submit(function, task) for task in tasks]
        try:
            for future in _counted(futures):
                yield future.result()
        except BrokenProcessPool:
            raise RunError("a process died, perhaps for want of memory; type --jobs 1") from None
        except BaseException:
            for process in multiprocessing.active_children():  # else the pool waits for the tasks that are running
                process.terminate()
            raise


def _counted(whole: Sequence[Task]) -> Iterator[Task]:
    for number, one in enumerate(whole, start=1):
        yield one
        print(f"{number} of {len(whole)} runs done", file=sys.stderr, flush=True)


def _begin_process() -> None:
    end_with_parent()  # every process of a pool holds both ends of its queue, so that none would see its end
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process; one of them is to speak of it


def interval(values: Sequence[float]) -> Interval:
    """The mean of `values`, one per seed, and its 95 % t interval. A run may have diverged: its loss is infinite.

    >>> f"{interval([1.0, math.inf]):.4g}"
    'inf'
    """
    if numpy.isfinite(values).all() and (len(values) < 2 or numpy.ptp(values) > 0):
        return t_interval(values)
    mean = float(numpy.mean(values))
    end = mean if math.isfinite(mean) else math.nan
    return Interval(mean, end, end, 0.95, len(values))


def write(folder: Path, name: str, rows: Sequence[Mapping[str, object]], note: str) -> None:
    """Write ``NAME.csv`` and ``NAME.md``, with `note` under the table, and print the latter."""
    cells = [[f"{cell:.4g}" if isinstance(cell, Interval) else cell for cell in row.values()] for row in rows]
    with (folder / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([list(rows[0]), *cells])
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (rows[0], *cells)]
    text = "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:], "", note, ""])
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(text, folder / f"{name}.md", folder / f"{name}.csv", sep="\n")


@contextmanager
def picture(path: Path, columns: int, title: str, small_print: str) -> Iterator[list[Axes]]:
    """Give `columns` axes side by side to draw on; on the way out the figure is saved as a PNG at `path`."""
    figure = Figure(figsize=(5.6 * columns, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(1, columns, column + 1) for column in range(columns)]
    for each_of in axes:
        each_of.grid(visible=True, alpha=0.25)
        each_of.spines[["top", "right"]].set_visible(False)
    yield axes
    figure.suptitle(title)
    wrapped = "\n".join(textwrap.fill(line, 75 * columns) for line in small_print.splitlines())
    figure.supxlabel(wrapped, fontsize=8, color="0.35")
    figure.savefig(path)
    print(path)


def draw(axes: Axes, curves: pandas.DataFrame, x: str, **labels: Any) -> None:
    """The mean loss of every arm and, from three seeds on, its 95 % interval by Student's t as a band."""
    seeds = curves.seed.nunique()  # with two, Student's t makes it nine standard deviations wide to either side
    band = ("se", float(stats.t.ppf(0.975, seeds - 1))) if seeds > 2 else None
    finite = curves[numpy.isfinite(curves.loss)]
    seaborn.lineplot(
        finite, x=x, y="loss", hue="arm", style="arm", palette="colorblind", errorbar=band, legend="brief", ax=axes
    )
    axes.set(**labels)
    axes.legend(frameon=False, fontsize=8)


def run_script(
    make: Callable[[argparse.Namespace], None],
    name: str,
    description: str | None,
    argv: list[str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> int:
    """Read the flags that all scripts have and the script's own `flags`, call `make`, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=description, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the smaller set-up, in under a minute")
    parser.add_argument("--out", type=Path, default=Path("runs/published") / name, help="folder (default %(default)s)")
    parser.add_argument("--seeds", type=int, help="number of seeds (default: the script's own)")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes (default %(default)s)")
    for flag, how in (flags or {}).items():
        parser.add_argument(flag, **how)

    def checked(argv: list[str], stop: object) -> int:
        arguments = parser.parse_args(argv)
        for flag in ("seeds", "jobs"):
            value = getattr(arguments, flag)
            if value is not None and value < 1:
                raise UsageError(f"--{flag} must be 1 or more, got {value}")
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {arguments.out} cannot be made ({error.strerror}); type another folder") from error
        make(arguments)
        return 0

    return base.run_script(checked, argv)
