"""A run in a thread, in a package, among variables that other programs left: it trains, or says what to change."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
from test_api import BATCH, STEPS, Plane

import asyncsgd
from asyncsgd import UsageError
from asyncsgd.runtime.processes import clean_environment
from asyncsgd.runtime.ranks import Noticeboard
from asyncsgd.scripts.base import run_script
from asyncsgd.signals import StopRequest


def test_a_run_in_another_thread_trains_and_leaves_signals_alone() -> None:
    before, runs = signal.getsignal(signal.SIGINT), []
    thread = threading.Thread(target=lambda: runs.append(asyncsgd.train(Plane(), samples=4 * BATCH, **STEPS)))
    thread.start()
    thread.join()
    assert [run.status for run in runs] == ["DONE"]
    assert signal.getsignal(signal.SIGINT) == before


IN_PACKAGE = """
import sys
sys.path.insert(0, {tests!r})
import asyncsgd
from test_api import Plane
print(asyncsgd.train(Plane(), runtime=asyncsgd.Processes(1), samples=16, quiet=True).status)
"""


@pytest.mark.processes
@pytest.mark.parametrize("started", [["-m", "package"], ["package"]], ids=["package", "folder"])
def test_the_main_file_of_a_package_needs_no_guard_since_no_worker_imports_it(
    started: list[str], tmp_path: Path
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(IN_PACKAGE.format(tests=str(Path(__file__).parent)))
    ended = subprocess.run([sys.executable, *started], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ended.stdout, ended.returncode) == ("DONE\n", 0), ended.stderr


def test_other_threads_keep_their_environment_while_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("SET_MEANWHILE", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ended, seen = threading.Event(), set()

    def look() -> None:
        while not ended.is_set():
            seen.add(os.environ.get("KEPT"))

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(300):
        with clean_environment():
            assert ("RANK" in os.environ, os.environ["OMP_NUM_THREADS"]) == (False, "1")
            os.environ["SET_MEANWHILE"] = "by another thread"
    ended.set()
    thread.join()
    assert seen == {"1"}
    assert (os.environ["RANK"], os.environ["SET_MEANWHILE"]) == ("3", "by another thread")
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.processes
def test_a_refused_run_leaves_no_thread_that_watches_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=0))
    with pytest.raises(UsageError, match=r"needs 4\.1 KiB of shared memory and \S+ has 0 bytes free"):
        asyncsgd.train(Plane(), runtime=asyncsgd.Hogwild(1), samples=8, folder=tmp_path / "run", **STEPS)
    assert "usage" not in [thread.name for thread in threading.enumerate()]


def refuse(argv: list[str], stop: StopRequest) -> int:
    raise UsageError("type something else")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"RANK": "3"}, "error: type something else\n"),
        ({"RANK": "3", "WORLD_SIZE": "4"}, "error: type something else\n"),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}, ""),
    ],
    ids=["left over", "left over in part", "a rank"],
)
def test_a_rank_that_is_left_over_in_the_shell_silences_nobody(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run_script(refuse, []) == 2
    assert capsys.readouterr().err == said


@pytest.mark.processes
def test_ranks_of_one_host_need_no_network_interface_of_a_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    assert asyncsgd.train(Plane(), runtime=asyncsgd.AllReduce(2), samples=4 * BATCH, **STEPS).status == "DONE"


def test_an_interface_that_is_not_there_is_refused_by_name_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}
    for name, value in (launched | {"GLOO_SOCKET_IFNAME": "lo,nope0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"^GLOO_SOCKET_IFNAME names nope0, and the network interfaces of this host"):
        Noticeboard()
