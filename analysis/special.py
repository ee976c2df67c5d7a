"""Special reports: what the page of a study shows besides, if its config has models or names one as its ``report``.

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
"""The names that a config may have under ``report``, as `asyncsgd.studies.config.Report` has them."""
SENTENCES: Mapping[str, Callable[[Path], list[str]]] = {
    "language_model": comparison_sections.sentences_of,
    "parallelism": comparison_sections.sentences_of,
    "speed_ladder": ladder_sections.sentences_of,
}
"""The special reports whose verdicts replace those of the page -> their sentences on the study in a folder."""
KEPT = ("runs", "environment", "problems", "again")
"""The sections that stay on the page if a special report replaces its verdicts."""


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
    """The page with what a special report has for it. Tests of the report replace all verdicts of the page."""
    if added.tests is not None:
        kept = [section for section in plain.sections if section.key in KEPT]
        plain = plain._replace(
            counts=added.counts or plain.counts,
            headlines=(),
            warnings=(),
            top_pictures=(),
            tests=added.tests,
            more="",
            checks=(),
            sections=kept,
        )
    return plain._replace(
        headlines=[*plain.headlines, *added.headlines],
        warnings=[*plain.warnings, *added.warnings],
        top_pictures=(*added.top_pictures, *plain.top_pictures),
        sections=[*added.sections, *plain.sections],
    )
