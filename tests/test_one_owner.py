"""A run folder has one owner while its process lives, and what was measured in it is never written over."""

import contextlib
import os
import threading
import time

import psutil
import pytest
from doors import Finished, RunFolder, UsageError, asyncsgd, cli
from tasks import Plane

full_disk = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full here")
SMALL = {"samples": 80, "evaluations": 1, "quiet": True}


def files_below(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def owner(tmp_path):
    """The process of a run in ``run`` that trains until it is killed."""

    def stand_still(record):
        if record.kind == "arrival":
            time.sleep(600)

    if (child := os.fork()) == 0:
        asyncsgd.train(Plane(), folder=tmp_path / "run", report=stand_still, **SMALL)
    while not (tmp_path / "run" / "settings.yaml").exists():
        time.sleep(0.01)
    process = psutil.Process(child)
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
        process.wait()


@pytest.mark.processes
def test_a_second_run_is_refused_while_the_first_lives_and_changes_nothing(owner, tmp_path):
    path = tmp_path / "run"
    before = sorted(tmp_path.iterdir()), (path / "settings.yaml").read_bytes()
    with pytest.raises(UsageError, match="another run is at work"):
        asyncsgd.train(Plane(), folder=path, resume=True, **SMALL)
    for more in ([], ["--seed", "1"], ["--overwrite"]):
        ended = cli(["own_model.py", "--samples", "320", "--run-dir", path, *more])
        assert ended.code == 2
        assert f"another run is at work in {path}; wait for it, or stop it, or name" in ended.err
    assert (sorted(tmp_path.iterdir()), (path / "settings.yaml").read_bytes()) == before
    owner.kill()
    owner.wait()
    ended = cli(["own_model.py", "--samples", "320", "--mode", "single", "--run-dir", path, "--overwrite"])
    assert ended.code == 0, ended.err
    assert [kept.name for kept in tmp_path.glob("run.before-*")] == ["run.before-1"]


@pytest.mark.parametrize("status", [None, "FAILED", "INTERRUPTED"])
def test_a_folder_gives_way_to_a_corrected_command_until_its_run_has_trained(status, train, tmp_path):
    corrected = train(mode="single", samples=0)

    def again(samples):
        """The command in the folder of another run of that many samples, left with this status or by a kill."""
        run = train(mode="single", samples=samples, seed=77).path
        path = tmp_path / f"run{samples}"
        path.mkdir()
        for name in ("settings.yaml", "events.jsonl"):
            (path / name).write_bytes((run / name).read_bytes())
        if status:
            (path / "summary.json").write_text(f'{{"status": "{status}"}}')
        files = ["--config", corrected.path / "settings.yaml", "--cache-dir", corrected.cache, "--run-dir", path]
        before = files_below(path)
        return cli(["stilt_mlm.py", *files]), before, path

    ended, before, path = again(0)
    assert ended.code == 0
    assert Finished(path).settings["seed"] == 0
    assert files_below(tmp_path / "run0.before-1") == before  # nothing is lost
    ended, before, path = again(8)
    assert ended.code == 2
    assert "holds a run with other settings (" in ended.err
    assert files_below(path) == before


@pytest.fixture
def folder(tmp_path):
    """A run folder, the records of a run, and what gives its disk back."""
    folder = RunFolder(tmp_path)
    records = []
    asyncsgd.train(Plane(), report=records.append, **SMALL)
    events = folder._events.fileno()
    disk = os.dup(events)
    os.dup2(os.open("/dev/full", os.O_WRONLY), events)
    yield folder, records, lambda: os.dup2(disk, events)
    folder.close()


@full_disk
def test_a_full_disk_that_is_found_between_two_records_ends_the_run_at_the_next(folder, monkeypatch):
    monkeypatch.setattr("asyncsgd.records.run_folder.FULL_SECONDS", 0.2)
    folder, records, _ = folder
    arrivals = [record for record in records if record.kind == "arrival"]
    folder.append(arrivals[0])
    time.sleep(1.0)
    with pytest.raises(OSError, match="No space left on device"):
        folder.append(arrivals[1])
    with pytest.raises(OSError, match="No space left on device"):
        folder.write_summary({"status": "DONE"})
    assert not (folder.path / "summary.json").exists()


@full_disk
def test_a_disk_that_is_full_for_a_moment_is_waited_for(folder):
    folder, records, free = folder
    freed = threading.Timer(1.0, free)
    freed.start()
    for record in records:
        folder.append(record)
    folder.write_summary({"status": "DONE"})
    freed.join()
    kinds = [line["kind"] for line in Finished(folder.path).records()]
    assert kinds == ["header", *(record.kind for record in records)]
