"""Checkpoints: the state of a run on disk, from which it goes on.

In one process, on the virtual clock and with synchronous ranks it goes on as if it had never stopped. Asynchronous
processes leave and join again, and the batches of their gradients in flight are handed out again.

::

    runs/<name>/checkpoints/
      000000002400.pt    the state, for torch.load(weights_only=True)
      000000002400.json  its description: where in the run it was taken, and the hash of the state

A state is tensors, numbers, strings and what holds them (see `asyncsgd.core.state`), so reading one runs no code.
Training stands still while the state is copied. A thread writes the copy. A description is written when its state is
durable.

A description has the hash of its state, of the records up to it and of itself. A checkpoint with a hash that differs is
damaged, and the checkpoint before it is used in its place.

torch.save writes them and not torch.distributed.checkpoint: that one keeps its index as a pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from torch import Tensor

from asyncsgd import __version__
from asyncsgd.core.limits import Best
from asyncsgd.core.state import State
from asyncsgd.errors import RunError, UsageError, is_out_of_memory, reason
from asyncsgd.records.console import Recorder
from asyncsgd.records.events import EVENTS, Checkpointed, sha256_of_first
from asyncsgd.records.run_folder import RunFolder, json_text, sync, write_text

SCHEMA = 8
"""The format of the state and of what is kept beside it. A checkpoint of another one is refused, with its number."""

FOLDER = "checkpoints"
MODULES_OF_STATE_CLASSES = (
    "asyncsgd.core.protocol",
    "asyncsgd.records.events",
    "asyncsgd.rules.",
    "asyncsgd.core.limits",
    "asyncsgd.simulation.churn",
)
"""The modules whose classes a state may hold, beside tensors, numbers, strings, lists, tuples, sets and dicts. A dot at
the end stands for all modules below."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """When checkpoints are taken and how many are kept.

    If `every` or `seconds` is set, one more is taken at the end of a run that is DONE. One is taken in any case when
    Ctrl-C, SIGTERM or SIGHUP stops the run.
    """

    every: int | None = None
    """How many samples arrive between two of them; None: samples do not decide."""
    seconds: float | None = None
    """The wall time between two of them, in seconds; None: time does not decide."""
    keep: int = 2
    """How many of the newest are kept. The one with the best evaluation loss is kept beside them, and the newest from
    which the run can become longer.
    """


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The description that lies beside a state: where in the run it was taken."""

    name: str
    total_samples: int
    version: int
    train_seconds: float
    eval_loss: float | None
    """The loss of the last evaluation before it; None: there was none."""
    sha256: str
    """The hash of the file with the state."""
    events_bytes: int
    """The length of events.jsonl at this moment."""
    events_sha256: str
    """The hash of these bytes."""
    totals: Mapping[str, Any]
    """See `asyncsgd.records.totals.Totals.state`."""
    began_from: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """The hashes of the data and initial parameters that the run began from; see `Saver`."""
    cut_short: str | None = None
    """See `asyncsgd.core.protocol.Method.cut_short`."""
    policy: Policy = Policy()
    """When the run took checkpoints. One that goes on keeps to it, unless told otherwise."""
    schema: int = SCHEMA
    asyncsgd: str = __version__
    """The version that wrote it, for messages."""


class Damaged(Exception):
    """A checkpoint is not as it was written; the message says what is wrong with it."""


_SEAL = "description_sha256"


def name_of(total_samples: int) -> str:
    """The name of the checkpoint after so many samples. The order of the names is that of the checkpoints."""
    return f"{total_samples:012d}"


