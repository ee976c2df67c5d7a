"""Differences of differences that a study has registered: by hand, through the one judge, and on the page."""

import dataclasses
import itertools
import math

import pytest
from scenarios import ends_at, study_of
from synthetic import SyntheticArm

FRESH, STALE, ADAM_FRESH, ADAM_STALE = (
    SyntheticArm(name) for name in ("sgd_fresh", "sgd_stale", "adam_fresh", "adam_stale")
)
ARMS = (FRESH, STALE, ADAM_FRESH, ADAM_STALE)
SGD = [0.50, 0.42, 0.55, 0.47, 0.61, 0.52, 0.44, 0.60]
ADAM = [0.20, 0.25, 0.17, 0.22, 0.30, 0.18, 0.21, 0.26]
"""What staleness costs in eight seeds."""
ASKED = {"stale": {"treatment": ["sgd_stale", "sgd_fresh"], "reference": ["adam_stale", "adam_fresh"]}}
REGISTERED = {
    "reference": "sgd_fresh",
    "primary": {"endpoint": "loss_at_equal_samples", "num_workers": 4, "clock": "virtual"},
    "targets": {},
    "differences": ASKED,
}


def losses():
    """The final loss of each arm and seed; those of a seed have a level of their own."""
    level = [4.0 + 0.1 * seed for seed in range(8)]
    sgd = [one + cost for one, cost in zip(level, SGD, strict=True)]
    adam = [one - 0.3 for one in level]
    return [level, sgd, adam, [one + cost for one, cost in zip(adam, ADAM, strict=True)]]


def study(folder, registration=REGISTERED, arms=ARMS, **changes):
    curves = [[ends_at(loss) for loss in of_arm] for of_arm in losses()]
    return study_of(folder, list(zip(arms, curves, strict=True)), registration=registration, **changes)


def exact_p(values):
    """The share of all signs under which the sum is as far from 0."""
    sums = []
    for signs in itertools.product((1, -1), repeat=8):
        sums.append(abs(sum(map(math.prod, zip(signs, values, strict=True)))))
    return sum(one >= abs(sum(values)) - 1e-12 for one in sums) / len(sums)


def test_a_registered_difference_of_differences_is_tested_seed_by_seed_and_stands_on_the_page(tmp_path):
    found = study(tmp_path)
    (row,) = found.differences.itertuples()
    by_seed = [one - other for one, other in zip(SGD, ADAM, strict=True)]
    assert row.treatment == f"{STALE.name} - {FRESH.name}"
    assert row.reference == f"{ADAM_STALE.name} - {ADAM_FRESH.name}"
    assert row.family == "differences"
    assert row.word == "worse"
    assert row.n == 8
    assert row.family_size == 1
    assert row.estimate == pytest.approx(sum(by_seed) / 8)
    assert row.p == row.p_holm
    assert row.p_holm == pytest.approx(exact_p(by_seed))
    page = found.report(tmp_path / "report.html").read_text("utf-8")
    told = f"{row.treatment} is 0.29 nats above {row.reference} (8 of 8 seeds, p_Holm 0.00781)."
    assert told in page
    assert page.count("<h3>Differences of differences</h3>") == 1
    table = found.table("differences")
    assert table["word"].to_list() == ["worse"]


def test_all_differences_of_a_study_are_one_family(tmp_path):
    turned = {"treatment": ASKED["stale"]["reference"], "reference": ASKED["stale"]["treatment"]}
    found = study(tmp_path, REGISTERED | {"differences": ASKED | {"turned": turned}})
    assert found.differences["word"].to_list() == ["worse", "better"]
    assert found.differences["family_size"].to_list() == [2, 2]
    assert found.differences["p_holm"].to_list() == [2 * 2 / 2**8] * 2


def test_losses_that_lie_between_looks_leave_a_difference_between_two_ends(tmp_path):
    """One arm ends where no other was evaluated, so that the three others lie between two looks."""
    short = dataclasses.replace(STALE, settings={"samples": 1480})
    curves = [[ends_at(loss) for loss in of_arm] for of_arm in losses()]
    curves[1] = [[(0, 0.0, 6.0), (1480, 100.0, loss)] for loss in losses()[1]]
    arms = (FRESH, short, ADAM_FRESH, ADAM_STALE)
    (row,) = study_of(tmp_path, list(zip(arms, curves, strict=True)), registration=REGISTERED).differences.itertuples()
    fresh, sgd, adam, stale = losses()
    for seed in range(8):
        at = {}
        for place in (1440, 1520):
            at[place] = 6.0 + (fresh[seed] - 6.0) * place / 1600
        low, high = sorted(sgd[seed] - one for one in at.values())
        assert row.treatment_ends[seed].tolist() == pytest.approx([low, high])
        ends = []
        for end in (stale, adam):
            ends.append([6.0 + (end[seed] - 6.0) * place / 1600 for place in (1520, 1440)])
        expected = [ends[0][0] - ends[1][1], ends[0][1] - ends[1][0]]
        assert row.reference_ends[seed].tolist() == pytest.approx(expected)


def test_what_makes_two_arms_unlike_or_lost_leaves_no_difference(tmp_path):
    def other_decay(folder):
        for path in (folder / "test" / ADAM_STALE.name).glob("*/settings.yaml"):
            path.write_text(path.read_text() + "weight_decay: 0.5\n")

    (row,) = study(tmp_path / "unlike", afterwards=other_decay).differences.itertuples()
    assert row.word == "not comparable"
    assert row.reason.startswith(f"weight_decay of {ADAM_STALE.name}: 0.5")
    without = REGISTERED | {"differences": {"none": ASKED["stale"] | {"reference": ["adam_stale", "other"]}}}
    (row,) = study(tmp_path / "none", without).differences.itertuples()
    assert row.word == "not comparable"
    assert row.reason == "no condition has one arm of each of these algorithms"
    late = REGISTERED | {"num_seeds": 6}
    (row,) = study(tmp_path / "late", late).differences.itertuples()
    assert row.family == "exploratory"
    assert row.word == "worse"
    assert not len(study(tmp_path / "nothing", REGISTERED | {"differences": {}}).differences)
