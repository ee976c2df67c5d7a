"""What both ways to a worker promise the server: whole versions, every message, and word of a worker that is lost.

Workers are threads of this process on a real worker's end."""

import atexit
import contextlib
import dataclasses
import functools
import hmac
import json
import math
import multiprocessing
import os
import pickle
import shutil
import struct
import tempfile
import threading
import time
from multiprocessing import connection
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tasks import Classes, Plane

from asyncsgd.backends.addresses import address_of_interface, address_towards
from asyncsgd.backends.host import SignsOfLife, ThisHost
from asyncsgd.backends.hosts import Hosts
from asyncsgd.backends.launch import World
from asyncsgd.backends.link import (
    Compute,
    Computed,
    Evaluate,
    Gone,
    GradientFollows,
    Hello,
    Inherited,
    Link,
    Ready,
    Refused,
    ShardEvaluated,
    Stop,
    Wake,
    decode,
    encode,
)
from asyncsgd.backends.member import Member
from asyncsgd.backends.pair import Greeting, Pair, Rendezvous
from asyncsgd.backends.processes import ProcessBackend
from asyncsgd.backends.seal import Seal, Untrusted, available, derive_key, seals
from asyncsgd.backends.segment import FROZEN, Segment
from asyncsgd.backends.token import token_of
from asyncsgd.core.batches import BatchStream
from asyncsgd.core.limits import Limits, TrainingClock
from asyncsgd.core.loop import Hooks, Loop
from asyncsgd.core.optimizers import SGD, Optimizer
from asyncsgd.core.protocol import Work
from asyncsgd.core.server import Server
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import Evaluation, Event, Gradient, Range, Taken
from asyncsgd.rules import Asynchronous, KSync
from asyncsgd.run.execute import Notice
from asyncsgd.run.finish import facts_at_start
from asyncsgd.run.other_host import Here, as_led, begin_of, prepared_as
from asyncsgd.run.run import run_of
from asyncsgd.run.runtimes import AllReduce, Pipeline, Processes
from asyncsgd.run.written import values_of
from asyncsgd.settings.groups import Budget, Common, Machine, Output, Steps
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks.base import encode_sums

TIMEOUT = 60.0
WAYS = ["a pipe and a segment", "a group of two", "a group of two with a token"]
TOKEN = b"0123456789abcdef" * 2
every_way = pytest.mark.parametrize("way", WAYS)


def joined(way, segment, number, folder):
    """The server's end, and what its worker is given."""
    if way == WAYS[0]:
        ours, theirs = multiprocessing.Pipe()
        return Link(ours), Inherited(theirs, segment)
    rendezvous = Rendezvous(met_in(folder), token=TOKEN if way == WAYS[2] else b"")
    return Pair(rendezvous, f"worker{number}", serves=True, slot=[segment.slots[number]]), rendezvous


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
        link, segment = self.way.connect(self.number)
        pulled = torch.zeros(self.size)
        link.send(Ready("layout"))
        while not isinstance(command := link.receive(), Stop):
            if isinstance(command, Wake):
                continue
            if segment is None:
                link.receive_vector(pulled)
            if isinstance(command, Evaluate):
                link.send(ShardEvaluated(command.shard, encode_sums({"loss": 2.0, "weight": 4.0}), (0, 0)))
                continue
            version = command.version_in_slot
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
    workers = ProcessBackend(links, segment, Classes(), TrainingClock())
    hooks = Hooks(lambda record: (records.append(record), report(record)))
    loop = Loop(server, workers, Limits(samples=samples, seconds=seconds), evaluations, hooks)
    workers.wait_until_ready("layout")
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
    threads = []
    for number, (_, theirs) in enumerate(ends):
        threads.append(Worker(theirs, number, size, seen))
    server, result, records = trained({number: ours for number, (ours, _) in enumerate(ends)}, segment, 200)
    assert result.status == "DONE"
    assert server.version == 100
    assert torch.equal(segment.parameters, torch.full((size,), 100.0))
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    events = [record for record in records if isinstance(record, Event)]
    assert len(events) == 100
    for event in events:
        assert seen[event.dispatch] == (event.read_version,) * 2
        assert event.version - 1 - event.read_version == event.arrival_delay


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


