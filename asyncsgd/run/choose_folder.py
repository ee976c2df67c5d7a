"""Which folder a run gets, and what happens to files that are there already. Standard library and settings only."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, EVENTS, FAILED, INTERRUPTED, UNREADABLE, lost_records, read_events
from asyncsgd.records.run_folder import RunFolder, own, write_text
from asyncsgd.settings.task import task_flags

CHECKPOINTS = "checkpoints"
"""See `asyncsgd.core.checkpoints`."""

_DESCRIPTIONS = f"{CHECKPOINTS}/{'[0-9]' * 12}*.json"
"""Files of one's own that lie there are none."""

_TORN_SETTINGS = "settings.yaml.partial"
"""How `asyncsgd.records.run_folder.write_text` begins the name of a file that is still being written."""


def open_run_folder(experiment: str, settings: Any, command: str) -> RunFolder:
    """Make the folder of a run and write its settings, or open that of a run that goes on.

    With ``--resume`` the run in that folder goes on from its last checkpoint. So does one that ``--run-dir`` names, if
    it has a checkpoint and is not DONE.

    Without ``--run-dir`` the folder is called after the experiment and the settings, and a repetition gets the next
    number behind it. With it, the folder must be new, or hold a run that has not trained, or hold a run with the same
    settings that is not DONE. An earlier run is kept under another name. With ``--overwrite`` the folder may hold any
    run that is not still going.

    Args:
        settings: of `asyncsgd.settings.task.task_flags`.

    Raises:
        UsageError: if the folder holds another run, has no checkpoint to go on from, or cannot be written.
    """
    task = settings.task
    job = settings.job
    output = settings.output
    flags = task_flags(cast("Any", type(task)))
    path = Path(output.resume or output.run_dir or output.runs_dir)
    try:
        if output.resume is not None or (output.run_dir is not None and _goes_on(path, settings)):
            text = flags.to_yaml(settings, comment=f"{command}\nwhich made an earlier run longer", places=False)
            return open_again(path, differences(path, settings), text)
        if output.run_dir is None:
            name = f"{experiment}-{job.mode}-w{job.nproc}-s{job.seed}-{flags.settings_hash(settings)}"
            path = free_folder(path, name)
        with contextlib.ExitStack() as undo:
            events = undo.enter_context(own(path) if output.run_dir is None else _take(path, settings))
            comment = f"{command}\nto run this again: --config {shlex.quote(str(path / 'settings.yaml'))}"
            # Written whole or not at all. If this process is killed from here on, the folder says which run it holds.
            write_text(path / "settings.yaml", flags.to_yaml(settings, comment=comment, places=False))
            better = task.scored_by()
            unit = task.loss_unit()
            order = task.sample_order
            folder = RunFolder(path, events, task=task.name, better=better, loss_unit=unit, sample_order=order)
            undo.pop_all()
    except OSError as error:
        where, flag = (output.runs_dir, "--runs-dir") if output.run_dir is None else (output.run_dir, "--run-dir")
        raise UsageError(f"{where} cannot be written ({error.strerror}); type {flag} FOLDER") from error
    return folder


def _goes_on(path: Path, settings: Any) -> bool:
    """Whether the folder holds these settings' run, with a checkpoint and not DONE."""
    begun = any(path.glob(_DESCRIPTIONS)) and (path / "settings.yaml").is_file() and not settings.output.overwrite
    return begun and read_summary(path).get("status") != DONE and not differences(path, settings)


def differences(path: Path, settings: Any) -> list[tuple[str, Any, Any]]:
    """The settings that are not those of the run in `path`: name, value there, value here."""
    flags = task_flags(cast("Any", type(settings.task)))
    old = flags.make(flags.load_yaml(path / "settings.yaml"))
    return flags.differing_keys(flags.flatten(old), flags.flatten(settings))


