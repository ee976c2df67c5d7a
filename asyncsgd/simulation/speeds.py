"""How long a gradient takes on each worker, in seconds, and how long the network takes to carry it.

A model of service times is a frozen dataclass of parameters. `Speeds.on` binds it to a number of workers and a seed.
The `Sampler` that it returns gives the seconds of draw k of worker w. The seconds are a pure function of (seed, worker,
draw). They depend neither on the order of the calls nor on other workers. So two rules on one seed meet identical
speeds (common random numbers), on a virtual clock as well as in a real run that is slowed down.

`ALL` holds an example of each model that needs no file, for tests and for ``--speeds help``.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from asyncsgd.errors import UsageError, nearest
from asyncsgd.named_choices import Kind, describe, spell
from asyncsgd.records.events import read_events

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# Laid out as in asyncsgd.data.random, purpose << 32 | stream, and none of the purposes there: batches, masks and
# service times of one seed have separate streams.
_SERVICE_TIMES = 11 << 32

# Draws made together. One Philox block costs about 3 microseconds, whatever its length up to here, and 100,000
# workers hold 26 MB. The number is part of the streams: another one gives other (equally distributed) seconds.
_BLOCK_BITS = 5
_BLOCK = 1 << _BLOCK_BITS


def _positive(name: str, value: float, unit: str = "number of seconds") -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive {unit}, not {value}")


def _not_negative(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of seconds of at least 0, not {value}")


def _measured(value: object) -> float:
    """`value` if it is a number, else nan: a null or missing measurement must not become 0 seconds."""
    return float(value) if isinstance(value, int | float) else math.nan


class Sampler:
    """The service times of `num_workers` workers under one seed; what `Speeds.on` returns.

    `draw_one` and `draw` are the same function of (worker, draw), bit for bit. They may be asked in any order; asking
    each worker for its draws in increasing order is the fast case. Not to be shared between threads. A sampler of one's
    own defines `_draw_one`.

    Attributes:
        num_workers: workers are 0..num_workers - 1.
    """

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers

    def draw(self, workers: Ints, draws: Ints) -> Floats:
        """Return the seconds of gradient `draws[j]` on worker `workers[j]`.

        Args:
            workers: `(k,)`, int64.
            draws: `(k,)`, int64; how many gradients that worker had *started* before this one, from 0. Neither a
                version nor a dispatch number.

        Returns:
            `(k,)`, float64, a new array; inf where the worker never answers.

        Raises:
            IndexError: for a worker or a draw that does not exist.
        """
        workers, draws = np.asarray(workers, dtype=np.int64), np.asarray(draws, dtype=np.int64)
        if workers.shape != draws.shape or workers.ndim != 1:
            raise ValueError(f"workers {workers.shape} and draws {draws.shape} must both have shape (k,)")
        if len(workers):
            for at in (int(workers.argmin()), int(workers.argmax()), int(draws.argmin())):
                self._check(int(workers[at]), int(draws[at]))
        return self._draw(workers, draws)

    def draw_one(self, worker: int, draw: int) -> float:
        """Return `draw(...)[0]` of one worker, in about a microsecond.

        Raises:
            IndexError: for a worker or a draw that does not exist.
        """
        self._check(worker, draw)
        return self._draw_one(worker, draw)

    def stretched(self, worker: int, draw: int, computed_seconds: float) -> float:
        """Return how long a *real* gradient is to take in all, when its computation took `computed_seconds`.

        A worker can be held back, not sped up, so the answer is max(computed_seconds, drawn seconds); the relative
        model `Slow` gives computed_seconds * factor instead. The caller waits for the difference; inf says that the
        worker never answers.
        """
        return max(computed_seconds, self.draw_one(worker, draw))

    def _check(self, worker: int, draw: int) -> None:
        if not 0 <= worker < self.num_workers:
            raise IndexError(f"worker {worker} is not one of 0..{self.num_workers - 1}")
        if draw < 0:
            raise IndexError(f"draw {draw} of worker {worker}: draws are counted from 0")

    def _draw(self, workers: Ints, draws: Ints) -> Floats:
        return np.array([self._draw_one(worker, draw) for worker, draw in zip(workers, draws, strict=True)])

    def _draw_one(self, worker: int, draw: int) -> float:
        raise TypeError(f"{type(self).__name__} does not define _draw_one()")


class _FixedSampler(Sampler):
    """One number for each worker, nothing random."""

    def __init__(self, seconds: Sequence[float]) -> None:
        super().__init__(len(seconds))
        self._list = list(seconds)
        self._array = np.array(self._list, dtype=np.float64)

    def _draw(self, workers: Ints, draws: Ints) -> Floats:
        return self._array[workers]

    def _draw_one(self, worker: int, draw: int) -> float:
        return self._list[worker]


class _SlowSampler(_FixedSampler):
    """`_FixedSampler` with one straggler, which real runs slow down relative to what it computed."""

    def __init__(self, seconds: Sequence[float], worker: int, factor: float) -> None:
        super().__init__(seconds)
        self._worker, self._factor = worker, factor

    def stretched(self, worker: int, draw: int, computed_seconds: float) -> float:
        self._check(worker, draw)
        return computed_seconds * self._factor if worker == self._worker else computed_seconds


class _TraceSampler(_FixedSampler):
    """Recorded seconds, repeated from the start when a worker has used up its own."""

    def __init__(self, recorded: Sequence[Sequence[float]], num_workers: int) -> None:
        super().__init__([seconds for sequence in recorded for seconds in sequence])
        self.num_workers = num_workers
        self._lengths = np.array([len(sequence) for sequence in recorded], dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths

    def _draw(self, workers: Ints, draws: Ints) -> Floats:
        sequences = workers % len(self._lengths)
        return self._array[self._starts[sequences] + draws % self._lengths[sequences]]

    def _draw_one(self, worker: int, draw: int) -> float:
        sequence = worker % len(self._lengths)
        return self._list[self._starts.item(sequence) + draw % self._lengths.item(sequence)]


class _RandomSampler(Sampler):
    """Random seconds, made in blocks of `_BLOCK` draws of one worker; the latest block of each worker is kept.

    Memory is 256 bytes for each worker, however long the run. A block is always made whole and alone, since numpy's
    vector code may give other last bits at another position of a longer array.
    """

    def __init__(self, block: Callable[[np.random.Generator, int], Floats], num_workers: int, seed: int) -> None:
        super().__init__(num_workers)
        self._block = block
        self._held = np.full(num_workers, -1, dtype=np.int64)
        self._seconds = np.empty((num_workers, _BLOCK), dtype=np.float64)
        # One bit generator, moved by writing its state, is four times as fast as a new one for each block.
        self._bits = np.random.Philox(key=np.array([seed % 2**64, _SERVICE_TIMES], dtype=np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._state: typing.Any = self._bits.state

    def _draw(self, workers: Ints, draws: Ints) -> Floats:
        seconds = self._seconds[workers, draws & (_BLOCK - 1)]
        # One call may ask for a worker's draws of two blocks, so draws outside the held block are read one by one.
        for at in np.flatnonzero(self._held[workers] != draws >> _BLOCK_BITS).tolist():
            seconds[at] = self._draw_one(int(workers[at]), int(draws[at]))
        return seconds

    def _draw_one(self, worker: int, draw: int) -> float:
        block = draw >> _BLOCK_BITS
        if self._held.item(worker) != block:
            self._state["state"]["counter"][:] = (0, block, worker, 0)
            self._bits.state = self._state
            self._seconds[worker] = self._block(self._generator, worker)
            self._held[worker] = block
        return self._seconds.item(worker, draw & (_BLOCK - 1))


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Base of all models of service times: parameters only, in seconds; `on` gives the numbers.

    >>> Power(exponent=2).on(num_workers=4, seed=0).draw_one(worker=3, draw=0)
    16.0
    >>> Exponential(mean=2.0)
    Exponential(mean=2.0)
    >>> str(Exponential(mean=2.0))
    'exponential:mean=2.0'
    """

    name: ClassVar[str]
    """What the user types after ``--speeds``."""
    summary: ClassVar[str]
    """One line for ``--speeds help``."""

    def on(self, num_workers: int, seed: int) -> Sampler:
        """Return the service times of workers 0..num_workers - 1 under `seed`.

        Unless a model says otherwise, a worker's seconds do not depend on `num_workers`.

        Raises:
            UsageError: if the model cannot be had with so many workers.
        """
        if num_workers < 1:
            raise UsageError(f"num_workers={num_workers}: there must be at least 1 worker")
        return self._sampler(num_workers, seed)

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        raise TypeError(f"{type(self).__name__} does not define _sampler()")

    def __str__(self) -> str:
        return spell(self)


