"""What both transports promise the server: whole versions, every message, and word of a worker that is lost.

Workers are threads of this process on a real worker's end."""

import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from tasks import Classes

from asyncsgd.batches import Batches
from asyncsgd.optimizers import SGD, Optimizer
from asyncsgd.records.events import Event, Gradient, Taken
from asyncsgd.rules import Asynchronous
from asyncsgd.runtime.base import Budget, TrainingClock
from asyncsgd.runtime.fit import Fit, Sink
from asyncsgd.runtime.transport import messages
from asyncsgd.runtime.transport.codec import Codec, ProtocolError
from asyncsgd.runtime.transport.messages import Compute, Computed, Evaluate, Evaluated, Lost, Ready, Stop
from asyncsgd.runtime.transport.process_group import ProcessGroupServer
from asyncsgd.runtime.transport.shared_memory import SharedMemoryServer
from asyncsgd.runtime.workers import Workers
from asyncsgd.server import Server
from asyncsgd.tasks.base import encode_sums

TIMEOUT = 60.0
every_transport = pytest.mark.parametrize("make", [SharedMemoryServer, ProcessGroupServer])


class Worker(threading.Thread):
    """Every gradient is -1, so with learning rate 1 every element of x is its version. `look` sees what was pulled."""

    def __init__(self, address, number, look=lambda command, pulled: None):
        super().__init__(daemon=True)
        self.address, self.number, self.look = address, number, look
        self.start()

    def run(self):
        end = self.address.connect(self.number)
        pulled = torch.zeros(self.address.size)
        gradient = torch.zeros(self.address.size) if end.slot is None else end.slot
        end.answer(Ready("layout"))
        while not isinstance(command := end.receive(), Stop):
            version = end.pull(pulled)
            if isinstance(command, Evaluate):
                end.answer(Evaluated(command.shard, encode_sums({"loss": 2.0, "weight": 4.0})))
            else:
                self.look(command, pulled)
                end.push(gradient.fill_(-1.0))
                end.answer(Computed(command.dispatch, version, Gradient(1.0, 4.0, 2), Taken()))


def heard_until(transport, enough):
    """The messages until there are enough of them."""
    heard, deadline = [], time.monotonic() + TIMEOUT
    while not enough(heard):
        assert time.monotonic() < deadline
        heard += [message for _, message in transport.wait(0.05)]
    return heard


@every_transport
def test_every_pull_is_the_version_that_is_told_and_never_a_torn_one(make):
    """And the server makes of all gradients what it would make of them in one process."""
    transport, size, seen, records = make(3, 400_000), 400_000, {}, []
    workers = [
        Worker(transport.address, number, lambda command, x: seen.update({command.dispatch: (x.min(), x.max())}))
        for number in range(3)
    ]
    x = transport.parameters
    budget, clock, optimizer = Budget(samples=600), TrainingClock(), Optimizer(x, size, SGD())
    server = Server(
        x,
        Asynchronous(),
        optimizer,
        lambda num_samples: 1.0,
        Batches(None, 2),
        num_workers=3,
        samples=600,
        writing=transport.writing,
    )
    processes = Workers(transport, Classes(), 3, clock)
    fit = Fit(server, processes, budget, 1, Sink(records.append))
    try:
        processes.meet("layout")
        result = fit.run()
        processes.close()
        assert (result.status, server.version) == ("DONE", 300)
        assert torch.equal(x, torch.full((size,), 300.0))
        for worker in workers:
            worker.join(TIMEOUT)
    finally:
        transport.close()
    events = [record for record in records if isinstance(record, Event)]
    assert len(events) == 300
    assert all(seen[event.dispatch] == (event.read_version,) * 2 for event in events)
    assert all(event.version - 1 - event.read_version == event.arrival_delay for event in events)


