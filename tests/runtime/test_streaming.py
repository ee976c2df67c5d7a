"""Streaming DiLoCo: against the rule DiLoCo to the last bit, closed forms on a quadratic, and the clock."""

import math

import numpy as np
import pytest
from doors import (
    SGD,
    AdamW,
    Budget,
    Constant,
    DiLoCo,
    Evaluation,
    Event,
    Exponential,
    Heterogeneous,
    Membership,
    OptimizerRecipe,
    Power,
    Quadratic,
    StreamingDiLoCo,
    Tridiagonal,
    simulated,
    stream,
)
from hypothesis import given, settings
from hypothesis import strategies as st

NOISY = Tridiagonal(dimension=11, noise=0.3)


def method(**changes):
    """DiLoCo with 4 inner steps, but for `changes`."""
    return StreamingDiLoCo(**{"num_local_steps": 4, "fragments": 1, "overlap": 0, "mix": 0.0, **changes})


def run(streaming, num_workers=3, *, problem=NOISY, speeds=None, **changes):
    speeds = speeds or Exponential()
    arguments = {"learning_rate": 0.125, "budget": Budget(samples=24 * num_workers), "evaluations": 6, **changes}
    return stream(
        streaming,
        problem.on(num_workers, seed=1),
        speeds.on(num_workers, seed=2),
        num_workers=num_workers,
        **arguments,
    )


def diloco(num_workers, samples, inner=None, evaluations=6, **changes):
    return simulated(
        DiLoCo(**{"num_local_steps": 4, **changes}),
        Exponential().on(num_workers, seed=2),
        NOISY.on(num_workers, seed=1),
        learning_rate=0.125,
        samples=samples,
        evaluations=evaluations,
        inner=inner,
    ).done


def events_of(records):
    return [record for record in records if isinstance(record, Event)]


def same(first, second):
    return (
        first.models.tobytes() == second.models.tobytes()
        and first.outer.tobytes() == second.outer.tobytes()
        and first.wait_seconds.tobytes() == second.wait_seconds.tobytes()
        and (first.result, first.evaluations, first.consensus, first.version)
        == (second.result, second.evaluations, second.consensus, second.version)
    )


@pytest.mark.parametrize("inner", [None, OptimizerRecipe(SGD(momentum=0.9)), OptimizerRecipe(AdamW(), 0.1)], ids=str)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
def test_one_fragment_without_overlap_and_mix_is_diloco_to_the_last_bit(num_workers, inner):
    done, rule = run(method(), num_workers, inner=inner), diloco(num_workers, 24 * num_workers, inner)
    assert done.outer.tobytes() == rule.parameters.numpy().tobytes()
    assert all(model.tobytes() == done.outer.tobytes() for model in done.models)
    assert (done.version, done.virtual_seconds) == (rule.version, rule.virtual_seconds)
    for ours, theirs in zip(done.evaluations, rule.evaluations, strict=True):
        assert (ours.version, ours.total_samples, ours.train_seconds) == (
            theirs.version,
            theirs.total_samples,
            theirs.train_seconds,
        )
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-12)
    assert max(done.consensus) < 1e-28  # all agree whenever a round is over


@pytest.mark.parametrize("fragments", [1, 2, 3, 4])
def test_one_worker_with_plain_outer_sgd_and_no_overlap_is_the_inner_optimizer_alone(fragments):
    recipe = OptimizerRecipe(AdamW(), weight_decay=0.1)
    streaming = method(fragments=fragments, outer_learning_rate=1.0, outer_momentum=0.0)
    done = run(streaming, 1, inner=recipe)
    alone = diloco(1, 24, recipe, num_local_steps=24, outer_learning_rate=1.0, outer_momentum=0.0)
    assert np.allclose(done.models[0], alone.parameters.numpy(), rtol=0, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), num_workers=st.integers(1, 4), steps=st.integers(1, 17), period=st.integers(1, 6))
