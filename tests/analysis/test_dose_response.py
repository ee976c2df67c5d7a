"""Dose and response: losses by update, put on the clocks of declared speeds, against hand-computed times."""

from __future__ import annotations

import importlib
import json
import math
import shutil

import numpy as np
import pandas as pd
import pytest
import yaml
from gallery import sentences
from synthetic import SyntheticArm, planned, straight, write_plan, write_run

from analysis.crossing import crossing_point
from analysis.dose import DELAYED, RATIOS, REFERENCE, Dose, pairs_of, read_dose
from analysis.dose_response import crossing_in_words, text
from asyncsgd.errors import UsageError
from asyncsgd.simulation.simulate import arrival_seconds

SEEDS = (100, 101, 102)
WHOLE = [*RATIOS][-1]


def dose_of(slowdown, losses=None):
    """A loss of 9, evaluated at every update: each delayed one brings 0.1 / slowdown[tau], each synchronous round of
    tau + 1 gradients 0.1. Both compute 40 (tau + 1) gradients. `losses` in place of those of tau = 1, delayed."""
    rows = []
    curves = {}
    for delay, slow in slowdown.items():
        for algorithm, size, brings in ((DELAYED, 1, 0.1 / slow), (REFERENCE, delay + 1, 0.1)):
            updates = np.arange(40 * (delay + 1) // size + 1)
            curve = pd.DataFrame({"updates": updates, "samples": updates * size, "loss": 9 - brings * updates})
            if losses is not None and (algorithm, delay) == (DELAYED, 1):
                curve["loss"] = losses
            arm = f"{algorithm}-{delay}"
            of_arm = {"arm": arm, "algorithm": algorithm, "delay": delay, "batch_size": 1, "learning_rate": 1e-3}
            of_arm |= {"loss": curve["loss"].iloc[-1], "edge": False}
            for seed in SEEDS:
                run = f"{arm}-{seed}"
                curves[run] = curve
                rows.append({"run": run, "seed": seed, **of_arm})
    return Dose(pd.DataFrame(rows), curves, dict.fromkeys(slowdown, 8.0))


@pytest.mark.parametrize(
    ("slowdown", "ratios", "lost_at"),
    [
        ({1: 1.0, 3: 2.0}, [5 / 10, 5 / 10], None),  # 10 updates at 2 a second, 20 at 4 a second; 10 rounds
        ({1: 1.0, 3: 4.0, 7: 16.0}, [0.5, 1.0, 2.0], 3.0),  # worth 1 / 16 and 8 times as often: twice as long
    ],
)
def test_at_equal_speeds_updates_come_tau_plus_1_times_as_often_as_rounds(slowdown, ratios, lost_at):
    pairs = pairs_of(dose_of(slowdown), "constant:1", arrival_seconds)
    logs = pairs.pivot(index="seed", columns="delay", values=WHOLE)
    assert np.exp(logs.mean()).to_list() == pytest.approx(ratios, rel=0.06)
    told = text(dose_of(slowdown), pairs)
    assert "speeds constant:1 (virtual clock), 3 seeds" in told
    if lost_at is not None:
        assert crossing_point(logs.columns, logs).at == pytest.approx(lost_at, abs=0.3)
        assert "seconds to 100 %: the advantage is lost at tau = 3" in told


def test_times_are_compared_at_the_lowest_loss_that_both_reach_so_that_a_short_budget_is_no_advantage():
    # under exponential times 80 delayed updates end long before 40 rounds of two, and bring next to nothing
    pairs = pairs_of(dose_of({1: 100.0, 3: 1.0}), "exponential:1", arrival_seconds)
    first = pairs[pairs["delay"] == 1]
    assert not first["delayed_reached"].any()
    assert first["sync_reached"].all()
    # 80 updates at 2 a second are worth .08, less than the first of 40 rounds
    assert np.exp(first[WHOLE].mean()) > 20
    assert first["gap"].mean() > 1


def test_the_gap_is_taken_when_the_shorter_budget_ends():
    # 80 updates in 40 s bring 4.0 at half the worth; 40 rounds in 40 s bring 4.0 too
    pairs = pairs_of(dose_of({1: 2.0, 3: 1.0}), "constant:1", arrival_seconds)
    gaps = pairs.groupby("delay")["gap"].mean()
    assert gaps.to_list() == pytest.approx([0.0, 4.0 - 16.0])


def test_which_share_of_the_improvement_is_compared_moves_the_ratio_and_all_are_told():
    # rounds bring .1 each; delayed updates .2 each down to 7 and then next to nothing: soon half way, late at the end
    updates = np.arange(81)
    losses = np.maximum(9.0 - 0.2 * updates, 7.0 - 0.01 * (updates - 10))
    dose = dose_of({1: 1.0, 3: 1.0}, losses)
    pairs = pairs_of(dose, "constant:1", arrival_seconds)
    ratios = np.exp(pairs.loc[pairs["delay"] == 1, [*RATIOS]].mean())
    # down to 6.3: half way is 7.65, 13.5 rounds; of two updates at one time the second counts: 7.8 at 3 s, 7.4 at 4 s
    assert (ratios.iloc[0], ratios.iloc[-1]) == pytest.approx((3.375 / 13.5, 40 / 27))
    assert ratios.is_monotonic_increasing
    told = text(dose, pairs)
    for column, name in RATIOS.items():
        assert f"{ratios[column]:.3f}" in told
        assert f"seconds {name}: no crossing" in told or f"seconds {name}: the advantage" in told


def test_a_mean_that_crosses_more_than_once_has_no_single_crossing():
    pairs = pairs_of(dose_of({1: 1.0, 3: 8.0, 7: 4.0, 15: 32.0}), "constant:1", arrival_seconds)
    logs = pairs.pivot(index="seed", columns="delay", values=WHOLE)
    crossing = crossing_point(logs.columns, logs)
    told = crossing_in_words(crossing)
    first, second, third = crossing.crossings
    assert 1 < first < 3 < second < 7 < third < 15
    ends = f"between tau = {first:.2g} and {third:.2g}"
    assert told.startswith(f"no single crossing (the mean crosses 3 times, {ends}), 95 % interval")


def test_only_the_cells_of_measured_seconds_are_empty_where_these_are_not_compared():
    dose = dose_of({1: 1.0, 3: 2.0})
    timed = {}
    for run, frame in dose.curves.items():
        timed[run] = frame.assign(seconds=1.0 * frame["updates"])
    dose = dose._replace(curves=timed)
    whole = pairs_of(dose)
    places = [(1, seed) for seed in SEEDS]
    untimed = dict.fromkeys(places, "other programs used 30 % of the machine")
    busy = pairs_of(dose._replace(untimed=untimed))
    one = busy["delay"] == 1
    seconds = [*RATIOS, "gap"]
    assert whole[seconds].notna().all(axis=None)
    assert busy.loc[one, seconds].isna().all(axis=None)
    pd.testing.assert_frame_equal(busy[~one], whole[~one])
    others = whole.columns.difference([*seconds, "untimed"])
    pd.testing.assert_frame_equal(busy[others], whole[others])
    told = text(dose, busy).splitlines()
    assert any(line.split()[:6] == ["1", "-", "-", "-", "-", "-"] for line in told)
    reason = "tau 1, seed 101: its seconds are not compared: other programs used 30 % of the machine"
    assert f"      {reason}" in told


def test_a_run_that_never_gets_below_its_first_loss_has_no_time_and_says_so():
    with pytest.raises(UsageError, match="delay 1, seed 100: one of the two runs never gets below its first loss"):
        pairs_of(dose_of({1: -1.0, 3: 1.0}), "constant:1", arrival_seconds)


def test_a_delay_without_a_target_has_its_times():
    dose = dose_of({1: 1.0, 3: 2.0})._replace(targets={})
    pairs = pairs_of(dose, "constant:1", arrival_seconds)
    assert pairs[WHOLE].notna().all()
    assert "0/3" not in text(dose, pairs)


def test_a_study_that_goes_on_is_told_to_be_unfinished(tmp_path):
    arms = [SyntheticArm("sync"), SyntheticArm("delayed")]
    write_plan(tmp_path, arms, [planned("test/x/s0", "test", arms[1].name, 0)])
    with pytest.raises(UsageError, match=r"not finished: test/x/s0 is MISSING; type its command again$"):
        read_dose(tmp_path)
    folder = tmp_path / "test" / "x" / "s0"
    write_run(folder, arms[1], straight(9, 8, seconds=1), status="FAILED")
    with pytest.raises(UsageError, match="s0 is FAILED; type its command again with --retry"):
        read_dose(tmp_path)
    shutil.rmtree(folder)
    write_run(folder, arms[1], straight(9, 8, seconds=1), seed=1)
    with pytest.raises(UsageError, match="s0 is MISPLACED; move its folder out of the study's, and type its command"):
        read_dose(tmp_path)


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
    train = tmp_path / "train.txt"
    train.write_text(sentences(200, seed=0))
    evaluated = tmp_path / "eval.txt"
    evaluated.write_text(sentences(20, seed=1))
    data = {"data": str(train), "eval_data": str(evaluated), "cache_dir": str(tmp_path / "cache")}
    data |= {"seq_len": 16, "batch_size": 2, "warmup": 0, "device": "cpu"}
    config_yaml = tmp_path / "config.yaml"
    config = {
        "name": "dose",
        "base_model": {**data, "vocab_size": 512, "samples": 4, "evaluations": 1},
        "base": {**data, "samples": 24, "evaluations": 4},
        "algorithms": {
            "sync": {"mode": "sync", "tune": {"learning_rate": [3e-3]}},
            "delayed": {"mode": "async", "rule": "fixed_delay:delay={nproc-1}", "tune": {"learning_rate": [1e-3]}},
        },
        "conditions": [{"nproc": [1, 2, 3], "clock": "virtual"}],
        "exclude": [{"algorithm": "sync", "nproc": 1}],
        "seeds": [100],
        "tuning": {"seeds": [0]},
        "analysis": {"reference": "sync", "primary": {"endpoint": "loss_at_equal_samples", "num_workers": 3}},
    }
    config_yaml.write_text(yaml.safe_dump(config))
    out = tmp_path / "out"
    measured_out = tmp_path / "out-measured"
    arguments = [str(config_yaml), "--out", str(out), "--speeds", "constant:1", "--measured"]
    monkeypatch.setattr("sys.argv", ["dose_response.py", *arguments])
    monkeypatch.setattr(script, "available_cores", lambda: 2)
    monkeypatch.setattr("analysis.gate.MAX_OTHER_LOAD", math.inf)  # other tests run beside this one
    assert script.main() == 0
    virtual, measured = capsys.readouterr().out.split("MEASURED: real processes on this machine")
    assert "the same run" in virtual
    assert "\n   1 " in measured
    assert "virtual clock)" not in measured
    plan = json.loads((measured_out / "plan.json").read_text())
    places = {(arm["algorithm"], arm["num_workers"], arm["clock"]) for arm in plan["arms"]}
    assert places == {("sync", 2, "measured"), ("delayed", 2, "measured")}  # two cores: one delay
    runs = read_dose(measured_out).runs.set_index("algorithm")
    assert runs["learning_rate"].to_dict() == {"sync": 3e-3, "delayed": 1e-3}
    assert runs.loc["delayed", "delay_max"] <= 1  # the first gradients find nothing to wait for
    monkeypatch.setattr("analysis.gate.MAX_OTHER_LOAD", -1.0)  # as on a machine that others use
    busy = read_dose(measured_out)
    assert "other programs used" in busy.untimed[1, 100]
    pairs = pairs_of(busy._replace(targets={1: 1.0}))
    assert pairs[[*RATIOS, "gap"]].isna().all(axis=None)
    assert read_dose(out).untimed == {}
    files = {file.name: file for file in (out / "dose_response").iterdir()}
    assert {"dose_response.csv", "measured.csv", "dose_response.png", "dose_response.svg"} < {*files}
    assert files["measured.csv"].read_text().startswith("delay,log_ratio_at_50_percent,")
    assert files["dose_response.csv"].read_text().count("constant:1,") == 2
    monkeypatch.setattr(script, "available_cores", lambda: 1)
    assert script.main() == 2
    assert "--measured needs a core for every thread" in capsys.readouterr().err
    config["conditions"] = [{"nproc": [1, 3], "clock": "virtual"}]
    config_yaml.write_text(yaml.safe_dump(config))
    assert script.main() == 2
    assert "on the same two or more numbers of workers" in capsys.readouterr().err
