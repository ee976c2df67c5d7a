"""Every problem against its own finite differences, its noise against its mean, and the closed forms to the digit."""

import dataclasses
import math
import zlib

import numpy as np
import pytest
from doors import (
    PROBLEMS,
    Heterogeneous,
    Logistic,
    LogisticData,
    Mode,
    Quadratic,
    Tridiagonal,
    dirichlet_shares,
    hashed_bag_of_words,
)
from hypothesis import given
from hypothesis import strategies as st

WORKERS = 5
SMALL = (
    Tridiagonal(dimension=7, noise=0.3),
    Tridiagonal(dimension=7, noise=0.3, noise_kind="full"),
    Quadratic(dimension=4, curvature=2.0, condition=5.0, noise=0.3),
    Mode(curvature=0.7, noise=0.3),
    Heterogeneous(noise=0.3),
    Logistic(features=6, rows=30, classes=3, batch=2, penalty=0.05),
)
every_example = pytest.mark.parametrize("problem", PROBLEMS, ids=str)
every_small = pytest.mark.parametrize("problem", SMALL, ids=str)


def point(instance):
    """The start, disturbed."""
    x = instance.initial()
    x[x != 0] += 0.5
    return x + 0.3 * np.random.default_rng(5).normal(size=len(x))


def noiseless(problem):
    """Without noise added to the gradient; what is drawn from data stays."""
    if hasattr(problem, "noise"):
        return dataclasses.replace(problem, noise=0.0)
    return problem


def sample(instance, x, worker, index):
    out = np.full(instance.num_parameters, np.nan)
    return instance.gradient(x, worker, index, out), out


@pytest.mark.parametrize("problem", PROBLEMS + SMALL, ids=str)
def test_gradients_are_the_derivatives_of_the_returned_loss_and_of_the_excess(problem):
    exact = problem.on(WORKERS, seed=3)
    instance = noiseless(problem).on(WORKERS, seed=3)
    step = 1e-5
    x = point(instance)
    draw = np.random.default_rng(0)
    functions = [(exact.loss, exact.exact_gradient(x))]
    for worker in range(WORKERS):

        def own_loss(x, worker=worker):
            value, _ = sample(instance, x, worker, worker)
            return value

        _, gradient = sample(instance, x, worker, worker)
        functions.append((own_loss, gradient))
    for function, gradient in functions:
        direction = draw.normal(size=len(x)) / math.sqrt(len(x))
        ahead = function(x + step * direction)
        behind = function(x - step * direction)
        slope = (ahead - behind) / (2 * step)
        # rounding of a difference of two values, and the third derivative of the logistic loss
        rounding = 1e-9 + 1e-10 * abs(function(x))
        assert slope == pytest.approx(gradient @ direction, rel=1e-7, abs=rounding)


@every_small
def test_the_mean_of_stochastic_gradients_is_the_exact_gradient_within_five_standard_errors(problem):
    instance = problem.on(WORKERS, seed=11)
    x = point(instance)
    per_worker = 600
    gradients = np.empty((WORKERS, per_worker, instance.num_parameters))
    values = np.empty((WORKERS, per_worker))
    for worker in range(WORKERS):
        for index in range(per_worker):
            values[worker, index] = instance.gradient(x, worker, index, gradients[worker, index])
    # workers differ in their means, so the error is that of a stratified mean
    number = WORKERS * per_worker
    variance = gradients.var(axis=1, ddof=1).mean(axis=0)
    off = np.abs(gradients.mean(axis=(0, 1)) - instance.exact_gradient(x))
    assert np.all(off <= 5 * np.sqrt(variance / number) + 1e-12)
    variance = values.var(axis=1, ddof=1).mean()
    off = abs(values.mean() - instance.loss(x) - instance.minimum)
    assert off <= 5 * math.sqrt(variance / number) + 1e-12


@pytest.mark.parametrize("kind", ["add", "full"])
def test_noise_has_the_stated_standard_deviation_and_rank(kind):
    instance = Tridiagonal(dimension=6, noise=0.5, noise_kind=kind).on(2, seed=1)
    x = instance.initial()
    num = 4000
    noise = np.empty((num, 6))
    for index in range(num):
        _, gradient = sample(instance, x, 1, index)
        noise[index] = gradient - instance.exact_gradient(x)
    covariance = noise.T @ noise / num
    if kind == "add":
        shape = np.ones((6, 6))
        rank = 1
    else:
        shape = np.eye(6)
        rank = 6
    error = 0.25 * math.sqrt(2 / num)
    assert np.abs(covariance - 0.25 * shape).max() < 5 * error
    assert np.linalg.matrix_rank(noise[:50], tol=1e-9) == rank


def test_scalar_noise_is_the_documented_place_of_a_philox_stream():
    instance = Mode(noise=2.0).on(3, seed=7)
    for worker, index in ((2, 70), (0, 0), (2, 63), (1, 640)):
        block, place = divmod(index, 64)
        key = np.array([7, 12], dtype=np.uint64)
        counter = np.array([0, block, worker, 0], dtype=np.uint64)
        stream = np.random.Generator(np.random.Philox(key=key, counter=counter))
        normal = stream.standard_normal(64)
        _, gradient = sample(instance, np.zeros(1), worker, index)
        assert gradient[0] == 2.0 * normal[place]


