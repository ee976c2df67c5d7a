"""What preparing a task finds out, for processes and hosts that do not prepare it again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from asyncsgd.errors import UsageError
from asyncsgd.records.run_folder import write_text
from asyncsgd.tasks.base import Task

RECEIVED = "received.json"
"""The name of a file in a run folder that another host than that of rank 0 keeps; see `Received`."""


def found_by(task: Task) -> dict[str, Any]:
    """Return what the task's `prepare` has found out: field -> value."""
    if not dataclasses.is_dataclass(task):
        return {}
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(task)
    return {field.name: getattr(task, field.name) for field in fields if field.metadata.get("found")}


def with_found(task: Task, found: Mapping[str, Any]) -> Task:
    """Return the task with what another process has found.

    Args:
        found: what `found_by` has returned there, as JSON brings it here.

    Raises:
        ValueError: if a task of this class finds other things.
    """
    if found.keys() != found_by(task).keys():
        raise ValueError(f"{[*found]} is not what a {type(task).__name__} finds out")
    fields = {name: _tuples(value) for name, value in found.items()}
    prepared: Task = dataclasses.replace(task, **fields)  # type: ignore[type-var]
    return prepared


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


class Received(Struct, frozen=True, forbid_unknown_fields=True):
    """What a host has received of a run that another host has prepared."""

    found: dict[str, Any]
    """See `found_by`."""
    places: dict[str, str]
    """Path of a folder of the prepared task on the other host -> its path on this host."""

    def prepared(self, task: Task) -> Task:
        """The task, prepared as on the other host.

        Raises:
            UsageError: if a folder is no longer there, or this is another task.
        """
        for path, place in self.places.items():
            if not Path(place).is_dir():
                raise UsageError(
                    f"{place} is gone, where this host had its copy of {path}; delete {RECEIVED} in the run's folder "
                    f"if the data and the model that its settings name are on this host"
                )
        try:
            return with_found(task, self.found).in_folders(self.places)
        except ValueError as error:
            raise UsageError(f"{RECEIVED} is not of this run: {error}") from error

    def write(self, folder: Path) -> None:
        """Write it beside the settings of a run."""
        write_text(folder / RECEIVED, msgspec.json.encode(self).decode())


def received_by(folder: Path) -> Received | None:
    """Read what the host has received from its run folder; None where the run was prepared on this host.

    Raises:
        UsageError: if the file is damaged.
    """
    try:
        content = (folder / RECEIVED).read_bytes()
    except OSError:
        return None
    try:
        return msgspec.json.decode(content, type=Received)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{folder / RECEIVED} is damaged: {error}") from error
