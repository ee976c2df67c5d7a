"""However often and whenever a user asks a run to stop, its folder says how it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import asyncsgd
from asyncsgd.records.events import Event, Record
from asyncsgd.signals import StopRequest

PARTS = ("training.py", "checkpoints.py", "run_folder.py", "console.py")
"""What a run passes through when it ends."""


@dataclasses.dataclass(frozen=True)
class Line(asyncsgd.Task):
    batch_size: int = 4

    name = "line"

    def model(self, seed: int) -> nn.Module:
        with asyncsgd.seeded(seed):
            return nn.Linear(2, 1)

    def data(self, seed: int) -> asyncsgd.TensorData:
        points = torch.arange(80.0).reshape(40, 2) / 80
        return asyncsgd.TensorData((points, points.sum(1, keepdim=True)), (points[:8], points[:8, :1]), 4, seed)

    def outputs(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0])

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (outputs - batch[1]).square().mean()


@pytest.fixture
def nobody_listens() -> Iterator[None]:
    """As in a process of its own: what comes after a run does not reach pytest."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stopped(folder: Path, at: Callable[[FrameType], object]) -> None:
    """Train, ask the run to stop at its second arrival, and from then on call `at` before each line of `PARTS`."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename.endswith(PARTS):
            if event == "line":
                at(frame)
            return trace
        return None

    def report(record: Record) -> None:
        if isinstance(record, Event) and record.version == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                frame.f_trace = trace
                frame = frame.f_back
            sys.settrace(trace)

    try:
        asyncsgd.train(Line(), samples=80, evaluations=2, folder=folder, checkpoint_every=8, report=report, quiet=True)
    finally:
        sys.settrace(None)


def test_three_more_signals_at_any_line_leave_a_summary(tmp_path: Path, nobody_listens: None) -> None:
    lines: list[int] = []
    stopped(tmp_path / "counted", lambda frame: lines.append(frame.f_lineno))
    for number in range(3, len(lines), len(lines) // 12):
        passed = 0

        def interrupt(frame: FrameType, number: int = number) -> None:
            nonlocal passed
            passed += 1
            if number <= passed < number + 3:
                os.kill(os.getpid(), signal.SIGINT)

        stopped(tmp_path / str(number), interrupt)
        summary = json.loads((tmp_path / str(number) / "summary.json").read_text())
        assert summary["status"] == "INTERRUPTED", number
        assert summary["num_updates"] >= 2


def test_after_it_ends_in_order_a_signal_raises_within_leaving_alone_and_once() -> None:
    with StopRequest() as stop:
        stop.ends_in_order()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        raised = 0
        with stop.leaving():
            for _ in range(3):
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                except KeyboardInterrupt:
                    raised += 1
        assert raised == 1
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("saves", [False, True])
def test_a_campaign_stops_after_the_run_in_which_it_was_asked(saves: bool) -> None:
    """Also where that run has trained already, and ends as if nobody had asked."""
    ended = []

    def campaign(stop: StopRequest) -> None:
        for number in range(2):
            with stop.during_a_run():
                with StopRequest() as of_run:
                    of_run.ends_in_order()
                    if not saves:
                        os.kill(os.getpid(), signal.SIGTERM)
                    assert of_run() != saves
                if saves:
                    os.kill(os.getpid(), signal.SIGTERM)
                ended.append(number)

    with StopRequest() as stop, pytest.raises(KeyboardInterrupt), stop.at_once():
        campaign(stop)
    assert ended == [0]


def test_a_hangup_asks_to_stop_and_one_that_is_passed_on_is_the_same_request() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_that_the_closed_terminal_cannot_be_told_of_is_heard() -> None:
    program = (
        "import os, signal\nfrom asyncsgd.signals import StopRequest\nos.close(2)\n"
        "with StopRequest() as stop:\n    os.kill(os.getpid(), signal.SIGHUP)\n    print(stop())"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True\n"


LAUNCHER = """
import os, subprocess, sys
ready, stderr = os.pipe()
for rank in "01":
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "none"}
    subprocess.Popen([sys.executable, "-c", sys.argv[1], rank], env=environment, stderr=stderr)
    os.read(ready, 1)
"""
RANK = """
import os, signal, sys, time
from asyncsgd.runtime import ranks
from asyncsgd.signals import StopRequest
ranks._LOOK_SECONDS, ranks._STOP_SECONDS = 0.05, 0.2
rank = sys.argv[1]
with StopRequest() as stop:
    ranks.end_with_launcher(leads=rank == "0")
    os.write(2, b"1")
    for _ in range(100):
        if stop():
            print("rank 0 stops in good order", flush=True)
            break
        time.sleep(0.1)
    else:
        print(f"rank {rank} goes on for ever", flush=True)
"""


@pytest.mark.processes
def test_ranks_notice_that_their_launcher_is_gone() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", LAUNCHER, RANK], capture_output=True, text=True, timeout=60)
    assert done.stdout == "rank 0 stops in good order\n"
    assert time.monotonic() - began < 8
