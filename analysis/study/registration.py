"""The pre-registration: reading analysis.yaml, and whether it and the plan are still what was registered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from analysis.study.plan import count_or_none, number_or_none, planned_run
from analysis.study.types import MEASURED, VIRTUAL, Arm, Pilots, Registration
from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.study.registration import ENDPOINTS, alpha_in

REGISTRATION_SCHEMA = 1

_REGISTRATION_KEYS = (
    "schema",
    "study",
    "reference",
    "primary",
    "alpha",
    "margins",
    "margin_reasons",
    "num_seeds",
    "targets",
    "budget_seconds",
    "control",
    "target_from",
    "family",
    "seeds",
    "config_sha256",
    "pilots",
)


def read_registration(path: Path, problems: list[str]) -> tuple[Registration | None, str]:
    """What was registered, or None and why."""
    if not path.is_file():
        return None, "there is no analysis.yaml: nothing was declared before the runs"

    def refused(reason: str) -> tuple[None, str]:
        problems.append(f"analysis.yaml {reason}")
        return None, f"analysis.yaml {reason}"

    try:
        content = path.read_bytes()
        values = read_yaml(content.decode("utf-8"), "it")
    except (OSError, ValueError) as error:
        return refused(f"cannot be read: {' '.join(str(error).split())[:160]}")
    if not isinstance(values, Mapping):
        return refused("is damaged: it holds no keys and values")
    schema = values.get("schema", REGISTRATION_SCHEMA)
    if not isinstance(schema, int) or schema > REGISTRATION_SCHEMA:
        return refused(f"has schema {schema!r}, this version reads up to {REGISTRATION_SCHEMA}")
    for key in values:
        if key not in _REGISTRATION_KEYS:
            guess = nearest(str(key), _REGISTRATION_KEYS)
            problems.append(f"analysis.yaml has an unknown key {key!r}{guess}; it is ignored")
    primary = values.get("primary")
    if not isinstance(values.get("reference"), str):
        return refused("names no reference algorithm (reference: sync)")
    if not isinstance(primary, Mapping) or primary.get("endpoint") not in ENDPOINTS:
        return refused(f"names no primary endpoint (primary: {{endpoint: one of {', '.join(ENDPOINTS)}}})")
    try:
        alpha = alpha_in(values, "its alpha")
    except UsageError as error:
        return refused(f"cannot be used: {error}")
    margins = _numbers(values.get("margins"), "margins", problems)
    targets = _numbers(values.get("targets"), "targets", problems)
    for key in sorted(margins):
        if margins[key] <= 0:
            problems.append(f"analysis.yaml: margins.{key} must be above 0, got {margins[key]:g}; it is ignored")
            del margins[key]
    return (
        Registration(
            reference=values["reference"],
            endpoint=primary["endpoint"],
            num_workers=count_or_none(primary.get("num_workers")),
            clock=primary["clock"] if primary.get("clock") in (MEASURED, VIRTUAL) else None,
            alpha=alpha,
            margins=margins,
            num_seeds=count_or_none(values.get("num_seeds")),
            targets=targets,
            target_from=str(values.get("target_from") or ""),
            sha256=hashlib.sha256(content).hexdigest(),
            family=_listed(values.get("family"), "family", str, problems),
            seeds=_listed(values.get("seeds"), "seeds", int, problems),
            config_sha256=values["config_sha256"] if isinstance(values.get("config_sha256"), str) else None,
            control=values["control"] if isinstance(values.get("control"), str) else None,
            pilots=_pilots(values.get("pilots"), problems),
            margin_reasons=_texts(values.get("margin_reasons"), "margin_reasons", problems),
        ),
        "",
    )


_Item = TypeVar("_Item", str, int)


def _listed(given: Any, where: str, kind: type[_Item], problems: list[str]) -> tuple[_Item, ...] | None:
    """The items of a list, each once; None where there is no such list."""
    if given is None:
        return None
    if not isinstance(given, list) or any(type(item) is not kind for item in given):
        problems.append(f"analysis.yaml: {where} must be a list, got {str(given)[:80]!r}; it is ignored")
        return None
    return tuple(dict.fromkeys(given))


def _pilots(given: Any, problems: list[str]) -> dict[str, Pilots]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"analysis.yaml: pilots must hold arms, got {str(given)[:80]!r}; it is ignored")
        return {}
    found = {}
    for arm, values in given.items():
        values = values if isinstance(values, Mapping) else {}
        first, best = number_or_none(values.get("first_loss")), number_or_none(values.get("best_loss"))
        if first is None or best is None or not best < first:
            problems.append(f"analysis.yaml: pilots.{arm} has no first_loss above a best_loss; it is ignored")
        else:
            found[str(arm)] = Pilots(count_or_none(values.get("runs")) or 0, first, best)
    return found


def _texts(given: Any, where: str, problems: list[str]) -> dict[str, str]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or any(not isinstance(text, str) for text in given.values()):
        problems.append(f"analysis.yaml: {where} must hold keys and texts, got {str(given)[:80]!r}; it is ignored")
        return {}
    return {str(key): text for key, text in given.items()}


def _numbers(given: Any, where: str, problems: list[str]) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        problems.append(f"analysis.yaml: {where} must hold keys and numbers, got {given!r}; it is ignored")
        return {}
    numbers = {}
    for key, value in given.items():
        number = number_or_none(value)
        if number is None:
            problems.append(f"analysis.yaml: {where}.{key} is no number ({value!r}) and is ignored")
        else:
            numbers[str(key)] = number
    return numbers


def declared_targets(
    plan: Mapping[str, Any] | None, registration: Registration | None, problems: list[str]
) -> tuple[dict[str, float], str]:
    if registration is not None:
        return dict(registration.targets), registration.target_from
    planned = (plan or {}).get("targets")
    if isinstance(planned, Mapping) and planned:
        return _numbers(planned, "targets", problems), "plan.json, without a pre-registration"
    return {}, ""


def unchanged(plan: Mapping[str, Any] | None, registration: Registration | None, problems: list[str]) -> bool | None:
    """Compare analysis.yaml with what the plan recorded when it was written."""
    if plan is None or registration is None:
        return None
    checks = []
    digest = plan.get("analysis_sha256")
    if isinstance(digest, str):
        checks.append(digest == registration.sha256)
        if not checks[-1]:
            problems.append(f"analysis.yaml was changed after it was written: plan.json recorded sha256 {digest[:16]}")
    planned = plan.get("targets")
    if isinstance(planned, Mapping) and planned:
        same = {str(key): number_or_none(value) for key, value in planned.items()} == dict(registration.targets)
        checks.append(same)
        if not same:
            problems.append(f"analysis.yaml and plan.json name different targets: {registration.targets} and {planned}")
    return all(checks) if checks else None


def unverified(
    plan: Mapping[str, Any] | None, registration: Registration | None, arms: Sequence[Arm], problems: list[str]
) -> str:
    """Why the plan is not known to be the one that was registered; arms that it no longer has are told as a problem,
    and still count in the family.
    """
    if registration is None:
        return ""
    for name in registration.family or ():
        if all(arm.name != name for arm in arms):
            problems.append(
                f"analysis.yaml registers {name} in the primary family, and nothing of it is here: it counts as a "
                f"comparison that shows nothing (p = 1)"
            )
    if plan is None:
        return "there is no plan.json that could be read: whether all that was registered is here cannot be checked"
    reasons = []
    if registration.config_sha256 is not None and plan.get("config_sha256") != registration.config_sha256:
        reasons.append("plan.json is of another config than the one that analysis.yaml registers")
    if registration.seeds is not None:
        planned = {run.seed for run in map(planned_run, plan["runs"]) if run is not None and run.stage == "test"}
        if planned != set(registration.seeds):
            shown = (", ".join(map(str, sorted(seeds, key=str))) for seeds in (registration.seeds, planned))
            reasons.append("analysis.yaml registers test seeds {}, plan.json has {}".format(*shown))
    problems += reasons
    return "; ".join(reasons)
