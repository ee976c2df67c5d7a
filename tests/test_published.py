"""The published results: their closed forms and theorems, and scripts from end to end on smaller set-ups still."""

import doctest
import importlib
import math
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from test_faults import Command, until

from asyncsgd.rules import Asynchronous
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Heterogeneous
from reproduction import Arm, Fixed, interval, main, run

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "published"


@pytest.fixture(scope="module")
def scripts():
    """Imports a script, which takes a while."""
    return importlib.import_module


def carried_out(make, folder, *flags):
    """The files that a script wrote, and of each table the cells, its headings first."""
    assert main(make, "", "", ["--quick", "--seeds", "1", "--jobs", "1", "--out", str(folder), *flags]) == 0
    files = {file.name for file in folder.iterdir() if file.stat().st_size}
    tables = {
        path.stem: [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in path.read_text().splitlines()
            if line.startswith("| ")
        ]
        for path in folder.glob("*.md")
    }
    return files, tables


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_examples_of_a_script_say_what_it_does(scripts, name):
    assert doctest.testmod(scripts(name)).failed == 0


def test_ringmaster_beats_rennala_beats_delay_adaptive_also_on_fifty_workers(scripts, tmp_path, monkeypatch):
    ringmaster = scripts("ringmaster")
    monkeypatch.setattr(ringmaster, "NUM_WORKERS", 50)
    files, tables = carried_out(ringmaster.make, tmp_path)
    assert files == {"ringmaster.csv", "ringmaster.md", "ringmaster.png"}
    cells = {(row[0], row[1].partition(",")[0]): row for row in tables["ringmaster"]}
    losses = [float(cells["add", name][2]) for name in ("Ringmaster R=6", "Rennala B=6", "delay-adaptive")]
    assert losses == sorted(losses)
    assert cells["add", "Rennala B=6"][-1] == "466"  # of the prototype


def test_the_distance_from_the_prototype_is_in_standard_errors_of_the_difference(scripts):
    # ours: mean 50, variance 2 over 2 seeds; the prototype's: 48.3 with 0.6 over 10
    apart = (50.0 - 48.3) / math.sqrt(2.0 / 2 + 0.6**2 / 10)
    assert scripts("ringmaster").beside("add", "delay-adaptive", 100, [49.0, 51.0]) == f"48.3; {apart:+.1f}"


def test_the_exact_excess_is_that_of_the_simulated_mean(scripts):
    ringmaster = scripts("ringmaster")
    problem, speeds = ringmaster.Tridiagonal(noise_kind="full"), ringmaster.HalfNormal()
    curve = run([Arm("", ringmaster.KSync(24), 1.0, problem.on, speeds.on, 6174, Budget(seconds=40), 4)], [0], 1)
    # After a few steps the noise, 0.03 in all, is small beside what is left of the start.
    exact = ringmaster.exact_excess(problem, 1.0, 24, curve.updates.max())
    assert curve.loss.iloc[-1] == pytest.approx(exact, rel=0.01)
    # In the long run a mode has the variance eta sigma^2 / (batch (2 - eta c)) / c.
    floor = sum(0.01**2 / 24 / (2 - c) / 2 for c in ringmaster.modes(1729)[0])
    assert ringmaster.exact_excess(problem, 1.0, 24, 10**9) == pytest.approx(floor)


def test_seconds_per_update_are_the_published_closed_forms(scripts):
    error_runtime = scripts("error_runtime")
    seconds = {
        method: [error_runtime.seconds_per_update(*method, shift) for shift in (0.0, 1.0)]
        for method in error_runtime.METHODS
    }
    harmonic = sum(1 / k for k in range(1, 9))
    assert seconds["K-sync", 1] == pytest.approx([1 / 8, 1 + 1 / 8])
    assert seconds["K-sync", 4] == pytest.approx([0.6345, 1.6345], abs=5e-5)
    assert seconds["sync", 8] == seconds["K-sync", 8] == pytest.approx([harmonic, 1 + harmonic])
    assert seconds["K-async", 1] == seconds["async", 1] == pytest.approx([1 / 8, 2 / 8])
    assert seconds["K-async", 4][1] is None  # only a bound
    assert seconds["K-batch-async", 8] == pytest.approx([1.0, 2.0])


