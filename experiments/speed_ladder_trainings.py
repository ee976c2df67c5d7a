"""What the speed ladder measures: a task with its data, trained by a loop of its own or by this library."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import torch

import asyncsgd
from asyncsgd import AllReduce, InProcess, Processes
from asyncsgd.data.corpora import limited, select
from asyncsgd.data.tables import Documents
from asyncsgd.errors import RunError
from asyncsgd.evaluation import evaluate_sets, measured
from asyncsgd.measure import flops_per_sample, forget_peaks, peak_bytes
from asyncsgd.records.events import Event, Record
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_text
from asyncsgd.signals import StopRequest
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM

BATCH_SIZE, SEQ_LEN, DROPOUT, WEIGHT_DECAY = 16, 256, 0.1, 0.01
"""Of the naive loop; weight decay is what torch's AdamW has by default."""
LEARNING_RATE = {"classification": 5e-4, "masked_lm": 1e-3}
"""That of a classification is the default of the task: at 1e-3 some seeds learn one class alone."""
SCORE = {"classification": "macro_f1", "masked_lm": "loss"}
VOCABULARY = 4096
"""Of the tokenizer for masked words, trained on the chosen texts."""
PLAIN: Mapping[str, Any] = MappingProxyType(
    {"batch_size": BATCH_SIZE, "sampling": "random", "optimizer": torch.optim.AdamW, "workers": "single"}
)
"""How this library trains on the first rung. A rung changes settings of `asyncsgd.train` and of the task, or who works:
``single``, ``data_parallel`` (one process on all GPUs), ``sync`` (they share a batch), ``async``."""


class Meter:
    """Watches a training from the end of its warm-up: samples a second, busy cores, busy GPU."""

    def __init__(self, warmup: int, samples: int, device: str) -> None:
        self._warmup, self.samples, self._device = warmup, warmup + samples, device
        self._begin: tuple[int, float, float] | None = None
        self._end: tuple[int, float, float] | None = None
        self._gpu: list[float] = []

    def __call__(self, record: Record) -> None:
        if isinstance(record, Event):
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

    def found(self, loss: float, score: float, memory: Sequence[int]) -> dict[str, Any]:
        """As a row of `analysis.ladder.TRAINING`."""
        assert self._begin is not None, "the training was shorter than its warm-up"
        assert self._end is not None, "the training was too short"
        (first, begin, cpu_before), (last, end, cpu_after) = self._begin, self._end
        return {
            "samples_per_second": (last - first) / (end - begin),
            "warmup_seconds": begin,
            "loss": loss,
            "score": score,
            "memory_bytes": memory[0],
            "gpu_bytes": memory[1],
            "busy_cores": (cpu_after - cpu_before) / (end - begin),
            "busy_gpu": sum(self._gpu) / len(self._gpu) if self._gpu else None,
        }


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
        corpus = _task_of(name, data).read(cache)
        train, held_out = (_short(side) for side in (corpus.train, corpus.eval))
        self.epoch = len(train.texts)
        for side, documents, limit in (("train", train, samples), ("validation", held_out, eval_samples)):
            chosen = limited(documents, limit)
            labels = chosen.labels or ("",) * len(chosen.texts)
            rows = [{"text": text, "label": label} for text, label in zip(chosen.texts, labels, strict=True)]
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / f"{side}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        self.task = _task_of(name, str(folder)).prepare(0, cache)
        corpus = self.task.read(cache)
        self.texts = corpus.train.texts
        self.labels = None if name == "masked_lm" else [corpus.labels.index(one) for one in corpus.train.labels or ()]

    def naive(self, loop: Callable[..., None], meter: Meter, seed: int) -> dict[str, Any]:
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
                learning_rate=LEARNING_RATE[self.name],
                samples=meter.samples,
                seed=seed,
                device=self.device,
                arrived=meter.arrived,
            )
        memory = peak_bytes(device)
        sets = self.task.data(seed).evaluation
        at_end = measured(self.task, evaluate_sets(self.task, model, sets, 0, 1, device))
        return meter.found(at_end.loss, self._score(at_end), memory)

    def train(self, changes: Mapping[str, Any], meter: Meter, seed: int) -> dict[str, Any]:
        """Train with this library, `PLAIN` but for the changes; what was measured, and the score before training."""
        settings = {**PLAIN, **changes}
        batch_size, sampling, workers = (settings.pop(name) for name in ("batch_size", "sampling", "workers"))
        cores, number = available_cores(), 2 if self.device == "cpu" else torch.cuda.device_count()
        runtime: InProcess | AllReduce | Processes = InProcess(threads=cores, all_gpus=workers == "data_parallel")
        if workers in ("sync", "async"):
            runtime = (AllReduce if workers == "sync" else Processes)(number, threads=max(1, cores // number))
        of_each = batch_size // number if workers == "sync" else batch_size
        with self._stop.during_a_run():
            run = asyncsgd.train(
                dataclasses.replace(self.task, batch_size=of_each, sampling=sampling),
                runtime=runtime,
                samples=meter.samples,
                evaluations=1,
                # the square root of the batch keeps the noise of AdamW's steps (Malladi et al., NeurIPS 2022)
                learning_rate=LEARNING_RATE[self.name] * (batch_size / BATCH_SIZE) ** 0.5,
                schedule="constant",
                warmup=0,
                weight_decay=WEIGHT_DECAY,
                clip_norm=0.0,
                seed=seed,
                device=self.device,
                cache=self._cache,
                quiet=True,
                report=meter,
                **settings,
            )
        self._stop.check()
        if run.status != "DONE":
            raise RunError(f"a training of {self.name} ended {run.status}: {run.summary.get('message')}")
        memory = run.summary["memory"]
        peaks = [memory["leader"], *(peak for _, peak in memory["workers"] if workers in ("sync", "async"))]
        first, last = run.evaluations[0], run.evaluations[-1]
        found = meter.found(last.loss, self._score(last), [sum(column) for column in zip(*peaks, strict=True)])
        return found | {"score_at_start": self._score(first)}

    def operations(self) -> dict[str, float]:
        """Of a forward and a backward pass on one text that fills its length, by model and length."""
        found = {}
        for model, length in (("tiny", SEQ_LEN), ("tiny", 2 * SEQ_LEN), ("small", SEQ_LEN)):
            other: dict[str, Any] = {"model_name": model}
            task = dataclasses.replace(self.task, seq_len=length, **other).prepare(0, self._cache)
            input_ids = torch.full((task.batch_size, length), 5)
            labels = torch.zeros(task.batch_size, dtype=torch.int64)
            if self.name == "masked_lm":
                labels = torch.where(torch.arange(input_ids.numel()) % 7 == 0, 5, -100).view_as(input_ids)
            batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
            found[f"{model} at {length} tokens"] = flops_per_sample(task, task.model(0), [batch])
        return found

    @property
    def longest(self) -> int:
        return int(self.task.samples("train").lengths.max())

    def _score(self, at: Any) -> float:
        return at.loss if SCORE[self.name] == "loss" else at.metrics[SCORE[self.name]]


def _task_of(name: str, data: str) -> Classification | MaskedLM:
    if name == "classification":
        return Classification(data_name=data, seq_len=SEQ_LEN, dropout=DROPOUT)
    return MaskedLM(data_name=data, vocab_size=VOCABULARY, seq_len=SEQ_LEN, dropout=DROPOUT, eval_samples=0)


def _short(documents: Documents) -> Documents:
    """Those of about `SEQ_LEN` tokens at most: both sides are to train on whole texts."""
    return select(documents, [len(text) <= 2 * SEQ_LEN for text in documents.texts])
