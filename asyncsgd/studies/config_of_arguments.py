"""The arguments of a study in Python as the config that a person would write."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from asyncsgd.api import rule_of
from asyncsgd.core.optimizers import SGD, AdamW
from asyncsgd.errors import UsageError
from asyncsgd.rules.contract import Rule
from asyncsgd.run.run import steps_of
from asyncsgd.run.runtimes import InProcess, Runtime, job_of, runtime_of
from asyncsgd.run.written import is_known, name_of
from asyncsgd.settings import kinds
from asyncsgd.settings.groups import Job
from asyncsgd.settings.specs import specs_of
from asyncsgd.studies.config import Settings, typed
from asyncsgd.tasks import class_named
from asyncsgd.tasks.base import Task

GivenArm = Rule | Mapping[str, Any]
"""An arm as the user gives it: a rule, or arguments of `asyncsgd.train` by name."""
NUM_PILOTS = 3
"""Runs of the reference that fix the target, unless the user says on which seeds."""
NAME = r"[A-Za-z0-9][A-Za-z0-9_.]*"
"""The pattern of an arm's name, which becomes part of the name of a folder."""
OF_THE_STUDY = ("rule", "runtime", "seed", "folder", "resume")
OF_ONE_RUN = ("quiet", "report", "callbacks", "hosts")
"""Arguments of `train` that no config can have."""
EXAMPLE = 'arms={"sync": asyncsgd.Synchronous(), "async": asyncsgd.Asynchronous()}'


def config_of(
    task: Task,
    arms: Mapping[str, GivenArm],
    seeds: Iterable[int],
    *,
    runtime: Runtime | None,
    shared: Mapping[str, Any],
    tune: Mapping[str, Iterable[Any]] | None,
    tuning_seeds: Iterable[int] | None,
    pilots: Iterable[int] | None,
    question: str | Mapping[str, Any],
) -> Settings:
    """The config of a study, as its file has it; `asyncsgd.studies.plan` says what its keys mean.

    Args:
        shared: arguments of `train` that all runs have; what is None is left out.
    """
    if not isinstance(task, Task):
        raise UsageError(f"task must be an object such as MyTask(), got {task!r}")
    if not isinstance(arms, Mapping) or len(arms) < 2:
        names = ", ".join(map(str, arms)) or "none"
        raise UsageError(f"a study compares two arms or more, and arms names {names}; write {EXAMPLE}")
    test_seeds = _seeds_of(seeds, "seeds")
    for name in arms:
        if not re.fullmatch(NAME, str(name)):
            raise UsageError(f"arms: {name!r} is no name of a folder; write letters, digits, _ and ., e.g. {EXAMPLE}")
    base = {**_settings_of_task(task), **_settings_of("base", shared)}
    if not {"samples", "seconds"} & base.keys():
        raise UsageError("a run needs an end; give samples=10_000 or seconds=60")
    algorithms = {str(name): _settings_of_arm(str(name), arm, runtime) for name, arm in arms.items()}
    study_name = re.sub(r"[^A-Za-z0-9]+", "_", task.name).strip("_")
    config: Settings = {
        "name": study_name or "study",
        "task": name_of(task),
        "base": base,
        "algorithms": algorithms,
        "seeds": test_seeds,
    }
    pilot_seeds = [] if pilots is None else _seeds_of(pilots, "pilots")
    last = max(test_seeds)
    if tune is not None or any("tune" in settings for settings in algorithms.values()):
        free = next(seed for seed in itertools.count(last + 1) if seed not in pilot_seeds)
        tuned_on = [free] if tuning_seeds is None else _seeds_of(tuning_seeds, "tuning_seeds")
        last = max(last, *tuned_on)
        config["tuning"] = {"seeds": tuned_on} if tune is None else {"grid": _grid_of(tune), "seeds": tuned_on}
    elif tuning_seeds is not None:
        raise UsageError('tuning_seeds does nothing where nothing is tuned; give tune={"learning_rate": [1e-3, 1e-2]}')
    asked = {"primary": {"endpoint": question}} if isinstance(question, str) else _plain(question, "question")
    registered = typed(asked, Settings, "question")
    primary = typed(registered.get("primary", {}), Settings, "question.primary")
    first_arm = next(iter(arms))
    config["analysis"] = {"reference": str(first_arm), **registered}
    endpoint = primary.get("endpoint", "time_to_target")
    if pilots is not None:
        config["pilots"] = pilot_seeds
    elif endpoint == "time_to_target" and "target_loss" not in registered:
        config["pilots"] = [last + number for number in range(1, 1 + NUM_PILOTS)]
    return config


def runtime_of_arm(arm: GivenArm, runtime: Runtime | None) -> Runtime:
    """The runtime of an arm: its own, else the one that arms share."""
    own: Runtime | None = arm.get("runtime") if isinstance(arm, Mapping) else None
    return own or runtime or InProcess()


def _seeds_of(seeds: Iterable[int], name: str) -> list[int]:
    try:
        numbers = [operator.index(seed) for seed in seeds]
    except TypeError as error:
        raise UsageError(f"{name} must be whole numbers, e.g. range(8), got {seeds!r}") from error
    if not numbers and name != "pilots":  # without pilots the tuning runs of the reference fix the target
        raise UsageError(f"{name} names none; name one or more, e.g. range(8)")
    twice = sorted({seed for seed in numbers if numbers.count(seed) > 1})
    if twice:
        raise UsageError(f"{name} has {', '.join(map(str, twice))} more than once; name each seed once, e.g. range(8)")
    return numbers


