"""The three tables: their columns are the documented ones, and their answers are those of plain loops."""

import dataclasses
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
from doors import asyncsgd
from hypothesis import given
from hypothesis import strategies as st
from scenarios import ASYNC, SYNC
from synthetic import straight, write_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"
DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Crossed minus self-fertilised maize, eighths of an inch (Darwin 1876, in Fisher 1935)."""
pytestmark = pytest.mark.filterwarnings("error")


def documented(title):
    _, _, rest = PAGE.read_text("utf-8").partition(f"\n## {title}\n")
    part, _, _ = rest.partition("\n## ")
    return re.findall(r"^\| `([^`]+)` \| \S", part, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def study(example_folder):
    return asyncsgd.load(example_folder)


def test_every_column_is_documented_and_every_documented_one_is_there(study):
    assert list(study.runs) == documented("Runs")
    assert list(study.tests) == documented("Tests")
    metrics = [name for name in study.curves if name.startswith("metric.")]
    assert {*study.curves, "metric.*"} - set(metrics) == set(documented("Curves"))
    assert metrics == ["metric.accuracy", "metric.perplexity", "metric.macro_f1"]


def test_every_run_is_a_row_and_every_evaluation_one_of_the_curves(study):
    assert study.runs["status"].value_counts().to_dict() == {"DONE": 252, "DIVERGED": 1, "MISSING": 1}
    assert set(study.curves["run"]) == set(study.runs.index[study.runs["status"] != "MISSING"])
    (lost,) = study.runs[study.runs["status"] == "MISSING"].itertuples()
    assert lost.left_out == "planned, and no folder there"


def test_a_table_may_go_to_every_usual_file_and_back(study, tmp_path):
    study.curves.to_parquet(tmp_path / "curves.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "curves.parquet"), study.curves)
    study.tests.to_csv(tmp_path / "tests.csv")
    assert list(pandas.read_csv(tmp_path / "tests.csv")["word"]) == list(study.tests["word"])


differences = st.lists(st.integers(-20, 20).map(float), min_size=1, max_size=10)


@given(differences)
def test_the_p_value_counts_the_patterns_of_signs_that_are_as_far_from_0(values):
    signs = np.array(list(itertools.product((1, -1), repeat=len(values))))
    sums = np.abs(signs @ values)
    row = asyncsgd.compare(values, [0.0] * len(values))
    if len(set(values)) > 1:  # else nothing varied
        assert row["p"] == pytest.approx(np.mean(sums >= abs(sum(values))))


@given(st.lists(st.integers(-20, 20).map(float), min_size=6, max_size=9, unique=True), st.sampled_from([0.05, 0.1]))
def test_the_interval_holds_the_differences_that_the_test_does_not_reject(values, alpha):
    row = asyncsgd.compare(values, [0.0] * len(values), alpha=alpha)
    for end, outwards in ((row["low"], -1e-6), (row["high"], 1e-6)):
        zeros = [0.0] * len(values)
        from_end = np.array(values) - end
        outside = asyncsgd.compare(from_end - outwards, zeros)
        inside = asyncsgd.compare(from_end + outwards, zeros)
        assert outside["p"] < alpha <= inside["p"]


def test_darwins_maize_gives_fishers_1726_of_32768_sign_patterns():
    assert asyncsgd.compare(DARWIN, [0] * 15)["p"] == 1726 / 32768
    assert 1726 / 32768 == 0.05267333984375


def test_the_equivalence_test_is_that_of_pingouins_example():
    row = asyncsgd.compare([4, 7, 8, 6, 3, 2], [6, 8, 7, 10, 11, 9], margin=0.5)
    assert row["p_equal"] == pytest.approx(0.954854, abs=5e-7)
    assert row["word"] == "undecided"


def test_a_run_that_diverged_is_worse_than_any_other():
    ours = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]
    theirs = [2.0] * 8
    assert asyncsgd.compare(ours, theirs)["word"] == "better"
    row = asyncsgd.compare([*ours[:7], math.inf], theirs)
    assert row["test"] == "signed rank"
    assert row["diverged"] == (1, 0)
    assert row["wins"] == 7
    assert math.isnan(row["estimate"])


def test_a_verdict_needs_six_pairs_whatever_its_level():
    for n, word in ((5, "too few seeds"), (6, "worse")):
        values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0][:n]
        row = asyncsgd.compare(values, [0.0] * n, alpha=0.1)
        assert row["word"] == word


def test_numbers_without_a_pair_are_refused():
    for a, b in (([1.0], [1.0, 2.0]), ([np.nan], [1.0])):
        with pytest.raises(ValueError, match="a and b"):
            asyncsgd.compare(a, b)


def test_two_series_are_paired_by_their_labels():
    ours = pandas.Series(DARWIN, [f"s{number}" for number in range(15)])
    noise = pandas.Series(np.arange(15.0) ** 2, ours.index)
    shuffled = noise.sample(frac=1, random_state=0)
    assert list(shuffled.index) != list(ours.index)
    assert asyncsgd.compare(ours + noise, shuffled)["p"] == 1726 / 32768
    renamed = noise.rename({"s3": "s99"})
    shorter = noise.iloc[:14]
    twice = pandas.concat([noise, noise.iloc[:1]])
    with pytest.raises(ValueError, match="'s3' is in one of them alone"):
        asyncsgd.compare(ours, renamed)
    with pytest.raises(ValueError, match="'s14' is in one of them alone"):
        asyncsgd.compare(ours, shorter)
    with pytest.raises(ValueError, match="'s0' more than once"):
        asyncsgd.compare(ours, twice)


@pytest.mark.parametrize(
    ("numbers", "options", "told"),
    [
        (["1", "2"], {}, "a needs numbers, got '1'"),
        ([1.0, None], {}, "a needs numbers, got None"),
        ([1.0, 2.0], {"alpha": 0.5}, "alpha must be a number above 0 and below 0.5, such as 0.05, got 0.5"),
        ([1.0, 2.0], {"alpha": 0.0}, "alpha must be"),
        ([1.0, 2.0], {"alpha": math.nan}, "alpha must be"),
        ([1.0, 2.0], {"alpha": "0.05"}, "alpha must be"),
        ([1.0, 2.0], {"margin": math.inf}, "margin must be a finite number above 0, or None, got inf"),
        ([1.0, 2.0], {"margin": math.nan}, "margin must be"),
        ([1.0, 2.0], {"margin": -0.1}, "margin must be"),
        ([1.0, 2.0], {"margin": 0.0}, "margin must be"),
        ([1.0, 2.0], {"margin": "0.1"}, "margin must be"),
    ],
)
def test_what_is_no_number_is_refused(numbers, options, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        asyncsgd.compare(numbers, [1.0, 2.0], **options)


def test_nothing_is_said_of_a_margin_a_setting_or_a_registration_that_is_not_there(tmp_path):
    for arm, last in ((SYNC, 5.0), (ASYNC, 4.9)):
        for seed in range(6):
            own = dataclasses.replace(arm, settings={})
            curve = straight(6.0, last + 0.01 * seed, seconds=20.0)
            write_run(tmp_path / f"{arm.name}-{seed}", own, curve, seed=seed)
    study = asyncsgd.load(tmp_path)
    assert study.table("settings").empty
    page = study.report(tmp_path / "page.html").read_text()
    assert "Bars: what the test does not reject." in page
    for told in ("Shaded: the margin", "Squares in colour: registered", "Dashed: the target"):
        assert told not in page
    for told in study.table("arms")["reached"]:
        assert told.endswith(" by 20 virtual s")
    assert study.table("paper")["arm"].to_list() == ["async, sim.", "sync, sim."]
