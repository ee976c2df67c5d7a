"""The naive loop as a run: trained by plain PyTorch, recorded as every run is, so that it can be compared with one."""

from __future__ import annotations

import math
from typing import Any

import torch

from asyncsgd.backends.launch import World
from asyncsgd.core.limits import Interrupted, Result, diverged
from asyncsgd.records.events import APPLIED, DONE, INTERRUPTED, Event
from asyncsgd.run.execute import Live
from asyncsgd.studies.naive_loop import naive_loop
from asyncsgd.tasks.labelled_task import LabelledTask
from asyncsgd.worker.evaluation import measured

DEFAULT_THREADS = torch.get_num_threads()
"""The number of threads that torch has by itself. `ladder_texts` imports this module before a run changes it."""


def train_naively(live: Live, torchrun_world: World | None) -> Result:
    """Train as the naive loop does, with the batch size, the learning rate, the samples and the seed of the run.

    Args:
        live: a run of text classification or of masked words.
        torchrun_world: not used; `asyncsgd.run.execute.execute` takes it too.
    """
    from transformers import AutoTokenizer

    run = live.run
    task: Any = run.task
    worker = live.worker(live.flat)
    samples = run.limits.samples
    assert samples is not None
    corpus = task.read(run.cache)
    labels = None
    if isinstance(task, LabelledTask):
        labels = [corpus.labels.index(name) for name in corpus.train.labels]
    tokenizer = AutoTokenizer.from_pretrained(task.known["tokenizer"])  # found when the task was prepared

    def evaluate() -> None:
        totals = live.record.totals
        evaluated = measured(task, worker.evaluate(0, 1))
        evaluation = evaluated.record(
            version=totals.num_updates, num_samples=totals.num_samples, train_seconds=totals.train_seconds
        )
        live.record(evaluation)

    def arrived(total: int, loss: float, seconds: float) -> None:
        number = live.record.totals.num_updates
        batch_size = total - live.record.totals.num_samples
        live.record(
            Event(
                dispatch=number,
                worker=0,
                batches=(),
                read_version=number,
                version=number + 1,
                arrival_delay=0,
                outcome=APPLIED,
                uses=((number, 0),),  # the dispatch, and its delay
                drops=(),
                abandoned=(),
                started=(),
                loss=loss,
                weight=batch_size,  # of masked words too, whose number the naive loop does not tell
                num_samples=batch_size,
                learning_rate=run.steps.learning_rate,
                train_seconds=seconds,
                total_samples=total,
            )
        )
        if live.stop_requested.begin_step():
            raise Interrupted
        # A batch without a masked word has no loss, and changes nothing.
        if not math.isfinite(loss) and not torch.isfinite(live.flat.parameters).all():
            raise FloatingPointError(f"the training loss is {loss} after {total} samples")

    live.stop_requested.begin_step()  # the longest step decides how long a run may go on after a signal
    torch.set_num_threads(DEFAULT_THREADS)
    evaluate()
    try:
        naive_loop(
            corpus.train.texts,
            labels,
            tokenizer,
            live.flat.model,
            run.steps.learning_rate,
            samples,
            run.seed,
            run.device,
            arrived,
            batch_size=task.batch_size,
            seq_len=task.seq_len,
        )
    except Interrupted:
        return Result(INTERRUPTED, "interrupted by the user")
    except FloatingPointError as error:
        return diverged(str(error))
    evaluate()
    return Result(DONE)
