"""Pairs: the runs of a treatment and its reference on the same seeds, and what may be compared in them.

Whether two runs are comparable is decided in `analysis.gate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.curves import SAME_LOOKS, Curve, bracket, curve, losses_around, on_common_looks, shared_look, until_shared
from analysis.gate import BEGAN, BUDGET, Between, between, told_apart
from analysis.questions import Plan
from asyncsgd.study.arms import differing

FROM_SCRATCH = "from scratch: not STILT"
UNEQUAL_BATCHES = "unequal batches"
BY_RANKS = "a diverged run is worse than any other, so the pairs are compared by ranks"
WHOLE, SAME_BATCH = 0.95, 0.01
"""Share of the planned samples that a run must have; by which the samples of an update may differ."""
ALSO = "the arms also differ in"
"""How the note on what arms differ in begins."""
RISEN = "at the target and"
"""In the note on runs that do not hold the target at their end."""


DURING = "during "
"""How the notes begin on what went wrong in runs that have a result."""
HAPPENED = {
    "lost_workers": "a worker was lost",
    "looks_not_finite": "an evaluation was not finite",
    "resumed_on": "another machine took over",
}
"""Keys of a run's details, in words."""


AGAIN = "beside the runs of "
"""How the notes begin on runs that were."""
WITH_RESULT = ("DONE", "DIVERGED")


class Pairs(NamedTuple):
    """A treatment against its reference: the runs of both by seed, all with a result."""

    treatment: str
    reference: str
    group: str
    clock: str
    ours: pd.DataFrame
    theirs: pd.DataFrame
    left_out: str
    """Pairs that are in no number, and why."""
    notes: tuple[str, ...]
    caveats: tuple[str, ...]
    """Sentences without which any word would mislead."""
    no_speed: tuple[str, ...]
    """The same for words on measured seconds."""
    unlike: str
    """Why nothing is compared; empty where it is."""
    apart: Mapping[Any, str]
    """Seed -> why the seconds of its two runs are not compared."""
    control: bool = False
    """Whether the reference is the control arm, of which losses at equal samples are compared and nothing else."""


def pairs_of(runs: pd.DataFrame, arms: pd.DataFrame, plan: Plan) -> Iterator[Pairs]:
    """Every arm against the reference arm of its group, and against the control arm that makes updates as small."""
    control = plan.registered.get("control")
    tests = runs[(runs["stage"] == "test") & (runs["replicate"] == 0)].set_index("seed", drop=False)
    others = runs[runs["status"].isin(WITH_RESULT) & (runs["task"] != "finetuning")]
    others = others[others["stage"].eq("") | (others["stage"].eq("test") & (others["replicate"] > 0))]
    for group, members in arms.groupby("group", sort=False):
        for treatment, reference, variant in _compared(members, plan):
            clock = str(members["clock"].iloc[0])
            yield _pairs(tests, others, (treatment, reference, f"{group}{variant}", clock), plan)
            for other in arms.index[arms["algorithm"] == control] if control else ():
                ours, theirs = (_samples_per_update(tests[tests["arm"] == arm]) for arm in (treatment, other))
                same = all(arms.loc[other, key] == members[key].iloc[0] for key in ("workers", "clock", "speeds"))
                if other != treatment and same and abs(ours - theirs) <= SAME_BATCH * max(ours, theirs):
                    yield _pairs(tests, others, (treatment, other, str(group), clock), plan, control=True)


def _compared(members: pd.DataFrame, plan: Plan) -> Iterator[tuple[str, str, str]]:
    """(treatment, reference, what tells the reference from others); an arm goes to the one that has its settings."""
    references = list(members.index[members["algorithm"] == plan.reference])
    settings = [plan.arms.get(arm, {}).get("settings") or {} for arm in references]
    keys = differing(settings) if len(references) > 1 else []
    for treatment in members.index:
        if treatment in references or members.loc[treatment, "algorithm"] == plan.registered.get("control"):
            continue
        own = [one for one in references if all(plan.setting(one, key) == plan.setting(treatment, key) for key in keys)]
        if len(own) == 1:
            yield treatment, own[0], "".join(f", {key} {plan.setting(own[0], key)}" for key in keys)