class _RandomSpeeds(Speeds):
    """Base of the models that draw."""

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        return _RandomSampler(self._block, num_workers, seed)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        """The next `_BLOCK` seconds of `worker`, all from `generator`."""
        raise TypeError(f"{type(self).__name__} does not define _block()")


@dataclasses.dataclass(frozen=True)
class Constant(Speeds):
    """Every gradient takes `seconds`.

    Raises:
        ValueError: unless `seconds` is positive and finite.
    """

    seconds: float = 1.0

    name: ClassVar[str] = "constant"
    summary: ClassVar[str] = "every gradient takes the same time"

    def __post_init__(self) -> None:
        _positive("seconds", self.seconds)

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        return _FixedSampler([float(self.seconds)] * num_workers)


@dataclasses.dataclass(frozen=True)
class Power(Speeds):
    """Worker i, from 0, takes seconds * (i + 1)^exponent: exponents 1, 0.5 and 2 are the literature's i, sqrt(i), i^2.

    Raises:
        ValueError: unless `seconds` is positive and both are finite.
    """

    exponent: float = 0.5
    seconds: float = 1.0

    name: ClassVar[str] = "power"
    summary: ClassVar[str] = "worker i, from 0, takes seconds * (i + 1)^exponent"

    def __post_init__(self) -> None:
        if not math.isfinite(self.exponent):
            raise ValueError(f"exponent must be a finite number, not {self.exponent}")
        _positive("seconds", self.seconds)

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        try:
            times = [self.seconds * (worker + 1.0) ** self.exponent for worker in range(num_workers)]
        except OverflowError:
            times = [math.inf]
        if not (min(times) > 0 and max(times) < math.inf):
            raise UsageError(
                f"--speeds {self} gives worker {num_workers - 1} a time that is no finite positive number;"
                " type an exponent nearer to 0"
            )
        return _FixedSampler(times)


