"""Which folder a run gets, and what happens to files that are there already. torch is imported by what needs it."""

from __future__ import annotations

import contextlib
import glob
import itertools
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE, EVENTS, FAILED, INTERRUPTED, UNREADABLE, lost_records, read_events
from asyncsgd.records.run_folder import RunFolder, own, write_text
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.yaml_reader import read_settings

if TYPE_CHECKING:
    from asyncsgd.run.run import Run

CHECKPOINTS = "checkpoints"
"""The name of the folder of checkpoints within a run's folder; see `asyncsgd.core.checkpoints`."""

_DESCRIPTIONS = f"{CHECKPOINTS}/{'[0-9]' * 12}*.json"
"""The pattern of the descriptions of checkpoints, whose names begin with 12 digits, the samples by then. Other files
that lie in the folder do not match it."""

_TORN_SETTINGS = "settings.yaml.partial"
"""The name of settings.yaml while `asyncsgd.records.run_folder.write_text` is still writing it."""


def open_run_folder(run: Run, command: str) -> RunFolder:
    """Make the folder of a run that was typed and write its settings, or open that of a run that goes on.

    With ``--resume`` the run in that folder goes on from its last checkpoint. So does one that ``--run-dir`` names, if
    it has a checkpoint and is not DONE.

    Without ``--run-dir`` the folder is called after the experiment and the settings, and a repetition gets the next
    number after it. With it, the folder must be new, or hold a run that has not trained, or hold a run with the same
    settings that is not DONE. An earlier run is kept under another name. With ``--overwrite`` the folder may hold any
    run that is not still going.

    Args:
        run: not prepared.
        command: what was typed.

    Raises:
        UsageError: if the folder holds another run, has no checkpoint to go on from, or cannot be written.
    """
    output = run.output
    path = Path(output.resume or output.run_dir or output.runs_dir)
    try:
        if output.resume is not None or (output.run_dir is not None and goes_on(path, run)):
            return _open_again(path, run, f"{command}\nwith which an earlier run went on")
        if output.run_dir is None:
            path = free_folder(path, _name_of(run))
        with contextlib.ExitStack() as undo:
            events = undo.enter_context(own(path) if output.run_dir is None else _take(path, run))
            comment = f"{command}\nto run this again: --config {shlex.quote(str(path / 'settings.yaml'))}"
            folder = _begin(path, events, run, comment)
            undo.pop_all()
    except OSError as error:
        where, flag = (output.runs_dir, "--runs-dir") if output.run_dir is None else (output.run_dir, "--run-dir")
        raise UsageError(f"{where} cannot be written ({error.strerror}); type {flag} FOLDER") from error
    return folder


def open_named_folder(path: Path, run: Run, *, resume: bool) -> RunFolder:
    """Make the folder of a new run that Python has named and write its settings, or open that of a run that goes on.

    Raises:
        UsageError: if something else lies there, the run there has other settings, or the folder cannot be written.
    """
    if (path / "settings.yaml").is_file():
        if resume and has_trained(path):
            return _open_again(path, run, "")
        if not has_trained(path):
            set_aside(path)  # a run that was refused has left nothing worth keeping
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file; name a folder")
    if path.exists() and any(path.iterdir()):
        raise UsageError(f"{path} holds something already; name a new folder, or remove it")
    try:
        return _begin(path, None, run, "")
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror}); name another folder") from error


def folder_of_copies(run: Run) -> tuple[Path, BinaryIO]:
    """Make the folder in which another host keeps copies of the checkpoints of a run, and own it; see `own`.

    An earlier copy of this run is kept under another name.

    Raises:
        UsageError: if the folder holds another run, or cannot be written.
    """
    output = run.output
    named = output.resume or output.run_dir
    try:
        if named is None:
            path = free_folder(Path(output.runs_dir), _name_of(run))
            return path, own(path)
        return Path(named), _take(Path(named), run)
    except OSError as error:
        raise UsageError(f"{named or output.runs_dir} cannot be written ({error.strerror}) on this host") from error


def _begin(path: Path, events: BinaryIO | None, run: Run, comment: str) -> RunFolder:
    """Write the settings of a new run and the header of its records.

    Args:
        events: what `own` has returned for the folder; None: it is not made yet.
    """
    from asyncsgd.run.written import text_of  # imports torch, which is slow

    task = run.task
    better = task.scored_by()
    unit = task.loss_unit()
    with contextlib.ExitStack() as undo:
        if events is None:
            events = undo.enter_context(own(path))
        # Written whole or not at all. If this process is killed from here on, the folder says which run it holds.
        write_text(path / "settings.yaml", text_of(run, comment))
        order = task.sample_order
        folder = RunFolder(path, events, task=task.name, better=better, loss_unit=unit, sample_order=order)
        undo.pop_all()
    return folder