def test_a_worker_whose_gradient_is_abandoned_during_an_evaluation_is_not_sooner_at_its_next_one(tmp_path):
    """Every round of the quick worker takes two dispatches and abandons the gradient of the slow one."""
    segment = Segment(4, 2)
    ends = [joined(WAYS[0], segment, number, tmp_path) for number in range(2)]
    slow = {}
    for number, (seconds, seen) in enumerate(((0.01, {}), (0.5, slow))):
        Worker(ends[number][1], number, 4, seen, Lasting(seconds))
    links = {number: ours for number, (ours, _) in enumerate(ends)}
    _, _, records = trained(links, segment, None, KSync(quorum=1), seconds=1.6, evaluations=16)
    evaluations = [record for record in records if isinstance(record, Evaluation)]  # the first one in training at 0.1 s
    assert sorted(slow)[1] // 2 >= max(record.version for record in evaluations if record.train_seconds <= 0.42)


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
    segment = Segment(4, num_slots=1)
    pulled = InterruptedCopy(segment)
    assert segment.pull(pulled) == 1
    assert pulled.values.tolist() == [1.0, 1.0, 1.0, 1.0]


def test_a_pull_waits_for_a_step_that_the_server_is_making():
    segment = Segment(4, num_slots=1)
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
    """Of 100 rounds that one worker decides, the other one's gradients are abandoned."""
    segment = Segment(100, 2)
    goes_on = threading.Event()
    quick = {}
    slow = {}
    ends = [joined(way, segment, number, tmp_path) for number in range(2)]
    threads = [Worker(ends[0][1], 0, 100, quick), Worker(ends[1][1], 1, 100, slow, goes_on)]

    def report(record):
        if isinstance(record, Event) and record.version == 100:
            goes_on.set()

    links = {number: ours for number, (ours, _) in enumerate(ends)}
    _, result, _ = trained(links, segment, 250, KSync(quorum=1), report)
    assert result.status == "DONE"
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(slow)[0] == 1
    assert sorted(slow)[1] > sorted(quick)[98]


class Refusing(threading.Thread):
    """Refuses its first batch, as soon as parameters are frozen."""

    def __init__(self, way):
        super().__init__(daemon=True)
        self.way = way
        self.start()

    def run(self):
        link, segment = self.way.connect(0)
        link.send(Ready("layout"))
        assert isinstance(link.receive(), Compute)
        while not int(segment.control[FROZEN]):
            time.sleep(0.001)
        link.send(Refused("a batch has no target"))


def test_a_run_whose_worker_refuses_while_parameters_are_frozen_ends_with_the_reason(tmp_path):
    """In Hogwild. The worker would else be one that was lost, and the run would go on without it."""
    segment = Segment(4, 0)
    ours, theirs = joined(WAYS[0], segment, 0, tmp_path)
    Refusing(theirs)
    workers = ProcessBackend({0: ours}, segment, Classes(), TrainingClock())
    workers.wait_until_ready("layout")
    workers.start([Work(0, 0, 0, 1, (Range(0, 0, 1),), None, None, 0.0, 0)])
    with workers.running():
        assert workers.next(math.inf) is None
        with pytest.raises(RunError, match="worker 0: a batch has no target"):
            list(workers.freeze())


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
@example(Computed(1, 2, Gradient(math.nan, 1.0, 1), Taken()))
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
    stranger, _ = ends[0][1].connect(0)
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
    rows = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        rows.append(line.split())
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]


