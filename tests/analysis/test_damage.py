"""Any damage to any file: a run that cannot be read is named with one reason and is left out by every command."""

import contextlib
import difflib
import io
import json
import re
import shutil
from importlib import import_module

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scenarios import results_of
from synthetic import SyntheticArm, planned, straight, write_plan, write_registration, write_run

from analysis.__main__ import COMMANDS

ARMS = tuple(SyntheticArm(algorithm) for algorithm in ("sync", "async"))
SEEDS = 7
VICTIM = f"test/{ARMS[1].name}/s{SEEDS}"
"""One more run, better than all others."""
UNREADABLE = [
    ("summary.json", lambda content: b""),
    ("summary.json", lambda content: b"[]"),
    ("summary.json", lambda content: b"[" * 100_000),
    ("summary.json", lambda content: content[:200]),
    ("summary.json", lambda content: content.replace(b'"schema": 2', b'"schema": 99')),
    ("summary.json", lambda content: re.sub(rb'"seed": \d+', b'"seed": "seven"', content)),
    ("summary.json", lambda content: re.sub(rb'"mode": "\w+"', b'"mode": {}', content)),
    ("events.jsonl", lambda content: content[: len(content) // 2]),
    ("events.jsonl", lambda content: content.replace(b'"loss":6.0', b'"loss":"high"')),
    ("settings.yaml", lambda content: b"{: :"),
]
"""File and what becomes of it."""
NO_STUDY = ("candidates", "speed_ladder", "timeline", "watch", "tasks")
"""Commands that read something else; `tasks` refuses a study with lost runs."""


def write(folder, arm, seed):
    if seed < SEEDS:
        end = 4.0 + 0.1 * seed + 0.05 * ARMS.index(arm)
    else:
        end = 1.0
    return write_run(
        folder, arm, straight(6.0, end, seconds=9.0 - seed % 3 - ARMS.index(arm)), seed=seed, delays=[1, 2]
    )


def study(folder, more=1):
    """A registered study with so many runs of async beyond those of sync."""
    runs = [(arm, seed) for arm in ARMS for seed in range(SEEDS)] + [(ARMS[1], SEEDS + n) for n in range(more)]
    for arm, seed in runs:
        write(folder / f"test/{arm.name}/s{seed}", arm, seed)
    write_registration(folder, num_seeds=SEEDS)
    write_plan(folder, ARMS, [planned(f"test/{arm.name}/s{seed}", "test", arm.name, seed) for arm, seed in runs])
    config = {"reference": ARMS[0].name, "margin": 0.1, "arms": {arm.name: {} for arm in ARMS}}
    (folder / "config.yaml").write_text(json.dumps({"name": "s", "models": {"m": {}}, "comparisons": {"test": config}}))
    return folder


@st.composite
def damage(draw, folder):
    """Cut, flip, double or replace a part of one file below `folder`; its path in the end."""
    victim = draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    content = victim.read_bytes()
    at = draw(st.integers(0, len(content) - 1))
    size = draw(st.integers(1, 40))
    insert = draw(st.sampled_from([b"", b"\0", b'"seven"', b"{}", b"null", content[at : at + size] * 2]))
    victim.write_bytes(content[:at] if draw(st.booleans()) else content[:at] + insert + content[at + size :])
    return str(victim.relative_to(folder))


def numbers_of(folder):
    rows = results_of(folder).tests[["endpoint", "n", "estimate", "p_holm", "word"]]
    return rows.astype(str).to_numpy().tolist()


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return study(tmp_path_factory.mktemp("sound") / "s")


def test_a_damaged_run_is_read_or_is_named_with_one_reason_and_is_in_no_number(sound, tmp_path_factory):
    (apart := tmp_path_factory.mktemp("without")).rmdir()
    shutil.copytree(sound, apart)
    shutil.rmtree(apart / VICTIM)
    without = numbers_of(apart)

    @settings(max_examples=15, deadline=None, phases=[Phase.generate])
    @given(data=st.data())
    def check(data):
        folder = shutil.copytree(sound, tmp_path_factory.mktemp("damaged") / "s")
        data.draw(damage(folder / VICTIM))
        run = results_of(folder).runs.loc[VICTIM]
        if not run["usable"]:
            assert numbers_of(folder) == without
            assert run["status"] in ("UNREADABLE", "UNFINISHED", "MISSING", "MISPLACED")
            assert run["left_out"]

    check()


@pytest.mark.slow
@settings(max_examples=15, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_a_report_ends_with_0_or_with_2_and_one_line(sound, tmp_path_factory, data):
    folder = shutil.copytree(sound, tmp_path_factory.mktemp("damaged") / "s")
    data.draw(damage(folder))
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        code = import_module("analysis.report").main([str(folder), "--format", "md"])
    told = errors.getvalue()
    assert (code, told.count("\n"), told[:7]) in ((0, 0, ""), (2, 1, "error: "))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The same good runs, without and with one unreadable run of every kind; the folders have one name."""
    both = [tmp_path_factory.mktemp(name) for name in ("good", "bad")]
    for folder, more in zip(both, (0, len(UNREADABLE)), strict=True):
        study(folder / "s", more)
        study(folder / "another", 0)
        study(folder / "third", 0)
    for number, (file, change) in enumerate(UNREADABLE):
        path = both[1] / f"s/test/{ARMS[1].name}/s{SEEDS + number}" / file
        path.write_bytes(change(path.read_bytes()))
    return both


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in NO_STUDY])
def test_a_command_names_every_unreadable_run_and_says_of_the_others_what_it_says_without_them(
    command, folders, capsys, monkeypatch
):
    said = []
    for folder in folders:
        monkeypatch.chdir(folder)
        main = import_module(f"analysis.{command}").main
        assert main({"report": ["s", "--format", "md"]}.get(command, ["s"])) == 0
        said.append("".join(capsys.readouterr()).splitlines())
    changes = [line for line in difflib.ndiff(*said) if line[0] in "+-"]
    names = {f"s{SEEDS + number}" for number in range(len(UNREADABLE))}
    told = {name for name in names for line in changes if re.search(rf"\b{name}\b", line)}
    if command in ("compare", "language_model", "parallelism"):
        assert [line for line in changes if line[0] == "-"] == []
    assert told == names


def test_a_study_with_runs_that_were_lost_is_no_task(folders, capsys, monkeypatch):
    main = import_module("analysis.tasks").main
    for folder, code in zip(folders, (0, 2), strict=True):
        monkeypatch.chdir(folder)
        assert main(["s", "another", "third"]) == code
    assert "error: s: nothing of it is confirmed, so it is no task: " in capsys.readouterr().err
