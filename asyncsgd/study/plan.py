"""From a sweep's config to the list of its runs: what is compared, under which conditions, with which seeds, tuned how.

Pure: nothing is run, read or drawn here but the order of the runs, which is a function of the config. A config looks
like this (``experiments/configs/`` has more):

    name: quick
    base_model: {model: tiny, samples: 1600}        # pretrained first, once: where every run starts
    base: {data: pydocs, samples: 1600, schedule: constant}   # any setting of experiments/stilt_mlm.py, for every run
    algorithms:                                     # what is compared
      sync: {mode: sync}
      ringmaster: {mode: async, rule: "ringmaster:threshold={nproc}"}   # also its own tune: and conditions:
    conditions:                                     # crossed with every algorithm; lists are crossed among themselves
      - {nproc: [2, 4], clock: virtual, speeds: "slow:worker=0,factor=3"}
    seeds: [100, 101, 102, 103, 104, 105]
    tuning: {grid: {learning_rate: [5.0e-4, 1.0e-3]}, seeds: [0]}
    pilots: [10, 11, 12, 13, 14]                    # seeds of runs of the tuned reference that fix target and seconds
    finetune: {data: pydocs, repetitions: 1}        # any setting of experiments/stilt_finetune.py
    analysis: {reference: sync, primary: {endpoint: time_to_target, num_workers: 4, clock: virtual}}

Three more keys, each with its default:

    exclude: []          # no arms of these: {algorithm: sync, nproc: 2} takes out those that have all of its values
    replicates: 1        # runs of a measured arm on each seed, to see how much equal runs differ; tests take the first
    order_seed: 0        # of the order of the runs, drawn anew in every block

`analysis` may also name a `control`, an algorithm whose updates are as small as those of an asynchronous one, e.g.
`small: {mode: sync, batch_size: "{16//nproc}"}`: at equal samples it makes as many updates.

An *arm* is an algorithm under one condition; a *block* is a seed: all arms run on it, in an order of its own.

Where the primary endpoint is the time to a target, all test runs of a group have one budget in seconds: what the pilots
of its reference took for their samples, in the median. With a budget in samples the faster arm would be stopped first.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import json
import math
import operator
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.finetuning import FINETUNE_FLAGS, make_finetune_settings
from asyncsgd.settings.training import Settings, flatten, make_settings
from asyncsgd.settings.yaml_reader import read_yaml

Stage = Literal["base", "tuning", "pilot", "test", "finetune"]
STAGES: tuple[Stage, ...] = ("base", "tuning", "pilot", "test", "finetune")
TIMED: tuple[Stage, ...] = ("tuning", "pilot", "test")
"""Stages in which a run's seconds are a result, unless its clock is virtual."""
PLAN_SCHEMA = 1
BASE = "base"
"""Folder, and arm, of the run that makes the base model."""
BASELINE = "baseline"
"""The arm of fine-tuning runs that start from the base model, without intermediate training."""

ENDPOINTS = ("loss_at_equal_samples", "loss_at_equal_seconds", "time_to_target", "macro_f1")

_CONFIG_KEYS = (
    "name",
    "base",
    "base_model",
    "algorithms",
    "conditions",
    "exclude",
    "seeds",
    "replicates",
    "tuning",
    "pilots",
    "finetune",
    "analysis",
    "order_seed",
)
_RESERVED = ("seed", "run_dir", "runs_dir", "overwrite")
"""Settings that the sweep itself decides."""

_CONDITIONS = ("nproc", "clock", "speeds")
"""Settings that say under which condition an arm runs; an arm has them even where `base` sets them."""

NOT_A_VARIANT = frozenset(("mode", "rule", *_CONDITIONS, "batch_size", "seed"))
"""Settings that are the algorithm's, or that all arms of a group share; any other may tell two references apart."""

_NOT_TUNED = (
    *("mode", *_CONDITIONS, "network", "churn", "samples", "seconds", "target_loss", "evaluations", "eval_samples"),
    *("data", "eval_data", "text_column", "mask", "mask_prob"),
    *("eval_mask", "eval_mask_prob", "vocab_size", "model"),
)
"""Settings that change what is compared, or what it may cost, rather than how well an algorithm does under it."""

