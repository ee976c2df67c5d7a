"""What the scripts of this folder share: arms on seeds, an interval, a table, a picture, and the flags."""

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
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import pandas
import seaborn
from matplotlib import pyplot
from scipy import stats

from analysis.stats import Interval, t_interval
from asyncsgd.backends.launch import end_with_parent
from asyncsgd.core.limits import Limits
from asyncsgd.core.optimizers import OptimizerRecipe
from asyncsgd.rules import Rule
from asyncsgd.scripts import base
from asyncsgd.simulation.instance import Array, Instance
from asyncsgd.simulation.simulate import Simulation, simulate
from asyncsgd.simulation.speeds import Sampler, Speeds

Done = TypeVar("Done")
Flags: TypeAlias = argparse.Namespace


@dataclasses.dataclass(frozen=True)
class Fixed(Speeds):
    """Every gradient of worker i takes ``seconds[i]``."""

    seconds: tuple[float, ...]

    def draw(self, generator: np.random.Generator, n: int, worker: int) -> float:
        return self.seconds[worker]


class Position:
    """A problem in one dimension, of which an evaluation gives x itself instead of f(x) - f*."""

    def loss(self, x: Array) -> float:
        return float(x[0])


@dataclasses.dataclass(frozen=True)
class Arm:
    """A rule with its learning rate, on ``problem(workers, seed)`` under ``speeds(workers, seed)``."""

    name: str
    rule: Rule
    learning_rate: float | Callable[[int], float]
    problem: Callable[[int, int], Instance]
    speeds: Callable[[int, int], Sampler]
    workers: int
    budget: Limits
    evaluations: int = 1
    panel: str = ""
    inner: OptimizerRecipe | None = None

    def simulated(self, seed: int, **watch: Any) -> Simulation:
        """The run on `seed`; `watch` are further arguments of `simulate`, which look on."""
        return simulate(
            self.rule,
            self.problem(self.workers, seed),
            self.speeds(self.workers, seed),
            num_workers=self.workers,
            learning_rate=self.learning_rate,
            budget=self.budget,
            evaluations=self.evaluations,
            inner=self.inner,
            **watch,
        )


def curve(arm: Arm, seed: int) -> pandas.DataFrame:
    """One row for each evaluation; the last loss of a run that diverged is infinite."""
    done = arm.simulated(seed)
    rows = [(look.train_seconds, look.total_samples, look.version, look.loss) for look in done.evaluations]
    table = pandas.DataFrame(rows, columns=["seconds", "samples", "updates", "loss"])
    if done.result.status != "DONE":
        table.loc[table.index[-1], "loss"] = math.inf
    return table.assign(arm=arm.name, panel=arm.panel, seed=seed, look=table.index)


def run(arms: Sequence[Arm], seeds: Sequence[int], jobs: int) -> pandas.DataFrame:
    """The curves of all arms on all seeds, in this order."""
    tasks = list(itertools.product(arms, seeds))
    return pandas.concat(each(curve, tasks, jobs), ignore_index=True)


def of(curves: pandas.DataFrame, arm: Arm) -> pandas.DataFrame:
    """The rows of one arm."""
    return curves[(curves.arm == arm.name) & (curves.panel == arm.panel)]


def each(function: Callable[..., Done], tasks: Sequence[tuple[Any, ...]], jobs: int) -> Iterator[Done]:
    """Yield ``function(*task)`` of every task, in order, by `jobs` processes; by this one if `jobs` is 1."""
    if jobs == 1:
        yield from itertools.starmap(function, tasks)
        return
    for library in ("OPENBLAS", "MKL", "OMP"):  # else numpy and torch start a thread per core in every process
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context, initializer=_begin_process) as pool:
        try:
            futures = [pool.submit(function, *task) for task in tasks]
            for number, future in enumerate(futures, start=1):
                yield future.result()
                print(f"{number} of {len(tasks)} runs done", file=sys.stderr, flush=True)
        except BaseException:
            for process in multiprocessing.active_children():  # else the pool waits for the tasks that are running
                process.terminate()
            raise


def _begin_process() -> None:
    end_with_parent()  # every process of a pool holds both ends of its queue, so that none would see its end
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches every process; one of them is to speak of it


