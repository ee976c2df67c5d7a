"""The first four published results: their closed forms, and each script from end to end on a smaller set-up still."""

import importlib
import math
import os
import signal
import sys
from pathlib import Path

import pytest
from test_faults import Command, until

from asyncsgd.runtime.base import Budget
from reproduction import Arm, run

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[1] / "experiments" / "published"


def script(module):
    """A fixture that imports a script, which takes a while."""
    return pytest.fixture(scope="module")(lambda: importlib.import_module(module))


ringmaster, error_runtime = script("ringmaster"), script("error_runtime")
backup_workers, implicit_momentum = script("backup_workers"), script("implicit_momentum")


def written(folder):
    files = list(folder.iterdir())
    assert all(file.stat().st_size > 0 for file in files)
    return {file.name for file in files}


def table(path):
    """The cells of a Markdown table, its headings first."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_distance_from_the_prototype_is_in_standard_errors_of_the_difference(ringmaster):
    # ours: mean 50, variance 2 over 2 seeds; the prototype's: 48.3 with 0.6 over 10
    apart = (50.0 - 48.3) / math.sqrt(2.0 / 2 + 0.6**2 / 10)
    assert ringmaster.beside("add", "delay-adaptive", 100, [49.0, 51.0]) == f"48.3; {apart:+.1f}"


def test_the_exact_excess_is_that_of_the_simulated_mean(ringmaster):
    method = ringmaster.KSync(24)
    noisy, speeds = ringmaster.Tridiagonal(noise_kind="full"), ringmaster.HalfNormal()
    curve = run([Arm("", method, 1.0, noisy.on, speeds.on, ringmaster.NUM_WORKERS, Budget(seconds=40), 4)], [0], 1)
    losses, updates = curve.loss.tolist(), curve.updates.max()
    problem = ringmaster.Tridiagonal(noise_kind="full")
    # After a few steps the noise, 0.03 in all, is small beside what is left of the start.
    assert losses[-1] == pytest.approx(ringmaster.exact_excess(problem, 1.0, 24, updates), rel=0.01)
    # In the long run a mode has the variance eta sigma^2 / (batch (2 - eta c)) / c.
    floor = sum(0.01**2 / 24 / (2 - c) / 2 for c in ringmaster.modes(1729)[0])
    assert ringmaster.exact_excess(problem, 1.0, 24, 10**9) == pytest.approx(floor)


def test_ringmaster_beats_rennala_beats_delay_adaptive_also_on_fifty_workers(ringmaster, tmp_path, monkeypatch):
    monkeypatch.setattr(ringmaster, "NUM_WORKERS", 50)
    assert ringmaster.main(["--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]) == 0
    assert written(tmp_path) == {"ringmaster.csv", "ringmaster.md", "ringmaster.png"}
    cells = {(row[0], row[1]): row for row in table(tmp_path / "ringmaster.md")}
    losses = [
        float(cells["add", method][2])
        for method in ("Ringmaster R=6, stops, lr 0.25", "Rennala B=6, lr 1", "delay-adaptive, lr 0.00032")
    ]
    assert losses == sorted(losses)
    assert cells["add", "Rennala B=6, lr 1"][-1] == "466"  # of the prototype


def test_seconds_per_update_are_the_published_closed_forms(error_runtime):
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


def test_the_floor_of_asynchronous_sgd_is_its_closed_form(error_runtime):
    eta, sigma = 0.3, 0.7
    for workers in (2, 8, 16):
        for curvature in (0.1, 1.0):
            a = eta * curvature
            closed = eta * sigma**2 * (1 + workers * a) / (2 * (2 + a - workers * a**2))
            assert error_runtime.k_async_floor([curvature], eta, sigma, workers, 1) == pytest.approx(closed)
            assert error_runtime.k_batch_async_floor([curvature], eta, sigma, workers, 1) == pytest.approx(closed)


def test_measured_seconds_and_floors_agree_with_the_closed_forms(error_runtime, monkeypatch):
    monkeypatch.setattr(error_runtime, "EVALUATIONS", 300)
    rows = error_runtime.table("exponential", run(error_runtime.arms("exponential", 600), [0], 1), 600)
    for row in rows:
        if row["K"] == 2:
            assert row["seconds per update"].estimate == pytest.approx(float(row["closed form"]), rel=0.06)
            assert row["error, last half"].estimate == pytest.approx(float(row["exact floor"]), rel=0.1)


def test_error_runtime_writes_a_picture_for_each_distribution(error_runtime, tmp_path, monkeypatch):
    monkeypatch.setattr(error_runtime, "QUICK_SECONDS", 12)
    monkeypatch.setattr(error_runtime, "EVALUATIONS", 24)
    assert error_runtime.main(["--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]) == 0
    pictures = {"error_runtime_exponential.png", "error_runtime_shifted_exponential.png"}
    assert written(tmp_path) == {"error_runtime.csv", "error_runtime.md", *pictures}
    cells = {tuple(row[:3]): row for row in table(tmp_path / "error_runtime.md")}
    for times in ("exponential", "shifted_exponential"):
        assert cells[times, "K-sync", "8"][3:] == cells[times, "sync", "8"][3:]  # the same run, under another name
        assert cells[times, "K-async", "1"][3:] == cells[times, "async", "1"][3:]
        assert cells[times, "K-batch-async", "1"][3:] == cells[times, "async", "1"][3:]


def test_the_best_quorums_are_the_expected_ones(backup_workers):
    for mean, (quorum, gain) in backup_workers.PUBLISHED.items():
        best, best_gain = backup_workers.best_quorum(mean)
        assert best == quorum
        assert best_gain == pytest.approx(gain, abs=0.005)


def test_the_learning_rate_puts_the_floor_at_half_of_the_target(backup_workers):
    problem = backup_workers.quadratic(1.0)
    for quorum in (1, 50, 100):
        eta = backup_workers.learning_rate(problem, quorum)
        squares = eta**2 / quorum / (eta * (curvature := backup_workers.spectrum(problem)) * (2 - eta * curvature))
        assert curvature @ squares / 2 == pytest.approx(backup_workers.TARGET / 2)
    assert backup_workers.learning_rate(backup_workers.quadratic(0.005), 1) == 1.0


def test_without_noise_the_steps_to_the_target_are_those_of_gradient_descent(backup_workers):
    problem = backup_workers.quadratic(0.0)
    curvature = backup_workers.spectrum(problem)
    for quorum in (1, 96):
        steps = backup_workers.expected_steps(problem, quorum)
        errors = [float(curvature @ (1 - curvature) ** (2 * step)) / 2 for step in (steps - 1, steps)]
        assert errors[1] <= backup_workers.TARGET < errors[0]
        task = "bias-dominated", backup_workers.MEAN, quorum, 0, 10**9
        assert backup_workers.measure(task)[0] == steps  # its noise is too small to matter


def test_backup_workers_writes_both_tables(backup_workers, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(backup_workers, "PUBLISHED", {1.0: (69, 1.98)})
    monkeypatch.setattr(backup_workers, "QUICK_QUORUMS", (50, 100))
    assert backup_workers.main(["--quick", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path)]) == 0
    names = {"backup_workers", "backup_workers_to_target"}
    assert written(tmp_path) == {"backup_workers.png", *(f"{name}.{end}" for name in names for end in ("csv", "md"))}
    row = table(tmp_path / "backup_workers.md")[1]
    assert row[:4] == ["1.0", "69", "69", row[3]]
    assert 68 <= int(row[3]) <= 70  # 100 rounds do not tell neighbours apart
    assert "bias-dominated: expected N = 50, measured N = 50" in capsys.readouterr().out


def test_the_mean_iterate_obeys_the_closed_recursion(implicit_momentum):
    mean = implicit_momentum.mean_iterate((2, range(300)))
    assert mean == pytest.approx(implicit_momentum.expected_iterate(2, len(mean) - 1), abs=0.04)
    # The first two are not random: all workers start at x_0.
    assert mean[:2] == pytest.approx([1.0, 0.8], rel=1e-12)
    # Versions that are read by a slow worker count too.
    mean = implicit_momentum.mean_iterate((8, range(1000)))
    assert mean == pytest.approx(implicit_momentum.expected_iterate(8, len(mean) - 1), abs=0.02)


def test_a_fit_to_the_exact_mean_gives_the_momentum(implicit_momentum):
    for workers in (2, 4, 8, 16):
        exact = implicit_momentum.expected_iterate(workers, 3 * workers + 10)
        assert implicit_momentum.fit(exact) == pytest.approx((1 - 1 / workers, 0.2 / workers))


def test_a_jackknife_removes_the_bias_of_a_square(implicit_momentum):
    # The square of a mean of 2 values of variance v overestimates by v / 2.
    result = implicit_momentum.jackknife(lambda mean: mean[0] ** 2, [[1.0], [3.0]])
    assert result.estimate == pytest.approx(2.0**2 - 2.0 / 2)


def test_implicit_momentum_writes_both_tables(implicit_momentum, tmp_path, monkeypatch):
    monkeypatch.setattr(implicit_momentum, "WORKERS", (1, 2))
    monkeypatch.setattr(implicit_momentum, "LONG_RUNS", 2)
    assert implicit_momentum.main(["--quick", "--seeds", "20", "--jobs", "1", "--out", str(tmp_path)]) == 0
    names = {"implicit_momentum", "implicit_momentum_staleness"}
    assert written(tmp_path) == {"implicit_momentum.png", *(f"{name}.{end}" for name in names for end in ("csv", "md"))}
    assert table(tmp_path / "implicit_momentum.md")[1][2:4] == ["-", "0.0000"]


def test_seeds_that_do_not_fill_the_groups_are_refused(implicit_momentum, tmp_path, capsys):
    assert implicit_momentum.main(["--seeds", "15", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: --seeds must be a multiple of 10, the number of groups, got 15\n"


@pytest.mark.processes
def test_when_a_script_is_killed_its_processes_go_busy_or_idle(tmp_path):
    tasks = ["import time; open('busy', 'w').close(); time.sleep(600)", "open('idle', 'w').close()"]
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
