"""What both ways to a worker promise the server: whole versions, every message, and word of a worker that is lost.

Workers are threads of this process on a real worker's end."""

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tasks import Classes

from asyncsgd.backends.link import (
    Computed,
    Evaluate,
    Gone,
    GradientFollows,
    Inherited,
    Link,
    Meeting,
    Pair,
    Ready,
    ShardEvaluated,
    Stop,
    Wake,
    decode,
    encode,
)
from asyncsgd.backends.processes import Workers
from asyncsgd.backends.segment import Segment
from asyncsgd.core.batches import BatchStream
from asyncsgd.core.limits import Limits, TrainingClock
from asyncsgd.core.loop import Loop, Sink
from asyncsgd.core.optimizers import SGD, Optimizer
from asyncsgd.core.server import Server
from asyncsgd.records.events import Evaluation, Event, Gradient, Taken
from asyncsgd.rules import Asynchronous, KSync
from asyncsgd.tasks.base import encode_sums

TIMEOUT = 60.0
WAYS = ["a pipe and a segment", "a group of two"]
every_way = pytest.mark.parametrize("way", WAYS)


def joined(way, segment, number, folder):
    """The server's end, and what its worker is given."""
    if way == WAYS[0]:
        ours, theirs = multiprocessing.Pipe()
        return Link(ours), Inherited(theirs, segment)
    path = met_in(folder)
    return Pair(path, number, serves=True, slot=[segment.slots[number]]), Meeting(path)