def _pairs(
    tests: pd.DataFrame, others: pd.DataFrame, place: tuple[str, str, str, str], plan: Plan, *, control: bool = False
) -> Pairs:
    treatment, reference, _, clock = place
    ours, theirs = (tests[tests["arm"] == arm] for arm in (treatment, reference))
    seeds = ours.index.intersection(theirs.index)
    whole = [seed for seed in seeds if ours["usable"][seed] and theirs["usable"][seed]]
    lost = [f"{seed:g}" for seed in seeds if seed not in whole]
    alone = [f"{seed:g}" for seed in sorted(set(ours.index) ^ set(theirs.index))]
    left = [f"{len(lost)} pair{'s' * (len(lost) != 1)} left out (seed {', '.join(lost)})"] * bool(lost)
    left += [f"seed {', '.join(alone)} only in one of the two arms"] * bool(alone)
    notes, caveats = [], []
    twins = copied(_ends(ours.loc[whole]), _ends(theirs.loc[whole]))
    left += [f"seed {seed:g} is a copy of seed {first:g} and counts once" for seed, first in twins.items()]
    whole = [seed for seed in whole if seed not in twins]
    for side, arm in ((ours, treatment), (theirs, reference)):
        caveats += lost_runs(side, f"runs of {arm}")
        caveats += repeated(side.loc[whole], arm)
        notes += happened(side.loc[whole], f"runs of {arm}")
        again = made_twice(side.loc[whole], others[others["arm"] == arm], bool(plan.runs))
        notes += again[0]
        caveats += again[1]
        if number := int(side.loc[whole, "diverged"].sum()):
            notes.append(f"{arm}: diverged {number}/{len(whole)}")
    ours, theirs = ours.loc[whole], theirs.loc[whole]
    both = pd.concat((ours, theirs))
    notes += _batches(ours, theirs, treatment, reference)
    notes += [FROM_SCRATCH] * bool((both["from_scratch"] == True).any())  # noqa: E712
    may_differ = told_apart(treatment, reference, plan)
    if control:
        may_differ |= {*BUDGET, "batch_size"}
    gated = between(ours, theirs, may_differ)
    different, also = united(gated, plan)
    notes += also
    apart: dict[Any, str] = {}
    no_speed: list[str] = []
    if clock == "measured":
        no_speed = timing_caveats(both)
        apart = {seed: "; ".join(one.untimed.values()) for (seed, _), one in gated.pairs.items() if one.untimed}
        if mixed := [why for side in (ours, theirs) if (why := _mixed(side))]:
            apart = dict.fromkeys(whole, "; ".join(mixed))
        if apart and len(apart) < len(whole):
            named = ", ".join(f"{seed:g}" for seed in apart)
            no_speed.append(f"The seconds of the runs of seed {named} are not compared: {next(iter(apart.values()))}.")
    told = tuple(notes), tuple(caveats), tuple(no_speed)
    return Pairs(*place, ours, theirs, "; ".join(left), *told, different, apart, control)


def _ends(runs: pd.DataFrame) -> dict[Any, str]:
    """Seed -> the hash of a run's last parameters, of runs that have trained, did not diverge, and have recorded it."""
    ended = runs[~runs["diverged"] & (runs["updates"] > 0)]
    return {seed: one for seed, one in ended["parameters_sha256"].items() if isinstance(one, str) and one}


def made_twice(runs: pd.DataFrame, others: pd.DataFrame, planned: bool) -> tuple[list[str], list[str]]:
    """Notes and caveats on runs of an arm that were made more than once.

    The run in the planned folder counts, the last that was made there; of loose runs of one seed the first by name. A
    second result may have been looked at before one of them was kept, so it is a caveat. A replicate of a plan and a
    killed run that was made again are told.

    Args:
        runs: those that are in pairs.
        others: with a result, of the same arm and in no pair.
        planned: whether the folder has a plan.
    """
    statuses = [status for details in runs["details"] for status in details.get("replaced", ())]
    results = sum(status in WITH_RESULT for status in statuses)
    beside = others[others["seed"].isin(runs["seed"])]
    replicates = int(beside["stage"].eq("test").sum()) if planned else 0
    second = len(beside) - replicates + results
    counted = f"{AGAIN}{runs['arm'].iloc[0] if len(runs) else ''} that are counted there are"
    notes = []
    if replicates:
        notes.append(f"{counted} planned replicates ({replicates})")
    if killed := len(statuses) - results:
        notes.append(f"{counted} earlier ones without a result ({killed})")
    caveats = []
    if second:
        told = f"{counted} others of their seeds with a result ({second})."
        caveats.append(told[:1].upper() + told[1:])
    return notes, caveats


