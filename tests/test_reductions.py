"""Which rule is which other rule, with which parameters: every reduction of the literature, on the virtual clock.

`torch.equal` where the arithmetic is the same, 1e-12 where a displacement (start minus end) is formed and applied, or a
sum is taken in another order. Oracles are plain loops in NumPy or `torch.optim`; they know no server and no rule.
"""

from collections import defaultdict

import numpy as np
import pytest
import torch
from doors import Exponential, Quadratic, asyncsgd, simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

rules = asyncsgd.rules
LEARNING_RATE = 0.125
PROBLEM = Quadratic(dimension=5, condition=8.0, noise=0.5)


def run(rule, sampler, *, learning_rate=LEARNING_RATE, samples=60, **more):
    problem = PROBLEM.on(sampler.num_workers, 0)
    return simulated(rule, sampler, problem, learning_rate=learning_rate, samples=samples, **more)


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-12, atol=1e-12)


def sequential_sgd(samples, worker=0, num_workers=1, rate=LEARNING_RATE):
    """x <- x - eta g_k(x), with worker's own samples k = 0, 1, ..., in order: (samples + 1, P)."""
    instance = PROBLEM.on(num_workers, 0)
    x = instance.initial()
    out = np.empty_like(x)
    points = [x.copy()]
    for index in range(samples):
        instance.gradient(x, worker, index, out)
        x = x - rate * out
        points.append(x.copy())
    return np.stack(points)


settings_ = settings(deadline=None, max_examples=15)
several = given(num_workers=st.integers(1, 7), seed=st.integers(0, 10**6))


def exponential(num_workers, seed):
    return Exponential().on(num_workers, seed)


@pytest.mark.parametrize(
    "of", [rules.KSync, lambda n: rules.KSync(n, interrupt=False), rules.KAsync, lambda n: rules.KSync(n + 3)]
)
@several
@settings_
def test_r2_a_quorum_of_all_workers_is_synchronous_bit_for_bit(of, num_workers, seed):
    # Whole rounds: of a last one without samples for all, Synchronous takes what there is and a quorum is not reached.
    samples = 9 * num_workers
    both = (of(num_workers), rules.Synchronous())
    ours, synchronous = (run(rule, exponential(num_workers, seed), samples=samples) for rule in both)
    assert torch.equal(ours.points, synchronous.points)
    assert [event.train_seconds for event in ours.events] == [event.train_seconds for event in synchronous.events]
    assert set(ours.delays) == {0}


@several
@settings_
def test_r3_one_local_step_is_synchronous_sgd_and_diloco_without_outer_momentum_is_local_sgd(num_workers, seed):
    local, post, diloco, synchronous = (
        run(rule, exponential(num_workers, seed), samples=9 * num_workers)
        for rule in (rules.LocalSGD(1), rules.LocalSGD(9, post=100), rules.DiLoCo(1, 1.0, 0.0), rules.Synchronous())
    )
    assert torch.equal(local.points, diloco.points)
    assert torch.equal(local.points, post.points)
    close(local.points, synchronous.points)


@several
@settings_
def test_r5_slack_zero_is_bulk_synchronous_at_every_nth_version_with_n_times_the_learning_rate(num_workers, seed):
    samples = 12 * num_workers
    ours = run(rules.SSP(slack=0), exponential(num_workers, seed), samples=samples, learning_rate=0.02)
    bulk = run(rules.Synchronous(), exponential(num_workers, seed), samples=samples, learning_rate=0.02 * num_workers)
    close(ours.points[::num_workers], bulk.points)
    assert ours.delays == list(range(num_workers)) * 12


@several
@settings_
def test_r6_downpour_that_pushes_and_fetches_every_minibatch_is_asynchronous(num_workers, seed):
    ours = run(rules.Downpour(1, 1), exponential(num_workers, seed))
    asynchronous = run(rules.Asynchronous(), exponential(num_workers, seed))
    close(ours.points, asynchronous.points)
    assert ours.delays == asynchronous.delays


def fastest_of_each_round(num_workers, seed, quorum, updates):
    """Everybody starts at x; the first `quorum` to finish make the step, the others' work is lost. Versions, times.

    By an argsort of each round's draws, without a heap.
    """
    instance = PROBLEM.on(num_workers, 0)
    speeds = exponential(num_workers, seed)
    now = 0.0
    x = instance.initial()
    sample = [0] * num_workers
    points = [x.copy()]
    times = [0.0]
    out = np.empty_like(x)
    for update in range(updates):
        seconds = [now + speeds.draw_one(worker, update) for worker in range(num_workers)]
        first = np.argsort(seconds)[:quorum]
        mean = np.zeros_like(x)
        for worker in sorted(first.tolist()):
            instance.gradient(x, worker, sample[worker], out)
            sample[worker] += 1
            mean += out / quorum
        now = seconds[first[-1]]
        x = x - LEARNING_RATE * mean
        points.append(x.copy())
        times.append(now)
    return np.stack(points), times


