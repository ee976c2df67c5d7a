"""How every YAML file that a user may have written is read, and the files of a run folder that hold keys and values.

PyYAML is imported when a file is read."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError


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
        raise UsageError(f"{folder} holds no finished run ({name}: {error}); name a folder below runs/") from error
    if not isinstance(content, dict):
        raise UsageError(f"{folder / name} is damaged: it holds no keys and values; name another run")
    return content


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
