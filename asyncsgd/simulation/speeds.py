"""How long a gradient takes on each worker, in seconds, and random numbers at any place of a stream.

A model of service times is a frozen dataclass of parameters. `Speeds.on` binds it to a number of workers and a seed.
The `Sampler` that it returns gives the seconds of draw k of worker w: a pure function of (seed, worker, draw). So two
rules on one seed meet identical speeds (common random numbers), on a virtual clock as well as in a real run that is
slowed down.

`ALL` holds an example of each model that needs no file, for tests and for ``--times help``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, Philox

from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_events
from asyncsgd.settings.choices import Choices, Named, parameter

Floats = npt.NDArray[np.float64]

# Laid out as in asyncsgd.data.random, purpose << 32 | stream, and none of the purposes there: batches, masks and
# service times of one seed have separate streams.
_SERVICE_TIMES = 11 << 32
BLOCK = 32
"""Draws of one worker that are made together. It is part of the streams: another number gives other seconds."""


class Streams:
    """A generator that can be placed at any (worker, position, part); up to 2^64 draws do not reach the next place.

    Setting the state is several times cheaper than making a generator, which also asks the system for entropy.
    """

    def __init__(self, seed: int, purpose: int) -> None:
        key = np.array([seed % 2**64, purpose], dtype=np.uint64)
        self._bits = Philox(key=key)
        self._generator = Generator(self._bits)
        self._state: Any = self._bits.state

    def at(self, worker: int = 0, position: int = 0, part: int = 0) -> Generator:
        """Return the generator, valid until the next call."""
        self._state["state"]["counter"][:] = (0, position, worker, part)
        self._bits.state = self._state
        return self._generator


def in_blocks(num_workers: int, size: int, draw: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    """Value k of worker w, in any order: value k modulo `size` of ``draw(w, k // size)``, an array of `size` values.

    Two blocks a worker are kept.
    """

    @functools.lru_cache(2 * num_workers)
    def block(worker: int, number: int) -> list[Any]:
        values: list[Any] = draw(worker, number).tolist()
        return values

    def value(worker: int, index: int) -> Any:
        number, place = divmod(index, size)
        return block(worker, number)[place]

    return value


class Sampler:
    """The service times of workers 0 to N - 1, in blocks; what `Speeds.on` returns.

    >>> Sampler(2, lambda worker, block: 1.5 + worker).draw_one(1, 70)
    2.5

    Args:
        num_workers: N, how many.
        block: of (worker, k), the seconds of draws `BLOCK` k to `BLOCK` k + `BLOCK` - 1 or one number for all of them;
            inf where the worker never answers.
        factors: how many times as long as its computation a real gradient of each worker takes; None: it takes the
            seconds that are drawn.
    """

    def __init__(
        self,
        num_workers: int,
        block: Callable[[int, int], float | Sequence[float] | Floats],
        factors: Sequence[float] | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._factors = factors

        def whole_block(worker: int, number: int) -> Floats:
            return np.full(BLOCK, block(worker, number), float)

        self.draw_one = in_blocks(num_workers, BLOCK, whole_block)
        """``draw_one(worker, draw)``: the seconds of the gradient that a worker starts as its number `draw`, from 0.

        A pure function, in any order. `draw` is neither a version nor a dispatch number.
        """

    def stretched(self, worker: int, draw: int, computed_seconds: float) -> float:
        """Return how long a *real* gradient is to take in all, when its computation took `computed_seconds`.

        A worker can be held back, not sped up: max(computed_seconds, drawn seconds); the relative model `Slow` gives
        computed_seconds * factor instead. The caller waits for the difference; inf: the worker never answers.
        """
        if self._factors is not None:
            return computed_seconds * self._factors[worker]
        drawn: float = self.draw_one(worker, draw)
        return max(computed_seconds, drawn)


@dataclasses.dataclass(frozen=True)
class Speeds(Named):
    """Base of all models of service times: parameters only, in seconds; `on` gives the numbers.

    >>> Power(exponent=2).on(num_workers=4, seed=0).draw_one(3, 0)
    16.0
    >>> str(Exponential(mean=2.0))
    'exponential:mean=2.0'
    """

    def on(self, num_workers: int, seed: int) -> Sampler:
        """Return the service times of workers 0..num_workers - 1 under `seed`; by default they do not depend on how
        many there are.

        Raises:
            UsageError: if the model cannot be had with so many workers.
        """
        streams = Streams(seed, _SERVICE_TIMES)

        def block(worker: int, number: int) -> float | Floats:
            return self.draw(streams.at(worker, number), BLOCK, worker)

        return Sampler(num_workers, block)

    def draw(self, generator: Generator, n: int, worker: int) -> float | Floats:
        """Return the next `n` seconds of `worker`, `(n,)` or one number for all of them, all from `generator`.

        A block is always drawn whole and alone: numpy's vector code may give other last bits at another position of
        a longer array.
        """
        raise TypeError(f"{type(self).__name__} does not define draw()")


@dataclasses.dataclass(frozen=True)
class Constant(Speeds):
    """Every gradient takes `seconds`."""

    seconds: float = parameter(1.0, above=0)
    """Of every gradient."""

    def draw(self, generator: Generator, n: int, worker: int) -> float:
        return self.seconds


@dataclasses.dataclass(frozen=True)
class Power(Speeds):
    """Worker i, from 0, takes seconds * (i + 1)^exponent: 1, 0.5 and 2 are the literature's i, sqrt(i) and i^2."""

    exponent: float = parameter(0.5, at_least=-50, at_most=50)
    """Of i + 1; 0: all workers are equal."""
    seconds: float = parameter(1.0, above=0)
    """Those of worker 0."""

    def draw(self, generator: Generator, n: int, worker: int) -> float:
        return self.seconds * (worker + 1.0) ** self.exponent


@dataclasses.dataclass(frozen=True)
class TwoGroups(Speeds):
    """The last floor(share * N + 1/2) of the N workers take factor * seconds, the others `seconds`."""

    share: float = parameter(0.5, above=0, at_most=1)
    """Of the workers that are slow, in (0, 1]."""
    factor: float = parameter(10.0, above=0)
    """How many times as long they take."""
    seconds: float = parameter(1.0, above=0)
    """Those of the others."""

    def on(self, num_workers: int, seed: int) -> Sampler:
        num_slow = math.floor(self.share * num_workers + 0.5)
        if num_slow == 0:
            least = math.ceil(0.5 / num_workers * 1e4) / 1e4
            raise UsageError(f"--times {self} makes none of {num_workers} workers slow; type share={least:g} or more")
        first_slow = num_workers - num_slow
        slow = self.seconds * self.factor
        return Sampler(num_workers, lambda worker, block: slow if worker >= first_slow else self.seconds)


@dataclasses.dataclass(frozen=True)
class Exponential(Speeds):
    """Independent exponential times with the given mean in seconds: P(X > x) = exp(-x / mean).

    The literature's Exp(mu) has mean 1/mu.
    """

    mean: float = parameter(1.0, above=0)
    """In seconds."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        return self.mean * generator.standard_exponential(n)


@dataclasses.dataclass(frozen=True)
class ShiftedExponential(Speeds):
    """Independent times shift + E, E exponential: the expected time is shift + mean seconds.

    Dutta, Joshi, Ghosh, Dube, Nagpurkar: Slow and Stale Gradients Can Win the Race: Error-Runtime Trade-offs in
    Distributed SGD, AISTATS 2018 (their Delta + exp(mu) has mean 1/mu after the shift).
    """

    shift: float = parameter(1.0, at_least=0)
    """The least time, in seconds."""
    mean: float = parameter(1.0, above=0)
    """Of E, in seconds."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        return self.shift + self.mean * generator.standard_exponential(n)


@dataclasses.dataclass(frozen=True)
class HalfNormal(Speeds):
    """Worker i, from 0, takes (offset + sqrt(i)) + abs(N(0, i + 1)) seconds; i + 1 is the *variance* of the normal.

    The expected time is offset + sqrt(i) + sqrt(2 (i + 1) / pi).

    The experiments of Maranjyan, Tyurin, Richtárik: Ringmaster ASGD: The First Asynchronous SGD with Optimal Time
    Complexity, ICML 2025, as published in their scripts (offset 1, 6174 workers).
    """

    offset: float = parameter(1.0, at_least=0)
    """In seconds."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        least = self.offset + math.sqrt(worker)
        deviation = math.sqrt(worker + 1)
        return least + deviation * np.abs(generator.standard_normal(n))


@dataclasses.dataclass(frozen=True)
class LogNormal(Speeds):
    """Independent times mean * exp(sigma Z - sigma^2 / 2), Z standard normal; `mean` is the mean, not the median.

    With sigma above 10 the mean would rest on draws that no run will ever see, P(Z > sigma) < 1e-23.
    """

    sigma: float = parameter(0.5, above=0, at_most=10)
    """The standard deviation of the logarithm."""
    mean: float = parameter(1.0, above=0)
    """In seconds."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        logarithms = self.sigma * generator.standard_normal(n) - self.sigma**2 / 2
        return self.mean * np.exp(logarithms)


@dataclasses.dataclass(frozen=True)
class Pareto(Speeds):
    """Independent Pareto times of type I: P(X > x) = (least / x)^shape for x >= least = mean (shape - 1) / shape.

    Not the Lomax distribution (type II), which starts at 0 and which numpy calls pareto. The variance is infinite for
    shape <= 2, the default included; the mean would be for shape <= 1.
    """

    shape: float = parameter(2.0, above=1)
    """The exponent of the tail, above 1."""
    mean: float = parameter(1.0, above=0)
    """In seconds."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        least = self.mean * (self.shape - 1) / self.shape
        return least * np.exp(generator.standard_exponential(n) / self.shape)


@dataclasses.dataclass(frozen=True)
class Outages(Speeds):
    """A worker that fails and comes back: up for Exp(up) seconds, down for Exp(down) seconds (both means), in turn.

    A gradient needs `seconds` of up-time and keeps its progress through outages. So its time is
    seconds + D_1 + ... + D_K with K ~ Poisson(seconds / up) and D_j exponential with mean `down`; the expected time is
    seconds * (1 + down / up). Up-times are memoryless, so for a worker that is always busy and up at its first start
    the draws are independent and this is the Markov chain exactly. The chain stands still while a worker is idle.
    """

    seconds: float = parameter(1.0, above=0)
    """Up-time that a gradient needs."""
    up: float = parameter(20.0, above=0)
    """Mean seconds from a repair to the next failure."""
    down: float = parameter(10.0, above=0)
    """Mean seconds from a failure to its repair."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        num_outages = generator.poisson(self.seconds / self.up, n)
        exponentials = generator.standard_gamma(num_outages)  # a sum of K Exp(1); 0 for K = 0
        return self.seconds + self.down * exponentials


@dataclasses.dataclass(frozen=True)
class Infinite(Speeds):
    """A gradient takes `seconds`, or with this probability forever (inf): that worker never answers."""

    probability: float = parameter(0.01, above=0, below=1)
    """That a gradient takes forever, in (0, 1)."""
    seconds: float = parameter(1.0, above=0)
    """Of every other gradient."""

    def draw(self, generator: Generator, n: int, worker: int) -> Floats:
        is_lost = generator.random(n) < self.probability
        return np.where(is_lost, math.inf, self.seconds)


@dataclasses.dataclass(frozen=True)
class Slow(Speeds):
    """One straggler: `worker` takes `factor` times as long as the others.

    The only relative model. On a virtual clock the others take `seconds`; in a real run every worker takes what its
    computation took, times `factor` for `worker`, and `seconds` plays no part.
    """

    worker: int = parameter(0, at_least=0)
    """The number of the slow worker, from 0."""
    factor: float = parameter(5.0, at_least=1)
    """How many times as long it takes, 1 or more."""
    seconds: float = parameter(1.0, above=0)
    """Of a gradient of the others, on a virtual clock."""

    def on(self, num_workers: int, seed: int) -> Sampler:
        if self.worker >= num_workers:
            raise UsageError(f"--times {self}: there is no such worker; type worker=0 to worker={num_workers - 1}")
        factors = [1.0] * num_workers
        factors[self.worker] = self.factor
        return Sampler(num_workers, lambda worker, block: self.seconds * factors[worker], factors)


@dataclasses.dataclass(frozen=True)
class Trace(Speeds):
    """The measured times of a real run, from its folder `run`.

    An arrival took pull_seconds + compute_seconds + push_seconds, or, with `turnaround`, flight_seconds (where the run
    has them) + apply_seconds: all until its worker can start again, the server's part included. Local steps share their
    arrival's time equally. Worker w takes the times of the recorded worker at place w modulo their number (in
    increasing order), draw k those of its arrival k modulo their number. Gradients that the run abandoned never arrived
    and are missing. So the trace of a rule that stops slow gradients is too fast.
    """

    run: str = parameter()
    """The folder of the run."""
    turnaround: bool = parameter(False)
    """Whether the server's part counts too."""

    def on(self, num_workers: int, seed: int) -> Sampler:
        recorded: dict[int, list[float]] = {}
        try:
            for record in read_events(Path(self.run) / "events.jsonl"):
                if record.get("kind") == "arrival":
                    num_steps = record.get("num_local_steps", 1)
                    step_seconds = self._seconds(record) / num_steps
                    recorded.setdefault(record["worker"], []).extend([step_seconds] * num_steps)
            if not recorded:
                raise ValueError("no arrivals")
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"--times {self}: {error}; type the folder of a run that has trained") from None
        sequences = [np.array(recorded[worker]) for worker in sorted(recorded)]

        def block(worker: int, number: int) -> Floats:
            sequence = sequences[worker % len(sequences)]
            draws = number * BLOCK + np.arange(BLOCK)
            return sequence[draws % len(sequence)]

        return Sampler(num_workers, block)

    def _seconds(self, record: dict[str, Any]) -> float:
        """How long the gradient of an arrival took."""
        parts = [float(record.get(f"{part}_seconds", math.nan)) for part in ("pull", "compute", "push")]
        seconds = sum(parts)
        if self.turnaround:
            flight_seconds = record.get("flight_seconds") or seconds
            seconds = flight_seconds + record.get("apply_seconds", 0.0)
        if not 0 < seconds < math.inf:
            raise ValueError(f"dispatch {record.get('dispatch')} took {seconds} seconds")
        return seconds