@pytest.mark.parametrize("workers", [2, 8, 16])
@pytest.mark.parametrize("curvature", [0.1, 1.0])
def test_the_floor_of_asynchronous_sgd_is_its_closed_form(scripts, workers, curvature):
    error_runtime, eta, sigma, a = scripts("error_runtime"), 0.3, 0.7, 0.3 * curvature
    closed = eta * sigma**2 * (1 + workers * a) / (2 * (2 + a - workers * a**2))
    for floor in (error_runtime.k_async_floor, error_runtime.k_batch_async_floor):
        assert floor(np.array([curvature]), eta, sigma, workers, 1) == pytest.approx(closed)


def test_measured_seconds_and_floors_agree_with_the_closed_forms(scripts, monkeypatch):
    error_runtime = scripts("error_runtime")
    monkeypatch.setattr(error_runtime, "EVALUATIONS", 300)
    for family in error_runtime.FAMILIES:
        key = "exponential", family, 2
        row = error_runtime.row_of(key, run([error_runtime.arms(600)[key]], [0], 1), 600)
        assert row["seconds per update"].estimate == pytest.approx(float(row["closed form"]), rel=0.06)
        assert row["error, last half"].estimate == pytest.approx(float(row["exact floor"]), rel=0.1)


def test_a_quorum_of_all_is_sync_and_one_of_one_is_async(scripts, tmp_path, monkeypatch):
    error_runtime = scripts("error_runtime")
    monkeypatch.setattr(error_runtime, "QUICK_SECONDS", 12)
    monkeypatch.setattr(error_runtime, "EVALUATIONS", 24)
    files, tables = carried_out(error_runtime.make, tmp_path)
    assert files == {"error_runtime.csv", "error_runtime.md", "error_runtime.png"}
    cells = {tuple(row[:3]): row[3:] for row in tables["error_runtime"]}
    for times in ("exponential", "shifted_exponential"):
        assert cells[times, "K-sync", "8"] == cells[times, "sync", "8"]  # the same run, under another name
        assert cells[times, "K-async", "1"] == cells[times, "K-batch-async", "1"] == cells[times, "async", "1"]


def test_the_best_quorums_are_the_expected_ones(scripts):
    backup_workers = scripts("backup_workers")
    for mean, (quorum, gain) in backup_workers.PUBLISHED.items():
        assert backup_workers.best_quorum(mean) == (quorum, pytest.approx(gain, abs=0.005))


def test_the_learning_rate_puts_the_floor_at_half_of_the_target(scripts):
    backup_workers = scripts("backup_workers")
    for quorum in (1, 50, 100):
        eta, curvature = backup_workers.learning_rate(1.0, quorum), backup_workers.SPECTRUM
        squares = eta**2 / quorum / (eta * curvature * (2 - eta * curvature))
        assert curvature @ squares / 2 == pytest.approx(backup_workers.TARGET / 2)
    assert backup_workers.learning_rate(0.005, 1) == 1.0


def test_without_noise_the_steps_to_the_target_are_those_of_gradient_descent(scripts):
    backup_workers = scripts("backup_workers")
    curvature = backup_workers.SPECTRUM
    for quorum in (1, 96):
        steps = backup_workers.expected_steps(0.0, quorum)
        errors = [float(curvature @ (1 - curvature) ** (2 * step)) / 2 for step in (steps - 1, steps)]
        assert errors[1] <= backup_workers.TARGET < errors[0]
        assert backup_workers.measure("bias-dominated", 0.05, quorum, 0, 0)[0] == steps  # its noise is too small


def test_backup_workers_finds_the_best_quorum(scripts, tmp_path, monkeypatch, capsys):
    backup_workers = scripts("backup_workers")
    monkeypatch.setattr(backup_workers, "PUBLISHED", {1.0: (69, 1.98)})
    monkeypatch.setattr(backup_workers, "QUICK_QUORUMS", (50, 100))
    files, tables = carried_out(backup_workers.make, tmp_path)
    assert len(files) == 5
    row = tables["backup_workers"][1]
    assert row[:3] == ["1.0", "69", "69"]
    assert 68 <= int(row[3]) <= 70  # 100 rounds do not tell neighbours apart
    assert "bias-dominated: expected N = 50, measured N = 50" in capsys.readouterr().out


