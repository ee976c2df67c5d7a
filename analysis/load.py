"""A folder of runs as a study: its three tables (docs/tables.md), and the verdict and pages that are made of them."""

from __future__ import annotations

import contextlib
import functools
import html
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from analysis import answers, comparisons, differences, gate, judge, scores, tables, trust, verdict
from analysis.commands import write
from analysis.measure import Measure
from analysis.pairs import Pairs, pairs_of
from analysis.questions import Plan, conditions, groups, why_exploratory
from analysis.read import read
from analysis.stats import Array
from analysis.verdict import Headline
from asyncsgd.errors import UsageError, nearest

TOLD_BY_NO_ROW = ("sync guard", "tuning", "rules that acted", "fine-tuned models that learned")
"""Checks that a headline tells where they fail. What other checks find is told by the rows that it concerns."""


class Study:
    """Runs, their curves, and the tests that were asked of them; in a notebook it shows its headline.

    `runs`, `curves` and `tests` are DataFrames; docs/tables.md says what every column is.
    """

    def __init__(self, folder: Path | str, arms: Sequence[str] = ()) -> None:
        self.folder = Path(folder)
        self.runs, self.curves, plan = read(self.folder)
        if isinstance(arms, str):
            raise UsageError(f"arms is a list of settings; write arms=[{arms!r}]")
        if arms and plan.runs:
            raise UsageError(
                "arms are named for loose runs alone; plan.json says in what the arms of this folder differ, so leave "
                "--arms out"
            )
        if arms:
            self._check(arms)
        self.plan = plan._replace(arms_differ_in=tuple(arms))

    @functools.cached_property
    def tests(self) -> DataFrame:
        """A row for every question asked of pairs of runs, with its answer in a word."""
        return judge.judge(self.runs, self.arms, self.pairs, self.measure, self._judged_as())

    @functools.cached_property
    def measure(self) -> Measure:
        """Reads values off the curves."""
        return Measure(self.curves)

    @functools.cached_property
    def pairs(self) -> list[Pairs]:
        """Every arm with its reference."""
        return list(pairs_of(self.runs, self.arms, self.plan))

    @functools.cached_property
    def differences(self) -> DataFrame:
        """A row like those of `tests` for every registered difference of differences."""
        return differences.differences(self.runs, self.arms, self.measure, self._judged_as())

    @functools.cached_property
    def arms(self) -> DataFrame:
        """Algorithm, workers, clock, speeds, batch size, task and group of every arm."""
        return groups(self.runs, self.plan)

    @functools.cached_property
    def exploratory(self) -> str:
        """Why nothing of the study is confirmed; empty where the registration stands."""
        return why_exploratory(self.runs, self.arms, self.plan)

    @functools.cached_property
    def trust(self) -> DataFrame:
        """Title, value, level and detail of every check, failures first."""
        return trust.trust(trust.StudyTables(self.runs, self.curves, self.tests, self.plan, self.exploratory))

    @functools.cached_property
    def headlines(self) -> list[Headline]:
        """What is said first: a headline for each registered comparison, without a registration for every comparison,
        or the one of a special report that judges."""
        name = comparisons.report_of(self.folder)
        if name in comparisons.REPORTS_THAT_JUDGE:
            from analysis import special  # matplotlib takes a second

            # if the report cannot be made, the study has the headlines that every study has
            with contextlib.suppress(UsageError):
                first, *others = special.SENTENCES[name](self.folder)
                return [Headline(first, tuple(others), None)]
        is_shown = (self.trust["level"] == "bad") & self.trust["title"].isin(TOLD_BY_NO_ROW)
        failed = [f"{row.title}: {row.value}. {row.detail}" for row in self.trust[is_shown].itertuples()]
        extras = verdict.Extras(self._remarks(), self._warnings(), failed)
        found = verdict.headlines(self.tests, self.arms, self.plan, extras)
        return found or [Headline(self._why_no_verdict(), (), None)]

    @property
    def verdict(self) -> str:
        """The headlines with their details."""
        return "\n".join(map(str, self.headlines))

    def table(self, name: str) -> DataFrame:
        """One of `TABLES` as a DataFrame with plain numbers; an interval is three columns."""
        if name not in TABLES:
            raise UsageError(f"there is no table {name!r}{nearest(name, TABLES)}; there are: {', '.join(TABLES)}")
        return tables.with_plain_numbers(TABLES[name][1](self))

    def made_tables(self) -> dict[str, tuple[str, DataFrame]]:
        """Name -> title and frame of all `TABLES`."""
        return {name: (title, of(self)) for name, (title, of) in TABLES.items()}

    def plot(self, kind: str = "forest", **options: Any) -> Any:
        """A figure: forest, loss, reached or against; `options` go to the function of that name in `analysis.plots`."""
        from analysis import gallery  # matplotlib takes a second

        return gallery.plot(self, kind, **options)

    def report(self, out: Path | str | None = None) -> Path:
        """Write the page, one file without scripts; None: to report.html in the folder."""
        from analysis import page, special

        file = self.folder / "report.html" if out is None else Path(out)
        write(file, page.render(special.page_of(self, file)))
        return file

    def __repr__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        shown = ""
        for headline in self.headlines:
            lines = "".join(f"<li>{html.escape(line)}</li>" for line in headline.details)
            shown += f"<p><b>{html.escape(headline.text)}</b></p><ul>{lines}</ul>"
        return shown

    def _check(self, arms: Sequence[str]) -> None:
        """Refuse names that are no settings of a run."""
        known = gate.setting_names(self.runs)
        for name in arms:
            if name not in known:
                raise UsageError(f"no run here has a setting {name!r}{nearest(name, sorted(known))}")

    def _judged_as(self) -> Plan:
        """The plan with the reason why the study is exploratory, which may also lie in the runs."""
        return self.plan._replace(why_exploratory=self.exploratory)

    def _remarks(self) -> dict[tuple[str, str], list[str]]:
        """(treatment, reference) -> what a headline has to add."""
        found = {}
        for pairs in self.pairs:
            remarks = []
            for arm in (pairs.reference, pairs.treatment):
                if arm in self.plan.arms and trust.at_edge(self.plan.arms[arm]):
                    edge = f"The learning rate of {arm} lies at the edge of its grid"
                    remarks.append(f"{edge}, so a better one may lie beyond.")
            if not pairs.control and not pairs.why_not_comparable:
                remarks += judge.other_targets(pairs, self.measure, self.plan)
            found[pairs.treatment, pairs.reference] = remarks
        return found

    def _warnings(self) -> dict[tuple[str, str], str]:
        """(treatment, reference) -> a sentence, if neither of the two arms has learned anything."""
        why = {str(arm): scores.why_nothing_learned(own) for arm, own in self.runs.groupby("arm")}
        found = {}
        for row in self.tests.itertuples():
            reasons = [why.get(arm, "") for arm in (row.treatment, row.reference)]
            if all(reasons):
                both_reasons = " and ".join(dict.fromkeys(reasons))
                found[row.treatment, row.reference] = f"Neither arm has learned anything: {both_reasons}."
        return found

    def _why_no_verdict(self) -> str:
        """Why nothing is compared; of a study with one arm, what its runs did."""
        used = self.runs[self.runs["stage"] == "test"]
        finished = used[used["usable"]]
        if finished.empty:
            return f"No verdict: none of {len(used)} test runs has a result yet."
        reference = self.plan.reference
        names = list(dict.fromkeys(finished["algorithm"]))
        has_several_arms = finished["arm"].nunique() > 1
        if has_several_arms and reference not in names:
            return f"No verdict: there is no {reference} arm to compare {', '.join(names)} with."
        if has_several_arms and self.arms["algorithm"].eq(reference).all():
            return f"No verdict: every arm is {reference}; add another algorithm, or type asyncsgd compare."
        for _, algorithms in self.arms.groupby("group")["algorithm"]:
            if algorithms.eq(reference).any() and algorithms.nunique() > 1:
                return (
                    f"No verdict: there are several {reference} arms, and no other arm has the settings of exactly one "
                    "of them."
                )
        if has_several_arms:
            same = "the same workers, clock, speeds and batch size"
            return f"No verdict: no arm has a {reference} arm with {same}."
        alive = finished[~finished["diverged"]]
        if alive.empty:
            return "No verdict: every run of the only arm diverged."
        return self._only_arm(alive, names[0])

    def _only_arm(self, alive: DataFrame, name: str) -> str:
        """What the runs of one arm did, and what to add for a comparison."""
        curves = self.curves[self.curves["run"].isin(alive.index)]
        first = curves.groupby("run")["loss"].first().mean()
        seconds = "simulated seconds" if (alive["clock"] == "virtual").all() else "seconds"
        number = "One run" if len(alive) == 1 else f"{len(alive)} runs"
        group = self.arms.loc[alive["arm"].iloc[0], "group"]
        return (
            f"{number} of {name}, {conditions(str(group))}: evaluation loss {first:.3g}, and "
            f"{alive['loss'].mean():.3g} after {alive['seconds'].mean():.3g} {seconds}. Add a second arm for a "
            "comparison: the same training in another mode or under another rule."
        )