@dataclasses.dataclass(frozen=True)
class TwoGroups(Speeds):
    """The last floor(share * N + 1/2) of the N workers take factor * seconds, the others `seconds`.

    Which workers are slow depends on the number of workers.

    Raises:
        ValueError: unless 0 < share <= 1 and `factor` and `seconds` are positive and finite.
    """

    share: float = 0.5
    factor: float = 10.0
    seconds: float = 1.0

    name: ClassVar[str] = "two_groups"
    summary: ClassVar[str] = "the last share of the workers is factor times slower"

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, not {self.share}; without slow workers: constant")
        _positive("factor", self.factor, "number")
        _positive("seconds", self.seconds)

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        num_slow = math.floor(self.share * num_workers + 0.5)
        if num_slow == 0:
            raise UsageError(
                f"--speeds {self} makes none of {num_workers} workers slow; type share={0.5 / num_workers:.3g} or more"
            )
        fast, slow = float(self.seconds), float(self.seconds * self.factor)
        return _FixedSampler([fast] * (num_workers - num_slow) + [slow] * num_slow)


@dataclasses.dataclass(frozen=True)
class Exponential(_RandomSpeeds):
    """Independent exponential times with the given mean in seconds: P(X > x) = exp(-x / mean).

    The literature's Exp(mu) has mean 1/mu.

    Raises:
        ValueError: unless `mean` is positive and finite.
    """

    mean: float = 1.0

    name: ClassVar[str] = "exponential"
    summary: ClassVar[str] = "exponential with this mean"

    def __post_init__(self) -> None:
        _positive("mean", self.mean)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        return self.mean * generator.standard_exponential(_BLOCK)


