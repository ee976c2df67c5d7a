"""The serving loop over real transports; workers are threads of this process, and gradients need no model."""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import ClassVar

import pytest
import torch
from running import A_TASK

from asyncsgd.batches import Batches
from asyncsgd.optimizers import SGD, Optimizer
from asyncsgd.records.events import APPLIED, DONE, Evaluation, Event, Fault, Gradient, Membership, Taken
from asyncsgd.rules import Asynchronous, Synchronous
from asyncsgd.rules.base import Reply, Rule, Start
from asyncsgd.runtime.base import Budget, EvaluationPoints, Judge
from asyncsgd.runtime.parameter_server import ParameterServer
from asyncsgd.runtime.transport.messages import Compute, Computed, Evaluate, Evaluated, Ready, Stop
from asyncsgd.runtime.transport.process_group import ProcessGroupServer
from asyncsgd.runtime.transport.shared_memory import SharedMemoryServer
from asyncsgd.server import Server
from asyncsgd.tasks.base import encode_sums

TRANSPORTS = [SharedMemoryServer, ProcessGroupServer]
TIMEOUT = 60.0


class ThreadWorker(threading.Thread):
    """A worker on a real worker's end: every gradient is -1, so with learning rate 1 every element of x is its version.

    Args:
        on_compute, on_evaluate: called before the answer; returning False ends the worker as if it had been killed.
    """

    def __init__(self, address, worker, on_compute=lambda command, pulled: None, on_evaluate=lambda command: None):
        super().__init__(daemon=True)
        self.address, self.worker = address, worker
        self.on_compute, self.on_evaluate = on_compute, on_evaluate
        self.start()

    def run(self):
        end = self.address.connect(self.worker)
        pulled = torch.zeros(self.address.size)
        gradient = torch.zeros(self.address.size) if end.slot is None else end.slot
        end.answer(Ready("layout"))
        while not isinstance(command := end.receive(), Stop):
            if isinstance(command, Evaluate):
                end.pull(pulled)
                if self.on_evaluate(command) is False:
                    break
                end.answer(Evaluated(command.shard, encode_sums({"loss": 2.0, "correct": 1, "weight": 4.0})))
            elif isinstance(command, Compute):
                version = end.pull(pulled)
                if self.on_compute(command, pulled) is False:
                    break
                gradient.fill_(-1.0)
                end.push(gradient)
                end.answer(Computed(command.dispatch, version, Gradient(1.0, 4.0, 2), Taken()))
        if hasattr(end, "_connection"):
            end._connection.close()


def serve(transport, rule, num_workers, samples, *, evaluations=1):
    x = transport.parameters
    server = Server(x, rule, Optimizer(x, len(x), SGD()), lambda num_samples: 1.0, transport.writing)
    records = []
    runtime = ParameterServer(
        server,
        transport,
        A_TASK,
        num_workers=num_workers,
        batch_size=2,
        budget=Budget(samples=samples),
        evaluations=evaluations,
        layout="layout",
        report=records.append,
    )
    try:
        return server, records, runtime.run().status
    finally:
        transport.close()


def arrivals(records):
    return [record for record in records if isinstance(record, Event)]


@pytest.mark.parametrize("make", TRANSPORTS)
def test_every_pull_is_one_consistent_version_while_the_server_writes(make):
    transport = make(3, 400_000)
    torn = []

    def look(command, pulled):
        low, high = float(pulled.min()), float(pulled.max())
        if low != high:
            torn.append((low, high))

    workers = [ThreadWorker(transport.address, worker, look) for worker in range(3)]
    server, records, status = serve(transport, Asynchronous(), 3, samples=600)
    for worker in workers:
        worker.join(TIMEOUT)
    assert status == DONE
    assert not torn
    assert server.version == 300
    assert torch.equal(transport.parameters, torch.full((400_000,), 300.0))
    assert all(event.version - 1 - event.read_version == event.arrival_delay for event in arrivals(records))


