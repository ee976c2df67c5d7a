"""The verdict: what was shown about treatment - reference in one word, and the reason in a clause."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from analysis.statistics.equivalence import Equivalence
from analysis.statistics.intervals import check_level, short
from analysis.statistics.power import detectable_effect, smallest_p

MINIMUM_PAIRS = 6
"""With fewer pairs the exact two-sided test cannot reach 0.05: 2 / 2^5 = 0.0625."""

WIDEST_MARGIN = 0.5
"""A margin above this share of all that the reference improved by would call equal what lost half of it."""

EXPLAINED_MARGIN = 0.1
"""A margin above this share of all that the reference improved by needs a reason in the plan."""

Word = Literal["too few seeds", "equivalent", "different but negligible", "better", "worse", "undecided"]


def margin_too_wide(margin: float, improvement: float | None) -> str:
    """Why ±`margin` says nothing beside what the reference `improvement` was in all; empty where it may be used.

    Args:
        margin: above 0, in the unit of the values.
        improvement: how much better the reference became (0 or below: not at all); None where that is not known.

    >>> margin_too_wide(0.05, 0.02), margin_too_wide(0.05, 1.0)
    ("the margin of ±0.0500 is 250 % of the reference's improvement, too wide to mean anything", '')
    """
    if improvement is None or margin <= WIDEST_MARGIN * improvement:
        return ""
    if improvement <= 0:
        return f"the reference did not improve, so a margin of ±{short(margin)} cannot be judged"
    share = 100 * margin / improvement
    return f"the margin of ±{short(margin)} is {share:.0f} % of the reference's improvement, too wide to mean anything"


def margin_unexplained(margin: float, improvement: float | None, reason: str) -> str:
    """Why ±`margin` may not be used without a `reason`; empty where there is one, or it needs none.

    >>> margin_unexplained(0.02, 0.1, "")
    "the margin of ±0.0200 is 20 % of the reference's improvement, and the plan gives no reason for it (margin_reasons)"
    >>> margin_unexplained(0.02, 0.2, ""), margin_unexplained(0.02, 0.1, "below what a seed changes")
    ('', '')
    """
    if reason or improvement is None or margin <= EXPLAINED_MARGIN * improvement:
        return ""
    share = f"{100 * margin / improvement:.0f} % of the reference's improvement"
    return f"the margin of ±{short(margin)} is {share}, and the plan gives no reason for it (margin_reasons)"


def nothing_to_find(n: int, num_comparisons: int, least_p_holm: float, alpha: float = 0.05) -> str:
    """Why `n` pairs cannot show a difference of any size within their family; empty where they can.

    Args:
        least_p_holm: by `least_p_holm`.

    >>> nothing_to_find(6, 2, 0.0625)
    'no difference of any size can be found with 6 pairs and 2 comparisons (no p_Holm is below 0.0625)'
    >>> nothing_to_find(7, 2, 0.03125)
    ''
    """
    if least_p_holm < alpha:
        return ""
    family = f" and {num_comparisons} comparisons" if num_comparisons > 1 else ""
    return f"no difference of any size can be found with {n} pairs{family} (no p_Holm is below {short(least_p_holm)})"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One word on a comparison, and the reason in a clause."""

    word: Word
    reason: str


def verdict(
    n: int,
    difference_estimate: float,
    p_holm: float,
    equivalence: Equivalence | None,
    p_equivalence: float = 1.0,
    lower_is_better: bool = True,
    alpha: float = 0.05,
    minimum: int = MINIMUM_PAIRS,
    num_comparisons: int = 1,
    least: float = 0.0,
    ranked: bool = False,
) -> Verdict:
    """Say in one word what `n` pairs have shown about treatment - reference.

    Fewer than `minimum` pairs: *too few seeds*. The equivalence test's p_Holm < alpha: *equivalent*, or *different but
    negligible* if also p_Holm < alpha and the interval of the equivalence test leaves out 0 (it is a t interval: with
    an outlier the exact test may reject 0 where it does not). Otherwise p_Holm < alpha: *better* or *worse*. Else
    *undecided*, which is no statement of equality; its reason names the difference that so many pairs could have found.

    Args:
        p_holm: exact p, adjusted for the family.
        equivalence: against a margin that was declared beforehand; None where there is none, and then nothing is called
            equivalent.
        p_equivalence: of the equivalence test, adjusted for the family.
        num_comparisons: size of the family, for the difference that could have been found: Holm's method has to reject
            the first of m at alpha / m.
        least: of `least_p_holm`; 0 where nothing is known about the family.
        ranked: whether p is of ranks, so that no difference in units can be named.
    Raises:
        ValueError: for nan.

    >>> verdict(8, -0.02, 0.0078, None).word
    'better'
    """
    if n < minimum:
        possible = f"; the smallest p of {n} pairs is {short(smallest_p(n))}" if n > 0 else ""
        return Verdict("too few seeds", f"{n} of the {minimum} pairs that a verdict needs{possible}")
    check_level(alpha)
    for name, p in (("p_holm", p_holm), ("p_equivalence", p_equivalence)):
        if not 0 <= p <= 1:
            raise ValueError(f"{name} lies between 0 and 1, got {p}")
    if not math.isfinite(difference_estimate):
        raise ValueError(f"the difference must be a finite number, got {difference_estimate}")
    differs = p_holm < alpha
    p_text = f"p_Holm = {short(p_holm)}"
    if equivalence is not None and p_equivalence < alpha:
        shown = _equivalence_text(equivalence, p_equivalence, alpha)
        if differs and not equivalence.interval.holds(0.0):
            return Verdict("different but negligible", f"{p_text}, but {shown}")
        return Verdict("equivalent", f"{shown}; {p_text}")
    if differs:
        better = (difference_estimate < 0) == lower_is_better
        rule = "lower" if lower_is_better else "higher"
        return Verdict("better" if better else "worse", f"{p_text} < {alpha:g}, {rule} is better")
    found = nothing_to_find(n, num_comparisons, least, alpha)
    if not found and not ranked:
        found = what_could_be_found(n, num_comparisons, alpha)
    return Verdict("undecided", "; ".join(text for text in (p_text, found) if text))


def what_could_be_found(n: int, num_comparisons: int = 1, alpha: float = 0.05) -> str:
    """The smallest detectable difference in a clause, at the level that the first of a family is judged at.

    >>> what_could_be_found(6, 2)
    'with 6 pairs this test finds nothing at 0.05 / 2, unless another of its family is found first'
    """
    level = f"{alpha:g}" if num_comparisons == 1 else f"{alpha:g} / {num_comparisons}"
    effect = detectable_effect(n, alpha=alpha / num_comparisons)
    if math.isinf(effect):
        return f"with {n} pairs this test finds nothing at {level}, unless another of its family is found first"
    found = f"a difference of {effect:.2f} SD of the differences in 80 % of studies"
    return f"with {n} pairs this test at {level} finds {found}"


def _equivalence_text(found: Equivalence, p_holm: float, alpha: float) -> str:
    """The interval inside the margin; Holm's p where the interval of the whole family's level is wider."""
    if not found.equivalent:
        return f"p_Holm of equivalence within ±{short(found.margin)} = {short(p_holm)} < {alpha:g}"
    low, high = found.interval.ends
    level = f"the {100 * found.interval.level:.3g} % interval"
    return f"{level} [{short(low)}, {short(high)}] lies inside ±{short(found.margin)}"