@dataclasses.dataclass(frozen=True)
class ShiftedExponential(_RandomSpeeds):
    """Independent times shift + E, E exponential with mean `mean`: the expected time is shift + mean seconds.

    Raises:
        ValueError: unless `shift` is at least 0, `mean` positive, and both finite.

    References:
        Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
        Distributed SGD, AISTATS 2018 (their Delta + exp(mu) has mean 1/mu after the shift).
    """

    shift: float = 1.0
    mean: float = 1.0

    name: ClassVar[str] = "shifted_exponential"
    summary: ClassVar[str] = "shift + exponential with this mean"

    def __post_init__(self) -> None:
        _not_negative("shift", self.shift)
        _positive("mean", self.mean)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        return self.shift + self.mean * generator.standard_exponential(_BLOCK)


@dataclasses.dataclass(frozen=True)
class HalfNormal(_RandomSpeeds):
    """Worker i, from 0, takes (offset + sqrt(i)) + |N(0, i + 1)| seconds; i + 1 is the *variance* of the normal.

    The expected time is offset + sqrt(i) + sqrt(2 (i + 1) / pi).

    Raises:
        ValueError: unless `offset` is at least 0 and finite.

    References:
        The experiments of Maranjyan, Tyurin, Richtárik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time
        Complexity, ICML 2025, as published in their scripts (offset 1, 6174 workers).
    """

    offset: float = 1.0

    name: ClassVar[str] = "half_normal"
    summary: ClassVar[str] = (
        "worker i, from 0, takes offset + sqrt(i) + |N(0, i + 1)|, as in the Ringmaster experiments"
    )

    def __post_init__(self) -> None:
        _not_negative("offset", self.offset)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        noise = np.abs(generator.standard_normal(_BLOCK))
        return (self.offset + math.sqrt(worker)) + math.sqrt(worker + 1) * noise


@dataclasses.dataclass(frozen=True)
class LogNormal(_RandomSpeeds):
    """Independent times mean * exp(sigma Z - sigma^2 / 2), Z standard normal; `mean` is the mean, not the median.

    Raises:
        ValueError: unless 0 < sigma <= 10 and `mean` is positive and finite. Above 10 the mean rests on draws that no
            run will ever see, P(Z > sigma) < 1e-23.
    """

    sigma: float = 0.5
    mean: float = 1.0

    name: ClassVar[str] = "log_normal"
    summary: ClassVar[str] = "log-normal with this mean; sigma is the standard deviation of the logarithm"

    def __post_init__(self) -> None:
        if not 0 < self.sigma <= 10:
            raise ValueError(f"sigma must be above 0 and at most 10, not {self.sigma}; without noise: constant")
        _positive("mean", self.mean)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        return self.mean * np.exp(self.sigma * generator.standard_normal(_BLOCK) - self.sigma**2 / 2)


@dataclasses.dataclass(frozen=True)
class Pareto(_RandomSpeeds):
    """Independent Pareto times of type I: P(X > x) = (least / x)^shape for x >= least = mean (shape - 1) / shape.

    Not the Lomax distribution (type II), which starts at 0 and which numpy calls pareto. The variance is infinite for
    shape <= 2, the default included.

    Raises:
        ValueError: unless `shape` is above 1 (else there is no mean), `mean` positive, and both finite.
    """

    shape: float = 2.0
    mean: float = 1.0

    name: ClassVar[str] = "pareto"
    summary: ClassVar[str] = "Pareto (type I) with this mean and tail exponent shape"

    def __post_init__(self) -> None:
        if not 1 < self.shape < math.inf:
            raise ValueError(f"shape must be above 1 and finite, not {self.shape}; at 1 or below the mean is infinite")
        _positive("mean", self.mean)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        least = self.mean * (self.shape - 1) / self.shape
        return least * np.exp(generator.standard_exponential(_BLOCK) / self.shape)


