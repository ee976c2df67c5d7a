"""Tables with a row a comparison: its test, correction, margin and verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from analysis.findings.judging import TestRow
from analysis.findings.results import Results
from analysis.report.tables.number_formats import between, gap, level_of, nats, number, p_value, percent, ratio
from analysis.report.tables.table import Cell, Table, badge, prose, sentence, tabled, value, words
from analysis.report.tables.text import MISSING
from asyncsgd.study.finetuning import SCORES


def _won(row: TestRow) -> str:
    """
    Pairs that the treatment won; of times, those in which neither had got there by the end of the budget are neither.
    """
    return f"{row.wins} of {row.n}" + f", {row.ties} even" * (row.ties > 0)


def _margin(row: TestRow) -> str:
    """What the margin is beside all that the reference improved by, with its reason; or why it is not used."""
    if row.margin_refused or row.margin_share is None:
        return row.margin_refused
    reason = f": {row.margin_reason}" if row.margin_reason else ""
    return f"{percent(row.margin_share)} of the reference's improvement{reason}"


def _verdict(row: TestRow) -> Cell:
    """The word as a badge, without a colour where it was not registered; the row says of which family it is."""
    return badge(row.word) if row.family == "primary" else Cell(row.word, tone="open")


def by_chance(rows: Iterable[TestRow]) -> tuple[str, ...]:
    """How many families that were not registered hold a difference by chance alone: alpha of each."""
    told = []
    for kind in ("secondary", "exploratory"):
        own = [row for row in rows if row.family == kind]
        families, expected = sum(1 / row.family_size for row in own), sum(row.alpha / row.family_size for row in own)
        if own:
            many = "1 family" if round(families) == 1 else f"{families:.0f} families"
            told.append(
                f"Not registered: {many} of {kind} comparisons. Where no arm is better, about {expected:.2g} of them "
                "hold a difference by chance alone."
            )
    return tuple(told)


def difference(row: TestRow) -> Cell:
    """The estimate of a test in the unit of its endpoint with the interval that its word rests on, n and the level."""
    form: Callable[[float | None], str] = number
    if row.endpoint in ("loss_at_equal_samples", "loss_at_equal_seconds", *SCORES, "accuracy"):
        form = gap
    cell = between(row.deciding, form)
    if row.deciding is None:
        return cell
    return Cell(f"{cell.text} {row.unit}".strip(), f"{cell.small}, {level_of([row.deciding])}")


def comparisons(results: Results) -> Table:
    """Table 2: every comparison with its test, correction, margin and verdict."""
    rows = []
    for row in results.tests:
        form = number if row.endpoint == "time_to_target" else nats
        equivalence = MISSING
        if row.margin is not None:
            equivalence = f"±{row.margin:g}; {p_value(row.p_equivalence)}"
        rows.append(
            [
                words("comparison", row.comparison),
                words("endpoint", row.endpoint_label),
                words("family", f"{row.family} ({row.family_size})"),
                value("reference", form(row.reference_mean)),
                value("treatment", form(row.treatment_mean)),
                value("difference [CI]", difference(row)),
                value("ratio of mean times [CI]", between(None if row.times is None else row.times.ratio, ratio)),
                value("won", MISSING if row.p is None else _won(row)),
                value("p", p_value(row.p)),
                value("p, Holm", p_value(row.p_holm)),
                value("margin; p, Holm, equivalence", Cell(equivalence, _margin(row))),
                words("verdict", _verdict(row)),
                prose("why, and what limits it", " ".join(sentence(text) for text in (row.reason, *row.notes) if text)),
            ]
        )
    names = ", ".join(dict.fromkeys(row.test for row in results.tests)) or "exact sign-flip"
    return tabled(
        "tests",
        "Table 2. Tests",
        rows,
        results.tests,
        lead="Difference: treatment - reference over seeds; below 0 is better for losses and times. "
        f"Test: {names}; its interval holds the differences that it does not reject at alpha over the size of the "
        "family. Where the verdict rests on the margin, the interval is that of the equivalence test. "
        "Holm's correction within a family, whose size is in brackets: one endpoint in one group, and all comparisons "
        "with the baseline. Secondary: corrected, but not registered. Times are compared up to the second in their "
        "row: a pair in which neither got there by then is even. Their ratio is reference / treatment, at the level "
        "of the difference. Where a run diverged, pairs are compared by ranks: its difference is the largest, and has "
        "no size.",
        notes=by_chance(results.tests),
        narrow=True,
    )


def first_tests(results: Results, most: int = 6) -> Table:
    """The rows of Table 2 that the eye meets first: the primary family, then the rest of its group; fewer columns."""
    first = {group.name for group in results.groups if group.primary}
    named = next((headline.group for headline in results.headlines), "")  # in words, above the table
    ordered = sorted(results.tests, key=lambda row: (row.family != "primary", row.group not in first))[:most]
    rows = []
    for row in ordered:
        why = row.reason if row.by_divergence is None else f"by ranks, won {_won(row)}"
        shown = difference(row) if row.estimate is not None else Cell(MISSING, why)
        if row.times is not None and row.estimate is not None:
            won = f"won {_won(row)}"
            if row.times.ratio is not None:
                won = f"{between(row.times.ratio, ratio).text} in mean time, {won}"
            shown = Cell(shown.text, "; ".join(part for part in (shown.small, won) if part))
        comparison = row.comparison.removesuffix(f", {row.group}") if row.group == named else row.comparison
        rows.append(
            [
                words("comparison", Cell(comparison, row.family)),
                words("endpoint", row.endpoint_label),
                value("difference [CI]", shown),
                value("p", p_value(row.p)),
                value("p, Holm", p_value(row.p_holm)),
                value("margin", Cell(MISSING if row.margin is None else f"±{row.margin:g}", _margin(row))),
                words("verdict", _verdict(row)),
            ]
        )
    names = ", ".join(dict.fromkeys(row.test for row in ordered)) or "exact sign-flip"
    notes = [f"Treatment - reference, paired by seed: below 0 is better for losses and times. p: {names}."]
    if len(results.tests) > most:
        notes.append(f"{len(results.tests) - most} more comparisons are in Table 2 below.")
    notes += by_chance(results.tests)
    return tabled("first-tests", "The tests", rows, ordered, notes=tuple(notes), narrow=True, cards=True)
