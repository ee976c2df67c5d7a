"""How every YAML file that a user may have written is read. PyYAML is imported when a file is read."""

from __future__ import annotations

import functools
import re
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.numbers import DECIMAL, WHOLE

_DEEPEST = 50
_MOST_NODES = 200_000
"""After aliases are written out. A few lines of them can stand for billions of values."""


def read_yaml(text: str, name: str) -> Any:
    """Return what a YAML text holds.

    Only usual spellings are numbers. YAML 1.1 would read 010 as 8 and 1:30 as 90. Here they are text, and a setting
    that wants a number refuses them by that text. PyYAML would silently keep the last of two equal keys. Here they are
    an error.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: if it is not YAML, holds a key twice, itself, or too much.

    >>> read_yaml("{nproc: 010, speeds: 1:30, samples: 100, learning_rate: 1.0e-4}", "my.yaml")
    {'nproc': '010', 'speeds': '1:30', 'samples': 100, 'learning_rate': 0.0001}
    >>> read_yaml("{seed: 1, seed: 2}", "my.yaml")
    Traceback (most recent call last):
        ...
    asyncsgd.errors.UsageError: my.yaml: the key 'seed' is there twice (line 1); keep one
    """
    import yaml

    loader = None
    try:
        _check_depth(text, name)
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Checked(name).check(node, ())
        return loader.construct_document(node)
    except UsageError:
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:  # TypeError: a list as a key
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:400]}") from error
    finally:
        if loader is not None:
            loader.dispose()


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader (the one in C, ten times as fast, where there is one) with our numbers."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers = {  # noqa: RUF012 - that is how PyYAML wants it
            first: [
                (tag, pattern)
                for tag, pattern in resolvers
                if tag not in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

    # As YAML 1.1 has it, a float needs a dot: 1e-4 stays text, which settings understand, and so do hashes of configs.
    dotted = rf"(?=[^eE]*\.)(?:{DECIMAL})|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{WHOLE})\Z"), list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{dotted})\Z"), list("-+0123456789."))
    return Loader


def _check_depth(text: str, name: str) -> None:
    """PyYAML reads nested values by recursion, and so do the functions that look at the values afterwards."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST and event.start_mark is not None:
            raise UsageError(f"{name}: line {event.start_mark.line + 1} is nested more than {_DEEPEST} deep")


class _Checked:
    """A walk over the nodes of a file, aliases written out."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_nodes = 0

    def check(self, node: Any, inside: tuple[Any, ...]) -> None:
        import yaml

        line = node.start_mark.line + 1
        self._num_nodes += 1
        if self._num_nodes > _MOST_NODES:
            raise UsageError(
                f"{self._name} holds more than {_MOST_NODES} values; write fewer, or fewer aliases (*name)"
            )
        if any(node is outer for outer in inside):
            raise UsageError(f"{self._name}: line {line} holds itself; write it out")
        inside = (*inside, node)
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                self.check(item, inside)
        elif isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise UsageError(f"{self._name}: the key {key.value!r} is there twice (line {line}); keep one")
                    seen.add(key.value)
                self.check(value, inside)
