"""The pictures of `analysis.compare`: evaluation loss against training seconds and against samples, by condition."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from analysis.findings.curves import curve_panel
from analysis.report.figures.loss_curves import loss_curves
from analysis.report.figures.pictures import DASHES, Entry, Picture, looks, save_all
from analysis.study.run import Condition, Run, labels, loss_label
from analysis.study.types import StudyRun


def save_figures(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Save `pictures` as PNG and SVG; the paths written, in order, and none if there is nothing to draw.

    Raises:
        UsageError: if they cannot be written there.
    """
    made = [(picture, textwrap.fill(picture.caption, 80)) for picture in pictures(runs)]
    return save_all(made, folder, "--out") if made else []


def pictures(runs: Iterable[Run]) -> list[Picture]:
    """loss_vs_seconds and loss_vs_samples, a pair per evaluation set; loss_vs_virtual_seconds where a clock is virtual.

    Losses on different data never share axes; with several evaluation sets the names end in them. Runs without one, or
    without an evaluation that could be drawn, are left out (see `undrawn`). Only runs with status DONE enter a mean.
    """
    by_data: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.name):
        if run.evaluation_set is not None and _drawable(run):
            by_data.setdefault(run.evaluation_set, []).append(run)
    made = []
    for evaluation_set, suffix in _suffixes(by_data).items():
        group = by_data[evaluation_set]
        names = labels(run.condition for run in group)
        entries = _entries(names)
        virtual, measured = [run for run in group if run.virtual], [run for run in group if not run.virtual]
        title = f"data {evaluation_set}" if suffix else ""
        for axis, x_label, drawn in (
            ("seconds", "training seconds", measured),
            ("seconds", "virtual seconds", virtual),
            ("samples", "samples", group),
        ):
            shown: dict[str, list[StudyRun]] = {name: [] for name in names.values()}
            for run in drawn:
                name = names[run.condition]
                shown[name].append(StudyRun(run.name, name, "test", run.summary.get("seed"), run=run))
            finished = {name: [run for run in of if run.run is not None and run.run.done] for name, of in shown.items()}
            panel = curve_panel(title, axis, x_label, loss_label(drawn), shown, finished)
            words = x_label.removeprefix("training ").replace(" ", "_")
            picture = None if panel is None else loss_curves(panel, entries, f"loss_vs_{words}{suffix}")
            if panel is not None and picture is not None:
                picture.figure.axes[0].set_ylabel(panel.y_label)  # whole: this picture has no page around it
                made.append(picture)
    return made


def undrawn(runs: Iterable[Run]) -> list[Run]:
    """The runs that are in no picture: without an evaluation set, or with no loss at a known time."""
    return [run for run in runs if run.evaluation_set is None or not _drawable(run)]


def _entries(names: dict[Condition, str]) -> dict[str, Entry]:
    """The same in all pictures of some runs: colour and marker are the algorithm, dashes tell its conditions apart."""
    of = looks(condition.algorithm for condition in names)
    seen: Counter[str] = Counter()
    entries = {}
    for condition, name in names.items():
        algorithm = condition.algorithm
        entries[name] = Entry(name, of[algorithm], DASHES[seen[algorithm] % len(DASHES)])
        seen[algorithm] += 1
    return entries


def _drawable(run: Run) -> bool:
    evaluations = run.evaluations
    return bool((evaluations["loss"].notna() & evaluations["train_seconds"].notna()).any())


def _suffixes(evaluation_sets: Iterable[str]) -> dict[str, str]:
    """Fingerprint -> end of the file name: nothing for a single one, else the shortest that keeps them apart."""
    ordered = sorted(evaluation_sets)
    if len(ordered) <= 1:
        return dict.fromkeys(ordered, "")
    safe = [re.sub(r"[^A-Za-z0-9]+", "-", evaluation_set) for evaluation_set in ordered]
    short = [name[:12] for name in safe]
    chosen = short if len(set(short)) == len(ordered) else safe
    if len(set(chosen)) < len(ordered):  # differ in punctuation only
        chosen = [f"{name}-{number}" for number, name in enumerate(safe)]
    return {evaluation_set: f"_{name}" for evaluation_set, name in zip(ordered, chosen, strict=True)}