@pytest.mark.parametrize("make", TRANSPORTS)
def test_the_version_a_worker_reports_is_the_one_it_read(make):
    transport = make(2, 1000)
    seen = {}
    for worker in range(2):
        ThreadWorker(
            transport.address, worker, lambda command, pulled: seen.update({command.dispatch: float(pulled[0])})
        )
    _, records, _ = serve(transport, Asynchronous(), 2, samples=80)
    reported = {event.dispatch: float(event.read_version) for event in arrivals(records)}
    assert len(reported) == 40
    assert reported.items() <= seen.items()  # one is in flight when the budget is spent


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_worker_lost_in_an_evaluation_leaves_its_shard_to_another(make):
    transport = make(3, 100)
    ThreadWorker(transport.address, 0)
    ThreadWorker(transport.address, 1, on_evaluate=lambda command: False if make is SharedMemoryServer else None)
    ThreadWorker(transport.address, 2)
    _, records, status = serve(transport, Asynchronous(), 3, samples=20)
    assert status == DONE
    first = next(record for record in records if isinstance(record, Evaluation))
    assert (first.weight, first.loss, first.metrics["accuracy"]) == (12, 0.5, 0.25)
    lost = [record.worker for record in records if isinstance(record, Membership) and record.kind == "leave"]
    assert lost == ([1] if make is SharedMemoryServer else [])


def test_a_lost_workers_batch_goes_to_another_and_every_batch_arrives_once():
    transport = SharedMemoryServer(3, 100)
    ThreadWorker(transport.address, 0)
    ThreadWorker(transport.address, 1, on_compute=lambda command, pulled: command.dispatch < 6)
    ThreadWorker(transport.address, 2)
    server, records, status = serve(transport, Asynchronous(), 3, samples=80)
    assert status == DONE
    assert server.workers == (0, 2)
    indices = [event.batches[0][1] for event in arrivals(records)]
    assert len(set(indices)) == len(indices) == 40
    assert max(indices) < 40 + 2  # what others compute when the last sample arrives is discarded
    left = [record for record in records if isinstance(record, Membership) and record.kind == "leave"]
    assert [(record.worker, len(record.lost)) for record in left] == [(1, 1)]
    assert left[0].lost[0] not in {event.dispatch for event in arrivals(records)}


def test_a_worker_that_pulls_when_the_server_is_killed_at_writing_learns_that_it_is_gone():
    """The sequence word of a server killed at writing stays odd; only its closed socket tells."""
    transport = SharedMemoryServer(1, 100)
    outcome = []

    def pull():
        end = transport.address.connect(0)
        end.answer(Ready("layout"))
        try:
            outcome.append(end.pull(torch.zeros(100)))
        except EOFError as error:
            outcome.append(str(error))

    worker = threading.Thread(target=pull, daemon=True)
    with transport.writing(0):
        worker.start()
        deadline = time.monotonic() + TIMEOUT
        while not transport.wait(1.0):  # until its `Ready`: the connection alone is no message
            assert time.monotonic() < deadline
        worker.join(0.2)
        assert worker.is_alive()  # while the server writes, a pull waits
        transport.close()  # as the end of its process does
        worker.join(TIMEOUT)
        assert outcome == ["the server is gone"]


def test_the_synchronous_rule_goes_on_without_a_lost_worker():
    transport = SharedMemoryServer(2, 100)
    ThreadWorker(transport.address, 0)
    ThreadWorker(transport.address, 1, on_compute=lambda command, pulled: command.dispatch < 3)
    server, records, status = serve(transport, Synchronous(), 2, samples=20)
    assert status == DONE
    assert server.num_samples == server.num_samples_applied == 20
    assert {delay for event in arrivals(records) for _, delay in event.uses} == {0}


