"""Who may import whom, read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import asyncsgd

ROOT = Path(__file__).resolve().parents[1]

PLANNING = ("study.config", "study.arms", "study.finetuning", "study.registration", "study.plan")
"""What plans a study runs nothing."""

MAY_IMPORT = {
    # part -> the parts of asyncsgd it may import, beside itself
    "__main__": set(),
    "errors": set(),
    "torchrun": set(),
    "signals": set(),
    "delay_factors": set(),
    "numbers": set(),
    "packing": set(),
    "schedules": set(),
    "named_choices": {"errors", "numbers"},
    "settings": {"errors", "numbers", "records.trackers"},
    "records": {"errors"},
    "simulation.problems": {"errors", "named_choices"},
    "simulation.speeds": {"errors", "named_choices", "records"},
    "simulation.churn": {"errors", "named_choices"},
    "rules": {"delay_factors", "errors", "named_choices"},
    "flat": {"errors"},
    "hardware": {"records"},
    "optimizers": {"errors", "flat", "packing"},
    "server": {"optimizers", "rules.base", "records", "schedules", "packing"},
    "data": {"errors", "named_choices", "numbers"},
    "models": {"data", "errors", "flat", "signals"},
    "init_from": {"data", "errors", "flat", "records", "settings.yaml_reader"},
    "tasks": {"data", "errors", "flat", "models", "init_from", "settings"},
    "evaluation": {"records", "tasks.base"},
    "worker": {"data", "errors", "evaluation", "flat", "packing", "prefetching", "records", "tasks.base"},
    "prefetching": set(),
    "profiling": {"worker"},
    "throughput": {"evaluation", "tasks.base"},
    "stages": {"errors", "evaluation", "tasks.base"},
    "batches": {"errors", "records", "packing"},
    "checkpoints": {"errors", "packing", "records", "settings.yaml_reader"},
    "dispatcher": {"records", "rules.base", "server", "packing", "batches"},
    "runtime": {
        *(
            "checkpoints",
            "data",
            "dispatcher",
            "errors",
            "evaluation",
            "flat",
            "models",
            "named_choices",
            "numbers",
            "optimizers",
            "records",
        ),
        *("profiling", "rules.base", "schedules", "server", "signals", "packing", "batches", "tasks.base", "worker"),
        *("simulation.churn", "simulation.problems", "simulation.speeds", "stages"),
    },
    "simulation": {
        *("errors", "evaluation", "flat", "named_choices", "numbers", "optimizers", "records", "rules", "runtime"),
        *("schedules", "server", "batches"),
    },
    "modes": {"errors", "records", "settings", "simulation.churn", "simulation.speeds"},
    "recorded_run": {"errors", "modes", "settings.yaml_reader"},
    **{part: {"errors", "settings", *PLANNING} for part in PLANNING},
    "study.finetuning": {"errors", "settings", "tasks"},
}
COMPOSE = {"__init__", "api", "experiment", "fitting", "training", "replaying", "scripts", "study"}


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


SOURCES = sorted((ROOT / "asyncsgd").rglob("*.py"))
ANALYSIS = sorted((ROOT / "analysis").rglob("*.py"))
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.py"))


def name_of(path: Path) -> str:
    """The full name of the module in a file: ``asyncsgd.data.masking``."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def is_in(name: str, part: str) -> bool:
    """Whether a module is a part or lies in it."""
    return name == part or name.startswith(part + ".")


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_imports_only_what_its_room_may(path: Path) -> None:
    foreign = {name for name in imports_of(path) if name.split(".")[0] in ("experiments", "analysis", "tests")}
    assert not foreign
    inner = name_of(path).removeprefix("asyncsgd").removeprefix(".")
    if not inner or (inner.split(".")[0] in COMPOSE and inner not in MAY_IMPORT):
        return
    part = max((part for part in MAY_IMPORT if is_in(inner, part)), key=len, default=None)
    assert part is not None, f"{inner} has no row in MAY_IMPORT"
    for name in imports_of(path):
        if is_in(name, "asyncsgd") and name not in ("asyncsgd", "asyncsgd.__version__"):
            wanted = name.removeprefix("asyncsgd.")
            assert any(is_in(wanted, allowed) for allowed in (part, *MAY_IMPORT[part])), f"{inner} imports {name}"


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in SOURCES
        if any(
            is_in(name_of(path), f"asyncsgd.{part}")
            for part in (
                "errors",
                "numbers",
                "named_choices",
                "torchrun",
                "delay_factors",
                "settings",
                "records",
                *PLANNING,
            )
        )
    ],
    ids=name_of,
)
def test_light_modules_import_neither_torch_nor_transformers(path: Path) -> None:
    names = {name.split(".")[0] for name in imports_of(path)}
    assert not names & {"torch", "transformers", "datasets", "numpy"}


FLOORS = ("statistics", "study", "findings", "report")
"""Of analysis, from bottom to top: each imports itself and those below. Commands stand above all."""


@pytest.mark.parametrize("path", ANALYSIS, ids=name_of)
def test_analysis_stands_in_floors(path: Path) -> None:
    floor = path.relative_to(ROOT / "analysis").parts[0]
    if floor not in FLOORS or path.name == "__main__.py":
        return
    allowed = FLOORS[: FLOORS.index(floor) + 1]
    names = {name for name in imports_of(path) if name.split(".")[0] == "analysis"}
    assert not {name for name in names if not any(is_in(name, f"analysis.{below}") for below in allowed)}


@pytest.mark.parametrize("path", ANALYSIS, ids=name_of)
def test_analysis_never_imports_torch(path: Path) -> None:
    names = imports_of(path)
    assert not {name.split(".")[0] for name in names} & {"torch", "transformers", "experiments"}
    assert {name for name in names if name.startswith("asyncsgd.")} <= {
        "asyncsgd.records.events",
        "asyncsgd.errors",
        "asyncsgd.settings.yaml_reader",
        "asyncsgd.records.locks",  # whether a run is alive
        "asyncsgd.records.totals",  # quantiles of delays, as in a run's summary
        "asyncsgd.records.usage",  # what the last look at the machine is called
        *("asyncsgd.study.arms", "asyncsgd.study.plan", "asyncsgd.study.registration"),  # names in a sweep's folder
        "asyncsgd.study.finetuning",  # what models are judged by
    }


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_experiments_never_import_one_another(path: Path) -> None:
    scripts = {other.stem for other in EXPERIMENTS if "__main__" in other.read_text(encoding="utf-8")}
    assert not {name for name in imports_of(path) if name.split(".")[0] in scripts | {"experiments"}}


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
