"""A run in a thread, in a package, among variables that other programs left: it trains, or says what to change."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_api import BATCH, STEPS, Plane

import asyncsgd


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
