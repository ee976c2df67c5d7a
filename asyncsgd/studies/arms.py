"""Arms: every algorithm under every condition, with what tuning tries for it."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal

from asyncsgd.errors import UsageError
from asyncsgd.settings import kinds
from asyncsgd.settings.specs import Spec, flag_of
from asyncsgd.settings.task import task_flags
from asyncsgd.studies.config import (
    CONDITION_KEYS,
    ComparisonsConfig,
    Conditions,
    Config,
    GivenSettings,
    Settings,
    fill_in,
    grid_of,
    settings_of,
    typed,
)
from asyncsgd.tasks import class_named

NOT_A_VARIANT = frozenset(("mode", "rule", *CONDITION_KEYS, "batch_size", "seed"))
"""Settings that `references_of` does not compare: those of the algorithm, those that all arms of a group share, and the
seed, which no arm has. A group is the arms of one condition and one batch size.
"""

Loop = Literal["library", "naive"]
"""What trains a run: this library, or the plain loop of `asyncsgd.studies.naive_loop`."""


@dataclasses.dataclass(frozen=True)
class Arm:
    """An algorithm under one condition."""

    name: str
    algorithm: str
    """Its key in `algorithms`; of a comparison that in `arms`, of a grid its point, and of a ladder its side."""
    settings: GivenSettings
    """What the arm sets beside `base`, with placeholders filled in, and its condition, also where `base` has that."""
    trials: tuple[GivenSettings, ...] = ()
    """What tuning tries on top of them; empty where nothing is tuned."""
    task: str = "masked_lm"
    loop: Loop = "library"

    @property
    def virtual(self) -> bool:
        return self.settings.get("clock") == "virtual"

    @property
    def workers_and_clock(self) -> tuple[int, str]:
        """Its number of workers and its clock."""
        return self.settings.get("nproc", 1), self.settings.get("clock", "measured")


def resolve(values: GivenSettings) -> Settings:
    """The settings that a run gets, new. The virtual clock has no all-reduce, so there mode `sync` becomes the rule
    `synchronous`, which steps along the same mean. With another rule mode `sync` is left as it is, and refused later.

    >>> resolve({"mode": "sync", "clock": "virtual", "nproc": 4})
    {'mode': 'async', 'clock': 'virtual', 'nproc': 4, 'rule': 'synchronous'}
    """
    resolved = dict(values)
    # asynchronous is the default of --rule, so nobody need have typed it
    names_no_other_rule = resolved.get("rule") in (None, "asynchronous", "synchronous")
    if resolved.get("clock") == "virtual" and resolved.get("mode") == "sync" and names_no_other_rule:
        resolved |= {"mode": "async", "rule": "synchronous"}
    return resolved


def checked_settings(where: str, values: GivenSettings, task: str) -> Settings:
    """All settings of a run of a task, converted to their types: those in `values`, and the defaults of the others."""
    try:
        flags = task_flags(class_named(task))
        return dict(flags.flatten(flags.make(values)))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def converted(where: str, given: GivenSettings, task: str, beside: GivenSettings = MappingProxyType({})) -> Settings:
    """The settings in `given` alone, converted to their types. They are checked together with those in `beside`."""
    all_settings = checked_settings(where, {**beside, **given}, task)
    return {key: all_settings[key] for key in given}


def settings_of_arm(arm: Arm, base: GivenSettings, trial: GivenSettings = MappingProxyType({})) -> Settings:
    """All settings of the runs of an arm, or of one of its trials."""
    return checked_settings(f"arm {arm.name}", resolve({**base, **arm.settings, **trial}), arm.task)


def arms_of(
    config: Config, base: GivenSettings, task: str, *, is_tuned_before: bool, is_tuned_after: bool
) -> tuple[Arm, ...]:
    """Every algorithm under every condition, or under conditions of its own, without those that `exclude` takes out.

    Args:
        task: what all of them learn.
        is_tuned_before: whether a stage before that of the arms is tuned.
        is_tuned_after: whether a stage after it is tuned. That stage is tuned on models of the tuning seeds, which only
            trials make. So an arm that is not tuned has one trial then, with no settings of its own.
    """
    excluded = [settings_of(entry, "exclude", task, ()) for entry in config.exclude]
    unmatched = excluded  # the entries that have taken no arm out yet
    points = []  # (algorithm, condition, settings, trials) of every arm, before the arms have names
    for condition, algorithm in _conditions_and_algorithms(config, task):
        where = f"algorithms.{algorithm}"
        given = config.algorithms[algorithm]
        own_keys = {key: given[key] for key in given if key not in ("tune", "conditions")}
        own = settings_of(own_keys, where, task)
        all_keys = {"algorithm": algorithm, **base, **condition, **own}  # what an entry of `exclude` may name
        matching = [entry for entry in excluded if all(all_keys.get(key) == entry[key] for key in entry)]
        unmatched = [entry for entry in unmatched if entry not in matching]
        if matching:
            continue
        nproc = all_keys.get("nproc", 1)
        # An arm has the settings of its condition even where `base` sets them, since they tell arms apart.
        from_base = {key: base[key] for key in CONDITION_KEYS if key in base}
        settings = filled({**from_base, **condition, **own}, nproc, where)
        grid = given.get("tune", config.tuning.grid)
        trials: list[Settings] = [{}] if is_tuned_after else []
        if grid is not None:
            trials = crossed(grid_of(grid, f"{where}.tune", task))
        trials = [filled(trial, nproc, where) for trial in trials]
        points.append((algorithm, condition, settings, trials))
    if unmatched:
        raise UsageError(f"exclude: every entry must take an arm out, and {unmatched} is no arm's")
    if not points:
        raise UsageError("exclude takes every arm out; drop an entry")
    arms = []
    for name, (algorithm, _, settings, trials) in zip(_names(points), points, strict=True):
        arms.append(_arm_of(name, algorithm, settings, trials, base, task))
    counts = {arm.name: len(arm.trials) for arm in arms}
    is_tuned = bool(arms[0].trials) or is_tuned_before or is_tuned_after
    has_tuning_seeds = bool(config.tuning.seeds)
    # Trials are run on the tuning seeds, so a config has both or neither.
    if len(set(counts.values())) > 1 or is_tuned != has_tuning_seeds:
        got = ", ".join(f"{name} {number}" for name, number in counts.items())
        raise UsageError(
            f"tuning: every arm needs as many trials as any other, and whatever is tuned seeds to run them on; write "
            f"tuning: {{grid: ..., seeds: [0]}}, or tuning: {{seeds: [0]}} and tune: into every algorithm or into a "
            f"stage, or take tuning out; got {got}"
        )
    return tuple(arms)


def arms_of_comparisons(config: ComparisonsConfig) -> list[Arm]:
    """The arms of all comparisons, each of every model."""
    arms = []
    for name, comparison in config.comparisons.items():
        for model in config.models:
            for arm, settings in comparison.arms.items():
                arms.append(_of_model(config, f"{name}/{model}/{arm}", model, settings))
    return arms


def arms_of_grid(config: ComparisonsConfig) -> list[Arm]:
    """The points of the grid, each of every model."""
    grid = config.grid
    if grid is None:
        return []
    axes = {"learning_rate": grid.learning_rate, "batch_size": grid.batch_size, "seq_len": grid.seq_len}
    arms = []
    for model, point in itertools.product(config.models, crossed(axes)):
        name = f"lr{float(point['learning_rate']):g}-b{point['batch_size']}-l{point['seq_len']}"
        arms.append(_of_model(config, f"grid/{model}/{name}", model, {**grid.base, **point}))
    return arms


def _of_model(config: ComparisonsConfig, name: str, model: str, settings: Settings) -> Arm:
    """The arm called `name` that trains a model of the config with `settings`."""
    given = {"mode": "single", **config.base, **config.models[model], **settings}
    if "task" not in given:
        raise UsageError(f"arm {name} has no task; write task: classification, or another one, into models.{model}")
    task: str = typed(given.pop("task"), str, f"arm {name}: task")
    values = settings_of(given, f"arm {name}", task)
    # Called for its UsageError alone: the arm keeps the values as the file has them.
    checked_settings(f"arm {name}", values, task)
    _, _, algorithm = name.rpartition("/")
    return Arm(name, algorithm, values, task=task)


def _conditions_and_algorithms(config: Config, task: str) -> list[tuple[Settings, str]]:
    """Every condition with each algorithm that it is for. An algorithm may have conditions of its own, e.g. one process
    at two batch sizes, where the others have several workers.
    """
    own = {name: given["conditions"] for name, given in config.algorithms.items() if "conditions" in given}
    shared = _conditions(config.conditions, "conditions", task)
    pairs = [(condition, name) for condition in shared for name in config.algorithms if name not in own]
    for name, given in own.items():
        where = f"algorithms.{name}.conditions"
        conditions = _conditions(typed(given, Conditions, where), where, task)
        pairs += [(condition, name) for condition in conditions]
    return pairs


def _conditions(given: Any, where: str, task: str) -> list[Settings]:
    """The conditions that a config's `conditions` stand for: a block of settings, or a list of such blocks."""
    blocks = given if isinstance(given, list) else [given]
    conditions = []
    for block in blocks:
        conditions += crossed(settings_of(block, where, task))
    return conditions