def copied(one: Mapping[Any, str], other: Mapping[Any, str]) -> dict[Any, Any]:
    """Seed -> an earlier seed whose two runs end at the same parameters: copies, or a task that ignores its seed.

    Args:
        one, other: of both arms seed -> the hash of last parameters.
    """
    first: dict[tuple[str, str], Any] = {}
    found = {}
    for seed in one:
        if seed in other:
            earlier = first.setdefault((one[seed], other[seed]), seed)
            if earlier != seed:
                found[seed] = earlier
    return found


def repeated(runs: pd.DataFrame, arm: str) -> list[str]:
    """Why the runs of an arm are not independent of each other: some end at the same parameters."""
    ends = _ends(runs)
    different = len(set(ends.values()))
    if different == len(ends):
        return []
    where = "the same parameters" if different == 1 else f"{different} different sets of parameters"
    return [f"The {len(ends)} runs of {arm} end at {where}, so they are not independent."]


def united(gated: Between, plan: Plan) -> tuple[str, list[str]]:
    """Why the pairs of two arms are not comparable, and a note on what the arms differ in beside that."""
    told: dict[str, list[str]] = {}
    for one in gated.pairs.values():
        for key, both in one.told.items():
            told.setdefault(key, []).extend(both)
    why = gated.unlike
    refused = {key for one in gated.pairs.values() for key in one.refused}
    settings = sorted(refused - {*BEGAN, "first_loss", "micro_batches"})
    if settings and not plan.runs:
        why += f" (if the arms are meant to differ in it: --arms {','.join((*plan.apart, *settings))})"
    differ = []
    for key, values in told.items():
        comma = "; " if any("," in value for value in values) else ", "
        differ.append(f"{key} ({comma.join(dict.fromkeys(values))})")
    return why, [f"{ALSO} {', '.join(differ)}"] if differ else []


def _mixed(side: pd.DataFrame) -> str:
    """Threads and devices are a part of an arm: where its runs differ in them, their mean seconds are none of it."""
    told = {
        f"{run.threads:g} thread{'s' if run.threads != 1 else ''} a worker on {run.device}"
        for run in side.itertuples()
        if run.device
    }
    return f"runs of {side['arm'].iloc[0]} had {' and '.join(sorted(told))}" if len(told) > 1 else ""


def lost_runs(runs: pd.DataFrame, what: str) -> list[str]:
    """How many of `runs` have no result, each status a sentence."""
    counts = runs.loc[~runs["usable"], "status"].value_counts().sort_index()
    return [
        f"{number} of {len(runs)} {what} {'is' if number == 1 else 'are'} "
        f"{'DONE without a curve' if status == 'DONE' else status}, and in no number."
        for status, number in counts.items()
    ]


def happened(runs: pd.DataFrame, what: str) -> list[str]:
    """What went wrong in runs that have a result, each a note."""
    told = []
    for key, words in HAPPENED.items():
        number = sum(key in details for details in runs["details"])
        if number:
            told.append(f"{DURING}{number} of {len(runs)} {what} {words}")
    return told


def _samples_per_update(runs: pd.DataFrame) -> float:
    known = runs[runs["samples_per_update"].notna() & runs["usable"]]
    updates = known["updates"].sum()
    return float((known["samples_per_update"] * known["updates"]).sum() / updates) if updates else math.nan


def _batches(ours: pd.DataFrame, theirs: pd.DataFrame, treatment: str, reference: str) -> list[str]:
    """At equal samples an arm with smaller updates makes more of them, which is a difference of its own."""
    sizes = [_samples_per_update(side) for side in (ours, theirs)]
    if not np.isfinite(sizes).all() or abs(sizes[0] - sizes[1]) <= SAME_BATCH * max(sizes):
        return []
    return [
        f"{UNEQUAL_BATCHES}: {treatment} makes {sizes[1] / sizes[0]:.3g} times as many updates of the same samples as "
        f"{reference} ({sizes[0]:.3g} and {sizes[1]:.3g} samples an update)"
    ]


