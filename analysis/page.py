"""One page of a study: the headline, one forest plot, the curves, the tests, how far to trust them; the rest is folded.

The page is one file without scripts, fonts or links to other sites. Sections are data, so the other reports use the
same page.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import quote

import jinja2
import markupsafe
import matplotlib
import msgspec
from pandas import DataFrame

from analysis import differences, gallery, tables
from analysis.questions import UNREGISTERED
from analysis.runs import FROM_SCRATCH
from analysis.stats import Interval
from analysis.verdict import conditions_of

if TYPE_CHECKING:
    from analysis.load import Study

CLASSES = {"better": "good", "worse": "bad", "equivalent": "same", "different but negligible": "same"}
"""Word of a registered test -> the CSS class of its row."""
MAX_TOP_TESTS = 6
TOP_COLUMNS = (
    "treatment",
    "reference",
    "endpoint",
    "family",
    "n",
    "difference",
    "times_sooner",
    "p_holm",
    "margin",
    "word",
)
"""Columns of the table of tests on top of the page."""


Table: TypeAlias = dict[str, Any]
"""A table as the template takes it; `table` makes it."""


class Section(NamedTuple):
    """A folded part of the page."""

    key: str
    title: str
    pictures: tuple[gallery.Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    lead: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


class Addition(NamedTuple):
    """What a special report has for the page of a study."""

    sections: tuple[Section, ...]
    headlines: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Sentences, each with its small type."""
    warnings: tuple[str, ...] = ()
    top_pictures: tuple[gallery.Picture, ...] = ()
    """Pictures for the top of the page."""
    tests: Table | None = None
    """A table of tests. If it is given, it stands in place of the page's own tests and verdicts."""
    counts: str = ""
    """How much was measured; empty: what the page says of test runs."""


class Page(NamedTuple):
    """What the template shows."""

    title: str
    counts: str
    headlines: Sequence[tuple[str, tuple[str, ...]]]
    """Sentence and small type."""
    warnings: Sequence[str]
    top_pictures: tuple[gallery.Picture, ...]
    tests: Table | None
    sections: Sequence[Section]
    footer: str
    badges: Sequence[str] = ("measured clock",)
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
    environment.filters["svg"] = svg_of  # so that a picture which is not shown is not written out
    return environment.get_template("page.html.jinja").render(page=page)


def slug(text: str) -> str:
    """A word for file names and ids.

    >>> slug("4 workers, virtual clock"), slug("<script>")
    ('4-workers-virtual-clock', 'script')
    """
    return re.sub(r"[^a-z0-9]+", "-", text.casefold()).strip("-")[:80] or "x"


