"""How a sweep's config is read: its keys, and the type and range of every value. Standard library only."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError, nearest
from asyncsgd.settings.yaml_reader import read_yaml

CONFIG_KEYS = (
    "name",
    "base",
    "base_model",
    "algorithms",
    "conditions",
    "exclude",
    "seeds",
    "replicates",
    "tuning",
    "pilots",
    "finetune",
    "analysis",
    "order_seed",
)

CONDITION_KEYS = ("nproc", "clock", "speeds")
"""Settings that say under which condition an arm runs; an arm has them even where `base` sets them."""

RESERVED = ("seed", "run_dir", "runs_dir", "overwrite", "track")
"""Settings that the sweep itself decides, or its command line."""

NOT_TUNED = (
    *("mode", *CONDITION_KEYS, "network", "churn", "samples", "seconds", "target_loss"),
    *("evaluations", "evaluate_every", "eval_samples"),
    *("data", "eval_data", "text_column", "blocks", "mask", "mask_prob", "candidates", "candidate_share", "tech"),
    *("eval_mask", "eval_mask_prob", "vocab_size", "model"),
)
"""Settings that change what is compared, or what it may cost, rather than how well an algorithm does under it."""


REFUSED: Mapping[str, str] = {
    "epochs": "its budgets are in samples or in seconds, known before any data are read",
    "patience": "a run that ends by itself is not compared with others at equal samples",
}
"""Settings that no study has, and why."""

SEED_LIMIT = 2**32


def read_config(path: Path) -> dict[str, Any]:
    """Read a sweep's YAML file.

    Raises:
        UsageError: if it cannot be read, is not YAML or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({error}); experiments/configs/ has examples") from error
    config = read_yaml(text, str(path))
    if not isinstance(config, dict):
        raise UsageError(f"{path} must hold keys and values ({', '.join(CONFIG_KEYS)})")
    return config


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

_FUNCTIONS = {"max": max, "min": min}


def fill_in(text: str, nproc: int, where: str) -> str:
    """Replace what stands in braces by its value; it may use nproc, whole numbers, + - * //, max and min.

    >>> fill_in("ringmaster:threshold={max(1, nproc//2)}", 4, "rule")
    'ringmaster:threshold=2'

    Raises:
        UsageError: for anything else in the braces.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id == "nproc":
            return nproc
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return _FUNCTIONS[node.func.id](*map(value, node.args))
        raise ValueError

    def replaced(match: re.Match[str]) -> str:
        try:
            return str(value(ast.parse(match[1].strip(), mode="eval").body))
        except (SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
            raise UsageError(
                f"{where}: {match[0]} is not understood; in braces stand nproc, whole numbers, + - * //, max and min, "
                f"e.g. {{nproc//2}}"
            ) from error

    return re.sub(r"\{([^{}]*)\}", replaced, text)


def check_keys(given: Mapping[Any, Any], known: Sequence[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r}{nearest(str(key), known)}; known are {', '.join(known)}")


def settings_in(given: Any, where: str, reserved: Sequence[str] = RESERVED) -> dict[str, Any]:
    """Settings by field name; a dash is an underscore, as in flags."""
    settings: dict[str, Any] = {}
    for key, value in mapping_in(given, where).items():
        name = str(key).replace("-", "_")
        if name in settings:
            raise UsageError(f"{where}: {name} is there twice; keep one")
        if name in reserved:
            raise UsageError(
                f"{where}: {name} is decided by the sweep; seeds go to the key seeds, the folder to --out, "
                "trackers to --track"
            )
        if name in REFUSED:
            raise UsageError(f"{where}: {name} has no place in a study: {REFUSED[name]}; take it out")
        settings[name] = value
    return settings


def mapping_in(given: Any, where: str) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where} must hold keys and values, got {given!r}")
    return given


def list_in(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise UsageError(f"{where} must be a list, got {given!r}; write [{given}]")
    return given


def text_in(given: Any, where: str) -> str:
    if not isinstance(given, str) or not given:
        raise UsageError(f"{where} must be text, got {given!r}")
    return given


def whole_in(given: Any, where: str, at_least: int) -> int:
    if not isinstance(given, int) or isinstance(given, bool) or given < at_least:
        raise UsageError(f"{where} must be a whole number of at least {at_least}, got {given!r}")
    return given


def seeds_in(given: Any, where: str) -> tuple[int, ...]:
    seeds = tuple(whole_in(seed, where, 0) for seed in list_in(given, where))
    if any(seed >= SEED_LIMIT for seed in seeds):
        raise UsageError(f"{where} must be less than {SEED_LIMIT}, got {max(seeds)}")
    if not seeds or len(set(seeds)) < len(seeds):
        raise UsageError(f"{where} must name each seed once, and at least one, got {given!r}")
    return seeds


def grid_in(given: Any, where: str) -> dict[str, list[Any]]:
    grid = {key: list_in(values, f"{where}.{key}") for key, values in settings_in(given, where).items()}
    for key in NOT_TUNED:
        if key in grid:
            raise UsageError(f"{where}: {key} is not tuned, it is what is compared; write it in conditions or base")
    if not grid or not all(grid.values()):
        raise UsageError(f"{where} must list values of at least one setting, e.g. {{learning_rate: [5.0e-4, 1.0e-3]}}")
    return grid


def number_in(given: Any, where: str, above: float, up_to: float | None) -> float:
    good = isinstance(given, int | float) and not isinstance(given, bool) and above < given < math.inf
    if not good or (up_to is not None and given > up_to):
        bounds = f"above {above:g}" + ("" if up_to is None else f" and at most {up_to:g}")
        hint = "; YAML reads 1e-4 as text, write 1.0e-4" if isinstance(given, str) else ""
        raise UsageError(f"{where} must be a number {bounds}, got {given!r}{hint}")
    return float(given)
