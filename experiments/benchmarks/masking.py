"""What it costs to find the words to mask: in every batch, once before training, or not at all.

    python experiments/benchmarks/masking.py --finder runs/TAGGER

A training step is a batch, a forward and a backward pass, and fused AdamW. Sequences are texts of ``--data`` cut to 128
tokens; a fifth of the tokens are candidates, so the lookup has work to do. The rows:

    uniform             --mask token
    looked up           --mask candidates, found before
    finder per batch    uniform, and the finder on the batch's texts: a BERT-base with random weights, and --finder

Steps of all rows take turns, since machines drift. Ratios are taken turn by turn. Then one process and two processes
find candidates, in turns too, after all of them have loaded their models. The last line says after how many epochs
finding once has paid. A target stands beside each number that has one."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncsgd.backends.pool import mapping
from asyncsgd.core.signals import StopRequest
from asyncsgd.data.masks import STRATEGIES
from asyncsgd.data.order import whole_epochs
from asyncsgd.data.random import Purpose, generator
from asyncsgd.data.tokens import Samples, plain_backend
from asyncsgd.domain_masking.candidates import Chunk, begin, found_in, make_chunk
from asyncsgd.domain_masking.finders import Find, Ner
from asyncsgd.records.machine import available_cores
from asyncsgd.run.run import cache_folder
from asyncsgd.scripts.base import run_script
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.text_batches import Batch

CANDIDATE_SHARE = 0.2
SEQ_LEN = 128
BATCH_ROUNDS = 100
FIND_TEXTS = 64
TARGETS = {"tiny": 8.0, "small": 3.5}
LOOKUP_TARGET = 1.03
PROCESSES_TARGET = 1.8

Step = Callable[[int], Any]


class Training:
    """A model that is trained, one step after another, on batches of full length.

    Args:
        name: tiny or small.
    """

    def __init__(self, name: str, data: str, batch_size: int, cache: Path) -> None:
        from transformers import AutoTokenizer

        self.task = MaskedLM(model_name=name, data_name=data, seq_len=SEQ_LEN, batch_size=batch_size).prepare(0, cache)
        self.tokenizer = AutoTokenizer.from_pretrained(self.task.known["tokenizer"])
        rows = self.task.samples("train")
        full = rows.select(rows.lengths == rows.lengths.max())
        candidates = np.random.default_rng(0).random(len(full.values["ids"])) < CANDIDATE_SHARE
        self.rows = Samples(
            {**full.values, "candidates": candidates}, {**full.starts, "candidates": full.starts["ids"]}
        )
        self._order = whole_epochs(self.rows.lengths, batch_size, 0, 0)
        self._model = self.task.model(0)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def batch(self, mask: str, index: int) -> Batch:
        """A batch of full rows, with these masks."""
        first = index * self.task.batch_size
        return self.task.masked(
            self.rows,
            self._order(index),
            lambda row: generator(0, Purpose.MASK, 0, first + row),
            self.task.masking(STRATEGIES[mask](), 0.15),
        )

    def texts(self, index: int) -> list[str]:
        """Of the samples of a batch."""
        rows = self.rows.rows("ids", self._order(index))
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]

    def step(self, mask: str, index: int) -> None:
        batch = self.batch(mask, index)
        self._optimizer.zero_grad()
        self.task.loss(self.task.outputs(self._model, batch), batch).backward()
        self._optimizer.step()


def rows_of(training: Training, base: Find, finder: Find | None) -> dict[str, Step]:
    """What is measured, by name. Texts are made before the clock starts."""
    backend = plain_backend(training.tokenizer)
    texts = functools.cache(training.texts)

    def per_batch(find: Find, index: int) -> None:
        found_in(texts(index), find, backend)
        training.step("token", index)

    rows: dict[str, Step] = {
        "uniform": functools.partial(training.step, "token"),
        "looked up": functools.partial(training.step, "candidates"),
        "BERT-base per batch": functools.partial(per_batch, base),
    }
    if finder is not None:
        rows["--finder per batch"] = functools.partial(per_batch, finder)
    return rows


def measure(rows: dict[str, Step], texts: Callable[[int], Any], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, by row; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    for index in range(rounds + 1):
        texts(index)
        for name, step in rows.items():
            began = time.perf_counter()
            step(index)
            if index:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(above: Sequence[float], below: Sequence[float]) -> str:
    """The median of the ratios, and their range."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return f"{statistics.median(ratios):.3f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def save_base(tokenizer: Any, folder: Path) -> Path:
    """A tagger of BERT-base's size with random weights."""
    from transformers import BertConfig, BertForTokenClassification

    config = BertConfig(vocab_size=30_522, id2label={0: "O", 1: "B-X", 2: "I-X"}, label2id={"O": 0, "B-X": 1, "I-X": 2})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertForTokenClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def seconds_to_find(
    find: Find, tokenizer: Any, texts: list[str], chunk: int, rounds: int, folder: Path
) -> dict[int, list[float]]:
    """Seconds to find in all texts with one and with two processes, in turns, after all have loaded their models."""

    def chunks(of: list[str], name: str) -> list[Chunk]:
        parts = [of[first : first + chunk] for first in range(0, len(of), chunk)]
        return [(folder / f"{name}-{number}.parquet", part) for number, part in enumerate(parts)]

    seconds: dict[int, list[float]] = {1: [], 2: []}
    with ExitStack() as closing:
        pools = {}
        for processes in seconds:
            start = functools.partial(begin, find, plain_backend(tokenizer).to_str(), ["cpu"] * processes)
            mapped = closing.enter_context(mapping(processes, start, ["transformers.models.auto.modeling_auto"]))
            list(mapped(make_chunk, chunks(texts[: 2 * processes * chunk], "warm")))  # each has to take a part of it
            pools[processes] = mapped
        for _ in range(rounds):
            for processes, mapped in pools.items():
                began = time.perf_counter()
                list(mapped(make_chunk, chunks(texts, "chunk")))
                seconds[processes].append(time.perf_counter() - began)
    return seconds


def main(argv: list[str], stop: StopRequest) -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--data", default="pydocs", metavar="TEXT", help="as in stilt_mlm.py (default: pydocs)")
    flags.add_argument("--finder", metavar="FOLDER", help="a trained tagger to measure too")
    flags.add_argument("--models", default="tiny,small", metavar="NAMES", help="what is trained (default: tiny,small)")
    flags.add_argument("--rounds", type=int, default=5, metavar="N", help="steps of each row (default: 5)")
    flags.add_argument("--batch-size", type=int, default=8, metavar="N", help="(default: 8)")
    given = flags.parse_args(argv)
    cache = cache_folder(None)
    cores = available_cores()
    torch.set_num_threads(cores)
    print(f"{cores} cores and threads, batches of {given.batch_size} x {SEQ_LEN}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        base: Find | None = None
        finder = None if given.finder is None else Ner(given.finder).prepare([], cache)
        for name in given.models.split(","):
            training = Training(name, given.data, given.batch_size, cache)
            if base is None:
                base = Ner(str(save_base(training.tokenizer, Path(temporary) / "base"))).prepare([], cache)
            seconds = measure(rows_of(training, base, finder), training.texts, given.rounds)
            print(f"\n{name}: milliseconds of a step, median of {given.rounds}; ratio to the lookup")
            targets = {
                "looked up": f"   target {LOOKUP_TARGET} of uniform",
                "BERT-base per batch": f"   target {TARGETS[name]}",
            }
            for row, of in seconds.items():
                beside = ratio(of, seconds["uniform" if row == "looked up" else "looked up"])
                line = f"  {row:22} {1000 * statistics.median(of):8.1f}   {beside:24}{targets.get(row, '')}"
                print(line.rstrip())
            masks = {"uniform": "token", "looked up": "candidates"}
            steps: dict[str, Step] = {row: functools.partial(training.batch, mask) for row, mask in masks.items()}
            batches = measure(steps, training.texts, BATCH_ROUNDS)
            uniform, looked_up = (1000 * statistics.median(of) for of in batches.values())
            beside = ratio(batches["looked up"], batches["uniform"])
            print(
                f"  making a batch alone: uniform {uniform:.2f}, looked up {looked_up:.2f}; ratio {beside}", flush=True
            )
        texts = [text for index in range(-(-FIND_TEXTS // given.batch_size)) for text in training.texts(index)]
        print(f"\nfinding once: milliseconds a text, median of {given.rounds}")
        once = {}
        for what, find, number in (("BERT-base", base, 1), ("--finder", finder, 20)):
            if find is None:
                continue
            many = (texts * number)[: FIND_TEXTS * number]
            taken = seconds_to_find(find, training.tokenizer, many, len(many) // 8, given.rounds, Path(temporary))
            one, two = once[what] = [statistics.median(of) / len(many) for of in taken.values()]
            times = f"1 process {1000 * one:8.1f}   2 processes {1000 * two:8.1f}   {ratio(taken[1], taken[2])}"
            print(f"  {what:22} {times} times as fast   target {PROCESSES_TARGET}")
        row = "BERT-base per batch"
        saved = [(a - b) / given.batch_size for a, b in zip(seconds[row], seconds["looked up"], strict=True)]
        one, two = (of / statistics.median(saved) for of in once["BERT-base"])
        print(f"  break-even with BERT-base, {name}: after {one:.2f} epochs with 1 process, {two:.2f} with 2")
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
