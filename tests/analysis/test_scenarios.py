"""Studies in which a verdict could mislead: the verdict, its reason, and the words (tests/analysis/approved)."""

import pytest
from reading import row_of
from scenarios import EIGHT, SOONER, reaches, two_arms


def test_an_arm_that_is_sooner_in_every_seed(tmp_path, approved):
    found = two_arms(tmp_path, [reaches(time) for time in EIGHT], [reaches(time) for time in SOONER])
    row = row_of(found, "time_to_target")
    assert (row.family, row.word, row.wins) == ("primary", "better", 8)
    assert row.times is not None
    assert row.times.ratio is not None
    assert row.times.ratio.estimate == pytest.approx(sum(EIGHT) / sum(SOONER))
    approved(found)
