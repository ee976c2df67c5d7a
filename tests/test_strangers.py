"""Messages are JSON of known tuples: nothing that arrives is unpickled, and no port is open to other hosts."""

import os
import pickle
from pathlib import Path

import pytest

from asyncsgd.records.events import Gradient, Taken
from asyncsgd.runtime.transport.codec import Codec, ProtocolError
from asyncsgd.runtime.transport.messages import COMMANDS, MESSAGE_KINDS, Compute, Computed, Lost
from asyncsgd.runtime.transport.process_group import ProcessGroupServer
from asyncsgd.runtime.transport.shared_memory import SharedMemoryServer


def test_a_message_comes_back_bit_for_bit_and_anything_else_is_a_protocol_error():
    messages = Codec(*MESSAGE_KINDS)
    computed = Computed(3, 2, Gradient(float("nan"), 0.1 + 0.2, 4, loss_scales=(2.0,)), Taken(0.0, 0.25, 0.0, 1e-9))
    command = Compute(2**62, ((0, 1, 2), (1, 2, 3)), 0.1, None)
    assert repr(messages.decode(messages.encode(computed))) == repr(computed)
    assert COMMANDS.decode(COMMANDS.encode(command)) == command
    for payload in (messages.encode(computed), pickle.dumps(command), b"[]", b'["Stop",1]', b'["Compute"]', b"7", b""):
        with pytest.raises(ProtocolError):
            COMMANDS.decode(payload)


@pytest.mark.parametrize("make", [SharedMemoryServer, ProcessGroupServer])
def test_a_worker_that_sends_a_pickle_is_lost_and_nothing_is_executed(make, tmp_path):
    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    transport = make(1, 4)
    end = transport.address.connect(0)
    send = end._link.send if make is ProcessGroupServer else end._connection.send_bytes
    send(pickle.dumps(Bomb()))
    heard = []
    while not heard:
        heard += transport.wait(60.0)
    ports = listening()
    transport.close()
    assert isinstance(heard[0][1], Lost)
    assert not (tmp_path / "executed").exists()
    assert set(ports) <= {"0100007F"}  # 127.0.0.1
    assert ports or make is SharedMemoryServer


def listening():
    """The addresses on which this process listens."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
