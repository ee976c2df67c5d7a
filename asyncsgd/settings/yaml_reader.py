"""How every YAML file that a user may have written is read, and the files of a run folder that hold keys and values.

PyYAML is imported when a file is read."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError, reason

FORMAT = "settings_format"
"""The key of a run folder's settings.yaml that says in which form its settings are written."""
SETTINGS_FORMAT = 2
"""The one form that is written and read: every setting by the name of its flag, in one mapping without levels."""
EXPERIMENT = "experiment"
TASK = "task"
OPTIMIZER_OPTIONS = "optimizer_options"
ABOUT_THE_RUN = (FORMAT, EXPERIMENT, TASK, OPTIMIZER_OPTIONS)
"""Keys of settings.yaml that are no settings: its format, who trained what, and what an optimizer of the user's own
was made with."""
OF_TASK = "task."
"""How the name of a task's field begins where it is the name of a setting that every run has."""
SIMULATION = "simulate"
"""The experiment whose settings are a problem's, see `asyncsgd.simulation.settings`; it has no task."""


def read_yaml(text: str, name: str) -> Any:
    """Return what a YAML text holds; a key twice would lose an arm of a study, so it is refused.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: if it is not YAML, or holds a key twice.

    >>> read_yaml("{nproc: 2, learning_rate: 1.0e-4}", "my.yaml")
    {'nproc': 2, 'learning_rate': 0.0001}
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # TypeError: a list as a key
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:400]}") from error


def read_of_run(folder: Path, name: str) -> dict[str, Any]:
    """The keys and values of a file of a run folder, YAML or JSON.

    Raises:
        UsageError: if it cannot be read.
    """
    try:
        text = (folder / name).read_text(encoding="utf-8")
        content = read_yaml(text, name) if name.endswith(".yaml") else json.loads(text)
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else error
        raise UsageError(f"{folder} holds no finished run ({name}: {why}); name a folder below runs/") from error
    if not isinstance(content, dict):
        raise UsageError(f"{folder / name} is damaged: it holds no keys and values; name another run")
    return content


def read_settings(folder: Path) -> dict[str, Any]:
    """What settings.yaml of a run folder holds, by key.

    Raises:
        UsageError: if it cannot be read, or is in the format of another version.
    """
    settings = read_of_run(folder, "settings.yaml")
    check_format(settings, folder / "settings.yaml")
    return settings


def check_format(settings: Mapping[str, Any], path: Path) -> None:
    """Refuse the settings.yaml of a run that another version of asyncsgd has written.

    Raises:
        UsageError: naming both formats.
    """
    written = settings.get(FORMAT, 1)
    if written != SETTINGS_FORMAT:
        is_newer = isinstance(written, int) and written > SETTINGS_FORMAT
        other = "a newer" if is_newer else "an older"
        raise UsageError(
            f"{path} is in format {written!r}, of {other} asyncsgd, and this one reads format {SETTINGS_FORMAT}; read "
            f"the run with the commit that its environment.json names"
        )


@functools.cache
def _loader() -> Any:
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise UsageError(f"the key {key!r} is there twice; keep one")
            return super().construct_mapping(node, deep)

    return Loader
