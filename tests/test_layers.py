"""Who may import whom, read from the sources; and that `--help` is quick."""

import ast
import subprocess
import sys
from pathlib import Path

import asyncsgd

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [path for path in (ROOT / "experiments").glob("*.py") if "__main__" in path.read_text("utf-8")]
FLOORS = """
__main__ delay_factors errors numbers packing prefetching schedules signals torchrun
flat named_choices records
batches data hardware optimizers rules settings simulation.churn simulation.problems simulation.speeds
checkpoints init_from models modes server study.config
dispatcher recorded_run study.arms tasks
evaluation study.finetuning
stages study.registration throughput worker
profiling study.plan
runtime
experiment simulation
fitting training
scripts
replaying study
api __init__
"""
"""From bottom to top: a part imports itself and parts of lower floors."""
ANALYSIS = ["statistics", "study", "findings", "report"]
LIGHT = "errors numbers named_choices torchrun delay_factors settings records study.config study.arms study.plan"
FLOOR = {f"asyncsgd.{part}": floor for floor, parts in enumerate(FLOORS.strip().split("\n")) for part in parts.split()}
FLOOR |= {f"analysis.{part}": floor for floor, part in enumerate(ANALYSIS)}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "asyncsgd":
            yield from (f"asyncsgd.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from [node.module] if isinstance(node, ast.ImportFrom) else (alias.name for alias in node.names)


def part_of(name):
    """The part that a module is or lies in."""
    return max((part for part in FLOOR if f"{name}.".startswith(f"{part}.")), key=len, default=None)


def test_every_module_imports_only_what_its_room_may():
    never = {
        "asyncsgd": {"analysis", "experiments", "tests"},
        "analysis": {"torch", "transformers", "experiments", "tests"},
        "experiments": {*(path.stem for path in SCRIPTS), "experiments", "tests"},
    }
    light = {f"asyncsgd.{part}" for part in LIGHT.split()}
    for path in (path for room in never for path in (ROOT / room).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        room, part = name.partition(".")[0], part_of(name)
        assert room != "asyncsgd" or part is not None, f"{name} stands on no floor"
        forbidden = never[room] | ({"torch", "transformers", "datasets", "numpy"} if part in light else set())
        for imported in imports_of(path):
            assert imported.partition(".")[0] not in forbidden, f"{name} imports {imported}"
            other = part_of(imported)
            if part is not None and other is not None and other.partition(".")[0] == room:
                assert other == part or FLOOR[other] < FLOOR[part], f"{name} imports {imported}"


def test_every_public_name_can_be_loaded():
    assert all(getattr(asyncsgd, name) is not None for name in asyncsgd.__all__)


def test_help_imports_nothing_heavy():
    scripts = [str(path) for path in SCRIPTS if "\nimport torch" not in path.read_text("utf-8")]
    program = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    run = runpy.run_path if script.endswith(".py") else runpy.run_module
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        run(script, run_name="__main__")
    assert not {"torch", "transformers", "datasets", "pandas", "scipy"} & set(sys.modules), script
"""
    commands = ["analysis.compare", "analysis.report", "analysis.lab_notes"]
    subprocess.run([sys.executable, "-c", program, *scripts, *commands], check=True, cwd=ROOT)
