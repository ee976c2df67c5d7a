"""What is laid over a config before it is planned: its ``quick:`` block, and what was typed after ``--set``.

Values are laid over as JSON Merge Patch does it (RFC 7396): a mapping is laid over a mapping key by key, any other
value takes the place of the old one, and null takes the key out. Beyond that a mapping is laid over the stages of a
chain by their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import yaml

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.yaml_reader import read_yaml
from asyncsgd.studies.chain import KEYS_OF_TWO_STAGES
from asyncsgd.studies.config import (
    Analysis,
    Comparison,
    ComparisonsConfig,
    Config,
    GivenSettings,
    LadderConfig,
    LadderKeys,
    LadderTask,
    Primary,
    Settings,
    TrainingGrid,
    Tuning,
    typed,
)

QUICK = "quick"
ANY = "*"
"""In a path of keys: any name."""
STRUCTS: Mapping[tuple[str, ...], type[msgspec.Struct]] = MappingProxyType(
    {
        ("tuning",): Tuning,
        ("analysis",): Analysis,
        ("analysis", "primary"): Primary,
        ("grid",): TrainingGrid,
        ("comparisons", ANY): Comparison,
        ("ladder",): LadderKeys,
        ("ladder", "tasks", ANY): LadderTask,
    }
)
"""The parts of a config that have keys of their own."""
NAMES = (
    ("algorithms",),
    ("models",),
    ("comparisons",),
    ("comparisons", ANY, "arms"),
    ("stages",),
    ("stages", ANY, "arms"),
    ("ladder", "tasks"),
)
"""The parts whose keys are names that the user chose. The keys of any other part are settings, which the plan
checks."""


def lay_over(config: GivenSettings, block: GivenSettings, where: str) -> Settings:
    """The config with a block laid over it.

    Args:
        where: what the block is called in messages.

    Raises:
        UsageError: if the block takes out a key that is not there.

    >>> lay_over({"base": {"samples": 8, "warmup": 2}, "seeds": [1, 2]}, {"base": {"warmup": None}, "seeds": [1]}, "")
    {'base': {'samples': 8}, 'seeds': [1]}
    >>> lay_over({"stages": [{"name": "a", "samples": 8}]}, {"stages": {"a": {"samples": 4}}}, "")
    {'stages': [{'name': 'a', 'samples': 4}]}
    """
    merged = dict(config)
    for key, value in block.items():
        if value is not None:
            merged[key] = _laid(merged.get(key), value, f"{where}.{key}")
        elif key in merged:
            del merged[key]
        else:
            raise UsageError(f"{where} takes {key} out, which is not there{nearest(str(key), map(str, config))}")
    return merged


def _laid(old: Any, value: Any, where: str) -> Any:
    """The value of a key after `value` was laid over its `old` one."""
    if not isinstance(value, Mapping):
        return value
    if isinstance(old, Mapping):
        return lay_over(old, value, where)
    by_name = _by_name(old)
    if by_name is None:
        return value
    merged = lay_over(by_name, value, where)
    return list(merged.values())


def _by_name(part: Any) -> Settings | None:
    """The mappings of a list by their names, such as the stages of a chain. None: the part is no list of such
    mappings."""
    if isinstance(part, list) and all(isinstance(each, Mapping) and "name" in each for each in part):
        return {each["name"]: each for each in part}
    return None


def quick_of(config: GivenSettings, file: str) -> Settings:
    """The config with its ``quick:`` block laid over it. Its name ends in ``-quick``, unless the block has a name.

    Raises:
        UsageError: if it has no such block.
    """
    block = config.get(QUICK)
    if block is None:
        raise UsageError(
            f"{file} has no quick: block that --quick could lay over the rest; take --quick away, and see with "
            "--dry-run how long it takes"
        )
    where = f"{file}: {QUICK}"
    rest = {key: value for key, value in config.items() if key != QUICK}
    merged = lay_over(rest, typed(block, Settings, where), where)
    if "name" in rest and "name" not in block:
        merged["name"] = f"{rest['name']}-quick"
    return merged


def with_setting(config: GivenSettings, word: str) -> Settings:
    """The config with what was typed after one ``--set``.

    Args:
        word: such as ``base.samples=400``: a key, with the keys above it in front, and a value as YAML has it. With
            nothing after the = the key is removed. A stage of a chain has its name for a key.

    Raises:
        UsageError: if there is no such key. A setting that does not exist is not noticed here: `make_plan` refuses it.

    >>> with_setting({"models": {}, "base": {"samples": 800}}, "base.samples=400")
    {'models': {}, 'base': {'samples': 400}}
    """
    path, sign, text = word.partition("=")
    where = f"--set {path}"
    if not sign:
        raise UsageError(f"--set takes a key and a value, such as --set base.samples=400, got {word!r}")
    names = path.split(".")
    _check_path(config, names, where)
    block = read_yaml(text, where)
    for name in reversed(names):
        block = {name: block}
    return lay_over(config, block, where)


def _check_path(config: GivenSettings, names: Sequence[str], where: str) -> None:
    """Refuse a key that a config cannot have at this place."""
    part: Any = config
    for number, name in enumerate(names):
        above = names[:number]
        by_name = _by_name(part)
        if by_name is not None:
            part = by_name
        if not isinstance(part, Mapping):
            raise UsageError(f"{where}: {'.'.join(above)} is {part!r} and has no keys")
        known = _known(part, above)
        if known and name not in known:
            hint = nearest(name, known) or f"; the keys are {', '.join(known)}"
            raise UsageError(f"{where}: there is no {name!r} there{hint}")
        part = part.get(name, {})


def _known(part: GivenSettings, above: Sequence[str]) -> list[str]:
    """The keys that a part of a config may have; empty where they are settings.

    Args:
        above: the keys above the part, from the outermost.
    """
    if not above:
        return _of_a_config(part)
    for path, kind in STRUCTS.items():
        if _fits(above, path):
            return list(kind.__struct_fields__)
    if any(_fits(above, path) for path in NAMES):
        return list(map(str, part))
    return []


def _of_a_config(config: GivenSettings) -> list[str]:
    """The keys that ``--set`` may name in a config of this kind: all but ``quick``, whose block is laid over the rest
    before, or not at all."""
    kind: type[msgspec.Struct] = Config
    if "models" in config:
        kind = ComparisonsConfig
    elif "ladder" in config:
        kind = LadderConfig
    known = [key for key in kind.__struct_fields__ if key != QUICK]
    if "stages" in config:
        known = ["stages", *(key for key in known if key not in KEYS_OF_TWO_STAGES)]
    return known


def _fits(names: Sequence[str], path: Sequence[str]) -> bool:
    """Whether the keys `names` lead to the part that `path` stands for, in which `ANY` is any key."""
    return len(names) == len(path) and all(asked in (ANY, name) for name, asked in zip(names, path, strict=True))


def text_of(config: GivenSettings, first_line: str) -> str:
    """A config as the file of its study's folder. The first line, a comment, says what was laid over which file."""
    return f"# {first_line}\n{yaml.safe_dump(dict(config), sort_keys=False, width=120, allow_unicode=True)}"
