"""Put a replay together from a run and the records of its run: `asyncsgd.training` for `runtime.replay`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncsgd import runtimes
from asyncsgd.batches import Batches
from asyncsgd.errors import UsageError
from asyncsgd.execute import method_of
from asyncsgd.finishing import facts_of, save_model
from asyncsgd.flat import parameters_sha256
from asyncsgd.recorded_run import fields_of, not_believed, tell_other_fields
from asyncsgd.records.console import say
from asyncsgd.records.events import EVENTS, Parts, read_header
from asyncsgd.runtime.computation import ModelGradients
from asyncsgd.runtime.replay import Log, Replay
from asyncsgd.settings.run import Run, device_of_worker, run_of
from asyncsgd.settings.task import task_flags
from asyncsgd.tasks import TASKS, task_class
from asyncsgd.tasks.base import Task


def run_again(folder: Path, cache_dir: str | None = None, task: Task | type[Task] | None = None) -> Run:
    """Return the run of a script that a folder holds, without speeds, since the log has the times, and
    without a thread that guesses batches, since it has their order.

    Args:
        folder: of the run.
        cache_dir: folder of prepared data; None for the default one.
        task: that of the run, where it is none of the library's own, or its class, whose fields are then the folder's.

    Raises:
        UsageError: if the settings cannot be read, or the run's task is none of the library's own and not given.
    """
    settings = settings_of_run(folder, {"speeds": None, "cache_dir": cache_dir, "prefetch": 0}, task)
    return run_of(settings.task.name, settings)


def settings_of_run(folder: Path, changes: Mapping[str, Any], task: Task | type[Task] | None = None) -> Any:
    """The settings of a script's run with changes, but none that says where something is written; see `run_again`."""
    named = str(read_header(folder / EVENTS).get("task"))
    if task is None and named not in TASKS:
        raise not_believed(named)
    kind: Any = task or task_class(named)
    if not isinstance(kind, type):
        kind = type(kind)
    if kind.name != named:
        say(f"note   the run's task was {named}, and {kind.name} was given")
    flags = task_flags(kind)
    written = {*flags.places, *kind.output_folders}
    recorded = {name: value for name, value in flags.load_yaml(folder / "settings.yaml").items() if name not in written}
    settings = flags.make({**recorded, **changes})
    if task is not None and not isinstance(task, type):
        tell_other_fields(task, fields_of(settings.task))
        settings = dataclasses.replace(settings, task=task)
    return settings


class PreparedReplay:
    """The server and a worker as a run had them, ready to take its log.

    Args:
        run: as it was asked for; its thread count is used.
        log: of its events.
        summary: of the run, whose data must be those of now.

    Raises:
        UsageError: if the data are others, or the run was compiled.
    """

    def __init__(self, run: Run, log: Log, summary: Mapping[str, Any]) -> None:
        if run.machine.compile:
            raise UsageError(
                "a run with --compile cannot be replayed: which code computes a batch depends on the batches before it"
            )
        torch.set_num_threads(run.runtime.threads)
        self._run = run = run.prepared()
        here, recorded = str(facts_of(run)["data_fingerprint"]), str(summary.get("data_fingerprint"))
        if here != recorded:
            raise UsageError(f"the data are not the run's: their fingerprint is {here}, the run had {recorded}")
        self._flat = run.flat()
        device = device_of_worker(run.device, 0)
        parts = next((record.before for _, record in log if isinstance(record, Parts)), run.micro_batches)
        worker = run.with_parts(parts).worker(run.flat(device=device))
        runtime, batches = run.runtime, Batches(None, run.task.batch_size)
        number = runtime.accumulate if isinstance(runtime, runtimes.InProcess) else runtime.num_workers
        layout, vector = self._flat.layout, self._flat.parameters
        self.server = method_of(run, vector, layout, batches, num_workers=number, starts=False)
        self.replay = Replay(self.server, ModelGradients(worker, run.recipe), log)

    @property
    def parameters_sha256(self) -> str:
        return parameters_sha256(self._flat.layout, self.server.parameters)

    def save(self, folder: Path) -> None:
        """Write the model at the version that the replay has reached."""
        counts = {"num_samples": self.server.num_samples, "num_updates": self.server.version}
        save_model(self._run, self._flat, folder, counts | {"parameters_sha256": self.parameters_sha256}, None)
