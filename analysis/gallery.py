"""The pictures of a study, each with a short name; the page, `--figures` and `Study.plot` draw the same ones."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.figure import Figure
from pandas import DataFrame

from analysis import plots, tables
from analysis.forest import MAX_ROWS, draw_forest
from analysis.questions import BASELINE, conditions, labels
from analysis.runs import with_labels
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_events

if TYPE_CHECKING:
    from analysis.load import Study

KINDS = ("forest", "loss", "reached", "against")


class Picture(NamedTuple):
    """A figure with its texts."""

    name: str
    """The name of its file, and its id on the page."""
    title: str
    figure: Figure
    caption: str
    about: str
    """What it shows, in a sentence with numbers, for readers who cannot see it."""


def draw_picture(
    name: str,
    title: str,
    caption: str,
    draw: Callable[..., str],
    *arguments: Any,
    size: tuple[float, float] = (4.9, 3.1),
    **options: Any,
) -> Picture:
    """A picture with one pair of axes and its legend.

    Args:
        draw: a function of `plots`, which is called with the axes, `arguments` and `options`.
    """
    figure, (axes,) = plots.figure(*size)
    about = draw(axes, *arguments, **options)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7.5, labelcolor=plots.MUTED)
    return Picture(name, title, figure, caption, about)


def groups_of(study: Study) -> list[str]:
    """The names of the groups of arms, in the order of their comparisons."""
    groups = study.arms["group"]
    compared = study.tests["group"]
    # a comparison may have a group of its own, which is no group of arms
    of_arms = compared[compared.isin(groups)]
    return list(dict.fromkeys([*of_arms, *groups]))


def forest(study: Study) -> Iterator[Picture]:
    """All comparisons: how many times sooner a treatment is, and how much lower its loss."""
    tests = study.tests[(study.tests["n"] > 0) & (study.tests["reference"] != BASELINE)]
    if not len(tests):
        return
    pairs = len(tests[["treatment", "reference"]].drop_duplicates())
    figure, axes = plots.figure(4.9, 0.9 + 0.27 * min(pairs, MAX_ROWS), columns=2)
    about = draw_forest(tests, labels(study.arms), axes)
    caption = "Bars: what the test does not reject."
    if (tests["family"] == "primary").any():
        caption = f"Squares in colour: registered; grey: not. {caption}"
    if tests.loc[tests["endpoint"].str.startswith("loss"), "margin"].notna().any():
        caption += " Shaded: the margin."
    if pairs > MAX_ROWS:
        caption += f" The first {MAX_ROWS} of {pairs}."
    title = "Left of the dashed line the treatment is sooner, or its loss is lower"
    yield Picture("forest", title, figure, caption, about)


def loss_pictures(study: Study, group: str, number: int) -> Iterator[Picture]:
    """Loss against seconds and samples of a group, which is the `number`-th of the page."""
    own = _of_group(study, group)
    if own.empty or not len(study.curves):
        return
    styles = plots.arm_styles(study.arms)
    names = _in_group(study, group)
    note = "Thin: one run; a cross: it diverged. Thick: the mean, with its 95 % t band."
    target = _target(study, group)
    if target is not None:
        note += " Dashed: the target."
    for x in ("seconds", "samples"):
        name = f"loss-{x}-{number}" if number else f"loss-{x}"
        title = f"Loss against {x}"
        caption = f"{conditions(group)}. {note}"
        yield draw_picture(name, title, caption, plots.loss, own, study.curves, styles, names, x, target=target)


def _in_group(study: Study, group: str) -> dict[str, str]:
    """The labels of a group's arms, without what all of them share: the title of the picture says that."""
    return labels(study.arms[study.arms["group"] == group])


def target_pictures(study: Study) -> Iterator[Picture]:
    """The share of runs at the target against seconds, a picture for each group."""
    styles = plots.arm_styles(study.arms)
    for number, group in enumerate(groups_of(study)):
        own = _of_group(study, group)
        target = _target(study, group)
        if target is None or own["arm"].nunique() < 2:
            continue
        names = _in_group(study, group)
        title = f"Runs at the target: {conditions(group)}"
        yield draw_picture(f"reached-{number}", title, "", plots.reached, own, study.curves, styles, names, target)


