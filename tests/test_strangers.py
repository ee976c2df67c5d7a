"""Whatever strangers send to a socket of this library is not executed, and the run goes on or says why not."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from running import A_TASK
from runtime.test_parameter_server import ThreadWorker
from test_faults import DEADLINE, SCRIPT, Command, num_evaluations, summary_of, until

from asyncsgd.errors import RunError
from asyncsgd.optimizers import SGD, Optimizer
from asyncsgd.records.events import DONE, Gradient, Record, Taken
from asyncsgd.rules import Asynchronous
from asyncsgd.runtime.base import Budget, Result
from asyncsgd.runtime.parameter_server import ParameterServer
from asyncsgd.runtime.private_folder import check_private, new_folder, private_folder
from asyncsgd.runtime.transport.codec import Codec, ProtocolError, decode_found, encode_found
from asyncsgd.runtime.transport.messages import COMMANDS, MESSAGE_KINDS, Compute, Computed
from asyncsgd.runtime.transport.process_group import ProcessGroupServer
from asyncsgd.runtime.transport.shared_memory import SharedMemoryServer
from asyncsgd.server import Server
from asyncsgd.tasks.base import decode_sums
from asyncsgd.tasks.masked_lm import MaskedLM

MESSAGES = Codec(*MESSAGE_KINDS)
COMPUTED = Computed(3, 2, Gradient(float("nan"), 5.0, 4, loss_scales=(2.0,)), Taken(0.0, 0.25, 0.0, 1e-9))
LOOPBACK = "0100007F"
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="finds sockets in /proc")


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    for codec in (COMMANDS, MESSAGES):
        with contextlib.suppress(ProtocolError):
            assert codec.decode(codec.encode(codec.decode(payload))) is not None


FOUND = json.loads(encode_found(MaskedLM(tokens="tokens", prefix=(2,), num_train_samples=7)))


@given(
    st.binary(max_size=100)
    | st.builds(lambda name, value: {**FOUND, name: value}, st.sampled_from(sorted(FOUND)), json_values).map(
        lambda value: json.dumps(value).encode()
    )
)
def test_what_a_task_has_found_out_comes_with_its_own_types_and_changes_no_setting(payload: bytes) -> None:
    mine = MaskedLM(batch_size=3, data_name="posts.txt")
    with contextlib.suppress(ProtocolError):
        task = decode_found(mine, payload)
        assert encode_found(task) == json.dumps(json.loads(payload), separators=(",", ":")).encode()
        assert (task.batch_size, task.data_name) == (3, "posts.txt")


PLACES: list[tuple[str, int | None]] = [(name, None) for name in vars(COMPUTED)]
PLACES += [("gradient", number) for number in range(5)] + [("taken", number) for number in range(5)]
"""Of its values: a field, or an entry of one that is a named tuple."""


@given(st.sampled_from(PLACES), json_values)
def test_a_value_of_another_type_is_a_protocol_error(place: tuple[str, int | None], value: object) -> None:
    field, number = place
    was = vars(COMPUTED)[field]
    changed: object = value
    if number is not None:
        changed, was = [value if n == number else each for n, each in enumerate(was)], was[number]
    kind = type(was)
    if type(value) is kind or (kind is float and type(value) is int):
        return
    numbers = isinstance(value, list) and all(type(item) in (int, float) for item in value)
    if number is not None and kind is tuple and numbers:
        return  # loss scales, or parts
    with pytest.raises(ProtocolError, match=f"field {field} of Computed"):
        MESSAGES.decode(json.dumps({"kind": "Computed", **vars(COMPUTED), field: changed}).encode())


array_values = st.builds(lambda value: {"array": value, "dtype": "int64"}, json_values)
sum_names = st.sampled_from(["loss", "weight", "confusion"])


@given(st.text(max_size=30) | st.dictionaries(sum_names, json_values | array_values).map(json.dumps))
def test_sums_are_sums_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert {"loss", "weight"} <= decode_sums(text).keys()


@given(
    st.builds(
        Compute,
        st.integers(0, 2**62),
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99)), max_size=300).map(tuple),
        st.none() | st.floats(allow_nan=False),
        st.none() | st.integers(0, 2**62),
    )
)
def test_a_command_comes_back_as_it_was(command: Compute) -> None:
    assert COMMANDS.decode(COMMANDS.encode(command)) == command


def test_floats_keep_their_bits_and_missing_or_further_fields_are_refused() -> None:
    assert str(MESSAGES.decode(MESSAGES.encode(COMPUTED))) == str(COMPUTED)
    values = {"kind": "Computed", **vars(COMPUTED)}
    for changed in ({**values, "more": 1}, {name: value for name, value in values.items() if name != "taken"}):
        with pytest.raises(ProtocolError, match="Computed has the fields"):
            MESSAGES.decode(json.dumps(changed).encode())
    with pytest.raises(ProtocolError, match="no message"):
        COMMANDS.decode(MESSAGES.encode(COMPUTED))


def listening_ports(*pids: int | str) -> dict[int, str]:
    """TCP port -> address, of all on which the processes listen."""
    inodes = set()
    for pid in pids:
        for descriptor in Path("/proc", str(pid), "fd").iterdir():
            with contextlib.suppress(OSError):
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
                inodes |= {found.group(1)} if found else set()
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                ports[int(port, 16)] = address
    return ports


def approach(transport: Any) -> Iterator[socket.socket]:
    """A connection to every socket that the transport has open now."""
    if isinstance(transport, SharedMemoryServer):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError):  # all workers are there: it is gone
            stranger = socket.socket(socket.AF_UNIX)
            stranger.connect(transport.address.socket_path)
            yield stranger
    else:
        for port, address in listening_ports("self").items():
            assert address == LOOPBACK
            with contextlib.suppress(ConnectionRefusedError):
                yield socket.create_connection(("127.0.0.1", port), 5)


def train(transport: Any, meet: Callable[[int], object]) -> tuple[Result, int]:
    """A run of two workers; `meet` is called before them and then at every record, with their number."""
    records: list[Record] = []

    def report(record: Record) -> None:
        records.append(record)
        meet(len(records))

    try:
        meet(0)
        for worker in range(2):
            ThreadWorker(transport.address, worker)
        server = Server(
            transport.parameters,
            Asynchronous(),
            Optimizer(transport.parameters, len(transport.parameters), SGD()),
            lambda num_samples: 1.0,
            transport.writing,
        )
        runtime = ParameterServer(
            server, transport, A_TASK, num_workers=2, batch_size=2, budget=Budget(samples=40), evaluations=2,
            layout="layout", report=report,
        )  # fmt: skip
        return runtime.run(), server.version
    finally:
        transport.close()


@needs_proc
@pytest.mark.parametrize("make", [SharedMemoryServer, ProcessGroupServer])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)
@given(
    visits=st.lists(
        st.tuples(st.integers(0, 24), st.binary(max_size=80) | st.binary(min_size=5000, max_size=5000), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_bytes_from_strangers_leave_a_run_untouched(
    make: Any, visits: list[tuple[int, bytes, bool]], tmp_path: Path
) -> None:
    """A visit: at which record, what is sent, and whether the stranger hangs up."""
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    transport = make(2, 100)
    staying: list[socket.socket] = []

    def meet(number: int) -> None:
        for at, payload, hangs_up in visits:
            for stranger in approach(transport) if at == number else ():
                for content in (payload, bomb, len(bomb).to_bytes(4, "big") + bomb):
                    with contextlib.suppress(OSError):
                        stranger.sendall(content)
                if hangs_up:
                    stranger.close()
                else:
                    staying.append(stranger)

    try:
        assert train(transport, meet) == (Result(DONE), 20)
    finally:
        for stranger in staying:
            stranger.close()
    assert not (tmp_path / "executed").exists()


def test_a_silent_stranger_keeps_nobody_waiting_and_the_token_alone_is_not_enough() -> None:
    transport = SharedMemoryServer(2, 100)
    token = bytes.fromhex(transport.address.token)
    strangers = []

    def meet(number: int) -> None:
        if number == 0:
            for hello in (b"", token, bytes(32) + bytes(4), token + (7).to_bytes(4, "big")):
                stranger = next(approach(transport))
                stranger.sendall(hello)
                strangers.append(stranger)

    assert train(transport, meet) == (Result(DONE), 20)
    for stranger in strangers:
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # hung up on
        stranger.close()


def test_a_worker_that_speaks_another_language_is_lost_and_the_message_says_so() -> None:
    transport = SharedMemoryServer(1, 100)

    def work() -> None:
        end = transport.address.connect(0)
        end._connection.send_bytes(pickle.dumps(print))
        with contextlib.suppress(EOFError):
            end.receive()

    threading.Thread(target=work, daemon=True).start()
    server = Server(transport.parameters, Asynchronous(), Optimizer(torch.zeros(100), 100, SGD()), lambda n: 1.0)
    runtime = ParameterServer(
        server, transport, A_TASK, num_workers=1, batch_size=1, budget=Budget(samples=2), evaluations=1,
        layout="layout", report=lambda record: None,
    )  # fmt: skip
    result = runtime.run()
    transport.close()
    assert result.status == "FAILED"
    assert result.message.startswith("no worker is left (worker 0: it sent what no worker sends: ")


@pytest.mark.slow
@needs_proc
@pytest.mark.processes
@pytest.mark.parametrize(
    ("launcher", "mode"),
    [
        ([], "sync"),
        ([], "async --transport process_group"),
        (["-m", "torch.distributed.run", "--nproc-per-node=2"], "sync"),
    ],
    ids=["python, sync", "python, process_group", "torchrun, sync"],
)
def test_bytes_sent_to_every_port_of_a_run_leave_it_untouched(launcher: list[str], mode: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"worker {line % 7} reads what server {line % 5} writes {line}\n" for line in range(300)))
    flags = f"--mode {mode} --data {text} --cache-dir {tmp_path / 'cache'} --seq-len 32 --batch-size 4".split()
    flags += f"--vocab-size 512 --eval-samples 8 --samples 800 --evaluations 20 --run-dir {tmp_path / 'run'}".split()
    flags += [] if launcher else ["--nproc", "2"]
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    command = Command([sys.executable, *launcher, str(SCRIPT), *flags], tmp_path)
    try:
        until(lambda: num_evaluations(tmp_path / "run") >= 1, "the first evaluation")
        ports = {}
        for pid in command.pids():
            ports |= listening_ports(pid)
        agent = listening_ports(command.process.pid) if launcher else {}
        assert {address for port, address in ports.items() if port not in agent} == {LOOPBACK}
        staying = []
        for port in ports:
            for payload in (
                b"GET / HTTP/1.0\r\n\r\n",
                bomb,
                b"\xff" * 5000,
                bytes(4096),
                len(bomb).to_bytes(8, "little") + bomb,
            ):
                with contextlib.suppress(OSError):
                    staying.append(socket.create_connection(("127.0.0.1", port), 5))
                    staying[-1].sendall(payload)
        assert command.process.wait(DEADLINE) == 0, command.err
        for stranger in staying:
            stranger.close()
    finally:
        command.end()
    assert summary_of(tmp_path / "run")["status"] == DONE
    assert not (tmp_path / "executed").exists()


def test_a_folder_that_others_can_enter_or_that_is_no_folder_of_a_run_is_refused(tmp_path: Path) -> None:
    folder = new_folder("ranks-")
    assert check_private(folder) == folder
    assert private_folder().stat().st_mode & 0o777 == 0o700
    private_folder().chmod(0o755)
    try:
        for other in (folder, tmp_path, tmp_path / "missing", Path("relative/asyncsgd-x/ranks-y")):
            with pytest.raises(RunError, match="no private folder of this user"):
                check_private(other)
    finally:
        private_folder().chmod(0o700)
        folder.rmdir()