@dataclasses.dataclass(frozen=True)
class Outages(_RandomSpeeds):
    """A worker that fails and comes back: up for Exp(up) seconds, down for Exp(down) seconds (both means), in turn.

    A gradient needs `seconds` of up-time and keeps its progress through outages. So its time is
    seconds + D_1 + ... + D_K with K ~ Poisson(seconds / up) and D_j exponential with mean `down`; the expected time is
    seconds * (1 + down / up). Up-times are memoryless, so for a worker that is always busy and up at its first start
    the draws are independent and this is the Markov chain exactly. An idle worker does not fail here: the chain stands
    still while it waits.

    Raises:
        ValueError: unless all three are positive and finite and seconds / up is at most 1e9.
    """

    seconds: float = 1.0
    up: float = 20.0
    down: float = 10.0

    name: ClassVar[str] = "outages"
    summary: ClassVar[str] = (
        "seconds of work, interrupted by outages: up and down times are exponential with these means"
    )

    def __post_init__(self) -> None:
        for name in ("seconds", "up", "down"):
            _positive(name, getattr(self, name))
        if self.seconds / self.up > 1e9:
            raise ValueError(f"up={self.up} means more than 1e9 outages in one gradient; type a longer up time")

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        num_outages = generator.poisson(self.seconds / self.up, _BLOCK)
        return self.seconds + self.down * generator.standard_gamma(num_outages)  # a sum of K Exp(1); 0 for K = 0


@dataclasses.dataclass(frozen=True)
class Infinite(_RandomSpeeds):
    """A gradient takes `seconds`, or with this probability forever (inf): that worker never answers.

    Raises:
        ValueError: unless 0 < probability < 1 and `seconds` is positive and finite.
    """

    probability: float = 0.01
    seconds: float = 1.0

    name: ClassVar[str] = "infinite"
    summary: ClassVar[str] = "with this probability a gradient never arrives, else it takes seconds"

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise ValueError(f"probability must be above 0 and below 1, not {self.probability}")
        _positive("seconds", self.seconds)

    def _block(self, generator: np.random.Generator, worker: int) -> Floats:
        return np.where(generator.random(_BLOCK) < self.probability, math.inf, self.seconds)


@dataclasses.dataclass(frozen=True)
class Slow(Speeds):
    """One straggler: `worker` takes `factor` times as long as the others.

    The only relative model. On a virtual clock the others take `seconds`; in a real run every worker takes what its
    computation took, times `factor` for `worker`, and `seconds` plays no part.

    Raises:
        ValueError: unless `worker` is at least 0, `factor` at least 1, `seconds` positive, and all are finite.
    """

    worker: int = 0
    factor: float = 5.0
    seconds: float = 1.0

    name: ClassVar[str] = "slow"
    summary: ClassVar[str] = "one worker is factor times slower; in real runs relative to its own computation"

    def __post_init__(self) -> None:
        if self.worker < 0:
            raise ValueError(f"worker must be at least 0, not {self.worker}")
        if not 1 <= self.factor < math.inf:
            raise ValueError(f"factor must be at least 1 and finite, not {self.factor}; a worker can only be slowed")
        _positive("seconds", self.seconds)

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        if self.worker >= num_workers:
            raise UsageError(
                f"--speeds {self}: with {num_workers} worker{'s' if num_workers > 1 else ''} there is no worker"
                f" {self.worker}; type worker=0{f' to worker={num_workers - 1}' if num_workers > 1 else ''}"
            )
        times = [float(self.seconds)] * num_workers
        times[self.worker] *= self.factor
        return _SlowSampler(times, self.worker, self.factor)