def open_again(path: Path, different: Sequence[tuple[str, Any, Any]], settings_yaml: str) -> RunFolder:
    """Open the folder of a run that goes on from its last checkpoint that is whole. Nothing in it changes before
    `RunFolder.go_on`.

    Args:
        different: the settings that are not those of the run: name, value in the run, value now.
        settings_yaml: all settings, written where the run has become longer.

    Raises:
        UsageError: if anything but a larger number of samples or of micro-batches differs, if the run is DONE, or has
            no checkpoint, or if its folder cannot be written.
    """
    from asyncsgd.core.checkpoints import find  # imports torch, which is slow

    with contextlib.ExitStack() as undo:
        try:
            events = undo.enter_context(own(path))
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written ({error.strerror}), and a run goes on in its own folder; copy the folder to "
                f"where you may write, and go on there"
            ) from error
        if not any(path.glob(_DESCRIPTIONS)):
            find(path)  # refuses, before anything is asked for that would not help
        grow = ("samples", "epochs", "micro_batches")
        if not all(key in grow and was is not None and wanted > was for key, was, wanted in different):
            raise UsageError(
                f"{path} cannot go on with other settings ({listed(different)}); drop them, only --samples, --epochs "
                f"and --micro-batches may grow"
            )
        longer = any(key != "micro_batches" for key, _, _ in different)
        if read_summary(path).get("status") == DONE and not longer:
            raise UsageError(f"{path} is DONE; type a larger --samples to train on, or another folder for a new run")
        found = find(path, becomes_longer=longer)
        folder = RunFolder(path, events, resume=found, settings_yaml=settings_yaml if different else None)
        undo.pop_all()
    return folder


def free_folder(parent: Path, name: str) -> Path:
    """Make a new folder below `parent`, called `name` or, where that is there already, `name` and a number."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
    return path


def _take(path: Path, settings: Any) -> BinaryIO:
    """Own the folder at `path`, after what lies there was set aside; see `open_run_folder` and `own`."""
    foreign = UsageError(f"{path} exists and is not a run folder; type another --run-dir")
    if path.exists() and not (path / "settings.yaml").is_file():
        inside = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
        if any(name != EVENTS and not name.startswith(_TORN_SETTINGS) for name in inside):
            raise foreign
    with contextlib.ExitStack() as undo:
        events = undo.enter_context(own(path))
        # Looked at again now that nobody else can change it.
        if (path / "settings.yaml").is_file():
            status = read_summary(path).get("status")
            # e.g. a mistyped command: it has left nothing worth keeping
            began = status not in (None, FAILED, INTERRUPTED) or has_trained(path)
            if began and not settings.output.overwrite:
                different = differences(path, settings)
                if different or status == DONE:
                    held = f"a run with other settings ({listed(different)})" if different else "this run already, DONE"
                    raise UsageError(f"{path} holds {held}; type another --run-dir, or --overwrite")
            _rename(path)
            return own(path)
        if has_trained(path):
            raise foreign
        undo.pop_all()
    return events


def listed(different: Sequence[tuple[str, Any, Any]]) -> str:
    return ", ".join(f"{key} {was} -> {wanted}" for key, was, wanted in different)


def has_trained(path: Path) -> bool:
    """Whether a run has used a gradient: its records say so, or, of fine-tuning, its summary."""
    if read_summary(path).get("num_updates"):
        return True
    try:
        return any(record["kind"] == "arrival" or record["version"] > 0 for record in read_events(path / EVENTS))
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # damaged: somebody should look at it


def set_aside(path: Path) -> Path:
    """Rename what is there rather than write over it; return its new name, ``....before-N``.

    Raises:
        UsageError: if a live run owns it.
    """
    with own(path) if (path / EVENTS).is_file() else contextlib.nullcontext():
        return _rename(path)


def _rename(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.before-{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def read_summary(path: Path) -> dict[str, Any]:
    """What a run's summary says; nothing where it has not ended. Where its records are lost, it is UNREADABLE."""
    try:
        content = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    lost = lost_records(path / EVENTS, content)
    return {**content, "status": UNREADABLE, "message": lost} if lost else content
