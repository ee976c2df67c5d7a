"""A replay of a run from its records, and what it says. It is to a replay what `asyncsgd.run.lifecycle` is to a run.

Bits are compared first. Equal bits are equal wherever they were made. Where they are not equal, the environment
decides: in the run's own one the replay is different, and in another one it is compared as far as rounding allows it,
see `asyncsgd.backends.rounding`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor

from asyncsgd.backends.log import Replay, read_log
from asyncsgd.backends.rounding import DRAWS, DataWithOtherBits, agreement, move_last_bits, parameters_agree
from asyncsgd.core.batches import BatchStream
from asyncsgd.core.flat import FlatModel, parameters_sha256
from asyncsgd.errors import UsageError
from asyncsgd.records.events import EVENTS, Parts
from asyncsgd.records.hardware import environments_of, unlike
from asyncsgd.records.run_folder import LAST_MODEL
from asyncsgd.run.execute import method_of
from asyncsgd.run.finish import facts_of, save_model
from asyncsgd.run.recorded import shorter_than_run
from asyncsgd.run.run import Run, device_of_worker
from asyncsgd.settings.groups import FIRST
from asyncsgd.simulation.settings import SimulationSettings
from asyncsgd.simulation.simulate import replay_of, vector_sha256
from asyncsgd.worker.computation import ModelGradients
from asyncsgd.worker.profile import hardware

OTHER_END = "all compared losses agree, the final parameters or running statistics do not"


@dataclasses.dataclass(frozen=True)
class Replayed:
    """What a replay has found."""

    identical: bool
    """Whether it ended at the run's parameters, bit for bit."""
    difference: str
    """The first difference between replay and run, in words; empty if there is none."""
    num_updates: int
    """The number of updates that were replayed."""
    num_checked: int
    """The number of losses that were compared."""
    parameters_sha256: str
    """The hash of the replay's parameters."""
    equal_to_rounding: bool
    """Whether the replay is the run up to rounding, to the end; an identical one is."""
    equal_up_to: int
    """The update up to which the replay is the run, up to rounding. After it rounding alone parts two runs, or they
    differ."""
    environments: str = ""
    """The hardware and versions with which the run was recorded and replayed, in words; empty where bits cannot depend
    on them."""

    @property
    def words(self) -> str:
        """The finding as `python -m asyncsgd replay` prints it."""
        if self.identical:
            return "identical"
        if self.difference:
            where = f" ({self.environments})" if self.environments else ""
            return f"different at update {self.equal_up_to} or before it: {self.difference}{where}"
        if self.equal_to_rounding:
            return f"equal to rounding ({self.environments})"
        return (
            f"equal to rounding up to update {self.equal_up_to} of {self.num_updates} ({self.environments}); after it "
            f"rounding alone parts two runs"
        )


class Repeatable(Protocol):
    """A run that can be replayed as often as it takes."""

    precision: torch.dtype
    """The number format in which the run computes gradients."""
    summary: Mapping[str, Any]
    """The summary of the run."""
    environments: str
    """See `asyncsgd.records.hardware.unlike`."""

    def make(self, *, draw: int | None = None, to_the_bit: bool = False) -> Replay:
        """Return a replay that has not begun. With a `draw` it begins at parameters whose last bits are moved by it."""

    def sha256(self, parameters: Tensor) -> str:
        """The hash of parameters, `(P,)`, as the run's summary has it."""

    def recorded_parameters(self) -> Tensor | None:
        """The parameters that the run ended with, `(P,)`; None where its folder does not have them."""


def replayed(run: Repeatable, until: int | None = None) -> tuple[Replayed, Replay]:
    """Replay a run and say what comes out; with the replay, whose server has reached that version.

    Args:
        until: the version at which to stop; None: that of the run's end. Only there final parameters are compared.
    """
    replay = run.make(to_the_bit=not run.environments)
    structural = replay.run(until)
    server = replay.server
    sha256 = run.sha256(server.parameters)
    statistics_sha256 = None if server.statistics is None else server.statistics.sha256
    said = Replayed(
        identical=False,
        difference="",
        num_updates=server.version,
        num_checked=len(replay.losses),
        parameters_sha256=sha256,
        equal_to_rounding=False,
        equal_up_to=server.version,
        environments=run.environments,
    )
    if structural is not None:
        return dataclasses.replace(said, difference=structural.message, equal_up_to=structural.version), replay
    same_bits = all(pair.same_bits for pair in replay.losses)
    if until is None and (same_bits or math.isfinite(replay.losses[-1].here)):  # else it ended before its log
        shorter = shorter_than_run(run.summary, server.num_samples)
        if shorter:
            return dataclasses.replace(said, difference=shorter), replay
    same_end = until is not None or (
        sha256 == run.summary["parameters_sha256"] and statistics_sha256 == run.summary.get("statistics_sha256")
    )
    if same_bits and same_end:
        return dataclasses.replace(said, identical=True, equal_to_rounding=True), replay
    if not run.environments:
        return dataclasses.replace(said, difference=OTHER_END), replay
    recorded = run.recorded_parameters() if until is None else None
    moved_losses: list[list[float]] = []
    moved_ends: list[Tensor] = []
    for draw in range(DRAWS):
        moved = run.make(draw=draw)
        moved.run(until)
        moved_losses.append([pair.here for pair in moved.losses])
        moved_ends.append(moved.server.parameters)
        losses = agreement(replay.losses, moved_losses, run.precision)
        said = dataclasses.replace(said, difference=losses.difference, equal_up_to=losses.equal_up_to)
        if losses.to_the_end:
            said = dataclasses.replace(said, equal_to_rounding=True, equal_up_to=server.version)
        if losses.to_the_end and recorded is not None and not parameters_agree(server.parameters, moved_ends, recorded):
            what = f"{OTHER_END}, by more than rounding explains"
            said = dataclasses.replace(said, equal_to_rounding=False, difference=what)
        if not said.difference:
            break
    return said, replay


