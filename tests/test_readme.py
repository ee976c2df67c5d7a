"""README: its first pages are typed, its example trains to its verdict, its table can be typed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doors import ROOT, cli

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL)
FIRST, NOW, STUDY, TESTS = (block for language, block in BLOCKS if language == "")
PRINTED, VERDICT = (block for language, block in BLOCKS if language == "text")
(EXAMPLE,) = (block for language, block in BLOCKS if language == "python")
IN_TABLE = [
    command
    for row in re.findall(r"^\| .* \|$", README, re.MULTILINE)
    for command in re.findall(r"`((?:python|torchrun|asyncsgd) .*?)`", row)
]


@pytest.fixture
def typed(tmp_path, gallery):
    """What a command prints, typed in a folder that has the experiments; all tests have the same cache."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(gallery / "home")}

    def run(command):
        command = re.sub(r"^asyncsgd ", "python -m asyncsgd ", command)  # an old installation lacks the script
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run


def test_the_commands_that_a_check_looks_for_are_there():
    """`.ci/run` reads them from the page."""
    assert FIRST.startswith("python -m pip install -c constraints.txt -e . && torchrun experiments/stilt_mlm.py ")
    assert TESTS.startswith("python -m pip install -c constraints.txt -e '.[test]' && python -m pytest ")
    assert README.count("\n") <= 150


@pytest.mark.parametrize("command", IN_TABLE)
def test_every_command_of_the_table_can_be_typed(command, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(EXAMPLE)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    monkeypatch.chdir(tmp_path)
    line = shlex.split(command)
    if line[0] != "asyncsgd":
        line = [line[1].removeprefix("experiments/"), *line[2:]]
    if line[-1] == "last":
        ended = cli(line)
        assert ended.code == 2
        assert "last is no folder" in ended.err or "last is not a run folder" in ended.err
    elif line[1] == "simulate":
        assert cli([*line, "--samples", "40", "--evaluations", "1"]).code == 0
    elif line[1] == "check":
        assert "no mistake was found" in cli(line).out
    else:
        assert cli([*line, "--print-config"]).code == 0


def test_the_example_trains_and_replays_without_transformers(typed, tmp_path):
    never = '    import sys\n    assert not {"transformers", "datasets"} & set(sys.modules)\n'
    short = EXAMPLE.replace("samples=5_120", "samples=256").replace("[0.03, 0.1, 0.3, 1.0, 3.0]", "[0.03]")
    (tmp_path / "mine.py").write_text(short.replace("range(6)", "range(2)") + never)
    printed = typed("python mine.py")
    assert printed.count(" DONE ") == 2 + 3 + 4
    assert printed.splitlines()[-1].startswith("Replayed(identical=True")
    run = "spirals/test/sync-w4-virtual/s1"
    assert typed(f"python -m asyncsgd replay {run} --task mine:Spirals").endswith("identical\n")


def test_without_the_guard_one_message_says_what_is_missing(tmp_path):
    code = EXAMPLE.replace('if __name__ == "__main__":', "if True:")
    clock = re.search(r"Virtual\(4.*?\)\)", code)
    (tmp_path / "bad.py").write_text(code.replace(clock.group(), "asyncsgd.Processes(2)"))
    done = subprocess.run([sys.executable, "bad.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put what it does under if __name__ == "__main__":')
    assert not (tmp_path / "spirals").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_the_first_two_commands_print_what_the_page_says_and_the_table_has_both(typed, tmp_path, gallery, monkeypatch):
    few = " --samples 320 --evaluations 2 --eval-samples 32"
    printed = typed(FIRST.strip().partition(" && ")[2] + few)
    for word in ("run    runs/stilt_mlm-async-w4-s0-", "task   masked_lm", "   samples   updates   train_s  eval_loss"):
        assert f"\n{word}" in printed
        assert f"\n{word}" in f"\n{PRINTED}"
    sync, compare = NOW.splitlines()
    monkeypatch.chdir(tmp_path)
    script = sync.removeprefix("torchrun experiments/")
    assert cli(f"{script}{few} --cache-dir {gallery / 'home' / 'asyncsgd'}").code == 0
    table = typed(compare)
    assert re.search(r"^ *async .* 1/1 ", table, re.MULTILINE)
    assert re.search(r"^ *sync .* 1/1 ", table, re.MULTILINE)


NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow
def test_the_example_comes_to_the_verdict_of_the_page(typed, tmp_path):
    (tmp_path / "mine.py").write_text(EXAMPLE)
    printed = typed("python mine.py")
    assert "Replayed(identical=True, " in printed
    for line in VERDICT.splitlines():
        assert NUMBER.sub("#", line) in NUMBER.sub("#", printed)
    # Another processor rounds otherwise, and a run may be at the target one evaluation later.
    found = re.search("Time to the target: (.*?) to ", printed)
    shown = re.search("Time to the target: (.*?) to ", VERDICT)
    assert float(found[1]) == pytest.approx(float(shown[1]), rel=0.3)
    assert (tmp_path / "spirals" / "report.html").stat().st_size > 10_000
    assert typed("python -m analysis report spirals --format sentence") in printed


@pytest.mark.slow
def test_the_study_is_planned(typed):
    sweep, report = STUDY.splitlines()
    assert "to make" in typed(f"{sweep} --dry-run")
    assert report.startswith("asyncsgd report runs/quick ")