@pytest.mark.parametrize(("workers", "seeds", "tolerance"), [(2, 300, 0.04), (8, 1000, 0.02)])
def test_the_mean_iterate_obeys_the_closed_recursion(scripts, workers, seeds, tolerance):
    mean = scripts("implicit_momentum").mean_iterate(workers, range(seeds))
    exact = scripts("implicit_momentum").expected_iterate(workers, len(mean) - 1)
    assert mean == pytest.approx(exact, abs=tolerance)
    assert mean[:2] == pytest.approx([1.0, 0.8], rel=1e-12)  # not random: all workers start at x_0


def test_a_fit_to_the_exact_mean_gives_the_momentum(scripts):
    momentum = scripts("implicit_momentum")
    for workers in (2, 4, 8, 16):
        exact, rate = momentum.expected_iterate(workers, 3 * workers + 10), 0.2 / workers
        for fitted in (momentum.fit(exact), momentum.fit(exact, rate)):
            assert fitted == pytest.approx((1 - 1 / workers, rate))


def test_a_jackknife_removes_the_bias_of_a_square(scripts):
    # The square of a mean of 2 values of variance v overestimates by v / 2.
    values = scripts("implicit_momentum").pseudo_values(lambda mean: mean[0] ** 2, [[1.0], [3.0]])
    assert interval(values).estimate == pytest.approx(2.0**2 - 2.0 / 2)


