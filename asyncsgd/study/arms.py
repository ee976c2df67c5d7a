"""Arms: every algorithm under every condition, with what tuning tries for it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.settings.task import task_flags
from asyncsgd.study.config import (
    CONDITION_KEYS,
    check_keys,
    fill_in,
    grid_in,
    list_in,
    mapping_in,
    seeds_in,
    settings_in,
    whole_in,
)
from asyncsgd.tasks.masked_lm import MaskedLM

FLAGS = task_flags(MaskedLM)
"""Of every run of a sweep but those that fine-tune."""
NOT_A_VARIANT = frozenset(("mode", "rule", *CONDITION_KEYS, "batch_size", "seed"))
"""Settings of the algorithm, or settings that all arms of a group share. Any other setting may distinguish two
references.
"""


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Which settings are tried for an algorithm that does not say so itself (`tune`), and on which seeds; `grid` maps a
    setting to its values, crossed in the order given.
    """

    grid: Mapping[str, Sequence[Any]] | None
    seeds: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Arm:
    """An algorithm under one condition.

    `settings` is what the arm sets beside the base, placeholders filled in; `trials` what tuning tries on top of it,
    empty where nothing is tuned.
    """

    name: str
    algorithm: str
    settings: Mapping[str, Any]
    trials: tuple[Mapping[str, Any], ...]

    @property
    def virtual(self) -> bool:
        return self.settings.get("clock") == "virtual"