def scatter_pictures(study: Study) -> Iterator[Picture]:
    """Throughput against workers, loss against delay, seconds and tuned learning rates, and counts of delays."""
    styles = plots.arm_styles(study.arms)
    used = tables.tested(study.runs)
    alive = used[~used["diverged"]]
    for clock, of_clock in alive.groupby("clock"):
        for suffix, task, own in _by_task(of_clock):
            for x, y in (("workers", "samples_per_second"), ("delay_p95", "loss"), ("seconds", "loss")):
                varies = (own.groupby("algorithm")[x].nunique() > 1).any()
                if varies and _one_machine(own, (x, y)):
                    name = f"{y}-{x}-{clock}{suffix}".replace("_", "-")
                    title = f"{y} against {x}, {clock} clock".replace("_", " ") + task
                    yield draw_picture(name, title, "", plots.against, own, styles, x, y, log=x == "workers")
    # without a plan, tuning alone has no arms
    is_tried = (study.runs["stage"] == "tuning") & study.runs["arm"].isin(study.arms.index)
    for suffix, task, tried in _by_task(study.runs[is_tried & study.runs["loss"].notna()]):
        if tried["learning_rate"].nunique() > 1:
            title = f"loss against learning rate{task}"
            yield draw_picture(
                f"rates{suffix}", title, "", plots.against, tried, styles, "learning_rate", "loss", log=True
            )
    for number, group in enumerate(groups_of(study)):
        counts = _delays_of(_of_group(study, group))
        if counts:
            yield draw_picture(f"delays-{number}", f"Delays: {conditions(group)}", "", plots.delays, counts, styles)


def confusion_pictures(study: Study) -> Iterator[Picture]:
    """The confusion matrix of every arm that was fine-tuned."""
    tuned = with_labels(study.runs)
    for number, arm in enumerate(tuned["arm"].unique()):
        counts = tables.confusion(study.runs, arm)
        if counts is not None:
            size = 1.2 + 0.6 * len(counts)
            yield draw_picture(f"confusion-{number}", arm, "", plots.heat, counts, size=(size, size))


def everything(study: Study) -> Iterator[Picture]:
    """All pictures of a study."""
    yield from forest(study)
    for number, group in enumerate(groups_of(study)):
        yield from loss_pictures(study, group, number)
    yield from target_pictures(study)
    yield from scatter_pictures(study)
    yield from confusion_pictures(study)


def save(study: Study, folder: Path) -> list[str]:
    """Write every picture into a folder as PDF and SVG; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for picture in everything(study):
        plots.save(picture.figure, folder / picture.name)
        names.append(picture.name)
    return names


def plot(study: Study, kind: str, **options: Any) -> Figure:
    """One picture by its kind.

    Raises:
        UsageError: if there is no such kind, or nothing to draw.
    """
    if kind not in KINDS:
        raise UsageError(f"there is no plot {kind!r}; there are: {', '.join(KINDS)}")
    if kind == "forest":
        for picture in forest(study):
            return picture.figure
        raise UsageError("there is no comparison to draw; draw the runs of one arm: plot('loss')")
    styles = plots.arm_styles(study.arms)
    if kind == "against":
        used = tables.tested(study.runs)
        return draw_picture(kind, "", "", plots.against, used[~used["diverged"]], styles, **options).figure
    groups = groups_of(study)
    if not groups:
        raise UsageError("there is no test run to draw")
    group = groups[0]
    options.setdefault("target", _target(study, group))
    if kind == "reached" and options["target"] is None:
        raise UsageError("no target was declared; name one: plot('reached', target=5.0)")
    draw = plots.loss if kind == "loss" else plots.reached
    own = _of_group(study, group)
    return draw_picture(kind, "", "", draw, own, study.curves, styles, labels(study.arms), **options).figure


def _of_group(study: Study, group: str) -> Any:
    used = tables.tested(study.runs)
    return used[used["arm"].isin(study.arms.index[study.arms["group"] == group])]


def _target(study: Study, group: str) -> float | None:
    """The target of the first arm of a group that has one."""
    for arm, loss in study.plan.targets.items():
        if arm in study.arms.index and study.arms.loc[arm, "group"] == group:
            return loss
    return None


def _delays_of(runs: Any) -> dict[str, Counter[int]]:
    """Arm -> delay in updates -> how many gradients were applied with it; without arms that have none above 0."""
    found: dict[str, Counter[int]] = {}
    for run in runs.itertuples():
        counts = found.setdefault(run.arm, Counter())
        with contextlib.suppress(OSError, ValueError):  # a log may be torn; what was read before that counts
            for record in read_events(run.path / EVENTS):
                for _, delay in record.get("uses") or ():
                    counts[delay] += 1
    return {arm: counts for arm, counts in found.items() if any(counts)}


def _by_task(runs: DataFrame) -> Iterator[tuple[str, str, DataFrame]]:
    """The runs of each task, since the losses of two tasks have no common axis. In front of them stands what the name
    and the title of a picture end with, which is empty where there is one task.
    """
    tasks = runs["task"].unique()
    if len(tasks) < 2:
        yield "", "", runs
        return
    for number, task in enumerate(tasks):
        yield f"-{number}", f", {task or 'task not known'}", runs[runs["task"] == task]


def _one_machine(runs: Any, axes: tuple[str, str]) -> bool:
    """Whether measured seconds may share a picture: they are of one machine, and it is known."""
    is_measured = (runs["clock"] == "measured").all()
    if not is_measured or not {"seconds", "samples_per_second"} & {*axes}:
        return True
    return runs["machine"].nunique() == 1 and bool((runs["machine"] != "").all())