_SEED_LIMIT = 2**32
_FINETUNE_SEEDS = 1000
"""Fine-tuning seeds of one block: seed 7 has 7000 to 7999."""


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


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run of the plan; `folder` is its name below the sweep's folder."""

    folder: str
    stage: Stage
    arm: str
    seed: int
    replicate: int = 0
    trial: int | None = None
    parent: str | None = None
    """Folder of the pretraining run that a fine-tuning run starts from; None for the baseline."""
    finetune_seed: int | None = None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What the config registers before the test runs; see statistics in docs/study.md."""

    reference: str
    control: str | None
    """An algorithm whose updates are as small as those of an asynchronous one: a difference from it is not one of the
    number of updates. It is compared beside the primary family, at equal samples."""
    endpoint: str
    num_workers: int | None
    clock: str
    alpha: float
    margins: Mapping[str, float]
    target_share: float
    target_loss: float | None
    family: tuple[str, ...]
    """The arms that are compared with the reference there: the primary family, over which Holm adjusts."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every run of a sweep, in the order in which they are run, stage by stage."""

    name: str
    base: Mapping[str, Any]
    base_model: Mapping[str, Any] | None
    """Settings of the run that makes the base model; None where `base` names one."""
    arms: tuple[Arm, ...]
    runs: tuple[PlannedRun, ...]
    tuning_seeds: tuple[int, ...]
    pilot_seeds: tuple[int, ...]
    """Of runs of the reference as it was tuned, which fix the target; without any, its tuning runs do."""
    seeds: tuple[int, ...]
    finetune: Mapping[str, Any] | None
    analysis: Analysis | None
    timed_by: Mapping[str, str]
    """Arm -> the reference arm whose seconds are the budget of its test runs; empty where the config's budgets stay."""
    config_sha256: str

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def of_stage(self, stage: Stage) -> list[PlannedRun]:
        return [run for run in self.runs if run.stage == stage]

    def values(
        self, run: PlannedRun, chosen: Mapping[str, Mapping[str, Any]], budgets: Mapping[str, float]
    ) -> dict[str, Any]:
        """The settings of a pretraining run by name, as `asyncsgd.settings.training.make_settings` takes them.

        Args:
            chosen: arm -> the settings that its tuning has chosen; not looked at for tuning runs.
            budgets: reference arm -> the seconds of all test runs that it times (`timed_by`).

        Raises:
            KeyError: for a pilot or test run of an arm that is tuned and not in `chosen`, and for a test run whose
                budget is not in `budgets`.
        """
        if run.stage == "base":
            assert self.base_model is not None
            return {**self.base_model, "mode": "single"}
        arm = self.arm(run.arm)
        if run.trial is not None:
            tuned = arm.trials[run.trial]
        else:
            tuned = chosen[arm.name] if arm.trials else {}
        values = {**self.base, **arm.settings, **tuned, "seed": run.seed}
        if run.stage == "test" and arm.name in self.timed_by:
            values |= {"samples": None, "seconds": budgets[self.timed_by[arm.name]]}
        return resolve(values)

    def as_json(
        self,
        chosen: Mapping[str, Mapping[str, Any]],
        losses: Mapping[tuple[str, int], Sequence[float | None]],
        scores: Mapping[tuple[str, int], float | None],
        targets: Mapping[str, float],
        budgets: Mapping[str, float],
    ) -> dict[str, Any]:
        """What plan.json holds: arms with their trials and what became of them, and every run."""
        return {
            "schema": PLAN_SCHEMA,
            "study": self.name,
            "config_sha256": self.config_sha256,
            "base_model": self.base_model is not None,
            "arms": [
                {
                    "name": arm.name,
                    "algorithm": arm.algorithm,
                    "settings": dict(arm.settings),
                    "num_workers": arm.settings.get("nproc", 1),
                    "clock": arm.settings.get("clock", "measured"),
                    "speeds": arm.settings.get("speeds"),
                    "chosen": dict(chosen[arm.name]) if arm.name in chosen else None,
                    "trials": [
                        {
                            "settings": dict(trial),
                            "seeds": list(self.tuning_seeds),
                            "losses": list(losses.get((arm.name, number), ())),
                            "score": scores.get((arm.name, number)),
                        }
                        for number, trial in enumerate(arm.trials)
                    ],
                }
                for arm in self.arms
            ],
            "targets": dict(targets),
            "budget_seconds": dict(budgets),
            "runs": [dataclasses.asdict(run) for run in self.runs],
        }