@functools.cache
def met_in(folder):
    """A folder for temporary files in which the processes of one test meet."""
    path = tempfile.mkdtemp(prefix="asyncsgd-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


class Worker(threading.Thread):
    """Every gradient is -1, so with learning rate 1 every element of x is its version; `seen` is what was pulled. It
    stands still in its first gradient until `goes_on`.
    """

    def __init__(self, way, number, size, seen, goes_on=None):
        super().__init__(daemon=True)
        self.way = way
        self.number = number
        self.size = size
        self.seen = seen
        self.goes_on = goes_on or threading.Event()
        if goes_on is None:
            self.goes_on.set()
        self.start()

    def run(self):
        link, segment = self.way.join(self.number)
        pulled = torch.zeros(self.size)
        link.send(Ready("layout"))
        while not isinstance(command := link.receive(), Stop):
            if isinstance(command, Wake):
                continue
            if segment is None:
                link.receive_vector(pulled)
            if isinstance(command, Evaluate):
                link.send(ShardEvaluated(command.shard, encode_sums({"loss": 2.0, "weight": 4.0}), ()))
                continue
            version = command.exact_version
            if segment is not None:
                version = segment.pull(pulled, link.check)
                segment.slots[self.number].fill_(-1.0)
            else:
                link.send(GradientFollows())
                link.send_vector(torch.full((self.size,), -1.0))
                link.flush()
            self.goes_on.wait(TIMEOUT)
            self.seen[command.dispatch] = (pulled.min(), pulled.max())
            link.send(Computed(command.dispatch, version, Gradient(1.0, 4.0, 2), Taken()))


def trained(
    links,
    segment,
    samples,
    rule=Asynchronous(),  # noqa: B008 - it is frozen
    report=lambda record: None,
    seconds=None,
    evaluations=1,
):
    """The run of these workers under `rule` with rate 1: server, result, records."""
    x = segment.parameters
    records = []
    server = Server(
        x,
        rule,
        Optimizer(x, len(x), SGD()),
        lambda num_samples: 1.0,
        BatchStream(None, 2),
        num_workers=len(links),
        samples=samples,
        writing=segment.writing,
    )
    workers = Workers(links, segment, Classes(), TrainingClock())
    sink = Sink(lambda record: (records.append(record), report(record)))
    loop = Loop(server, workers, Limits(samples=samples, seconds=seconds), evaluations, sink)
    workers.meet("layout")
    result = loop.run()
    workers.close()
    return server, result, records


@every_way
def test_every_pull_is_the_version_that_is_told_and_never_a_torn_one(way, tmp_path):
    """And the server makes of all gradients what it would make of them in one process."""
    size = 400_000
    seen = {}
    segment = Segment(size, 3)
    ends = [joined(way, segment, number, tmp_path) for number in range(3)]
    threads = [Worker(theirs, number, size, seen) for number, (_, theirs) in enumerate(ends)]
    server, result, records = trained({number: ours for number, (ours, _) in enumerate(ends)}, segment, 600)
    assert (result.status, server.version) == ("DONE", 300)
    assert torch.equal(segment.parameters, torch.full((size,), 300.0))
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    events = [record for record in records if isinstance(record, Event)]
    assert len(events) == 300
    assert all(seen[event.dispatch] == (event.read_version,) * 2 for event in events)
    assert all(event.version - 1 - event.read_version == event.arrival_delay for event in events)


class Lasting(NamedTuple):
    """In the place of an event: a gradient takes these seconds."""

    seconds: float

    def wait(self, timeout):
        time.sleep(self.seconds)


def test_an_evaluation_that_waits_for_a_worker_costs_no_training_seconds_and_brings_no_gradient_forward(tmp_path):
    segment = Segment(4, 2)
    ends = [joined(WAYS[0], segment, number, tmp_path) for number in range(2)]
    for number, seconds in enumerate((0.01, 0.5)):
        Worker(ends[number][1], number, 4, {}, Lasting(seconds))
    links = {number: ours for number, (ours, _) in enumerate(ends)}
    began = time.monotonic()
    _, result, records = trained(links, segment, None, seconds=0.8, evaluations=8)
    wall_seconds = time.monotonic() - began
    assert result.status == "DONE"
    evaluations = [record for record in records if isinstance(record, Evaluation)]
    eval_seconds = sum(record.eval_seconds for record in evaluations)
    assert [record.train_seconds for record in evaluations][:2] == pytest.approx([0.0, 0.1], abs=0.05)
    assert eval_seconds > 0.3  # the slow worker is amid a gradient
    assert 0.8 + eval_seconds <= wall_seconds
    slow = next(record for record in records if isinstance(record, Event) and record.worker == 1)
    assert slow.flight_seconds >= 0.45  # of training: as long as without an evaluation


class InterruptedCopy:
    """A vector that is written half by half, and between the halves of the first copy the server makes a step."""

    def __init__(self, segment):
        self.segment = segment
        self.values = torch.zeros(4)

    def copy_(self, source):
        self.values[:2] = source[:2]
        if self.segment.version == 0:
            with self.segment.writing(0):
                self.segment.parameters.fill_(1.0)
        self.values[2:] = source[2:]


def test_a_pull_amid_which_the_server_makes_a_step_is_made_again():
    segment = Segment(4, slots=1)
    pulled = InterruptedCopy(segment)
    assert segment.pull(pulled) == 1
    assert pulled.values.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_pull_waits_for_a_step_that_the_server_is_making():
    segment = Segment(4, slots=1)
    pulled = torch.zeros(4)
    with contextlib.ExitStack() as step:
        step.enter_context(segment.writing(0))
        segment.parameters[:2] = 1.0

        def finish():
            segment.parameters[2:] = 1.0
            step.close()

        assert segment.pull(pulled, alive=finish) == 1
    assert pulled.tolist() == [1.0, 1.0, 1.0, 1.0]


@every_way
def test_a_worker_that_stands_still_blocks_nobody_and_computes_the_last_gradient_it_was_asked_for(way, tmp_path):
    """Of 400 rounds that one worker decides, the other one's gradients are abandoned."""
    segment = Segment(100, 2)
    goes_on = threading.Event()
    quick = {}
    slow = {}
    ends = [joined(way, segment, number, tmp_path) for number in range(2)]
    threads = [Worker(ends[0][1], 0, 100, quick), Worker(ends[1][1], 1, 100, slow, goes_on)]

    def report(record):
        if isinstance(record, Event) and record.version == 400:
            goes_on.set()

    links = {number: ours for number, (ours, _) in enumerate(ends)}
    _, result, _ = trained(links, segment, 1000, KSync(quorum=1), report)
    assert result.status == "DONE"
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(slow)[0] == 1
    assert sorted(slow)[1] > sorted(quick)[398]


def test_a_worker_that_pulls_when_the_server_is_killed_at_writing_learns_that_it_is_gone():
    """The word of a server killed at writing stays odd; only its closed pipe tells."""
    segment = Segment(100, 1)
    outcome = []
    ours, theirs = map(Link, multiprocessing.Pipe())

    def pull():
        with pytest.raises(Gone) as gone:
            segment.pull(torch.zeros(100), theirs.check)
        outcome.append(str(gone.value))

    worker = threading.Thread(target=pull, daemon=True)
    with segment.writing(0):
        worker.start()
        worker.join(0.2)
        assert worker.is_alive()  # while the server writes, a pull waits
        ours.close()  # as the end of its process does
        worker.join(TIMEOUT)
        assert outcome == ["its process ended"]


@given(st.builds(Computed, st.integers(0, 2**62), st.integers(0, 2**62), st.builds(Gradient), st.builds(Taken)))
def test_a_message_comes_back_bit_for_bit(computed):
    assert repr(decode(encode(computed))) == repr(computed)  # NaN is not equal to itself


@pytest.mark.parametrize(
    "payload", [pickle.dumps(Taken()), b"[]", b'["Stop",1]', b'["Compute"]', b"7", b"", b"[" * 99999], ids=range(7)
)
def test_a_worker_that_sends_anything_else_has_left(payload):
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(payload)
    with pytest.raises(Gone, match=r"^it sent what no worker sends: "):
        Link(ours).receive()


@every_way
def test_nothing_that_is_sent_is_executed_and_no_port_is_open_to_other_hosts(way, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    segment = Segment(4, 2)
    ends = [joined(way, segment, number, tmp_path) for number in range(2)]
    links = {number: ours for number, (ours, _) in enumerate(ends)}
    stranger, _ = ends[0][1].join(0)
    stranger._put(pickle.dumps(Bomb()))
    other = Worker(ends[1][1], 1, 4, {})
    _, result, _ = trained(links, segment, 8)
    other.join(TIMEOUT)
    ports = listening()
    assert result.status == "DONE"  # the other goes on
    assert not (tmp_path / "executed").exists()
    assert set(ports) <= {"0100007F"}  # 127.0.0.1
    assert ports or way == WAYS[0]


def test_batches_come_back_lowest_first_and_before_new_ones():
    batches = BatchStream(samples=100, batch_size=10)
    assert [batches.take(0, 1)[0] for _ in range(4)] == [((0, index, index + 1),) for index in range(4)]
    for index in (3, 1):
        batches.give_back(((0, index, index + 1),))
    assert [batches.take(0, 1)[0] for _ in range(3)] == [((0, index, index + 1),) for index in (1, 3, 4)]


def listening():
    """The addresses on which this process listens."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
