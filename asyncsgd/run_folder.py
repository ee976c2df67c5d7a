"""Which folder a run gets, and what happens to what lies there already. Standard library and settings only."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Protocol, TypeVar

from asyncsgd.errors import UsageError
from asyncsgd.finetune_settings import FINETUNE_FLAGS, FinetuneSettings
from asyncsgd.flags import Flags
from asyncsgd.record import DONE, RunFolder, write_text
from asyncsgd.settings import FLAGS, Output, Settings


class HasOutput(Protocol):
    """Settings that say where their run is written."""

    @property
    def output(self) -> Output: ...


S = TypeVar("S", bound=HasOutput)

_TORN_SETTINGS = "settings.yaml.partial"
"""What `asyncsgd.record.write_text` calls a file that is still being written."""


def open_run_folder(experiment: str, settings: Settings, command: str) -> RunFolder:
    """Make the folder of a pretraining run and write its settings; see `open_folder`."""
    job = settings.job
    name = f"{experiment}-{job.mode}-w{job.nproc}-s{job.seed}-{FLAGS.settings_hash(settings)}"
    return open_folder(name, FLAGS, settings, command)


def open_finetune_folder(settings: FinetuneSettings, command: str) -> RunFolder:
    """Make the folder of a fine-tuning run and write its settings; see `open_folder`."""
    name = f"stilt_finetune-{settings.start.task}-s{settings.start.seed}-{FINETUNE_FLAGS.settings_hash(settings)}"
    return open_folder(name, FINETUNE_FLAGS, settings, command)


def open_folder(name: str, flags: Flags[S], settings: S, command: str) -> RunFolder:
    """Make a run's folder and write its settings.

    Without ``--run-dir`` the folder is called `name`, and a repetition gets the next number behind it. With it, the
    folder must be new, or hold a run with the same settings that is not DONE, which is kept under another name; or
    ``--overwrite`` is given.

    Args:
        flags: of the settings' class.

    Raises:
        UsageError: if the folder holds another run, or cannot be written.
    """
    output = settings.output
    try:
        if output.run_dir is None:
            path = _free_name(Path(output.runs_dir), name)
        else:
            path = Path(output.run_dir)
            _make_room(path, flags, settings)
        path.mkdir(parents=True, exist_ok=True)
        comment = f"{command}\nto run this again: --config {shlex.quote(str(path / 'settings.yaml'))}"
        # First, and whole or not at all: whatever is killed from here on leaves a folder that says which run it holds.
        write_text(path / "settings.yaml", flags.to_yaml(settings, comment=comment, places=False))
        folder = RunFolder(path)
    except OSError as error:
        where, flag = (output.runs_dir, "--runs-dir") if output.run_dir is None else (output.run_dir, "--run-dir")
        raise UsageError(f"{where} cannot be written ({error.strerror}); type {flag} FOLDER") from error
    return folder


def _free_name(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        return path


def _make_room(path: Path, flags: Flags[S], settings: S) -> None:
    # What a kill leaves before there are settings holds nothing yet: an empty folder, or one with the torn settings.
    if not path.exists() or (path.is_dir() and {inside.name for inside in path.iterdir()} <= {_TORN_SETTINGS}):
        return
    if not path.is_dir() or not (path / "settings.yaml").is_file():
        raise UsageError(f"{path} exists and is not a run folder; type another --run-dir")
    if not settings.output.overwrite:
        old = flags.make(flags.load_yaml(path / "settings.yaml"))
        different = flags.differing_keys(flags.flatten(old), flags.flatten(settings))
        if different:
            listed = ", ".join(f"{key} {before} -> {now}" for key, before, now in different)
            raise UsageError(
                f"{path} holds a run with other settings ({listed}); type another --run-dir, or --overwrite"
            )
        if _status(path) == DONE:
            raise UsageError(
                f"{path} holds this very run, DONE; type another --run-dir, or --overwrite to run it again"
            )
    set_aside(path)


def set_aside(path: Path) -> Path:
    """Rename what is there rather than write over it; return its new name, ``....before-N``."""
    number = 1
    while (aside := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    return path.rename(aside)


def _status(path: Path) -> Any:
    try:
        return json.loads((path / "summary.json").read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError):
        return None  # never finished