def read_config(path: Path) -> dict[str, Any]:
    """Read a sweep's YAML file.

    Raises:
        UsageError: if it cannot be read, is not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); experiments/configs/ has examples") from error
    config = read_yaml(text, str(path))
    if not isinstance(config, dict):
        raise UsageError(f"{path} must hold keys and values ({', '.join(_CONFIG_KEYS)})")
    return config


def make_plan(config: Mapping[str, Any]) -> Plan:
    """Turn a config into a plan, checking everything that can be checked without running anything.

    Raises:
        UsageError: naming the key, the value and what to write instead.

    >>> plan = make_plan({"name": "n", "algorithms": {"sync": {"mode": "sync"}, "async": {"mode": "async"}},
    ...                   "conditions": [{"nproc": [2, 4]}], "seeds": [7]})
    >>> [arm.name for arm in plan.arms]
    ['sync-w2', 'async-w2', 'sync-w4', 'async-w4']
    >>> sorted(run.folder for run in plan.runs)
    ['test/async-w2/s7', 'test/async-w4/s7', 'test/sync-w2/s7', 'test/sync-w4/s7']
    """
    _check_keys(config, _CONFIG_KEYS, "the config")
    _check_plain(config, "the config")
    name = _text(config.get("name", "sweep"), "name")
    if not re.fullmatch(r"[A-Za-z0-9_.-]*[A-Za-z0-9]", name):
        raise UsageError(f"name has letters, digits, _ . and - only; it becomes the name of a folder; got {name!r}")
    base = _settings(config.get("base", {}), "base")
    base_model = None
    if config.get("base_model") is not None:
        base_model = _settings(config["base_model"], "base_model", ("mode", "run_dir", "runs_dir", "overwrite"))
        typed = _typed("base_model", {**base_model, "mode": "single"})
        base_model = {key: typed[key] for key in base_model}
        if "model" in base:
            raise UsageError("base_model makes the model that every run starts from; take model out of base")
    seeds = _seeds(config.get("seeds", [0]), "seeds")
    replicates = _whole(config.get("replicates", 1), "replicates", 1)
    tuning = _tuning(config.get("tuning"))
    if tuning is not None and (shared := sorted(set(tuning.seeds) & set(seeds))):
        raise UsageError(
            f"tuning.seeds and seeds share {shared}; a seed that chose the learning rate cannot test it: use others"
        )
    pilots = () if config.get("pilots") is None else _seeds(config["pilots"], "pilots")
    if shared := sorted(set(pilots) & {*seeds, *(() if tuning is None else tuning.seeds)}):
        raise UsageError(
            f"pilots share {shared} with seeds or tuning.seeds; what fixes the target must not be tested by it, nor "
            f"have chosen the learning rate: use others"
        )
    arms = _arms(config, base, tuning)
    order_seed = _whole(config.get("order_seed", 0), "order_seed", 0)
    finetune = _finetune(config.get("finetune"), seeds)
    analysis = _analysis(config.get("analysis"), arms, tuning, pilots, finetune)
    timed_by = _timed_by(arms, base, analysis, found=bool(pilots) or tuning is not None)
    runs = [
        *([PlannedRun(BASE, "base", BASE, base_model.get("seed", 0))] if base_model is not None else []),
        *_tuning_runs(arms, tuning, order_seed),
        *_pilot_runs(arms, pilots, analysis, order_seed),
        *_test_runs(arms, seeds, replicates, order_seed),
        *_finetune_runs(arms, seeds, finetune, order_seed),
    ]
    return Plan(
        name,
        base,
        base_model,
        arms,
        tuple(runs),
        () if tuning is None else tuning.seeds,
        pilots,
        seeds,
        finetune,
        analysis,
        timed_by,
        sha256_of(config),
    )


def sha256_of(config: Mapping[str, Any]) -> str:
    """A hash of a config's content; comments and the order of its keys do not change it."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


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


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_FUNCTIONS = {"max": max, "min": min}