@given(
    problem=st.sampled_from(SMALL),
    calls=st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(0, 200)), min_size=1, max_size=12),
)
def test_a_sample_does_not_depend_on_the_calls_before_it(problem, calls):
    used = problem.on(WORKERS, seed=2)
    x = point(used)
    for worker, index in calls:
        fresh = problem.on(WORKERS, seed=2)
        value, gradient = sample(used, x, worker, index)
        expected_value, expected_gradient = sample(fresh, x, worker, index)
        assert value == expected_value
        assert gradient.tobytes() == expected_gradient.tobytes()


@every_small
def test_x_is_only_read_and_out_is_wholly_overwritten(problem):
    instance = problem.on(WORKERS, seed=2)
    x = point(instance)
    kept = x.copy()
    strided = np.full(2 * len(x), np.nan)[::2]
    value = instance.gradient(x, 1, 4, strided)
    expected_value, expected = sample(instance, x, 1, 4)
    assert value == expected_value
    assert strided.tolist() == expected.tolist()
    assert np.array_equal(x, kept)
    for new in (instance.initial, instance.optimum):
        array = new()  # the caller's own
        kept = array.copy()
        array += 1.0
        assert np.array_equal(new(), kept)


@pytest.mark.parametrize("problem", [p for p in SMALL if noiseless(p) != p], ids=str)
def test_without_noise_every_sample_is_exact_bit_for_bit(problem):
    seen = set()
    for seed in (0, 1):
        instance = noiseless(problem).on(WORKERS, seed)
        for index in (0, 1, 64, 2**80):  # no stream reaches the last: nothing is drawn
            _, gradient = sample(instance, point(instance), 1, index)
            seen.add(gradient.tobytes())
    assert len(seen) == 1


@every_example
def test_at_the_optimum_the_excess_and_the_gradient_are_zero(problem):
    instance = problem.on(WORKERS, seed=4)
    optimum = instance.optimum()
    assert abs(instance.loss(optimum)) < 1e-13
    assert (instance.exact_gradient(optimum) ** 2).sum() < 1e-16
    near = optimum + 1e-3 * np.random.default_rng(0).normal(size=len(optimum))
    assert instance.loss(near) > 0
    assert instance.loss(instance.initial()) > 0


@pytest.mark.parametrize("dimension", [1, 2, 3, 40])
def test_the_tridiagonal_problem_is_the_dense_quadratic(dimension):
    matrix = (2 * np.eye(dimension) - np.eye(dimension, k=1) - np.eye(dimension, k=-1)) / 4
    slope = np.zeros(dimension)
    slope[0] = -0.25
    optimum = np.linalg.solve(matrix, slope)
    minimum = -(1 - 1 / (dimension + 1)) / 8

    def dense(x):
        return 0.5 * x @ matrix @ x - slope @ x

    assert dense(optimum) == pytest.approx(minimum, rel=1e-12)
    instance = Tridiagonal(dimension=dimension, noise=0).on(1, seed=0)
    np.testing.assert_allclose(np.asarray(instance.optimum()), optimum, rtol=1e-11)
    x = np.random.default_rng(0).normal(size=dimension)
    value, gradient = sample(instance, x, 0, 0)
    np.testing.assert_allclose(gradient, matrix @ x - slope, rtol=1e-12, atol=1e-15)
    assert value == pytest.approx(dense(x) - minimum, rel=1e-12)
    assert instance.loss(x) == pytest.approx(value, rel=1e-12)


def test_heterogeneous_quadratics_have_their_optimum_at_4_over_7():
    instance = Heterogeneous().on(3, seed=0)
    optimum = instance.optimum()
    assert optimum[0] == pytest.approx(4 / 7, rel=1e-15)
    x = np.array([0.3])
    values = []
    for worker, slope in enumerate([0.3 - 1, 0.6 + 2, 0.15 - 3]):
        value, gradient = sample(instance, x, worker, 0)
        values.append(value)
        assert gradient[0] == pytest.approx(slope)
    assert np.mean(values) == pytest.approx(instance.loss(x), rel=1e-13)
    four = Heterogeneous().on(4, seed=0).optimum()  # worker 3 has f_0 again
    assert four[0] == pytest.approx((1 - 2 + 3 + 1) / (1 + 2 + 0.5 + 1), rel=1e-15)


def test_the_quadratic_has_the_stated_spectrum_and_start():
    instance = Quadratic(dimension=3, curvature=4.0, condition=16.0, noise=0).on(1, seed=0)
    assert instance.initial().tolist() == [1, 1, 1]
    assert instance.exact_gradient(np.ones(3)).tolist() == pytest.approx([0.25, 1, 4])
    assert instance.loss(np.ones(3)) == pytest.approx(5.25 / 2)


