"""Ways to spread one training over processes, compared on the same work: data parallel, pipelines, asynchronous.

    python experiments/parallelism.py --quick
    python -m analysis parallelism runs/parallelism-quick --out report.html

Every row of the table is an arm of a config; experiments/configs/parallelism.yaml has SQuAD 2.0. With --quick or
--bubbles the bubble of a pipeline is measured first, for several numbers of micro-batches. Runs are made one at a time,
since their seconds are compared. What is finished is skipped, so the same command goes on where it was stopped. See
docs/study.md."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import random
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import asyncsgd
from asyncsgd import runtimes
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, read_events
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.flags import Parser
from asyncsgd.signals import StopRequest
from asyncsgd.study.comparisons import make_all, planned
from asyncsgd.study.runner import Job
from asyncsgd.tasks.base import Batch, Task
from asyncsgd.tasks.tensors import TensorData

CONFIGS = Path(__file__).resolve().parent / "configs"
BUBBLES = "bubbles.json"

MICRO_BATCHES = (4, 8, 16, 32)
STEPS = 3
"""Updates that a bubble is measured over, after as many that nobody times."""
FORWARD_SECONDS, BACKWARD_SECONDS = 0.005, 0.01
"""Of a sleeping stage and micro-batch."""
WIDTH, LAYERS = 768, 3
"""Of the matrices that a computing stage multiplies, and how many in a block."""


class Sleep(torch.autograd.Function):
    """Takes a declared time in the forward and in the backward pass, and no core."""

    @staticmethod
    def forward(context: Any, hidden: Tensor) -> Tensor:
        time.sleep(FORWARD_SECONDS)
        return hidden.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        time.sleep(BACKWARD_SECONDS)
        return gradients[0]


class Block(nn.Module):
    """A stage's work: sleeping, or matrix products."""

    def __init__(self, sleeps: bool, width: int) -> None:
        super().__init__()
        self.sleeps = sleeps
        self.lines = nn.ModuleList(nn.Linear(width, width) for _ in range(1 if sleeps else LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        for line in self.lines:
            hidden = torch.tanh(line(hidden))
        return Sleep.apply(hidden) if self.sleeps else hidden


class Row(nn.Module):
    """As many equal blocks as there are stages, and next to nothing else."""

    def __init__(self, num_blocks: int, sleeps: bool, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(sleeps, width) for _ in range(num_blocks))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


@dataclasses.dataclass(frozen=True)
class EqualStages(Task):
    """A model whose stages all take as long."""

    name: ClassVar[str] = "equal_stages"
    better: ClassVar[Mapping[str, Any]] = {}
    batch_size: int = 64
    num_blocks: int = 2
    sleeps: bool = True

    @property
    def width(self) -> int:
        return 8 if self.sleeps else WIDTH

    def model(self, seed: int) -> nn.Module:
        with asyncsgd.seeded(seed):
            return Row(self.num_blocks, self.sleeps, self.width)

    def data(self, seed: int) -> TensorData:
        rows = torch.linspace(-1.0, 1.0, 4 * self.batch_size).unsqueeze(1).expand(-1, self.width).contiguous()
        return TensorData(rows, rows[:2], self.batch_size, seed)

    def outputs(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs - batch).square().mean()


def bubble(task: EqualStages, schedule: runtimes.settings.PipelineSchedule, micro_batches: int, folder: Path) -> float:
    """The share of a pipeline's time in which its stages wait: 1 - (mean of the seconds computed) / (seconds taken)."""
    asyncsgd.train(
        task,
        runtime=runtimes.Pipeline(task.num_blocks, task.num_blocks, schedule),
        micro_batches=micro_batches,
        samples=2 * STEPS * task.batch_size,
        evaluations=2,
        folder=folder,
        quiet=True,
    )
    *_, last = [record["stages"] for record in read_events(folder / EVENTS) if record["kind"] == "stages"]
    return 1.0 - sum(computed for _, _, computed, *_ in last) / len(last) / last[0][3]


def measure_bubbles(out: Path, micro_batches: tuple[int, ...], stop: StopRequest) -> None:
    """Measure the bubble of 2 and 4 stages beside (p - 1) / (m + p - 1); what was measured before is kept, and what is
    interrupted is not.
    """
    file = out / BUBBLES
    done = json.loads(file.read_text(encoding="utf-8"))["bubbles"] if file.is_file() else []
    for num_stages, sleeps in ((2, False), (2, True), (4, True)):
        if not sleeps and available_cores() < num_stages:
            continue
        for schedule in ("1f1b", "gpipe"):
            for m in micro_batches:
                said = {"stages": num_stages, "schedule": schedule, "micro_batches": m, "sleeps": sleeps}
                if any(said.items() <= before.items() for before in done):
                    continue
                task = EqualStages(batch_size=2 * m if sleeps else 64 * m, num_blocks=num_stages, sleeps=sleeps)
                folder = out / "bubbles" / f"{num_stages}-{schedule}-{m}-{'sleeps' if sleeps else 'computes'}"
                if folder.is_dir():
                    shutil.rmtree(folder)  # of a measurement that was interrupted
                with stop.during_a_run():
                    share = bubble(task, schedule, m, folder)
                stop.check()
                formula = (num_stages - 1) / (m + num_stages - 1)
                kind = "sleeping" if sleeps else "computing"
                print(
                    f"bubble {num_stages} {kind} stages, {schedule:5} {m:3} micro-batches: {share:.3f} measured, "
                    f"{formula:.3f} by the formula",
                    flush=True,
                )
                done.append(said | {"measured": share, "formula": formula})
                write_json(file, {"bubbles": done})


def write_planted(folder: Path) -> None:
    """Write questions whose answer is the word behind a marker, or that have none: a way that cannot learn them is
    broken.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [first + second for first in "bdfgkl" for second in "aeiou"]
    for side, number, seed in (("train", 2000, 5), ("dev", 300, 6)):
        draw, rows = random.Random(f"planted {seed}"), []
        for index in range(number):
            text = draw.choices(words, k=draw.randint(6, 12))
            answers: dict[str, list[Any]] = {"text": [], "answer_start": []}
            if draw.random() < 0.7:
                marked = draw.randrange(len(text) - 1)
                text[marked] = "key"
                answers = {"text": [text[marked + 1]], "answer_start": [len(" ".join(text[: marked + 1])) + 1]}
            row = {"id": f"{side}-{index}", "context": " ".join(text), "question": "what comes behind key"}
            rows.append(json.dumps(row | {"answers": answers}))
        write_text(folder / f"{side}.jsonl", "\n".join(rows) + "\n")


def lacks(job: Job) -> str:
    """Why a run cannot be made here."""
    if job.values.get("pipeline_schedule") == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed; type python -m pip install -c constraints.txt -e '.[deepspeed]'"
    return ""


def run(argv: list[str], stop: StopRequest) -> int:
    arguments = parser().parse_args(argv)
    if arguments.planted is not None:
        write_planted(arguments.planted)
        print("next   python experiments/parallelism.py experiments/configs/parallelism-planted.yaml")
        return 0
    if arguments.quick == (arguments.config is not None):
        raise UsageError("name a config, e.g. experiments/configs/parallelism.yaml, or type --quick")
    config = CONFIGS / "parallelism-quick.yaml" if arguments.quick else arguments.config
    out, jobs = planned(config, arguments.out)
    if arguments.quick or arguments.bubbles:
        measure_bubbles(out, MICRO_BATCHES, stop)
    make_all(out, jobs, stop, lacks)
    print(f"next   python -m analysis parallelism {out} --out report.html")
    return 0


def parser() -> argparse.ArgumentParser:
    flags = Parser(prog="parallelism.py", description=str(__doc__).splitlines()[0], allow_abbrev=False)
    flags.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG.yaml", help="experiments/configs/parallelism.yaml"
    )
    flags.add_argument("--quick", action="store_true", help="experiments/configs/parallelism-quick.yaml, minutes")
    flags.add_argument("--bubbles", action="store_true", help="measure the bubbles of pipelines too; --quick does")
    flags.add_argument("--planted", type=Path, metavar="DIR", help="write data with planted answers there, and end")
    flags.add_argument("--out", type=Path, metavar="DIR", help="folder of all runs (default: runs/NAME)")
    return flags


def main() -> int:
    return run_script(run, goes_on=True)


if __name__ == "__main__":
    sys.exit(main())