def _name_of(run: Run) -> str:
    """The name of the folder of a run that names none: equal for equal settings."""
    from asyncsgd.run.written import values_of

    job = run.job
    digest = task_flags(cast("Any", type(run.task))).settings_hash(values_of(run))
    return f"{run.name}-{job.mode}-w{job.nproc}-s{job.seed}-{digest}"


def has_checkpoint(path: Path) -> bool:
    """Whether there is a checkpoint of the run in this folder; it may be damaged."""
    return any(path.glob(_DESCRIPTIONS))


def goes_on(path: Path, run: Run) -> bool:
    """Whether the folder holds this run, with a checkpoint and not DONE."""
    begun = has_checkpoint(path) and (path / "settings.yaml").is_file() and not run.output.overwrite
    return begun and read_summary(path).get("status") != DONE and not differences(path, run)


def samples_of_checkpoint(path: Path) -> int:
    """How many samples had arrived at the newest checkpoint of a run that has one; it may be damaged."""
    return max(int(file.stem) for file in path.glob(_DESCRIPTIONS))


def differences(path: Path, run: Run) -> list[tuple[str, Any, Any]]:
    """The settings of a run that are not those of the run in `path`: name, value there, value here."""
    from asyncsgd.run.written import compared, defaults_of, values_of

    here = compared(values_of(run))
    defaults = {name: default for name, default in defaults_of(run.task).items() if name in here}
    there = compared(defaults | read_settings(path))
    return [(key, there.get(key), here.get(key)) for key in {**there, **here} if there.get(key) != here.get(key)]


def _open_again(path: Path, run: Run, comment: str) -> RunFolder:
    """Open the folder of a run that goes on from its last checkpoint that is whole. Nothing in it changes before
    `RunFolder.go_on`.

    Args:
        run: the run as it goes on. Its settings are written if they differ from those in the folder.
        comment: lines for the head of these settings.

    Raises:
        UsageError: if anything but a larger number of samples, epochs or micro-batches differs, if the run is DONE, or
            has no checkpoint, or if its folder cannot be written.
    """
    from asyncsgd.core.checkpoints import find  # imports torch, which is slow
    from asyncsgd.run.written import text_of

    different = differences(path, run)
    with contextlib.ExitStack() as undo:
        try:
            events = undo.enter_context(own(path))
        except OSError as error:
            raise UsageError(
                f"{path} cannot be written ({error.strerror}), and a run goes on in its own folder; copy the folder to "
                f"where you may write, and go on there"
            ) from error
        is_done = read_summary(path).get("status") == DONE
        if not has_checkpoint(path):
            if is_done:
                raise UsageError(
                    f"{path} is DONE and has kept no checkpoint; begin a new run, with a larger --samples to train "
                    f"longer and with --checkpoint-every SAMPLES to go on later"
                )
            find(path)  # raises: there is no checkpoint, and none of the advice below would help
        grow = ("samples", "epochs", "micro_batches")
        if not all(key in grow and was is not None and wanted > was for key, was, wanted in different):
            raise UsageError(
                f"{path} cannot go on with other settings ({listed(different)}); drop them. Only what the run has of "
                f"--samples, --epochs and --micro-batches may grow"
            )
        longer = any(key != "micro_batches" for key, _, _ in different)
        if is_done and not longer:
            raise UsageError(f"{path} is DONE; type a larger --samples to train on, or another folder for a new run")
        found = find(path, becomes_longer=longer)
        folder = RunFolder(path, events, resume=found, settings_yaml=text_of(run, comment) if different else None)
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


def _take(path: Path, run: Run) -> BinaryIO:
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
            # A run that has not begun, e.g. after a mistyped command, has left nothing worth keeping.
            began = status not in (None, FAILED, INTERRUPTED) or has_trained(path)
            if began and not run.output.overwrite:
                different = differences(path, run)
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
    """Whether a run has used a gradient: its records say so, or its summary."""
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


def newest_set_aside(path: Path) -> Path | None:
    """Of the folders that were set aside for one at `path`, that with the newest checkpoint; None: none has one."""
    aside = [other for other in path.parent.glob(f"{glob.escape(path.name)}.before-*") if has_checkpoint(other)]
    return max(aside, key=lambda other: (other / CHECKPOINTS).stat().st_mtime, default=None)


def _rename(path: Path) -> Path:
    names = (path.with_name(f"{path.name}.before-{number}") for number in itertools.count(1))
    return path.rename(next(name for name in names if not name.exists()))


def read_summary(path: Path) -> dict[str, Any]:
    """Read a run's summary; empty where the run has not ended. Where its records are lost, the status is UNREADABLE."""
    try:
        content = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    lost = lost_records(path / EVENTS, content)
    return {**content, "status": UNREADABLE, "message": lost} if lost else content
