"""Every rule as a plain loop in float64 on a closed-form problem: the oracle of the contract tests.

Nothing of asyncsgd is imported here, so a mistake in the library cannot hide in its own test; the loops are written
from the papers' equations, not from the library. All N workers start at the initial point.

`arrivals` is the order in which gradients arrive: each number picks one of the workers that are computing, in order of
their index, modulo how many these are. Where all workers always compute, and the numbers are below N, that is the
worker itself. Gradients are numbered in the order in which they were started: ``gradient(point, dispatch)`` is one of
its own for every dispatch, ``weight(dispatch)`` its weight in a mean and ``seconds(dispatch)`` how long it takes.
Workers that start at the same time do so in order of their index, unless said otherwise.

Each function returns the points x_0, x_1, ..., one per version. `sgd` and `adamw` are optimizers: they return a
function from the parameters and a direction to the next parameters, which keeps a state of its own.
"""

import itertools
import math

import numpy as np


def picked(computing, number):
    """The worker that `number` stands for."""
    return sorted(computing)[number % len(computing)]


def weighted_mean(vectors, weights):
    """sum_i w_i v_i / sum_i w_i."""
    return np.average(np.stack(vectors), axis=0, weights=weights)


def local_steps(gradient, start, dispatch, learning_rate, num_steps):
    """Where `num_steps` steps of plain SGD from `start` end, all on the gradient of `dispatch`."""
    y = start
    for _ in range(num_steps):
        y = y - learning_rate * gradient(y, dispatch)
    return y


def delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate):
    """x_{t+1} = x_t - rate(tau) grad(x_{t - tau}), whatever `learning_rate` says."""
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}  # worker -> (version read, dispatch)
    for version, number in enumerate(arrivals):
        worker = picked(computing, number)
        read_version, dispatch = computing[worker]
        x = x - rate(version - read_version) * gradient(points[read_version], dispatch)
        points.append(x)
        computing[worker] = (version + 1, num_workers + version)
    return points


def asynchronous(gradient, x, learning_rate, num_workers, arrivals):
    """x_{t+1} = x_t - eta grad(x_{t - tau}) for each of `arrivals`."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        x = x - learning_rate * gradient(*computing[worker])
        points.append(x)
        computing[worker] = (x, dispatch)
    return points


def staleness_aware(gradient, x, learning_rate, num_workers, arrivals):
    """eta / tau from tau = 1 on (Zhang et al. 2016)."""

    def rate(delay):
        if delay == 0:
            return learning_rate
        return learning_rate / delay

    return delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate)


def delay_adaptive(gradient, x, learning_rate, num_workers, arrivals, concurrency):
    """eta M / max(M, tau) (Mishchenko et al. 2022)."""

    def rate(delay):
        if delay < concurrency:
            return learning_rate
        return learning_rate * concurrency / delay

    return delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate)


def koloskova(gradient, x, learning_rate, num_workers, arrivals, smoothness):
    """eta up to tau = N, then min(eta, 1 / (4 L tau)) (Koloskova et al. 2022)."""

    def rate(delay):
        if delay <= num_workers:
            return learning_rate
        return min(learning_rate, 1 / (4 * smoothness * delay))

    return delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate)


def polynomial(gradient, x, learning_rate, num_workers, arrivals, exponent):
    """eta / (1 + tau)^a (Xie et al. 2019)."""

    def rate(delay):
        return learning_rate / (1 + delay) ** exponent

    return delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate)


def hinge(gradient, x, learning_rate, num_workers, arrivals, slope, allowed):
    """eta up to tau = b, then eta / (a (tau - b) + 1) (Xie et al. 2019)."""

    def rate(delay):
        return learning_rate / (slope * max(0, delay - allowed) + 1)

    return delay_scaled(gradient, x, learning_rate, num_workers, arrivals, rate)


def ssp(gradient, x, learning_rate, num_workers, arrivals, slack):
    """A worker at clock c starts only if c - min_j c_j <= s (Ho et al. 2013); those released, in order of arrival."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    num_started = num_workers
    clocks = [0] * num_workers
    waiting = []
    for number in arrivals:
        worker = picked(computing, number)
        x = x - learning_rate * gradient(*computing.pop(worker))
        points.append(x)
        clocks[worker] += 1
        waiting.append(worker)
        for free in [other for other in waiting if clocks[other] - min(clocks) <= slack]:
            waiting.remove(free)
            computing[free] = (x, num_started)
            num_started += 1
    return points


