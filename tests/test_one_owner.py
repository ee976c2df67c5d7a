"""A run folder has one owner while its process lives, and a killed owner loses at most a second of records."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncsgd.errors import UsageError
from asyncsgd.records.events import Evaluation, Event
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.scripts.run_folder import open_run_folder, set_aside
from asyncsgd.study.arms import FLAGS

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"

OWNER = """
import sys, time
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.study.arms import FLAGS
folder = open_run_folder("tests", FLAGS.make({"run_dir": sys.argv[1]}), "python first.py")
print("ready", flush=True)
time.sleep(600)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start():
    """Start a program in a process of its own, which has printed its first line; killed at the end of the test."""
    started = []

    def run(program, *arguments):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def files_below(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def event(dispatch):
    batches, uses = ((0, dispatch, dispatch + 1),), ((dispatch, 0),)
    return Event(
        dispatch, 0, batches, dispatch, dispatch + 1, 0, "applied", uses, (), (), (), 1.0, 1.0, 1, 0.1, 0.0, 1
    )  # fmt: skip


@pytest.mark.parametrize("values", [{}, {"seed": 1}, {"overwrite": True}])
def test_a_second_run_is_refused_while_the_first_lives_and_changes_nothing(values, start, tmp_path):
    path = tmp_path / "run"
    first = start(OWNER, path)
    before = files_below(tmp_path)
    settings = FLAGS.make({"run_dir": str(path)} | values)
    with pytest.raises(UsageError, match=f"^another run is at work in {path}; wait for it, or stop it, or name"):
        open_run_folder("tests", settings, "python second.py")
    with pytest.raises(UsageError, match="another run is at work"):
        set_aside(path)
    assert files_below(tmp_path) == before
    kill(first)
    open_run_folder("tests", settings, "python second.py").close()
    assert (path / "settings.yaml").read_text().startswith("# python second.py")
    assert (tmp_path / "run.before-1" / "settings.yaml").read_text().startswith("# python first.py")


def test_a_folder_is_free_once_its_run_has_closed_it(tmp_path):
    settings = FLAGS.make({"run_dir": str(tmp_path / "run")})
    for _ in range(2):
        open_run_folder("tests", settings, "tests").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.before-1"]


EVALUATION = Evaluation(0, 0, 0.0, 2.0, 10.0, {}, 0.1)


def leave(path, *records, **summary):
    """A run folder as it is left behind, with settings that no new command has."""
    folder = open_run_folder("tests", FLAGS.make({"run_dir": str(path), "seed": 77}), "python typo.py")
    for record in records:
        folder.append(record)
    if summary:
        folder.write_summary(summary)
    folder.close()


@pytest.mark.parametrize("status", [None, "FAILED", "INTERRUPTED"])
def test_a_folder_whose_run_has_not_trained_gives_way_to_a_corrected_command(status, tmp_path):
    path = tmp_path / "run"
    leave(path, EVALUATION, **({"status": status} if status else {}))
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "notes.json").write_text("{}")  # not ours, so there is nothing to go on from
    open_run_folder("tests", FLAGS.make({"run_dir": str(path)}), "tests").close()
    assert "seed: 77" not in (path / "settings.yaml").read_text()
    assert FLAGS.load_yaml(tmp_path / "run.before-1" / "settings.yaml")["seed"] == 77  # nothing is lost


@pytest.mark.parametrize(
    ("records", "summary"),
    [
        ((EVALUATION, event(0)), {}),
        ((event(0),), {"status": "FAILED"}),
        ((Evaluation(4, 16, 1.0, 2.0, None, {}, 0.1),), {}),  # of fine-tuning, which writes no arrivals
        ((EVALUATION,), {"status": "INTERRUPTED", "num_updates": 3}),  # as fine-tuning leaves it between evaluations
        ((EVALUATION,), {"status": "DONE"}),
        ((), {"status": "DIVERGED"}),
    ],
)
def test_a_folder_with_something_measured_is_refused_to_other_settings(records, summary, tmp_path):
    leave(tmp_path / "run", *records, **summary)
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"holds a run with other settings \(seed 77 -> 0\); type another --run-dir"):
        open_run_folder("tests", FLAGS.make({"run_dir": str(tmp_path / "run")}), "tests")
    assert files_below(tmp_path) == before


def test_a_summary_is_the_old_one_or_all_of_the_new_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_summary({"number": 1})

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.write_summary({"number": 2})
    assert json.loads((tmp_path / "summary.json").read_text())["number"] == 1
    folder.write_summary({"number": 3})
    folder.close()
    assert json.loads((tmp_path / "summary.json").read_text())["number"] == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full here")
def test_a_full_disk_that_is_found_between_two_records_ends_the_run_at_the_next(tmp_path):
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    os.dup2(os.open("/dev/full", os.O_WRONLY), folder._events.fileno())
    folder.append(event(0))
    time.sleep(1.0)
    with pytest.raises(OSError, match="No space left on device"):
        folder.append(event(1))
    with pytest.raises(OSError, match="No space left on device"):
        folder.write_summary({"status": "DONE"})
    folder.close()
    assert not (tmp_path / "run" / "summary.json").exists()
