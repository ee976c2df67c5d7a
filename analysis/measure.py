"""Reads values off curves: losses at equal samples and seconds, and between which looks a run came to a target."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from analysis.curves import SAME_LOOKS, Curve, bracket, curve, losses_around, on_common_looks, shared_look, until_shared
from analysis.pairs import Pairs
from analysis.runs import Note
from analysis.stats import Array

BY_RANKS = Note("a diverged run is worse than any other, so the pairs are compared by ranks")
WHOLE = 0.95
"""Share of the planned samples that a run must have."""
CUT_SHORT = "restricted to where the first run that missed it ended,"
NONE = np.array([])


def values_of(ours: Array, theirs: Array, seeds: list[Any], **limits: Any) -> dict[str, Any]:
    """Columns of `tests`: one value a pair of an endpoint, inf of a run that diverged, and what limits them.

    Args:
        ours, theirs: of each pair a number, or two between which it lies (n x 2), whose middle is then the value.
    """
    columns: dict[str, Any] = {"seeds": seeds, "n": len(seeds), **limits}
    for side, values in (("treatment", ours), ("reference", theirs)):
        ends = values if values.ndim == 2 else np.column_stack((values, values))
        columns |= {f"{side}_values": ends.mean(axis=1), f"{side}_ends": ends}
    return columns


class Measure:
    """Reads the values of every endpoint off the curves."""

    def __init__(self, curves: DataFrame) -> None:
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
        goal = run.settings.get("target_loss")
        losses = self.curve(run.run, "samples")[1]
        return goal is not None and not run.diverged and len(losses) > 0 and bool(losses[-1] <= goal)

    def _lost(self, run: str) -> bool:
        losses = self.curve(run, "samples")[1]
        return not len(losses) or bool(losses[-1] > losses[0])

    def losses(self, pairs: Pairs, x: str) -> dict[str, Any]:
        """Losses at the samples that all runs reached, or at the seconds that both runs of a pair did."""
        rows = [both for both in pairs.both if x == "samples" or both[0].seed not in pairs.apart]
        alive_of = [[run for run in both if not run.diverged] for both in rows]
        alive = [run for group in alive_of for run in group]
        seeds = [ours.seed for ours, _ in rows]
        if not alive:
            same = np.full(len(rows), math.inf)
            return values_of(same, same, seeds, nothing="every run of both arms diverged" if rows else "")
        if why := self._cut_short(alive):
            return values_of(NONE, NONE, [], nothing=why)
        watched: dict[str, Curve] = {}
        for group in alive_of:
            watched |= self.looks(group, x)
        ends = {run: float(curve[0][-1]) for run, curve in watched.items()}
        places: list[float] = []
        known: dict[str, tuple[float, float]] = {}
        apart: list[Any] = []
        for group in [alive] if x == "samples" else filter(None, alive_of):
            end = min(ends[run.run] for run in group)
            near = max(self._update(run, x) for run in group)
            look = shared_look([watched[run.run] for run in group], end, near)
            place = end if look is None else look
            places.append(place)
            for run in group:
                low, high = losses_around(watched[run.run], place, near)
                known[run.run] = (low, high)
                if low != high:
                    apart.append(run)
        values = np.array([[known.get(run.run, (math.inf, math.inf)) for run in both] for both in rows])
        notes = _where(x, places, min(ends.values()), max(ends.values()))
        theirs = values[:, 1].mean(axis=1)
        first = np.mean([self.curve(run.run, "samples")[1][0] for _, run in rows if run.run in ends] or [math.nan])
        gained = float(first - theirs[np.isfinite(theirs)].mean()) if np.isfinite(theirs).any() else math.nan
        if np.isinf(values).any():
            notes.append(BY_RANKS)
        limits: dict[str, Any] = {"notes": (*notes,), "gained": gained}
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
        both = [pair for pair in pairs.both if pair[0].seed not in pairs.apart]
        if not both:
            return values_of(NONE, NONE, [], crossed=NONE.reshape(0, 2, 2))
        brackets = np.array([self.crossings(pair, target) for pair in both])
        times = brackets[:, :, 1]
        runs = [run for pair in both for run in pair]
        ends = {run.run: self.end(run.run, "seconds") for run in runs}
        budget, common, why = self._budget(runs, times.ravel(), ends)
        unit = "s" if pairs.clock == "measured" else "virtual s"
        nothing = ""
        cut_short = why == CUT_SHORT
        if times.min() > budget:
            nothing = f"no run reached the target of {target:.3g}"
            if common:
                nothing += f" within the {budget:.4g} {unit} of every run"
            elif np.isfinite(times).any():
                arms = zip((pairs.treatment, pairs.reference), np.isfinite(times).sum(axis=0), strict=True)
                told = ", ".join(f"{arm} {there} of {len(times)}" for arm, there in arms)
                nothing += f" before {budget:.4g} {unit}, when the first run that missed it ended (later: {told})"
        notes = [Note(f"{why} {budget:.4g} {unit}", "budget"), *self._risen(both, times <= budget, target)]
        later = (budget < times) & np.isfinite(times)
        counts = {name: tuple(of.sum(axis=0).tolist()) for name, of in (("reached", times <= budget), ("later", later))}
        limits = {"notes": tuple(notes), "nothing": nothing, "budget": budget, "common": common, "cut_short": cut_short}
        limits["caveats"] = self._stopped_unlike(both)
        capped = np.minimum(brackets, budget)
        if apart := [run for run, own in zip(runs, capped.reshape(-1, 2), strict=True) if own[0] < own[1]]:
            limits["between"] = self._seldom(apart, "seconds", pairs.clock)
        seeds = [pair[0].seed for pair in both]
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

    def _risen(self, both: Sequence[tuple[Any, Any]], there: NDArray[np.bool], target: float) -> Iterator[Note]:
        """How many runs of each arm were at the target and do not hold it at their end."""
        for side, runs in enumerate(zip(*both, strict=True)):
            ends = [self.curve(run.run, "seconds")[1] for run in runs]
            above = [at and len(end) and end[-1] > target for at, end in zip(there[:, side], ends, strict=True)]
            if count := sum(map(bool, above)):
                are = "was at the target and is above it at its end"
                if count > 1:
                    are = "were at the target and are above it at their end"
                yield Note(f"{count} of {len(runs)} runs of {runs[0].arm} {are}", "risen")

    def _budget(self, runs: Sequence[Any], times: Array, ends: Mapping[str, float]) -> tuple[float, bool, str]:
        """The second up to which all are known: what every run was given; else where the first that missed it ended."""
        given = {run.settings.get("seconds") for run in runs}
        missed = [ends[run.run] for run, at in zip(runs, times, strict=True) if math.isinf(at) and not run.diverged]
        budget = given.pop() if len(given) == 1 else None
        if budget and all(end >= budget for end in missed):
            return float(budget), True, "every run had"
        if missed and max(missed) > 0:
            return min(missed), False, CUT_SHORT
        return max(ends.values()), False, "restricted to the longest run,"


def _where(x: str, places: Sequence[float], first: float, last: float) -> list[Note]:
    """Where losses are compared; nothing where that is the end of all runs."""
    if min(places) >= WHOLE * last:
        return []
    if x == "samples":
        why = "where the first run ended" if places[0] >= first else "the last look that all runs share"
        return [Note(f"compared at {places[0]:g} samples, {why}; the last ended at {last:g}")]
    span = " to ".join(dict.fromkeys((f"{min(places):.4g}", f"{max(places):.4g}")))
    why = "where the shorter run of each pair ended or both have a look"
    return [Note(f"compared at {span} s, {why}; the longest is {last:.4g}")]


def _planned_samples(run: Any) -> float:
    """The samples that alone end a run; 0 where something else may."""
    alone = not any(run.settings.get(key) for key in ("seconds", "target_loss", "patience"))
    return float(run.settings.get("samples") or 0) if alone else 0.0
