"""A dry run of what users write themselves: a task, and a rule."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from asyncsgd.core.batches import OwnStreams
from asyncsgd.core.checkpoints import read_back, unread
from asyncsgd.core.optimizers import PlainSGD
from asyncsgd.core.protocol import Arrived, Joined, Work
from asyncsgd.core.server import Server
from asyncsgd.errors import UsageError
from asyncsgd.records.events import Gradient, Taken
from asyncsgd.rules.contract import Rule
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.check import check as check_task
from asyncsgd.tasks.models import generators_restored
from asyncsgd.worker.evaluation import MAIN, evaluate_sets


def check(what: Task | Rule, *, seed: int = 0, device: str = "cpu", processes: bool = True) -> Any:
    """Look for mistakes in a task or a rule of your own; nothing is trained or written.

    Args:
        what: a prepared task, of which a few gradients are computed; or a rule, which is driven by a few arrivals of
            three workers.
        seed, device, processes: for a task; see `asyncsgd.tasks.check.check`.

    Returns:
        For a task what was seen, as `asyncsgd.tasks.check.Checked`; for a rule its state as a checkpoint gives it
        back.

    Raises:
        UsageError: for the first mistake. It names the parameter, module, method or field, and says what to change.
    """
    if isinstance(what, Rule):
        try:
            return _check_rule(what, seed)
        except RuntimeError as error:  # what the server says of a rule that starts or abandons nothing
            raise UsageError(f"{error}") from error
    checked = check_task(what, seed=seed, device=device, processes=processes)
    if checked.notes:  # it has no halves, or is another one each time
        return checked
    return dataclasses.replace(checked, notes=tuple(_sums_that_do_not_add(what, seed, torch.device(device))))


def _sums_that_do_not_add(task: Task, seed: int, where: torch.device) -> Iterator[str]:
    """A sentence for each number of `sums` that is another one for a batch of the evaluation than for its halves
    together. None where that cannot be computed.
    """
    try:
        with generators_restored(where):
            model = task.model(seed).to(where)
            batch = task.data(seed).evaluation[MAIN][0]
            whole = evaluate_sets(task, model, {MAIN: [batch]}, 0, 1, where)
            halves = evaluate_sets(task, model, {MAIN: task.split(batch, 2)}, 0, 1, where)
    except Exception:  # an evaluation of whole batches may well do without this
        return
    for name, value in whole.items():
        of_halves = halves.get(name)
        if not isinstance(value, int | float) or not isinstance(of_halves, int | float):
            continue
        if math.isfinite(value) and not math.isclose(value, of_halves, rel_tol=0.01, abs_tol=1e-6):
            yield (
                f"sums() gives {name} {value:g} for a batch and {of_halves:g} for its halves together, though the "
                f"library adds up batches; look at the shapes in it: (n,) with (n, 1) gives (n, n)"
            )


def _check_rule(rule: Rule, seed: int) -> Any:
    parameters = torch.zeros(16)
    generator = torch.Generator().manual_seed(seed)
    server = Server(parameters, rule, PlainSGD(parameters), lambda count: 0.1, OwnStreams(3, None), num_workers=3)
    working = [work for worker in range(3) for work in server.react(Joined(worker)).start]
    for _ in range(20):
        work = working.pop(0)
        vector = torch.randn(16, generator=generator)
        step = server.react(Arrived(work, work.version, vector, Gradient(1.0, 1.0, 1), 1.0, Taken()))
        stopped = {stop.dispatch for stop in step.stop}
        working = [work for work in working if work.dispatch not in stopped] + list[Work](step.start)
    return check_state(rule, server.rule_state)


def check_state(rule: Rule, state: Any) -> Any:
    """`state` of `rule` as a checkpoint gives it back.

    Raises:
        UsageError: if it does not come back as it was; it names the field.
    """
    for name, value in _fields(state):
        field = f"{type(state).__name__}.{name}" if name else "the state"
        try:
            back = read_back({"value": value}, type(rule).__module__)["value"]
        except pickle.UnpicklingError as error:
            why = unread(error)
        except Exception as error:  # what pickle says of a function, a lock, a class within a function
            why = str(error)
        else:
            if _same(value, back):
                continue
            why = f"{value!r} comes back as {back!r}"
        raise UsageError(
            f"rule {rule.name}: {field} would not come back from a checkpoint ({why}); keep tensors, numbers, strings, "
            f"lists, tuples, dicts and dataclasses of your module in it"
        )
    return read_back({"value": state}, type(rule).__module__)["value"]


def _fields(state: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(state):
        yield from [(field.name, getattr(state, field.name)) for field in dataclasses.fields(state)]
    yield "", state


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return _same(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)
