"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import asyncsgd

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    # part -> the parts of asyncsgd it may import, beside itself
    "errors": set(),
    "locks": set(),
    "record": {"errors", "locks"},
    "torchrun": set(),
    "codec": set(),
    "signals": set(),
    "script": {"errors", "launch", "signals"},
    "private_folder": {"errors"},
    "delay": set(),
    "numbers": set(),
    "named": {"errors", "numbers"},
    "speeds": {"errors", "named", "record"},
    "churn": {"errors", "named"},
    "problems": {"errors", "named"},
    "rules": {"delay", "errors", "named"},
    "flat": {"errors"},
    "state": set(),
    "optimizers": {"state"},
    "schedules": set(),
    "server": {"optimizers", "rules.base", "record", "schedules", "state"},
    "data": {"errors", "numbers", "spans"},
    "models": {"data", "errors", "flat", "signals"},
    "tasks": {"data", "errors", "flags", "flat", "models", "origin", "scores", "settings", "spans"},
    "evaluation": {"record", "tasks.base"},
    "checking": {"data", "errors", "flat", "tasks.base"},
    "worker": {"data", "evaluation", "flat", "state", "tasks.base"},
    "streams": {"record", "state"},
    "dispatcher": {"record", "rules.base", "server", "state", "streams", "worker"},
    "runtime": {
        "churn",
        "codec",
        "data",
        "dispatcher",
        "errors",
        "evaluation",
        "flat",
        "models",
        "named",
        "optimizers",
        "private_folder",
        "problems",
        "record",
        "rules.base",
        "rules.nesterov",
        "schedules",
        "server",
        "signals",
        "speeds",
        "state",
        "streams",
        "tasks.base",
        "worker",
    },
    "yaml_reader": {"errors", "numbers"},
    "flags": {"errors", "numbers", "yaml_reader"},
    "settings": {"errors", "flags"},
    "finetune_settings": {"errors", "flags", "settings"},
    "progress": {"record"},
    "run_folder": {"errors", "finetune_settings", "flags", "record", "settings", "tasks"},
    "origin": {"data", "errors", "flat", "record", "yaml_reader"},
    "scores": set(),
    "modes": {"churn", "errors", "record", "settings", "speeds"},
    "spans": set(),
    "plan": {"errors", "finetune_settings", "settings", "yaml_reader"},
    "launch": {"errors", "private_folder"},
}
COMPOSE = {
    "api",
    "experiment",
    "task_script",
    "pretraining",
    "training",
    "replaying",
    "simulation",
    "finetune",
    "sweep",
    "estimate",
    "__init__",
}


def imports_of(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names |= {f"asyncsgd.{alias.name}" for alias in node.names} if module == "asyncsgd" else {module}
    return names


def part_of(path: Path) -> str:
    return path.relative_to(ROOT / "asyncsgd").parts[0].removesuffix(".py")


SOURCES = sorted((ROOT / "asyncsgd").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_imports_only_what_its_room_may(path: Path) -> None:
    part = part_of(path)
    foreign = {name for name in imports_of(path) if name.split(".")[0] in ("experiments", "analysis", "tests")}
    assert not foreign
    if part in COMPOSE:
        return
    assert part in MAY_IMPORT, f"asyncsgd/{part} has no row in MAY_IMPORT"
    for name in imports_of(path):
        if not name.startswith("asyncsgd.") or name == "asyncsgd.__version__":
            continue
        inner = name.removeprefix("asyncsgd.")
        room = inner.split(".")[0]
        assert room == part or room in MAY_IMPORT[part] or inner in MAY_IMPORT[part], f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "part",
    [
        *("errors", "numbers", "named", "record", "torchrun", "delay"),
        *("yaml_reader", "flags", "settings", "finetune_settings", "run_folder", "plan"),
    ],
)
def test_light_modules_import_neither_torch_nor_transformers(part: str) -> None:
    names = {name.split(".")[0] for name in imports_of(ROOT / "asyncsgd" / f"{part}.py")}
    assert not names & {"torch", "transformers", "datasets", "numpy"}


@pytest.mark.parametrize("path", sorted((ROOT / "analysis").glob("*.py")), ids=lambda path: path.name)
def test_analysis_never_imports_torch(path: Path) -> None:
    names = imports_of(path)
    assert not {name.split(".")[0] for name in names} & {"torch", "transformers", "experiments"}
    assert {name for name in names if name.startswith("asyncsgd.")} <= {
        "asyncsgd.record",
        "asyncsgd.errors",
        "asyncsgd.yaml_reader",
        "asyncsgd.progress",  # quantiles of delays, as in a run's summary
        "asyncsgd.plan",  # the names of stages, endpoints and the baseline in what a sweep leaves behind
        "asyncsgd.runtime.processes",  # how the processes of a published script end with it; imports nothing heavy
    }


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").rglob("*.py")), ids=lambda path: path.name)
def test_experiments_never_import_one_another(path: Path) -> None:
    assert not {name for name in imports_of(path) if name.split(".")[0] == "experiments"}


def test_torchs_optimizers_are_built_in_one_place() -> None:
    for path in SOURCES:
        calls = [
            node
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute)
            and node.attr in ("SGD", "AdamW")
            and ast.unparse(node).startswith("torch.optim")
        ]
        assert not calls or path.name == "optimizers.py"


def test_every_public_name_can_be_loaded() -> None:
    for name in asyncsgd.__all__:
        assert getattr(asyncsgd, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = asyncsgd.Nothing