def dc_asgd(gradient, x, learning_rate, num_workers, arrivals, compensation, adaptive, decay=0.95):
    """x <- x - eta (g + lambda g g (x_t - x_r)); lambda_0, or lambda_0 / sqrt(MS + 1e-7) (Zheng et al. 2017)."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    mean_square = np.zeros_like(x)
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        start, own = computing[worker]
        g = gradient(start, own)
        mean_square = decay * mean_square + (1 - decay) * g**2
        strength = compensation / np.sqrt(mean_square + 1e-7) if adaptive else compensation
        x = x - learning_rate * (g + strength * g**2 * (x - start))
        points.append(x)
        computing[worker] = (x, dispatch)
    return points


def dana(gradient, x, learning_rate, num_workers, arrivals, momentum):
    """v_i <- beta v_i + g,  x <- x - eta v_i,  start at x - eta beta sum_j v_j (Hakimi et al. 2019)."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    velocity = [np.zeros_like(x) for _ in range(num_workers)]
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        velocity[worker] = momentum * velocity[worker] + gradient(*computing[worker])
        x = x - learning_rate * velocity[worker]
        points.append(x)
        computing[worker] = (x - learning_rate * momentum * sum(velocity), dispatch)
    return points


def sgd(learning_rate, momentum=0.0):
    """m <- beta m + d,  x <- x - eta m."""
    m = 0.0

    def step(x, d):
        nonlocal m
        m = momentum * m + d
        return x - learning_rate * m

    return step


def adamw(learning_rate, betas, eps=1e-8):
    """Adam with its two bias corrections, without weight decay."""
    beta, gamma = betas
    m = v = t = 0

    def step(x, d):
        nonlocal m, v, t
        t += 1
        m = beta * m + (1 - beta) * d
        v = gamma * v + (1 - gamma) * d**2
        return x - learning_rate * (m / (1 - beta**t)) / (np.sqrt(v / (1 - gamma**t)) + eps)

    return step


def gap_aware(gradient, x, learning_rate, num_workers, arrivals, decay, step=None):
    """`step` along g / (1 + |x_t - x_r| / C), C the root mean square of the steps so far (Barkai et al. 2020)."""
    step = step or sgd(learning_rate)
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        start, own = computing[worker]
        g = gradient(start, own)
        if np.any(x != start):
            # The bias-corrected exponential mean, written out: weights decay^0, decay^1, ... from the latest backwards.
            squares = [(later - earlier) ** 2 for earlier, later in itertools.pairwise(points)][::-1]
            mean_square = weighted_mean(squares, [decay**age for age in range(len(squares))])
            g = g / (1 + np.abs(x - start) / np.sqrt(mean_square))
        x = step(x, g)
        points.append(x)
        computing[worker] = (x, dispatch)
    return points


def ormo(gradient, x, learning_rate, num_workers, arrivals, momentum, group):
    """Shi et al. 2024: a gradient of group ceil(k / K), k its version read, gets the momentum of its own place.

    c = ceil(t / K) advances: w <- w - beta u, u <- beta u; D = c - ceil(k / K) groups late:
    u <- u + beta^D eta g, w <- w - (1 + beta + ... + beta^D) eta g.
    """
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}
    u = np.zeros_like(x)
    group_now = 0
    for version, number in enumerate(arrivals):
        worker = picked(computing, number)
        read_version, dispatch = computing[worker]
        step = learning_rate * gradient(points[read_version], dispatch)
        if math.ceil(version / group) > group_now:
            group_now += 1
            x = x - momentum * u
            u = momentum * u
        late = group_now - math.ceil(read_version / group)
        u = u + momentum**late * step
        x = x - sum(momentum**power for power in range(late + 1)) * step
        points.append(x)
        computing[worker] = (version + 1, num_workers + version)
    return points