def test_implicit_momentum_writes_both_tables(scripts, tmp_path, monkeypatch, capsys):
    momentum = scripts("implicit_momentum")
    monkeypatch.setattr(momentum, "WORKERS", (1, 2))
    monkeypatch.setattr(momentum, "LONG_RUNS", 2)
    files, tables = carried_out(momentum.make, tmp_path, "--seeds", "20")
    assert len(files) == 5
    assert tables["implicit_momentum"][1][2:4] == ["-", "0.0000"]
    assert main(momentum.make, "", "", ["--seeds", "15", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --seeds must be a multiple of 10, the number of groups, got 15\n"


def test_a_batch_of_the_mixture_is_a_function_of_seed_worker_and_index_and_its_gradient_that_of_its_loss(scripts):
    first, second = (scripts("async_diloco").Mixture(6, 2, 5, 40, seed=3) for _ in range(2))
    x, here, there, other = first.initial(), *(np.empty(first.num_parameters) for _ in range(3))
    first.gradient(x, 2, 7, here)
    second.gradient(x, 0, 0, other)
    second.gradient(x, 2, 7, there)
    np.testing.assert_array_equal(here, there)
    assert not np.array_equal(here, other)
    direction, step = np.random.Generator(np.random.Philox(1)).standard_normal(len(x)), 1e-6
    losses = [first.gradient(x + moved * direction, 2, 7, other) for moved in (step, -step)]
    assert here @ direction == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6)


def test_watching_a_rule_does_not_change_its_run(scripts):
    diloco, cosines = scripts("async_diloco"), []
    rule, mixture = diloco.RULES[diloco.BOTH], diloco.Mixture(6, 1, 5, 8, seed=0)
    ends = [
        Arm("", one, 0.1, lambda *on: mixture, Fixed(diloco.SECONDS_PER_STEP).on, 4, Budget(samples=400)).simulated(0)
        for one in (diloco.watched(rule, cosines), rule)
    ]
    assert torch.equal(ends[0].parameters, ends[1].parameters)
    assert cosines
    assert all(-1.0 - 1e-12 <= cosine <= 1.0 + 1e-12 for cosine in cosines)


def test_asynchronous_sgd_ends_at_the_frequency_weighted_point_and_malenia_at_the_optimum(scripts):
    ringleader = scripts("ringleader")
    assert round(ringleader.WEIGHTED, 4) == 0.3653
    assert ringleader.ending(ringleader.Malenia(), 0.1, 1500.0) == pytest.approx(2 / 3.5, abs=1e-4)
    assert ringleader.ending(Asynchronous(), 0.02, 1500.0) == pytest.approx(ringleader.WEIGHTED, abs=0.02)


def test_malenia_averages_each_worker_first(scripts):
    # In 5.1 seconds the workers bring 5, 2 and 1 gradients, all at 0: each of slope -1, 2, -3.
    ringleader = scripts("ringleader")
    times, end = Fixed(ringleader.TIMES), Budget(seconds=5.2)
    done = Arm("", ringleader.Malenia(), 0.3, Heterogeneous().on, times.on, 3, end).simulated(0)
    assert (done.num_arrivals, done.version) == (8, 1)
    assert done.parameters.item() == pytest.approx(0.3 * (1 - 2 + 3) / 3)


def test_permuted_times_are_a_permutation_plus_something_and_a_function_of_worker_and_draw(scripts):
    sampler, again = (scripts("ringleader").permuted_times(8, seed=5) for _ in range(2))
    draws = np.array([[again.draw_one(worker, draw) for draw in reversed(range(300))] for worker in range(8)])
    assert sorted(np.floor(draws.min(axis=1) + 1e-9).astype(int)) == list(range(1, 9))
    assert sampler.draw_one(3, 200) == draws[3, 99]
    assert sampler.draw_one(0, 1) == draws[0, 298]


def test_a_threshold_counts_as_reached_only_for_good(scripts):
    looks = pandas.DataFrame({"seconds": [0.0, 1.0, 2.0, 3.0], "loss": [1.0, 0.1, 0.4, 0.1]})
    assert [scripts("ringleader").reached(looks, threshold) for threshold in (0.5, 0.2, 0.05)] == [1.0, 3.0, math.inf]


def test_the_theory_gives_the_design_table(scripts):
    # tau_i = i, n = 1e4, s = 1, 100, 1e4: the ratios to T*, min over m of the harmonic mean times (1 + s / m)
    phase, numbers = scripts("phase_diagram"), np.arange(1, 10_001)
    taus = phase.mean_seconds(1.0, 10_000)
    for noise, synchronous, asynchronous in ((1.0, 1.0, 511), (100.0, 3.1, 32), (10_000.0, 6.9, 1.4)):
        best = (numbers / np.cumsum(1.0 / taus) * (1.0 + noise / numbers)).min()
        assert phase.theory_synchronous(taus, noise)[0] / best == pytest.approx(synchronous, rel=0.02)
        assert phase.theory_asynchronous(taus, noise) / best == pytest.approx(asynchronous, rel=0.03)


def test_stopping_slow_trials_early_changes_nothing_about_the_best(scripts):
    phase = scripts("phase_diagram")
    cell = phase.Cell(noise=10.0, exponent=1.0, num_workers=4, jitter=True, num_rates=3, num_seeds=1)
    trials = [(Asynchronous(), rate, False) for rate in phase.around(0.1, 5)]
    seconds = {trial: phase.seconds_to_target(cell, *trial[:2], phase.TUNING_SEED, 400.0, 0.5) for trial in trials}
    assert phase.tune(cell, trials, 400.0, 0.5) == min(seconds, key=seconds.get)


def test_a_flag_or_text_that_cannot_be_used_is_refused_without_showing_it(scripts, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(scripts("phase_diagram").make, "", "", ["--seeds", "0"])
    assert "argument --seeds: invalid positive value: '0'" in capsys.readouterr().err
    path, data = tmp_path / "texts.csv", {"--data": {}}
    path.write_text("text,kind\nsecret words,1\n", encoding="utf-8")
    assert main(scripts("ringleader").make, "", "", ["--data", str(path), "--out", str(tmp_path)], data) == 2
    said = capsys.readouterr().err
    assert "no column 'label'" in said
    assert "secret" not in said


@pytest.mark.processes
def test_when_a_script_is_killed_its_processes_go_busy_or_idle(tmp_path):
    tasks = [("import time; open('busy', 'w').close(); time.sleep(600)",), ("open('idle', 'w').close()",)]
    code = f"import sys; sys.path[0] = {str(FOLDER)!r}; from reproduction import each; list(each(exec, {tasks}, 2))"
    command = Command([sys.executable, "-c", code], tmp_path)
    try:
        until(lambda: (tmp_path / "busy").exists() and (tmp_path / "idle").exists(), "both tasks")
        assert len(command.pids()) >= 4  # itself, its fork server and two more
        os.kill(command.process.pid, signal.SIGKILL)
        command.process.wait(10)
        until(lambda: not command.pids(), "its processes to go by themselves", 30)
    finally:
        command.end()
