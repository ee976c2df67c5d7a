"""One page of a study: the headline, one forest plot, the curves, the tests, how far to trust them; the rest is folded.

The page is one file without scripts, fonts or addresses. Sections are data, so the other reports use the same page.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import jinja2
import markupsafe
import matplotlib
import msgspec
from pandas import DataFrame

from analysis import differences, gallery, tables
from analysis.questions import UNREGISTERED, conditions
from analysis.runs import FROM_SCRATCH
from analysis.stats import Interval

if TYPE_CHECKING:
    from analysis.load import Study

TONES = {"better": "good", "worse": "bad", "equivalent": "same", "different but negligible": "same"}
MOST_TESTS = 6
FIRST = ("treatment", "reference", "endpoint", "family", "n", "difference", "ratio", "p_holm", "margin", "word")
"""Columns of the tests that stand above the fold."""


class Drawing(NamedTuple):
    """A picture as the page shows it."""

    name: str
    title: str
    svg: markupsafe.Markup
    caption: str


class Section(NamedTuple):
    """A folded part of the page."""

    key: str
    title: str
    pictures: tuple[Drawing, ...] = ()
    tables: tuple[dict[str, Any], ...] = ()
    lead: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


class Addition(NamedTuple):
    """What a special report has for the page of a study."""

    sections: tuple[Section, ...]
    headlines: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Sentences, each with its small type."""
    warnings: tuple[str, ...] = ()
    first: tuple[Drawing, ...] = ()
    """Pictures that stand on top."""
    tests: dict[str, Any] | None = None
    """A table of tests. With one, the report judges in the place of the page."""
    counts: str = ""
    """How much was measured; empty: what the page says of test runs."""


class Page(NamedTuple):
    """What the template shows."""

    title: str
    counts: str
    headlines: Sequence[tuple[str, tuple[str, ...]]]
    """Sentence and small type."""
    warnings: Sequence[str]
    first: tuple[Drawing, ...]
    tests: dict[str, Any] | None
    sections: Sequence[Section]
    footer: str
    marks: Sequence[str] = ("measured clock",)
    more: str = ""
    """What stands below the tests."""
    checks: Sequence[dict[str, str]] = ()


def render(page: Page) -> str:
    """The page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.jinja").render(page=page)


def slug(text: str) -> str:
    """A word for file names and ids.

    >>> slug("4 workers, virtual clock"), slug("<script>")
    ('4-workers-virtual-clock', 'script')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")[:80] or "x"


