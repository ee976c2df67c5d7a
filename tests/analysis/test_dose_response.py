"""Dose and response: losses by update, put on the clocks of declared speeds, against hand-computed times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.dose_response import DELAYED, REFERENCE, Curve, Dose, answer, read_dose, save
from asyncsgd.errors import UsageError
from asyncsgd.simulate import arrival_seconds

SEEDS = (100, 101, 102)


def falling(updates: int, per_update: float, workers: int = 1) -> Curve:
    """A loss of 9 that falls by `per_update` with every update, evaluated at every update."""
    versions = tuple(range(updates + 1))
    return Curve(versions, tuple(9.0 - per_update * version for version in versions), updates * workers)


def dose_of(slowdown: dict[int, float]) -> Dose:
    """Every delayed update brings 0.1 / slowdown[tau]; a synchronous round of tau + 1 gradients always brings 0.1."""
    curves = {
        DELAYED: {tau: dict.fromkeys(SEEDS, falling(40 * (tau + 1), 0.1 / slow)) for tau, slow in slowdown.items()},
        REFERENCE: {tau: dict.fromkeys(SEEDS, falling(40, 0.1, tau + 1)) for tau in slowdown},
    }
    chosen = {name: dict.fromkeys(slowdown, (1e-3, False)) for name in (DELAYED, REFERENCE)}
    return Dose(curves, dict.fromkeys(slowdown, 8.0), chosen, "given")


def test_at_equal_speeds_updates_of_tau_plus_1_workers_come_tau_plus_1_times_as_often_as_rounds() -> None:
    # loss 8 needs 10 rounds, that is 10 s; 10 * slow delayed updates, of which ceil(10 slow / (tau + 1)) s bring enough
    dose = dose_of({0: 1.0, 1: 1.0, 3: 2.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    ((one, three),) = [clock.responses for clock in dose.clocks]
    assert (one.delay, three.delay) == (1, 3)
    assert one.ratio.estimate == pytest.approx(5 / 10)  # 10 updates at 2 a second
    assert three.ratio.estimate == pytest.approx(5 / 10)  # 20 updates at 4 a second
    assert (one.delayed_reached, one.reference_reached) == (3, 3)


def test_the_advantage_is_lost_where_an_update_is_worth_less_than_one_of_tau_plus_1() -> None:
    # tau = 3: half the worth, 4 times as often; tau = 7: worth 1/16, 8 times as often: twice as long
    dose = dose_of({1: 1.0, 3: 4.0, 7: 16.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    ratios = [response.ratio.estimate for response in dose.clocks[0].responses]
    assert ratios == pytest.approx([0.5, 1.0, 2.0], rel=0.06)
    assert dose.clocks[0].point.at == pytest.approx(3.0, abs=0.3)
    assert answer(dose.clocks[0].point).startswith("the advantage is lost at tau = 3")


def test_synchronous_rounds_wait_for_the_slowest_under_random_speeds_and_delayed_updates_do_not() -> None:
    dose = dose_of({1: 1.0, 3: 1.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    dose.put_on_clock("exponential:1", arrival_seconds)
    constant, exponential = (clock.responses for clock in dose.clocks)
    for even, uneven in zip(constant, exponential, strict=True):
        assert uneven.ratio.estimate < even.ratio.estimate


def test_a_round_ends_with_its_last_arrival() -> None:
    arrivals = arrival_seconds("slow:worker=0,factor=3", "synchronous", 2, 0, 6)
    assert arrivals[1::2] == [3.0, 6.0, 9.0]


def test_times_are_compared_at_the_lowest_loss_that_both_reach_so_that_a_short_budget_is_no_advantage() -> None:
    # under exponential times 80 delayed updates end long before 40 rounds of two, and bring next to nothing
    dose = dose_of({1: 100.0, 3: 1.0})
    dose.put_on_clock("exponential:1", arrival_seconds)
    response, _ = dose.clocks[0].responses
    assert response.delayed_reached == 0
    assert response.reference_reached == len(SEEDS)
    # 80 updates at 2 a second are worth .08, less than the first of 40 rounds
    assert response.ratio.estimate > 20
    assert response.gap.estimate > 1


def test_the_gap_is_taken_when_the_shorter_budget_ends() -> None:
    # 80 updates in 40 s bring 4.0 at half the worth; 40 rounds in 40 s bring 4.0 too
    dose = dose_of({1: 2.0, 3: 1.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    even, ahead = dose.clocks[0].responses
    assert even.gap.estimate == pytest.approx(0.0)
    assert ahead.gap.estimate == pytest.approx(4.0 - 16.0)


def test_at_delay_0_there_is_nothing_to_compare() -> None:
    dose = dose_of({0: 1.0, 1: 1.0, 3: 1.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    assert [response.delay for response in dose.clocks[0].responses] == [1, 3]


def test_table_and_picture_are_written(tmp_path: Path) -> None:
    dose = dose_of({0: 1.0, 1: 1.0, 3: 2.0, 7: 16.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    text = "\n".join(dose.lines())
    assert "speeds constant:1 (virtual clock), 3 seeds" in text
    paths = save(dose, tmp_path / "out")
    assert [path.suffix for path in paths] == [".csv", ".png", ".svg"]
    assert len(paths[0].read_text().splitlines()) == 1 + 3 * len(SEEDS)
    assert all(path.stat().st_size > 2000 for path in paths[1:])


def test_a_folder_that_is_no_dose_response_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run experiments/dose_response\.py"):
        read_dose(tmp_path)
    (tmp_path / "plan.json").write_text(json.dumps({"arms": [{"name": "a", "algorithm": "async"}], "runs": []}))
    (tmp_path / "analysis.yaml").write_text("targets: {}\n")
    with pytest.raises(UsageError, match="are called delayed and sync"):
        read_dose(tmp_path)
    arms = [
        {"name": name, "algorithm": name, "num_workers": 2, "chosen": None, "trials": []}
        for name in ("delayed", "sync")
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"arms": arms, "runs": []}))
    with pytest.raises(UsageError, match="two delays above 0"):
        read_dose(tmp_path)
