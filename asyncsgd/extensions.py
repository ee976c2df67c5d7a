"""Rules, tasks, trackers, masks and finders that installed packages bring, by the name that a user types.

A package names a class among its entry points, in its pyproject.toml::

    [project.entry-points."asyncsgd.rules"]
    my_rule = "my_package:MyRule"

Names are listed without importing anything. A class is imported when its name is asked for, so a package that is
broken or names a wrong class is told of then, and hides no other name. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from asyncsgd.errors import UsageError

T = TypeVar("T")

RULES = "asyncsgd.rules"
TASKS = "asyncsgd.tasks"
TRACKERS = "asyncsgd.trackers"
MASKS = "asyncsgd.masks"
FINDERS = "asyncsgd.finders"
_GROUPS = (RULES, TASKS, TRACKERS, MASKS, FINDERS)

_imported: dict[str, str] = {}
"""What this process has asked for, as ``rule my_rule`` -> ``my-package 1.0``."""


class _Entry(NamedTuple):
    """An entry point: what a package calls a class, and where the class is."""

    name: str
    value: str
    package: str
    """With its version."""


@functools.cache
def _entries(group: str) -> Mapping[str, list[_Entry]]:
    """The entry points of a group by name. Two packages may have given one name."""
    entries: dict[str, list[_Entry]] = {}
    if not _are_any():
        return entries
    from importlib import metadata

    for point in metadata.entry_points(group=group):
        package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        entries.setdefault(point.name, []).append(_Entry(point.name, point.value, package))
    return entries


@functools.cache
def _are_any() -> bool:
    """Whether a package on the path names a group of ours. importlib.metadata, which reads them all, takes longer to
    import than ``--help`` may take.
    """
    groups = [f"[{group}]" for group in _GROUPS]
    for folder in sys.path:
        for path in glob.iglob(os.path.join(glob.escape(folder), "*.*-info", "entry_points.txt")):
            try:
                text = Path(path).read_text(encoding="utf-8", errors="replace")
            except OSError:  # importlib.metadata passes over what may not be read, too
                continue
            if any(group in text for group in groups):
                return True
    return False


def imported() -> Mapping[str, str]:
    """What other packages have brought into this process, as ``rule my_rule`` -> ``my-package 1.0``."""
    return dict(_imported)


class Registry(Mapping[str, T]):
    """The classes of one kind by name: the library's own, and those of installed packages.

    Args:
        one: what such a class is called in messages, such as ``rule``.
        group: the name of the entry points.
        own: the library's own, each as itself or as MODULE:NAME.
        base: the class from which others must be derived, as itself or as MODULE:NAME. They must be frozen
            dataclasses, and their `name` must be that of the entry point.
    """

    def __init__(self, one: str, group: str, own: Mapping[str, Any], base: type | str) -> None:
        self._one = one
        self._group = group
        self._base = base
        self.own = own

    def __iter__(self) -> Iterator[str]:
        yield from self.own
        yield from sorted(_entries(self._group).keys() - self.own.keys())

    def __len__(self) -> int:
        return len(self.own.keys() | _entries(self._group).keys())

    def __contains__(self, name: object) -> bool:
        return name in self.own or name in _entries(self._group)

    def __getitem__(self, name: str) -> T:
        """The class of that name, imported.

        Raises:
            KeyError: if there is none.
            UsageError: if two packages bring the name, or the class cannot be imported or is none of this kind.
        """
        entries = _entries(self._group).get(name, [])
        packages = [entry.package for entry in entries]
        if name in self.own:
            packages.insert(0, "asyncsgd itself")
        if len(packages) > 1:
            raise UsageError(
                f"the {self._one} {name!r} is brought by {' and by '.join(packages)}; uninstall {packages[-1]}, or "
                f"give its entry point another name"
            )
        if name in self.own:
            own: T = _resolved(self.own[name])
            return own
        if not entries:
            raise KeyError(name)
        return self._imported(entries[0])

    def _imported(self, entry: _Entry) -> T:
        what = f"the {self._one} {entry.name!r} of the package {entry.package}, {entry.value},"
        try:
            kind: Any = _resolved(entry.value)
        except Exception as error:  # the package's own code runs
            raise UsageError(
                f"{what} cannot be imported ({type(error).__name__}: {error}); update or uninstall the package"
            ) from error
        base: Any = _resolved(self._base)
        if not (isinstance(kind, type) and issubclass(kind, base) and dataclasses.is_dataclass(kind)):
            raise UsageError(f"{what} is no dataclass derived from {base.__module__}.{base.__qualname__}")
        named: Any = kind
        if named.name != entry.name:
            raise UsageError(f"{what} calls itself {named.name!r}; a class and its entry point must have one name")
        _imported[f"{self._one} {entry.name}"] = entry.package
        return cast(T, kind)


def _resolved(value: Any) -> Any:
    """What MODULE:NAME names, imported; another value is returned as it is."""
    if not isinstance(value, str):
        return value
    module, _, name = value.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))