def test_a_gradient_in_flight_during_an_evaluation_keeps_its_version_and_its_place_in_time():
    """Worker 1 computes `extra` seconds into the evaluation; on the training clock it still arrives that much later."""
    extra = 0.4
    transport = SharedMemoryServer(2, 100)
    computing, evaluating, arrived = threading.Event(), threading.Event(), threading.Event()
    slow_dispatch = []
    read = []

    def compute_slowly(command, pulled):
        if not slow_dispatch:
            slow_dispatch.append(command.dispatch)
            read.append(float(pulled[0]))
            computing.set()
            assert evaluating.wait(TIMEOUT)
            time.sleep(extra)  # the computation
        else:
            arrived.set()

    def compute(command, pulled):
        """Begin only when the other computes, or all updates before the evaluation could have been made before that;
        and leave some of the budget until it has arrived."""
        computing.wait(TIMEOUT)
        if evaluating.is_set():
            arrived.wait(TIMEOUT)

    def evaluate_after_start(command):
        if slow_dispatch:
            evaluating.set()

    ThreadWorker(transport.address, 0, compute, evaluate_after_start)
    ThreadWorker(transport.address, 1, compute_slowly)
    _, records, status = serve(transport, Asynchronous(), 2, samples=40, evaluations=2)
    assert status == DONE
    middle = [record for record in records if isinstance(record, Evaluation)][1]
    slow = next(event for event in arrivals(records) if event.dispatch == slow_dispatch[0])
    assert [slow.read_version] == read
    assert slow.outcome == APPLIED
    assert middle.version == 10
    assert records.index(slow) > records.index(middle)
    assert slow.version - 1 - slow.read_version == slow.arrival_delay >= middle.version
    assert slow.train_seconds >= middle.train_seconds + extra


@dataclasses.dataclass(frozen=True)
class FirstOfRound(Rule):
    """Step along the first gradient of a round, abandon the others, start everybody: abandons in every reply."""

    name: ClassVar[str] = "first_of_round"
    summary: ClassVar[str] = "for this test"

    def arrive(self, state, arrival, view):
        others = tuple(flight.dispatch for flight in view.in_flight.values())
        return Reply(arrival.gradient, uses=(arrival.dispatch,), abandon=others, start=tuple(map(Start, view.workers)))


@pytest.mark.parametrize("make", TRANSPORTS)
def test_abandoned_gradients_count_in_no_budget_and_their_batches_are_handed_out_again(make):
    transport = make(3, 100)
    for worker in range(3):
        ThreadWorker(transport.address, worker)
    server, records, status = serve(transport, FirstOfRound(), 3, samples=60)
    assert status == DONE
    events = arrivals(records)
    assert server.num_samples == server.num_samples_applied == 60
    indices = [event.batches[0][1] for event in events]
    assert len(set(indices)) == 30
    assert max(indices) < 30 + 2  # two are in flight when the budget is spent, and no other was left out
    abandoned = {dispatch for event in events for dispatch in event.abandoned}
    assert abandoned
    assert not abandoned & {event.dispatch for event in events}
    assert {event.arrival_delay for event in events} == {0}


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_worker_that_stands_still_is_sent_only_the_last_of_1000_gradients_it_is_asked_for(make):
    transport = make(1, 100)
    goes_on = threading.Event()
    obeyed = []

    def stand_still(command, pulled):
        obeyed.append(command.dispatch)
        return goes_on.wait(TIMEOUT)

    worker = ThreadWorker(transport.address, 0, on_compute=stand_still)
    heard = []
    deadline = time.monotonic() + TIMEOUT

    def hear(until):
        while not until():
            assert time.monotonic() < deadline
            heard.extend(message for _, message in transport.wait(0.05))

    hear(lambda: bool(heard))
    transport.send(0, Compute(0, ((0, 0, 1),)))
    hear(lambda: obeyed == [0])
    for dispatch in range(1, 1001):
        transport.send(0, Compute(dispatch, ((0, dispatch, dispatch + 1),)))
        if dispatch == 500:
            transport.send(0, Evaluate(0, 1))
    goes_on.set()
    hear(lambda: any(isinstance(message, Computed) and message.dispatch == 1000 for message in heard))
    # Shared memory: what the socket holds is with the worker already, and it takes the last of that.
    assert len(obeyed) <= {SharedMemoryServer: 3, ProcessGroupServer: 2}[make]
    assert sum(isinstance(message, Evaluated) for message in heard) == 1
    transport.send(0, Stop())
    worker.join(TIMEOUT)
    transport.close()