def fill_in(text: str, nproc: int, where: str) -> str:
    """Replace what stands in braces by its value; it may use nproc, whole numbers, + - * //, max and min.

    >>> fill_in("ringmaster:threshold={max(1, nproc//2)}", 4, "rule")
    'ringmaster:threshold=2'

    Raises:
        UsageError: for anything else in the braces.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id == "nproc":
            return nproc
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return _FUNCTIONS[node.func.id](*map(value, node.args))
        raise ValueError

    def replaced(match: re.Match[str]) -> str:
        try:
            return str(value(ast.parse(match[1].strip(), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise UsageError(
                f"{where}: {match[0]} is not understood; in braces stand nproc, whole numbers, + - * //, max and min, "
                f"e.g. {{nproc//2}}"
            ) from error

    return re.sub(r"\{([^{}]*)\}", replaced, text)


# ---- arms --------------------------------------------------------------------------------------------------


def _arms(config: Mapping[str, Any], base: Mapping[str, Any], tuning: Tuning | None) -> tuple[Arm, ...]:
    algorithms = _mapping(config.get("algorithms", {}), "algorithms")
    if not algorithms:
        raise UsageError("the config names no algorithms; write e.g. algorithms: {sync: {mode: sync}}")
    conditions = _conditions(config.get("conditions", [{}]))
    excluded = [_settings(item, "exclude", ()) for item in _list(config.get("exclude", []), "exclude")]
    useless = list(excluded)
    parts = {algorithm: dict(_mapping(given, f"algorithms.{algorithm}")) for algorithm, given in algorithms.items()}
    # An algorithm may have conditions of its own, e.g. one process at two batch sizes beside several workers.
    places = [
        (condition, algorithm)
        for condition in conditions
        for algorithm in parts
        if "conditions" not in parts[algorithm]
    ]
    for algorithm, own in parts.items():
        if "conditions" in own:
            places += [(condition, algorithm) for condition in _conditions(own.pop("conditions"))]
    points = []
    for condition, algorithm in places:
        where = f"algorithms.{algorithm}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.]*", str(algorithm)):
            raise UsageError(f"{where}: a name has letters, digits, _ and . only; it becomes part of folder names")
        own = dict(parts[algorithm])
        grid = own.pop("tune", None if tuning is None else tuning.grid)
        own = _settings(own, where)
        if grid is not None and tuning is None:
            raise UsageError(f"{where}.tune: there is no tuning; write tuning: {{seeds: [0]}}")
        if grid is None and tuning is not None:
            raise UsageError(f"{where}: nothing to tune; write tune: {{...}} there, or tuning: {{grid: {{...}}}}")
        described = {"algorithm": algorithm, **base, **condition, **own}
        matching = [item for item in excluded if all(described.get(key) == item[key] for key in item)]
        if matching:
            useless = [item for item in useless if item not in matching]
            continue
        nproc = _whole(described.get("nproc", 1), f"nproc of {where}", 1)
        from_base = {key: base[key] for key in _CONDITIONS if key in base}
        settings = _filled({**from_base, **condition, **own}, nproc, where)
        trials = () if grid is None else _crossed(_grid(grid, f"{where}.tune"), nproc, where)
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
        told = ", ".join(f"{name} {number}" for name, number in budgets.items())
        raise UsageError(f"tuning budgets differ (trials per arm: {told}); give every algorithm the same number")
    return arms


def _typed_arm(arm: Arm, base: Mapping[str, Any]) -> Arm:
    """`arm` with values of the types that settings have, all of them valid now and not after hours."""
    settings: dict[str, Any] = {}
    trials = []
    for trial in arm.trials or ({},):
        values = {**base, **arm.settings, **trial}
        typed = _typed(f"arm {arm.name}", resolve(values))
        told = [key for key, value in resolve(values).items() if key in arm.settings or value != values.get(key)]
        settings = {key: typed[key] for key in told}
        trials.append({key: typed[key] for key in trial})
    return dataclasses.replace(arm, settings=settings, trials=tuple(trials) if arm.trials else ())


def _typed(where: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """All settings that `values` make, converted to their types."""
    try:
        return flatten(make_settings(values))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def _conditions(given: Any) -> list[dict[str, Any]]:
    items = given if isinstance(given, list) else [given]
    crossed: list[dict[str, Any]] = []
    for item in items:
        condition = _settings(item, "conditions")
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


# ---- budgets -----------------------------------------------------------------------------------------------


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """What tells the reference arms of a group apart: settings that are no algorithm's and not the same in all.

    >>> differing([{"mode": "sync", "warmup": 0}, {"mode": "sync", "warmup": 80}])
    ['warmup']
    """
    keys = sorted({key for one in settings for key in one} - NOT_A_VARIANT)
    return [key for key in keys if len({str(one.get(key)) for one in settings}) > 1]


def _references(arms: Sequence[Arm], base: Mapping[str, Any], algorithm: str) -> dict[str, str]:
    """Arm -> the reference arm that it is compared with; without those that have none, or more than one."""

    places = {}
    for arm in arms:
        typed = _typed(f"arm {arm.name}", resolve({**base, **arm.settings}))
        places[arm.name] = (*(typed[key] for key in _CONDITIONS), typed["batch_size"])
    found = {}
    for arm in arms:
        fitting = [one for one in arms if one.algorithm == algorithm and places[one.name] == places[arm.name]]
        keys = differing([one.settings for one in fitting])
        fitting = [one for one in fitting if all(one.settings.get(key) == arm.settings.get(key) for key in keys)]
        if len(fitting) == 1:
            found[arm.name] = fitting[0].name
    return found


def _timed_by(
    arms: Sequence[Arm], base: Mapping[str, Any], analysis: Analysis | None, *, found: bool
) -> dict[str, str]:
    """Arm -> the reference whose seconds its test runs get, where the time to a target is compared.

    Args:
        found: whether there are runs before the tests that tell these seconds.
    """
    if analysis is None or analysis.endpoint != "time_to_target":
        return {}
    references = _references(arms, base, analysis.reference)
    budgets = {}
    for arm in arms:
        if arm.name not in references:
            continue
        for trial in arm.trials or ({},):
            typed = _typed(f"arm {arm.name}", resolve({**base, **arm.settings, **trial}))
            if typed["schedule"] != "constant":
                raise UsageError(
                    f"arm {arm.name}: its test runs are budgeted in seconds, as the endpoint is time_to_target, and "
                    f"schedule {typed['schedule']} needs a number of samples; write schedule: constant in base"
                )
            if typed["target_loss"] is not None:
                raise UsageError(
                    f"arm {arm.name}: target_loss would end runs before their common budget in seconds; take it out"
                )
            if typed["samples"] == 0 or None not in (typed["samples"], typed["seconds"]):
                raise UsageError(
                    f"arm {arm.name}: time_to_target needs a budget in samples, whose seconds the pilots tell, or one "
                    f"in seconds; got samples {typed['samples']} and seconds {typed['seconds']}"
                )
            budgets[arm.name] = typed["seconds"]
    for name, reference in references.items():
        if budgets[name] != budgets[reference]:
            raise UsageError(
                f"arm {name}: it has {_budget_text(budgets[name])} and {reference} {_budget_text(budgets[reference])}; "
                f"time_to_target compares runs of one budget: write it in base"
            )
    timed_by = {name: reference for name, reference in references.items() if budgets[name] is None}
    if timed_by and not found:
        raise UsageError(
            "analysis: time_to_target needs a common budget in seconds: pilots: [10, 11, 12] or tuning runs to take it "
            "from, or base: {seconds: 60}"
        )
    return timed_by


def _budget_text(seconds: float | None) -> str:
    return "a budget in samples" if seconds is None else f"{seconds:g} seconds"


# ---- runs --------------------------------------------------------------------------------------------------


def _shuffled(arms: Sequence[Arm], *key: object) -> list[Arm]:
    """The arms in an order that is a function of `key`: random in a block, the same whenever it is planned."""
    order = list(arms)
    random.Random(" ".join(map(str, key))).shuffle(order)
    return order


def _tuning_runs(arms: Sequence[Arm], tuning: Tuning | None, order_seed: int) -> Iterable[PlannedRun]:
    if tuning is None:
        return
    for seed in tuning.seeds:
        for number in range(max(len(arm.trials) for arm in arms)):
            for arm in _shuffled(arms, order_seed, "tuning", seed, number):
                if arm.trials.index(arm.trials[number]) == number:  # an equal trial before it is the same run
                    yield PlannedRun(f"tuning/{arm.name}/t{number}-s{seed}", "tuning", arm.name, seed, trial=number)


def _pilot_runs(
    arms: Sequence[Arm], pilots: Sequence[int], analysis: Analysis | None, order_seed: int
) -> Iterable[PlannedRun]:
    for seed in pilots:
        for arm in _shuffled(arms, order_seed, "pilot", seed):
            if analysis is not None and arm.algorithm == analysis.reference:
                yield PlannedRun(f"pilot/{arm.name}/s{seed}", "pilot", arm.name, seed)


def _test_runs(arms: Sequence[Arm], seeds: Sequence[int], replicates: int, order_seed: int) -> Iterable[PlannedRun]:
    for seed in seeds:
        for replicate in range(replicates):
            for arm in _shuffled(arms, order_seed, "test", seed, replicate):
                if replicate and arm.virtual:
                    continue  # it would be the same run, bit for bit
                yield PlannedRun(folder_of_test(arm.name, seed, replicate), "test", arm.name, seed, replicate)


def folder_of_test(arm: str, seed: int, replicate: int = 0) -> str:
    """The folder of a test run.

    >>> folder_of_test("sync-w2", 100)
    'test/sync-w2/s100'
    """
    return f"test/{arm}/s{seed}" + (f"-r{replicate}" if replicate else "")


def _finetune_runs(
    arms: Sequence[Arm], seeds: Sequence[int], finetune: Mapping[str, Any] | None, order_seed: int
) -> Iterable[PlannedRun]:
    if finetune is None:
        return
    for seed in seeds:
        for repetition in range(finetune["repetitions"]):
            # One fine-tuning seed for all arms of a block, so that they are paired; another in every block.
            finetune_seed = seed * _FINETUNE_SEEDS + repetition
            names = [arm.name for arm in _shuffled(arms, order_seed, "finetune", seed, repetition)]
            for name in [BASELINE, *names] if finetune["baseline"] else names:
                parent = None if name == BASELINE else folder_of_test(name, seed)
                yield PlannedRun(
                    f"finetune/{name}/s{seed}-f{repetition}",
                    "finetune",
                    name,
                    seed,
                    parent=parent,
                    finetune_seed=finetune_seed,
                )


# ---- reading the config ------------------------------------------------------------------------------------


def _check_keys(given: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{nearest(str(key), known)}; known are {', '.join(known)}")


def _check_plain(given: Any, where: str) -> None:
    """Text, numbers, truth values, lists and mappings with text as keys: what a hash and plan.json can hold."""
    if isinstance(given, Mapping):
        for key, value in given.items():
            if not isinstance(key, str):
                raise UsageError(f"{where}: the key {key!r} is not text; put it in quotes")
            _check_plain(value, key if where == "the config" else f"{where}.{key}")
    elif isinstance(given, list):
        for value in given:
            _check_plain(value, where)
    elif given is not None and not isinstance(given, str | int | float):
        raise UsageError(f"{where}: YAML reads {given} as a {type(given).__name__}; put it in quotes")


def _settings(given: Any, where: str, reserved: Sequence[str] = _RESERVED) -> dict[str, Any]:
    """Settings by field name; a dash is an underscore, as in flags."""
    settings: dict[str, Any] = {}
    for key, value in _mapping(given, where).items():
        name = key.replace("-", "_")
        if name in settings:
            raise UsageError(f"{where}: {name} is there twice; keep one")
        if name in reserved:
            raise UsageError(f"{where}: {name} is decided by the sweep; seeds go to the key seeds, the folder to --out")
        settings[name] = value
    return settings


def _mapping(given: Any, where: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} must hold keys and values, got {given!r}")
    return given


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise UsageError(f"{where} must be a list, got {given!r}; write [{given}]")
    return given


def _text(given: Any, where: str) -> str:
    if not isinstance(given, str) or not given:
        raise UsageError(f"{where} must be text, got {given!r}")
    return given


def _whole(given: Any, where: str, at_least: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < at_least:
        raise UsageError(f"{where} must be a whole number of at least {at_least}, got {given!r}")
    return given


def _seeds(given: Any, where: str) -> tuple[int, ...]:
    seeds = tuple(_whole(seed, where, 0) for seed in _list(given, where))
    if any(seed >= _SEED_LIMIT for seed in seeds):
        raise UsageError(f"{where} must be less than {_SEED_LIMIT}, got {max(seeds)}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"{where} must name each seed once, and at least one, got {given!r}")
    return seeds


def _grid(given: Any, where: str) -> dict[str, list[Any]]:
    grid = {key: _list(values, f"{where}.{key}") for key, values in _settings(given, where).items()}
    for key in _NOT_TUNED:
        if key in grid:
            raise UsageError(f"{where}: {key} is not tuned, it is what is compared; write it in conditions or base")
    if not grid or not all(grid.values()):
        raise UsageError(f"{where} must list values of at least one setting, e.g. {{learning_rate: [5.0e-4, 1.0e-3]}}")
    return grid


def _tuning(given: Any) -> Tuning | None:
    if given is None:
        return None
    values = _mapping(given, "tuning")
    _check_keys(values, ("grid", "seeds"), "tuning")
    grid = None if "grid" not in values else _grid(values["grid"], "tuning.grid")
    return Tuning(grid, _seeds(values.get("seeds", [0]), "tuning.seeds"))


def _finetune(given: Any, seeds: Sequence[int]) -> dict[str, Any] | None:
    if given is None:
        return None
    hidden = ("seed", "seeds", "init_from", "run_dir", "runs_dir", "overwrite")
    values = {key.replace("-", "_"): value for key, value in _mapping(given, "finetune").items()}
    values["repetitions"] = _whole(values.get("repetitions", 1), "finetune.repetitions", 1)
    if values["repetitions"] > _FINETUNE_SEEDS:
        raise UsageError(f"finetune.repetitions must be at most {_FINETUNE_SEEDS}, got {values['repetitions']}")
    if max(seeds) >= (most := _SEED_LIMIT // _FINETUNE_SEEDS):
        raise UsageError(f"seeds must be less than {most} where fine-tuning has seeds of its own, got {max(seeds)}")
    baseline = values.setdefault("baseline", True)
    if not isinstance(baseline, bool):
        raise UsageError(f"finetune.baseline must be true or false, got {baseline!r}")
    for key in hidden:
        if key in values:
            raise UsageError(f"finetune: {key} is decided by the sweep; for several seeds a run write repetitions: 3")
    own = [key for key in values if key not in ("repetitions", "baseline")]
    try:
        settings = make_finetune_settings({"init_from": "tiny", **{key: values[key] for key in own}})
    except UsageError as error:
        raise UsageError(f"finetune: {error}") from error
    typed = FINETUNE_FLAGS.flatten(settings)
    return values | {key: typed[key] for key in own}


def _analysis(
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
    values = _mapping(given, "analysis")
    _check_keys(
        values, ("reference", "control", "primary", "alpha", "margins", "target_share", "target_loss"), "analysis"
    )
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
    primary = _mapping(values.get("primary", {}), "analysis.primary")
    _check_keys(primary, ("endpoint", "num_workers", "clock"), "analysis.primary")
    endpoint = primary.get("endpoint", "time_to_target")
    if endpoint not in ENDPOINTS:
        raise UsageError(
            f"analysis.primary.endpoint must be one of {', '.join(ENDPOINTS)}, got {endpoint!r}"
            f"{nearest(str(endpoint), ENDPOINTS)}"
        )
    if endpoint == "macro_f1" and finetune is None:
        raise UsageError("analysis.primary.endpoint macro_f1 is of fine-tuning runs; add finetune: {data: ...}")
    places = {_place(arm) for arm in arms}
    workers, clock = primary.get("num_workers"), primary.get("clock")
    matching = {
        place for place in places if (workers is None or place[0] == workers) and (clock is None or place[1] == clock)
    }
    if len(matching) != 1:
        shown = ", ".join(f"{{num_workers: {place[0]}, clock: {place[1]}}}" for place in sorted(places))
        raise UsageError(f"analysis.primary must name one of the conditions: {shown}; got {dict(primary)!r}")
    ((workers, clock),) = matching
    if all(arm.algorithm != reference or _place(arm) != (workers, clock) for arm in arms):
        raise UsageError(
            f"analysis: the reference {reference} has no arm with {{num_workers: {workers}, clock: {clock}}}, so that "
            f"nothing can be compared there; name another one, or take it out of exclude"
        )
    margins = _mapping(values.get("margins", {}), "analysis.margins")
    _check_keys(margins, ("loss", "macro_f1"), "analysis.margins")
    for key, margin in margins.items():
        _number(margin, f"analysis.margins.{key}", 0.0, None)
    alpha = _number(values.get("alpha", 0.05), "analysis.alpha", 0.0, 1.0)
    share = _number(values.get("target_share", 0.95), "analysis.target_share", 0.0, 1.0)
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
        share,
        None if loss is None else _number(loss, "analysis.target_loss", 0.0, None),
        tuple(
            arm.name for arm in arms if arm.algorithm not in (reference, control) and _place(arm) == (workers, clock)
        ),
    )


def _place(arm: Arm) -> tuple[int, str]:
    return arm.settings.get("nproc", 1), arm.settings.get("clock", "measured")


def _number(given: Any, where: str, above: float, up_to: float | None) -> float:
    good = isinstance(given, int | float) and not isinstance(given, bool) and above < given < math.inf
    if not good or (up_to is not None and given > up_to):
        bounds = f"above {above:g}" + ("" if up_to is None else f" and at most {up_to:g}")
        hint = "; YAML reads 1e-4 as text, write 1.0e-4" if isinstance(given, str) else ""
        raise UsageError(f"{where} must be a number {bounds}, got {given!r}{hint}")
    return float(given)


def flags_of(settings: Settings) -> list[str]:
    """The flags of experiments/stilt_mlm.py that make `settings`; what has its default is left out.

    >>> flags_of(make_settings({"mode": "sync", "nproc": 4}))
    ['--mode', 'sync', '--nproc', '4']
    """
    flags = []
    default = flatten(make_settings({}))
    values = flatten(settings)
    # Defaults that follow from other settings, so that a value equal to the usual default may have to be said.
    open_ended = {"samples": "seconds", "schedule": "seconds", "learning_rate": "optimizer"}
    for name, value in values.items():
        decided_by = open_ended.get(name, name)
        differs = value != default[name] or values[decided_by] != default[decided_by]
        if differs and value is not None:
            flags += _flag(name, value)
    return flags


def flags_of_values(values: Mapping[str, Any]) -> list[str]:
    """Values by name as flags, without looking at what they mean.

    >>> flags_of_values({"init_from": "tiny", "class_weights": True, "eval_data": None})
    ['--init-from', 'tiny', '--class-weights']
    """
    return [word for name, value in values.items() if value is not None for word in _flag(name, value)]


def _flag(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []  # a truth value is a flag without a value
    return [flag, str(value)]