def crossed(settings: GivenSettings) -> list[Settings]:
    """The settings of each combination of the values that are lists.

    >>> crossed({"nproc": [2, 4], "clock": "virtual"})
    [{'nproc': 2, 'clock': 'virtual'}, {'nproc': 4, 'clock': 'virtual'}]
    """
    axes = []
    for value in settings.values():
        axes.append(value if isinstance(value, list) else [value])
    return [dict(zip(settings, point, strict=True)) for point in itertools.product(*axes)]


def filled(values: Settings, nproc: Any, where: str) -> Settings:
    """The settings with their placeholders filled in."""
    settings = dict(values)
    for key, value in values.items():
        if isinstance(value, str):
            settings[key] = fill_in(value, nproc, f"{where}.{key}")
    return settings


def _names(points: Sequence[tuple[str, Settings, Settings, Any]]) -> list[str]:
    """Unique names of arms: the algorithm, its workers, the clock, and whatever else tells conditions of one clock
    apart.

    Args:
        points: (algorithm, condition, settings, trials) of each arm.
    """
    groups: dict[object, list[Settings]] = {}
    for algorithm, condition, settings, _ in points:
        groups.setdefault((algorithm, settings.get("clock") == "virtual"), []).append(condition)
    names: list[str] = []
    for algorithm, condition, settings, _ in points:
        virtual = settings.get("clock") == "virtual"
        name = f"{algorithm}-w{settings.get('nproc', 1)}"
        for key in _varying_keys(groups[algorithm, virtual]):
            value = str(condition.get(key, "default"))
            word = re.sub(r"[^A-Za-z0-9.]+", "_", value).strip("_")
            name += f"-{key}_{word}"
        if virtual:
            name += "-virtual"
        if name in names:
            raise UsageError(f"two arms are both called {name}; conditions must not repeat themselves")
        names.append(name)
    return names


