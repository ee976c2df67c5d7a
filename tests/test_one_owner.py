"""A run folder has one owner while its process lives, and a killed owner loses at most a second of records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncsgd.errors import UsageError
from asyncsgd.records.events import Evaluation, Event, read_events
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.scripts.run_folder import open_finetune_folder, open_run_folder, set_aside
from asyncsgd.settings.training import FLAGS, make_settings

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"

OWNER = """
import sys, time
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.settings.training import make_settings
folder = open_run_folder("tests", make_settings({"run_dir": sys.argv[1]}), "python first.py")
print("ready", flush=True)
time.sleep(600)
"""

WRITER = """
import sys, time
from pathlib import Path
from asyncsgd.records.events import Event
from asyncsgd.records.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]))
number = int(sys.argv[2])
print("ready", flush=True)
for dispatch in range(number):
    folder.append(Event(dispatch, 0, ((0, dispatch, dispatch + 1),), dispatch, dispatch + 1, 0, "applied",
                        ((dispatch, 0),), (), (), (), 1.0, 1.0, 1, 0.1, time.time(), dispatch + 1))
print("written", flush=True)
time.sleep(600)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program in a process of its own, which has printed its first line; killed at the end of the test."""
    started = []

    def run(program: str, *arguments: object) -> subprocess.Popen[str]:
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


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def event(dispatch: int) -> Event:
    batches, uses = ((0, dispatch, dispatch + 1),), ((dispatch, 0),)
    return Event(
        dispatch, 0, batches, dispatch, dispatch + 1, 0, "applied", uses, (), (), (), 1.0, 1.0, 1, 0.1, 0.0, 1
    )  # fmt: skip


@pytest.mark.parametrize("values", [{}, {"seed": 1}, {"overwrite": True}])
def test_a_second_run_is_refused_while_the_first_lives_and_changes_nothing(
    values: dict[str, object], start: Start, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    first = start(OWNER, path)
    before = files_below(tmp_path)
    settings = make_settings({"run_dir": str(path)} | values)
    with pytest.raises(UsageError, match=f"^another run is at work in {path}; wait for it, or stop it, or name"):
        open_run_folder("tests", settings, "python second.py")
    with pytest.raises(UsageError, match="another run is at work"):
        set_aside(path)
    assert files_below(tmp_path) == before
    kill(first)
    open_run_folder("tests", settings, "python second.py").close()
    assert (path / "settings.yaml").read_text().startswith("# python second.py")
    assert (tmp_path / "run.before-1" / "settings.yaml").read_text().startswith("# python first.py")


def test_a_folder_is_free_once_its_run_has_closed_it(tmp_path: Path) -> None:
    settings = make_settings({"run_dir": str(tmp_path / "run")})
    for _ in range(2):
        open_run_folder("tests", settings, "tests").close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.before-1"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_live_run_of_the_script_is_left_alone_and_its_workers_do_not_hold_its_lock(tmp_path: Path) -> None:
    flags = f"--mode async --nproc 2 --model tiny --vocab-size 512 --seq-len 16 --batch-size 2 --cache-dir {tmp_path}/c"
    (tmp_path / "text.txt").write_text("\n".join(f"one two three four five six {line}" for line in range(300)))
    script = [sys.executable, str(EXPERIMENTS / "stilt_mlm.py"), *flags.split(), "--data", str(tmp_path / "text.txt")]
    script += ["--run-dir", str(tmp_path / "run"), "--warmup", "0"]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    first = subprocess.Popen([*script, "--seconds", "600"], env=environment, stdout=subprocess.DEVNULL)
    try:
        events = tmp_path / "run" / "events.jsonl"
        deadline = time.monotonic() + 300
        while not (events.exists() and "arrival" in events.read_text()):
            assert first.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        holders = [pid for pid in family_of(first.pid) if holds(pid, events)]
        assert holders == [first.pid]
        assert len(family_of(first.pid)) >= 4  # the fork server and two workers beside it
        for more in (["--seconds", "600"], ["--samples", "8", "--overwrite"]):
            with open(tmp_path / "said", "w+") as said:  # no pipe, which the fork server would hold while it imports
                second = subprocess.run([*script, *more], env=environment, stdout=said, stderr=said, timeout=300)
            lines = (tmp_path / "said").read_text().splitlines()
            assert second.returncode == 2
            assert lines[-1].startswith(f"error: another run is at work in {tmp_path / 'run'}; ")
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    assert not (tmp_path / "run.before-1").exists()
    done = subprocess.run(
        [*script, "--samples", "8", "--overwrite"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["num_samples"] == 8


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # has just ended
    found = [pid]
    for ancestor in found:
        found += [child for child, parent in parents.items() if parent == ancestor]
    return found


def holds(pid: int, path: Path) -> bool:
    def target(link: Path) -> str:
        try:
            return os.readlink(link)
        except OSError:
            return ""

    return any(target(link) == str(path) for link in Path(f"/proc/{pid}/fd").glob("*"))


EVALUATION = Evaluation(0, 0, 0.0, 2.0, 10.0, {}, 0.1)


def leave(path: Path, *records: Event | Evaluation, **summary: Any) -> None:
    """A run folder as it is left behind, with settings that no new command has."""
    folder = open_run_folder("tests", make_settings({"run_dir": str(path), "seed": 77}), "python typo.py")
    for record in records:
        folder.append(record)
    if summary:
        folder.write_summary(summary)
    folder.close()


@pytest.mark.parametrize("status", [None, "FAILED", "INTERRUPTED"])
@pytest.mark.parametrize("open_folder", [open_run_folder, open_finetune_folder])
def test_a_folder_whose_run_has_not_trained_gives_way_to_a_corrected_command(
    status: str | None, open_folder: Callable[..., RunFolder], tmp_path: Path
) -> None:
    from asyncsgd.settings.finetuning import make_finetune_settings

    path = tmp_path / "run"
    leave(path, EVALUATION, **({"status": status} if status else {}))
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "notes.json").write_text("{}")  # not ours, so there is nothing to go on from
    if open_folder is open_run_folder:
        open_run_folder("tests", make_settings({"run_dir": str(path)}), "tests").close()
    else:
        open_finetune_folder(make_finetune_settings({"init_from": "tiny", "run_dir": str(path)}), "tests").close()
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
def test_a_folder_with_something_measured_is_refused_to_other_settings(
    records: tuple[Event | Evaluation, ...], summary: dict[str, Any], tmp_path: Path
) -> None:
    leave(tmp_path / "run", *records, **summary)
    before = files_below(tmp_path)
    with pytest.raises(UsageError, match=r"holds a run with other settings \(seed 77 -> 0\); type another --run-dir"):
        open_run_folder("tests", make_settings({"run_dir": str(tmp_path / "run")}), "tests")
    assert files_below(tmp_path) == before


def test_a_run_that_is_killed_one_second_after_its_last_record_has_them_all(start: Start, tmp_path: Path) -> None:
    writer = start(WRITER, tmp_path / "run", 10)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "written\n"
    time.sleep(1.0)
    kill(writer)
    assert [record["dispatch"] for record in read_events(tmp_path / "run" / "events.jsonl")] == list(range(10))


def test_a_summary_is_the_old_one_or_all_of_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    folder.write_summary({"number": 1})

    def killed(*arguments: object) -> None:
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
def test_a_full_disk_that_is_found_between_two_records_ends_the_run_at_the_next(tmp_path: Path) -> None:
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
