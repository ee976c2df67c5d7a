"""How every YAML file that a user may have written is read. PyYAML is imported when a file is read."""

from __future__ import annotations

import functools
import re
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.numbers import DECIMAL, WHOLE


def read_yaml(text: str, name: str) -> Any:
    """Return what a YAML text holds.

    Only usual spellings are numbers. YAML 1.1 would read 010 as 8 and 1:30 as 90. Here they are text, and a setting
    that wants a number refuses them by that text. PyYAML would silently keep the last of two equal keys. Here they are
    an error.

    Args:
        name: of the file, for messages.

    Raises:
        UsageError: if it is not YAML, holds a key twice.

    >>> read_yaml("{nproc: 010, speeds: 1:30, samples: 100, learning_rate: 1.0e-4}", "my.yaml")
    {'nproc': '010', 'speeds': '1:30', 'samples': 100, 'learning_rate': 0.0001}
    >>> read_yaml("{seed: 1, seed: 2}", "my.yaml")
    Traceback (most recent call last):
        ...
    asyncsgd.errors.UsageError: my.yaml: the key 'seed' is there twice (line 1); keep one
    """
    import yaml

    try:
        return yaml.load(text, Loader=_loader())
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:  # TypeError: a list as a key
        raise UsageError(f"{name} is not YAML: {' '.join(str(error).split())[:400]}") from error


@functools.cache
def _loader() -> Any:
    """PyYAML's safe loader (in C, ten times as fast, where there is one) with our numbers, and without dates."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        yaml_implicit_resolvers = {  # noqa: RUF012 - that is how PyYAML wants it
            first: [
                (tag, pattern)
                for tag, pattern in resolvers
                if tag.rpartition(":")[2] not in ("int", "float", "timestamp")
            ]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise UsageError(f"the key {key.value!r} is there twice (line {line}); keep one")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    # As YAML 1.1 has it, a float needs a dot: 1e-4 stays text, which settings understand, and so do hashes of configs.
    dotted = rf"(?=[^eE]*\.)(?:{DECIMAL})|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(rf"(?:{WHOLE})\Z"), list("-+0123456789"))
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(rf"(?:{dotted})\Z"), list("-+0123456789."))
    return Loader