def test_a_key_is_that_of_the_standard():
    """RFC 5869, first test case."""
    key = derive_key(bytes([0x0B]) * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert key.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


@pytest.mark.parametrize("algorithm", available())
def test_a_tag_is_that_of_the_standard(algorithm):
    key = bytes(range(32))
    kind = 1
    number = 2
    content = b"a piece of a vector"
    sealing = Seal(algorithm, key)
    for _ in range(number):
        sealing.tag(kind, b"another one")
    nonce = struct.pack("!IQ", kind, number)
    covered = struct.pack("!QQ", kind, len(content)) + content
    if algorithm == "aes-gcm":
        aead = pytest.importorskip("cryptography.hazmat.primitives.ciphers.aead")
        right = aead.AESGCM(key).encrypt(nonce, b"", covered) + bytes(16)
    else:
        right = hmac.new(key, nonce + covered, "sha256").digest()
    assert sealing.tag(kind, content) == right


@pytest.mark.parametrize("algorithm", available())
@given(contents=st.lists(st.binary(max_size=40), min_size=2, max_size=6), data=st.data())
def test_what_was_changed_repeated_or_moved_has_no_other_tag_than_its_own(algorithm, contents, data):
    sending = Seal(algorithm, bytes(32))
    sealed = [(content, sending.tag(0, content)) for content in contents]
    number = data.draw(st.integers(0, len(contents) - 1))
    other = data.draw(st.integers(0, len(contents) - 1).filter(lambda drawn: drawn != number))
    receiving = Seal(algorithm, bytes(32))
    for content, tag in sealed[:number]:
        receiving.check(0, content, tag)
    content, tag = sealed[number]
    bent = bytes([tag[0] ^ 1]) + tag[1:]
    kind, wrong = data.draw(
        st.sampled_from([(0, sealed[other]), (1, sealed[number]), (0, (content + b"x", tag)), (0, (content, bent))])
    )
    with pytest.raises(Untrusted):
        receiving.check(kind, *wrong)


def test_keys_of_a_pair_are_of_no_other_start_pair_direction_or_token():
    greetings = (b"server says", b"worker says")
    tags = [
        seal.tag(0, b"content")
        for token, name, said in (
            (TOKEN, "worker1", greetings),
            (TOKEN, "worker2", greetings),
            (TOKEN, "worker1", greetings[::-1]),
            (TOKEN, "worker1", (b"server says", b"worker says now")),
            (TOKEN[::-1], "worker1", greetings),
        )
        for algorithm in available()
        for seal in seals(token, name, said, algorithm)
    ]
    assert len(set(tags)) == len(tags)


class Between(threading.Thread):
    """Somebody between the two ends of a pair: carries what each sends to the other, and changes one thing of it."""

    def __init__(self, folder, change):
        super().__init__(daemon=True)
        self.rendezvous = [Rendezvous(met_in(f"{folder}{side}"), token=TOKEN) for side in range(2)]
        self.change = change

    def run(self):
        groups = [None, None]

        def meet(side):
            here = Pair.__new__(Pair)
            here._rendezvous, here._name, here._rank = self.rendezvous[side], "worker0", 1 - side
            groups[side] = here._connected()

        threads = [threading.Thread(target=meet, args=(side,)) for side in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sizes = {0: torch.empty(1024, dtype=torch.uint8), 1: torch.empty(8), 2: torch.empty(32, dtype=torch.uint8)}
        for side in range(2):
            for tag, like in sizes.items():
                threading.Thread(target=self.carry, args=(groups, side, tag, like), daemon=True).start()

    def carry(self, groups, side, tag, like):
        with contextlib.suppress(RuntimeError):
            for number in range(1000):
                came = torch.empty_like(like)
                groups[side].recv([came], side, tag).wait()
                for sent in self.change(side, tag, number, came):
                    groups[1 - side].send([sent], 1 - side, tag).wait()


def changes(side, tag, number, how):
    """A change of one thing: the content number `number` that `side` (0: the server) sends under a tag of gloo."""

    def change(from_side, of_tag, count, came):
        if (from_side, of_tag, count) != (side, tag, number):
            return [came]
        if how == "twice":
            return [came, came]
        came.view(torch.uint8)[5] ^= 1
        return [came]

    return change


@pytest.mark.processes
@pytest.mark.parametrize(
    ("side", "tag", "number", "how"),
    [
        (0, 0, 0, "changed"),
        (1, 0, 0, "changed"),
        (1, 0, 1, "twice"),
        (0, 0, 2, "changed"),
        (0, 0, 2, "twice"),
        (1, 1, 0, "changed"),
        (1, 2, 0, "changed"),
        (0, 1, 0, "changed"),
    ],
)
def test_what_was_changed_on_its_way_is_used_by_nobody(side, tag, number, how, tmp_path):
    """The server sends Evaluate and a vector; the worker answers with Ready, a vector, and a last message."""
    between = Between(tmp_path, changes(side, tag, number, how))
    between.start()
    slot = torch.zeros(8)
    # The one between is the worker of the first rendezvous and the server of the second.
    server = Pair(between.rendezvous[0], "worker0", serves=True, slot=[slot])
    worker = Pair(between.rendezvous[1], "worker0", serves=False)
    got = torch.zeros(8)
    used = []

    def obey():
        with contextlib.suppress(Gone):
            used.append(worker.receive())
            worker.receive_vector(got)
            used.append("vector at the worker")
            worker.send(GradientFollows())
            worker.send_vector(torch.full((8,), -1.0))
            worker.send(Ready("after the vector"))
            used.append(worker.receive())
        worker.close()

    thread = threading.Thread(target=obey, daemon=True)
    thread.start()
    server.send(Evaluate(0, 1))

    def wait(seen):
        """Until something is seen, or the worker has ended."""
        until = time.monotonic() + TIMEOUT
        while not seen() and thread.is_alive() and time.monotonic() < until:
            time.sleep(0.01)
        return seen()

    with contextlib.suppress(Gone):
        if wait(lambda: server._is_open or server.is_readable()):
            server.send_vector(torch.ones(8))
            if wait(server.is_readable):
                used.append(server.receive())
                server.send(Stop())
                if wait(server.is_readable):
                    used.append(server.receive())
    assert thread.is_alive() == (side == 1)  # who was sent what is wrong has given up
    assert len(used) < 4
    if (side, tag) == (0, 1):
        assert "vector at the worker" not in used
    if side == 1 and tag in (1, 2):
        assert Ready("after the vector") not in used


@pytest.mark.processes
@pytest.mark.parametrize("says", ["no algorithm", "another token", "no greeting"])
def test_strangers_are_gone_before_anything_of_theirs_is_read(says, tmp_path):
    slot = torch.zeros(8)
    folder = met_in(tmp_path)
    server = Pair(Rendezvous(folder, token=TOKEN), "worker0", serves=True, slot=[slot])
    if says == "no greeting":
        stranger = Pair.__new__(Pair)
        stranger._rendezvous, stranger._name, stranger._rank = Rendezvous(folder), "worker0", 1
        group = stranger._connected()
        group.send([torch.full((1024,), 255, dtype=torch.uint8)], 0, 0).wait()
    else:
        there = Pair(Rendezvous(folder, token=TOKEN[::-1] if says == "another token" else b""), "worker0", serves=False)
        there.send(Ready("the layout"))
    with pytest.raises(Gone) as gone:
        server.receive()
    assert "it does not prove that it has the token; give all hosts the same one" in str(gone.value)
    assert not slot.any()


def test_a_vector_of_several_pieces_comes_as_it_was(tmp_path):
    rendezvous = Rendezvous(met_in(tmp_path), token=TOKEN)
    vector = torch.randn(5_000_003, generator=torch.Generator().manual_seed(0))
    slot = torch.zeros_like(vector)
    server = Pair(rendezvous, "worker0", serves=True, slot=[slot])
    worker = Pair(rendezvous, "worker0", serves=False)
    worker.send(GradientFollows())
    server.send(Stop())
    worker.receive()  # the pair is open now
    worker.send_vector(vector)
    worker.send(Ready("sent"))
    assert server.receive() == Ready("sent")
    assert torch.equal(slot, vector)


@pytest.mark.parametrize("number", range(3))
def test_a_vector_of_which_any_piece_has_a_wrong_tag_is_not_received(number, tmp_path, monkeypatch):
    monkeypatch.setattr("asyncsgd.backends.pair._PIECE_ELEMENTS", 4)
    rendezvous = Rendezvous(met_in(tmp_path), token=TOKEN)
    server = Pair(rendezvous, "worker0", serves=True, slot=[torch.zeros(12)])
    worker = Pair(rendezvous, "worker0", serves=False)
    server.send(Stop())
    worker.receive()  # the pair is open now
    right = worker._sending.tag
    tags = iter(range(3))

    def bent(kind, content):
        tag = right(kind, content)
        return tag[::-1] if kind == 1 and next(tags) == number else tag

    worker._sending.tag = bent
    worker.send(GradientFollows())
    worker.send_vector(torch.ones(12))
    worker.send(Ready("sent"))
    with pytest.raises(Gone, match="what came has a wrong tag"):
        server.receive()


def test_who_delivers_to_an_end_that_receives_nothing_goes_on_when_the_pair_is_given_up(tmp_path):
    """As a copy of a checkpoint for a host that is cut off: the vector is more than a socket holds."""
    rendezvous = Rendezvous(met_in(tmp_path), token=TOKEN)
    server = Pair(rendezvous, "mirror", serves=True)
    other_end = Pair(rendezvous, "mirror", serves=False)
    giving_up = threading.Timer(0.3, server.give_up, ("no sign of life",))
    giving_up.start()
    with pytest.raises(Gone, match="no sign of life"):
        server.deliver(torch.zeros(10_000_000))
    assert other_end.is_readable() is False


def test_what_comes_of_a_vector_is_a_sign_of_life_and_whoever_waits_for_more_of_it_hears_of_the_silence(tmp_path):
    rendezvous = Rendezvous(met_in(tmp_path))
    member = SignsOfLife(deadline=1.0).through(Pair(rendezvous, "host1", serves=False))
    silent = Pair(rendezvous, "host1", serves=True)
    silent.send(Stop())
    member.receive()  # the pair is open now
    vector = torch.zeros(8)
    for _ in range(8):
        time.sleep(0.25)
        silent.send_vector(vector)
        member.until_given_up(member.receive_vector, vector)
    with pytest.raises(Gone, match="no sign of life for 1 s"):
        member.until_given_up(member.receive_vector, vector)


def test_a_worker_of_another_host_that_has_ended_is_lost_also_where_its_pair_does_not_notice():
    """Two hosts in this process: the worker's end of the pair lives, and its host says that its process was killed."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    leads = ThisHost(0, 2, 0, 1, "127.0.0.1", ("127.0.0.1", store.port), "test", is_elastic=True)
    follows = dataclasses.replace(leads, number=1, first_worker=1)
    signs = SignsOfLife(deadline=2.0)
    killed = "its process was killed by SIGKILL"

    def be_the_other_host():
        member = Member(follows, b"", "lo", signs, {})
        pairs.append(Pair(member.rendezvous, "worker1", serves=False))
        member.stay(lambda: "", lambda worker, seconds: killed)

    pairs = []
    other_host = threading.Thread(target=be_the_other_host, daemon=True)
    other_host.start()
    with Hosts(leads, b"", "lo", signs, lambda: None, lambda line: None) as hosts:
        worker = hosts.connect_workers(Segment(4, 2))[1]
        assert connection.wait([worker], 20.0)
        with pytest.raises(Gone, match=killed):
            worker.receive()
        pairs[0].send(Stop())  # it lives
    other_host.join(TIMEOUT)
    assert not other_host.is_alive()


def test_a_greeting_is_not_larger_than_a_frame():
    assert len(msgspec.json.encode(Greeting(bytes(32), available()))) < 1000


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (Greeting, {"random": "", "algorithms": []}),
        (Here, {"settings": {}, "places": {}}),
        (Notice, {"found": {}, "micro_batches": 1}),
    ],
    ids=["greeting", "here", "notice"],
)
def test_a_message_with_a_field_that_nobody_knows_is_refused(kind, fields):
    """A program of another version, or a stranger, may have sent it."""
    assert isinstance(msgspec.json.decode(msgspec.json.encode(fields), type=kind), kind)
    with pytest.raises(msgspec.ValidationError, match="unknown field `code`"):
        msgspec.json.decode(msgspec.json.encode(fields | {"code": "x"}), type=kind)


@pytest.mark.parametrize("message", [Stop(), Ready("sent"), Evaluate(0, 1)], ids=["stop", "ready", "evaluate"])
def test_a_message_with_a_part_too_many_is_refused(message):
    parts = json.loads(encode(message))
    assert decode(json.dumps(parts).encode()) == message
    with pytest.raises(ValueError, match="at most length"):
        decode(json.dumps([*parts, "x"]).encode())


def run_with(task, **steps):
    settings = Common(budget=Budget(samples=80), optimization=Steps(learning_rate=0.01, schedule="constant", **steps))
    return run_of("train", settings, task=task, runtime=Processes(2), rule=Asynchronous())


def begin_with(run):
    prepared = run.prepared()
    return decode(encode(begin_of(prepared, facts_at_start(prepared, prepared.flat()))))


def test_another_host_takes_part_in_the_same_run_alone():
    """What differs is named: settings, data, and the parameters that training begins with."""
    notice = begin_with(run_with(Plane()))
    assert prepared_as(run_with(Plane()), notice, {}).task == Plane()
    run = run_with(Plane())
    assert as_led(run, notice.settings, ()) is run
    with pytest.raises(RunError, match=r"other settings \(weight_decay 0.01 -> 0.1\); type the same on every host"):
        as_led(run_with(Plane(), weight_decay=0.1), notice.settings, ())
    for what in ("data", "initial parameters"):
        other = msgspec.structs.replace(notice, began_from=notice.began_from | {what: "0123456789abcdef"})
        with pytest.raises(RunError, match=f"it has other {what} than rank 0 \\(0123456789ab -> "):
            prepared_as(run_with(Plane()), other, {})
    drawn_elsewhere = msgspec.structs.replace(
        notice,
        began_from=notice.began_from | {"initial parameters": "0123456789abcdef"},
        hardware=notice.hardware | {"cpu_capability": "of another processor"},
    )
    assert prepared_as(run_with(Plane()), drawn_elsewhere, {}).task == Plane()


def test_a_host_without_the_folder_of_a_run_that_goes_on_takes_the_settings_that_it_was_not_given(tmp_path):
    leads = run_with(Plane(), weight_decay=0.3)
    settings = begin_with(leads).settings
    output = Output(resume=str(tmp_path / "run"), interface="lo")
    here = dataclasses.replace(run_with(Plane()), output=output)
    words = ["--resume", output.resume, "--mode", "async"]
    typed = task_flags(Plane).parse(words, prog="train.py", description="", examples="", is_led=True).given
    assert typed == {"resume", "mode"}
    led = as_led(here, settings, typed)
    assert values_of(led) == values_of(leads)
    assert led.output == output
    with pytest.raises(RunError, match=r"other settings \(weight_decay 0.3 -> 0.01\)"):
        as_led(here, settings, {"weight_decay"})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.yaml").write_text("")
    with pytest.raises(RunError, match=r"other settings \(weight_decay 0.3 -> 0.01\)"):
        as_led(here, settings, ())  # it has read the settings of the folder that it has


@pytest.mark.parametrize(
    ("written", "mode", "said"),
    [
        (None, 0o600, "cannot be read"),
        ("short", 0o600, "has 5 bytes, and 32 is the fewest"),
        ("x" * 40, 0o640, "others may read"),
    ],
)
def test_a_token_that_is_none_is_refused_with_what_to_type(written, mode, said, tmp_path):
    path = tmp_path / "token"
    if written is not None:
        path.write_text(written)
        path.chmod(mode)
    with pytest.raises(UsageError, match=said):
        token_of(Output(token_file=str(path)))


def test_a_token_is_that_of_the_file_then_of_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("f" * 40 + "\n")
    path.chmod(0o600)
    with pytest.raises(UsageError, match="type --trust-network"):
        token_of(Output())
    monkeypatch.setenv("ASYNCSGD_TOKEN", "e" * 40)
    assert token_of(Output()) == b"e" * 40
    assert token_of(Output(token_file=str(path))) == b"f" * 40
    assert token_of(Output(trust_network=True)) == b""


def test_a_host_with_other_versions_is_refused_also_where_it_is_gone_by_then():
    hosts = object.__new__(Hosts)
    hosts.this_host = ThisHost(0, 2, 0, 1, "127.0.0.1", ("127.0.0.1", 1), "test")
    hosts.greetings = {1: Hello("h1", 1, 1, {}, {})}
    hosts._links = {1: Mock(send=Mock(side_effect=Gone("its process ended")))}
    with pytest.raises(RunError, match=r"host 1 \(h1\): it has asyncsgd None, .*; install the same there"):
        hosts._check_versions()


def answers_of_two_ranks(ask):
    """What `ask` returns of the world of each of two ranks. Two threads, named after their ranks, are the ranks; they
    have one store, as torchrun's ranks have."""
    store = torch.distributed.HashStore()
    answers = []

    def be(rank):
        world = World(rank, 2, None)
        vars(world)["_store"] = store
        answers.append(ask(world))

    ranks = [threading.Thread(target=be, args=(rank,), name=str(rank), daemon=True) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT)
    return answers


@pytest.mark.parametrize(("gpus", "takes_nccl"), [((1, 1), True), ((1, 0), False), ((4, 2), True)])
def test_ranks_of_two_hosts_take_nccl_if_each_has_a_gpu_of_its_own(gpus, takes_nccl, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus[int(threading.current_thread().name)])
    assert answers_of_two_ranks(lambda world: world.takes_nccl("cuda:0")) == [takes_nccl] * 2


def test_ranks_on_one_host_meet_there_also_if_their_launcher_does_not_say_how_many_are_here(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert answers_of_two_ranks(lambda world: world._interface(None)) == ["lo", "lo"]


@pytest.mark.parametrize(
    ("ranks_here", "gpus", "num_devices", "stages_fit"),
    [(8, 8, 8, True), (8, 4, 4, False), (4, 4, 8, True), (4, 2, 4, False)],
)
def test_the_gpus_of_all_hosts_count(ranks_here, gpus, num_devices, stages_fit, monkeypatch):
    """Of eight ranks, some on this host; the other host is like this one."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks_here))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    settings = Common(machine=Machine(device="cuda", micro_batches=8))
    assert run_of("train", settings, task=Plane(), runtime=AllReduce(8)).num_devices == num_devices
    refused = "" if stages_fit else f"{ranks_here} stages need a GPU each, got {gpus}"
    with pytest.raises(UsageError, match=refused) if refused else contextlib.nullcontext():
        run_of("train", settings, task=Plane(), runtime=Pipeline(8, 8))


def test_an_address_is_that_of_the_way_or_of_the_interface():
    assert address_towards("127.0.0.1") == "127.0.0.1"
    assert address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(UsageError, match="--interface nowhere is not there; this host has "):
        address_of_interface("nowhere")
    with pytest.raises(UsageError, match=r"the host no\.such\.host\.invalid is not known here"):
        address_towards("no.such.host.invalid")