def rescaled(gradient, x, learning_rate, num_workers, arrivals, seconds):
    """Learning rate eta tau_i mean_j (1 / tau_j), tau_i the mean seconds of worker i so far (Mahran et al. 2026)."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    taken = {}
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        start, own = computing[worker]
        taken.setdefault(worker, []).append(seconds(own))
        factor = np.mean(taken[worker]) * np.mean([1 / np.mean(times) for times in taken.values()])
        x = x - learning_rate * factor * gradient(start, own)
        points.append(x)
        computing[worker] = (x, dispatch)
    return points


def ia2sgd(gradient, x, learning_rate, num_workers, arrivals):
    """G_i <- g,  x <- x - eta (1/n) sum_j G_j, empty slots 0."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    table = np.zeros((num_workers, len(x)))
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        table[worker] = gradient(*computing[worker])
        x = x - learning_rate * table.mean(axis=0)
        points.append(x)
        computing[worker] = (x, dispatch)
    return points


def ringmaster(gradient, x, learning_rate, num_workers, arrivals, threshold, stops=False):
    """As `asynchronous`, but a gradient with tau >= R changes nothing (Maranjyan et al. 2025, algorithm 4).

    With `stops` (algorithm 5), after each update all whose delay has reached R start again: after the worker that has
    just arrived, the oldest first.
    """
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}
    num_started = num_workers
    for number in arrivals:
        worker = picked(computing, number)
        read_version, dispatch = computing.pop(worker)
        restart = [worker]
        if len(points) - 1 - read_version < threshold:
            x = x - learning_rate * gradient(points[read_version], dispatch)
            points.append(x)
            if stops:
                late = [other for other, (read, _) in computing.items() if len(points) - 1 - read >= threshold]
                restart += sorted(late, key=lambda other: computing[other][1])
        for other in restart:
            computing[other] = (len(points) - 1, num_started)
            num_started += 1
    return points


def synchronous(gradient, x, learning_rate, num_workers, arrivals, weight):
    """x_{t+1} = x_t - eta sum_i w_i grad_i(x_t) / sum_i w_i, in round t over dispatches t N to t N + N - 1.

    A round is over once N have arrived, so their order changes nothing.
    """
    points = [x]
    for first in range(0, len(arrivals) - num_workers + 1, num_workers):
        dispatches = range(first, first + num_workers)
        total = sum(weight(dispatch) * gradient(x, dispatch) for dispatch in dispatches)
        x = x - learning_rate * total / sum(weight(dispatch) for dispatch in dispatches)
        points.append(x)
    return points


def k_sync(gradient, x, learning_rate, num_workers, arrivals, weight, quorum, interrupt):
    """The first K gradients computed at x_t (Dutta et al. 2018, Chen et al. 2016); later ones are dropped, or stopped.

    A worker whose gradient is dropped starts again at the current point.
    """
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}
    num_started = num_workers
    arrived = {}  # worker -> dispatch, of this round
    for number in arrivals:
        worker = picked(computing, number)
        read_version, dispatch = computing.pop(worker)
        restart = []
        if read_version < len(points) - 1:
            restart = [worker]
        else:
            arrived[worker] = dispatch
        if len(arrived) == min(quorum, num_workers):
            own = list(arrived.values())
            x = x - learning_rate * weighted_mean([gradient(x, d) for d in own], [weight(d) for d in own])
            points.append(x)
            restart = list(range(num_workers)) if interrupt else sorted(arrived)
            arrived = {}
        for other in restart:
            computing[other] = (len(points) - 1, num_started)
            num_started += 1
    return points


def rennala(gradient, x, learning_rate, num_workers, arrivals, weight, batch, interrupt):
    """B gradients at x_t from anyone, then a step along their mean (Tyurin, Richtarik 2023); stale ones are ignored.

    With `interrupt` everybody starts again at each update.
    """
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}
    num_started = num_workers
    collected = []
    for number in arrivals:
        worker = picked(computing, number)
        read_version, dispatch = computing[worker]
        restart = [worker]
        if read_version == len(points) - 1:
            collected.append(dispatch)
            if len(collected) == batch:
                gradients = [gradient(x, own) for own in collected]
                x = x - learning_rate * weighted_mean(gradients, [weight(own) for own in collected])
                points.append(x)
                collected = []
                if interrupt:
                    restart = list(range(num_workers))
        for other in restart:
            computing[other] = (len(points) - 1, num_started)
            num_started += 1
    return points


