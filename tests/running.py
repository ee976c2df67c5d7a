"""Runs of the real code path on a small text, as ``experiments/stilt_mlm.py`` starts them, in the tests' process."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

from asyncsgd.records.events import read_events
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.scripts.run_folder import open_run_folder
from asyncsgd.settings.training import Settings, make_settings
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.training import lead

BATCH_SIZE = 4
A_TASK = MaskedLM(
    batch_size=BATCH_SIZE,
    prefix=(0,),
    suffix=(2,),
    pad_id=1,
    mask_id=4,
    vocabulary_size=97,
    special_ids=(0, 1, 2, 3, 4),
)
"""For servers whose workers are written by hand: what its evaluations are of, and no data."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run and what it left in its folder."""

    settings: Settings
    path: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.path / "summary.json").read_text())

    def records(self, *kinds: str) -> list[dict[str, Any]]:
        return [record for record in read_events(self.path / "events.jsonl") if record["kind"] in kinds]

    def model(self) -> nn.Module:
        return AutoModelForMaskedLM.from_pretrained(self.path / "model")

    def parameters(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model().parameters()])


Train = Callable[..., Trained]


def sentences(number: int, seed: int) -> str:
    draw = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 3))) for _ in range(300)]
    return "\n".join(" ".join(draw.choices(words, k=draw.randint(3, 25))) + "." for _ in range(number))


def trainer(root: Path) -> Train:
    """What runs with some settings below `root`; equal settings run once."""
    (root / "train.txt").write_text(sentences(400, seed=0))
    (root / "eval.txt").write_text(sentences(150, seed=1))
    # The evaluation set makes 7 batches, so that 2 and 3 workers have shards of different sizes.
    small = {
        "data": str(root / "train.txt"),
        "eval_data": str(root / "eval.txt"),
        "cache_dir": str(root / "cache"),
        "vocab_size": 512,
        "seq_len": 32,
        "batch_size": BATCH_SIZE,
        "samples": 80,
        "evaluations": 1,
        "warmup": 0,
        "clip_norm": 0,
        "device": "cpu",
        "threads": 1,
    }
    context = fork_server("tiny")
    runs: dict[Settings, Trained] = {}

    def run(**values: object) -> Trained:
        settings = make_settings(small | values)
        if settings not in runs:
            path = root / f"run{len(runs)}"
            placed = make_settings(small | values | {"run_dir": str(path)})
            launch, folder = Launch(settings.job.nproc, None, False), open_run_folder("tests", placed, "tests")
            code = lead(pretraining(placed), launch, folder, context)
            assert code == 0, (path / "summary.json").read_text()
            runs[settings] = Trained(settings, path)
        return runs[settings]

    return run