@dataclasses.dataclass(frozen=True)
class Trace(Speeds):
    """The measured times of a real run, read from the folder `run` (its events.jsonl) by `on`.

    An arrival took pull_seconds + compute_seconds + push_seconds, or, with `turnaround`, flight_seconds (where the run
    has them) + apply_seconds: all until its worker can start again, the server's part included. Local steps share their
    arrival's time equally. A worker's arrivals in recorded order are its draws.
    Worker w takes those of the recorded worker at place w modulo their number (in increasing order), draw k those of
    arrival k modulo the worker's number of arrivals. Gradients that the run abandoned never arrived and are missing. So
    the trace of a rule that stops slow gradients is too fast. Record with a rule that lets every worker finish.

    Raises:
        ValueError: if `run` is empty or holds a comma, which would end the parameter.
    """

    run: str
    turnaround: bool = False

    name: ClassVar[str] = "trace"
    summary: ClassVar[str] = "the measured times of a real run, from its run folder"

    def __post_init__(self) -> None:
        if not self.run or "," in self.run:
            raise ValueError(f"run must be the path of a run folder, without a comma, not {self.run!r}")

    def _seconds(self, record: Mapping[str, Any]) -> float:
        worker = sum(_measured(record.get(f"{part}_seconds")) for part in ("pull", "compute", "push"))
        if not self.turnaround:
            return worker
        flight = _measured(record.get("flight_seconds", 0.0))
        return (flight if flight > 0 else worker) + _measured(record.get("apply_seconds", 0.0))

    def _sampler(self, num_workers: int, seed: int) -> Sampler:
        recorded: dict[int, list[float]] = {}
        events = Path(self.run) / "events.jsonl"
        try:
            for record in read_events(events):
                if record.get("kind") != "arrival":
                    continue
                worker = record.get("worker")
                seconds = self._seconds(record)
                if not isinstance(worker, int) or not 0 < seconds < math.inf:
                    raise ValueError(
                        f"{events.name} has an arrival (dispatch {record.get('dispatch')}) without worker or measured"
                        " pull, compute and push seconds"
                    )
                steps = record.get("num_local_steps", 1)
                recorded.setdefault(worker, []).extend([seconds / steps] * steps)
        except OSError as error:
            raise UsageError(
                f"--speeds {self}: cannot read {events} ({error.strerror}); type the folder of a finished run"
            ) from None
        except ValueError as error:
            raise UsageError(
                f"--speeds {self}: {error}; type the folder of a run whose workers were measured"
            ) from None
        if not recorded:
            raise UsageError(f"--speeds {self}: {events} has no arrivals; type the folder of a run that has trained")
        return _TraceSampler([recorded[worker] for worker in sorted(recorded)], num_workers)


ALL: tuple[Speeds, ...] = (
    Constant(),
    Power(),
    TwoGroups(),
    Exponential(),
    ShiftedExponential(),
    HalfNormal(),
    LogNormal(),
    Pareto(),
    Outages(),
    Infinite(),
    Slow(),
)

_BY_NAME: dict[str, type[Speeds]] = {**{speeds.name: type(speeds) for speeds in ALL}, Trace.name: Trace}


KIND = Kind("speeds", "speeds", "--speeds", first_is_positional=True)


def parse_speeds(text: str) -> Speeds:
    """Return the model that ``NAME[:key=value,...]`` means; a first value without a key is the first parameter.

    >>> parse_speeds("exponential:1.5")
    Exponential(mean=1.5)
    >>> parse_speeds("slow:worker=2,factor=3")
    Slow(worker=2, factor=3.0, seconds=1.0)

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested) or a value out of range.
    """
    return KIND.read(text, _BY_NAME)


