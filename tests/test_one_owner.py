"""A run folder has one owner while its process lives, and what was measured in it is never written over."""

import os
import subprocess
import sys
import threading
import time

import pytest
from doors import ROOT, Finished, RunFolder, UsageError, asyncsgd, cli
from tasks import Plane

SMALL = {"samples": 80, "evaluations": 1, "quiet": True}


def files_below(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def owner(tmp_path):
    """Makes a run in a process of its own that trains until it is killed."""
    started = []

    def run(path):
        program = (
            "import asyncsgd, tasks, time\n"
            "stand_still = lambda record: record.kind == 'arrival' and (print('ready', flush=True), time.sleep(600))\n"
            f"asyncsgd.train(tasks.Plane(), samples=80, folder={str(path)!r}, quiet=True, report=stand_still)"
        )
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
        command = [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.processes
def test_a_second_run_is_refused_while_the_first_lives_and_changes_nothing(owner, tmp_path):
    path = tmp_path / "run"
    first = owner(path)
    before = sorted(tmp_path.iterdir()), (path / "settings.yaml").read_bytes()
    with pytest.raises(UsageError, match="another run is at work"):
        asyncsgd.train(Plane(), folder=path, resume=True, **SMALL)
    for more in ([], ["--seed", "1"], ["--overwrite"]):
        ended = cli(["own_model.py", "--samples", "320", "--run-dir", path, *more])
        assert ended.code == 2
        assert f"another run is at work in {path}; wait for it, or stop it, or name" in ended.err
    assert (sorted(tmp_path.iterdir()), (path / "settings.yaml").read_bytes()) == before
    first.kill()
    first.wait()
    ended = cli(["own_model.py", "--samples", "320", "--mode", "single", "--run-dir", path, "--overwrite"])
    assert ended.code == 0, ended.err
    assert [kept.name for kept in tmp_path.glob("run.before-*")] == ["run.before-1"]


def left(path, train, status):
    """A run folder as it is left behind: without status by a kill, with one by a run that has measured nothing."""
    run = Finished(train(mode="single", samples=0, seed=77).path)
    path.mkdir()
    for name in ("settings.yaml", "events.jsonl"):
        (path / name).write_bytes((run.path / name).read_bytes())
    if status:
        (path / "summary.json").write_text(f'{{"status": "{status}"}}')


@pytest.mark.parametrize("status", [None, "FAILED", "INTERRUPTED"])
def test_a_folder_whose_run_has_not_trained_gives_way_to_a_corrected_command(status, train, tmp_path):
    left(tmp_path / "run", train, status)
    run = train(mode="single", samples=0)
    flags = ["--config", run.path / "settings.yaml", "--cache-dir", run.cache, "--run-dir", tmp_path / "run"]
    assert cli(["stilt_mlm.py", *flags]).code == 0
    assert Finished(tmp_path / "run").settings["seed"] == 0
    assert Finished(tmp_path / "run.before-1").settings["seed"] == 77  # nothing is lost


@pytest.mark.parametrize("summary", [True, False], ids=["done", "killed"])
def test_a_folder_with_something_measured_is_refused_to_other_settings(summary, train, tmp_path):
    run = train(mode="single", samples=8)
    path = tmp_path / "run"
    path.mkdir()
    for name in ("settings.yaml", "events.jsonl", *(["summary.json"] if summary else [])):
        (path / name).write_bytes((run.path / name).read_bytes())
    before = files_below(path)
    flags = ["--config", run.path / "settings.yaml", "--cache-dir", run.cache, "--run-dir", path, "--seed", "1"]
    ended = cli(["stilt_mlm.py", *flags])
    assert ended.code == 2
    assert "holds a run with other settings (seed 0 -> 1); type another --run-dir" in ended.err
    assert files_below(path) == before


def test_a_summary_is_the_old_one_or_all_of_the_new_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write_summary({"number": 1})

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.write_summary({"number": 2})
    assert Finished(tmp_path).summary["number"] == 1
    folder.write_summary({"number": 3})
    folder.close()
    assert Finished(tmp_path).summary["number"] == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full here")
def test_a_full_disk_that_is_found_between_two_records_ends_the_run_at_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("asyncsgd.records.run_folder.FULL_SECONDS", 0.2)
    folder, records = RunFolder(tmp_path), []
    asyncsgd.train(Plane(), report=records.append, **SMALL)
    arrivals = [record for record in records if record.kind == "arrival"]
    os.dup2(os.open("/dev/full", os.O_WRONLY), folder._events.fileno())
    folder.append(arrivals[0])
    time.sleep(1.0)
    with pytest.raises(OSError, match="No space left on device"):
        folder.append(arrivals[1])
    with pytest.raises(OSError, match="No space left on device"):
        folder.write_summary({"status": "DONE"})
    folder.close()
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full here")
def test_a_disk_that_is_full_for_a_moment_is_waited_for(tmp_path):
    folder, records = RunFolder(tmp_path), []
    asyncsgd.train(Plane(), report=records.append, **SMALL)
    events = folder._events.fileno()
    disk, full = os.dup(events), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, events)
    freed = threading.Timer(1.0, os.dup2, (disk, events))
    freed.start()
    for record in records:
        folder.append(record)
    folder.write_summary({"status": "DONE"})
    folder.close()
    freed.join()
    assert [line["kind"] for line in Finished(tmp_path).records()] == ["header", *(record.kind for record in records)]
