"""The pre-registration: reading analysis.yaml, and whether it and the plan are still what was registered."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.study.plan import Plan
from analysis.study.types import Arm, Pilots, Registration
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.study.registration import ENDPOINTS, alpha_in

REGISTRATION_SCHEMA = 1


def read_registration(path: Path, problems: list[str]) -> tuple[Registration | None, str]:
    """What was registered, or None and why."""
    if not path.is_file():
        return None, "there is no analysis.yaml: nothing was declared before the runs"
    try:
        content = path.read_bytes()
        return _registration(read_yaml(content.decode("utf-8"), "it"), hashlib.sha256(content).hexdigest()), ""
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        told = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:160]
        reason = f"analysis.yaml cannot be used: {told}"
        problems.append(reason)
        return None, reason


def _registration(values: Mapping[str, Any], sha256: str) -> Registration:
    if (schema := values.get("schema", REGISTRATION_SCHEMA)) != REGISTRATION_SCHEMA:
        raise ValueError(f"it has schema {schema!r}, this version reads {REGISTRATION_SCHEMA}")
    primary, family, seeds = values["primary"], values.get("family"), values.get("seeds")
    if primary["endpoint"] not in ENDPOINTS:
        raise ValueError(f"it names no primary endpoint (primary: {{endpoint: one of {', '.join(ENDPOINTS)}}})")
    margins = _numbers(values.get("margins"))
    if any(margin <= 0 for margin in margins.values()):
        raise ValueError(f"its margins must be above 0, got {margins}")
    pilots = {
        str(arm): Pilots(int(of["runs"]), float(of["first_loss"]), float(of["best_loss"]))
        for arm, of in (values.get("pilots") or {}).items()
    }
    return Registration(
        reference=str(values["reference"]),
        endpoint=primary["endpoint"],
        num_workers=primary.get("num_workers"),
        clock=primary.get("clock"),
        alpha=alpha_in(values, "its alpha"),
        margins=margins,
        num_seeds=values.get("num_seeds"),
        targets=_numbers(values.get("targets")),
        target_from=str(values.get("target_from") or ""),
        sha256=sha256,
        family=None if family is None else tuple(dict.fromkeys(map(str, family))),
        seeds=None if seeds is None else tuple(dict.fromkeys(map(int, seeds))),
        config_sha256=values.get("config_sha256"),
        control=values.get("control"),
        pilots=pilots,
        margin_reasons=dict(values.get("margin_reasons") or {}),
    )


def _numbers(given: Mapping[str, Any] | None) -> dict[str, float]:
    return {str(key): float(value) for key, value in (given or {}).items()}


def declared_targets(plan: Plan | None, registration: Registration | None) -> tuple[dict[str, float], str]:
    if registration is not None:
        return dict(registration.targets), registration.target_from
    if plan is not None and plan.targets:
        return dict(plan.targets), "plan.json, without a pre-registration"
    return {}, ""


def unchanged(plan: Plan | None, registration: Registration | None, problems: list[str]) -> bool | None:
    """Compare analysis.yaml with what the plan recorded when it was written."""
    if plan is None or registration is None:
        return None
    checks = []
    if plan.analysis_sha256 is not None:
        checks.append(plan.analysis_sha256 == registration.sha256)
        if not checks[-1]:
            recorded = plan.analysis_sha256[:16]
            problems.append(f"analysis.yaml was changed after it was written: plan.json recorded sha256 {recorded}")
    if plan.targets:
        checks.append(plan.targets == registration.targets)
        if not checks[-1]:
            told = f"{registration.targets} and {plan.targets}"
            problems.append(f"analysis.yaml and plan.json name different targets: {told}")
    return all(checks) if checks else None


def unverified(plan: Plan | None, registration: Registration | None, arms: Sequence[Arm], problems: list[str]) -> str:
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
    if registration.config_sha256 is not None and plan.config_sha256 != registration.config_sha256:
        reasons.append("plan.json is of another config than the one that analysis.yaml registers")
    if registration.seeds is not None:
        planned = {run.seed for run in plan.runs if run.stage == "test"}
        if planned != set(registration.seeds):
            shown = (", ".join(map(str, sorted(seeds, key=str))) for seeds in (registration.seeds, planned))
            reasons.append("analysis.yaml registers test seeds {}, plan.json has {}".format(*shown))
    problems += reasons
    return "; ".join(reasons)
