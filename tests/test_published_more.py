"""The pure parts of the published experiments on local updates, unequal data and the phase diagram."""

import importlib
import math

import numpy as np
import pandas
import pytest
import torch
from test_published import script

from asyncsgd.rules import Asynchronous, KSync
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Heterogeneous
from asyncsgd.simulation.simulate import simulate

pytestmark = pytest.mark.slow


diloco, ringleader, phase = script("async_diloco"), script("ringleader"), script("phase_diagram")


def test_the_gradient_of_the_mlp_is_that_of_its_loss(diloco):
    mixture = diloco.Mixture(dimension=6, clusters=2, hidden=5, num_held_out=40, seed=3)
    x = mixture.initial()
    direction = np.random.Generator(np.random.Philox(1)).standard_normal(mixture.num_parameters)
    gradient, unused, step = np.empty(len(x)), np.empty(len(x)), 1e-6
    mixture.gradient(x, 2, 7, gradient)
    losses = [mixture.gradient(x + moved * direction, 2, 7, unused) for moved in (step, -step)]
    assert gradient @ direction == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-6)


def test_a_batch_of_the_mixture_is_a_function_of_seed_worker_and_index(diloco):
    first, second = (diloco.Mixture(6, 1, 5, 8, seed=3) for _ in range(2))
    x, here, there, other = first.initial(), *(np.empty(first.num_parameters) for _ in range(3))
    first.gradient(x, 2, 7, here)
    second.gradient(x, 0, 0, other)
    second.gradient(x, 2, 7, there)
    np.testing.assert_array_equal(here, there)
    assert not np.array_equal(here, other)


def test_watching_a_rule_does_not_change_its_run(diloco):
    def end(rule):
        mixture = diloco.Mixture(6, 1, 5, 8, seed=0)
        times = diloco.times(4, 0)
        budget = Budget(samples=400)
        return simulate(rule, mixture, times, num_workers=4, learning_rate=0.1, budget=budget).parameters

    cosines = []
    rule = diloco.RULES[diloco.BOTH]
    assert torch.equal(end(diloco.Watched(rule, cosines)), end(rule))
    assert cosines
    assert all(-1.0 - 1e-12 <= cosine <= 1.0 + 1e-12 for cosine in cosines)


def test_asynchronous_sgd_ends_at_the_frequency_weighted_point_and_malenia_at_the_optimum(ringleader):
    rate, seconds = 0.02, 1500.0
    assert ringleader.ending(ringleader.Malenia(), 0.1, seconds) == pytest.approx(ringleader.TRUTH, abs=1e-4)
    assert ringleader.ending(Asynchronous(), rate, seconds) == pytest.approx(ringleader.frequency_weighted(), abs=0.02)


def test_malenia_averages_each_worker_first(ringleader):
    # In 5.1 seconds the workers bring 5, 2 and 1 gradients, all at 0: each of slope -1, 2, -3.
    done = simulate(
        ringleader.Malenia(),
        Heterogeneous().on(3, seed=0),
        ringleader.fixed_times(ringleader.TIMES),
        num_workers=3,
        learning_rate=0.3,
        budget=Budget(seconds=5.2),
    )
    assert (done.num_arrivals, done.version) == (8, 1)
    assert done.parameters.item() == pytest.approx(0.3 * (1 - 2 + 3) / 3)


def test_permuted_times_are_a_permutation_plus_something_and_a_function_of_worker_and_draw(ringleader):
    sampler, again = (ringleader.permuted_times(8, seed=5) for _ in range(2))
    draws = np.array([[again.draw_one(worker, draw) for draw in reversed(range(300))] for worker in range(8)])
    assert sorted(np.floor(draws.min(axis=1) + 1e-9).astype(int)) == list(range(1, 9))
    assert sampler.draw_one(3, 200) == draws[3, 99]
    assert sampler.draw_one(0, 1) == draws[0, 298]


def test_a_threshold_counts_as_reached_only_for_good(ringleader):
    looks = pandas.DataFrame({"seconds": [0.0, 1.0, 2.0, 3.0], "loss": [1.0, 0.1, 0.4, 0.1]})
    assert [ringleader.reached(looks, threshold) for threshold in (0.5, 0.2, 0.05)] == [1.0, 3.0, math.inf]


def test_labelled_texts_that_cannot_be_used_are_refused_without_showing_them(ringleader, tmp_path, capsys):
    path = tmp_path / "texts.csv"
    path.write_text("text,kind\nsecret words,1\n", encoding="utf-8")
    for data, message in ((path, "no column 'label'"), (tmp_path / "missing.csv", "there is no file")):
        assert ringleader.main(["--quick", "--data", str(data), "--out", str(tmp_path / "out")]) == 2
        said = capsys.readouterr().err
        assert message in said
        assert "secret" not in said


def test_the_theory_gives_the_design_table(phase):
    # tau_i = i, n = 1e4, s = 1, 100, 1e4: the ratios to T*, min over m of the harmonic mean times (1 + s / m)
    taus = phase.mean_seconds(1.0, 10_000)
    numbers = np.arange(1, 10_001)
    for noise, synchronous, asynchronous in ((1.0, 1.0, 511), (100.0, 3.1, 32), (10_000.0, 6.9, 1.4)):
        best = (numbers / np.cumsum(1.0 / taus) * (1.0 + noise / numbers)).min()
        assert phase.theory_synchronous(taus, noise)[0] / best == pytest.approx(synchronous, rel=0.02)
        assert phase.theory_asynchronous(taus, noise) / best == pytest.approx(asynchronous, rel=0.03)


def test_stopping_slow_trials_early_changes_nothing_about_the_best(phase):
    cell = phase.Cell(noise=10.0, exponent=1.0, num_workers=4, jitter=True, num_rates=3, num_seeds=1)
    rates = phase.around(0.1, 5, 8.0)
    rule = phase.Asynchronous()
    seconds = {rate: phase.seconds_to_target(cell, rule, rate, phase.TUNING_SEED, 400.0, 0.5) for rate in rates}
    best = min((value, rate) for rate, value in seconds.items() if value is not None)[1]
    assert phase.tune(cell, [(rule, rates)], 400.0, 0.5)[:2] == (rule, best)


def test_a_cell_that_misses_its_target_is_marked_and_not_dropped(phase):
    cell = phase.Cell(noise=1.0, exponent=1.0, num_workers=4, jitter=False, num_rates=3, num_seeds=2)
    missed = phase.Arm(Asynchronous(), 0.1, False, [60.0, 60.0], num_reached=0)
    reached = phase.Arm(KSync(1), 0.1, False, [30.0, 30.0], num_reached=2)
    done = phase.Measured(cell, missed, reached)
    assert (done.mark, done.log2_ratio.estimate) == (">", 1.0)
    assert phase.row_of(done)["ratio async / m-sync [95 %]"].startswith(">2")
    assert phase.Measured(cell, reached, missed).mark == "<"


@pytest.mark.parametrize("name", ["async_diloco", "ringleader", "phase_diagram", "backup_workers"])
def test_a_wrong_flag_is_one_clear_message_and_code_two(name, capsys):
    assert importlib.import_module(name).main(["--seeds", "0"]) == 2
    assert capsys.readouterr().err == "error: --seeds must be 1 or more, got 0\n"