def _grid_of(tune: Mapping[str, Iterable[Any]]) -> dict[str, list[Any]]:
    if not isinstance(tune, Mapping):
        raise UsageError(f'tune must be lists of values by name, e.g. {{"learning_rate": [1e-3, 1e-2]}}, got {tune!r}')
    grid = {}
    for name, values in tune.items():
        if isinstance(values, str) or not isinstance(values, Iterable):
            raise UsageError(f"tune: {name} needs a list of values to try, e.g. [1e-3, 1e-2], got {values!r}")
        grid[name] = [_plain(value, f"tune: {name}") for value in values]
    return grid


def _settings_of_task(task: Task) -> Settings:
    """The fields of a task that are not the defaults of its class.

    Raises:
        UsageError: if the config cannot name the class, or say what the fields hold.
    """
    kind = type(task)
    name = name_of(task)
    if "." in kind.__qualname__:
        raise UsageError(
            f"the class {kind.__qualname__} lies within a function or a class, where no config finds it; move it to "
            f"the top of the file or of a notebook's cell"
        )
    if class_named(name) is not kind:
        raise UsageError(f"{kind.__name__} was defined again after the task was made; make it again: {kind.__name__}()")
    specs: Any = specs_of(kind)
    fields = {spec.name: (getattr(task, spec.field), spec.default) for spec in specs.values()}
    return {name: kinds.plain(value) for name, (value, default) in fields.items() if value != default}


def _settings_of_arm(name: str, arm: GivenArm, runtime: Runtime | None) -> Settings:
    """The settings of an arm: those that ask for its runtime and its rule, and the other entries of its dict."""
    where = f"arms: {name}"
    if isinstance(arm, Rule):
        arm = {"rule": arm}
    if not isinstance(arm, Mapping):
        raise UsageError(
            f"{where} must be a rule or a dict of arguments of asyncsgd.train, got {arm!r}; e.g. {EXAMPLE}"
        )
    others = {key: value for key, value in arm.items() if key not in ("rule", "runtime")}
    chosen = runtime_of_arm(arm, runtime)
    if not isinstance(chosen, Runtime):
        raise UsageError(f"runtime must be an object such as asyncsgd.Processes(4), got {chosen!r}")
    given = arm.get("rule")
    if not (given is None or isinstance(given, Rule)):
        raise UsageError(f"{where}: rule must be an object such as asyncsgd.Ringmaster(threshold=4), got {given!r}")
    rule = rule_of(given, chosen)
    settings = _settings_of_runtime(chosen)
    if chosen.follows_rule:
        if not is_known(rule):
            raise UsageError(
                f"{where}: {type(rule).__name__} is a rule of your own, and a study writes down what it compares; add "
                f"it to asyncsgd.rules (CONTRIBUTING.md), or train each seed with asyncsgd.train(rule=...) into a "
                f"folder of its own, and judge them with asyncsgd.load(FOLDER)"
            )
        settings["rule"] = str(rule)
    return {**settings, **_settings_of(where, others)}


def _settings_of_runtime(runtime: Runtime) -> Settings:
    """The settings that ask for a runtime, without defaults."""
    job_settings = job_of(runtime)
    try:
        read_back = runtime_of(dataclasses.replace(Job(), **job_settings), runtime.threads)
    except UsageError:
        read_back = None
    if read_back != runtime:
        raise UsageError(
            f"runtime={runtime!r} cannot be written into a config; give speeds, a network and changes of the library, "
            f"e.g. asyncsgd.Virtual(4, speeds=asyncsgd.Slow(worker=0, factor=3))"
        )
    default = vars(Job())
    settings = {key: value for key, value in job_settings.items() if key in ("mode", "nproc") or value != default[key]}
    if runtime.threads != 1:
        settings["threads"] = runtime.threads
    return settings


def _settings_of(where: str, given: Mapping[str, Any]) -> Settings:
    """Arguments of `train` as settings, without its rule and its runtime; what is None is left out."""
    settings: Settings = {}
    for name, value in given.items():
        if name in OF_THE_STUDY:
            raise UsageError(f"{where}: {name} is an argument of the study or of an arm; take it out")
        if name in OF_ONE_RUN:
            raise UsageError(f"{where}: {name} is for a single run of asyncsgd.train; take it out")
        if value is None:
            continue
        if name == "cache":
            settings["cache_dir"] = _plain(value, f"{where}: {name}")
        elif name == "tune":
            settings[name] = _grid_of(value)
        elif name == "optimizer":
            if type(value) not in (SGD, AdamW):
                raise UsageError(
                    f"{where}: optimizer={value!r} cannot be written into a config; give asyncsgd.SGD(0.9) or "
                    f"asyncsgd.AdamW()"
                )
            settings |= steps_of(value)
        else:
            settings[name] = _plain(value, f"{where}: {name}")
    return settings


def _plain(value: Any, where: str) -> Any:
    """A value as YAML has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(one, f"{where}: {key}") for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one, where) for one in value]
    if hasattr(value, "tolist"):  # of numpy or torch
        return _plain(value.tolist(), where)
    if value is None or isinstance(value, str | int | float | Path | enum.Enum):
        return kinds.plain(value)
    raise UsageError(f"{where} must be a number or text, since a config cannot hold {value!r}")