@pytest.mark.parametrize("make", TRANSPORTS)
def test_a_worker_that_stands_still_blocks_nobody_under_a_rule_that_abandons_its_gradients(make):
    """It is sent another command every round, more than its socket holds, and what it missed it never computes."""
    num_rounds = 600
    transport = make(2, 100)
    goes_on = threading.Event()
    obeyed = []

    def count(command, pulled):
        if command.dispatch > 2 * (num_rounds - 100):
            goes_on.set()

    def stand_still(command, pulled):
        obeyed.append(command.dispatch)
        return goes_on.wait(TIMEOUT)

    ThreadWorker(transport.address, 0, on_compute=count)
    ThreadWorker(transport.address, 1, on_compute=stand_still)
    server, _, status = serve(transport, FirstOfRound(), 2, samples=2 * num_rounds)
    assert status == DONE
    assert server.version == num_rounds
    assert server.workers == (0, 1)  # it was not waited for until it gave up
    # The first one, and at most one more: the last that its socket held, before the server can send what came later.
    assert sum(dispatch <= 2 * (num_rounds - 100) for dispatch in obeyed) <= 2


def test_a_loss_that_is_not_a_number_ends_the_run_and_names_worker_and_version():
    transport = SharedMemoryServer(1, 100)

    class Diverging(ThreadWorker):
        def run(self):
            end = self.address.connect(0)
            end.answer(Ready("layout"))
            while not isinstance(command := end.receive(), Stop):
                if isinstance(command, Evaluate):
                    end.answer(Evaluated(command.shard, encode_sums({"loss": 2.0, "correct": 1, "weight": 4.0})))
                else:
                    end.answer(Computed(command.dispatch, 0, Gradient(float("nan"), 4.0, 2), Taken()))

    Diverging(transport.address, 0)
    _, records, status = serve(transport, Asynchronous(), 1, samples=20)
    assert status == "DIVERGED"
    fault = next(record for record in records if isinstance(record, Fault))
    assert (fault.worker, fault.message) == (0, "the loss of worker 0 at version 0 is nan")


def test_batches_come_back_lowest_first_and_before_new_ones():
    batches = Batches(samples=100, batch_size=10)
    assert [batches.take(0) for _ in range(4)] == [((0, index, index + 1),) for index in range(4)]
    for index in (3, 1):
        batches.give_back(((0, index, index + 1),))
    assert [batches.take(0) for _ in range(3)] == [((0, index, index + 1),) for index in (1, 3, 4)]
    assert Batches(samples=31, batch_size=10)._limit == 4


def test_evaluation_points_lie_evenly_over_samples_or_over_seconds():
    points = EvaluationPoints(Budget(samples=100), count=4)
    assert [points.passed(n, 0.0) for n in (24, 25, 26, 99, 100)] == [False, True, False, True, True]
    timed = EvaluationPoints(Budget(seconds=10.0), count=2)
    assert [timed.passed(0, seconds) for seconds in (4.9, 5.1, 9.0, 10.0)] == [False, True, False, True]


def test_evaluation_points_lie_at_multiples_of_evaluate_every_and_at_the_end():
    points = EvaluationPoints(Budget(samples=100, evaluate_every=40), count=8)
    assert [points.passed(n, 1e9) for n in (39, 40, 79, 99, 100, 120)] == [False, True, False, True, True, False]
    timed = EvaluationPoints(Budget(seconds=10.0, evaluate_every=40), count=8)
    assert [timed.passed(n, 1e9) for n in (39, 130, 159, 160)] == [False, True, False, True]
    later = EvaluationPoints(Budget(seconds=99.0, evaluate_every=40), count=8)
    later.load_state_dict(timed.state_dict())
    assert [later.passed(n, 0.0) for n in (160, 199, 200)] == [False, False, True]


def test_no_run_stops_early_at_the_end_of_its_budget():
    def looked_at(total_samples, loss):
        return Evaluation(0, total_samples, 0.0, loss, None, {}, 0.0)

    for samples, last, ends in ((50, False, False), (51, True, False), (51, False, True)):
        judge = Judge(Budget(samples=samples, patience=1))
        assert judge.of(looked_at(0, 1.0)) is None
        assert (judge.of(looked_at(50, 1.0), last=last) is not None) == ends
