"""What the speed ladder measures: a task with its data, trained by a loop of its own or by this library."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from torch import nn
from torch.nn import functional

import asyncsgd
from asyncsgd import AdamW, AllReduce, InProcess, Processes
from asyncsgd.data.corpora import LABELLED, Corpus, limited, load_corpus, select
from asyncsgd.data.tables import Documents
from asyncsgd.errors import RunError
from asyncsgd.evaluation import evaluate_sets, measured
from asyncsgd.measure import flops_per_sample, forget_peaks, peak_bytes
from asyncsgd.records.events import Event, Record
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_text
from asyncsgd.signals import StopRequest
from asyncsgd.simulation.simulate import arrival_seconds
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.text_task import Batch

BATCH_SIZE, SEQ_LEN, DROPOUT, WEIGHT_DECAY = 16, 256, 0.1, 0.01
"""Of the naive loop; weight decay is what torch's AdamW has by default."""
LEARNING_RATE = {"classification": 5e-4, "masked_lm": 1e-3}
"""That of a classification is the default of the task: at 1e-3 some seeds learn one class alone."""
SCORE = {"classification": "macro_f1", "masked_lm": "loss"}
VOCABULARY = 4096
"""Of the tokenizer for masked words, trained on the chosen texts."""
IN_PROCESS = ("single", "data_parallel")
EXPECTED_WORKERS, RULES = (1, 2, 4, 8), ("synchronous", "asynchronous")
GRADIENTS = 1000
"""Of each worker on the virtual clock."""
TEXT = "text"
"""The column of the texts."""
Loop = Callable[..., None]
"""As `naive_loop` of the script."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """How this library trains. The defaults are the first rung: batches padded to their longest text."""

    batch_size: int = BATCH_SIZE
    """Samples of all workers in one step of synchronous ones, otherwise samples in one gradient."""
    sampling: Literal["group_by_length", "random"] = "random"
    fused: bool = False
    masked_positions: bool = False
    """Whether the vocabulary is decoded at the masked positions only."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    micro_batches: int = 1
    gradient_checkpointing: bool = False
    prefetch: int = 0
    compile: bool = False
    workers: Literal["single", "data_parallel", "sync", "async", "one"] = "single"
    """``data_parallel`` is one process on all GPUs, ``one`` an asynchronous worker alone."""

    def learning_rate(self, base: float) -> float:
        """The square root of the batch, which keeps the noise of AdamW's steps (Malladi et al., NeurIPS 2022)."""
        return base * (self.batch_size / BATCH_SIZE) ** 0.5


def default_adamw(groups: Iterable[dict[str, Any]]) -> torch.optim.Optimizer:
    """torch's AdamW as it is without `fused`."""
    return torch.optim.AdamW(groups)


