"""The console is best effort: whatever becomes of it, a script goes on and its exit code says how it ended."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from asyncsgd.records.best_effort import say
from asyncsgd.scripts.base import run_script

def run(argv, stop):
    for number in range(5000):
        print("a line")
        say("\N{LATIN SMALL LETTER U WITH DIAERESIS}")
    with open(argv[0], "w", encoding="utf-8") as records:
        records.write(f"{number}")
    return 7

sys.exit(run_script(run))
"""


@pytest.mark.parametrize("console", ["| head -n 1", "> /dev/full", "| cat > /dev/null"])
def test_no_console_ends_a_script(console, tmp_path):
    command = f'set -o pipefail; PYTHONIOENCODING=ascii $PYTHON -c "$PROGRAM" records {console}'
    environment = {"PYTHON": sys.executable, "PROGRAM": PROGRAM, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr[-2000:]
    assert (tmp_path / "records").read_text() == "4999"


SPEAKS_TO_NOBODY = r"""
import os, sys

read, write = os.pipe()
os.dup2(write, 1)
os.close(read)
os.close(write)

from asyncsgd.scripts.base import run_script

sys.exit(run_script(lambda argv, stop: print("\N{LATIN SMALL LETTER U WITH DIAERESIS}") or 7))
"""


def test_a_letter_that_the_console_lacks_ends_no_script_when_its_reader_has_gone(tmp_path):
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SPEAKS_TO_NOBODY], cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 7
