"""``python -m analysis speed_ladder OUT``: the report of ``experiments/speed_ladder.py``, printed and as two files.

``ladder.md`` has what is printed, and ``report.html`` is a page laid out as the report of a study is."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.commands import carried_out
from analysis.findings.speed_ladder import Ladder, Ladders, read
from analysis.report.tables.speed_ladder import (
    PREDICTED,
    block,
    checklist,
    expected_table,
    gain,
    gains,
    prediction,
    publication_table,
    rungs_table,
    score,
    stacks_table,
    validation_table,
)
from analysis.report.tables.table import markdown
from analysis.stats import MINIMUM_PAIRS
from asyncsgd.errors import UsageError


def sentence(ladder: Ladder) -> str:
    """What the whole stack comes to."""
    return f"{ladder.task} on {ladder.data}: {gain(ladder.final.total)} the naive loop; {score(ladder, ladder.final)}."


def warnings(found: Ladders) -> list[str]:
    """What these measurements do not show."""
    few = found.num_seeds < MINIMUM_PAIRS
    return [f"{found.num_seeds} seeds bear no verdict on the score; {MINIMUM_PAIRS} can."] * few + [
        "A quick ladder: short trainings on few texts, so its ratios are rough."
    ] * found.quick


def machine_of(found: Ladders) -> str:
    machine = found.machine
    return (
        f"{machine['cores']} cores, {machine['cpu']}, device {machine['device']}, torch {machine['versions']['torch']}"
    )


def text(found: Ladders) -> str:
    """All of it as Markdown."""
    parts = [
        "# The speed ladder",
        f"{machine_of(found)}.",
        *warnings(found),
    ]
    for ladder in found.ladders:
        boxes = [f"- {line}" for line in checklist(ladder)]
        shown = [rungs_table(ladder), stacks_table(ladder), validation_table(ladder, found.machine)]
        tables = markdown(shown).rstrip()
        parts += [tables, f"```\n{block(ladder)}\n```", "\n".join(boxes), prediction(ladder)]
        parts.append("\n".join(f"- {line}" for line in gains(ladder)))
    return "\n\n".join([*parts, markdown([publication_table(found), expected_table(found)])])


def page(found: Ladders, command: str) -> Any:
    """The page of a study's report with these findings in it."""
    from analysis import page as pages
    from analysis.report.figures.pictures import looks
    from analysis.report.figures.speed_ladder import FOR_THE_SCORE, KEPT, LEFT_OUT, rungs_picture
    from analysis.report.parts import drawings, laid_out, shown

    cast = looks([KEPT, LEFT_OUT, FOR_THE_SCORE])
    sections = []
    for number, ladder in enumerate(found.ladders):
        tables = rungs_table(ladder), stacks_table(ladder), validation_table(ladder, found.machine)
        title, pictures = f"{ladder.task} on {ladder.data}", drawings([rungs_picture(ladder, cast)] * (number > 0))
        lead = (prediction(ladder), *checklist(ladder), *gains(ladder))
        sections.append(pages.Section(ladder.task, title, pictures, tuple(map(shown, tables)), lead, (block(ladder),)))
    sections.append(pages.Section("expected", PREDICTED, tables=(shown(expected_table(found)),)))
    return laid_out(
        "The speed ladder",
        command,
        f"{found.num_seeds} seeds" + ", quick" * found.quick,
        tuple((sentence(ladder), ()) for ladder in found.ladders),
        tuple(warnings(found)),
        drawings([rungs_picture(found.ladders[0], cast)]),
        publication_table(found),
        tuple(sections),
        f"{machine_of(found)}. Made by python -m analysis speed_ladder. One file, nothing is loaded.",
    )


def report(folder: Path) -> None:
    """Print the report of the ladder in `folder`, and write ladder.md and report.html there.

    Raises:
        UsageError: if it holds no finished ladder, or nothing can be written there.
    """
    from analysis.page import render

    found = read(folder)
    told = text(found)
    again = f"python -m analysis speed_ladder {shlex.quote(str(folder))}"
    try:
        (folder / "ladder.md").write_text(told, encoding="utf-8")
        (folder / "report.html").write_text(render(page(found, again)), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror}); copy it elsewhere") from error
    print(told)
    print(f"page   {folder / 'report.html'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis speed_ladder", description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT", help="folder of experiments/speed_ladder.py")
    flags = parser.parse_args(arguments)
    return carried_out(lambda: report(flags.folder))


if __name__ == "__main__":
    sys.exit(main())