def drawing(picture: gallery.Picture) -> Drawing:
    """A picture as an SVG element with ids of its own; text stays text, in the font and the colour of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        picture.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue().partition("<svg")[2]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg).replace("xlink:href", "href")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group()), svg)  # and no text: 0.694
    width = picture.figure.get_figwidth()
    about = markupsafe.escape(picture.about or picture.title)
    style = f"min-width:{4 * width:.0f}em; max-width:{8 * width:.0f}em"  # letters stay as large as those of the text
    element = f'<svg role="img" style="{style}" aria-label="{about}"{svg}'
    return Drawing(picture.name, picture.title, markupsafe.Markup(element), picture.caption)


def table(
    frame: DataFrame, title: str = "", notes: Sequence[str] = (), links: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """A DataFrame for the template."""
    shown = tables.text(frame)
    numeric = {place for place, name in enumerate(frame) if frame[name].map(_is_number).all()}
    rows = []
    for row, cells in zip(frame.to_dict("records"), shown.to_numpy().tolist(), strict=True):
        tone = ""
        if row.get("family") == "primary":
            tone = TONES.get(row.get("word", ""), "")
        rows.append({"cells": cells, "tone": tone})
    return {"title": title, "columns": list(shown), "rows": rows, "numeric": numeric, "notes": notes, "links": links}


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | Interval)


def page(study: Study, out: Path) -> Page:
    """Arrange a study for the template; `out` is the file that the page will be, to which links are relative."""
    used = tables.tested(study.runs)
    made = study.made_tables()
    warnings = []
    if study.exploratory:
        warnings.append(f"Exploratory: {study.exploratory}.")
    failed = study.trust[study.trust["level"] == "bad"]
    if len(failed):
        warnings.append(f"Checks that failed: {', '.join(failed['title'])}.")
    checks = []
    for check in study.trust.to_dict("records"):
        if check["level"] == "good":
            check["detail"] = ""
        checks.append(check)
    more = ""
    if len(study.tests) > MOST_TESTS:
        more = f"{len(study.tests) - MOST_TESTS} more tests are in Table 2."
    counts = f"{used['arm'].nunique()} arms, {len(used)} test runs, {used['seed'].nunique()} seeds"
    return Page(
        title=study.plan.name,
        counts=re.sub(r"\b1 (arm|test run|seed)s", r"1 \1", counts),
        headlines=_headlines(study),
        warnings=warnings,
        first=_first_pictures(study),
        tests=_first_tests(made["tests"][1]),
        sections=_sections(study, made, out),
        footer="Made by python -m analysis report. One file, no scripts, nothing is loaded.",
        marks=_marks(used),
        more=more,
        checks=checks,
    )


def _first_pictures(study: Study) -> tuple[Drawing, ...]:
    """The forest, and the curves of the first comparison."""
    pictures = list(gallery.forest(study))
    groups = gallery.groups_of(study)
    if groups:
        pictures += gallery.curves(study, groups[0], 0)
    return tuple(map(drawing, pictures))


def _first_tests(tests: DataFrame) -> dict[str, Any] | None:
    """The tests that stand above the fold, without ratios where there are none."""
    if tests.empty:
        return None
    shown = tests.head(MOST_TESTS)[list(FIRST)]
    if all(math.isnan(ratio.estimate) for ratio in shown["ratio"]):
        shown = shown.drop(columns="ratio")
    return table(shown)


def _marks(used: DataFrame) -> list[str]:
    """The clocks of the runs that are tested, and whether they began from random parameters."""
    marks = []
    for clock in sorted(used["clock"].unique()):
        marks.append("simulated clock" if clock == "virtual" else "measured clock")
    if used["from_scratch"].any():
        marks.append(FROM_SCRATCH)
    return marks


def _sections(study: Study, made: Mapping[str, tuple[str, DataFrame]], out: Path) -> list[Section]:
    """The folded parts of the page that hold anything."""
    runs = study.runs
    prefix = Path(os.path.relpath(study.folder.resolve(), out.parent.resolve())).as_posix()
    links = {name: quote(f"{prefix}/{name}/") for name in runs.index[runs["status"] != "MISSING"]}

    def table_of(*names: str, **options: Any) -> tuple[dict[str, Any], ...]:
        return tuple(table(made[name][1], made[name][0], **options) for name in names if len(made[name][1]))

    def pictures(found: Iterable[gallery.Picture]) -> tuple[Drawing, ...]:
        return tuple(map(drawing, found))

    others: list[gallery.Picture] = []
    for number, group in enumerate(gallery.groups_of(study)[1:], 1):
        others += gallery.curves(study, group, number)
    note = "Means over the repetitions of a pretraining seed, then over these seeds, with 95 % t intervals."
    scored = table_of("downstream", notes=(note,))
    of_differences = tuple(map(differences.sentence, study.differences.itertuples()))
    left_out = tuple(tables.left_out(runs, study.tests))
    sections = [
        Section("differences", "Differences of differences", (), table_of("differences"), of_differences),
        Section("curves", "Loss curves of the other groups", pictures(others)),
        Section("times", "Time to the target", pictures(gallery.times(study))),
        Section("workers", "Throughput, delay, learning rate", pictures(gallery.against(study)), table_of("tuning")),
        Section("downstream", "Downstream scores", pictures(gallery.confusions(study)), scored),
        Section("tables", "Tables", (), table_of("arms", "sets", "settings", "tests"), ABOUT_TESTS),
        Section("runs", "Every run", (), table_of("runs", links=links)),
        Section("environment", "Machines and code", (), table_of("environments")),
        Section("left-out", "What is left out, and why", lead=left_out),
        Section("problems", "What could not be read", lead=study.plan.problems),
        Section("again", "How to make this again", lead=_declared(study), commands=(_command(study, out),)),
    ]
    return [section for section in sections if any(section[2:])]


ABOUT_TESTS = (
    "An interval holds what its test does not reject at alpha / family size. Holm's method may find more than that.",
    "Only the primary family was registered. Each other family holds a difference by chance in alpha of studies.",
    "Measured rates of a wrong better or worse with 8 seeds (experiments/benchmarks/error_rates.py): at most 5 % where "
    "noise is symmetric or alike in both arms; 15 % where it is log-normal in one arm; 65 % where one run in twenty of "
    "one arm goes far wrong.",
)


def _headlines(study: Study) -> Sequence[tuple[str, tuple[str, ...]]]:
    """The sentence of every headline with its conditions and small type; the lines of several are told once."""
    found = []
    told: set[str] = set()
    for headline in study.headlines:
        lines = list(headline.details)
        place = conditions(headline.row.group) if headline.row is not None else ""
        if place:
            lines.insert(0, f"{place[0].upper()}{place[1:]}.")
        new = tuple(line for line in lines if line not in told)
        told.update(new)
        found.append((headline.text, new))
    return found


def _declared(study: Study) -> tuple[str, ...]:
    """What was registered, a line for each key."""
    if study.plan.registered is UNREGISTERED:
        return ()
    registered = msgspec.to_builtins(study.plan.registered)
    return tuple(f"{key.replace('_', ' ')}: {value}" for key, value in registered.items() if value)


def _command(study: Study, out: Path) -> str:
    """As it was typed, but for an absolute path, which may hold the name of a user."""
    folder = study.folder.as_posix()
    if study.folder.is_absolute():
        folder = study.folder.resolve().name
    return f"python -m analysis report {shlex.quote(folder)} --out {shlex.quote(out.name)}"
