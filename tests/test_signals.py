"""However often and whenever a user asks a run to stop, its folder says how it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import pytest
import torch
from torch import nn

import asyncsgd
from asyncsgd.records.events import Event
from asyncsgd.signals import StopRequest


@dataclasses.dataclass(frozen=True)
class Line(asyncsgd.Task):
    batch_size: int = 4

    name = "line"

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return nn.Linear(2, 1)

    def data(self, seed):
        points = torch.arange(80.0).reshape(40, 2) / 80
        return asyncsgd.TensorData((points, points.sum(1, keepdim=True)), (points[:8], points[:8, :1]), 4, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()


def stopped(folder, *numbers):
    """Train, and send these signals at the second arrival."""

    def report(record):
        if isinstance(record, Event) and record.version == 2:
            for number in numbers:
                os.kill(os.getpid(), number)

    return asyncsgd.train(
        Line(), samples=80, evaluations=2, folder=folder, checkpoint_every=8, report=report, quiet=True
    )


def test_the_first_signal_saves(tmp_path):
    run = stopped(tmp_path, signal.SIGTERM)
    assert run.status == json.loads((tmp_path / "summary.json").read_text())["status"] == "INTERRUPTED"
    assert (tmp_path / "model").is_dir()
    assert sorted((tmp_path / "checkpoints").glob("*.pt"))[-1].stem == "000000000008"


def test_the_second_signal_leaves_with_the_records_alone(tmp_path):
    run = stopped(tmp_path, signal.SIGINT, signal.SIGINT)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert run.status == summary["status"] == "INTERRUPTED"
    assert (summary["num_updates"], summary["parameters_sha256"]) == (2, None)
    assert not (tmp_path / "model").exists()


def test_outside_a_run_a_signal_raises_and_within_one_the_second_does_once():
    with StopRequest() as stop:
        with stop.during_a_run():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_hangup_asks_to_stop_and_one_that_is_passed_on_is_the_same_request():
    with StopRequest() as stop, stop.during_a_run():
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop()
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
    finally:
        signal.signal(signal.SIGHUP, before)
