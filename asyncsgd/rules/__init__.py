"""The algorithms, one paper per file. `ALL` holds an example of each, for the contract tests and ``--rule help``.

Importing this package imports torch; `asyncsgd.settings` therefore keeps the text of ``--rule`` and `parse_rule`
reads it where training starts."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.rules.asynchronous import Asynchronous
from asyncsgd.rules.base import Rule
from asyncsgd.rules.ringmaster import Ringmaster
from asyncsgd.rules.staleness_aware import StalenessAware
from asyncsgd.rules.synchronous import Synchronous

ALL: tuple[Rule, ...] = (
    Asynchronous(),
    Synchronous(),
    StalenessAware(),
    Ringmaster(threshold=4),
    Ringmaster(threshold=2, stops=True),
)

_BY_NAME = {rule.name: type(rule) for rule in ALL}


_READ: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: {"true": True, "false": False, "True": True, "False": False}.__getitem__,
}
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def parse_rule(text: str) -> Rule:
    """Return the rule that ``NAME[:key=value,...]`` means.

    >>> parse_rule("ringmaster:threshold=4")
    Ringmaster(threshold=4, stops=False)

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested) or a value out of range.
    """
    name, _, parameters = text.partition(":")
    if name not in _BY_NAME:
        raise UsageError(
            f"unknown rule {name!r}{nearest(name, _BY_NAME)}; rules: {', '.join(_BY_NAME)} (--rule help explains them)"
        )
    rule_class = _BY_NAME[name]
    types = typing.get_type_hints(rule_class)
    known = [field.name for field in dataclasses.fields(rule_class)]
    values = {}
    for part in filter(None, parameters.split(",")):
        key, equals, value = part.partition("=")
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise UsageError(f"rule {name!r} has no parameter {key!r}{nearest(key, known)}; {takes}")
        if key in values:
            raise UsageError(f"rule parameter {key!r} is given twice in {text!r}; keep one")
        if not equals:
            raise UsageError(f"rule parameter {key!r} has no value; type --rule {name}:{key}=VALUE")
        try:
            values[key] = _READ[types[key]](value)
        except (KeyError, ValueError):
            raise UsageError(f"rule parameter {key}={value!r} is not {_KINDS[types[key]]}") from None
    try:
        return rule_class(**values)
    except ValueError as error:
        raise UsageError(f"--rule {text}: {error}") from None


def describe_rules() -> str:
    """The text of ``--rule help``: every rule with its one line and its parameters."""
    lines = ["rules (--rule NAME[:key=value,...]):"]
    for rule_class in _BY_NAME.values():
        fields = ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(rule_class))
        lines.append(f"  {rule_class.name:16} {rule_class.summary}" + (f"  [{fields}]" if fields else ""))
    return "\n".join(lines)