def timing_caveats(runs: pd.DataFrame) -> list[str]:
    """Why the measured seconds of some of these runs are no speed comparison, each a sentence."""
    told = []
    if (runs["oversubscribed"] == True).any():  # noqa: E712
        told.append("The machine had more threads than cores, so its seconds are no speed comparison.")
    if (runs["resumes"] > 0).any():
        told.append("Some runs were stopped and resumed, so their seconds are no speed comparison.")
    return told


def values_of(
    ours: NDArray[np.float64], theirs: NDArray[np.float64], seeds: list[Any], **limits: Any
) -> dict[str, Any]:
    """Columns of `tests`: one value a pair of an endpoint, inf of a run that diverged, and what limits them.

    Args:
        ours, theirs: of each pair a number, or two between which it lies (n x 2), whose middle is then the value.
    """
    columns: dict[str, Any] = {"seeds": seeds, "n": len(seeds), **limits}
    for side, values in (("treatment", ours), ("reference", theirs)):
        ends = values if values.ndim == 2 else np.column_stack((values, values))
        columns |= {f"{side}_values": ends.mean(axis=1), f"{side}_ends": ends}
    return columns


NONE = np.array([])


class Measure:
    """Reads the values of every endpoint off the curves."""

    def __init__(self, curves: pd.DataFrame) -> None:
        self._frames = dict(iter(curves.groupby("run")))
        self._known: dict[tuple[str, str], Curve] = {}

    def curve(self, run: str, x: str) -> Curve:
        """Empty for a run without an evaluation."""
        if (run, x) not in self._known:
            self._known[run, x] = curve(self._frames[run], x) if run in self._frames else (NONE, NONE)
        return self._known[run, x]

    def end(self, run: str, x: str) -> float:
        """The last position at which a run was watched; nan without an evaluation."""
        return float(self._frames[run][x].max()) if run in self._frames else math.nan

    def crossings(self, runs: Sequence[Any], target: float, x: str = "seconds") -> list[tuple[float, float]]:
        """Between which looks each of `runs` came to the target, on looks that all had; never for one that diverged, or
        that ends above its own start.

        A run that stopped at its target_loss was there at its end, whoever else was looked at then.
        """
        own = {run.run: self.curve(run.run, x) for run in runs if not (run.diverged or self._lost(run.run))}
        known = dict(zip(own, on_common_looks(list(own.values())), strict=True))
        return [bracket(known[run.run], target) if run.run in known else (math.inf, math.inf) for run in runs]

    def looks(self, runs: Sequence[Any], x: str) -> dict[str, Curve]:
        """The curves of runs that are compared; one that stopped at its target_loss ends at a look that all share."""
        own = {run.run: self.curve(run.run, x) for run in runs}
        for run in runs:
            if self.stopped(run):
                for other in own.keys() - {run.run}:
                    own[run.run] = until_shared(own[run.run], self.curve(other, x))
        return own

    def stopped(self, run: Any) -> bool:
        """Whether a run ended where it was first seen at its target_loss."""
        goal, losses = run.settings.get("target_loss"), self.curve(run.run, "samples")[1]
        return goal is not None and not run.diverged and len(losses) > 0 and bool(losses[-1] <= goal)

    def _lost(self, run: str) -> bool:
        losses = self.curve(run, "samples")[1]
        return not len(losses) or bool(losses[-1] > losses[0])

    def losses(self, pairs: Pairs, x: str) -> dict[str, Any]:
        """Losses at the samples that all runs reached, or at the seconds that both runs of a pair did."""
        rows = [
            both
            for both in zip(pairs.ours.itertuples(), pairs.theirs.itertuples(), strict=True)
            if x == "samples" or both[0].Index not in pairs.apart
        ]
        alive = [run for both in rows for run in both if not run.diverged]
        seeds = [ours.Index for ours, _ in rows]
        if not alive:
            same = np.full(len(rows), math.inf)
            return values_of(same, same, seeds, nothing="every run of both arms diverged" if rows else "")
        if why := self._cut_short(alive):
            return values_of(NONE, NONE, [], nothing=why)
        watched: dict[str, Curve] = {}
        for both in rows:
            watched |= self.looks([run for run in both if not run.diverged], x)
        ends = {run: float(curve[0][-1]) for run, curve in watched.items()}
        places: list[float] = []
        known: dict[str, tuple[float, float]] = {}
        apart: list[Any] = []
        for group in [alive] if x == "samples" else [[run for run in both if run.run in ends] for both in rows]:
            end = min((ends[run.run] for run in group), default=math.nan)
            near = max((self._update(run, x) for run in group), default=0.0)
            look = shared_look([watched[run.run] for run in group], end, near) if group else None
            places += [] if not group else [end if look is None else look]
            for run in group:
                known[run.run] = losses_around(watched[run.run], places[-1], near)
                apart += [run] if known[run.run][0] != known[run.run][1] else []
        values = np.array([[known.get(run.run, (math.inf, math.inf)) for run in both] for both in rows])
        notes = [_where(x, places, min(ends.values()), max(ends.values()))]
        ranked = bool(np.isinf(values).any())
        theirs = values[:, 1].mean(axis=1)
        first = np.mean([self.curve(run.run, "samples")[1][0] for _, run in rows if run.run in ends] or [math.nan])
        gained = float(first - theirs[np.isfinite(theirs)].mean()) if np.isfinite(theirs).any() else math.nan
        limits: dict[str, Any] = {"notes": (*filter(None, notes), *[BY_RANKS] * ranked), "gained": gained}
        if apart:
            limits["between"] = self._seldom(apart, x, pairs.clock)
            if rising := sum(math.isnan(known[run.run][0]) for run in apart):
                told = f"the loss of {rising} of {len(known)} runs does not fall between the looks around it"
                limits["nothing"] = f"{told}, {limits['between']}"
        return values_of(values[:, 0], values[:, 1], seeds, **limits)

    def _update(self, run: Any, x: str) -> float:
        """What a run takes for an update, in samples or seconds; 0 where it is not known."""
        size = self.end(run.run, x) / (run.updates or math.nan)
        return size if math.isfinite(size) else 0.0

    def _seldom(self, runs: Sequence[Any], x: str, clock: str) -> str:
        """How far apart the looks of runs are between which something lies, and what to type for more of them."""
        curves = {run.run: self.curve(run.run, x)[0] for run in runs}
        run = max(runs, key=lambda run: (np.diff(curves[run.run]).max(initial=0.0), len(curves[run.run])))
        looks = curves[run.run]
        unit = x if x == "samples" else "s" if clock == "measured" else "virtual s"
        every = str(run.settings.get("evaluate_every") or "")
        more = f"evaluate_every={float(every) / 10:g}" if every.isdigit() else f"evaluations={10 * (len(looks) - 1)}"
        return f"evaluated every {np.diff(looks).max(initial=0.0):.3g} {unit} (type {more} for a narrower answer)"

    def _cut_short(self, alive: Sequence[Any]) -> str:
        """A run that ended before the samples that alone were to end it; it would move the comparison of all others."""
        planned: dict[str, float] = {}
        for run in alive:
            planned[run.arm] = max(planned.get(run.arm, 0.0), _planned_samples(run))
        for run in alive:
            if (end := self.end(run.run, "samples")) < WHOLE * planned[run.arm]:
                return f"refused: {run.run} ended at {end:g} of the {planned[run.arm]:g} samples of its arm"
        return ""

    def times(self, pairs: Pairs, target: float) -> dict[str, Any]:
        """Seconds to the target, up to the second at which all are known."""
        both = [
            pair
            for pair in zip(pairs.ours.itertuples(), pairs.theirs.itertuples(), strict=True)
            if pair[0].Index not in pairs.apart
        ]
        if not both:
            return values_of(NONE, NONE, [], crossed=NONE.reshape(0, 2, 2))
        brackets = np.array([self.crossings(pair, target) for pair in both])
        times = brackets[:, :, 1]
        runs = [run for pair in both for run in pair]
        ends = {run.run: self.end(run.run, "seconds") for run in runs}
        budget, common, why = self._budget(runs, times.ravel(), ends)
        unit, nothing, cut_short = "s" if pairs.clock == "measured" else "virtual s", "", why == CUT_SHORT
        if times.min() > budget:
            nothing = f"no run reached the target of {target:.3g}"
            nothing += f" within the {budget:.4g} {unit} of every run" * common
            if not common and np.isfinite(times).any():
                arms = zip((pairs.treatment, pairs.reference), np.isfinite(times).sum(axis=0), strict=True)
                told = ", ".join(f"{arm} {there} of {len(times)}" for arm, there in arms)
                nothing += f" before {budget:.4g} {unit}, when the first run that missed it ended (later: {told})"
        notes = [f"{why} {budget:.4g} {unit}", *self._risen(both, times <= budget, target)]
        later = (budget < times) & np.isfinite(times)
        counts = {name: tuple(of.sum(axis=0).tolist()) for name, of in (("reached", times <= budget), ("later", later))}
        limits = {"notes": tuple(notes), "nothing": nothing, "budget": budget, "common": common, "cut_short": cut_short}
        limits["caveats"] = self._stopped_unlike(both)
        capped = np.minimum(brackets, budget)
        if apart := [run for run, own in zip(runs, capped.reshape(-1, 2), strict=True) if own[0] < own[1]]:
            limits["between"] = self._seldom(apart, "seconds", pairs.clock)
        seeds = [pair[0].Index for pair in both]
        found = values_of(capped[:, 0], capped[:, 1], seeds, longest=max(ends.values()), crossed=brackets)
        return found | counts | limits

    def _stopped_unlike(self, both: Sequence[tuple[Any, Any]]) -> tuple[str, ...]:
        """Whether runs stopped at a target that one arm looked out for more often: it sees a low loss sooner."""
        if not any(self.stopped(run) for pair in both for run in pair):
            return ()
        steps = [
            [float(np.diff(self.curve(run.run, "seconds")[0]).mean()) for run in side]
            for side in zip(*both, strict=True)
        ]
        often, seldom = sorted(((float(np.median(of)), pair.arm) for of, pair in zip(steps, both[0], strict=True)))
        if not seldom[0] > SAME_LOOKS * often[0]:
            return ()
        told = f"{often[1]} was evaluated {seldom[0] / often[0]:.3g} times as often as {seldom[1]}"
        return (f"Runs stopped where they were first seen at their target, and {told}, which alone makes it sooner.",)

    def _risen(self, both: Sequence[tuple[Any, Any]], there: NDArray[np.bool], target: float) -> Iterator[str]:
        """How many runs of each arm were at the target and do not hold it at their end."""
        for side, runs in enumerate(zip(*both, strict=True)):
            ends = [self.curve(run.run, "seconds")[1] for run in runs]
            above = [at and len(end) and end[-1] > target for at, end in zip(there[:, side], ends, strict=True)]
            if count := sum(map(bool, above)):
                are = ("was", "is", "its") if count == 1 else ("were", "are", "their")
                yield f"{count} of {len(runs)} runs of {runs[0].arm} {are[0]} {RISEN} {are[1]} above it at {are[2]} end"

    def _budget(
        self, runs: Sequence[Any], times: NDArray[np.float64], ends: Mapping[str, float]
    ) -> tuple[float, bool, str]:
        """The second up to which all are known: what every run was given; else where the first that missed it ended."""
        given = {run.settings.get("seconds") for run in runs}
        missed = [ends[run.run] for run, at in zip(runs, times, strict=True) if math.isinf(at) and not run.diverged]
        budget = given.pop() if len(given) == 1 else None
        if budget and all(end >= budget for end in missed):
            return float(budget), True, "every run had"
        if missed and max(missed) > 0:
            return min(missed), False, CUT_SHORT
        return max(ends.values()), False, "restricted to the longest run,"


CUT_SHORT = "restricted to where the first run that missed it ended,"


def _where(x: str, places: Sequence[float], first: float, last: float) -> str:
    """Where losses are compared; empty where that is the end of all runs."""
    if min(places) >= WHOLE * last:
        return ""
    if x == "samples":
        why = "where the first run ended" if places[0] >= first else "the last look that all runs share"
        return f"compared at {places[0]:g} samples, {why}; the last ended at {last:g}"
    span = " to ".join(dict.fromkeys((f"{min(places):.4g}", f"{max(places):.4g}")))
    return (
        f"compared at {span} s, where the shorter run of each pair ended or both have a look; the longest is {last:.4g}"
    )


def _planned_samples(run: Any) -> float:
    """The samples that alone end a run; 0 where something else may."""
    alone = not any(run.settings.get(key) for key in ("seconds", "target_loss", "patience"))
    return float(run.settings.get("samples") or 0) if alone else 0.0
