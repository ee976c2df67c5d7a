"""Special reports: what the page of a study shows besides, where its config names one behind ``report:``.

The names are a closed table, so no config and no folder can name code that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from analysis import comparison_sections, dose_response, lab_notes, ladder_sections, ways
from analysis.comparisons import report_of
from analysis.page import Addition, Page, page
from asyncsgd.errors import UsageError

if TYPE_CHECKING:
    from analysis.load import Study

REPORTS: Mapping[str, Callable[[Study], Addition]] = {
    "dose_response": dose_response.addition,
    "lab_notes": lab_notes.addition,
    "language_model": comparison_sections.addition,
    "parallelism": ways.addition,
    "speed_ladder": ladder_sections.addition,
}
"""The names that a config may have behind ``report:``; `asyncsgd.studies.config.Report` has the same."""
SENTENCES: Mapping[str, Callable[[Path], list[str]]] = {
    "language_model": comparison_sections.sentences_of,
    "parallelism": comparison_sections.sentences_of,
    "speed_ladder": ladder_sections.sentences_of,
}
"""What those of them say that judge in the place of the page."""
KEPT = ("runs", "environment", "problems", "again")
"""The sections that every page has, also where all that is judged is judged by the special report."""


def page_of(study: Study, out: Path, name: str | None = None) -> Page:
    """The page of a study with its special report.

    Args:
        out: the file that the page will be.
        name: of the special report; None: the one that the study's config names.
    """
    plain = page(study, out)
    name = name or report_of(study.folder)
    if name is None:
        return plain
    if name not in REPORTS:
        known = ", ".join(REPORTS)
        return warned(plain, f"config.yaml names the report {name}, which is none of {known}.")
    try:
        added = REPORTS[name](study)
    except UsageError as error:
        return warned(plain, f"The report {name} cannot be made: {error}.")
    return with_addition(plain, added)


def warned(plain: Page, line: str) -> Page:
    return plain._replace(warnings=[*plain.warnings, line])


def with_addition(plain: Page, added: Addition) -> Page:
    """The page with what a special report has. Where that has tests of its own, they take the place of all that the
    page judges.
    """
    if added.tests is None:
        return plain._replace(
            headlines=[*plain.headlines, *added.headlines],
            warnings=[*plain.warnings, *added.warnings],
            first=(*added.first, *plain.first),
            sections=[*added.sections, *plain.sections],
        )
    kept = [section for section in plain.sections if section.key in KEPT]
    return plain._replace(
        counts=added.counts or plain.counts,
        headlines=added.headlines,
        warnings=added.warnings,
        first=added.first,
        tests=added.tests,
        more="",
        checks=(),
        sections=[*added.sections, *kept],
    )