class Saver:
    """Takes the states of a run in the process that owns its folder: copies one, and a thread writes the copy.

    Args:
        folder: the folder of the run.
        policy: when a state is due, and how many are kept.
        record: gets the record of every state; its `totals` are kept beside the state.
        began_from: what -> its hash, of the data and the initial parameters, so that no run goes on from others.
        tell: says a line to the user.
        durable: called with each checkpoint when it is durable, in the thread that has written it; None: nobody is
            told.
    """

    def __init__(
        self,
        folder: RunFolder,
        policy: Policy,
        record: Recorder,
        began_from: Mapping[str, Any],
        tell: Callable[[str], None],
        durable: Callable[[Checkpoint], None] | None,
    ) -> None:
        self._run = folder
        self._policy = policy
        self._record = record
        self._began_from = began_from
        self._tell = tell
        self._durable = durable
        self._folder = folder.path / FOLDER
        # The samples of the checkpoint that the run goes on from. If the run is stopped, or ends, before a new arrival,
        # this checkpoint stays and no other is written.
        self._resumes_at = None if folder.resume is None else folder.resume.checkpoint.total_samples
        self._thread: threading.Thread | None = None
        self._wait_for_next(self._resumes_at or 0)

    def _wait_for_next(self, num_samples: int) -> None:
        every = self._policy.every
        self._next_samples = None if every is None else (num_samples // every + 1) * every
        self._last_at = time.monotonic()

    def due(self, num_samples: int, *, at_end: bool = False) -> bool:
        """Whether a state is to be taken now. It is not while the last one is still being written.

        Args:
            at_end: whether a run is DONE. Then a state is due whenever it is, if the policy takes any at all.
        """
        by_samples = self._next_samples is not None and num_samples >= self._next_samples
        seconds = self._policy.seconds
        if at_end:
            return self._next_samples is not None or seconds is not None
        if not by_samples and (seconds is None or time.monotonic() - self._last_at < seconds):
            return False
        return self._thread is None or not self._thread.is_alive()

    def save(
        self, state: State, *, version: int, num_samples: int, train_seconds: float, cut_short: str | None = None
    ) -> None:
        """Copy `state` and begin to write the copy. Where memory does not suffice, the run goes on without it.

        Args:
            cut_short: see `asyncsgd.core.protocol.Method.cut_short`.
        """
        if num_samples == self._resumes_at:
            return
        self.finish()
        began = time.perf_counter()
        name = name_of(num_samples)
        try:
            copy = copy_of(state)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._tell_not_written(name, "there is not enough memory for a copy of the state")
            return
        finally:
            self._wait_for_next(num_samples)
        copy_seconds = time.perf_counter() - began
        self._record(Checkpointed(version, num_samples, train_seconds, name, copy_seconds, cut_short))
        totals = self._record.totals.state()
        events_bytes, events_sha256 = self._run.flush()
        made = Checkpoint(
            name=name,
            total_samples=num_samples,
            version=version,
            train_seconds=train_seconds,
            eval_loss=None if totals["last"] is None else totals["last"]["loss"],
            sha256="",
            events_bytes=events_bytes,
            events_sha256=events_sha256,
            totals=totals,
            began_from=self._began_from,
            cut_short=cut_short,
            policy=self._policy,
        )
        self._thread = threading.Thread(target=self._write, args=(copy, made), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()

    def _write(self, copy: State, made: Checkpoint) -> None:
        """Write the state, then its description, and remove the checkpoints that are not kept."""
        folder = self._folder
        name = made.name
        partial = folder / f"{name}.partial"
        try:
            folder.mkdir(exist_ok=True)
            with open(partial, "wb") as file:
                torch.save({"schema": SCHEMA, "state": copy}, file)
                file.flush()
                os.fsync(file.fileno())
            made = dataclasses.replace(made, sha256=sha256_of(partial))
            os.replace(partial, partial.with_suffix(".pt"))
            sync(folder)
            sync(self._run.path / EVENTS)  # the records first: a description is of no use without those it names
            sync(self._run.path)
            text = json_text(dataclasses.asdict(made))
            write_text(folder / f"{name}.json", _sealed(text.encode()).decode())
            sync(folder)
        except (OSError, RuntimeError, MemoryError) as error:  # torch says in a RuntimeError that a disk is full
            with contextlib.suppress(OSError):
                partial.unlink()
            if isinstance(error, OSError):
                why = reason(error)
            elif is_out_of_memory(error):
                why = "there is not enough memory to write it"
            else:
                why = str(error).partition("\n")[0]
            self._tell_not_written(name, why)
        else:
            self._remove_old([found for found in _all(folder) if found.name <= name])
            if self._durable is not None:
                self._durable(made)

    def _tell_not_written(self, name: str, why: str) -> None:
        earlier = [found.name for found in _all(self._folder) if found.name < name]
        left = f"the last good one is {earlier[-1]}" if earlier else "there is none before it"
        self._tell(f"checkpoint {name} could not be written ({why}); the run goes on, and {left}")

    def _remove_old(self, found: Sequence[Checkpoint]) -> None:
        losses = [checkpoint for checkpoint in found if checkpoint.eval_loss is not None]
        best = min(losses, key=lambda checkpoint: (checkpoint.eval_loss, checkpoint.name), default=None)
        can_grow = [checkpoint for checkpoint in found if checkpoint.cut_short is None]
        kept = [best, *can_grow[-1:], *found[-self._policy.keep :]]
        for checkpoint in found:
            if checkpoint not in kept:
                for suffix in (".json", ".pt"):  # in this order, so that no description is left without its state
                    with contextlib.suppress(OSError):
                        (self._folder / (checkpoint.name + suffix)).unlink()


@dataclasses.dataclass(frozen=True)
class Found:
    """The checkpoint from which a run goes on."""

    folder: Path
    """The folder of the run."""
    checkpoint: Checkpoint
    notes: tuple[str, ...] = ()
    """What the user is told of newer checkpoints that are damaged."""

    def load(self, device: str | torch.device = "cpu", rule: object = None) -> State:
        """Read the state, its tensors on `device`. `rule` is that of the run: it may be of a module of the user's,
        whose classes the state may then hold.
        """
        return load_state(self.folder, self.checkpoint.name, device, type(rule).__module__)

    def forget_later(self) -> None:
        """Remove the checkpoints after this one: what they hold is computed again."""
        for path in (self.folder / FOLDER).glob("[0-9]*.*"):
            if path.name.partition(".")[0] > self.checkpoint.name:
                path.unlink()


class KeptState:
    """Single values of the saved state of a run's `Loop`, for ranks, exports and pipelines, which have no `Loop`.

    The keys of the state are the names in `KEPT` of the loop, its method, its backend and `EarlyStop`.
    """

    def __init__(self, state: State) -> None:
        self._method = state["method"]
        self._early_stop = state["early_stop"]
        self.of_ranks: State | None = state["backend"].get("ranks")
        """What `Replica.state_dict` of `asyncsgd.backends.ranks` has returned in rank 0; None where no ranks step
        together."""

    @property
    def version(self) -> int:
        """The number of updates that were taken."""
        version: int = self._method["view"]["version"]
        return version

    @property
    def parameters(self) -> Tensor:
        """`(P,)`, the parameters that are evaluated."""
        parameters: Tensor = (self.of_ranks or self._method)["parameters"]
        return parameters

    @property
    def statistics(self) -> State | None:
        """The state of the model's `RunningStatistics`; None: the model has none."""
        return (self.of_ranks or self._method).get("statistics")

    @property
    def best(self) -> tuple[Best | None, Tensor | None, Tensor | None]:
        """The version with the lowest evaluation loss, its parameters and its statistics, where they are kept."""
        early_stop = self._early_stop
        return early_stop["best"], early_stop["best_parameters"], early_stop["best_statistics"]


def load_state(folder: Path, name: str, device: str | torch.device = "cpu", rule_module: str = "") -> State:
    """The state of checkpoint `name` of the run in `folder`, its tensors on `device`.

    It is read without running code: it may name classes of ours that hold values, and those beside the run's rule.

    Raises:
        UsageError: if it holds something else.
    """
    try:
        with open(folder / FOLDER / f"{name}.pt", "rb") as file:
            return _read_state(file, device, rule_module)
    except (pickle.UnpicklingError, *_NO_STATE) as error:
        if is_out_of_memory(error):
            raise RunError(f"there is not enough memory to read checkpoint {name} in {folder}; free some") from None
        # Without its cause: torch's own message advises to load it all the same, which would run whatever is in it.
        said = f"the state of checkpoint {name} in {folder} cannot be read back: {unread(error)}"
        raise UsageError(said) from None


def read_back(state: State, rule_module: str) -> State:
    """`state` as a checkpoint gives it back.

    Raises:
        pickle.UnpicklingError: if it holds what a state may not; see `unread`.
    """
    file = io.BytesIO()
    torch.save({"state": state}, file)
    file.seek(0)
    return _read_state(file, "cpu", rule_module)


def unread(error: Exception) -> str:
    """Why a state could not be read, in a few words of ours, for the exception that reading it raised."""
    holds = re.search(r"GLOBAL (\S+) was not", str(error))
    return f"it holds a {holds[1]}" if holds else "it is no state that this version has written"


def _read_state(file: IO[bytes], device: str | torch.device, rule_module: str) -> State:
    with torch.serialization.safe_globals(classes_in(*MODULES_OF_STATE_CLASSES, rule_module)):
        return torch.load(file, map_location=device, weights_only=True)["state"]


_NO_STATE = (RuntimeError, MemoryError, ValueError, KeyError, TypeError, AttributeError, IndexError, EOFError)
"""What torch raises at a file that has the right hash and is no state. Some of these also say that memory does not
suffice; `is_out_of_memory` tells the two apart."""


def find(
    folder: Path, fits: Callable[[Checkpoint], bool] = lambda checkpoint: True, *, becomes_longer: bool = False
) -> Found:
    """Return the newest undamaged checkpoint of a run.

    Args:
        folder: the folder of the run.
        fits: says which checkpoints may be taken.
        becomes_longer: whether the run goes on with a larger budget; then one that is `cut_short` is passed by.

    Raises:
        UsageError: if there is none, or it is of another schema.
    """
    notes = []
    cut_short = None
    for path in sorted((folder / FOLDER).glob("[0-9]*.json"), reverse=True):
        try:
            checkpoint = _read(path)
            if not fits(checkpoint):
                continue
            _check(folder, checkpoint)
        except Damaged as error:
            notes.append(f"checkpoint {path.stem} is damaged and not used: {error}")
            continue
        if becomes_longer and checkpoint.cut_short is not None:
            cut_short = checkpoint.cut_short
        else:
            return Found(folder, checkpoint, tuple(notes))
    if cut_short is not None:
        raise UsageError(
            f"{folder} cannot become longer: {cut_short}, so a run of the larger budget would have gone on otherwise "
            f"from every checkpoint; begin a new run with the larger --samples"
        )
    damaged = f": {'; '.join(notes)}; there is no other" if notes else ""
    raise UsageError(
        f"{folder} has no checkpoint to go on from{damaged}. Begin a new run, with --checkpoint-every SAMPLES or "
        f"--checkpoint-seconds S to have some"
    )


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copy_of(state: State) -> State:
    """Return a copy that shares nothing with `state`, its tensors on the CPU. A tensor that is there twice is copied
    once.

    The structure is pickled with a number in the place of each tensor, and the tensors are copied to the CPU beside it.
    `copy.deepcopy` would leave copies on a GPU.

    >>> state = {"x": torch.ones(1), "rule": [1]}
    >>> copy = copy_of(state)
    >>> state["rule"].append(2), state["x"].zero_(), copy
    (None, tensor([0.]), {'x': tensor([1.]), 'rule': [1]})
    """
    tensors: dict[int, Tensor] = {}

    class Copying(pickle.Pickler):
        def persistent_id(self, value: object) -> int | None:
            if isinstance(value, Tensor) and id(value) not in tensors:
                tensors[id(value)] = value.detach().to("cpu", copy=True)
            return id(value) if isinstance(value, Tensor) else None

    class Copied(pickle.Unpickler):
        def persistent_load(self, number: int) -> Tensor:
            return tensors[number]

    file = io.BytesIO()
    Copying(file).dump(state)
    file.seek(0)
    return Copied(file).load()


def classes_in(*modules: str) -> list[Any]:
    """The classes of modules that are imported already; a name ending in a dot stands for all modules below it."""
    packages = tuple(name for name in modules if name.endswith("."))
    classes = []
    for name, module in list(sys.modules.items()):
        if name in modules or name.startswith(packages):
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    classes.append(value)
    return classes


def _sealed(text: bytes) -> bytes:
    """The description `text`, a JSON object, with the hash of `text` as its last value."""
    seal = hashlib.sha256(text).hexdigest()
    # `json_text` ends in a line end and a brace.
    return text.removesuffix(b"\n}") + f',\n  "{_SEAL}": "{seal}"\n}}\n'.encode()


def _read(path: Path) -> Checkpoint:
    """The description in a file.

    Raises:
        Damaged: if it is not as it was written.
        UsageError: if it is of another schema.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Damaged(reason(error)) from error
    text, key_of_seal, _ = content.partition(f',\n  "{_SEAL}"'.encode())
    if key_of_seal and content != _sealed(text + b"\n}"):
        raise Damaged("its description was changed")
    try:
        description = msgspec.json.decode(content, type=dict[str, Any])
        schema = description.get("schema")
        if schema not in (None, SCHEMA):  # without one it was changed, which the seal tells
            raise UsageError(
                f"checkpoint {path.stem} in {path.parents[1]} has schema {schema} (asyncsgd "
                f"{description.get('asyncsgd')}), this version ({__version__}) reads schema {SCHEMA}; go on with that "
                f"version"
            )
        found = msgspec.convert(description, type=Checkpoint)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged("its description cannot be read") from error
    if not key_of_seal or found.name != path.stem:  # the name becomes a path: it must not lead elsewhere
        raise Damaged("its description was changed")
    return found


def _check(folder: Path, checkpoint: Checkpoint) -> None:
    """Compare a checkpoint's state and its records with its description.

    Raises:
        Damaged: if they are not those that it describes.
    """
    try:
        if sha256_of(folder / FOLDER / f"{checkpoint.name}.pt") != checkpoint.sha256:
            raise Damaged("its state was changed")
        with open(folder / EVENTS, "rb") as file:
            running = sha256_of_first(file, checkpoint.events_bytes)
            num_bytes = file.tell()
    except OSError as error:
        raise Damaged(reason(error)) from error
    if num_bytes < checkpoint.events_bytes:  # as a power cut may leave it
        raise Damaged(f"{EVENTS} ends before it")
    if running.hexdigest() != checkpoint.events_sha256:
        raise Damaged(f"{EVENTS} was changed before it")


def _all(folder: Path) -> list[Checkpoint]:
    """The checkpoints whose description can be read, oldest first."""
    found = []
    for path in sorted(folder.glob("[0-9]*.json")):
        with contextlib.suppress(Damaged, UsageError):
            found.append(_read(path))
    return found
