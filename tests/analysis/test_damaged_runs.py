"""Of 80 runs 20 are damaged, each in another way: every command names them and says of the others what it says without
them.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from synthetic import SyntheticArm, planned, straight, write_plan, write_registration, write_run

import timeline
from analysis import watch
from analysis.__main__ import COMMANDS
from analysis.study.read import load_study
from analysis.study.run import load_runs

ARMS = tuple(SyntheticArm(algorithm, workers) for algorithm in ("sync", "async") for workers in (2, 4))
NUM_SEEDS = 15
DAMAGED_SEEDS = 100
"""Damaged runs have seeds from here on, and better numbers than all others."""
DEEP = "[" * 100_000


def write(folder: Path, arm: SyntheticArm, seed: int) -> Path:
    worse = 0.05 * ARMS.index(arm) + 0.1 * (seed * 7 % 15)
    delays = [0, arm.num_workers] * 20
    if seed >= DAMAGED_SEEDS:
        return write_run(folder, arm, straight(8.0, 1.0, seconds=1.0), seed=seed, delays=delays)
    seconds = 60.0 / (1 + ARMS.index(arm)) + worse
    return write_run(folder, arm, straight(8.0, 4.0 + worse, seconds=seconds), seed=seed, delays=delays)


def edited(**changes: Any) -> Callable[[Path], object]:
    def edit(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def with_line(number: int, text: Callable[[str], str]) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:number], text(lines[number]), *lines[number + 1 :]]) + "\n")

    return change


DAMAGE: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no summary": ("summary.json", Path.unlink),
    "an empty summary": ("summary.json", lambda path: path.write_text("")),
    "half a summary": ("summary.json", lambda path: path.write_bytes(path.read_bytes()[:200])),
    "a deep summary": ("summary.json", lambda path: path.write_text(DEEP)),
    "a summary that is a list": ("summary.json", lambda path: path.write_text("[]")),
    "a summary in Latin-1": ("summary.json", lambda path: path.write_bytes(b'{"status": "\xfc"}')),
    "a folder for a summary": ("summary.json", a_folder),
    "no status": ("summary.json", edited(status=None)),
    "a later schema": ("summary.json", edited(schema=99)),
    "a mode of keys": ("summary.json", edited(mode={})),
    "a rule of lists": ("summary.json", edited(rule=[[1]])),
    "a seed in words": ("summary.json", edited(seed="seven")),
    "a loss in words": ("summary.json", edited(final_eval_loss="low")),
    "a list of metrics": ("summary.json", edited(metrics=[1])),
    "half the records": ("events.jsonl", lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])),
    "no records": ("events.jsonl", lambda path: path.write_text("")),
    "a damaged record": ("events.jsonl", with_line(9, lambda line: line[:20] + "\0")),
    "a record with a loss in words": ("events.jsonl", with_line(1, lambda line: line.replace("8.0", '"high"'))),
    "settings that are not YAML": ("settings.yaml", lambda path: path.write_text("{: :")),
    "a rate of keys": (
        "settings.yaml",
        lambda path: path.write_text(re.sub("learning_rate: .*", "learning_rate: {a: 1}", path.read_text())),
    ),
}

CONFIG = {
    "name": "damaged",
    "models": {"tiny": {}},
    "comparisons": {"w": {"reference": ARMS[0].name, "margin": 0.1, "arms": {arm.name: {} for arm in ARMS}}},
}


def runs_of(folder: Path, *, num_damaged: int) -> Path:
    """A folder as ``experiments/language_model.py`` leaves it, which every command reads that takes folders of runs."""
    folder.mkdir()
    (folder / "config.yaml").write_text(json.dumps(CONFIG))
    for arm in ARMS:
        for seed in range(NUM_SEEDS):
            write(folder / "w" / "tiny" / arm.name / f"s{seed}", arm, seed)
    for number, (file, damage) in enumerate([*DAMAGE.values()][:num_damaged]):
        arm, seed = ARMS[number % len(ARMS)], DAMAGED_SEEDS + number
        damage(write(folder / "w" / "tiny" / arm.name / f"s{seed}", arm, seed) / file)
    return folder


def studies_of(folder: Path, *, num_damaged: int) -> list[Path]:
    """Three registered studies of 20 good runs each, with a third of the damaged ones."""
    folders = [folder / f"task{number}" for number in range(3)]
    arms = ARMS[1], ARMS[3]
    for number, study in enumerate(folders):
        kinds = [*DAMAGE.values()][number:num_damaged:3]
        runs = [(arm, seed) for arm in arms for seed in range(10)]
        damaged = [(arms[place % 2], DAMAGED_SEEDS + place) for place in range(len(kinds))]
        paths = {(arm.name, seed): write(study / f"test/{arm.name}/s{seed}", arm, seed) for arm, seed in runs + damaged}
        for (arm, seed), (file, damage) in zip(damaged, kinds, strict=True):
            damage(paths[arm.name, seed] / file)
        write_registration(study, num_seeds=10)
        every = [planned(f"test/{arm.name}/s{seed}", "test", arm.name, seed) for arm, seed in runs + damaged]
        write_plan(study, arms, every)
    return folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same 60 good runs, without and with 20 damaged ones; the folders have one name."""
    root = tmp_path_factory.mktemp("damaged")
    for name, number in (("without", 0), ("with", len(DAMAGE))):
        (root / name).mkdir()
        runs_of(root / name / "runs", num_damaged=number)
        studies_of(root / name, num_damaged=number)
    return root / "without", root / "with"


