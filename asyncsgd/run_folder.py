"""Which folder a run gets, and what happens to what lies there already. Standard library and settings only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncsgd import settings as settings_module
from asyncsgd.errors import UsageError
from asyncsgd.record import DONE, RunFolder
from asyncsgd.settings import Settings


def open_run_folder(experiment: str, settings: Settings, command: str) -> RunFolder:
    """Make the run's folder and write its settings.

    Without ``--run-dir`` the folder is named after the settings, and a repetition gets the next number behind its
    name. With it, the folder must be new, or hold a run with the same settings that is not DONE, which is kept
    under another name; or ``--overwrite`` is given.

    Raises:
        UsageError: if the folder holds another run, or cannot be written.
    """
    output = settings.output
    try:
        if output.run_dir is None:
            path = _free_name(Path(output.runs_dir), experiment, settings)
        else:
            path = Path(output.run_dir)
            _make_room(path, settings)
        folder = RunFolder(path)
        comment = f"{command}\nto run this again: --config {path.name}/settings.yaml"
        (path / "settings.yaml").write_text(
            settings_module.to_yaml(settings, comment=comment, places=False), encoding="utf-8"
        )
    except OSError as error:
        where, flag = (output.runs_dir, "--runs-dir") if output.run_dir is None else (output.run_dir, "--run-dir")
        raise UsageError(f"{where} cannot be written ({error.strerror}); type {flag} FOLDER") from error
    return folder


def _free_name(parent: Path, experiment: str, settings: Settings) -> Path:
    job = settings.job
    name = f"{experiment}-{job.mode}-w{job.nproc}-s{job.seed}-{settings_module.settings_hash(settings)}"
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


def _make_room(path: Path, settings: Settings) -> None:
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir() or not (path / "settings.yaml").is_file():
        raise UsageError(f"{path} exists and is not a run folder; type another --run-dir")
    if not settings.output.overwrite:
        old = settings_module.make_settings(settings_module.load_yaml(path / "settings.yaml"))
        different = settings_module.differing_keys(settings_module.flatten(old), settings_module.flatten(settings))
        if different:
            listed = ", ".join(f"{key} {before} -> {now}" for key, before, now in different)
            raise UsageError(
                f"{path} holds a run with other settings ({listed}); type another --run-dir, or --overwrite"
            )
        if _status(path) == DONE:
            raise UsageError(
                f"{path} holds this very run, DONE; type another --run-dir, or --overwrite to run it again"
            )
    _set_aside(path)


def _set_aside(path: Path) -> None:
    """Rename an earlier run rather than write over it."""
    number = 1
    while (aside := path.with_name(f"{path.name}.before-{number}")).exists():
        number += 1
    path.rename(aside)


def _status(path: Path) -> Any:
    try:
        return json.loads((path / "summary.json").read_text(encoding="utf-8")).get("status")
    except (OSError, ValueError):
        return None  # never finished
