"""A run as the settings.yaml of its folder has it: written, and read to be run again.

Scripts and `asyncsgd.train` write one format: every setting of `asyncsgd.settings.groups` and every field of the task,
by the name of its flag. A rule of the user's own cannot be written down, so null stands for it. Of an optimizer of the
user's own the name is written, and what it was made with, and of a schedule the name. Whoever runs the folder again
gives them.

A run folder is data. It may come from somebody else, so it runs no code that it names: a task that is none of the
library's own is given by the user."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import keyword
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from asyncsgd.core.optimizers import OPTIMIZERS, BuildOptimizer
from asyncsgd.core.schedules import SHAPES, Shape, name_of_shape
from asyncsgd.errors import UsageError
from asyncsgd.records.best_effort import say
from asyncsgd.rules import parse_rule
from asyncsgd.rules.contract import Rule
from asyncsgd.run.found import received_by
from asyncsgd.run.run import Run, run_of
from asyncsgd.settings import kinds
from asyncsgd.settings.flags import yaml_of
from asyncsgd.settings.groups import Budget, Common, Job, Machine, Output, Steps
from asyncsgd.settings.specs import specs_of
from asyncsgd.settings.yaml_reader import (
    ABOUT_THE_RUN,
    EXPERIMENT,
    FORMAT,
    OF_TASK,
    OPTIMIZER_OPTIONS,
    SETTINGS_FORMAT,
    SIMULATION,
    TASK,
    read_settings,
)
from asyncsgd.tasks import NAMED, has_name, task_class
from asyncsgd.tasks.base import Task

PARTS: Mapping[str, Any] = {"job": Job, "budget": Budget, "optimization": Steps, "machine": Machine}
"""Field of `Common` -> its class, of the groups of settings that every training has, but for the one that says where
it is written."""
OF_OPTIMIZERS = ("momentum", "beta1", "beta2")
"""The settings that only the library's own optimizers have."""
TO_REPLAY: Mapping[str, Any] = MappingProxyType({"speeds": None, "transport": "auto", "prefetch": 0})
"""The settings that a replay changes, since the log has the times and the order of the batches."""


@dataclasses.dataclass(frozen=True)
class Given:
    """What the reader of a folder gives, since the folder does not hold it or is not believed about it."""

    task: Task | type[Task] | None = None
    """The task, or its class, whose fields are then the folder's. None: it is one of the library's own."""
    rule: Rule | None = None
    optimizer: BuildOptimizer | None = None
    schedule: Shape | None = None
    cache: str | None = None
    """The folder of prepared data; None: the user's cache folder."""


def values_of(run: Run) -> dict[str, Any]:
    """The settings of a run by name, as its settings.yaml has them."""
    return {name: value for part in _parts_of(run).values() for name, value in part.items()}


def text_of(run: Run, comment: str = "") -> str:
    """The settings.yaml of a run.

    Args:
        comment: lines for the head of the file.
    """
    return yaml_of(_parts_of(run), comment)


def _parts_of(run: Run) -> dict[str, dict[str, Any]]:
    """The settings of a run by name, under the title of their part of the file."""
    about = {FORMAT: SETTINGS_FORMAT, EXPERIMENT: run.name, TASK: name_of(run.task)}
    parts = {"": about, f"task: {run.task.name}": fields_of(run.task)}
    titles = {field.name: field.metadata["title"] for field in dataclasses.fields(Common)}
    groups = {"job": run.job, "budget": run.budget, "optimization": run.steps, "machine": run.machine}
    for name, group in groups.items():
        parts[titles[name]] = {field: kinds.plain(value) for field, value in vars(group).items()}
    if not is_known(run.rule):
        parts[titles["job"]]["rule"] = None
    recipe = run.recipe
    if recipe.known_name is None:
        steps = parts[titles["optimization"]]
        for name in OF_OPTIMIZERS:
            del steps[name]
        steps["optimizer"] = recipe.name
        steps[OPTIMIZER_OPTIONS] = json.loads(json.dumps(recipe.options, default=str))
    return parts


def defaults_of(task: Task) -> dict[str, Any]:
    """Return the value of each setting that a folder lacks because there was none of that name yet: name -> value."""
    defaults = {name: spec.default for part in PARTS.values() for name, spec in specs_of(part).items()}
    fields: Any = {field.name: field.default for field in dataclasses.fields(task)}  # type: ignore[arg-type]
    return defaults | {name: kinds.plain(fields[field]) for name, field in _names_of(type(task))}


