"""All pictures of a report, by section: in the order of the page, and as files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from analysis.findings.comparisons import FROM_SCRATCH
from analysis.findings.curves import CurvePanel
from analysis.findings.results import Results
from analysis.report.figures.arm_names import Cast
from analysis.report.figures.delays import delay_gaps, delay_histogram
from analysis.report.figures.downstream import confusion, downstream_scores, first_arms, hatecheck
from analysis.report.figures.loss_curves import final_losses, loss_curves, step_curves
from analysis.report.figures.pictures import Picture, Row, save_all
from analysis.report.figures.runs import learning_rates, timeline
from analysis.report.figures.scaling import throughput
from analysis.report.figures.times import time_to_target
from analysis.report.tables.arms import clocks_of
from asyncsgd.study.finetuning import SCORES


@dataclasses.dataclass(frozen=True, eq=False)
class Gallery:
    """All pictures of a report by section, in the order of the page."""

    cast: Cast
    first: tuple[Row, ...]
    sections: dict[str, tuple[Row, ...]]

    @property
    def rows(self) -> list[Row]:
        return [*self.first, *(row for rows in self.sections.values() for row in rows)]


def gallery(results: Results) -> Gallery:
    """Draw every picture that the results have data for."""

    cast = Cast(results)
    clocks = clocks_of(results) or ("measured",)

    def rows(pictures: Iterable[tuple[str, Picture | None]]) -> tuple[Row, ...]:
        """One row per clock: measured and virtual seconds are never beside one another without saying so."""
        made = [(clock, picture) for clock, picture in pictures if picture is not None]
        return tuple(
            Row(tuple(picture for other, picture in made if other == clock), clock=clock)
            for clock in clocks
            if any(other == clock for other, _ in made)
        )

    def clock_of(group: str) -> str:
        return cast.groups[group].clock if group in cast.groups else clocks[0]

    group_names = [group.name for group in results.groups]
    by_arm = {arm.name: arm.group for arm in results.arms}
    shown: list[str] = []  # one group per clock above the fold, the primary one first, and one that compares anything
    for name in (group.name for group in sorted(results.groups, key=lambda group: group.reference is None)):
        if all(clock_of(name) != clock_of(other) for other in shown):
            shown.append(name)

    def curves(group: str) -> tuple[Row, ...]:
        pictures = [
            loss_curves(item, cast.entries(curve.arm for curve in item.curves), cast.name("loss", item.axis, group))
            for item in results.curves
            if item.group == group
        ]
        there = tuple(picture for picture in pictures if picture is not None)
        return (Row(there, label=group, clock=clock_of(group), of_one=True),) if there else ()

    first = tuple(row for name in shown for row in curves(name))
    sections: dict[str, tuple[Row, ...]] = {
        "curves": tuple(row for name in group_names if name not in shown for row in curves(name))
    }
    sections["time-to-target"] = rows((clock_of(item.group), time_to_target(cast, item)) for item in results.reached)
    kinds = list(dict.fromkeys((item.clock, item.speeds, item.unit) for item in results.scaling))
    sections["throughput"] = rows(
        (
            clock,
            throughput(
                cast,
                [item for item in results.scaling if (item.clock, item.speeds, item.unit) == (clock, speeds, unit)],
            ),
        )
        for clock, speeds, unit in kinds
    )
    margin = dict(results.registration.margins).get("loss") if results.registration is not None else None
    gaps = [(clock, [item for item in results.delay_gaps if clock_of(item.group) == clock]) for clock in clocks]
    histograms = [(name, [item for item in results.delays if by_arm.get(item.arm) == name]) for name in group_names]
    sections["delays"] = rows(
        [
            *((clock_of(name), delay_histogram(cast, counted, name)) for name, counted in histograms),
            *((clock, delay_gaps(cast, gap, margin)) for clock, gap in gaps),
        ]
    )
    alike: dict[tuple[str, str | None, tuple[str, ...]], list[CurvePanel]] = {}
    for item in results.curves:
        if item.axis == "seconds" and item.group in cast.groups:
            group = cast.groups[item.group]
            alike.setdefault((group.clock, group.speeds, group.evaluation_sets), []).append(item)
    sections["final-loss"] = rows(
        (clock, final_losses(cast, panels, clock, speeds or "")) for (clock, speeds, _), panels in alike.items()
    )
    sections["timeline"] = rows((item.clock, timeline(cast, item)) for item in results.timelines)
    tuned = [(name, [item for item in results.tuning if by_arm.get(item.arm) == name]) for name in group_names]
    steps = [(clock_of(item.group), step_curves(cast, item)) for item in results.steps]
    tried = [(clock_of(name), learning_rates(cast, trials, name)) for name, trials in tuned]
    sections["learning-rate"] = rows([*steps, *tried])
    scored: list[Row] = []
    for data in dict.fromkeys(item.data for item in results.downstream):
        items = [item for item in results.downstream if item.data == data]
        some = first_arms(cast, items, group_names)
        for label, pictures in (
            ("", [downstream_scores(cast, items, what) for what in (SCORES[items[0].metric], "accuracy")]),
            ("", [hatecheck(cast, some)]),
            (f"Confusion matrices, {data}", [confusion(cast, item) for item in some]),
        ):
            there = tuple(picture for picture in pictures if picture is not None)
            scored += [Row(there, label=label, small=bool(label))] * bool(there)
    sections["downstream"] = tuple(scored)
    return Gallery(cast, first, sections)


def save_gallery(results: Results, folder: Path) -> list[Path]:
    """Write every picture as PNG and SVG into `folder`, which is made if it is not there.

    Raises:
        UsageError: if they cannot be written there.
    """

    noted = []
    for row in gallery(results).rows:
        for picture in row.pictures:
            said = f"{row.clock} clock" in picture.title
            notes = [f"{row.clock} clock"] * (bool(row.clock) and not said) + [FROM_SCRATCH] * results.from_scratch
            noted.append((picture, ", ".join(notes)))
    return save_all(noted, folder)
