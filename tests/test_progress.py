"""What a study shows of itself while it goes on: how many runs are done, and how long the others will take."""

import importlib
import io
import re
import sys

import pytest
import yaml
from doors import cli

progress = importlib.import_module("asyncsgd.studies.progress")
SLOW = progress.RunKind("test", "slow", measures=True)
QUICK = progress.RunKind("test", "quick")
OTHER = progress.RunKind("finetune", "quick")


class Terminal(io.StringIO):
    """Standard output as a terminal."""

    def isatty(self):
        return True


class Clock:
    """A clock that stands still until it is set."""

    now = 0.0

    def __call__(self):
        return self.now


def shown_on_a_terminal(text):
    """The lines that stand there at last: what was written over is gone."""
    return [line.split(progress.CLEAR)[-1] for line in text.split("\n")]


def test_the_time_left_is_that_of_runs_of_the_same_arm_and_those_without_a_clock_share_the_cores():
    shown = progress.Progress([SLOW, SLOW, QUICK, QUICK, QUICK, OTHER], total=8, side_by_side=2)
    assert shown.seconds_left() is None
    shown.ended(SLOW, 10.0, has_result=True)
    assert shown.seconds_left() == 10.0 + 4 * 10.0 / 2  # of the other arm and stage nothing is known yet
    shown.ended(QUICK, 2.0, has_result=True)
    assert shown.seconds_left() == 10.0 + (2.0 + 2.0 + 6.0) / 2
    shown.ended(QUICK, 100.0, has_result=False)  # one that failed says nothing of the others
    assert shown.seconds_left() == 10.0 + (2.0 + 6.0) / 2


def test_a_terminal_has_one_line_that_is_rewritten(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    shown = progress.Progress([QUICK] * 3, total=4)
    for number in (1, 2, 3):
        shown.clear()
        print(f"run {number}")
        shown.ended(QUICK, 2.0, has_result=True)
    assert shown_on_a_terminal(sys.stdout.getvalue()) == ["run 1", "run 2", "run 3", ""]
    assert "3 of 4 runs are done, about 2 s left" in sys.stdout.getvalue()
    assert not shown_on_a_terminal(sys.stdout.getvalue())[-1]


def test_elsewhere_a_plain_line_comes_at_most_every_30_seconds(capsys):
    clock = Clock()
    shown = progress.Progress([QUICK] * 100, total=100, clock=clock)
    for second in range(1, 91):
        clock.now = float(second)
        shown.ended(QUICK, 1.0, has_result=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{done} of 100 runs are done, about {100 - done} s left" for done in (30, 60, 90)]


@pytest.mark.parametrize("is_shard", [False, True])
def test_a_study_counts_the_runs_that_are_its_own_and_those_that_were_there(is_shard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    config = {
        "name": "few",
        "task": "tasks:Plane",
        "base": {"samples": 16, "evaluations": 1, "device": "cpu"},
        "algorithms": {"one": {"mode": "async"}},
        "conditions": {"nproc": 2, "clock": "virtual"},
        "seeds": [0, 1, 2, 3],
    }
    (tmp_path / "few.yaml").write_text(yaml.safe_dump(config))
    shard = " --shard 1/2" if is_shard else ""
    ended = cli(f"asyncsgd study few.yaml --jobs 1{shard}")
    assert ended.code == 0, ended.err
    counts = re.findall(r"^(\d) of (\d) runs are done, about \d+ s left$", ended.out, re.MULTILINE)
    assert counts == ([("1", "2")] if is_shard else [("1", "4"), ("2", "4"), ("3", "4")])
    assert "runs are done" not in cli(f"asyncsgd study few.yaml --jobs 1{shard}").out