def test_there_are_sixty_good_runs_and_twenty_damaged_ones(folders: tuple[Path, Path]) -> None:
    good, _ = load_runs(folders[0] / "runs")
    every, messages = load_runs(folders[1] / "runs")
    damaged = [run for run in every if not run.done]
    assert (len(good), len(every), len(damaged)) == (60, 80, 20)
    whole, among_damaged = (
        [run.summary | {"parameters_sha256": None} for run in runs if run.done] for runs in (good, every)
    )
    assert among_damaged == whole  # the hashes are made from the paths
    assert {message.partition(":")[0] for message in messages} == {run.name for run in damaged}


READ_NO_RUNS = {"candidates", "speed_ladder"}
OF_FOLDERS: dict[str, list[str]] = {
    "compare": ["runs", "--out", "pictures"],
    "report": ["runs", "--format", "md"],
    "tasks": ["task0", "task1", "task2"],
    "language_model": ["runs"],
    "parallelism": ["runs"],
    "lab_notes": ["runs"],
}
"""What is typed after each command that reads folders of runs."""
DAMAGED_NAME = re.compile(r"/s1\d\d\b")
HEADINGS = ("", "not in the means:", "set aside:", "problems:", "in no number:")


def test_every_command_that_reads_runs_is_tried() -> None:
    assert {*OF_FOLDERS, *READ_NO_RUNS, "watch"} == {*COMMANDS}


@pytest.mark.parametrize("command", OF_FOLDERS)
def test_a_command_names_every_damaged_run_and_says_of_the_others_what_it_says_without_them(
    command: str, folders: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    for folder in folders:
        monkeypatch.chdir(folder)
        main = import_module(f"analysis.{command}" + ".__main__" * (command == "report")).main
        assert main(OF_FOLDERS[command]) == 0
        said.append("".join(capsys.readouterr()).splitlines())
    changes = [line for line in difflib.ndiff(*said) if line[0] in "+-"]
    assert [line for line in changes if line[2:] not in HEADINGS and not DAMAGED_NAME.search(line)] == []
    assert [line for line in changes if line[0] == "-"] == []
    if command != "tasks":  # it prints scores, and the report of each study names its runs
        assert len({match[0] for line in changes for match in DAMAGED_NAME.finditer(line)}) == len(DAMAGE)


@pytest.mark.parametrize("number", range(3))
def test_a_planned_study_uses_every_good_run_and_names_the_damaged_ones(
    number: int, folders: tuple[Path, Path]
) -> None:
    without, with_damaged = (load_study(folder / f"task{number}") for folder in folders)
    usable = [run for run in with_damaged.runs if run.usable]
    assert [run.name for run in usable] == [run.name for run in without.runs]
    assert [arm.speeds for arm in with_damaged.arms] == [arm.speeds for arm in without.arms]
    lost = {run.name: run.unusable_because for run in with_damaged.runs if not run.usable}
    assert len(lost) == len(range(number, len(DAMAGE), 3))
    assert all(reason.startswith(("UNREADABLE: ", "UNFINISHED: ")) for reason in lost.values())
    assert {problem.partition(":")[0] for problem in with_damaged.problems} == {*lost}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_run_is_watched_and_drawn_or_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, damage = DAMAGE[name]
    run = write(tmp_path / "run", ARMS[0], 0)
    damage(run / file)
    commands = [[watch.main, "--once"], *[[timeline.main]] * (file == "events.jsonl")]
    for main, *flags in commands:
        code = main([str(run), *flags])
        told = capsys.readouterr().err
        assert (code, told.count("\n"), told[:7]) in ((0, 0, ""), (2, 1, "error: "))


@pytest.mark.parametrize("file", ["summary.json", "environment.json", "events.jsonl", "settings.yaml", "usage.jsonl"])
def test_a_file_that_is_nested_too_deeply_is_told_and_hides_no_other_run(file: str, tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / f"s{seed}", ARMS[0], seed)
    (tmp_path / "s0" / file).write_text(DEEP + "\n")
    runs, _ = load_runs(tmp_path)
    assert len([run for run in runs if run.done and not run.problems]) >= 2
    assert load_study(tmp_path).runs
