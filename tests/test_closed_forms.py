"""What theory says of every rule in closed form, against the library on the virtual clock.

Laws of delays, stability limits, stationary variances, fixed points and times. Nothing is random here but service
times, and where those are averaged the allowance is four standard errors, computed from theory or from the sample.
"""

import dataclasses
import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch
from doors import Constant, Exponential, Heterogeneous, Power, asyncsgd, drawn, simulated
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import linalg

rules = asyncsgd.rules


def fixed(*seconds):
    """Worker w always takes seconds[w]."""
    return drawn(len(seconds), lambda worker, draw: seconds[worker])


def of_rates(rates, seed):
    """Worker w takes exponential times of mean 1 / rates[w]."""
    unit = Exponential().on(len(rates), seed)
    return drawn(len(rates), lambda worker, draw: unit.draw_one(worker, draw) / rates[worker])


def in_order(order, num_workers):
    """The workers arrive in this order, one a second, and nobody after that."""
    times = [[0.0] for _ in range(num_workers)]
    for second, worker in enumerate(order, start=1):
        times[worker].append(float(second))
    seconds = []
    for arrivals in times:
        seconds.append([*np.diff(arrivals).tolist(), math.inf])
    return drawn(num_workers, lambda worker, draw: seconds[worker][draw])


class Modes(asyncsgd.Instance):
    """Independent modes: f(x) = sum_j a_j x_j^2 / 2, from x = 1; or from 0, where sample 0 has 1 added (an impulse)."""

    def __init__(self, curvatures, num_workers=1, impulse=False):
        self._curvatures = np.array(curvatures, dtype=np.float64)
        self._impulse = impulse
        self.num_parameters = len(curvatures)
        self.num_workers = num_workers

    def initial(self):
        if self._impulse:
            return np.zeros(self.num_parameters)
        return np.ones(self.num_parameters)

    def gradient(self, x, worker, index, out):
        np.multiply(self._curvatures, x, out=out)
        if self._impulse and worker == index == 0:
            out += 1.0
        return 0.0

    def exact_gradient(self, x):
        return self._curvatures * x

    def loss(self, x):
        return 0.0

    def optimum(self):
        return np.zeros(self.num_parameters)


def run(rule, sampler, instance=None, *, learning_rate=1.0, **budget):
    instance = instance or Modes([0.01], sampler.num_workers)
    done = simulated(rule, sampler, instance, learning_rate=learning_rate, **budget)
    return done._replace(points=done.points.numpy())


def delays_of(done, worker):
    workers = {event.dispatch: event.worker for event in done.events}
    delays = []
    for event in done.events:
        for dispatch, delay in event.uses:
            if workers[dispatch] == worker:
                delays.append(delay)
    return delays


def test_at_fixed_speeds_a_workers_mean_delay_is_one_minus_its_share_over_its_share():
    num_workers = 10
    seconds = np.sqrt(np.arange(1, 11))
    done = run(rules.Asynchronous(), Power(0.5).on(num_workers, 0), seconds=400.0)
    shares = (1 / seconds) / (1 / seconds).sum()
    for worker in range(num_workers):
        delays = delays_of(done, worker)
        # k delays count the others' updates up to its k-th arrival, each other's to one update exactly.
        expected = (1 - shares[worker]) / shares[worker]
        allowed = (num_workers - 1) / len(delays)
        assert abs(np.mean(delays) - expected) <= allowed
    assert len(done.points) - 1 == pytest.approx(400.0 * (1 / seconds).sum(), abs=num_workers)


@pytest.mark.parametrize("rates", [[1.0] * 5, [3.0, 1.0, 0.5]])
def test_at_exponential_speeds_a_workers_delays_are_geometric_with_its_share_of_the_rates(rates):
    done = run(rules.Asynchronous(), of_rates(rates, seed=1), samples=3000)
    for worker, rate in enumerate(rates):
        share = rate / sum(rates)
        delays = delays_of(done, worker)[1:]  # the first one starts with everybody's
        number = len(delays)
        counts = Counter(delays)
        for delay in range(6):
            probability = share * (1 - share) ** delay
            error = math.sqrt(probability * (1 - probability) / number)
            frequency = counts[delay] / number
            assert abs(frequency - probability) < 4 * error
        mean = (1 - share) / share
        deviation = math.sqrt(1 - share) / share
        assert abs(np.mean(delays) - mean) < 4 * deviation / math.sqrt(number)


@pytest.mark.parametrize("num_workers", [2, 3, 6])
def test_ringleader_attains_two_n_minus_two(num_workers):
    delays = []
    for seed in range(8):
        sampler = Exponential().on(num_workers, seed)
        done = run(rules.Ringleader(), sampler, samples=300)
        for event in done.events:
            delays += [delay for _, delay in event.uses]
    assert max(delays) == 2 * num_workers - 2


