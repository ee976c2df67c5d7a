"""The pictures of `analysis.compare`: evaluation loss against training seconds and against samples, by condition."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from analysis.findings.curves import curve_panel
from analysis.report.figures.loss_curves import loss_curves
from analysis.report.figures.pictures import DASHES, Entry, Picture, looks, save_all
from analysis.study.alike import ALIKE_IN_SPITE_OF, EvaluatedOn, Kind, by_evaluation, by_kind, kind_labels, told_apart
from analysis.study.run import Run, loss_label
from analysis.study.types import StudyRun


def save_figures(runs: Iterable[Run], folder: Path) -> list[Path]:
    """Save `pictures` as PNG and SVG; the paths written, in order, and none if there is nothing to draw.

    Raises:
        UsageError: if they cannot be written there.
    """
    made = [(picture, textwrap.fill(picture.caption, 80)) for picture in pictures(runs)]
    return save_all(made, folder, "--out") if made else []


def pictures(runs: Iterable[Run]) -> list[Picture]:
    """loss_vs_seconds and loss_vs_samples, a pair per task and evaluation set; loss_vs_virtual_seconds where a clock is
    virtual.

    Losses that cannot be compared never share axes; with several evaluation sets the names end in what tells them
    apart. Runs without one, or without an evaluation that could be drawn, are left out (see `undrawn`). Only runs with
    status DONE enter a mean.
    """
    of_all = by_evaluation(sorted((run for run in runs if run.evaluation_set is not None), key=lambda run: run.name))
    by_set = {on: group for on, group in of_all.items() if any(map(_drawable, group))}
    made = []
    apart = told_apart(by_set)
    for on, suffix in _suffixes(apart).items():
        group = [run for run in by_set[on] if _drawable(run)]
        kinds = by_kind(by_set[on], ALIKE_IN_SPITE_OF)
        names = kind_labels(kinds)
        label_of = {run: names[kind] for kind, alike in kinds.items() for run in alike}
        entries = _entries(names)
        virtual, measured = [run for run in group if run.virtual], [run for run in group if not run.virtual]
        title = ", ".join(f"{name} {value}" for name, value in apart[on].items())
        for axis, x_label, drawn in (
            ("seconds", "training seconds", measured),
            ("seconds", "virtual seconds", virtual),
            ("samples", "samples", group),
        ):
            shown: dict[str, list[StudyRun]] = {name: [] for name in names.values()}
            for run in drawn:
                name = label_of[run]
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


def _entries(names: dict[Kind, str]) -> dict[str, Entry]:
    """The same in all pictures of some runs: colour and marker are the algorithm, dashes tell its kinds apart."""
    of = looks(kind.condition.algorithm for kind in names)
    seen: Counter[str] = Counter()
    entries = {}
    for kind, name in names.items():
        algorithm = kind.condition.algorithm
        entries[name] = Entry(name, of[algorithm], DASHES[seen[algorithm] % len(DASHES)])
        seen[algorithm] += 1
    return entries


def _drawable(run: Run) -> bool:
    evaluations = run.evaluations
    return bool((evaluations["loss"].notna() & evaluations["train_seconds"].notna()).any())


def _suffixes(apart: Mapping[EvaluatedOn, Mapping[str, str]]) -> dict[EvaluatedOn, str]:
    """End of the file name: nothing for a single one, else the shortest that keeps them apart."""
    if len(apart) <= 1:
        return dict.fromkeys(apart, "")
    words = [[re.sub(r"[^A-Za-z0-9]+", "-", part) for part in parts.values()] for parts in apart.values()]
    safe = ["-".join(parts) for parts in words]
    short = ["-".join(part[:12] for part in parts) for parts in words]
    chosen = short if len(set(short)) == len(words) else safe
    if len(set(chosen)) < len(words):  # differ in punctuation only
        chosen = [f"{name}-{number}" for number, name in enumerate(safe)]
    return {on: f"_{name}" for on, name in zip(apart, chosen, strict=True)}
