"""The tables of error rates: all rows, rates that belong to their studies, and messages for bad flags."""

import itertools
import re
import runpy
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "experiments" / "benchmarks" / "error_rates.py"
FEW = ("--studies", "10", "--task-studies", "2")


def error_rates(*flags):
    return subprocess.run([sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=240)


def shares_of(row):
    return [float(cell) for cell in row.split()[2::4]]


def beginnings(table):
    """The first two cells of each row, below a title and a line of names."""
    return [tuple(row.split()[:2]) for row in table[2:]]


@pytest.mark.slow
def test_the_tables_have_a_row_per_noise_and_number_of_pairs():
    done = error_rates(*FEW)
    assert done.returncode == 0
    assert done.stderr == ""
    tables = [part.splitlines() for part in done.stdout.strip().split("\n\n")]
    nulls, one_arm, families, looks, reverse, found_between, power, intervals, improvement = tables
    assert nulls[1].split("  ")[-1].strip() == "S3 sign-flip"
    rows_of_each = list(itertools.product(("normal", "heavy", "skewed"), ("6", "8", "10")))
    for table in (nulls, families, power, intervals):
        assert "10 studies per row" in table[0]
        assert beginnings(table) == rows_of_each
    for row in nulls[2:]:
        assert len(shares_of(row)) == 4
        assert max(shares_of(row)) <= 50  # a chance of 1e-4
    for table in (looks, reverse, found_between):
        assert beginnings(table) == [(one, "8") for one in ("9/9", "81/81", "5/17", "9/81", "81/9")]
    found, at_tolerance, at_zero = zip(*map(shares_of, power[2:]), strict=True)
    assert statistics.fmean(found) > 60
    assert statistics.fmean(at_tolerance) < 20
    assert statistics.fmean(at_zero) > 20
    for row in intervals[2:]:
        assert min(shares_of(row)) >= 50
    assert [row.split()[0] for row in one_arm[2::3]] == ["heavy", "skewed", "rare", "lognormal", "outliers"]
    different, equivalent, alone = zip(*map(shares_of, families[2:]), strict=True)
    assert statistics.fmean(different) < 12
    assert statistics.fmean(equivalent) < 12
    assert statistics.fmean(equivalent) <= statistics.fmean(alone)
    assert [row.split()[0] for row in improvement[2:]] == ["6", "10"]
    assert error_rates(*FEW).stdout == done.stdout
    assert error_rates(*FEW, "--seed", "1").stdout != done.stdout


@pytest.mark.slow
def test_the_rates_that_a_page_states_are_those_that_are_measured(example, tmp_path):
    """Of a wrong better or worse with 8 seeds, within 2 points, where the noise of one arm alone is not symmetric."""
    page = example.report(tmp_path / "report.html").read_text("utf-8")
    rates = runpy.run_path(str(SCRIPT))["rates"]
    for noise, told in (("lognormal", "log-normal in one arm"), ("outliers", "one run in twenty of one arm")):
        stated = float(re.search(rf"(\d+) % where (?:it is )?{told}", page)[1])
        found = rates("noise in one arm alone", noise, 8, 1_500, 0)
        assert 100 * (found["better, mean 0"] + found["worse, mean 0"]) == pytest.approx(stated, abs=2)
    for noise in ("normal", "heavy"):
        assert rates("false positives at alpha = 0.05", noise, 8, 400, 0)["S1 sign-flip"] <= 0.05 + 0.02


@pytest.mark.slow
@pytest.mark.parametrize("looks", ["9/9", "81/81", "5/17", "9/81", "81/9"])
def test_no_difference_is_no_word_however_often_arms_are_evaluated(looks):
    rates = runpy.run_path(str(SCRIPT))["rates"]
    found = rates("words between looks, no difference", looks, 8, 400, 0)
    assert max(found) <= 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5
    assert max(rates("words between looks that reverse half an SD", looks, 8, 400, 0)) <= 0.025 + 0.024