@dataclasses.dataclass(frozen=True)
class DecodedEverywhere(MaskedLM):
    """`MaskedLM` as it is usually trained: logits at all positions, of which the loss ignores most."""

    name = "masked_lm_decoded_everywhere"

    def outputs(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        if not model.training:
            return super().outputs(model, batch)
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.flatten(0, 1)

    def loss(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        if len(outputs) == batch["labels"].numel():
            return functional.cross_entropy(outputs, batch["labels"].flatten())
        return super().loss(outputs, batch)


class Meter:
    """Watches a training from the end of its warm-up: samples a second, busy cores, busy GPU."""

    def __init__(self, warmup: int, samples: int, device: str) -> None:
        self._warmup, self.samples, self._device = warmup, warmup + samples, device
        self.turnarounds: list[float] = []
        """Seconds of each gradient, until its worker could start again."""
        self._begin: tuple[int, float, float] | None = None
        self._end: tuple[int, float, float] | None = None
        self._gpu: list[float] = []

    def __call__(self, record: Record) -> None:
        if isinstance(record, Event):
            self.turnarounds.append(record.flight_seconds + record.apply_seconds)
            self.arrived(record.total_samples, record.train_seconds)

    def arrived(self, samples: int, seconds: float) -> None:
        """So many samples have been trained on after so many seconds."""
        if self._begin is None and samples >= self._warmup:
            self._begin = samples, seconds, cpu_seconds()
        elif samples >= self.samples and self._end is None:
            self._end = samples, seconds, cpu_seconds()
        elif self._device == "cuda" and self._begin is not None:
            with contextlib.suppress(Exception):  # nvidia-ml-py is not installed
                self._gpu.append(torch.cuda.utilization() / 100)

    def found(self, at_end: Any, score: float, memory: Sequence[int]) -> dict[str, Any]:
        """As a row of `analysis.ladder.TRAINING`."""
        assert self._begin is not None, "the training was shorter than its warm-up"
        assert self._end is not None, "the training was too short"
        (first, begin, cpu_before), (last, end, cpu_after) = self._begin, self._end
        return {
            "samples_per_second": (last - first) / (end - begin),
            "warmup_seconds": begin,
            "loss": at_end.loss,
            "score": score,
            "memory_bytes": memory[0],
            "gpu_bytes": memory[1],
            "busy_cores": (cpu_after - cpu_before) / (end - begin),
            "busy_gpu": sum(self._gpu) / len(self._gpu) if self._gpu else None,
        }


def speeds_of(turnarounds: Sequence[float]) -> str:
    """The speeds of a worker with these times: log-normal with their mean, and their noise.

    Batches that follow one another have texts of about one length. So the noise is taken from differences between
    neighbours: sigma^2 = mean((log t_k+1 - log t_k)^2) / 2 (von Neumann 1941).

    >>> speeds_of([1.0, 2.0, 1.0, 2.0])
    'log_normal:sigma=0.490,mean=1.5'
    """
    logs = [math.log(seconds) for seconds in turnarounds]
    steps = [(after - before) ** 2 for before, after in itertools.pairwise(logs)]
    sigma = max(1e-3, math.sqrt(statistics.fmean(steps) / 2))
    return f"log_normal:sigma={sigma:.3f},mean={statistics.fmean(turnarounds):.6g}"


def cpu_seconds() -> float:
    """Of this process and all that it has started, directly or not."""
    total = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class Subject:
    """A task with its data: what the naive loop and the library train, and how both are scored.

    Args:
        name: classification or masked_lm.
        data: as the task takes it.
        samples: how many texts of the data set are trained on, of those that the naive loop does not cut.
        eval_samples: how many the score is of.
        folder: where the chosen texts are kept.
        stop: of the ladder, which a stopped training ends.
    """

    def __init__(
        self,
        name: str,
        data: str,
        samples: int,
        eval_samples: int,
        folder: Path,
        cache: Path,
        device: str,
        stop: StopRequest,
    ) -> None:
        self.name, self.samples, self.device, self._cache, self._stop = name, samples, device, cache, stop
        self.score, self.learning_rate = SCORE[name], LEARNING_RATE[name]
        source: Corpus
        if name == "classification":
            source = _labelled(data, cache)
        else:
            source = load_corpus(data, {TEXT: "--text-column"}, cache_dir=cache)
        train, evaluation = (_short(side) for side in (source.train, source.eval))
        self.epoch = len(train.texts)
        _keep(folder / "train.jsonl", limited(train, samples))
        _keep(folder / "test.jsonl", limited(evaluation, eval_samples))
        task: Classification | MaskedLM
        self.labels: Sequence[int] | None = None
        if name == "classification":
            chosen = _labelled(str(folder), cache)
            self.texts, self.labels = (
                chosen.train.texts,
                [chosen.labels.index(label) for label in chosen.train.labels or ()],
            )
            task = Classification(data_name=str(folder), seq_len=SEQ_LEN, dropout=DROPOUT)
        else:
            files = str(folder / "train.jsonl"), str(folder / "test.jsonl")
            self.texts = load_corpus(files[0], {TEXT: ""}, eval_data=files[1], cache_dir=cache).train.texts
            task = MaskedLM(data_name=files[0], eval_data=files[1], vocab_size=VOCABULARY, eval_samples=0)
            task = dataclasses.replace(task, seq_len=SEQ_LEN, dropout=DROPOUT)
        self.task = task.prepare(0, cache)

    def naive(self, loop: Loop, meter: Meter, seed: int) -> dict[str, Any]:
        """Train with a loop that is not this library's; what was measured."""
        from transformers import AutoTokenizer

        device = torch.device(self.device)
        tokenizer = AutoTokenizer.from_pretrained(self.task.known["tokenizer"])
        model = self.task.model(seed).to(device)
        forget_peaks(device)
        with torch.random.fork_rng():
            loop(
                self.texts,
                self.labels,
                tokenizer,
                model,
                learning_rate=self.learning_rate,
                samples=meter.samples,
                seed=seed,
                device=self.device,
                arrived=meter.arrived,
            )
        memory = peak_bytes(device)
        sets = self.task.data(seed).evaluation
        at_end = measured(self.task, evaluate_sets(self.task, model, sets, 0, 1, device))
        return meter.found(at_end, self._score(at_end), memory)

    def train(self, stack: Stack, meter: Meter, seed: int) -> tuple[dict[str, Any], asyncsgd.TrainedRun]:
        """Train with this library; what was measured, and the run."""
        runtime, batch_size = self._runtime(stack), stack.batch_size
        if stack.workers == "sync":
            batch_size //= runtime.num_workers
        task = self.task
        if isinstance(task, MaskedLM) and not stack.masked_positions:
            task = _decoded_everywhere(task)
        with self._stop.during_a_run():
            run = asyncsgd.train(
                dataclasses.replace(task, batch_size=batch_size, sampling=stack.sampling),
                runtime=runtime,
                samples=meter.samples,
                evaluations=1,
                optimizer=AdamW() if stack.fused else default_adamw,
                learning_rate=stack.learning_rate(self.learning_rate),
                schedule="constant",
                warmup=0,
                weight_decay=WEIGHT_DECAY,
                clip_norm=0.0,
                seed=seed,
                device=self.device,
                precision=stack.precision,
                micro_batches=stack.micro_batches,
                gradient_checkpointing=stack.gradient_checkpointing,
                prefetch=stack.prefetch,
                compile=stack.compile,
                cache=self._cache,
                quiet=True,
                report=meter,
            )
        self._stop.check()
        if run.status != "DONE":
            raise RunError(f"a training of {self.name} ended {run.status}: {run.summary.get('message')}")
        memory = run.summary["memory"]
        peaks = [memory["leader"], *(peak for _, peak in memory["workers"] if stack.workers not in IN_PROCESS)]
        at_end = run.evaluations[-1]
        return meter.found(at_end, self._score(at_end), [sum(column) for column in zip(*peaks, strict=True)]), run

    def score_at_start(self, run: asyncsgd.TrainedRun) -> float:
        return self._score(run.evaluations[0])

    def expected(self, stack: Stack, samples: int) -> tuple[list[dict[str, Any]], float]:
        """What more workers with a device each would reach: predicted from the measured times of one.

        Returns:
            As `expected` of ladder.json has them, and the samples a second of the one worker.
        """
        meter = Meter(0, max(samples, 2 * stack.batch_size), self.device)  # a rate is between two arrivals
        _, run = self.train(dataclasses.replace(stack, workers="one"), meter, 0)
        speeds, found = speeds_of(meter.turnarounds), []
        for number in EXPECTED_WORKERS:
            times = {rule: arrival_seconds(speeds, rule, number, 0, number * GRADIENTS) for rule in RULES}
            rates = {rule: number * GRADIENTS * stack.batch_size / seconds[-1] for rule, seconds in times.items()}
            found.append({"num_workers": number, **rates})
        return found, run.summary["samples_per_second"]

    def operations(self) -> dict[str, float]:
        """Of a forward and a backward pass on one text that fills its length, by model and length."""
        found = {}
        for model, length in (("tiny", SEQ_LEN), ("tiny", 2 * SEQ_LEN), ("small", SEQ_LEN)):
            other: dict[str, Any] = {"model_name": model}
            task = dataclasses.replace(self.task, seq_len=length, **other).prepare(0, self._cache)
            rows = task.batch_size
            input_ids = torch.full((rows, length), 5)
            labels = torch.zeros(rows, dtype=torch.int64)
            if self.name == "masked_lm":
                labels = torch.where(torch.arange(rows * length) % 7 == 0, 5, -100).view(rows, length)
            batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
            counted = flops_per_sample(task, task.model(0), [batch])
            if counted is not None:
                found[f"{model} at {length} tokens"] = counted
        return found

    @property
    def longest(self) -> int:
        return int(self.task.samples("train").lengths.max())

    def _runtime(self, stack: Stack) -> InProcess | AllReduce | Processes:
        cores = available_cores()
        number = 2 if self.device == "cpu" else torch.cuda.device_count()
        if stack.workers == "sync":
            return AllReduce(number, threads=max(1, cores // number))
        if stack.workers == "async":
            return Processes(number, threads=max(1, cores // number))
        if stack.workers == "one":
            return Processes(1, threads=cores)
        return InProcess(threads=cores, all_gpus=stack.workers == "data_parallel")

    def _score(self, at_end: Any) -> float:
        return at_end.loss if self.score == "loss" else at_end.metrics[self.score]


def _labelled(data: str, cache: Path) -> Corpus:
    return load_corpus(data, {TEXT: "--text-column", "label": "--label-column"}, LABELLED, cache_dir=cache)


def _short(documents: Documents) -> Documents:
    """Those of about `SEQ_LEN` tokens at most: both sides are to train on whole texts."""
    return select(documents, [len(text) <= 2 * SEQ_LEN for text in documents.texts])


def _keep(path: Path, documents: Documents) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = documents.labels or ("",) * len(documents.texts)
    rows = [{TEXT: text, "label": label} for text, label in zip(documents.texts, labels, strict=True)]
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def _decoded_everywhere(task: MaskedLM) -> DecodedEverywhere:
    return DecodedEverywhere(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