@several
@settings_
def test_r7_ringmaster_with_threshold_one_and_stops_is_rennala_of_one_and_the_fastest_of_n(num_workers, seed):
    three = (rules.Ringmaster(1, stops=True), rules.Rennala(1), rules.KSync(1))
    ringmaster, rennala, one_sync = (run(rule, exponential(num_workers, seed), samples=90) for rule in three)
    assert torch.equal(ringmaster.points[:61], rennala.points[:61])  # near the end samples run out in other orders
    assert torch.equal(rennala.points, one_sync.points)
    points, times = fastest_of_each_round(num_workers, seed, 1, 60)
    assert torch.equal(ringmaster.points[:61], torch.from_numpy(points))
    assert ringmaster.times[:61].tolist() == times


@given(num_workers=st.integers(1, 7), quorum=st.integers(1, 7), seed=st.integers(0, 10**6))
@settings_
def test_r8_k_sync_is_backup_workers_and_m_synchronous_the_first_k_of_every_round(num_workers, quorum, seed):
    quorum = min(quorum, num_workers)
    samples = 15 * quorum + num_workers
    ours = run(rules.KSync(quorum), exponential(num_workers, seed), samples=samples)
    points, times = fastest_of_each_round(num_workers, seed, quorum, 15)
    close(ours.points[:16], points)
    assert ours.times[:16].tolist() == times


@pytest.mark.parametrize(
    "rule", [rules.DCASGD(0.0), rules.DCASGD(0.0, adaptive=True), rules.DANA(0.0), rules.OrMo(0.0)], ids=str
)
@several
@settings_
def test_r9_without_compensation_or_momentum_it_is_asynchronous_bit_for_bit(rule, num_workers, seed):
    ours = run(rule, exponential(num_workers, seed))
    asynchronous = run(rules.Asynchronous(), exponential(num_workers, seed))
    assert torch.equal(ours.points, asynchronous.points)


@pytest.mark.parametrize("beta", [0.3, 0.9])
def test_r9_dana_with_one_worker_starts_where_torchs_nesterov_looks_ahead_to(beta):
    ours = run(rules.DANA(beta), exponential(1, 0))
    parameter = nn.Parameter(torch.from_numpy(PROBLEM.on(1, 0).initial()))
    optimizer = torch.optim.SGD([parameter], lr=LEARNING_RATE, momentum=beta, nesterov=True)
    for _, index, point, _ in ours.computed:  # torch's parameters are the look-ahead points
        close(parameter.detach(), point)
        out = np.empty_like(point)
        PROBLEM.on(1, 0).gradient(parameter.detach().numpy(), 0, index, out)
        parameter.grad = torch.from_numpy(out)
        optimizer.step()


@given(num_workers=st.integers(1, 5), num_local_steps=st.integers(1, 4), seed=st.integers(0, 10**6))
@settings_
def test_r12_elastic_averaging_without_force_is_n_independent_runs(num_workers, num_local_steps, seed):
    ours = run(rules.EASGD(0.0, num_local_steps), exponential(num_workers, seed))
    assert torch.equal(ours.points, ours.points[:1].expand_as(ours.points))  # the centre stays
    for worker in {event.worker for event in ours.events}:
        points = ours.points_of(worker)
        close(points, sequential_sgd(len(points) - 1, worker, num_workers))


@given(
    num_workers=st.integers(1, 6),
    seed=st.integers(0, 10**6),
    samples=st.integers(6, 60),
    beta=st.sampled_from([0.0, 0.5, 0.9]),
    group=st.integers(0, 5),
)
@settings(deadline=None, max_examples=40)
def test_r16_once_all_gradients_are_in_ormo_is_momentum_sgd_on_the_groups_in_order(
    num_workers, seed, samples, beta, group
):
    ours = run(rules.OrMo(beta, group), exponential(num_workers, seed), samples=samples, learning_rate=0.01)
    size = group or num_workers
    groups = defaultdict(lambda: np.zeros(5))
    for event, (*_, gradient) in zip(ours.events, ours.computed, strict=True):
        groups[-(-event.read_version // size)] += gradient
    x = ours.points[0].numpy()
    u = np.zeros(5)
    for number in range(-(-(samples - 1) // size) + 1):
        u = beta * u + groups[number]
        x = x - 0.01 * u
    close(ours.points[-1], x)