def resolve(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run gets. On the virtual clock mode `sync` is the rule `synchronous`: there it has no other
    form, and DistributedDataParallel steps along the same mean. With a rule of its own it stays what it is, an error.

    >>> resolve({"mode": "sync", "clock": "virtual", "nproc": 4})
    {'mode': 'async', 'clock': 'virtual', 'nproc': 4, 'rule': 'synchronous'}
    """
    resolved = dict(values)
    alone = resolved.get("rule") in (None, "asynchronous", "synchronous")
    if resolved.get("clock") == "virtual" and resolved.get("mode") == "sync" and alone:
        resolved |= {"mode": "async", "rule": "synchronous"}
    return resolved


def arms_of(config: Mapping[str, Any], base: Mapping[str, Any], tuning: Tuning | None) -> tuple[Arm, ...]:
    algorithms = mapping_in(config.get("algorithms", {}), "algorithms")
    if not algorithms:
        raise UsageError("the config names no algorithms; write e.g. algorithms: {sync: {mode: sync}}")
    conditions = _conditions(config.get("conditions", [{}]))
    excluded = [settings_in(item, "exclude", ()) for item in list_in(config.get("exclude", []), "exclude")]
    useless = list(excluded)
    parts = {algorithm: dict(mapping_in(given, f"algorithms.{algorithm}")) for algorithm, given in algorithms.items()}
    # An algorithm may have conditions of its of_algorithm, e.g. one process at two batch sizes beside several workers.
    places = [
        (condition, algorithm)
        for condition in conditions
        for algorithm in parts
        if "conditions" not in parts[algorithm]
    ]
    for algorithm, of_algorithm in parts.items():
        if "conditions" in of_algorithm:
            places += [(condition, algorithm) for condition in _conditions(of_algorithm.pop("conditions"))]
    points = []
    for condition, algorithm in places:
        where = f"algorithms.{algorithm}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.]*", str(algorithm)):
            raise UsageError(f"{where}: a name has letters, digits, _ and . only; it becomes part of folder names")
        of_algorithm = dict(parts[algorithm])
        grid = of_algorithm.pop("tune", None if tuning is None else tuning.grid)
        of_algorithm = settings_in(of_algorithm, where)
        if grid is not None and tuning is None:
            raise UsageError(f"{where}.tune: there is no tuning; write tuning: {{seeds: [0]}}")
        if grid is None and tuning is not None:
            raise UsageError(f"{where}: nothing to tune; write tune: {{...}} there, or tuning: {{grid: {{...}}}}")
        described = {"algorithm": algorithm, **base, **condition, **of_algorithm}
        matching = [item for item in excluded if all(described.get(key) == item[key] for key in item)]
        if matching:
            useless = [item for item in useless if item not in matching]
            continue
        nproc = whole_in(described.get("nproc", 1), f"nproc of {where}", 1)
        from_base = {key: base[key] for key in CONDITION_KEYS if key in base}
        settings = _filled({**from_base, **condition, **of_algorithm}, nproc, where)
        trials = () if grid is None else _crossed(grid_in(grid, f"{where}.tune"), nproc, where)
        points.append((str(algorithm), condition, settings, trials))
    if not points:
        raise UsageError("exclude leaves no arm; take an entry out of it")
    if useless:
        raise UsageError(
            f"exclude: no arm is {dict(useless[0])!r}; an entry names what arms have, e.g. algorithm, nproc"
        )
    names = _names([(algorithm, condition, settings) for algorithm, condition, settings, _ in points])
    arms = tuple(
        _typed_arm(Arm(name, algorithm, settings, trials), base)
        for name, (algorithm, _, settings, trials) in zip(names, points, strict=True)
    )
    budgets = {arm.name: len(arm.trials) for arm in arms}
    if len(set(budgets.values())) > 1:
        counts = ", ".join(f"{name} {number}" for name, number in budgets.items())
        raise UsageError(f"tuning budgets differ (trials per arm: {counts}); give every algorithm the same number")
    return arms


def _typed_arm(arm: Arm, base: Mapping[str, Any]) -> Arm:
    """`arm` with values of the types that settings have, all of them valid now and not after hours."""
    settings: dict[str, Any] = {}
    trials = []
    for trial in arm.trials or ({},):
        values = {**base, **arm.settings, **trial}
        typed = typed_settings(f"arm {arm.name}", resolve(values))
        set_here = [key for key, value in resolve(values).items() if key in arm.settings or value != values.get(key)]
        settings = {key: typed[key] for key in set_here}
        trials.append({key: typed[key] for key in trial})
    return dataclasses.replace(arm, settings=settings, trials=tuple(trials) if arm.trials else ())


def typed_settings(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that `values` make, converted to their types."""
    try:
        return FLAGS.flatten(FLAGS.make(values))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _conditions(given: Any) -> list[dict[str, Any]]:
    items = given if isinstance(given, list) else [given]
    crossed: list[dict[str, Any]] = []
    for item in items:
        condition = settings_in(item, "conditions")
        axes = {key: value if isinstance(value, list) else [value] for key, value in condition.items()}
        for key, values in axes.items():
            if any(isinstance(value, list | dict) for value in values):
                raise UsageError(f"conditions.{key} must be a value or a list of values, got {condition[key]!r}")
        crossed += [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    if not crossed:
        raise UsageError("conditions is empty; write e.g. conditions: [{nproc: [2, 4]}], or leave it out")
    return crossed


def _names(points: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> list[str]:
    """Unique names: the algorithm, its workers, the clock, and whatever else tells conditions of one clock apart."""
    varying: dict[object, list[str]] = {}
    for group in {(algorithm, settings.get("clock") == "virtual") for algorithm, _, settings in points}:
        same = [given for name, given, settings in points if (name, settings.get("clock") == "virtual") == group]
        keys = dict.fromkeys(key for condition in same for key in condition if key not in ("nproc", "clock"))
        varying[group] = [key for key in keys if len({str(condition.get(key)) for condition in same}) > 1]
    names = []
    for algorithm, condition, settings in points:
        name = f"{algorithm}-w{settings.get('nproc', 1)}"
        for key in varying[algorithm, settings.get("clock") == "virtual"]:
            value = re.sub(r"[^A-Za-z0-9.]+", "_", str(condition.get(key, "default"))).strip("_")
            name += f"-{key}_{value}"
        if settings.get("clock") == "virtual":
            name += "-virtual"
        names.append(name)
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"two arms are both called {name}; conditions must not repeat themselves")
    return names


def _filled(values: Mapping[str, Any], nproc: Any, where: str) -> dict[str, Any]:
    if "{" in json.dumps(values) and not isinstance(nproc, int):
        raise UsageError(f"{where}: placeholders need a number of workers; set nproc in conditions")
    return {
        key: fill_in(value, nproc, f"{where}.{key}") if isinstance(value, str) else value
        for key, value in values.items()
    }


def _crossed(grid: Mapping[str, Sequence[Any]], nproc: Any, where: str) -> tuple[dict[str, Any], ...]:
    points = itertools.product(*grid.values())
    return tuple(_filled(dict(zip(grid, point, strict=True)), nproc, f"{where}.tune") for point in points)


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that distinguish the reference arms of a group: no algorithm's settings, and not the same in all
    arms.

    >>> differing([{"mode": "sync", "warmup": 0}, {"mode": "sync", "warmup": 80}])
    ['warmup']
    """
    keys = sorted({key for one in settings for key in one} - NOT_A_VARIANT)
    return [key for key in keys if len({str(one.get(key)) for one in settings}) > 1]


def references_of(arms: Sequence[Arm], base: Mapping[str, Any], algorithm: str) -> dict[str, str]:
    """Arm -> the reference arm that it is compared with; without those that have none, or more than one."""

    places = {}
    for arm in arms:
        typed = typed_settings(f"arm {arm.name}", resolve({**base, **arm.settings}))
        places[arm.name] = (*(typed[key] for key in CONDITION_KEYS), typed["batch_size"])
    references = {}
    for arm in arms:
        fitting = [one for one in arms if one.algorithm == algorithm and places[one.name] == places[arm.name]]
        keys = differing([one.settings for one in fitting])
        fitting = [one for one in fitting if all(one.settings.get(key) == arm.settings.get(key) for key in keys)]
        if len(fitting) == 1:
            references[arm.name] = fitting[0].name
    return references


def tuning_in(given: Any) -> Tuning | None:
    if given is None:
        return None
    values = mapping_in(given, "tuning")
    check_keys(values, ("grid", "seeds"), "tuning")
    grid = None if "grid" not in values else grid_in(values["grid"], "tuning.grid")
    return Tuning(grid, seeds_in(values.get("seeds", [0]), "tuning.seeds"))


def place_of(arm: Arm) -> tuple[int, str]:
    return arm.settings.get("nproc", 1), arm.settings.get("clock", "measured")
