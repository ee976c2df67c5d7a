"""Put a replay together from a run's settings and records: the counterpart of `asyncsgd.training` for `runtime.replay`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from asyncsgd import models
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.prepare import Prepared, device_of_worker, prepare, rule_of, schedule_of, server_recipe
from asyncsgd.runtime.computation import ModelGradients
from asyncsgd.runtime.log import LoggedArrival, LogRecord
from asyncsgd.runtime.replay import Difference, Replay
from asyncsgd.server import Server
from asyncsgd.settings import Settings
from asyncsgd.streams import Batches, count_batches


class PreparedReplay:
    """A server and a worker as the run had them, ready to take its log.

    Args:
        settings: of the run; its thread count is used.
        records: its event log; see `asyncsgd.runtime.log.read_log`.
        cache_dir: folder of prepared data, None for the default one.
        check_every: see `Replay`.

    Raises:
        UsageError: if the log of a run in float16 does not say at which scales its gradients were computed.
    """

    def __init__(
        self, settings: Settings, records: Sequence[LogRecord], cache_dir: str | None = None, check_every: int = 1
    ) -> None:
        _check_loss_scales(settings, records)
        torch.set_num_threads(settings.machine.threads)
        data = dataclasses.replace(settings.data, cache_dir=cache_dir)
        self._prepared: Prepared = prepare(
            data,
            settings.model,
            settings.machine,
            settings.optimization,
            dataclasses.replace(settings.job, speeds=None),  # the log has the times
            eval_samples=settings.budget.eval_samples,
        )
        device = device_of_worker(self._prepared.assignment.device, 0)
        self._flat = FlatModel(self._prepared.model)
        assignment = self._prepared.assignment
        worker = assignment.worker(FlatModel(assignment.task.model(assignment.seed).to(device)))
        rule = rule_of(settings.job)
        optimizer = server_recipe(rule, settings.optimization).on(self._flat.parameters, self._flat.layout.num_decayed)
        schedule = schedule_of(settings.optimization, settings.budget)
        self._server = Server(self._flat.parameters, rule, optimizer, schedule)
        job = settings.job
        self._replay = Replay(
            self._server,
            ModelGradients(worker, self._prepared.assignment.inner),
            Batches(None, settings.data.batch_size),
            records,
            num_workers=job.accumulate if job.mode == "single" else job.nproc,
            check_every=check_every,
        )

    def run(self, until: int | None = None) -> Difference | None:
        """See `Replay.run`."""
        return self._replay.run(until)

    @property
    def data_fingerprint(self) -> str:
        return self._prepared.data_fingerprint

    @property
    def version(self) -> int:
        """Updates replayed."""
        return self._server.version

    @property
    def num_samples(self) -> int:
        """Samples that have arrived."""
        return self._server.num_samples

    @property
    def num_checked(self) -> int:
        """Losses compared."""
        return self._replay.num_checked

    @property
    def parameters_sha256(self) -> str:
        return parameters_sha256(self._flat.layout, self._flat.parameters)

    def save(self, folder: Path) -> None:
        """Write the model at the version that the replay has reached."""
        models.save_model(self._flat.model, self._prepared.tokenizer, folder)


def _check_loss_scales(settings: Settings, records: Sequence[LogRecord]) -> None:
    """A worker's scale follows from all that it has computed, and not all of that is in the log."""
    half = settings.machine.precision == "fp16"
    for record in records:
        if not isinstance(record, LoggedArrival):
            continue
        wanted = count_batches(record.batches) if half else 0
        if len(record.loss_scales) == wanted:
            continue
        line = f"events.jsonl, line {record.line}: the arrival has {len(record.loss_scales)} loss_scales"
        if not half:
            raise UsageError(
                f"{line}, which only float16 has, and the run's --precision is {settings.machine.precision}; give "
                f"the log as the run wrote it"
            )
        raise UsageError(
            f"{line} and {wanted} gradient{'s' * (wanted != 1)} in float16; a run from before they were written down "
            f"cannot be replayed, run it again"
        )