def test_every_worker_has_weight_one_over_n_whatever_the_size_of_its_share():
    features = np.array([[1.0], [1.0], [1.0], [2.0]])
    labels = [0, 0, 0, 1]
    instance = LogisticData(features, labels, [[0, 1, 2], [3]], batch=1, penalty=0.1, seed=0)
    weighted = LogisticData(features[[0, 3]], [0, 1], [[0], [1]], batch=1, penalty=0.1, seed=0)
    x = np.array([0.3, -0.2])
    np.testing.assert_allclose(instance.exact_gradient(x), weighted.exact_gradient(x), rtol=1e-14)
    np.testing.assert_allclose(instance.optimum(), weighted.optimum(), atol=1e-8)


def test_logistic_loss_at_zero_is_log_of_the_number_of_classes_and_finite_far_away():
    instance = Logistic(features=8, rows=40, classes=5).on(4, seed=0)
    at_zero, _ = sample(instance, instance.initial(), 0, 0)
    assert at_zero == pytest.approx(math.log(5), rel=1e-15)
    value, gradient = sample(instance, np.linspace(-1e5, 1e5, 40), 0, 0)
    assert math.isfinite(value)
    assert np.isfinite(gradient).all()


def test_the_logistic_optimum_of_two_mirrored_rows_solves_the_scalar_equation():
    """Rows +1 (class 0) and -1 (class 1): W = (w, -w) with w = s(-2 w) / penalty, s the logistic function."""
    instance = LogisticData([[1.0], [-1.0]], [0, 1], [[0], [1]], batch=1, penalty=0.2, seed=0)
    w = instance.optimum()[0]
    logistic = 1 / (1 + math.exp(2 * w))
    assert w == pytest.approx(logistic / 0.2, rel=1e-8)
    loss = math.log(1 + math.exp(-2 * w))
    assert instance.minimum == pytest.approx(loss + 0.2 * w * w, rel=1e-12)


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    share=st.floats(0, 1),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e6]),
    seed=st.integers(-3, 2**70),
)
def test_dirichlet_shares_are_disjoint_and_of_equal_size(labels, share, alpha, seed):
    num_workers = 1 + int(share * (len(labels) - 1))
    shares = dirichlet_shares(labels, num_workers, alpha, seed)
    assert len(shares) == num_workers
    for rows in shares:
        assert len(rows) == len(labels) // num_workers
    used = np.concatenate(shares)
    assert len(set(used.tolist())) == len(used)
    assert 0 <= used.min() <= used.max() < len(labels)
    again = dirichlet_shares(labels, num_workers, alpha, seed)
    np.testing.assert_array_equal(shares, again)


def test_small_alpha_separates_the_classes_and_large_alpha_keeps_the_mixture_of_the_whole():
    labels = np.arange(4000) % 4
    shares = dirichlet_shares(labels, 8, 0.01, seed=1)
    largest = [np.bincount(labels[rows]).max() / len(rows) for rows in shares]
    assert np.mean(largest) > 0.8
    unbalanced = np.repeat([0, 1], [3600, 400])
    for rows in dirichlet_shares(unbalanced, 4, 1e6, seed=0):
        assert abs(unbalanced[rows].mean() - 0.1) < 5 * math.sqrt(0.09 / 1000)


@pytest.mark.parametrize("alpha", [0.2, 2.0])
def test_shares_of_a_worker_vary_as_those_of_a_dirichlet_draw(alpha):
    """A share q_c of concentrations alpha C p_c, whose sum is A = alpha C, has mean p_c and variance
    p_c (1 - p_c) / (A + 1). Counting a class in m rows adds the mean of q_c (1 - q_c) / m.
    """
    parts = np.array([0.5, 0.3, 0.2])
    labels = np.repeat([0, 1, 2], [500, 300, 200])
    num_rows = 100  # so many of each class are there, so none runs out
    num_draws = 1000
    found = []
    for seed in range(num_draws):
        first_share = dirichlet_shares(labels, len(labels) // num_rows, alpha, seed)[0]
        found.append(np.bincount(labels[first_share], minlength=3) / num_rows)
    total = alpha * len(parts)
    spread = parts * (1 - parts)
    of_draw = spread / (total + 1)
    variance = of_draw + (spread - of_draw) / num_rows
    assert np.abs(np.mean(found, axis=0) - parts).max() < 5 * math.sqrt(variance.max() / num_draws)
    np.testing.assert_allclose(np.var(found, axis=0), variance, rtol=0.25)


def test_hashed_bags_count_lower_cased_words_and_have_length_one():
    bags = hashed_bag_of_words(["The cat, the CAT; the dog", "", "dog"], 1024)
    assert sorted(bags[0][bags[0] > 0] ** 2) == pytest.approx([1 / 14, 4 / 14, 9 / 14])
    assert not bags[1].any()
    assert bags[0][bags[2].argmax()] ** 2 == pytest.approx(1 / 14)
    texts = ["asynchronous SGD with stale gradients", "zażółć gęślą jaźń \udc80"]
    assert zlib.crc32(hashed_bag_of_words(texts, 64).tobytes()) == 1562669606  # in every process
