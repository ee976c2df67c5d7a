"""Dose and response: losses by update, put on the clocks of declared speeds, against hand-computed times."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import yaml
from gallery import sentences

from analysis.stats import Interval
from asyncsgd.errors import UsageError
from asyncsgd.simulation.simulate import arrival_seconds
from dose_response_findings import DELAYED, REFERENCE, SHARES, Curve, Dose, Measured, answer, read_dose, save

SEEDS = (100, 101, 102)


def falling(updates, per_update, workers=1):
    """A loss of 9 that falls by `per_update` with every update, evaluated at every update."""
    versions = tuple(range(updates + 1))
    return Curve(versions, tuple(9.0 - per_update * version for version in versions), updates * workers)


def dose_of(slowdown):
    """Every delayed update brings 0.1 / slowdown[tau]; a synchronous round of tau + 1 gradients always brings 0.1."""
    curves = {
        DELAYED: {tau: dict.fromkeys(SEEDS, falling(40 * (tau + 1), 0.1 / slow)) for tau, slow in slowdown.items()},
        REFERENCE: {tau: dict.fromkeys(SEEDS, falling(40, 0.1, tau + 1)) for tau in slowdown},
    }
    chosen = {name: dict.fromkeys(slowdown, (1e-3, False)) for name in (DELAYED, REFERENCE)}
    return Dose(curves, dict.fromkeys(slowdown, 8.0), chosen, "given")


def test_at_equal_speeds_updates_of_tau_plus_1_workers_come_tau_plus_1_times_as_often_as_rounds():
    # loss 8 needs 10 rounds, that is 10 s; 10 * slow delayed updates, of which ceil(10 slow / (tau + 1)) s bring enough
    dose = dose_of({0: 1.0, 1: 1.0, 3: 2.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    ((one, three),) = [clock.responses for clock in dose.clocks]
    assert (one.delay, three.delay) == (1, 3)
    assert one.ratios[-1].estimate == pytest.approx(5 / 10)  # 10 updates at 2 a second
    assert three.ratios[-1].estimate == pytest.approx(5 / 10)  # 20 updates at 4 a second
    assert (one.delayed_reached, one.reference_reached) == (3, 3)


def test_the_advantage_is_lost_where_an_update_is_worth_less_than_one_of_tau_plus_1():
    # tau = 3: half the worth, 4 times as often; tau = 7: worth 1/16, 8 times as often: twice as long
    dose = dose_of({1: 1.0, 3: 4.0, 7: 16.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    ratios = [response.ratios[-1].estimate for response in dose.clocks[0].responses]
    assert ratios == pytest.approx([0.5, 1.0, 2.0], rel=0.06)
    assert dose.clocks[0].points[-1].at == pytest.approx(3.0, abs=0.3)
    assert answer(dose.clocks[0].points[-1]).startswith("the advantage is lost at tau = 3")


def test_times_are_compared_at_the_lowest_loss_that_both_reach_so_that_a_short_budget_is_no_advantage():
    # under exponential times 80 delayed updates end long before 40 rounds of two, and bring next to nothing
    dose = dose_of({1: 100.0, 3: 1.0})
    dose.put_on_clock("exponential:1", arrival_seconds)
    response, _ = dose.clocks[0].responses
    assert response.delayed_reached == 0
    assert response.reference_reached == len(SEEDS)
    # 80 updates at 2 a second are worth .08, less than the first of 40 rounds
    assert response.ratios[-1].estimate > 20
    assert response.gap.estimate > 1


def test_the_gap_is_taken_when_the_shorter_budget_ends():
    # 80 updates in 40 s bring 4.0 at half the worth; 40 rounds in 40 s bring 4.0 too
    dose = dose_of({1: 2.0, 3: 1.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    even, ahead = dose.clocks[0].responses
    assert even.gap.estimate == pytest.approx(0.0)
    assert ahead.gap.estimate == pytest.approx(4.0 - 16.0)


def test_which_share_of_the_improvement_is_compared_moves_the_ratio_and_all_are_told():
    # rounds bring .1 each; delayed updates .2 each down to 7 and then next to nothing: soon half way, late at the end
    dose = dose_of({1: 1.0, 3: 1.0})
    bent = tuple(max(9.0 - 0.2 * version, 7.0 - 0.01 * (version - 10)) for version in range(81))
    dose.curves[DELAYED][1].update(dict.fromkeys(SEEDS, Curve(tuple(range(81)), bent, 80)))
    dose.put_on_clock("constant:1", arrival_seconds)
    response, _ = dose.clocks[0].responses
    # down to 6.3: half way is 7.65, 13.5 rounds; of two updates at one time the second counts: 7.8 at 3 s, 7.4 at 4 s
    assert response.ratios[0].estimate == pytest.approx(3.375 / 13.5)
    assert response.ratios[-1].estimate == pytest.approx(40 / 27)
    assert [ratio.n for ratio in response.ratios] == [3] * len(SHARES)
    assert sorted(ratio.estimate for ratio in response.ratios) == [ratio.estimate for ratio in response.ratios]
    points = dose.clocks[0].points
    assert len(points) == len(SHARES)
    text = "\n".join(dose.lines())
    for share, ratio, point in zip(SHARES, response.ratios, points, strict=True):
        assert f"{ratio.estimate:.3f}" in text
        assert f"seconds to {100 * share:3g} %: {answer(point)}" in text


def test_a_mean_that_crosses_more_than_once_has_no_single_crossing():
    dose = dose_of({1: 1.0, 3: 8.0, 7: 4.0, 15: 32.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    told = answer(dose.clocks[0].points[-1])
    crossings = dose.clocks[0].points[-1].crossings
    assert len(crossings) == 3
    assert 1 < crossings[0] < 3 < crossings[1] < 7 < crossings[2] < 15
    ends = f"between tau = {crossings[0]:.2g} and {crossings[2]:.2g}"
    assert told.startswith(f"no single crossing (the mean crosses 3 times, {ends}), 95 % interval")
    assert "is lost at" not in told


def test_a_run_that_stands_for_both_algorithms_counts_once_among_the_rates_at_an_edge():
    dose = dose_of({0: 1.0, 1: 1.0, 3: 1.0})
    curves = {DELAYED: dose.curves[DELAYED], REFERENCE: {**dose.curves[REFERENCE], 0: dose.curves[DELAYED][0]}}
    chosen = {name: {**dose.chosen[name], 0: (5e-4, True)} for name in (DELAYED, REFERENCE)}
    dose = Dose(curves, dose.targets, chosen, "given")
    assert dose.lines()[-1].endswith("1 of 5")
    assert any("the same run" in line for line in dose.lines())


def test_a_run_that_never_gets_below_its_first_loss_has_no_time_and_says_so():
    dose = dose_of({1: -1.0, 3: 1.0})
    with pytest.raises(UsageError, match="delay 1, seed 100: one of the two runs never gets below its first loss"):
        dose.put_on_clock("constant:1", arrival_seconds)


def test_table_and_picture_are_written(tmp_path):
    dose = dose_of({0: 1.0, 1: 1.0, 3: 2.0, 7: 16.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    text = "\n".join(dose.lines())
    assert "speeds constant:1 (virtual clock), 3 seeds" in text
    paths = save(dose, tmp_path / "out")
    assert [path.suffix for path in paths] == [".csv", ".png", ".svg"]
    assert len(paths[0].read_text().splitlines()) == 1 + 3 * len(SEEDS)
    assert all(path.stat().st_size > 2000 for path in paths[1:])


@pytest.fixture
def script(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return importlib.import_module("dose_response")


@pytest.mark.slow
def test_pairs_of_real_processes_are_timed_at_the_rates_of_the_virtual_clock_and_kept_apart(
    script, tmp_path, monkeypatch, capsys
):
    (tmp_path / "train.txt").write_text(sentences(200, seed=0))
    (tmp_path / "eval.txt").write_text(sentences(20, seed=1))
    text = {"data": str(tmp_path / "train.txt"), "eval_data": str(tmp_path / "eval.txt")}
    text |= {"cache_dir": str(tmp_path / "cache"), "seq_len": 16, "batch_size": 2, "warmup": 0, "device": "cpu"}
    config = {
        "name": "dose",
        "base_model": {**text, "vocab_size": 512, "samples": 4, "evaluations": 1},
        "base": {**text, "samples": 24, "evaluations": 4},
        "algorithms": {
            "sync": {"mode": "sync", "tune": {"learning_rate": [3e-3]}},
            "delayed": {"mode": "async", "rule": "fixed_delay:delay={nproc-1}", "tune": {"learning_rate": [1e-3]}},
        },
        "conditions": [{"nproc": [2, 3], "clock": "virtual"}],
        "seeds": [100],
        "tuning": {"seeds": [0]},
        "analysis": {"reference": "sync", "primary": {"endpoint": "loss_at_equal_samples", "num_workers": 3}},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    out = tmp_path / "out"
    arguments = ["--config", str(tmp_path / "config.yaml"), "--out", str(out), "--speeds", "constant:1", "--measured"]
    monkeypatch.setattr("sys.argv", ["dose_response.py", *arguments])
    monkeypatch.setattr(script, "available_cores", lambda: 2)
    assert script.main() == 0
    printed = capsys.readouterr().out
    virtual, measured = printed.split("MEASURED: real processes on this machine, no declared speeds, 1 seeds")
    assert "speeds constant:1 (virtual clock)" in virtual
    assert "tau = 1, 2 processes: " in measured
    assert "virtual clock)" not in measured
    pairs = Path(f"{out}-measured")
    plan = json.loads((pairs / "plan.json").read_text())
    # two cores: one delay
    assert {(arm["algorithm"], arm["num_workers"], arm["clock"]) for arm in plan["arms"]} == {
        ("sync", 2, "measured"),
        ("delayed", 2, "measured"),
    }
    assert [run["stage"] for run in plan["runs"]] == ["test"] * 2
    for arm, mode, rate in (("sync-w2", "sync", 3e-3), ("delayed-w2", "async", 1e-3)):
        summary = json.loads((pairs / "test" / arm / "s100" / "summary.json").read_text())
        settings = yaml.safe_load((pairs / "test" / arm / "s100" / "settings.yaml").read_text())
        assert (summary["mode"], settings["learning_rate"], summary["clock"]) == (mode, rate, "measured")
    delays = {
        delay
        for line in (pairs / "test" / "delayed-w2" / "s100" / "events.jsonl").read_text().splitlines()
        for _, delay in json.loads(line).get("uses") or ()
    }
    assert delays <= {0, 1}  # the first ones find nothing to wait for
    assert (out / "dose_response" / "measured.csv").read_text().splitlines()[0].startswith("delay,log_ratio_at_50")
    monkeypatch.setattr(script, "available_cores", lambda: 1)
    assert script.main() == 2
    assert "--measured needs a core for every thread" in capsys.readouterr().err


def test_a_measured_pair_says_which_is_sooner_and_an_oversubscribed_one_that_it_compares_nothing(capsys):
    dose = dose_of({1: 1.0, 3: 1.0})
    dose.put_on_clock("constant:1", arrival_seconds)
    even, _ = dose.clocks[0].responses
    sooner = dataclasses.replace(even, ratios=(Interval(0.5, 0.4, 0.6, 0.95, 3),) * len(SHARES))
    slower = dataclasses.replace(even, ratios=(Interval(1.5, 1.4, 1.6, 0.95, 3),) * len(SHARES))
    open_ended = dataclasses.replace(even, ratios=(Interval(1.0, 0.9, 1.1, 0.95, 3),) * len(SHARES))
    dose.measured = Measured((sooner, slower, open_ended), 2)
    sooner_line, slower_line, open_line, note = dose.lines()[-4:]
    assert sooner_line.endswith("asynchronous training is sooner")
    assert slower_line.endswith(
        "1.50 [1.40, 1.60] times the seconds of synchronous training to the lowest loss that both "
        "reach: asynchronous training is slower"
    )
    assert open_line.endswith("no difference between the two can be told")
    assert "2 of these runs had more threads than cores" in note


def test_a_folder_that_is_no_dose_response_sweep_is_refused(tmp_path):
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