TABLES: dict[str, tuple[str, Callable[[Study], DataFrame]]] = {
    "tests": ("Table 2. Tests", lambda study: tables.comparisons(study.tests)),
    "differences": ("Differences of differences", lambda study: tables.comparisons(study.differences)),
    "arms": ("Table 1. Arms", lambda study: tables.arms(study.runs, study.tests, study.plan)),
    "sets": ("Several evaluation sets", lambda study: tables.evaluation_sets(study.runs)),
    "settings": ("Settings in which arms differ", lambda study: tables.settings(study.runs)),
    "tuning": ("Table 3. Tuning", lambda study: tables.tuning(study.runs, study.plan)),
    "downstream": ("Scores after fine-tuning", lambda study: tables.downstream(study.runs)),
    "runs": ("Every run", lambda study: tables.every_run(study.runs)),
    "environments": ("Table 4. Machines and code", lambda study: tables.environments(study.runs)),
    "trust": ("How far to trust this", lambda study: study.trust),
    "paper": ("For a paper", lambda study: tables.paper(study.runs, study.tests, study.plan)),
}
"""Name -> title and function of the tables of a report."""


def load(folder: Path | str, arms: Sequence[str] = ()) -> Study:
    """The study of a folder; `asyncsgd.load` calls this function and says what its arguments are."""
    return Study(folder, arms)


