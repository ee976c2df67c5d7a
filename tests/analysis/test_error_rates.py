"""The table of false-positive rates: all rows, rates that belong to their studies, and messages for bad flags."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "benchmarks" / "error_rates.py"


def error_rates(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=120)


def test_the_table_has_a_row_per_noise_and_number_of_pairs() -> None:
    done = error_rates("--studies", "20")
    assert (done.returncode, done.stderr) == (0, "")
    title, heading, *rows = done.stdout.splitlines()
    assert "20 null studies per row" in title
    assert heading.split("  ")[-1].strip() == "S3 sign-flip"
    assert [row.split()[:2] for row in rows] == [
        [noise, n] for noise in ("normal", "heavy", "skewed") for n in ("6", "8", "10")
    ]
    for row in rows:
        shares = [float(cell) for cell in row.split()[2::4]]
        assert len(shares) == 4
        assert all(share % 5 == 0 and share <= 30 for share in shares)  # k of 20; more than 6 has a chance of 1e-5
    assert error_rates("--studies", "20").stdout == done.stdout
    assert error_rates("--studies", "20", "--seed", "1").stdout != done.stdout


@pytest.mark.parametrize(("flag", "value"), [("--studies", "0"), ("--seed", "-1")])
def test_bad_flags_are_refused_with_exit_code_2(flag: str, value: str) -> None:
    done = error_rates(flag, value)
    assert done.returncode == 2
    assert f"error: {flag} must be" in done.stderr
