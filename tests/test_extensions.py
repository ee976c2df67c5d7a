"""Rules, tasks, trackers, masks and finders that installed packages bring: the packages of docs/extensions.md are used
from the command line, and what is wrong with a package is said when it is asked for."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from doors import ROOT, Finished, cli
from gallery import write_texts

PAGE = (ROOT / "docs" / "extensions.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
KINDS = {
    "every_nth": ("rules", "EveryNth"),
    "straight_line": ("tasks", "StraightLine"),
    "points_file": ("trackers", "PointsFile"),
    "every_step": ("masks", "EveryStep"),
    "long_words": ("finders", "LongWords"),
}
TRAIN = "asyncsgd train straight_line --slope 2 --rule every_nth:n=3 --device cpu"


def install(folder, package, kind, name, value, source=""):
    """Install a package as pip does: a module, and a folder that says of its entry points."""
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[asyncsgd.{kind}]\n{name} = {value}\n")
    if source:
        (folder / f"{value.partition(':')[0]}.py").write_text(source)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """An empty folder of installed packages, which commands look into; they run beside it."""
    folder = tmp_path / "site"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")
    return folder


@pytest.fixture
def packages(site):
    """The five packages of the page, installed."""
    for name, (kind, class_name) in KINDS.items():
        install(site, name.replace("_", "-"), kind, name, f"{name}:{class_name}", FILES[name])
    return site


def typed(line):
    """What a command says, in a process of its own, which has looked for packages itself."""
    ended = cli(line, alone=True)
    assert ended.code == 0, ended.err
    return ended.out


def texts(*lines):
    """What commands of asyncsgd say: what is printed of those that succeed, the one line of those that are refused."""
    for line in lines:
        code, out, err = cli(f"asyncsgd {line}", alone=True)
        assert (code, err.count("\n")) in ((0, 0), (2, 1)), err
        yield out if code == 0 else err.rstrip("\n")


def test_the_page_shows_all_of_a_package():
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    project = tomllib.loads(toml)["project"]
    assert project["entry-points"] == {"asyncsgd.rules": {"every_nth": "every_nth:EveryNth"}}
    assert FILES.keys() == KINDS.keys()
    for name, (kind, class_name) in KINDS.items():
        assert f"| `asyncsgd.{kind}` |" in PAGE
        assert f'{name} = "{name}:{class_name}"' in PAGE


def test_a_rule_a_task_and_a_tracker_of_packages_train_in_real_processes_and_are_replayed(packages):
    typed(f"{TRAIN} --nproc 2 --samples 300 --track points_file:digits=3 --evaluations 2")
    (run,) = map(Finished, Path("runs").iterdir())
    assert run.settings["task"] == "straight_line"
    assert run.settings["slope"] == 2.0
    assert run.settings["rule"] == "every_nth:n=3"
    arrivals = run.records("arrival")
    assert [record["outcome"] for record in arrivals] == [
        "applied" if number % 3 == 0 else "dropped" for number in range(1, len(arrivals) + 1)
    ]
    *points, status = (run.path / "points.txt").read_text().splitlines()
    assert status == "DONE"
    assert points
    for point in points:
        assert re.fullmatch(r"\d+ \d+\.\d{3}", point)
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["extensions"] == {
        "rule every_nth": "every-nth 1.0",
        "task straight_line": "straight-line 1.0",
        "tracker points_file": "points-file 1.0",
    }
    assert typed("asyncsgd replay last").endswith("identical\n")


def test_a_mask_and_a_finder_of_packages_choose_what_is_predicted(packages, tmp_path):
    write_texts(tmp_path)
    data = f"--data {tmp_path}/train.txt --eval-data {tmp_path}/eval.txt --vocab-size 512 --cache-dir {tmp_path}/cache"
    typed(f"mask_candidates.py {data} --finder long_words:least=6 --out found --processes 2")
    manifest = json.loads(Path("found/manifest.json").read_text())
    assert manifest["finder_key"] == r"pattern \w{6,}"
    terms = [term for term, _ in manifest["statistics"]["top_terms"]]
    assert min(map(len, terms)) == 6
    few = "--samples 16 --batch-size 4 --seq-len 32 --blocks --evaluations 1 --device cpu --candidates found"
    typed(f"asyncsgd train masked_lm {data} {few} --mask every_step:step=5")
    (run,) = map(Finished, Path("runs").iterdir())
    assert run.settings["mask"] == "every_step:step=5"
    # A block has 30 tokens beside two special ones: 6 of a sample, 24 of a batch.
    assert [record["weight"] for record in run.records("arrival")] == [24.0] * 4


def test_what_packages_bring_is_listed_without_being_imported(site):
    for name, (kind, class_name) in KINDS.items():
        install(site, name.replace("_", "-"), kind, name, f"{name}:{class_name}", "raise RuntimeError('too early')")
    train, flags, rules = texts("train --help", "train masked_lm --help", "train masked_lm --rule help")
    assert "question_answering, straight_line, or MODULE:CLASS" in train
    assert "{token,word,candidates,every_step}" in flags
    assert "trackio,points_file}" in flags
    assert re.search(r"  every_nth +not to be had: the rule 'every_nth' of the package every-nth 1.0", rules)
    assert re.search(r"  asynchronous +Apply every gradient", rules)
    completion = cli("asyncsgd completion bash", alone=True).out
    assert re.search(r'"train "\) found="masked_lm .* straight_line"', completion)
    assert re.search(r'"train masked_lm "\*\) found=".*--mask ', completion)


def test_help_on_names_explains_those_of_packages(packages):
    rules, masks, trackers, flags = texts(
        *(f"train masked_lm --{flag} help" for flag in ("rule", "mask", "track")), "train straight_line --help"
    )
    assert re.search(r"  every_nth +Apply every n-th gradient, .* \[n=2\]", rules)
    assert re.search(r"  every_step +Every step-th .* \[step=7\]", masks)
    assert re.search(r"  points_file +Writes .* \[digits=6\]", trackers)
    assert re.search(r"--slope X +\(default: 3.0\)", flags)
    assert re.search(r"  long_words +Words of .* \[least=8\]", typed("mask_candidates.py --finder help"))


def test_what_is_wrong_with_a_package_is_one_sentence_when_it_is_asked_for(site):
    install(site, "gone", "tasks", "gone", "gone_module:Task")
    install(site, "odd", "tasks", "odd", "odd:Odd", "class Odd: pass")
    install(site, "misnamed", "tasks", "other", "misnamed:StraightLine", FILES["straight_line"])
    install(site, "first", "tasks", "twice", "first:Twice")
    install(site, "second", "tasks", "twice", "second:Twice")
    install(site, "taker", "tasks", "causal_lm", "taker:CausalLM")
    names = ("gone", "odd", "other", "causal_lm", "twice")
    *said, twice, good = texts(*(f"train {name} --samples 1" for name in names), "train masked_lm --help")
    assert said == [
        "error: the task 'gone' of the package gone 1.0, gone_module:Task, cannot be imported "
        "(ModuleNotFoundError: No module named 'gone_module'); update or uninstall the package",
        "error: the task 'odd' of the package odd 1.0, odd:Odd, is no dataclass derived from asyncsgd.tasks.base.Task",
        "error: the task 'other' of the package misnamed 1.0, misnamed:StraightLine, calls itself 'straight_line'; a "
        "class and its entry point must have one name",
        "error: the task 'causal_lm' is brought by asyncsgd itself and by taker 1.0; uninstall taker 1.0, or give its "
        "entry point another name",
    ]
    assert re.search(r"is brought by (first 1.0 and by second|second 1.0 and by first) 1.0; uninstall", twice)
    assert "--mask-prob" in good


def test_what_a_rule_of_a_package_cannot_be_is_said(site):
    nth = FILES["every_nth"]
    install(site, "maybe", "rules", "every_nth", "maybe:EveryNth", re.sub(r"n: int", "n: int | None", nth))
    peers = "import asyncsgd.rules.contract as c\nclass Ring(c.PeerRule):\n    name = 'ring'\n    summary = 'a ring'\n"
    install(site, "ring", "rules", "ring", "ring:Ring", peers)
    (site / "dangling-1.0.dist-info").mkdir()
    (site / "dangling-1.0.dist-info" / "entry_points.txt").symlink_to("nowhere")
    typed, ring = texts(*(f"simulate --rule {rule} --samples 9" for rule in ("every_nth:n=2", "ring")))
    assert "parameter n has a type that cannot be typed; give the field of EveryNth one of the types" in typed
    assert "rule ring has no server, and a package can bring no such rule: there are ad_psgd, sgp" in ring


WRONG_PARAMETERS = {
    "--rule every_nth:m=3": "rule 'every_nth' has no parameter 'm'; it takes n",
    "--mask every_step:step=x": "mask parameter step='x' is not a whole number",
    "--track points_file:digit=3": "tracker 'points_file' has no parameter 'digit'",
    "--track wandb:x=3": "tracker 'wandb' takes no parameters; type --track wandb",
    "--tech true --candidates c --mask every_step": "--tech is a masking of its own, got --mask every_step",
    "--mask word:x=3": "--mask word takes no parameters, got word:x=3",
}


def test_a_parameter_that_there_is_not_is_refused(packages):
    said = texts(*(f"train masked_lm {flags}" for flags in WRONG_PARAMETERS))
    for error, sentence in zip(said, WRONG_PARAMETERS.values(), strict=True):
        assert sentence in error


def test_a_name_whose_package_is_not_installed_is_said(packages):
    typed(f"{TRAIN} --clock virtual --nproc 2 --samples 60")
    for path in packages.glob("*.dist-info"):
        (path / "entry_points.txt").unlink()
    run, rule, task, mask, tracker = texts(
        "replay last",
        "replay last --task straight_line:StraightLine",
        "train straight_line",
        "train masked_lm --mask every_step",
        "train masked_lm --track points_file",
    )
    assert run == (
        "error: the run's task is straight_line, which is no task of this library or of a package that is installed "
        "here; install the package that straight_line came with, see environment.json of the run"
    )
    assert "if every_nth came with a package, install that package" in rule
    assert "if it came with a package, install that package" in task
    assert "if every_step came with a package, install that package" in mask
    assert "if it came with a package, install that package" in tracker


@pytest.mark.slow
@pytest.mark.processes
def test_names_of_packages_work_in_studies_ranks_and_every_command_on_a_run(packages):
    base = {"clock": "virtual", "nproc": 2, "samples": 200, "evaluations": 2, "slope": 2.0, "device": "cpu"}
    algorithms = {"third": {"mode": "async", "rule": "every_nth:n=3"}, "all": {"mode": "async"}}
    config = {"name": "few", "task": "straight_line", "base": base, "algorithms": algorithms, "seeds": [0, 1]}
    Path("few.yaml").write_text(json.dumps(config))
    typed("asyncsgd study few.yaml --track points_file")
    rules = []
    for path in Path("runs/few").rglob("settings.yaml"):
        rules.append(yaml.safe_load(path.read_text())["rule"])
    assert sorted(rules) == ["asynchronous"] * 2 + ["every_nth:n=3"] * 2

    typed(f"{TRAIN} --nproc 2 --samples 300 --checkpoint-every 100 --run-dir runs/one")
    resume = "asyncsgd resume runs/one --samples 500"
    ranks = f"torch.distributed.run --standalone --nproc-per-node 2 -m {TRAIN}"
    for line in (resume, ranks):
        done = subprocess.run([sys.executable, "-m", *line.split()], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    for command in ("replay runs/one", "predict runs/one", "export runs/one --out out"):
        typed(f"asyncsgd {command}")
