"""Workers without processes, which drive a rule through the real server, and books of every gradient."""

import collections
import contextlib
import dataclasses
import functools

import numpy as np
import torch
from doors import SGD, Arrived, Gradient, Joined, Left, Optimizer, Server, Taken, Work, read_back, restore, state_of
from hypothesis import strategies as st
from torch import Tensor

SIZE, NUM_DECAYED = 48, 32  # multiples of 16, as in a flat vector
LEARNING_RATE = 0.125
SAMPLES = 2  # of a batch
words = st.sampled_from(["arrive", "arrive", "arrive", "leave", "join"])
comings_and_goings = st.lists(st.tuples(words, st.integers(0, 5)), max_size=50)
num_workers_ = st.integers(1, 5)


@functools.cache
def quadratic(dispatch):
    """Curvature and minimum of the quadratic that belongs to `dispatch`."""
    draw = np.random.default_rng(dispatch)
    return draw.uniform(0.5, 1.5, SIZE), draw.normal(size=SIZE)


def gradient(point, dispatch):
    """Of the quadratic that belongs to `dispatch`; never zero in practice."""
    curvature, minimum = quadratic(dispatch)
    return curvature * (point - minimum)


class OneEach:
    """Hands out batches without end, the one of a gradient's number."""

    def __init__(self):
        self._next = 0

    def take(self, worker, count):
        self._next += count
        return ((0, self._next - count, self._next),), count

    def give_back(self, ranges):
        """Nobody asks for them again."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """The test goes on counting."""


def weight(dispatch):
    return 1.0 + dispatch * 7 % 5


def seconds(dispatch):
    return 1.0 + dispatch % 3


def initial():
    return np.random.default_rng(99).normal(size=SIZE)


@dataclasses.dataclass
class Pending:
    work: Work
    read_version: int
    slot: Tensor
    start: Tensor
    """Where it started."""
    borrowed: bool
    """From the server's copy of a version, which other workers may have got too."""

    @property
    def dispatch(self):
        return self.work.dispatch

    @property
    def num_local_steps(self):
        return self.work.num_local_steps


@dataclasses.dataclass
class Happened:
    """A record, whether a step was taken, and what starts."""

    record: object
    stepped: bool
    start: tuple

    def __getattr__(self, name):
        return getattr(self.record, name)