def describe_speeds() -> str:
    """The text of ``--speeds help``: every model with its one line and its parameters."""
    heading = "speeds (--speeds NAME[:key=value,...]; a first value without key= is the first parameter):"
    return "\n".join([heading, *describe(_BY_NAME, width=19)])


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between the workers and the server: a vector takes bytes / min(worker's link, server's link) seconds.

    The server's link carries one transfer at a time. Every gradient costs two of them (parameters down, gradient up),
    so with transfers at the server's speed at most server_bandwidth / (2 bytes_per_vector) gradients per second pass,
    however many workers there are. The virtual clock keeps the queue in front of that link. This class gives only the
    time of one transfer once it has begun.

    >>> network = Network(bytes_per_vector=4e6, worker_bandwidth=(1e8, 5e7), server_bandwidth=1e9)
    >>> [network.transfer_seconds(worker) for worker in range(3)]
    [0.04, 0.08, 0.04]

    Args:
        bytes_per_vector: of the parameters, and of a gradient.
        worker_bandwidth: bytes/second of worker i's link, i modulo the length; inf for a link that is no bottleneck.
        server_bandwidth: bytes/second of the server's link, or inf.

    Raises:
        ValueError: unless all are positive, the bytes finite and one link at least finite.
    """

    bytes_per_vector: float
    worker_bandwidth: tuple[float, ...]
    server_bandwidth: float

    def __post_init__(self) -> None:
        _positive("bytes", self.bytes_per_vector, "number of bytes")
        if not self.worker_bandwidth:
            raise ValueError("worker needs the bytes/second of at least one link")
        links = {"worker": self.worker_bandwidth, "server": (self.server_bandwidth,)}
        for name, bandwidths in links.items():
            for bandwidth in bandwidths:
                if not bandwidth > 0:
                    raise ValueError(f"{name} must be a positive number of bytes/second, not {bandwidth}")
        if min(*self.worker_bandwidth, self.server_bandwidth) == math.inf:
            raise ValueError("all links are infinitely fast; leave the network out")

    def transfer_seconds(self, worker: int) -> float:
        """Return the seconds that one vector takes between `worker` and the server, either way, without queueing."""
        link = self.worker_bandwidth[worker % len(self.worker_bandwidth)]
        return self.bytes_per_vector / min(link, self.server_bandwidth)

    def __str__(self) -> str:
        worker = "/".join(str(bandwidth) for bandwidth in self.worker_bandwidth)
        return f"bytes={self.bytes_per_vector},worker={worker},server={self.server_bandwidth}"


def parse_network(text: str) -> Network:
    """Return the network that ``bytes=B,worker=W[/W...],server=S`` means, in bytes and bytes/second.

    >>> parse_network("bytes=4e6,worker=1e8/5e7,server=1e9")
    Network(bytes_per_vector=4000000.0, worker_bandwidth=(100000000.0, 50000000.0), server_bandwidth=1000000000.0)

    Raises:
        UsageError: for a parameter that is unknown, missing, given twice or out of range.
    """
    known = ("bytes", "worker", "server")
    example = "type --network bytes=4e6,worker=1e8,server=1e9"
    values: dict[str, tuple[float, ...]] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in known:
            raise UsageError(f"network has no parameter {key!r}{nearest(key, known)}; it takes {', '.join(known)}")
        if key in values:
            raise UsageError(f"network parameter {key!r} is given twice in {text!r}; keep one")
        if not equals:
            raise UsageError(f"network parameter {key!r} has no value; {example}")
        try:
            values[key] = tuple(float(number) for number in (value.split("/") if key == "worker" else [value]))
        except ValueError:
            raise UsageError(f"network parameter {key}={value!r} is not a number; {example}") from None
    for key in known:
        if key not in values:
            raise UsageError(f"network needs {key}; {example}")
    try:
        return Network(values["bytes"][0], values["worker"], values["server"][0])
    except ValueError as error:
        raise UsageError(f"--network {text}: {error}") from None
