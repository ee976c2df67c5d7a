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
import math
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

from asyncsgd.backends.pool import process_pool
from asyncsgd.core.signals import StopRequest
from asyncsgd.data.mask_names import NAMED
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

        task = MaskedLM(model_name=name, data_name=data, seq_len=SEQ_LEN, batch_size=batch_size)
        self.task = task.prepare(0, cache)
        self.tokenizer = AutoTokenizer.from_pretrained(self.task.known["tokenizer"])
        rows = self.task.samples("train")
        full = rows.select(rows.lengths == rows.lengths.max())
        draws = np.random.default_rng(0).random(len(full.values["ids"]))
        values = {**full.values, "candidates": draws < CANDIDATE_SHARE}
        starts = {**full.starts, "candidates": full.starts["ids"]}
        self.rows = Samples(values, starts)
        self._order = whole_epochs(self.rows.lengths, batch_size, 0, 0)
        self._model = self.task.model(0)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)

    def batch(self, mask: str, index: int) -> Batch:
        """A batch of full rows, with these masks."""
        first = index * self.task.batch_size
        masking = self.task.masking(NAMED[mask](), 0.15)

        def draw(row: int) -> np.random.Generator:
            return generator(0, Purpose.MASK, 0, first + row)

        return self.task.masked(self.rows, self._order(index), draw, masking)

    def texts(self, index: int) -> list[str]:
        """The texts of a batch."""
        rows = self.rows.rows("ids", self._order(index))
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows]

    def step(self, mask: str, index: int) -> None:
        batch = self.batch(mask, index)
        self._optimizer.zero_grad()
        outputs = self.task.outputs(self._model, batch)
        self.task.loss(outputs, batch).backward()
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
    ratios = np.divide(above, below).tolist()
    return f"{statistics.median(ratios):.3f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def save_base(tokenizer: Any, folder: Path) -> Path:
    """A tagger of BERT-base's size with random weights."""
    from transformers import BertConfig, BertForTokenClassification

    labels = {0: "O", 1: "B-X", 2: "I-X"}
    numbers = {"O": 0, "B-X": 1, "I-X": 2}
    config = BertConfig(vocab_size=30_522, id2label=labels, label2id=numbers)
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
            mapped = closing.enter_context(process_pool(processes, start, ["transformers.models.auto.modeling_auto"]))
            warm = texts[: 2 * processes * chunk]  # enough that every process takes a part
            list(mapped(make_chunk, chunks(warm, "warm")))
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
                folder = save_base(training.tokenizer, Path(temporary) / "base")
                base = Ner(str(folder)).prepare([], cache)
            seconds = measure(rows_of(training, base, finder), training.texts, given.rounds)
            print_steps(name, seconds)
            print_batches(training)
        texts = []
        for index in range(math.ceil(FIND_TEXTS / given.batch_size)):
            texts += training.texts(index)
        texts = texts[:FIND_TEXTS]
        print(f"\nfinding once: milliseconds a text, median of {given.rounds}")

        def find_once(name: str, find: Find, texts: list[str]) -> tuple[float, float]:
            taken = seconds_to_find(find, training.tokenizer, texts, len(texts) // 8, given.rounds, Path(temporary))
            one = statistics.median(taken[1]) / len(texts)
            two = statistics.median(taken[2]) / len(texts)
            times = f"1 process {1000 * one:8.1f}   2 processes {1000 * two:8.1f}   {ratio(taken[1], taken[2])}"
            print(f"  {name:22} {times} times as fast   target {PROCESSES_TARGET}")
            return one, two

        assert base is not None  # --models names one at least
        one, two = find_once("BERT-base", base, texts)
        if finder is not None:
            find_once("--finder", finder, texts * 20)
        differences = np.subtract(seconds["BERT-base per batch"], seconds["looked up"])
        saved = float(np.median(differences)) / given.batch_size
        print(
            f"  break-even with BERT-base, {name}: "
            f"after {one / saved:.2f} epochs with 1 process, {two / saved:.2f} with 2"
        )
    return 0


def print_steps(name: str, seconds: dict[str, list[float]]) -> None:
    """A line for each row, beside the row that it is compared with."""
    targets = {
        "looked up": f"   target {LOOKUP_TARGET} of uniform",
        "BERT-base per batch": f"   target {TARGETS[name]}",
    }
    rounds = len(seconds["uniform"])
    print(f"\n{name}: milliseconds of a step, median of {rounds}; ratio to the lookup")
    for row, row_seconds in seconds.items():
        reference = "uniform" if row == "looked up" else "looked up"
        beside = ratio(row_seconds, seconds[reference])
        milliseconds = 1000 * statistics.median(row_seconds)
        line = f"  {row:22} {milliseconds:8.1f}   {beside:24}{targets.get(row, '')}"
        print(line.rstrip())


def print_batches(training: Training) -> None:
    """How long a batch takes to make, with words that are looked up and without."""
    rows: dict[str, Step] = {
        "uniform": functools.partial(training.batch, "token"),
        "looked up": functools.partial(training.batch, "candidates"),
    }
    seconds = measure(rows, training.texts, BATCH_ROUNDS)
    uniform = 1000 * statistics.median(seconds["uniform"])
    looked_up = 1000 * statistics.median(seconds["looked up"])
    beside = ratio(seconds["looked up"], seconds["uniform"])
    print(f"  making a batch alone: uniform {uniform:.2f}, looked up {looked_up:.2f}; ratio {beside}", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(main))
