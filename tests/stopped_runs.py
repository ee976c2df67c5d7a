"""Runs of a small task that stop when they are told to, and what lies in their folders."""

import dataclasses
import hashlib
import json
import os
import signal

import torch
from doors import Finished, Task, TensorData, asyncsgd, seeded
from torch import nn

SAMPLES = 240
BATCH = 4


@dataclasses.dataclass(frozen=True)
class Noisy(Task):
    """A small net with dropout on two noisy classes."""

    name = "noisy"
    batch_size: int = BATCH

    def model(self, seed):
        with seeded(seed):
            return nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2))

    def data(self, seed):
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(96, 3, generator=draw)
        y = (x.sum(1) + torch.randn(96, generator=draw) > 0).long()
        return TensorData((x, y), (x, y), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def train(folder, stop_at=None, also=lambda record: None, task=Noisy(), **arguments):
    """A run, asked to stop as soon as it has reported `stop_at` samples; `also` gets each record."""
    asked = []

    def stop(record):
        also(record)
        if stop_at is not None and not asked and getattr(record, "total_samples", 0) >= stop_at:
            asked.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    chosen = {"samples": SAMPLES, "evaluations": 5, "learning_rate": 0.02, "device": "cpu", "quiet": True}
    return asyncsgd.train(task, folder=folder, report=stop, **(chosen | arguments))


def log(folder, *kinds):
    return Finished(folder).records(*kinds)


def summary(folder):
    return Finished(folder).summary


def sha256(folder):
    return summary(folder)["parameters_sha256"]


def checkpointed(folder):
    return [int(path.stem) for path in sorted((folder / "checkpoints").glob("*.pt"))]


def files_in(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def sealed(description):
    """A description with the hash of its text, as a stranger can write one."""
    text = json.dumps(description, indent=2)
    seal = hashlib.sha256(text.encode()).hexdigest()
    return text.removesuffix("\n}") + f',\n  "description_sha256": "{seal}"\n}}\n'
