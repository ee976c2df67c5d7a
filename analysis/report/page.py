"""The page: results, pictures and tables arranged for `analysis/report/report.html.jinja`, in the order of the eye."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Iterable, Sequence
from importlib import metadata
from pathlib import Path

import jinja2
import markupsafe

from analysis.findings.comparisons import FROM_SCRATCH
from analysis.findings.groups import LeftOut
from analysis.findings.results import Results
from analysis.findings.sentence import Headline, conditions
from analysis.findings.trust import TrustItem
from analysis.report.figures.arm_names import Cast
from analysis.report.figures.pictures import Look, Picture, Row, inline, key
from analysis.report.gallery import gallery
from analysis.report.tables.arms import clocks_of
from analysis.report.tables.comparisons import first_tests
from analysis.report.tables.contents import all_tables
from analysis.report.tables.runs import relative_link
from analysis.report.tables.table import Table


@dataclasses.dataclass(frozen=True)
class Legend:
    """One entry of a legend as the page shows it; `svg` is markup, made here."""

    svg: str
    text: str


@dataclasses.dataclass(frozen=True)
class PagePicture:
    name: str
    title: str
    svg: str
    caption: str


@dataclasses.dataclass(frozen=True)
class PageRow:
    label: str
    clock: str
    legend: tuple[Legend, ...]
    pictures: tuple[PagePicture, ...]
    notes: tuple[str, ...]
    small: bool = False
    empty: str = ""


@dataclasses.dataclass(frozen=True)
class Statement:
    """A headline as the page shows it."""

    text: str
    conditions: str
    """In words; empty where a statement before it has named them."""
    details: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Label:
    """The big word about the clock."""

    kind: str
    title: str
    text: str


@dataclasses.dataclass(frozen=True)
class Check:
    tone: str
    mark: str
    title: str
    value: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Listing:
    title: str
    lines: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Section:
    key: str
    title: str
    rows: tuple[PageRow, ...] = ()
    tables: tuple[Table, ...] = ()
    lead: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()
    lists: tuple[Listing, ...] = ()
    more: tuple[PageRow, ...] = ()
    """The same pictures of the groups that no headline is about: folded."""
    folded: bool = False
    """Whether the whole section opens only when it is asked to."""
    empty: str = ""
    """Why there is nothing, in one line: such a section is left out."""

    @property
    def beside(self) -> bool:
        """Whether its rows, one picture each, fit beside one another."""
        return len(self.rows) > 1 and all(len(row.pictures) == 1 for row in self.rows)


@dataclasses.dataclass(frozen=True)
class Page:
    """What the template shows, in its order; all text is plain but `PagePicture.svg` and `Legend.svg`."""

    title: str
    study: str
    clocks: tuple[str, ...]
    flags: tuple[str, ...]
    counts: str
    statements: tuple[Statement, ...]
    warnings: tuple[str, ...]
    first: tuple[PageRow, ...]
    tests: Table
    labels: tuple[Label, ...]
    checks: tuple[Check, ...]
    sections: tuple[Section, ...]
    looks: tuple[Look, ...]
    footer: str


_CLOCKS = {
    "measured": Label(
        "measured",
        "Measured clock",
        "Seconds were measured on the machine named below; the clock stands still during evaluations.",
    ),
    "virtual": Label(
        "virtual",
        "Virtual clock: simulated time",
        "Gradients were computed, their seconds were drawn from declared speeds. No machine took this long.",
    ),
}


NO_HEADLINE = Headline("There is nothing to compare here.", "", "", "", "too few seeds", True)


_MARKS = {"good": ("ok", "✓"), "warning": ("warn", "!"), "bad": ("bad", "✗"), "unknown": ("none", "?")}


_NOTHING = {
    "curves": "No other group of arms has an evaluation.",
    "time-to-target": "No curves of time to target: no target loss was declared, or no arm has an evaluation.",
    "throughput": "No throughput: no finished run says how many samples per second it took.",
    "delays": "No delays: no finished run has a gradient that was applied and recorded.",
    "final-loss": "No final losses: no arm has a finished run with a loss and seconds.",
    "timeline": "No timeline: no run's events say how long computing and waiting took.",
    "learning-rate": "No learning rate: no run recorded one, and the folder holds no tuning trials.",
    "downstream": "No downstream scores: no run was fine-tuned on a labelled task.",
}

"""Why a section is empty where `Results.left_out` has no better reason."""


def page(results: Results, out: Path, study_folder: Path) -> Page:
    """Arrange results for the template.

    Args:
        results: what is shown.
        out: file that the page will be; links to run folders are relative to it.
        study_folder: where the run folders are.
    """

    drawn = gallery(results)
    prefix = Path(os.path.relpath(study_folder, out.parent)).as_posix()
    made = {table.key: table for table in all_tables(results, lambda name: relative_link(prefix, name))}
    arms = tuple(table for key, table in made.items() if key.startswith("arms-"))
    flags = [FROM_SCRATCH] * results.from_scratch + ["exploratory"] * results.exploratory
    warnings = [f"Exploratory: {results.exploratory_reason}"] if results.exploratory_reason else []
    failed = [
        f"{item.title} ({item.value})" if item.value else item.title for item in results.trust if item.level == "bad"
    ]
    warnings += [f"Checks that failed: {'; '.join(failed)}."] * bool(failed)
    spoken_of = {headline.group for headline in results.headlines}
    first = tuple(_page_row(row, drawn.cast, spoken_of) for row in drawn.first[:1])
    other_curves = [_page_row(row, drawn.cast) for row in (*drawn.first[1:], *drawn.sections["curves"])]
    if not first:
        first = (
            PageRow("", "", (), (), (), empty=_reason(results.left_out, "curves", "No run has an evaluation to draw.")),
        )

    def section(key: str, title: str, *tables: str, lead: Sequence[str] = ()) -> Section:
        parts = [_parted(row, drawn.cast, spoken_of) for row in drawn.sections[key]]
        rows = [_page_row(kept, drawn.cast) for kept, _ in parts if kept.pictures]
        more = [_page_row(rest, drawn.cast) for _, rest in parts if rest.pictures]
        found = tuple(made[name] for name in tables if name in made)
        empty = "" if parts or found else _reason(results.left_out, key, _NOTHING[key])
        return Section(key, title, tuple(rows), found, tuple(lead), more=tuple(more), empty=empty)

    tests = first_tests(results)
    if not results.tests:
        reason = _reason(results.left_out, "tests", "There is no comparison.")
        tests = dataclasses.replace(tests, notes=(reason,))
    sections = [Section("curves", "Loss curves of the other groups", tuple(other_curves), folded=True)] * bool(
        other_curves
    )
    sections += [
        section("time-to-target", "Time to the target"),
        section("throughput", "Throughput", "scaling", "costs"),
        section("delays", "Delays, and what they cost", "delays"),
        section("final-loss", "Final loss against seconds"),
        section("timeline", "Who did what when"),
        section("learning-rate", "The steps: learning rates and gradient norms"),
        section("downstream", "Downstream scores", "downstream", "classes", "hatecheck"),
        Section(
            "tables",
            "Tables 1 to 3",
            tables=(*arms, *(made[key] for key in ("settings", "tests", "tuning") if key in made)),
            empty="" if arms or "tests" in made or "tuning" in made else "No arm has a run to make a table of.",
        ),
        Section(
            "every-run",
            "Every run",
            tables=tuple(made[key] for key in ("counts", "runs") if key in made),
            folded=True,
            empty="" if results.runs else "There is no run.",
        ),
        Section(
            "environment-section",
            "Environment",
            tables=(made["environment"],) if "environment" in made else (),
            folded=True,
            empty="" if "environment" in made else "No run says where it was made (environment.json).",
        ),
        Section(
            "reproduce",
            "How to make this again",
            lead=("The page, from the same run folders:",),
            commands=(results.command,),
            facts=_registration_facts(results),
        ),
    ]
    absent = [f"{section.title}: {section.empty}" for section in sections if section.empty]
    sections = [section for section in sections if not section.empty]
    sections.append(_left_out_section(results, absent))
    return Page(
        title=f"{results.title}: report",
        study=results.title,
        clocks=clocks_of(results),
        flags=tuple(flags),
        counts=_counted(results),
        statements=_statements(results),
        warnings=tuple(warnings),
        first=first,
        tests=tests,
        labels=tuple(_CLOCKS[clock] for clock in clocks_of(results) if clock in _CLOCKS)
        or (Label("unknown", "No clock", "No run says how its seconds were taken."),),
        checks=tuple(_check(item) for item in results.trust),
        sections=tuple(sections),
        looks=tuple(sorted(drawn.cast.looks.values(), key=lambda look: look.slot)),
        footer=f"Made by asyncsgd {_version()} (python -m analysis.report). One file, no scripts, nothing is loaded.",
    )


def render(page: Page) -> str:
    """The page as HTML."""

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(page=page) + "\n"


def _statements(results: Results) -> tuple[Statement, ...]:
    """The headlines; conditions that they share are named with the first of them."""
    words = {group.name: conditions(group) for group in results.groups}
    made, named = [], ""
    for headline in results.headlines or (NO_HEADLINE,):
        told = words.get(headline.group, "")
        details = tuple(map(_kept_together, headline.details))
        made.append(Statement(_kept_together(headline.text), told if told != named else "", details))
        named = told
    return tuple(made)


def _parted(row: Row, cast: Cast, groups: Collection[str]) -> tuple[Row, Row]:
    """The pictures of a row that are of no other group than `groups`, and the rest; all where there would be none."""
    rest = tuple(one for one in row.pictures if one.title in cast.groups and one.title not in groups)
    kept = tuple(one for one in row.pictures if one not in rest)
    return dataclasses.replace(row, pictures=kept), dataclasses.replace(row, pictures=rest)


def _page_row(row: Row, cast: Cast, named: Collection[str] = ()) -> PageRow:
    """A row of pictures, headed by its conditions in words unless its group is one of `named`."""
    label = row.label
    if row.label in cast.groups:
        marks = [FROM_SCRATCH] * cast.from_scratch(cast.groups[row.label].arms)
        label = " · ".join([conditions(cast.groups[row.label])] * (row.label not in named) + marks)
    return PageRow(
        label,
        row.clock,
        tuple(Legend(markupsafe.Markup(key(entry)), entry.text) for entry in row.legend),
        tuple(
            PagePicture(
                picture.name,
                picture.what if row.of_one else _title(picture, row, cast),
                markupsafe.Markup(inline(picture, cast.looks)),
                _kept_together(picture.caption),
            )
            for picture in row.pictures
        ),
        row.notes,
        row.small,
    )


def _title(picture: Picture, row: Row, cast: Cast) -> str:
    """Whose a picture is, else what it shows; both where the row has several of one group."""
    group = cast.groups.get(picture.title)
    if group is None:
        return picture.title or picture.what
    several = sum(other.title == picture.title for other in row.pictures) > 1
    return f"{picture.what}: {conditions(group)}" if several else conditions(group)


def _kept_together(text: str) -> str:
    """No line ends inside "n = 8"."""
    return re.sub(r"\bn = (?=\d)", "n\u00a0=\u00a0", text)


def _check(item: TrustItem) -> Check:
    tone, mark = _MARKS[item.level]
    return Check(tone, mark, item.title, item.value, item.detail)


def _reason(left_out: Iterable[LeftOut], key: str, otherwise: str) -> str:
    """Why a part of the report is missing: what the results say of it, else what it would need."""
    words = {key, key.replace("-", " "), key.replace("-", "_")}
    return next((item.reason for item in left_out if item.name in words), otherwise)


def _counted(results: Results) -> str:
    tests = [run for run in results.runs if run.stage == "test"]
    seeds = len({run.seed for run in tests if run.seed is not None})
    parts = [f"{len(results.arms)} arm{'s' * (len(results.arms) != 1)}"]
    parts.append(f"{len(tests)} test run{'s' * (len(tests) != 1)}")
    parts += [f"{seeds} seed{'s' * (seeds != 1)}"] * (seeds > 0)
    others = len(results.runs) - len(tests)
    parts += [f"{others} other runs"] * (others > 0)
    return " · ".join(parts)


def _registration_facts(results: Results) -> tuple[tuple[str, str], ...]:
    registration = results.registration
    if registration is None:
        return (("pre-registration", results.exploratory_reason or "none"),)
    where = [] if registration.num_workers is None else [f"{registration.num_workers} workers"]
    where += [] if registration.clock is None else [f"{registration.clock} clock"]
    reasons = {name: f" ({reason})" for name, reason in registration.margin_reasons}
    margins = ", ".join(f"{name} ±{value:g}{reasons.get(name, '')}" for name, value in registration.margins)
    return (
        ("analysis.yaml, sha256", registration.sha256),
        ("reference", registration.reference),
        ("primary endpoint", ", ".join([registration.endpoint.replace("_", " "), *where])),
        ("level", f"{registration.alpha:g}"),
        ("margins", margins or "none declared: no equivalence test"),
        ("seeds declared", "-" if registration.num_seeds is None else str(registration.num_seeds)),
        ("target", registration.target_from or "-"),
    )


def _left_out_section(results: Results, absent: Sequence[str]) -> Section:
    lists = [Listing(f"Sections with nothing to show ({len(absent)})", tuple(absent))] * bool(absent)
    if results.left_out:
        lines = tuple(f"{item.name}: {item.reason}" for item in results.left_out)
        lists.append(Listing(f"In no number ({len(lines)})", lines))
    if results.problems:
        lists.append(Listing(f"Problems while reading ({len(results.problems)})", results.problems))
    empty = "" if lists else "Nothing was left out, and every file could be read."
    return Section("left-out", "What is left out, and why", lists=tuple(lists), empty=empty)


def _version() -> str:
    try:
        return metadata.version("asyncsgd")
    except metadata.PackageNotFoundError:
        return "(not installed)"