def interval(values: Sequence[float] | pandas.Series) -> Interval:
    """The mean of `values`, one per seed, and its 95 % t interval. A run may have diverged: its loss is infinite.

    >>> f"{interval([1.0, math.inf]):.4g}", f"{interval([1.0, 1.0]):.4g}"
    ('inf', '1 [1, 1]')
    """
    student = t_interval(np.asarray(values))
    if not np.isfinite(values).all():
        return student._replace(estimate=math.inf, low=math.nan, high=math.nan)
    if len(values) > 1 and np.ptp(values) == 0.0:
        return student._replace(low=student.estimate, high=student.estimate)
    return student


def write(folder: Path, name: str, rows: Sequence[Mapping[str, object]], note: str) -> None:
    """Write ``NAME.csv`` and ``NAME.md``, with `note` under the table, and print the latter."""
    header: list[object] = list(rows[0])
    table = [header]
    for row in rows:
        table.append([f"{cell:.4g}" if isinstance(cell, Interval) else cell for cell in row.values()])
    csv_path = folder / f"{name}.csv"
    with csv_path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(table)
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in table]
    lines.insert(1, "|" + "---|" * len(header))
    text = "\n".join([*lines, "", note, ""])
    markdown_path = folder / f"{name}.md"
    markdown_path.write_text(text, encoding="utf-8")
    print(text, markdown_path, csv_path, sep="\n")


def in_words(number: int, noun: str) -> str:
    """
    >>> in_words(1, "seed"), in_words(2, "seed")
    ('1 seed', '2 seeds')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def starred(rate: float, rates: Sequence[float]) -> str:
    """A learning rate, with a star at the edge of its grid."""
    is_at_edge = rate in (rates[0], rates[-1])
    return f"{rate:.3g}*" if is_at_edge else f"{rate:.3g}"


def tidy(panel: str, arm: str, kind: str, values: Any) -> pandas.DataFrame:
    """Rows of (panel, arm, kind, seed, x, y) from `values`: a row of them for each seed, a column for each x."""
    by_seed = pandas.DataFrame(values).rename_axis("seed")
    rows = by_seed.melt(ignore_index=False, var_name="x", value_name="y").reset_index()
    return rows.assign(panel=panel, arm=arm, kind=kind)


def picture(path: Path, table: pandas.DataFrame, note: str, axes: Mapping[str, dict[str, Any]], **call: Any) -> None:
    """A panel for each value of `panel`: the mean over `seed` and, from three on, its 95 % interval by Student's t.

    Args:
        axes: what `Axes.set` takes, by panel; "" for all of them.
        call: arguments of `seaborn.relplot`.
    """
    table = table.replace(math.inf, math.nan).reset_index(drop=True)
    num_seeds = table.groupby("panel").seed.nunique().max()
    band = None
    if num_seeds > 2:  # with two, t makes it nine standard deviations to either side
        quantile = float(stats.t.ppf(0.975, num_seeds - 1))
        band = ("se", quantile)
    look: dict[str, Any] = {"kind": "line", "hue": "arm", "palette": "colorblind", "col": "panel", "errorbar": band}
    grid = seaborn.relplot(table, height=4.2, facet_kws={"sharex": False, "sharey": False}, **look | call)
    grid.set_titles("{col_name}")
    for name, panel in grid.axes_dict.items():
        options = axes.get("", {}) | axes.get(name, {})
        panel.set(**options)
        panel.grid(visible=True, alpha=0.25)
    grid.tight_layout()
    wrapped = textwrap.fill(note, 180)
    grid.figure.supxlabel(wrapped, y=-0.08, fontsize=8, color="0.35")
    grid.savefig(path, dpi=140)
    pyplot.close(grid.figure)
    print(path)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError(text)  # argparse says: invalid positive value
    return int(text)


def main(
    make: Callable[[Flags], None],
    name: str,
    description: str | None,
    argv: list[str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] = {},
) -> NoReturn:
    """Read the flags that all scripts have and the script's own `flags`, call `make`, and exit."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="the smaller set-up, in under a minute")
    parser.add_argument("--out", type=Path, default=Path("runs/published") / name, help="folder (default %(default)s)")
    parser.add_argument("--seeds", type=positive, help="number of seeds (default: the script's own)")
    parser.add_argument("--jobs", type=positive, default=2, help="processes (default %(default)s)")
    for flag, how in flags.items():
        parser.add_argument(flag, **how)

    def carry_out(argv: list[str], stop: object) -> int:
        arguments = parser.parse_args(argv)
        arguments.out.mkdir(parents=True, exist_ok=True)
        make(arguments)
        return 0

    sys.exit(base.run_script(carry_out, argv))