def limit(delay):
    """x <- x - a x_{t - delay} is stable iff 0 < a < this."""
    return 2 * math.sin(math.pi / (2 * (2 * delay + 1)))


def size(points, first, number):
    return np.abs(points[first : first + number]).max(0)


@pytest.mark.parametrize("delay", range(17))
def test_fixed_delay_is_stable_just_below_two_sin_pi_over_two_times_two_tau_plus_one_and_not_just_above(delay):
    period = 4 * delay + 2
    steps = 60 * period
    curvatures = limit(delay) * np.array([0.97, 1.03])
    done = run(rules.FixedDelay(delay), Constant().on(1, 0), Modes(curvatures), samples=steps)
    middle = size(done.points, steps // 2, period)
    end = size(done.points, steps - period, period)
    assert end[0] < middle[0] / 2
    assert end[1] > middle[1] * 2
    x = [np.ones(2)]
    for t in range(steps):
        read = x[max(0, t - delay)]
        x.append(x[t] - curvatures * read)
    assert steps - delay <= len(done.points) - 1  # the last ones are held, never old enough
    np.testing.assert_allclose(done.points, x[: len(done.points)], rtol=1e-9, atol=1e-12)


def lyapunov(delay, a):
    """Var x / (eta^2 sigma^2) from the (tau + 1) x (tau + 1) discrete Lyapunov equation."""
    matrix = np.eye(delay + 1, k=-1)
    noise = np.zeros((delay + 1, delay + 1))
    matrix[0, 0] += 1.0
    matrix[0, delay] -= a
    noise[0, 0] = 1.0
    return float(linalg.solve_discrete_lyapunov(matrix, noise)[0, 0])


@pytest.mark.parametrize("delay", [0, 1, 4, 7])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_stationary_variance_of_a_fixed_delay_is_that_of_the_lyapunov_equation(delay, num_workers):
    # The variance is eta^2 sigma^2 sum_k h_k^2, h the response to one impulse of noise: exact, nothing is averaged.
    rate = 0.5
    steps = [0.02, 0.2, 0.6 * limit(delay)]
    sampler = Exponential().on(num_workers, 0)
    modes = Modes(np.array(steps) / rate, num_workers, impulse=True)
    done = run(rules.FixedDelay(delay), sampler, modes, learning_rate=rate, samples=2500)
    variance = ((done.points / rate) ** 2).sum(0)
    for a, found in zip(steps, variance, strict=True):
        if delay == 0:
            assert found == pytest.approx(1 / (a * (2 - a)), rel=1e-10)
        elif delay == 1:
            assert found == pytest.approx((1 + a) / ((1 - a) * a * (2 + a)), rel=1e-10)
        elif delay == 4 and a == 0.2:
            assert found == pytest.approx(7.2259, abs=5e-5)
        if a < limit(delay):
            assert found == pytest.approx(lyapunov(delay, a), rel=1e-8)


@pytest.mark.parametrize(("num_workers", "updates"), [(2, 8), (3, 5)])
def test_in_the_mean_exponential_workers_have_momentum_one_minus_one_over_m_exactly(num_workers, updates):
    # Every order of arrivals is equally likely (no memory), so the mean over all of them is the expectation.
    steps = np.array([0.1, 0.7, 2.0])
    mean = np.zeros((updates + 1, 3))
    orders = list(itertools.product(range(num_workers), repeat=updates))
    for order in orders:
        sampler = in_order(order, num_workers)
        modes = Modes(steps, num_workers)
        done = run(rules.Asynchronous(), sampler, modes, seconds=updates + 0.5)
        assert [event.worker for event in done.events] == list(order)
        mean += done.points / len(orders)
    momentum = 1 - 1 / num_workers
    np.testing.assert_allclose(mean[1], (1 - steps) * mean[0], rtol=1e-12)
    changes = np.diff(mean, axis=0)
    gradients = steps * mean[1:-1]
    expected = momentum * changes[:-1] - gradients / num_workers
    np.testing.assert_allclose(changes[1:], expected, rtol=1e-12, atol=1e-12)


CURVATURES = np.array([1.0, 2.0, 0.5])
SLOPES = np.array([1.0, -2.0, 3.0])
SECONDS = (1.0, 2.3, 5.1)


@pytest.mark.parametrize("num_local_steps", [1, 2, 20])
@pytest.mark.parametrize("of", [rules.LocalSGD, lambda h: rules.DiLoCo(h, 0.7, 0.5)], ids=["local_sgd", "diloco"])
def test_local_sgd_stops_at_the_drift_weighted_optimum_and_not_at_the_optimum(of, num_local_steps):
    rate = 0.2
    rule = of(num_local_steps)
    instance = Heterogeneous().on(3, 0)
    done = run(rule, fixed(*SECONDS), instance, learning_rate=rate, samples=900 * num_local_steps)
    weights = 1 - (1 - rate * CURVATURES) ** num_local_steps
    expected = (weights * SLOPES / CURVATURES).sum() / weights.sum()
    assert done.points[-1, 0] == pytest.approx(expected, rel=1e-12)
    assert (abs(expected - 2 / 3.5) < 1e-12) == (num_local_steps == 1)


def weighted_optimum(weights):
    """Where sum_i w_i (A_i x - b_i) = 0."""
    return float(np.dot(weights, SLOPES) / np.dot(weights, CURVATURES))


RATES = 1 / np.array(SECONDS)
SHARES = RATES / RATES.sum()


def settled(rule, learning_rate, updates=8000):
    """The mean over the last quarter of the versions; before it lie 9 relaxation times or more."""
    instance = Heterogeneous().on(3, 0)
    done = run(rule, fixed(*SECONDS), instance, learning_rate=learning_rate, samples=updates)
    first = 3 * len(done.points) // 4
    return float(done.points[first:].mean()), done


def accepted_weights(done, factor):
    """Per worker, the sum of its gradients' factors."""
    weights = defaultdict(float)
    workers = {event.dispatch: event.worker for event in done.events}
    for event in done.events[len(done.events) // 2 :]:
        for dispatch, delay in event.uses:
            weights[workers[dispatch]] += factor(delay)
    return [weights[worker] for worker in range(3)]


@pytest.mark.parametrize(
    ("rule", "expected", "tolerance"),
    [
        (rules.Synchronous(), 0.5714, 0.0001),
        (rules.KAsync(quorum=3), 0.5714, 0.0001),
        (rules.Ringleader(), 0.5714, 0.0001),
        (rules.IA2SGD(), 0.5714, 0.001),
        (rules.Rescaled(), 0.5735, 0.004),
        (rules.SSP(slack=3), 0.568, 0.004),
    ],
    ids=str,
)
def test_where_rules_settle_on_workers_that_disagree(rule, expected, tolerance):
    found, _ = settled(rule, 0.004)
    assert found == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
    ("rule", "factor"),
    [
        (rules.Asynchronous(), lambda delay: 1.0),
        (rules.DelayAdaptive(), lambda delay: 3 / max(3, delay)),
        (rules.FedBuff(buffer=2, num_local_steps=1), lambda delay: (1 + delay) ** -0.5),
        (rules.Ringmaster(threshold=3), lambda delay: 1.0),
        (rules.Ringmaster(threshold=3, stops=True), lambda delay: 1.0),
        (rules.Rennala(batch=4), lambda delay: 1.0),
        (rules.KBatchAsync(batch=2), lambda delay: 1.0),
    ],
    ids=lambda value: str(value) if isinstance(value, asyncsgd.Rule) else "factor",
)
def test_a_rule_settles_at_the_optimum_weighted_with_what_it_takes_of_each_worker(rule, factor):
    found, done = settled(rule, 0.004)
    weights = accepted_weights(done, factor)
    assert found == pytest.approx(weighted_optimum(weights), abs=0.006)


def test_elastic_averaging_has_the_bias_of_frequency_in_the_limit_of_small_steps():
    # Of first order in the step, .3706 at .004 and .42 at .04, as replicas stay apart; extrapolated linearly to 0.
    rule = rules.EASGD(alpha=0.3, num_local_steps=1)
    near, _ = settled(rule, 0.006, 6000)
    far, _ = settled(rule, 0.012, 6000)
    expected = weighted_optimum(SHARES.tolist())
    assert 2 * near - far == pytest.approx(expected, abs=0.003)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("num_local_steps", [1, 3])
def test_outer_nesterov_is_stable_iff_rate_times_p_is_below_its_limit(momentum, num_local_steps):
    bound = 2 * (1 + momentum) / (1 + 2 * momentum)
    inner = 0.9
    share = 1 - (1 - inner) ** num_local_steps  # P of a mode of curvature 1
    for factor, grows in ((0.98, False), (1.02, True)):
        rule = rules.DiLoCo(num_local_steps, bound * factor / share, momentum)
        samples = 800 * num_local_steps
        done = run(rule, Constant().on(2, 0), Modes([1.0], 2), learning_rate=inner, samples=samples)
        end = size(done.points, 380, 20)
        middle = size(done.points, 200, 20)
        assert (end > middle).item() == grows


def easgd_bound(rate):
    """Zhang, Choromanska, LeCun 2015: asynchronous EASGD in round-robin is stable iff alpha is at most this."""
    return (4 - 2 * rate) / (4 - rate)


def grows_under_easgd(alpha, rate, num_workers):
    sampler = Constant().on(num_workers, 0)
    modes = Modes([1.0], num_workers)
    done = run(rules.EASGD(alpha, 1), sampler, modes, learning_rate=rate, samples=500 * num_workers)
    end = size(done.points, 480 * num_workers, 20)
    middle = size(done.points, 200 * num_workers, 20)
    return bool(end > middle) and bool(end > 1e-6)


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("rate", [0.5, 1.0, 1.5])
def test_easgd_in_round_robin_is_stable_up_to_the_published_bound_and_above_it(rate, num_workers):
    # The paper's algorithm 1, with this bound, takes the gradient before the pull and applies it after: less stable.
    for part in (0.5, 0.99, 1.01):
        assert not grows_under_easgd(part * easgd_bound(rate), rate, num_workers)


@dataclasses.dataclass(frozen=True)
class ExactlyCompensated(asyncsgd.Rule):
    """DC-ASGD with the Hessian itself: g + H (x - x_start)."""

    name = "exactly_compensated"
    needs_points = True

    hessian: tuple[float, ...] = ()

    def arrive(self, state, arrival, view):
        assert arrival.start_point is not None
        hessian = torch.tensor(self.hessian, dtype=torch.float64)
        moved = view.parameters - arrival.start_point
        compensated = arrival.gradient + hessian * moved
        start = asyncsgd.Start(arrival.worker)
        return asyncsgd.Reply(compensated, uses=(arrival.dispatch,), start=(start,))


@given(num_workers=st.integers(1, 8), seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=20)
def test_compensation_with_the_exact_hessian_undoes_every_delay(num_workers, seed):
    hessian = (0.3, 1.0, 1.7)
    rule = ExactlyCompensated(hessian)
    sampler = Exponential().on(num_workers, seed)
    modes = Modes(hessian, num_workers)
    done = run(rule, sampler, modes, learning_rate=0.9, samples=40)
    shrink = 1 - 0.9 * np.array(hessian)
    undelayed = shrink ** np.arange(41)[:, None]
    np.testing.assert_allclose(done.points, undelayed, rtol=0, atol=1e-12)


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=6), batch=st.integers(1, 12))
@settings(max_examples=40)
def test_a_round_of_rennala_takes_the_first_time_by_which_all_could_have_made_a_batch(seconds, batch):
    done = run(rules.Rennala(batch), fixed(*map(float, seconds)), samples=6 * batch + len(seconds))
    number = 0
    num_gradients = 0
    while num_gradients < batch:
        number += 1
        num_gradients = sum(number // each for each in seconds)
    assert done.times[:7].tolist() == [number * k for k in range(7)]
    ordered = sorted(seconds)
    for j in range(1, len(ordered) + 1):
        rate = sum(1 / each for each in ordered[:j])
        bound = (batch + j) / rate
        assert number <= bound * (1 + 1e-12)


@given(seconds=st.lists(st.integers(1, 9), min_size=1, max_size=5), slack=st.integers(0, 4), rounds=st.integers(5, 25))
@settings(max_examples=40)
def test_with_fixed_speeds_stale_synchronous_passes_n_over_the_slowest_time_whatever_its_slack(seconds, slack, rounds):
    slowest = max(seconds)
    num_workers = len(seconds)
    done = run(rules.SSP(slack), fixed(*map(float, seconds)), seconds=float(rounds * slowest))
    clocks = Counter(event.worker for event in done.events)
    assert min(clocks.values()) == rounds  # the slowest never waits
    assert max(clocks.values()) <= rounds + slack + 1
    assert num_workers * rounds <= len(done.events) <= num_workers * (rounds + slack + 1)


P = 8
QUORUMS = (1, 4, 8)


def order_statistic(quorum):
    """Mean and standard deviation of the K-th smallest of P times that are Exp(1)."""
    terms = [1 / (P - j) for j in range(quorum)]
    variance = sum(term**2 for term in terms)
    return sum(terms), math.sqrt(variance)


def seconds_per_update(rule, gradients_an_update, updates=900):
    """The seconds of each update."""
    sampler = Exponential(1.0).on(P, 5)
    done = run(rule, sampler, samples=updates * gradients_an_update + P)
    return np.diff(done.times)[:updates]


def assert_mean(times, mean, deviation):
    assert abs(times.mean() - mean) < 4 * deviation / math.sqrt(len(times))


@pytest.mark.parametrize("quorum", QUORUMS)
def test_k_async_at_exponential_speeds_takes_the_kth_order_statistic_as_k_sync_does(quorum):
    mean, deviation = order_statistic(quorum)
    times = seconds_per_update(rules.KAsync(quorum), quorum)
    assert_mean(times, mean, deviation)


@pytest.mark.parametrize("quorum", QUORUMS)
@pytest.mark.parametrize("of", [rules.Rennala, rules.KBatchAsync])
def test_k_batches_at_exponential_speeds_take_k_over_p(of, quorum):
    times = seconds_per_update(of(quorum), quorum)
    assert_mean(times, quorum / P, math.sqrt(quorum) / P)