def _varying_keys(conditions: Sequence[Settings]) -> list[str]:
    """The keys, beside workers and clock, that have not the same value in all conditions."""
    keys = dict.fromkeys(itertools.chain(*conditions))
    varying = differing(conditions, {"nproc", "clock"})
    return [key for key in keys if key in varying]


def _arm_of(
    name: str, algorithm: str, given: Settings, trials: Sequence[Settings], base: GivenSettings, task: str
) -> Arm:
    """The arm with its settings converted to their types. They are checked now, and not when its runs start, which may
    be hours later.
    """
    settings: Settings = {}
    typed_trials = []
    for trial in trials or ({},):
        values = {**base, **given, **trial}
        resolved = resolve(values)
        all_settings = checked_settings(f"arm {name}", resolved, task)
        # The settings of the arm are those that it gives and those that `resolve` has changed. Those are the same in
        # every trial, since a trial that tunes `rule` beside mode `sync` is refused.
        changed = [key for key in resolved if resolved[key] != values.get(key)]
        settings = {key: all_settings[key] for key in resolved if key in given or key in changed}
        typed_trials.append({key: all_settings[key] for key in trial})
    return Arm(name, algorithm, settings, tuple(typed_trials) if trials else (), task)


def differing(settings: Iterable[GivenSettings], ignored: Set[str] = NOT_A_VARIANT) -> list[str]:
    """The names of the settings that are not the same in all of `settings`, without those that are `ignored`.

    >>> differing([{"mode": "sync", "warmup": 0}, {"mode": "sync", "warmup": 80}])
    ['warmup']
    """
    of_arms = list(settings)
    keys = sorted(set().union(*of_arms) - ignored)
    return [key for key in keys if len({str(each.get(key)) for each in of_arms}) > 1]


def references_of(arms: Sequence[Arm], base: GivenSettings, algorithm: str) -> dict[str, str]:
    """Arm -> the reference arm that it is compared with: the one of its group that agrees with it in every setting by
    which the reference arms of that group differ. Arms with no such reference arm, or with several, are left out.
    """
    conditions = {}
    for arm in arms:
        settings = settings_of_arm(arm, base)
        # a task of one's own may have one batch size for all, and then no setting of that name
        conditions[arm.name] = [settings.get(key) for key in (*CONDITION_KEYS, "batch_size")]
    references = {}
    for arm in arms:
        of_group = [one for one in arms if one.algorithm == algorithm and conditions[one.name] == conditions[arm.name]]
        keys = differing([one.settings for one in of_group])
        own = [arm.settings.get(key) for key in keys]
        fitting = [one for one in of_group if [one.settings.get(key) for key in keys] == own]
        if len(fitting) == 1:
            references[arm.name] = fitting[0].name
    return references


def flags_of(values: GivenSettings, specs: Mapping[str, Spec] = MappingProxyType({})) -> list[str]:
    """The words of a command line that give these values by name. True gives its flag alone. A value of None gives no
    words where it is the default.

    Args:
        specs: the settings of the task that is trained, by name. A list whose setting is none of these is one value.

    >>> flags_of({"model": "tiny", "class_weights": True, "predictions": None, "layers": (8, 16)})
    ['--model', 'tiny', '--class-weights', '--layers', '8,16']
    """
    words = []
    for name, value in values.items():
        plain = kinds.plain(value)
        repeats = name in specs and specs[name].metadata["repeats"]
        has_default = name not in specs or specs[name].default is None
        texts = [plain]
        if isinstance(plain, list | tuple):
            texts = list(plain) if repeats else [",".join(map(str, plain))]
        for text in texts:
            if text is None and has_default:
                continue
            words.append(flag_of(name))
            if text is not True:
                words.append(str(text))
    return words