def k_async(gradient, x, learning_rate, num_workers, arrivals, weight, quorum):
    """One update per K distinct workers, stale or not, who wait for it and then start together (Dutta et al. 2018)."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    num_started = num_workers
    finished = {}
    for number in arrivals:
        worker = picked(computing, number)
        start, dispatch = computing.pop(worker)
        finished[worker] = (gradient(start, dispatch), weight(dispatch))
        if len(finished) == min(quorum, num_workers):
            gradients, weights = zip(*finished.values(), strict=True)
            x = x - learning_rate * weighted_mean(gradients, weights)
            points.append(x)
            for other in sorted(finished):
                computing[other] = (x, num_started)
                num_started += 1
            finished = {}
    return points


def k_batch_async(gradient, x, learning_rate, num_workers, arrivals, weight, batch):
    """One update per K gradients from anyone, stale or not; everybody starts again at once (Dutta et al. 2018)."""
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    buffer = []
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        start, own = computing[worker]
        buffer.append((gradient(start, own), weight(own)))
        if len(buffer) == batch:
            gradients, weights = zip(*buffer, strict=True)
            x = x - learning_rate * weighted_mean(gradients, weights)
            points.append(x)
            buffer = []
        computing[worker] = (x, dispatch)
    return points


def fixed_delay(gradient, x, learning_rate, num_workers, arrivals, delay):
    """x_{t+1} = x_t - eta grad_t(x_{max(0, t - tau)}), grad_t being the t-th gradient started.

    The arrivals only say how far this gets. At most tau + 1 gradients are started and not applied; as soon as they are
    tau + 1, the t-th is applied if it has arrived, then an idle worker starts, and so on. The worker that has been idle
    for longest starts first.
    """
    points = [x]
    computing = {}
    idle = list(range(num_workers))
    arrived = set()
    num_started = 0

    def fill():
        started = num_started
        while idle and started - (len(points) - 1) <= delay:
            computing[idle.pop(0)] = started
            started += 1
        return started

    num_started = fill()
    for number in arrivals:
        worker = picked(computing, number)
        arrived.add(computing.pop(worker))
        idle.append(worker)
        before = -1
        while before != (num_started, len(points)):
            before = (num_started, len(points))
            if (version := len(points) - 1) in arrived and num_started - version > delay:
                points.append(points[-1] - learning_rate * gradient(points[max(0, version - delay)], version))
            num_started = fill()
    return points


def ringleader(gradient, x, learning_rate, num_workers, arrivals):
    """Maranjyan, Richtarik 2026: collect until every worker has brought one, then one update per worker.

    Each update is x <- x - eta (1/n) sum_i (mean of worker i's gradients); the first belongs to the last finisher of
    the collection, the others to those that have not updated yet, as they arrive, their gradient included. What a
    worker brings after its own update counts for the next round. A worker always starts again at the current point.
    """
    points = [x]
    computing = {worker: (x, worker) for worker in range(num_workers)}
    table = [[] for _ in range(num_workers)]
    following = [[] for _ in range(num_workers)]
    updated = None  # None in the first phase
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        g = gradient(*computing[worker])
        if updated is not None and worker in updated:
            following[worker].append(g)
        else:
            table[worker].append(g)
            if updated is None and all(table):
                updated = set()
            if updated is not None:
                x = x - learning_rate * np.mean([np.mean(own, axis=0) for own in table], axis=0)
                points.append(x)
                updated.add(worker)
                if len(updated) == num_workers:
                    table = following
                    following = [[] for _ in range(num_workers)]
                    updated = None
        computing[worker] = (x, dispatch)
    return points


def fedbuff(
    gradient, x, learning_rate, num_workers, arrivals, buffer, num_local_steps, server_learning_rate=1.0, exponent=0.5
):
    """x <- x - eta_server (1/K) sum_j (1 + tau_j)^-a (start_j - end_j) (Nguyen et al. 2022, algorithm 1)."""
    points = [x]
    computing = {worker: (0, worker) for worker in range(num_workers)}
    scaled = []
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(computing, number)
        read_version, own = computing[worker]
        start = points[read_version]
        displacement = start - local_steps(gradient, start, own, learning_rate, num_local_steps)
        scaled.append(displacement / (1 + len(points) - 1 - read_version) ** exponent)
        if len(scaled) == buffer:
            x = x - server_learning_rate * np.mean(scaled, axis=0)
            points.append(x)
            scaled = []
        computing[worker] = (len(points) - 1, dispatch)
    return points


def downpour(gradient, x, learning_rate, num_workers, arrivals, n_push, n_fetch):
    """Each worker steps its own replica, pushes what it has accrued, and fetches now and then (Dean et al. 2012)."""
    points = [x]
    replicas = {worker: (x, worker) for worker in range(num_workers)}
    minibatches = [0] * num_workers
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(replicas, number)
        start, own = replicas[worker]
        end = local_steps(gradient, start, own, learning_rate, n_push)
        x = x + (end - start)
        points.append(x)
        minibatches[worker] += n_push
        replicas[worker] = (x if minibatches[worker] % n_fetch == 0 else end, dispatch)
    return points


def easgd(gradient, x, learning_rate, num_workers, arrivals, alpha, num_local_steps):
    """d = alpha (y_i - x),  y_i <- y_i - d,  x <- x + d after every H local steps (Zhang et al. 2015, algorithm 1)."""
    points = [x]
    replicas = {worker: (x, worker) for worker in range(num_workers)}
    for dispatch, number in enumerate(arrivals, start=num_workers):
        worker = picked(replicas, number)
        y = local_steps(gradient, *replicas[worker], learning_rate, num_local_steps)
        d = alpha * (y - x)
        x = x + d
        points.append(x)
        replicas[worker] = (y - d, dispatch)
    return points


def local_sgd(gradient, x, learning_rate, num_workers, arrivals, weight, num_local_steps, post):
    """x <- the weighted mean of where everybody's H local steps end (Stich 2019); H = 1 before version `post`.

    A round is over once N have arrived, so their order changes nothing.
    """
    points = [x]
    for first in range(0, len(arrivals) - num_workers + 1, num_workers):
        num_steps = num_local_steps if len(points) - 1 >= post else 1
        dispatches = range(first, first + num_workers)
        ends = [local_steps(gradient, x, dispatch, learning_rate, num_steps) for dispatch in dispatches]
        x = weighted_mean(ends, [weight(dispatch) for dispatch in dispatches])
        points.append(x)
    return points


def diloco(
    gradient, x, learning_rate, num_workers, arrivals, weight, num_local_steps, outer_learning_rate, outer_momentum
):
    """D = x - mean of the ends,  m <- beta m + D,  x <- x - eta (D + beta m) (Douillard et al. 2023, algorithm 1)."""
    points = [x]
    m = np.zeros_like(x)
    for first in range(0, len(arrivals) - num_workers + 1, num_workers):
        dispatches = range(first, first + num_workers)
        ends = [local_steps(gradient, x, dispatch, learning_rate, num_local_steps) for dispatch in dispatches]
        displacement = x - weighted_mean(ends, [weight(dispatch) for dispatch in dispatches])
        m = outer_momentum * m + displacement
        x = x - outer_learning_rate * (displacement + outer_momentum * m)
        points.append(x)
    return points


def async_local_sgd(
    gradient,
    x,
    learning_rate,
    num_workers,
    arrivals,
    seconds,
    num_local_steps,
    outer_learning_rate=0.7,
    outer_momentum=0.9,
    period=4,
    spread=0.0,
    dynamic=False,
):
    """Delayed Nesterov and DyLU (Liu et al. 2024, algorithms 2 and 3), d = start - end of a worker's local steps.

    The t-th arrival, t = 0, 1, ...: D <- D + d; if (t + 1) mod N = 0: m <- beta m + D / N,
    x <- x - eta ((1 - c N + c) beta m + d / N), D <- 0; otherwise x <- x - eta (c beta m + d / N).
    DyLU: H_i = floor(H v_i / max_j v_j), at least 1; v_i in steps per second of its last arrival, over those that have
    arrived.
    """
    points = [x]
    computing = {worker: (x, worker, num_local_steps) for worker in range(num_workers)}
    m = block = np.zeros_like(x)
    speeds = {}
    beta = outer_momentum
    c = spread
    for t, number in enumerate(arrivals):
        worker = picked(computing, number)
        start, dispatch, num_steps = computing[worker]
        d = start - local_steps(gradient, start, dispatch, learning_rate, num_steps)
        block = block + d
        if (t + 1) % period == 0:
            m = beta * m + block / period
            x = x - outer_learning_rate * ((1 - c * period + c) * beta * m + d / period)
            block = np.zeros_like(x)
        else:
            x = x - outer_learning_rate * (c * beta * m + d / period)
        points.append(x)
        speeds[worker] = num_steps / seconds(dispatch)
        if dynamic:
            num_steps = max(1, math.floor(num_local_steps * (speeds[worker] / max(speeds.values()))))
        computing[worker] = (x, num_workers + t, num_steps)
    return points
