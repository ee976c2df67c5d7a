"""Who may import whom, read from the sources; that `--help` is quick; and that tests know only doors."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from doors import asyncsgd

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = [path for path in (ROOT / "experiments").glob("*.py") if "__main__" in path.read_text("utf-8")]
# From bottom to top: a room imports rooms of its own floor and of lower ones. A file that is named has its own floor.
FLOORS = """
errors settings.numbers
extensions
settings.choices
torchrun records
settings
simulation.speeds simulation.churn
rules
core
data
tasks domain_masking simulation.problems simulation.instance
worker
run.runtimes run.run
backends pipeline
simulation
run
api studies __init__
scripts __main__
"""
# asyncsgd.load, asyncsgd.compare, a study's plan and its page import the analysis when they are called.
DOORS = {
    ("asyncsgd.api", "analysis.load"),
    ("asyncsgd.scripts.study", "analysis.load"),
    ("asyncsgd.scripts.study", "analysis.stats"),
}
FLOOR = {f"asyncsgd.{part}": floor for floor, parts in enumerate(FLOORS.strip().split("\n")) for part in parts.split()}
JUDGING = """
stats questions runs
curves gate
places
read pairs
scores
judge
verdict trust
tables
gallery page
load
report
"""
FLOOR |= {
    f"analysis.{part}": floor for floor, parts in enumerate(JUDGING.strip().split("\n")) for part in parts.split()
}


def is_module(name):
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def imports_of(path, of_types=True):
    """The names that a file imports, of modules where they are modules: `asyncsgd.run.runtimes` of `asyncsgd.run`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not of_types:
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "asyncsgd":
            yield from (f"asyncsgd.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            below = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from (name if is_module(name) else node.module for name in below)


def floor_of(name):
    return FLOOR.get(max((part for part in FLOOR if f"{name}.".startswith(f"{part}.")), key=len, default=None))


def test_every_module_imports_only_what_its_room_and_its_floor_may():
    never = {"asyncsgd": {"analysis", "experiments", "tests"}, "analysis": {"torch", "transformers", "tests"}}
    for path in (path for room in never for path in (ROOT / room).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        room = name.partition(".")[0]
        floor = floor_of(name)
        assert room != "asyncsgd" or floor is not None, f"{name} stands on no floor"
        for imported in imports_of(path, of_types=False):
            first = imported.partition(".")[0]
            other = floor_of(imported)
            assert first not in never[room] or (name, imported) in DOORS, f"{name} imports {imported}"
            assert first != room or None in (floor, other) or other <= floor, f"{name} imports {imported}"
            plugs_in = name == "asyncsgd.tasks.masked_lm" or name.startswith("asyncsgd.domain_masking")
            is_plug_in = imported.startswith("asyncsgd.domain_masking")
            assert plugs_in or not is_plug_in, f"{name} imports {imported}, a plug-in"


def test_no_imports_go_in_a_circle():
    """Those within functions count too; those for types alone do not."""
    graph = {}
    for path in (path for room in ("asyncsgd", "analysis") for path in (ROOT / room).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = set(imports_of(path, of_types=False)) - {name}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert {name: sorted(imported & graph.keys()) for name, imported in graph.items()} == {}


def test_only_doors_imports_the_library_and_only_public_names_but_for_a_list_that_may_only_shrink():
    tests = ROOT / "tests"
    library = {"asyncsgd", "analysis"}
    listed = set((tests / "inner_tests.txt").read_text("utf-8").split())
    inside = {
        path.relative_to(tests).as_posix()
        for path in tests.rglob("*.py")
        if path.name != "doors.py" and any(name.partition(".")[0] in library for name in imports_of(path))
    }
    assert inside - listed == set(), "import names from doors instead"
    assert listed - inside == set(), "these know only doors now, so take them off tests/inner_tests.txt"
    public = {"asyncsgd", *(f"asyncsgd.{name}" for name in ["*", "rules", "tasks", *asyncsgd.__all__])}
    assert {name for name in imports_of(tests / "doors.py") if name.partition(".")[0] in library} <= public


def test_no_test_module_is_imported_by_another_one():
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [name for name in imports_of(path) if ".test_" in f".{name}"], f"{path}: put it into a helper"


def test_help_imports_nothing_heavy():
    scripts = [str(path) for path in SCRIPTS if "\nimport torch" not in path.read_text("utf-8")]
    program = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv, sys.path[0] = [script, "--help"], script.rpartition("/")[0]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        (runpy.run_path if script.endswith(".py") else runpy.run_module)(script, run_name="__main__")
    assert not {"torch", "transformers", "datasets", "pandas", "scipy"} & set(sys.modules), script
"""
    commands = ["asyncsgd", "analysis.compare", "analysis.report", "analysis.lab_notes"]
    subprocess.run([sys.executable, "-c", program, *scripts, *commands], check=True, cwd=ROOT)


OF_TASKS = [f"train {task} {typed}" for task in asyncsgd.tasks.TASKS for typed in ("--help", "--modee async")]
OF_TASKS.append("train classification --labels multi --score f1")


@pytest.mark.parametrize("line", ["--help", "train --help", "trian", "train --hepl", *OF_TASKS])
def test_help_and_a_mistake_at_the_door_wait_for_no_package(line):
    program = "\n".join(
        [
            "import contextlib, io, sys",
            "from asyncsgd.__main__ import main",
            "printed = io.StringIO()",
            "with contextlib.suppress(SystemExit):",
            "    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):",
            "        main(sys.argv[1:])",
            "text = printed.getvalue()",
            "assert ('error: ' in text) if '--help' not in sys.argv else ('_lm' in text or '--seq-len' in text)",
            "heavy = {'torch', 'transformers', 'numpy', 'msgspec', 'psutil', 'yaml', 'importlib.metadata', '_hashlib'}",
            "assert not heavy & set(sys.modules)",
        ]
    )
    subprocess.run([sys.executable, "-c", program, *line.split()], check=True, cwd=ROOT)


def test_one_function_asks_a_backend_what_comes_next():
    """Gossip and streaming have no backend yet."""
    sources = {}
    for path in (ROOT / "asyncsgd").rglob("*.py"):
        sources[path.name] = path.read_text("utf-8")
    asking = {name: count for name, text in sources.items() if (count := text.count("backend.next("))}
    assert asking == {"loop.py": 1}
