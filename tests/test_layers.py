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
run.runtimes run.found run.run
backends pipeline
simulation
run
api studies __init__
scripts __main__
"""
# asyncsgd.load, asyncsgd.compare, a study's plan and its page, and what grows a ladder's plan import the analysis when
# they are called.
DOORS = {
    ("asyncsgd.api", "analysis.load"),
    ("asyncsgd.studies.ladder_texts", "analysis.ladder"),
    ("asyncsgd.scripts.study", "analysis.load"),
    ("asyncsgd.scripts.study", "analysis.stats"),
}
JUDGING = """
stats questions runs
curves meanings
gate
places
run_files pairs
read
scores answers
judge
verdict trust
tables
gallery page
load
report
"""
FLOOR = {}
for package, floors in (("asyncsgd", FLOORS), ("analysis", JUDGING)):
    for floor, parts in enumerate(floors.strip().split("\n")):
        for part in parts.split():
            FLOOR[f"{package}.{part}"] = floor


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
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if is_module(name) else node.module


def floor_of(name):
    """That of the longest listed name which it has or lies in; None of a name that is not listed."""
    while name not in FLOOR:
        name, _, last = name.rpartition(".")
        if not last:
            return None
    return FLOOR[name]


def modules_of(*rooms):
    """(path, name) of every module; `asyncsgd.run.__init__` of a package."""
    for room in rooms:
        for path in (ROOT / room).rglob("*.py"):
            yield path, ".".join(path.relative_to(ROOT).with_suffix("").parts)


def test_every_module_imports_only_what_its_room_and_its_floor_may():
    never = {"asyncsgd": {"analysis", "experiments", "tests"}, "analysis": {"torch", "transformers", "tests"}}
    for path, name in modules_of(*never):
        room, _, _ = name.partition(".")
        floor = floor_of(name)
        assert room != "asyncsgd" or floor is not None, f"{name} stands on no floor"
        plugs_in = name == "asyncsgd.tasks.masked_lm" or name.startswith("asyncsgd.domain_masking")
        for imported in imports_of(path, of_types=False):
            other_room, _, _ = imported.partition(".")
            if other_room in never[room]:
                assert (name, imported) in DOORS, f"{name} imports {imported}"
            other_floor = floor_of(imported)
            if other_room == room and floor is not None and other_floor is not None:
                assert other_floor <= floor, f"{name} imports {imported}"
            if not plugs_in:
                assert not imported.startswith("asyncsgd.domain_masking"), f"{name} imports {imported}, a plug-in"


def test_no_imports_go_in_a_circle():
    """Those within functions count too; those for types alone do not."""
    graph = {}
    for path, module in modules_of("asyncsgd", "analysis"):
        name = module.removesuffix(".__init__")
        graph[name] = set(imports_of(path, of_types=False)) - {name}
    while leaves := {name for name, imported in graph.items() if not imported & graph.keys()}:
        graph = {name: imported for name, imported in graph.items() if name not in leaves}
    assert {name: sorted(imported & graph.keys()) for name, imported in graph.items()} == {}


def test_only_doors_imports_the_library_and_only_public_names_but_for_a_list_that_may_only_shrink():
    tests = ROOT / "tests"
    library = {"asyncsgd", "analysis"}
    listed = set((tests / "inner_tests.txt").read_text("utf-8").split())
    inside = set()
    for path in tests.rglob("*.py"):
        rooms = {name.partition(".")[0] for name in imports_of(path)}
        if path.name != "doors.py" and not library.isdisjoint(rooms):
            inside.add(path.relative_to(tests).as_posix())
    assert inside - listed == set(), "import names from doors instead"
    assert listed - inside == set(), "these know only doors now, so take them off tests/inner_tests.txt"
    public = {"asyncsgd", "asyncsgd.*", "asyncsgd.rules", "asyncsgd.tasks"}
    public.update(f"asyncsgd.{name}" for name in asyncsgd.__all__)
    for name in imports_of(tests / "doors.py"):
        if name.partition(".")[0] in library:
            assert name in public


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
    asking = []
    for path in (ROOT / "asyncsgd").rglob("*.py"):
        times = path.read_text("utf-8").count("backend.next(")
        asking += [path.name] * times
    assert asking == ["loop.py"]
