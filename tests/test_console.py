"""The console is best effort: whatever becomes of it, a script goes on and its exit code says how it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import calibrate
import export
import replay
import timeline
from asyncsgd.errors import UsageError
from asyncsgd.records.console import LOG, teller
from asyncsgd.records.run_folder import RunFolder
from asyncsgd.scripts.base import run_script

ROOT = Path(__file__).resolve().parents[1]
CONSOLES = ["| head -n 1", "> /dev/full", "2> /dev/full > /dev/full", ">&-", "2>&- >&-", "<&- 2>&- >&-", "| true"]
PROGRAM = """
import logging, sys
from asyncsgd.records.console import say
from asyncsgd.scripts.base import run_script

def run(argv, stop):
    with open(argv[0], "w", encoding="utf-8") as records:
        for number in range(5000):
            print("a line")
            say("\N{LATIN SMALL LETTER U WITH DIAERESIS} \\ud800")
            print("an error", file=sys.stderr)
        logging.warning("a library warns")
        records.write(f"{number}")
    return 7

sys.exit(run_script(run))
"""


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
@pytest.mark.parametrize("console", CONSOLES)
def test_no_console_ends_a_script_or_gets_into_its_files(console: str, encoding: str, tmp_path: Path) -> None:
    command = f'set -o pipefail; PYTHONIOENCODING={encoding} $PYTHON -c "$PROGRAM" records {console}'
    environment = {"PYTHON": sys.executable, "PROGRAM": PROGRAM, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr[-2000:]
    assert (tmp_path / "records").read_text() == "4999"


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("console", CONSOLES[:5:2])
def test_a_run_whose_console_is_gone_is_done_and_keeps_its_lines(console: str, tmp_path: Path) -> None:
    flags = "--mode async --nproc 2 --samples 640 --train-images 320 --width 4 --evaluations 2 --run-dir \u00fc"
    script = ROOT / "experiments" / "own_model.py"
    command = f"set -o pipefail; PYTHONIOENCODING=ascii {sys.executable} {script} {flags} {console}"
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(tmp_path)}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "\u00fc" / "summary.json").read_text())["status"] == "DONE"
    assert (tmp_path / "\u00fc" / "console.log").read_text().endswith("done   \u00fc\n")


ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J"
PLAIN = "\\x1b[31mred\\x1b]0;title\\x07\\x9b2J"


def test_a_script_prints_no_escape_sequence_and_draws_its_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run")

    def run(argv: list[str], stop: object) -> int:
        print(f"{ESCAPES}\nnext\tline")
        print(f"\r50 % {ESCAPES}\r", file=sys.stderr)
        teller(folder)(ESCAPES)
        raise UsageError(ESCAPES)

    assert run_script(run, []) == 2
    assert capsys.readouterr() == (f"{PLAIN}\nnext\tline\n{PLAIN}\n", f"\r50 % {PLAIN}\\r\nerror: {PLAIN}\n")
    assert (folder.path / LOG).read_text() == f"{PLAIN}\n"


@pytest.mark.parametrize("script", [timeline, replay, export, calibrate], ids=lambda script: script.__name__)
def test_a_script_that_reads_a_run_prints_no_escape_sequence_of_its_name(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")] if script is export else []
    assert script.main([str(tmp_path / ESCAPES), *out]) == 2
    said = capsys.readouterr().err
    assert PLAIN in said
    assert said.rstrip("\n").isprintable()
