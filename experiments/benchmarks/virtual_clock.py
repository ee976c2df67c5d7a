"""Speed and memory of the virtual clock.

    python experiments/benchmarks/virtual_clock.py [--seconds 2000] [--rounds 1]

It measures three things. First, CPU seconds per arm on the published quadratic of Ringmaster ASGD, with dimension 1729
and 6174 workers. (Target: under 15 for 2,000 virtual seconds.) Second, the cost per event against the number of
workers, start-up not counted, of the rules asynchronous and synchronous. (It should grow like the logarithm.) Third,
peak memory with 100,000 workers on a 100-dimensional quadratic. (Target: under 2 GiB.) Seconds are CPU time of one
process, so other work on the machine disturbs them little."""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time

import torch

from asyncsgd.rules import Asynchronous, DelayAdaptive, KSync, Rennala, Ringmaster, Synchronous
from asyncsgd.rules.base import Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.simulation.problems import Quadratic, Tridiagonal
from asyncsgd.simulation.simulate import simulate
from asyncsgd.simulation.speeds import Exponential, HalfNormal

ARMS: tuple[tuple[Rule, float], ...] = (
    (DelayAdaptive(), 5.0**-5),
    (Ringmaster(threshold=6, stops=True), 0.25),
    (Rennala(batch=6), 1.0),
    (KSync(quorum=6), 1.0),
    (KSync(quorum=1), 1.0),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of the virtual clock.", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=2000.0, help="virtual seconds of the quadratic (2000)")
    parser.add_argument("--rounds", type=int, default=1, help="repetitions of each arm, interleaved (1)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    measure_arms(arguments.seconds, arguments.rounds)
    measure_events(Asynchronous(), (10, 100, 1_000, 10_000, 100_000))
    measure_events(Synchronous(), (250, 2_000, 10_000))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory of the process, 100,000 workers included: {peak:.0f} MiB (target: under 2048)")
    return 0


def measure_arms(seconds: float, rounds: int) -> None:
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for rule, rate in ARMS:
            began = time.process_time()
            done = simulate(
                rule,
                Tridiagonal().on(6174, 0),
                HalfNormal().on(6174, 0),
                num_workers=6174,
                learning_rate=rate,
                budget=Budget(seconds=seconds),
            )
            taken.setdefault(str(rule), []).append(time.process_time() - began)
            print(f"{rule!s:42} {taken[str(rule)][-1]:6.1f} s   {done.version} updates", flush=True)
    for name, each in taken.items():
        spread = f"range {min(each):.1f} to {max(each):.1f}"
        print(f"{name:42} median {statistics.median(each):6.1f} s of {len(each)}, {spread}")


def measure_events(rule: Rule, numbers: tuple[int, ...]) -> None:
    """Cost per event once everybody has started: the difference of two runs that differ in their length only."""
    for number in numbers:
        short, long = (cpu_seconds(rule, number, samples) for samples in (number, number + 50_000))
        print(
            f"{rule!s:12} {number:>7} workers  {(long - short) / 50_000 * 1e6:6.1f} us per event"
            f"   (log2 of the workers: {math.log2(number):.1f})",
            flush=True,
        )


def cpu_seconds(rule: Rule, num_workers: int, samples: int) -> float:
    began = time.process_time()
    simulate(
        rule,
        Quadratic(noise=0.0).on(num_workers, 0),
        Exponential().on(num_workers, 0),
        num_workers=num_workers,
        learning_rate=1e-6,
        budget=Budget(samples=samples),
        evaluations=1,
    )
    return time.process_time() - began


if __name__ == "__main__":
    sys.exit(main())