@every_transport
def test_commands_come_in_order_and_of_many_gradients_a_slow_worker_computes_only_the_last(make):
    transport, goes_on, obeyed = make(1, 100), threading.Event(), []

    def stand_still(command, pulled):
        obeyed.append(command.dispatch)
        goes_on.wait(TIMEOUT)

    worker = Worker(transport.address, 0, stand_still)
    assert heard_until(transport, bool) == [Ready("layout")]
    transport.send(0, Compute(0, ((0, 0, 1),)))
    heard_until(transport, lambda heard: obeyed == [0])
    for dispatch in range(1, 1001):
        transport.send(0, Compute(dispatch, ((0, dispatch, dispatch + 1),)))
        if dispatch == 500:
            transport.send(0, Evaluate(0, 1))
    goes_on.set()
    heard = heard_until(transport, lambda heard: any(getattr(each, "dispatch", None) == 1000 for each in heard))
    assert sum(isinstance(message, Evaluated) for message in heard) == 1
    assert obeyed == sorted(obeyed)
    # Shared memory: what the socket holds is with the worker already, and it takes the last of that.
    assert len(obeyed) <= {SharedMemoryServer: 3, ProcessGroupServer: 2}[make]
    assert torch.equal(transport.gradient(0), torch.full((100,), -1.0))
    transport.send(0, Stop())
    worker.join(TIMEOUT)
    transport.close()


def test_a_worker_that_pulls_when_the_server_is_killed_at_writing_learns_that_it_is_gone():
    """The sequence word of a server killed at writing stays odd; only its closed socket tells."""
    transport, outcome = SharedMemoryServer(1, 100), []

    def pull():
        end = transport.address.connect(0)
        end.answer(Ready("layout"))
        with pytest.raises(EOFError) as gone:
            end.pull(torch.zeros(100))
        outcome.append(str(gone.value))

    worker = threading.Thread(target=pull, daemon=True)
    with transport.writing(0):
        worker.start()
        heard_until(transport, bool)  # its `Ready`: the connection alone is no message
        worker.join(0.2)
        assert worker.is_alive()  # while the server writes, a pull waits
        transport.close()  # as the end of its process does
        worker.join(TIMEOUT)
        assert outcome == ["the server is gone"]


def test_a_message_comes_back_bit_for_bit_and_anything_else_is_a_protocol_error():
    to_server = Codec(*messages.MESSAGE_KINDS)
    computed = Computed(3, 2, Gradient(float("nan"), 0.1 + 0.2, 4, loss_scales=(2.0,)), Taken(0.0, 0.25, 0.0, 1e-9))
    command = Compute(2**62, ((0, 1, 2), (1, 2, 3)), 0.1, None)
    assert repr(to_server.decode(to_server.encode(computed))) == repr(computed)
    assert messages.COMMANDS.decode(messages.COMMANDS.encode(command)) == command
    for payload in (to_server.encode(computed), pickle.dumps(command), b"[]", b'["Stop",1]', b'["Compute"]', b"7", b""):
        with pytest.raises(ProtocolError):
            messages.COMMANDS.decode(payload)


@every_transport
def test_a_worker_that_sends_a_pickle_is_lost_and_nothing_is_executed_nor_any_port_open_to_other_hosts(make, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    transport = make(1, 4)
    end = transport.address.connect(0)
    send = end._link.send if make is ProcessGroupServer else end._connection.send_bytes
    send(pickle.dumps(Bomb()))
    heard, ports = heard_until(transport, bool), listening()
    transport.close()
    assert isinstance(heard[0], Lost)
    assert not (tmp_path / "executed").exists()
    assert set(ports) <= {"0100007F"}  # 127.0.0.1
    assert ports or make is SharedMemoryServer


def test_batches_come_back_lowest_first_and_before_new_ones():
    batches = Batches(samples=100, batch_size=10)
    assert [batches.take(0, 1)[0] for _ in range(4)] == [((0, index, index + 1),) for index in range(4)]
    for index in (3, 1):
        batches.give_back(((0, index, index + 1),))
    assert [batches.take(0, 1)[0] for _ in range(3)] == [((0, index, index + 1),) for index in (1, 3, 4)]


def listening():
    """The addresses on which this process listens."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
