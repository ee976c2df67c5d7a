"""What a config registers before the test runs: reference, endpoint, margins, target."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.study.arms import Arm, Tuning, place_of
from asyncsgd.study.config import (
    check_keys,
    mapping_in,
    number_in,
    text_in,
)
from asyncsgd.study.finetuning import SCORES, finetuning_in

ENDPOINTS = ("loss_at_equal_samples", "loss_at_equal_seconds", "time_to_target", *SCORES)


ANALYSIS_KEYS = ("reference", "control", "primary", "alpha", "margins", "margin_reasons", "target_share", "target_loss")


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the config registers before the test runs; see statistics in docs/study.md."""

    reference: str
    control: str | None
    """An algorithm whose updates have as few samples as those of an asynchronous one. So a difference from it does not
    come from the number of updates. It is compared beside the primary family, at equal samples.
    """
    endpoint: str
    num_workers: int | None
    clock: str
    alpha: float
    margins: Mapping[str, float]
    margin_reasons: Mapping[str, str]
    """Why a margin is what it is. Above 10 % of what the reference improves by, a margin without a reason is not used.
    """
    target_share: float
    target_loss: float | None
    family: tuple[str, ...]
    """The arms that are compared with the reference there: the primary family, over which Holm adjusts."""


def alpha_in(values: Mapping[str, Any], where: str) -> float:
    """The level of the tests, 0.05 if `values` has none.

    An equivalence test at alpha looks at an interval of level 1 - 2 alpha, so that alpha lies below 0.5.

    Raises:
        UsageError: for another value; the message calls it `where`.
    """
    alpha = values.get("alpha", 0.05)
    if not isinstance(alpha, int | float) or not 0 < alpha < 0.5:
        raise UsageError(f"{where} must be a number above 0 and below 0.5, got {alpha!r}; write alpha: 0.05")
    return alpha


def analysis_in(
    given: Any,
    arms: Sequence[Arm],
    tuning: Tuning | None,
    pilots: Sequence[int],
    finetune: Mapping[str, Any] | None,
) -> Analysis | None:
    if given is None:
        if pilots:
            raise UsageError("pilots fix the target of an analysis; add analysis: {reference: sync}, or leave them out")
        return None
    values = mapping_in(given, "analysis")
    check_keys(values, ANALYSIS_KEYS, "analysis")
    algorithms = list(dict.fromkeys(arm.algorithm for arm in arms))
    reference = values.get("reference")
    if reference not in algorithms:
        raise UsageError(
            f"analysis.reference must be one of {', '.join(algorithms)}, got {reference!r}"
            f"{nearest(str(reference), algorithms)}"
        )
    control = values.get("control")
    if control is not None and (control not in algorithms or control == reference):
        raise UsageError(
            f"analysis.control must be one of {', '.join(algorithms)} and not the reference, got {control!r}"
        )
    primary = mapping_in(values.get("primary", {}), "analysis.primary")
    check_keys(primary, ("endpoint", "num_workers", "clock"), "analysis.primary")
    endpoint = primary.get("endpoint", "time_to_target")
    if endpoint not in ENDPOINTS:
        raise UsageError(
            f"analysis.primary.endpoint must be one of {', '.join(ENDPOINTS)}, got {endpoint!r}"
            f"{nearest(str(endpoint), ENDPOINTS)}"
        )
    if endpoint in SCORES:
        named = f"analysis.primary.endpoint {endpoint}"
        if finetune is None:
            raise UsageError(f"{named} is of fine-tuning runs; add finetune: {{data: ...}}")
        if endpoint != (score := finetuning_in(finetune).score):
            raise UsageError(f"{named} is not what this fine-tuning is scored by; write endpoint: {score}")
    conditions = {place_of(arm) for arm in arms}
    workers, clock = primary.get("num_workers"), primary.get("clock")
    matching = {
        condition
        for condition in conditions
        if (workers is None or condition[0] == workers) and (clock is None or condition[1] == clock)
    }
    if len(matching) != 1:
        shown = ", ".join(f"{{num_workers: {condition[0]}, clock: {condition[1]}}}" for condition in sorted(conditions))
        raise UsageError(f"analysis.primary must name one of the conditions: {shown}; got {dict(primary)!r}")
    ((workers, clock),) = matching
    if all(arm.algorithm != reference or place_of(arm) != (workers, clock) for arm in arms):
        raise UsageError(
            f"analysis: the reference {reference} has no arm with {{num_workers: {workers}, clock: {clock}}}, so that "
            f"nothing can be compared there; name another one, or take it out of exclude"
        )
    margins = mapping_in(values.get("margins", {}), "analysis.margins")
    check_keys(margins, ("loss", *SCORES), "analysis.margins")
    for key, margin in margins.items():
        number_in(margin, f"analysis.margins.{key}", 0.0, None)
    reasons = mapping_in(values.get("margin_reasons", {}), "analysis.margin_reasons")
    check_keys(reasons, tuple(margins), "analysis.margin_reasons")
    reasons = {str(key): text_in(reason, f"analysis.margin_reasons.{key}") for key, reason in reasons.items()}
    alpha = alpha_in(values, "analysis.alpha")
    share = number_in(values.get("target_share", 0.95), "analysis.target_share", 0.0, 1.0)
    loss = values.get("target_loss")
    if loss is not None and pilots:
        raise UsageError("analysis.target_loss is the target, and pilots would fix another one; leave one of them out")
    if loss is None and tuning is None and not pilots and endpoint == "time_to_target":
        raise UsageError(
            "analysis: time_to_target needs a target: pilots: [10, 11, 12] or tuning runs to take it from, or "
            "target_loss: 6.2"
        )
    return Analysis(
        reference,
        control,
        endpoint,
        workers,
        clock,
        alpha,
        {str(key): float(margin) for key, margin in margins.items()},
        reasons,
        share,
        None if loss is None else number_in(loss, "analysis.target_loss", 0.0, None),
        tuple(
            arm.name for arm in arms if arm.algorithm not in (reference, control) and place_of(arm) == (workers, clock)
        ),
    )