def compare(
    a: Sequence[float] | Array,
    b: Sequence[float] | Array,
    margin: float | None = None,
    *,
    lower_is_better: bool = True,
    alpha: float = 0.05,
) -> Series:
    """The answer to one question; `asyncsgd.compare` calls this function and says what its arguments are."""
    if isinstance(a, Series) and isinstance(b, Series):
        b = _aligned(a, b)
    ours = _numbers(a, "a")
    theirs = _numbers(b, "b")
    if ours.ndim != 1 or ours.shape != theirs.shape:
        raise ValueError(f"a and b need as many numbers as each other, got shapes {ours.shape} and {theirs.shape}")
    if np.isnan(ours).any() or np.isnan(theirs).any():
        raise ValueError("a and b must not hold nan; leave such a pair out of both")
    if not (isinstance(alpha, Real) and 0 < alpha < 0.5):
        raise ValueError(f"alpha must be a number above 0 and below 0.5, such as 0.05, got {alpha!r}")
    if margin is None:
        margin = math.nan
    elif not (isinstance(margin, Real) and 0 < margin < math.inf):
        raise ValueError(f"margin must be a finite number above 0, or None, got {margin!r}")
    row = answers.question_of_numbers(ours, theirs, margin=float(margin), lower=lower_is_better, alpha=float(alpha))
    (answered,) = answers.answer_family([row])
    return Series(vars(answered))[answers.TESTS]


def _aligned(a: Series, b: Series) -> Series:
    """`b` in the order of the labels of `a`: a pair is what has one label."""
    for name, series in (("a", a), ("b", b)):
        repeated = series.index[series.index.duplicated()].unique().tolist()
        if repeated:
            raise ValueError(f"{name} has the label {repeated[0]!r} more than once; a pair needs one label of its own")
    alone = sorted(set(a.index) ^ set(b.index), key=str)
    if alone:
        raise ValueError(
            f"a and b are paired by their labels, and {alone[0]!r} is in one of them alone; give both the same labels, "
            "or their numbers in the same order: compare(a.to_numpy(), b.to_numpy())"
        )
    return b.reindex(a.index)


def _numbers(values: Any, name: str) -> Array:
    array = np.asarray(values)
    for value in array.ravel().tolist():
        if not isinstance(value, Real):
            raise ValueError(f"{name} needs numbers, got {value!r}")
    return array.astype(float)