class Driver:
    """Workers without processes: gradients in flight, each computed at the version it read, arrive in any order.

    In rules with local steps a worker takes them by plain SGD on the quadratic of its dispatch. It keeps books of its
    own on every dispatch and compares them with what the server says after each event.
    """

    def __init__(
        self,
        rule,
        *,
        num_workers,
        dtype=torch.float64,
        build=SGD(),  # noqa: B008 - frozen
        weight_decay=0.0,
        learning_rate=lambda num_samples: LEARNING_RATE,
    ):
        self.parameters = torch.from_numpy(initial()).to(dtype)
        self.points = [self.parameters.clone()]
        optimizer = Optimizer(self.parameters, NUM_DECAYED, build, weight_decay=weight_decay)
        self.server = Server(
            self.parameters,
            rule,
            optimizer,
            learning_rate,
            OneEach(),
            num_workers=8,
            batch_size=SAMPLES,
            writing=self._writing,
        )
        self.pending = {}
        self.log = []
        self.delays = []
        """Of first uses."""
        self.started = []
        self.held = set()
        self.used = set()
        self.dropped = set()
        self.lost = set()
        """With a worker that left, or abandoned."""
        self._uses_again = rule.name in ("ringleader", "ia2sgd")
        self.read_version = {}
        self.gradients = {}
        """dispatch -> what arrives."""
        self.final_ages = 0
        self.outstanding_at_updates = 0
        for worker in range(num_workers):
            self.join(worker)

    @contextlib.contextmanager
    def _writing(self, version):
        assert version == len(self.points) - 1
        yield
        self.points.append(self.parameters.clone())

    def join(self, worker):
        return self._book(Joined(worker))

    def leave(self, worker):
        gone = self.pending.get(worker)
        record = self._book(Left(worker))
        assert record.lost == (() if gone is None else (gone.work.dispatch,))
        return record

    def arrive(self, worker):
        arriving = self.pending.pop(worker)
        work = arriving.work
        before = arriving.slot.clone()
        if work.point is not None:
            assert torch.equal(work.point, arriving.start)
        told = Gradient(0.5, weight(work.dispatch), SAMPLES * work.num_local_steps)
        record = self._book(Arrived(work, work.version, arriving.slot, told, seconds(work.dispatch), Taken()))
        assert torch.equal(arriving.slot, before)
        arriving.slot.fill_(torch.nan)  # the slot is valid during the call only
        if work.point is not None and not arriving.borrowed:
            work.point.fill_(torch.nan)  # and so is the point it started from
        return record

    def _lose(self, worker):
        work = self.pending.pop(worker).work
        self.lost.add(work.dispatch)
        self.final_ages += self.server.version - work.version
        return work

    def _book(self, happened):
        server = self.server
        version = self.server.version
        arriving = happened.work.dispatch if isinstance(happened, Arrived) else None
        if isinstance(happened, Left) and happened.worker in self.pending:
            self._lose(happened.worker)
        if arriving is not None:
            self.held.add(arriving)
        outstanding = len(self.pending) + len(self.held)
        step = server.react(happened)
        record = step.record
        assert server.version == record.version
        assert record.version == len(self.points) - 1
        assert step.changed == (server.version > version)
        assert torch.equal(self.parameters, self.points[-1])  # nobody but a step has changed them
        self._book_uses(record, version, outstanding, step.start)
        for dispatch in record.drops:
            self.held.remove(dispatch)
            self.dropped.add(dispatch)
            self.final_ages += server.version - self.read_version[dispatch]
        for work in step.stop:
            if work.worker in self.pending:
                assert self._lose(work.worker) is work
        assert {work.dispatch for work in step.stop} == {*record.abandoned, *getattr(record, "lost", ())}
        if arriving is not None:
            whereabouts = {"applied": self.used, "held": self.held, "dropped": self.dropped}
            assert arriving in whereabouts[record.outcome]
        self.log.append(record)
        assert record.started == tuple((work.worker, work.dispatch, work.batches, work.rate) for work in step.start)
        for work in step.start:
            assert work.worker not in self.pending
            self._start(work)
        assert server.in_flight == {worker: pending.work for worker, pending in self.pending.items()}
        assert set(server.in_flight) <= set(server.workers)
        assert bool(server.in_flight) == bool(server.workers)  # always one in flight while somebody is present
        return Happened(record, step.changed, tuple(step.start))

    def _book_uses(self, record, version, outstanding, started):
        """One update after the other, each along gradients that have arrived and are used for the first time or, in
        a rule with a table, again.
        """
        uses = collections.defaultdict(list)
        for dispatch, delay in record.uses:
            uses[self.read_version[dispatch] + delay].append(dispatch)
        assert set(uses) == set(range(version, self.server.version))
        for update, dispatches in uses.items():
            assert len(set(dispatches)) == len(dispatches)
            first = [dispatch for dispatch in dispatches if dispatch not in self.used]
            assert self._uses_again or first == dispatches
            outstanding -= len(first)
            # Several updates in one reply: a worker may have started between two of them.
            exact = [work.version for work in started if work.point is not None]
            self.outstanding_at_updates += outstanding + sum(started_at <= update for started_at in exact)
            for dispatch in first:
                self.held.remove(dispatch)
                self.used.add(dispatch)
                self.delays.append(update - self.read_version[dispatch])
                self.final_ages += update - self.read_version[dispatch]

    def _start(self, work):
        server = self.server
        dispatch = work.dispatch
        assert dispatch == len(self.started)
        self.started.append(dispatch)
        self.read_version[dispatch] = work.version if work.point is not None else server.version
        borrowed = work.version < server.version or work.point is server.snapshot()[0]
        if work.point is None:
            start = self.parameters.clone()
        else:
            start = work.point.clone()
        origin = start.double().numpy()
        if work.rate is None:
            assert work.num_local_steps == 1
            direction = gradient(origin, dispatch)
        else:
            end = origin
            for _ in range(work.num_local_steps):
                end = end - work.rate * gradient(end, dispatch)
            direction = origin - end
        slot = torch.from_numpy(direction).to(start.dtype)
        self.gradients[dispatch] = direction.copy()
        self.pending[work.worker] = Pending(work, self.read_version[dispatch], slot, start, borrowed)

    def settle(self):
        """Check that every gradient ever started is in exactly one place, and the general law of their ages."""
        in_flight = {pending.work.dispatch for pending in self.pending.values()}
        places = (self.used, self.dropped, self.lost, self.held, in_flight)
        assert sorted(dispatch for place in places for dispatch in place) == self.started
        waiting = in_flight | self.held
        ages = self.final_ages + sum(self.server.version - self.read_version[dispatch] for dispatch in waiting)
        assert ages == self.outstanding_at_updates

    def through_a_file(self):
        """Let the server go on from its saved state alone; what its rule had is destroyed."""
        state = state_of(self.server)
        saved = read_back(state, type(self.server.rule).__module__)
        poison(state["rule_state"])
        self.points.pop()  # which loading writes again
        restore(self.server, saved)
        for worker, work in self.server.in_flight.items():
            self.pending[worker].work = work

    def drive(self, plan):
        for what, number in plan:
            if what == "arrive" and self.pending:
                self.arrive(sorted(self.pending)[number % len(self.pending)])
            elif what == "leave" and self.server.workers:
                self.leave(self.server.workers[number % len(self.server.workers)])
            elif what == "join":
                absent = [worker for worker in range(6) if worker not in self.server.workers]
                if absent:
                    self.join(absent[number % len(absent)])
        return self


def assert_same_run(first, second):
    """Records, parameters and the gradients in flight, and so the points at which these started, bit for bit."""
    assert first.log == second.log
    assert torch.equal(first.parameters, second.parameters)
    assert first.pending.keys() == second.pending.keys()
    for worker in first.pending:
        assert torch.equal(first.pending[worker].slot, second.pending[worker].slot)


def poison(thing):
    """Destroy all that can be changed in `thing`: whoever still looks at it sees rubbish."""
    if isinstance(thing, Tensor):
        thing.fill_(torch.nan)
    elif isinstance(thing, dict | list | tuple):
        for value in thing.values() if isinstance(thing, dict) else thing:
            poison(value)
        if not isinstance(thing, tuple):
            thing.clear()
    else:
        poison(getattr(thing, "__dict__", ()))
