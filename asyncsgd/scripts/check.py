"""Look for mistakes in a task before it is trained: ``asyncsgd check TASK``. It is `asyncsgd.check`."""

from __future__ import annotations

import dataclasses
import os
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import RunError, UsageError
from asyncsgd.scripts.base import Typed
from asyncsgd.scripts.task import class_named
from asyncsgd.settings.flags import Flags
from asyncsgd.settings.groups import Device
from asyncsgd.settings.specs import group, setting

if TYPE_CHECKING:  # it imports torch
    from asyncsgd.tasks.check import Checked


@dataclasses.dataclass(frozen=True)
class DryRun:
    """How a task is checked."""

    seed: int = setting(0, "of the model, the data and dropout", at_least=0)
    device: Device = setting("cpu", "where the gradients are computed")  # noqa: RUF009
    processes: bool = setting(True, "whether it must work in worker processes too; type --processes false if not")
    cache_dir: str | None = setting(None, "folder for prepared data", unset="the user's cache folder")


def run(argv: list[str], stop: StopRequest, typed: Typed) -> int:
    """Check the task that the first argument names; return the exit code."""
    name, *words = argv or [""]
    if name in ("", "-h", "--help"):
        print(f"usage: {typed.prog} TASK [--FLAG VALUE ...]\n\nTASK is MODULE:CLASS for a task of your own")
        return 2 if not name else 0
    kind = class_named(name)
    parts: list[Any] = [
        ("task", kind, group(kind, f"task: {kind.name}")),
        ("dry_run", DryRun, group(DryRun, "what is tried")),
    ]
    flags = Flags(dataclasses.make_dataclass("TaskAndDryRun", parts, frozen=True))
    description = (
        "Look for mistakes in a task: its methods are called, a few gradients are computed, nothing is trained."
    )
    settings = flags.parse(words, prog=typed.with_word(name).prog, description=description, examples="").settings
    settings.task.check_names()

    from asyncsgd.run.dry_run import check
    from asyncsgd.run.run import cache_folder, resolve_device

    asked: DryRun = settings.dry_run
    device = resolve_device(asked.device)
    try:
        task = settings.task.prepare(asked.seed, cache_folder(asked.cache_dir))
        stop.check()
        checked = check(task, seed=asked.seed, device=device, processes=asked.processes)
    except (UsageError, RunError):
        raise
    except Exception as error:
        line = _own_line(error)
        if line is None:  # a fault of the library
            raise
        raised = "".join(traceback.format_exception_only(error)).strip()
        where = f"{line.filename}:{line.lineno}, in {line.name}: {line.line}"
        raise UsageError(f"{name}: {raised}; mend {where}") from error
    print(described(checked))
    print(f"no mistake was found in {name}\nnext   {typed.door} train {name}")
    return 0


def _own_line(error: Exception) -> traceback.FrameSummary | None:
    """The last line on the way to an error that is neither the library's nor Python's nor of an installed package."""
    for line in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(line.filename)
        is_installed = "site-packages" in path.parts or "dist-packages" in path.parts
        is_known = path.is_relative_to(Path(__file__).parents[1]) or path.is_relative_to(Path(os.__file__).parent)
        if path.is_file() and not is_installed and not is_known:
            return line
    return None


def described(checked: Checked) -> str:
    """What a dry run has seen, a line each."""
    lines = [
        f"model  {checked.num_parameters:,} numbers are trained",
        f"loss   {checked.loss:.4f} on the first batch, of weight {checked.weight:g}",
    ]
    for name, number in checked.num_evaluation_batches.items():
        lines.append(f"data   evaluation set {name}: {number} batches")
    if checked.statistics:
        lines.append(f"note   the forward pass changes {', '.join(checked.statistics)}")
    if checked.unused:
        lines.append(f"note   no gradient for {', '.join(checked.unused)}: weight decay acts on them alone")
    lines += [f"note   {note}" for note in checked.notes]
    return "\n".join(lines)