class PreparedReplay:
    """The server and a worker as a run had them, ready to take its log as often as it takes; a `Repeatable`.

    Args:
        run: the run as it was asked for; its thread count is used.
        folder: the folder of the run, with its log and its model.
        summary: the summary of the run, whose data must be those of now.

    Raises:
        UsageError: if the data are others, the run was compiled, or the log cannot be read.
    """

    def __init__(self, run: Run, folder: Path, summary: Mapping[str, Any]) -> None:
        if run.machine.compile:
            raise UsageError(
                "a run with --compile cannot be replayed: which code computes a batch depends on the batches before it"
            )
        torch.set_num_threads(run.runtime.threads)
        run = run.prepared()
        if summary.get("statistics"):
            run = dataclasses.replace(run, changing_buffers=tuple(summary["statistics"]))
        self._run = run
        order = run.task.sample_order
        recorded_order = summary.get("sample_order", FIRST)
        if order not in (None, recorded_order):
            raise UsageError(
                f"the run took its samples in order {recorded_order}, and the task given takes order {order}; give it "
                f"sample_order={recorded_order}"
            )
        self.environments = unlike(environments_of(folder), _environment_here(run.device, run.runtime.threads))
        here = str(facts_of(run)["data_fingerprint"])
        recorded = str(summary.get("data_fingerprint"))
        if here != recorded:
            # Tensors that a task makes may have other last bits on another processor; texts are the same everywhere.
            if "data_fingerprint" in run.task.facts() or not self.environments:
                raise UsageError(f"the data are not the run's: their fingerprint is {here}, the run had {recorded}")
            self.environments += "; its data have other bits here"
        self._data_differ = here != recorded
        self._folder = folder
        self._log = read_log(folder / EVENTS)
        self._layout = run.flat().layout
        self.summary = summary
        self.precision = run.precision

    def make(self, *, draw: int | None = None, to_the_bit: bool = False) -> Replay:
        run = self._run
        flat = run.flat()
        parameters = flat.parameters
        if draw is not None:
            move_last_bits(parameters, self.precision, draw)
        parts = next((record.before for _, record in self._log if isinstance(record, Parts)), run.micro_batches)
        worker = run.with_parts(parts).worker(run.flat(device=device_of_worker(run.device, 0)))
        if draw is not None and self._data_differ:
            worker.data = DataWithOtherBits(worker.data, draw)
        batches = BatchStream(None, run.task.batch_size)
        runtime = run.runtime
        number = runtime.num_workers * runtime.accumulate  # an update of one process is a round of simulated workers
        named: dict[str, Any] = {"num_workers": number, "starts_by_itself": False, "statistics": flat.statistics}
        server = method_of(run, parameters, self._layout, batches, **named)
        return Replay(server, ModelGradients(worker, run.recipe), self._log, to_the_bit=to_the_bit)

    def sha256(self, parameters: Tensor) -> str:
        return parameters_sha256(self._layout, parameters)

    def recorded_parameters(self) -> Tensor | None:
        weights = self._folder / LAST_MODEL / "model.safetensors"
        if not weights.is_file():
            return None
        model = self._run.task.model(self._run.seed)
        try:
            load_model(model, str(weights))
        except (OSError, RuntimeError, SafetensorError) as error:
            what = f"{weights} cannot be read as the run's model ({error}); remove it to compare losses alone"
            raise UsageError(what) from error
        flat = FlatModel(model)
        recorded = self.summary["parameters_sha256"]
        if self.sha256(flat.parameters) != recorded:
            what = f"{weights} is not the run's model, whose sha256 is {recorded}; remove it to compare losses alone"
            raise UsageError(what)
        return flat.parameters

    def save(self, replay: Replay, folder: Path) -> None:
        """Write the model at the version that a replay has reached."""
        server = replay.server
        known = {
            "num_samples": server.num_samples,
            "num_updates": server.version,
            "parameters_sha256": self.sha256(server.parameters),
        }
        statistics = None if server.statistics is None else server.statistics.values
        flat = self._run.flat(server.parameters, statistics=statistics)
        self._run.show_statistics(flat)
        save_model(self._run, flat, folder, known, None)


class PreparedSimulation:
    """A simulation, ready to take its log as often as it takes; a `Repeatable`.

    Args:
        asked: the settings of the simulation.
        folder: the folder of the run, with its log.
        summary: the summary of the run.
    """

    precision = torch.float64

    def __init__(self, asked: SimulationSettings, folder: Path, summary: Mapping[str, Any]) -> None:
        self._asked = asked
        self._log = read_log(folder / EVENTS)
        self.summary = summary
        self.environments = unlike(environments_of(folder), _environment_here("cpu", threads=1))

    def make(self, *, draw: int | None = None, to_the_bit: bool = False) -> Replay:
        return replay_of(self._asked, self._log, draw=draw, to_the_bit=to_the_bit)

    def sha256(self, parameters: Tensor) -> str:
        return vector_sha256(parameters)

    def recorded_parameters(self) -> None:
        """Return None: a simulation keeps no parameters."""


def _environment_here(device: str, threads: int) -> dict[str, Any]:
    """The hardware, settings and versions of this process that the bits of results depend on."""
    return hardware(device) | {"device": device, "threads_per_worker": threads, "numpy": numpy.__version__}
