"""The published results: their closed forms and theorems, and scripts from end to end on smaller set-ups still."""

import doctest
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from commands import Command, until

import async_diloco
import backup_workers
import error_runtime
import implicit_momentum
import phase_diagram
import reproduction
import ringleader
import ringmaster
from asyncsgd.core.limits import Limits
from asyncsgd.rules import Asynchronous, KSync
from asyncsgd.simulation.problems import Heterogeneous, Tridiagonal
from reproduction import Arm, Fixed, interval, main, run

pytestmark = pytest.mark.slow


def carried_out(script, folder, *flags):
    """The files that a script wrote, and its tables."""
    with pytest.raises(SystemExit, match="0"):
        main(script.make, "", "", ["--quick", "--seeds", "1", "--jobs", "1", "--out", str(folder), *flags])
    tables = {}
    for path in folder.glob("*.csv"):
        tables[path.stem] = pandas.read_csv(path, dtype=str)
    return {file.name for file in folder.iterdir() if file.stat().st_size}, tables


@pytest.mark.parametrize("path", sorted(Path(reproduction.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_examples_of_a_script_say_what_it_does(path):
    assert doctest.testmod(sys.modules[path.stem]).failed == 0


def test_ringmaster_beats_rennala_beats_delay_adaptive_also_on_fifty_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(ringmaster, "NUM_WORKERS", 50)
    files, tables = carried_out(ringmaster, tmp_path)
    assert files == {"ringmaster.csv", "ringmaster.md", "ringmaster.png"}
    losses = [float(cell) for cell in tables["ringmaster"]["f - f* at 100 s"][:3]]
    assert losses == sorted(losses)
    assert tables["ringmaster"].iloc[1, -1] == "466"  # of the prototype


def test_the_exact_excess_is_that_of_the_simulated_mean():
    problem = Tridiagonal(noise_kind="full")
    speeds = ringmaster.HalfNormal()
    arm = Arm("", KSync(24), 1.0, problem.on, speeds.on, 6174, Limits(seconds=40), 4)
    curve = run([arm], [0], 1)
    # After a few steps the noise, 0.03 in all, is small beside what is left of the start.
    exact = ringmaster.exact_excess(problem, 1.0, 24, curve.updates.max())
    assert curve.loss.iloc[-1] == pytest.approx(exact, rel=0.01)
    # In the long run a mode has the variance eta sigma^2 / (batch (2 - eta c)) / c.
    curvatures, *_ = ringmaster.modes(1729)
    floor = sum(0.01**2 / 24 / (2 - c) / 2 for c in curvatures)
    assert ringmaster.exact_excess(problem, 1.0, 24, 10**9) == pytest.approx(floor)


def test_seconds_per_update_are_the_published_closed_forms():
    def seconds(family, quorum):
        return [error_runtime.seconds_per_update(family, quorum, shift) for shift in (0.0, 1.0)]

    harmonic = sum(1 / k for k in range(1, 9))
    assert seconds("K-sync", 1) == pytest.approx([1 / 8, 1 + 1 / 8])
    assert seconds("K-sync", 4) == pytest.approx([0.6345, 1.6345], abs=5e-5)
    assert seconds("sync", 8) == seconds("K-sync", 8) == pytest.approx([harmonic, 1 + harmonic])
    assert seconds("K-async", 1) == seconds("async", 1) == pytest.approx([1 / 8, 2 / 8])
    assert seconds("K-async", 4)[1] is None  # only a bound
    assert seconds("K-batch-async", 8) == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_the_floors_of_asynchronous_and_synchronous_sgd_are_their_closed_forms(workers):
    a = np.array([0.03, 0.3])
    stationary = error_runtime.stationary
    asynchronous = (1 + workers * a) / (2 + a - workers * a**2) / a
    assert stationary(error_runtime.k_async(a, workers, 1)) == pytest.approx(asynchronous)
    assert stationary(error_runtime.k_batch_async(a, workers, 1)) == pytest.approx(asynchronous)
    assert stationary(error_runtime.k_async(a, workers, workers)) == pytest.approx(1 / (a * (2 - a) * workers))


@pytest.mark.parametrize("family", error_runtime.FAMILIES)
def test_measured_seconds_and_floors_agree_with_the_closed_forms(monkeypatch, family):
    monkeypatch.setattr(error_runtime, "EVALUATIONS", 300)
    key = "exponential", family, 2
    curves = run([error_runtime.arms(600)[key]], [0], 1)
    row = error_runtime.row_of(key, curves, 600)
    assert row["seconds per update"].estimate == pytest.approx(float(row["closed form"]), rel=0.06)
    assert row["error, last half"].estimate == pytest.approx(float(row["exact floor"]), rel=0.1)


def test_the_best_quorums_are_the_expected_ones():
    for mean, (quorum, gain) in backup_workers.PUBLISHED.items():
        assert backup_workers.best_quorum(mean) == (quorum, pytest.approx(gain, abs=0.005))


def test_the_learning_rate_puts_the_floor_at_half_of_the_target():
    for quorum in (1, 50, 100):
        eta = backup_workers.learning_rate(1.0, quorum)
        curvature = backup_workers.SPECTRUM
        squares = eta**2 / quorum / (eta * curvature * (2 - eta * curvature))
        assert curvature @ squares / 2 == pytest.approx(backup_workers.TARGET / 2)
    assert backup_workers.learning_rate(0.005, 1) == 1.0


@pytest.mark.parametrize("quorum", [1, 96])
def test_without_noise_the_steps_to_the_target_are_those_of_gradient_descent(quorum):
    steps = backup_workers.expected_steps(0.0, quorum)
    curvature = backup_workers.SPECTRUM
    errors = []
    for step in (steps - 1, steps):
        errors.append(float(curvature @ (1 - curvature) ** (2 * step)) / 2)
    assert errors[1] <= backup_workers.TARGET < errors[0]
    assert backup_workers.measure("bias-dominated", 0.05, quorum, 0, 0)[0] == steps  # its noise is too small


def test_backup_workers_finds_the_best_quorum(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backup_workers, "PUBLISHED", {1.0: (69, 1.98)})
    monkeypatch.setattr(backup_workers, "QUICK_QUORUMS", (50, 100))
    files, tables = carried_out(backup_workers, tmp_path)
    assert len(files) == 5
    assert 68 <= int(tables["backup_workers"]["N* measured"][0]) <= 70  # 100 rounds do not tell neighbours apart
    assert "bias-dominated: expected N = 50, measured N = 50" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "seeds", "tolerance"), [(2, 300, 0.04), (8, 1000, 0.02)])
def test_the_mean_iterate_obeys_the_closed_recursion(workers, seeds, tolerance):
    mean = implicit_momentum.mean_iterate(workers, range(seeds))
    expected = implicit_momentum.expected_iterate(workers, len(mean) - 1)
    assert mean == pytest.approx(expected, abs=tolerance)
    assert mean[:2] == pytest.approx([1.0, 0.8], rel=1e-12)  # not random: all workers start at x_0


@pytest.mark.parametrize("workers", [2, 4, 8, 16])
def test_a_fit_to_the_exact_mean_gives_the_momentum(workers):
    exact = implicit_momentum.expected_iterate(workers, 3 * workers + 10)
    rate = 0.2 / workers
    for fitted in (implicit_momentum.fit(exact), implicit_momentum.fit(exact, rate)):
        assert fitted == pytest.approx((1 - 1 / workers, rate))


def test_a_jackknife_removes_the_bias_of_a_square():
    # The square of a mean of 2 values of variance v overestimates by v / 2.
    mean = 2.0
    variance = 2.0
    values = implicit_momentum.pseudo_values(lambda mean: mean[0] ** 2, [[1.0], [3.0]])
    assert interval(values).estimate == pytest.approx(mean**2 - variance / 2)


def test_implicit_momentum_writes_both_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(implicit_momentum, "WORKERS", (1, 2))
    monkeypatch.setattr(implicit_momentum, "LONG_RUNS", 2)
    files, tables = carried_out(implicit_momentum, tmp_path, "--seeds", "20")
    assert len(files) == 5
    assert [*tables["implicit_momentum"].iloc[0, 2:4]] == ["-", "0.0000"]


def test_a_batch_of_the_mixture_is_a_function_of_seed_worker_and_index_and_its_gradient_that_of_its_loss():
    first = async_diloco.Mixture((6, 2, 5, 40), 3, seed=3)
    second = async_diloco.Mixture((6, 2, 5, 40), 3, seed=3)
    x = first.initial()
    here, there, other = np.empty((3, first.num_parameters))
    first.gradient(x, 2, 7, here)
    second.gradient(x, 0, 0, other)
    second.gradient(x, 2, 7, there)
    np.testing.assert_array_equal(here, there)
    assert not np.array_equal(here, other)
    direction = np.random.Generator(np.random.Philox(1)).standard_normal(len(x))
    step = 1e-6
    ahead = first.gradient(x + step * direction, 2, 7, other)
    behind = first.gradient(x - step * direction, 2, 7, other)
    assert here @ direction == pytest.approx((ahead - behind) / (2 * step), rel=1e-6)


def test_watching_a_rule_does_not_change_its_run():
    cosines = []
    rule = async_diloco.RULES[async_diloco.BOTH]
    mixture = async_diloco.Mixture((6, 1, 5, 8), 4, seed=0)
    speeds = Fixed(async_diloco.SECONDS_PER_STEP)
    ends = []
    for one in (async_diloco.watched(rule, cosines), rule):
        arm = Arm("", one, 0.1, lambda *on: mixture, speeds.on, 4, Limits(samples=400))
        ends.append(arm.simulated(0).parameters)
    assert torch.equal(*ends)
    assert cosines
    for cosine in cosines:
        assert -1.0 - 1e-12 <= cosine <= 1.0 + 1e-12


def test_asynchronous_sgd_ends_at_the_frequency_weighted_point_and_malenia_at_the_optimum():
    assert round(ringleader.WEIGHTED, 4) == 0.3653
    of_malenia = ringleader.ending(ringleader.Malenia(), 0.1, 1500.0)
    asynchronous = ringleader.ending(Asynchronous(), 0.02, 1500.0)
    assert of_malenia == pytest.approx(2 / 3.5, abs=1e-4)
    assert asynchronous == pytest.approx(ringleader.WEIGHTED, abs=0.02)


def test_malenia_averages_each_worker_first():
    # In 5.1 seconds the workers bring 5, 2 and 1 gradients, all at 0: each of slope -1, 2, -3.
    times = Fixed(ringleader.TIMES)
    end = Limits(seconds=5.2)
    done = Arm("", ringleader.Malenia(), 0.3, Heterogeneous().on, times.on, 3, end).simulated(0)
    assert done.num_arrivals == 8
    assert done.version == 1
    assert done.parameters.item() == pytest.approx(0.3 * (1 - 2 + 3) / 3)


def test_permuted_times_are_a_permutation_plus_something_and_a_function_of_worker_and_draw():
    sampler = ringleader.permuted_times(8, seed=5)
    again = ringleader.permuted_times(8, seed=5)
    draws = np.empty((8, 300))
    for worker in range(8):
        for draw in reversed(range(300)):
            draws[worker, draw] = again.draw_one(worker, draw)
    least = np.floor(draws.min(axis=1) + 1e-9).astype(int)
    assert sorted(least) == list(range(1, 9))
    assert sampler.draw_one(3, 200) == draws[3, 200]
    assert sampler.draw_one(0, 1) == draws[0, 1]


def test_a_threshold_counts_as_reached_only_for_good():
    looks = pandas.DataFrame({"seconds": [0.0, 1.0, 2.0, 3.0], "loss": [1.0, 0.1, 0.4, 0.1]})
    for threshold, seconds in ((0.5, 1.0), (0.2, 3.0), (0.05, math.inf)):
        assert ringleader.reached(looks, threshold) == seconds


@pytest.mark.parametrize(("noise", "synchronous", "asynchronous"), [(1, 1, 511), (100, 3.1, 32), (10_000, 6.9, 1.4)])
def test_the_theory_gives_the_design_table(noise, synchronous, asynchronous):
    # tau_i = i, n = 1e4: the ratios to T*, min over m of the harmonic mean times (1 + s / m)
    taus = phase_diagram.mean_seconds(1.0, 10_000)
    numbers = np.arange(1, 10_001)
    harmonic_means = numbers / np.cumsum(1.0 / taus)
    best = (harmonic_means * (1.0 + noise / numbers)).min()
    of_synchronous, *_ = phase_diagram.theory_synchronous(taus, noise)
    of_asynchronous = phase_diagram.theory_asynchronous(taus, noise)
    assert of_synchronous / best == pytest.approx(synchronous, rel=0.02)
    assert of_asynchronous / best == pytest.approx(asynchronous, rel=0.03)


def test_stopping_slow_trials_early_changes_nothing_about_the_best():
    cell = phase_diagram.Cell(noise=10.0, exponent=1.0, num_workers=4, jitter=True, num_rates=3, num_seeds=1)
    trials = phase_diagram.grid(Asynchronous(), 0.1, 5)
    seconds = []
    for rule, rate, *_ in trials:
        seconds.append(phase_diagram.seconds_to_target(cell, rule, rate, phase_diagram.TUNING_SEED, 400.0, 0.5))
    assert phase_diagram.tune(cell, trials, 400.0, 0.5) == trials[np.argmin(seconds)]


def test_no_seeds_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(phase_diagram.make, "", "", ["--seeds", "0"])
    assert "argument --seeds: invalid positive value: '0'" in capsys.readouterr().err


@pytest.mark.processes
def test_when_a_script_is_killed_its_processes_go_busy_or_idle(tmp_path):
    tasks = [("import time; open('busy', 'w').close(); time.sleep(600)",), ("open('idle', 'w').close()",)]
    path = str(Path(reproduction.__file__).parent)
    code = f"import sys; sys.path[0] = {path!r}; from reproduction import each; list(each(exec, {tasks}, 2))"
    command = Command([sys.executable, "-c", code], tmp_path)
    try:
        until(lambda: (tmp_path / "busy").exists() and (tmp_path / "idle").exists(), "both tasks")
        assert len(command.pids()) >= 4  # itself, its fork server and two more
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(10)
        until(lambda: not command.pids(), "its processes to go by themselves", 30)
    finally:
        command.end()