def test_it_is_its_plain_loop(data, num_workers, steps, period):
    streaming = StreamingDiLoCo(
        num_local_steps=period,
        fragments=data.draw(st.integers(1, period)),
        overlap=data.draw(st.integers(0, period - 1)),
        mix=data.draw(st.floats(0.0, 0.9)),
    )
    # As many gradients from each worker: with equal speeds all are at the same inner step.
    done = run(streaming, num_workers, speeds=Constant(), budget=Budget(samples=num_workers * steps))
    instance = NOISY.on(num_workers, seed=1)
    models, gradient = [instance.initial() for _ in range(num_workers)], np.empty(11)
    outer, momentum = instance.initial(), np.zeros(11)
    for step in range(1, steps + 1):
        for worker in range(num_workers):
            instance.gradient(models[worker], worker, step - 1, gradient)
            models[worker] -= 0.125 * gradient
        for fragment in range(streaming.fragments):
            part = np.arange(11) % streaming.fragments == fragment
            if step % period == fragment * period // streaming.fragments:
                mean = outer[part] - np.mean(models, axis=0)[part]
                momentum[part] = 0.9 * momentum[part] + mean
                outer[part] -= 0.7 * (mean + 0.9 * momentum[part])
            sent = step - streaming.overlap
            if sent > 0 and sent % period == fragment * period // streaming.fragments:
                for model in models:
                    model[part] = streaming.mix * model[part] + (1 - streaming.mix) * outer[part]
    assert np.allclose(done.outer, outer, rtol=0, atol=1e-12)
    assert np.allclose(done.models, models, rtol=0, atol=1e-12)
    assert np.allclose(done.parameters, np.mean(models, axis=0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("overlap", [0, 1, 3, 5])
@pytest.mark.parametrize("mix", [0.0, 0.5])
def test_the_outer_parameters_of_noiseless_workers_shrink_by_a_known_factor_per_period(overlap, mix):
    # With a = 1 - eta lambda, H inner steps between two sendings and plain outer SGD, x_1 = a^o and
    # x_{k+1} = a^(H - D) (mix a^D + 1 - mix) x_k: what is done during the overlap counts with weight mix.
    period, fragments, rounds, rate, num_parameters = 6, 3, 4, 0.25, 7
    problem = Quadratic(dimension=num_parameters, noise=0.0)
    spectrum = problem.on(1, seed=0).exact_gradient(np.ones(num_parameters))
    initial = problem.on(1, seed=0).initial()
    streaming = StreamingDiLoCo(period, fragments, overlap, mix, 1.0, 0.0)
    done = run(
        streaming,
        2,
        problem=problem,
        speeds=Constant(),
        learning_rate=rate,
        budget=Budget(samples=2 * (period * rounds + period - 1)),
    )
    a = 1.0 - rate * spectrum
    for place in range(num_parameters):
        first = streaming.offset(place % fragments) or period
        # Fragment 0 is sent after H, 2 H, ..., the others once more before the run ends.
        more = rounds - 1 if place % fragments == 0 else rounds
        factor = a[place] ** (period - overlap) * (mix * a[place] ** overlap + 1 - mix)
        assert done.outer[place] == pytest.approx(initial[place] * a[place] ** first * factor**more, rel=1e-12)


def test_fragments_are_sent_at_their_own_offsets_and_are_every_fth_parameter():
    streaming = StreamingDiLoCo(4, fragments=2, overlap=1, mix=0.0, outer_learning_rate=1.0, outer_momentum=0.0)
    assert [streaming.offset(fragment) for fragment in range(2)] == [0, 2]
    problem = Quadratic(dimension=3, noise=0.0)
    first = problem.on(1, seed=0).initial()

    def moved(steps):
        done = run(streaming, 1, problem=problem, budget=Budget(samples=steps))
        return [bool(value) for value in done.outer != first]

    assert [moved(steps) for steps in (1, 2, 3, 4)] == [
        [False, False, False],
        [False, True, False],  # fragment 1
        [False, True, False],
        [True, True, True],  # fragment 0
    ]
    versions = [run(streaming, 2, speeds=Constant(), budget=Budget(samples=2 * steps)).version for steps in range(9)]
    assert versions == [0, 0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize(
    ("overlap", "transfer", "round_seconds"),
    [(0, 0.0, 6.0), (0, 1.5, 7.5), (1, 1.5, 6.5), (2, 1.5, 6.0), (4, 1.5, 6.0), (2, 4.25, 8.25)],
)
def test_a_transfer_costs_what_is_longer_than_the_overlap(overlap, transfer, round_seconds):
    done = run(
        method(num_local_steps=6, overlap=overlap),
        speeds=Constant(),
        transfer_seconds=transfer,
        budget=Budget(samples=3 * (6 * 5 + overlap)),
    )
    assert done.version == 5
    # Four rounds, the last sending, and what comes first after it: the overlap's steps or the transfer.
    assert done.virtual_seconds == 4 * round_seconds + 6 + max(overlap, transfer)
    # The last wait is followed by no gradient: the samples are used up.
    assert done.wait_seconds.tolist() == [4 * max(0.0, transfer - overlap)] * 3


def test_without_overlap_everybody_waits_for_the_slowest_at_every_synchronisation():
    done = run(method(), 3, speeds=Power(1.0), budget=Budget(seconds=36.0))
    assert done.wait_seconds.tolist() == [3 * 8.0, 3 * 4.0, 0.0]  # three rounds of 4 steps of 3 seconds
    assert done.num_arrivals == 36
    assert done.virtual_seconds == 36.0


def test_with_overlap_a_worker_waits_only_if_the_result_is_not_there():
    # 2 steps per round: worker 0 (1 s a step) sends at 2, takes its third step, and waits until worker 1 (1.25 s) has
    # sent at 2.5: not at all, its third step ends at 3. With worker 1 at 2 s a step it waits from 3 to 4.
    streaming = method(num_local_steps=2, overlap=1)
    fast = run(streaming, 2, speeds=Power(math.log2(1.25)), budget=Budget(seconds=3.9))
    assert fast.wait_seconds.tolist() == [0.0, 0.0]
    assert fast.num_arrivals == 3 + 3
    slow = run(streaming, 2, speeds=Power(1.0), budget=Budget(seconds=6.5))
    # Worker 0: 1 2 3 | 4: 5 6 ... its fourth step, sent, at 5; its fifth at 6, and then it waits for worker 1's at 8.
    assert slow.wait_seconds.tolist() == [1.0, 0.0]
    assert slow.num_arrivals == 5 + 3


@settings(max_examples=25, deadline=None)
@given(
    num_workers=st.integers(1, 5),
    fragments=st.integers(1, 3),
    speeds=st.sampled_from([Constant(), Power(1.0), Exponential()]),
    transfer=st.sampled_from([0.0, 0.75, 5.0]),
)
def test_more_overlap_never_makes_fewer_inner_steps(num_workers, fragments, speeds, transfer):
    steps = [
        run(
            method(num_local_steps=5, fragments=fragments, overlap=overlap),
            num_workers,
            speeds=speeds,
            transfer_seconds=transfer,
            budget=Budget(seconds=30.0),
        ).num_arrivals
        for overlap in range(5)
    ]
    assert steps == sorted(steps)


@settings(max_examples=25, deadline=None)
@given(
    overlap=st.integers(0, 3),
    fragments=st.integers(1, 4),
    speeds=st.sampled_from([Power(0.3), Power(2.0), Exponential()]),
    transfer=st.sampled_from([0.0, 2.5]),
)
def test_what_is_computed_does_not_depend_on_the_speeds(overlap, fragments, speeds, transfer):
    def trajectory(speeds, transfer):
        records = []
        run(
            method(overlap=overlap, fragments=fragments, mix=0.25),
            speeds=speeds,
            transfer_seconds=transfer,
            learning_rate=lambda num_samples: 0.25 / (1 + num_samples),
            report=records.append,
        )
        return {(event.worker, event.batches[0][1]): event.loss for event in events_of(records)}

    reference, other = trajectory(Constant(), 0.0), trajectory(speeds, transfer)
    common = reference.keys() & other.keys()
    assert len(common) >= 0.7 * len(reference) == 0.7 * 72
    assert all(reference[key] == other[key] for key in common)


@settings(max_examples=15, deadline=None)
@given(
    num_workers=st.integers(1, 4),
    overlap=st.integers(0, 3),
    speeds=st.sampled_from([Constant(), Power(2.0), Exponential(3.0)]),
    samples=st.integers(0, 50),
    transfer=st.sampled_from([0.0, 1.5]),
)
def test_two_runs_are_bitwise_equal_and_all_samples_arrive(num_workers, overlap, speeds, samples, transfer):
    streaming = method(fragments=3, overlap=overlap, mix=0.5)
    arguments = {"speeds": speeds, "budget": Budget(samples=samples), "transfer_seconds": transfer}
    first = run(streaming, num_workers, **arguments)
    records = []
    assert same(first, run(streaming, num_workers, report=records.append, **arguments))
    assert first.num_arrivals == samples
    assert [record for record in records if isinstance(record, Evaluation)] == first.evaluations
    events = events_of(records)
    assert [event.total_samples for event in events] == list(range(1, samples + 1))
    assert [event.train_seconds for event in events] == sorted(event.train_seconds for event in events)
    assert all(event.uses == ((event.dispatch, 0),) for event in events)
    started = [entry for record in records if isinstance(record, Event | Membership) for entry in record.started]
    assert [dispatch for _, dispatch, _, _ in started] == list(range(samples))
    assert {(e.worker, e.dispatch, e.batches) for e in events} == {entry[:3] for entry in started}
    for worker in range(num_workers):
        own = [event for event in events if event.worker == worker]
        assert [event.batches for event in own] == [((worker, index, index + 1),) for index in range(len(own))]
        gaps = np.diff([0.0] + [event.train_seconds for event in own])
        assert gaps == pytest.approx([event.compute_seconds + event.wait_seconds for event in own], abs=1e-9)
        assert sum(event.wait_seconds for event in own) == pytest.approx(first.wait_seconds[worker], abs=1e-9)


def test_a_result_that_is_still_on_its_way_is_mixed_in_before_the_run_ends():
    done = run(method(outer_learning_rate=1.0), 2, speeds=Constant(), budget=Budget(samples=8), transfer_seconds=2.0)
    assert done.virtual_seconds == 6.0
    assert np.array_equal(done.models, np.tile(done.outer, (2, 1)))
    assert [e.train_seconds for e in done.evaluations][-2:] == [4.0, 6.0]
    assert done.consensus[-1] == 0.0 < done.consensus[-2]


def test_a_schedule_counts_the_samples_of_all_as_if_all_were_as_far_as_the_worker():
    records = []
    run(method(), 2, learning_rate=lambda num_samples: 1.0 / (1 + num_samples), report=records.append)
    for event in events_of(records):
        assert event.learning_rate == 1.0 / (1 + 2 * event.batches[0][1])
    for record in records:
        if isinstance(record, Event | Membership):
            assert all(rate == 1.0 / (1 + 2 * batches[0][1]) for _, _, batches, rate in record.started)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_heterogeneous_workers_end_at_the_fixed_point_of_local_steps(momentum):
    # x = (sum P_i)^-1 sum P_i x_i with P_i = 1 - (1 - eta A_i)^H: not the optimum .5714, which is client drift.
    streaming = method(outer_momentum=momentum)
    done = run(streaming, 3, problem=Heterogeneous(), learning_rate=0.2, budget=Budget(samples=12 * 200))
    shares = 1 - (1 - 0.2 * np.array([1.0, 2.0, 0.5])) ** 4
    expected = float(shares @ [1.0, -1.0, 6.0] / shares.sum())
    assert done.outer[0] == pytest.approx(expected, abs=1e-12)
    assert abs(expected - 2 / 3.5) > 0.1