def svg_of(picture: gallery.Picture) -> markupsafe.Markup:
    """A picture as an SVG element with ids of its own; text stays text, in the font and the colour of the page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": picture.name}):
        picture.figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    _, _, svg = buffer.getvalue().partition("<svg")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    # the names of XML, which no HTML needs
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    # ids begin with the picture's name, so that no two pictures of a page share one
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{picture.name}-", svg)
    # the size of the whole picture, which the page decides
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    # two digits behind the point are enough for coordinates; texts keep theirs, as in 0.694
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d+\.\d{2})\d+", r"\1", tag.group()), svg)
    width = picture.figure.get_figwidth()
    about = markupsafe.escape(picture.about or picture.title)
    style = f"min-width:{4 * width:.0f}em; max-width:{8 * width:.0f}em"  # letters stay as large as those of the text
    return markupsafe.Markup(f'<svg role="img" style="{style}" aria-label="{about}"{svg}')


def table(
    frame: DataFrame, title: str = "", notes: Sequence[str] = (), links: Mapping[str, str] | None = None
) -> Table:
    """A DataFrame for the template."""
    shown = tables.with_shown_cells(frame)
    numeric = set()
    for number, name in enumerate(frame):
        if frame[name].map(_is_number).all():
            numeric.add(number)
    rows = []
    for row, cells in zip(frame.to_dict("records"), shown.to_numpy().tolist(), strict=True):
        tone = ""
        if row.get("family") == "primary":
            word = row.get("word", "")
            tone = CLASSES.get(word, "")
        rows.append({"cells": cells, "tone": tone})
    return {"title": title, "columns": list(shown), "rows": rows, "numeric": numeric, "notes": notes, "links": links}


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float | Interval)


def page(study: Study, out: Path) -> Page:
    """Arrange a study for the template.

    Args:
        out: the file that the page will be. Links are relative to its folder.
    """
    used = tables.tested(study.runs)
    made = study.made_tables()
    warnings = []
    if study.exploratory:
        warnings.append(f"Exploratory: {study.exploratory}.")
    failed = study.trust[study.trust["level"] == "bad"]
    if len(failed):
        titles = ", ".join(failed["title"])
        warnings.append(f"Checks that failed: {titles}.")
    checks = []
    for check in study.trust.to_dict("records"):
        if check["level"] == "good":
            check["detail"] = ""
        checks.append(check)
    _, tests = made["tests"]
    counts = f"{used['arm'].nunique()} arms, {len(used)} test runs, {used['seed'].nunique()} seeds"
    return Page(
        title=study.plan.name,
        counts=re.sub(r"\b1 (arm|test run|seed)s", r"1 \1", counts),
        headlines=_headlines(study),
        warnings=warnings,
        top_pictures=_top_pictures(study),
        tests=_top_tests(tests),
        sections=_sections(study, made, out),
        footer="Made by python -m analysis report. One file, no scripts, nothing is loaded.",
        badges=_badges(used),
        more=other_tests(len(study.tests) - MAX_TOP_TESTS),
        checks=checks,
    )


def other_tests(number: int) -> str:
    """How many tests the page has beside the first ones.

    >>> other_tests(2), other_tests(1), other_tests(0)
    ('2 more tests are in Table 2.', '1 more test is in Table 2.', '')
    """
    if number == 1:
        return "1 more test is in Table 2."
    return f"{number} more tests are in Table 2." if number > 0 else ""


def _top_pictures(study: Study) -> tuple[gallery.Picture, ...]:
    """The forest, and the curves of the first comparison."""
    pictures = list(gallery.forest(study))
    groups = gallery.groups_of(study)
    if groups:
        pictures += gallery.loss_pictures(study, groups[0], 0)
    return tuple(pictures)


def _top_tests(tests: DataFrame) -> Table | None:
    """The first tests, on top of the page, without a column of times where there are none."""
    if tests.empty:
        return None
    shown = tests.head(MAX_TOP_TESTS)[list(TOP_COLUMNS)]
    if all(math.isnan(ratio.estimate) for ratio in shown["times_sooner"]):
        return table(shown.drop(columns="times_sooner"))
    return table(shown, notes=(ABOUT_TIMES,))


def _badges(used: DataFrame) -> list[str]:
    """The clocks of the runs that are tested, and whether they began from random parameters."""
    badges = []
    for clock in sorted(used["clock"].unique()):
        badges.append("simulated clock" if clock == "virtual" else "measured clock")
    if used["from_scratch"].any():
        badges.append(FROM_SCRATCH)
    return badges


def _sections(study: Study, made: Mapping[str, tuple[str, DataFrame]], out: Path) -> list[Section]:
    """The folded parts of the page that hold anything."""
    sections: list[Section] = []

    def add(
        key: str,
        title: str,
        pictures: Iterable[gallery.Picture] = (),
        names: Sequence[str] = (),
        lead: Iterable[str] = (),
        **options: Any,
    ) -> None:
        """Add a section, unless it would be empty; `options` are those of its tables."""
        drawn = tuple(pictures)
        shown = []
        for name in names:
            table_title, frame = made[name]
            if len(frame):
                shown.append(table(frame, table_title, **options))
        section = Section(key, title, drawn, tuple(shown), tuple(lead))
        if drawn or shown or section.lead:
            sections.append(section)

    others: list[gallery.Picture] = []
    for number, group in enumerate(gallery.groups_of(study)[1:], 1):
        others += gallery.loss_pictures(study, group, number)
    add(
        "differences",
        "Differences of differences",
        names=["differences"],
        lead=map(differences.sentence, study.differences.itertuples()),
    )
    add("curves", "Loss curves of the other groups", others)
    add("times", "Time to the target", gallery.target_pictures(study))
    add("workers", "Throughput, delay, learning rate", gallery.scatter_pictures(study), ["tuning"])
    add("downstream", "Downstream scores", gallery.confusion_pictures(study), ["downstream"], notes=(ABOUT_SCORES,))
    add("tables", "Tables", names=["arms", "sets", "settings", "tests"], lead=ABOUT_TESTS)
    add("runs", "Every run", names=["runs"], links=_links(study, out))
    add("environment", "Machines and code", names=["environments"])
    add("left-out", "What is left out, and why", lead=tables.left_out(study.runs, study.tests))
    add("problems", "What could not be read", lead=study.plan.problems)
    again = Section("again", "How to make this again", lead=_declared(study), commands=(_command(study, out),))
    return [*sections, again]


def _links(study: Study, out: Path) -> dict[str, str]:
    """The address of the folder of each run that is there, relative to the page."""
    folder = os.path.relpath(study.folder.resolve(), out.parent.resolve())
    prefix = Path(folder).as_posix()
    links = {}
    there = study.runs[study.runs["status"] != "MISSING"]
    for name, path in there["path"].items():
        below = path.relative_to(study.folder).as_posix()  # "." for the folder of one run
        links[name] = quote(f"{prefix}/{below}/")
    return links


ABOUT_TIMES = "Times sooner: the reference's time to the target / the treatment's. Below 1 the treatment is later."
ABOUT_SCORES = "Means over the repetitions of a pretraining seed, then over these seeds, with 95 % t intervals."
ABOUT_TESTS = (
    "An interval holds what the test of a difference does not reject at alpha / family size, also beside equivalent. "
    "Holm's method may find more than that.",
    "Only the primary family and differences of differences were registered. "
    "Each other family holds a difference by chance in alpha of studies.",
    "Measured rates of a wrong better or worse with 8 seeds (experiments/benchmarks/error_rates.py): at most 5 % where "
    "noise is symmetric or alike in both arms; 15 % where it is log-normal in one arm; 65 % where one run in twenty of "
    "one arm goes far wrong.",
)


def _headlines(study: Study) -> Sequence[tuple[str, tuple[str, ...]]]:
    """The sentence of every headline with its conditions and small type.

    A line that stands below an earlier headline is not repeated.
    """
    found = []
    earlier: set[str] = set()
    for headline in study.headlines:
        lines = list(headline.details)
        if headline.row is not None:
            words = conditions_of(headline)
            if not headline.text.startswith(words):
                lines.insert(0, words)
        new = tuple(line for line in lines if line not in earlier)
        earlier.update(new)
        found.append((headline.text, new))
    return found


def _declared(study: Study) -> tuple[str, ...]:
    """What was registered, a line for each key."""
    if study.plan.registered is UNREGISTERED:
        return ()
    registered = msgspec.to_builtins(study.plan.registered)
    lines = []
    for key, value in registered.items():
        if value:
            name = key.replace("_", " ")
            lines.append(f"{name}: {value}")
    return tuple(lines)


def _command(study: Study, out: Path) -> str:
    """As it was typed, but for an absolute path, which may hold the name of a user."""
    folder = study.folder.as_posix()
    if study.folder.is_absolute():
        folder = study.folder.resolve().name
    return f"python -m analysis report {shlex.quote(folder)} --out {shlex.quote(out.name)}"