def compared(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which a run that goes on must be the run that was stopped. Of the task's class they have
    the name alone."""
    kept = {name: value for name, value in values.items() if name not in (FORMAT, EXPERIMENT)}
    kept[TASK] = str(kept.get(TASK)).rpartition(":")[2]  # a script's module is __main__ where it is run
    return kept


def named_after(steps: Steps, shape: Shape) -> Steps:
    """The steps with the name of a schedule of the user's own, which no flag can give."""
    return dataclasses.replace(steps, schedule=name_of_shape(shape))  # type: ignore[arg-type]


def is_known(rule: Rule) -> bool:
    """Whether the text of a rule says all of it, so that it is none of the user's own."""
    try:
        return parse_rule(str(rule)) == rule
    except UsageError:
        return False


def name_of(task: Task) -> str:
    """Return what ``--task`` and ``train.py`` take: the name of a task that has one, and MODULE:CLASS of others."""
    return task.name if has_name(task) else class_of(type(task))


def class_of(kind: type[Task]) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def fields_of(task: Task) -> dict[str, Any]:
    """The settings of a task as a run folder holds them: plain values by name, without what the task has found out."""
    values = {name: kinds.plain(getattr(task, field)) for name, field in _names_of(type(task))}
    written: dict[str, Any] = json.loads(json.dumps(values))
    return written


def _names_of(kind: Any) -> Iterator[tuple[str, str]]:
    """(what a folder calls it, the field) of each setting of a task. A field may have the name of a setting that every
    run has, where no flag gives it; the folder calls it ``task.NAME``.
    """
    taken = _taken_names()
    for field in dataclasses.fields(kind):
        if field.metadata.get("found"):
            continue
        name = field.metadata.get("name") or field.name
        yield (OF_TASK + name if name in taken else name), field.name


def _taken_names() -> set[str]:
    """Keys of settings.yaml that name no field of a task."""
    return {name for part in (*PARTS.values(), Output) for name in specs_of(part)} | {*ABOUT_THE_RUN}


def run_of_folder(folder: Path, given: Given, changes: Mapping[str, Any] = MappingProxyType({})) -> Run:
    """The run of a folder. It is not prepared, and says nothing of where it is written.

    Args:
        changes: settings that take the place of the recorded ones, by name.

    Raises:
        UsageError: if the settings cannot be read, or what they do not hold is not given.
    """
    values = {**settings_of_training(folder), **changes}
    run = run_of_values(values, given, Output(cache_dir=given.cache))
    return dataclasses.replace(run, received=received_by(folder))


def run_of_values(values: Mapping[str, Any], given: Given, output: Output) -> Run:
    """The run of settings as `values_of` has them. It is not prepared.

    Args:
        output: where it is written.

    Raises:
        UsageError: if what the settings do not hold is not given.
    """
    values = dict(values)
    rule = given.rule
    optimizer = given.optimizer
    if rule is None and values.get("rule", "") is None:
        raise UsageError(
            "the run's rule is not one of the library's, and asyncsgd.replay alone can be given it; give it, as in "
            "replay(folder, rule=MyRule())"
        )
    if values.get("optimizer") not in (None, *OPTIMIZERS):
        if optimizer is None:
            raise UsageError(
                "the run's optimizer is the user's own; give it, as in replay(folder, optimizer=...), which alone "
                "takes it"
            )
        del values["optimizer"]
    shape = given.schedule
    schedule = values.get("schedule")
    if schedule not in (None, *SHAPES):
        del values["schedule"]
        if shape is None:
            raise UsageError(
                f"the run's schedule, {schedule}, is the user's own; give it, as in replay(folder, schedule=...), "
                f"which alone takes it"
            )
    if rule is not None:
        values.pop("rule", None)
    groups = {name: _read(part, values) for name, part in PARTS.items()}
    if shape is not None:
        if name_of_shape(shape) != schedule:
            say(f"note   the run's schedule was {schedule}, and {name_of_shape(shape)} was given")
        groups["optimization"] = named_after(groups["optimization"], shape)
    settings = Common(**groups, output=output)
    name = str(values.get(EXPERIMENT, "train"))
    task = read_task(values, given.task)
    return run_of(name, settings, task=task, rule=rule, optimizer=optimizer, shape=shape)


def run_beside(folder: Path, given: Given, changes: Mapping[str, Any] = TO_REPLAY) -> Run:
    """The run of a folder, to be run again elsewhere: it writes into no folder that the task's fields name."""
    run = run_of_folder(folder, given, changes)
    written: dict[str, Any] = dict.fromkeys(run.task.output_folders)
    if not written:
        return run
    task: Any = run.task
    return dataclasses.replace(run, task=dataclasses.replace(task, **written))


def task_and_seed(folder: Path, given: Task | type[Task] | None) -> tuple[Task, int]:
    """The task of a folder's run, not prepared, and its seed; whatever else of it may not be at hand."""
    values = settings_of_training(folder)
    job: Job = _read(Job, values)
    return read_task(values, given), job.seed


def settings_of_training(folder: Path) -> dict[str, Any]:
    """The settings of a folder's run, which has trained a model.

    Raises:
        UsageError: if they cannot be read, or are those of a simulation.
    """
    settings = read_settings(folder)
    if settings.get(EXPERIMENT) == SIMULATION:
        raise UsageError(
            f"{folder} holds a simulation, which has no task and no checkpoint; python -m asyncsgd replay runs it again"
        )
    return settings


def _read(part: Any, values: Mapping[str, Any]) -> Any:
    """A group of settings; those that the folder lacks have their defaults."""
    specs = specs_of(part)
    return part(**{spec.field: spec.checked(values[name]) for name, spec in specs.items() if name in values})


def read_task(values: Mapping[str, Any], given: Task | type[Task] | None) -> Task:
    """The task of a run.

    Args:
        values: its settings.
        given: the task, or its class, whose fields are then the folder's. None: it is one of the library's own.

    Raises:
        UsageError: if the task is none of the library's own and not given, or its class does not take the fields.
    """
    named = str(values.get(TASK))
    task = given
    if task is None:
        if named not in NAMED:
            raise not_believed(named)
        task = task_class(named)
    kind = task if isinstance(task, type) else type(task)
    taken = _taken_names()
    recorded = {name: value for name, value in values.items() if name not in taken}
    if isinstance(task, type):
        task = _made(task, recorded, named)
    written = class_of(task_class(named)) if named in NAMED else named
    module, _, class_name = written.partition(":")
    # A class of a script that was run is called __main__ there, and by its module elsewhere.
    same_module = module == kind.__module__ or "__main__" in (module, kind.__module__)
    if class_name != kind.__qualname__ or not same_module:
        say(f"note   the run's task was {named}, and {class_of(kind)} was given")
    if not isinstance(given, Task):
        return task  # its fields are the folder's, and where this has none they have their defaults
    fields = fields_of(task)
    for name in sorted(fields.keys() | recorded.keys()):
        if fields.get(name) != recorded.get(name):
            say(f"note   the run's task had {name}={recorded.get(name)!r}, and {name}={fields.get(name)!r} was given")
    return task


def _made(kind: type[Task], recorded: Mapping[str, Any], named: str) -> Task:
    """A task of this class with the fields that a folder holds."""
    fields = dict(_names_of(kind))
    unknown = sorted(recorded.keys() - fields.keys())
    reason = f"it has no {', '.join(unknown)}"
    if not unknown:
        values = {fields[name]: value for name, value in recorded.items()}
        try:
            return kind(**read_fields(kind, values))
        except TypeError as error:
            reason = str(error)
    raise UsageError(f"the run's task was {named}, and {kind.__name__} has other fields: {reason}")


def read_fields(kind: type[Task], values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a task, each as its type; of a type that no flag could give, lists are tuples.

    Raises:
        UsageError: if one of the library's own tasks cannot have such a value.
    """
    if kind.__module__.startswith("asyncsgd."):
        specs = {spec.field: spec for spec in specs_of(kind).values()}
        return {field: specs[field].checked(value) for field, value in values.items()}
    read = {field: tuple(value) if isinstance(value, list) else value for field, value in values.items()}
    try:
        types = typing.get_type_hints(kind)
    except NameError:  # of a class within a function
        return read
    for field, value in values.items():
        if field in types and kinds.is_known(types[field]):
            with contextlib.suppress(ValueError):  # a field of one's own may hold what its annotation does not say
                read[field] = kinds.read(types[field], value)
    return read


def not_believed(named: str) -> UsageError:
    """Refuse to import what a run folder says that its task is."""
    if named.isidentifier() and not keyword.iskeyword(named):  # None is a keyword
        return UsageError(
            f"the run's task is {named}, which is no task of this library or of a package that is installed here; "
            f"install the package that {named} came with, see environment.json of the run"
        )
    module, _, class_name = named.partition(":")
    if not class_name:
        module = "MODULE"
        class_name = "CLASS"
    if module == "__main__":
        module = "FILE"
    return UsageError(
        f"the run's task is {named}, and a folder is not believed about code; type --task {module}:{class_name}, "
        f"or give task={class_name}()"
    )
