"""Special reports: what the page of a study shows besides, where its config names one behind ``report:``.

The names are a closed table, so no config and no folder can name code that is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from analysis import comparison_sections, comparisons, dose_response, lab_notes, ways
from analysis.page import Addition, Page, page
from asyncsgd.errors import UsageError
from asyncsgd.settings.yaml_reader import read_yaml

if TYPE_CHECKING:
    from analysis.load import Study

REPORTS: Mapping[str, Callable[[Study], Addition]] = MappingProxyType(
    {
        "dose_response": dose_response.addition,
        "lab_notes": lab_notes.addition,
        "language_model": comparison_sections.addition,
        "parallelism": ways.addition,
    }
)
"""The names that a config may have behind ``report:``; `asyncsgd.studies.config.Report` has the same."""
JUDGING = ("language_model", "parallelism")
"""Those that judge in the place of the page."""
OF_COMPARISONS = "language_model"
"""The report of a study of comparisons that names none."""
KEPT = ("runs", "environment", "problems", "again")
"""The sections that every page has, also where all that is judged is judged by the special report."""


def named_by(folder: Path) -> str | None:
    """The special report of the study in a folder; None where it has none."""
    try:
        config = read_yaml((folder / "config.yaml").read_text(encoding="utf-8"), "config.yaml")
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    name = config.get("report")
    if name is None and "models" in config:
        name = OF_COMPARISONS
    return None if name is None else str(name)


def page_of(study: Study, out: Path, name: str | None = None) -> Page:
    """The page of a study with its special report.

    Args:
        out: the file that the page will be.
        name: of the special report; None: the one that the study's config names.
    """
    plain = page(study, out)
    name = name or named_by(study.folder)
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


def told_of(study: Study) -> str:
    """What a study shows, in sentences: its verdict, or those of a special report that judges by itself."""
    if named_by(study.folder) not in JUDGING:
        return study.verdict
    found = comparisons.read(study.folder)
    return "\n".join(comparison_sections.sentences(found))


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
        headlines=added.headlines,
        warnings=added.warnings,
        first=added.first,
        tests=added.tests,
        more="",
        checks=(),
        sections=[*added.sections, *kept],
    )