_RANDOM = (Exponential(), ShiftedExponential(), HalfNormal(), LogNormal(), Pareto(), Outages(), Infinite())
ALL: tuple[Speeds, ...] = (Constant(), Power(), TwoGroups(), *_RANDOM, Slow())
_BY_NAME: dict[str, type[Speeds]] = {speeds.name: type(speeds) for speeds in ALL}
_BY_NAME[Trace.name] = Trace
_CHOICES = Choices("speeds", "speeds", "--times", _BY_NAME, first_is_positional=True)


def parse_speeds(text: str) -> Speeds:
    """Return the speeds that ``NAME[:key=value,...]`` are, as ``--times`` takes them.

    >>> parse_speeds("slow:worker=0,factor=5")
    Slow(worker=0, factor=5.0, seconds=1.0)

    Args:
        text: such as ``exponential:mean=2``; ``asyncsgd train masked_lm --times help`` lists what there is.

    Raises:
        UsageError: for an unknown name or parameter (the nearest one is suggested), or a value out of range.
    """
    return _CHOICES.read(text)


def describe_speeds() -> str:
    """The text of ``--times help``."""
    return _CHOICES.help()


@dataclasses.dataclass(frozen=True)
class Network:
    """Links between the workers and the server: a vector takes bytes / min(worker's link, server's link) seconds.

    The server's link carries one transfer at a time. Every gradient costs two of them (parameters down, gradient up),
    so with transfers at the server's speed at most server_bandwidth / (2 bytes_per_vector) gradients per second pass,
    however many workers there are. The virtual clock keeps the queue in front of that link.

    >>> network = Network(bytes_per_vector=4e6, worker_bandwidth=(1e8, 5e7), server_bandwidth=1e9)
    >>> [network.transfer_seconds(worker) for worker in range(3)]
    [0.04, 0.08, 0.04]

    Args:
        bytes_per_vector: the bytes of the parameters, which are also those of a gradient.
        worker_bandwidth: bytes/second of worker i's link, i modulo the length; inf for a link that is no bottleneck.
        server_bandwidth: bytes/second of the server's link, or inf.
    """

    bytes_per_vector: float
    worker_bandwidth: tuple[float, ...]
    server_bandwidth: float

    def __post_init__(self) -> None:
        links = (*self.worker_bandwidth, self.server_bandwidth)
        are_positive = self.bytes_per_vector > 0 and all(link > 0 for link in links)
        are_finite = self.bytes_per_vector < math.inf and min(links) < math.inf
        if not (are_positive and are_finite):
            raise ValueError("bytes and bytes/second must be more than 0, and one link at least finite")

    def transfer_seconds(self, worker: int) -> float:
        """Return the seconds that one vector takes between `worker` and the server, either way, without queueing."""
        link = self.worker_bandwidth[worker % len(self.worker_bandwidth)]
        return self.bytes_per_vector / min(link, self.server_bandwidth)

    def __str__(self) -> str:
        worker = "/".join(map(str, self.worker_bandwidth))
        return f"bytes={self.bytes_per_vector},worker={worker},server={self.server_bandwidth}"


def parse_network(text: str) -> Network:
    """Return the network that ``bytes=B,worker=W[/W...],server=S`` means, in bytes and bytes/second.

    >>> parse_network("bytes=4e6,worker=1e8/5e7,server=1e9")
    Network(bytes_per_vector=4000000.0, worker_bandwidth=(100000000.0, 50000000.0), server_bandwidth=1000000000.0)

    Raises:
        UsageError: for a parameter that is unknown, missing or out of range.
    """
    try:
        given = dict(part.split("=") for part in text.split(","))
        if given.keys() != {"bytes", "worker", "server"}:
            raise ValueError("it takes bytes, worker and server")
        links = tuple(map(float, given["worker"].split("/")))
        return Network(float(given["bytes"]), links, float(given["server"]))
    except ValueError as error:
        raise UsageError(f"--network {text}: {error}; type --network bytes=4e6,worker=1e8,server=1e9") from None
