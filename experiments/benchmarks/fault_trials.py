"""The trials of `faults`: which fault meets which run at which moment, and what docs/running.md promises of it."""

from __future__ import annotations

import dataclasses
import itertools
import random

from asyncsgd.records.events import DONE, FAILED, INTERRUPTED

STOPS = ("SIGINT", "SIGTERM", "SIGHUP")
SEVERAL, CONSOLE = "several stops", "console"
FAULTS = ("SIGKILL", *STOPS, SEVERAL, "SIGSTOP", CONSOLE)
MODES = ("single", "sync", "async", "hogwild", "virtual")
MOMENTS = ("any time", "first evaluation", "training", "later evaluation", "saving")
PYTHON, TORCHRUN_ONE, TORCHRUN_RANKS = "python", "torchrun", "torchrun of 2 ranks"
RULES = ("asynchronous", "synchronous", "ringmaster:threshold=2,stops=true")
FILE, TERMINAL, PIPE = "> file", "terminal", "| cat"
LOST_CONSOLES = (PIPE, "| head -n 1", ">&- 2>&- <&-", "> /dev/full 2> /dev/full", "PYTHONIOENCODING=ascii")
"""Those on which a run cannot say all. The reader of `PIPE` is killed at the trial's moment."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run, and what is done to it."""

    number: int
    fault: str
    target: str
    """``leader``, ``worker``, ``group`` (everything that was started) or ``agent`` (torchrun itself)."""
    mode: str
    launcher: str
    transport: str
    rule: str
    moment: str
    share: float
    """When within the moment, in [0, 1)."""
    gap_seconds: float | None
    """Until SIGCONT, or until the next stop; None: that one comes while the model is being saved."""
    train_seconds: float
    slow: bool
    """Gradients take half a second and only the last evaluation follows the first, so that a kill may lose much."""
    console: str
    stops: tuple[str, ...]
    """The signals that ask the run to stop, in order."""

    def __str__(self) -> str:
        gap = "" if self.gap_seconds is None else f" {self.gap_seconds:.2f} s"
        fault = "+".join(self.stops) or self.fault
        console = "" if self.console == FILE else f" on {self.console}"
        details = f" {self.transport} {self.rule}" if self.mode == "async" else ""
        when = f"{self.moment} {self.share:.2f}{' slow' if self.slow else ''}"
        return f"{fault}{gap}{console} to {self.target}: {self.launcher}, {self.mode}{details}, {when}"

    @property
    def may_leave(self) -> bool:
        """Whether it kills the leader, or torchrun above it: nobody is left to write and to clean up."""
        return self.fault == "SIGKILL" and self.target != "worker"

    @property
    def has_long_evaluations(self) -> bool:
        return self.moment.endswith("evaluation")

    @property
    def num_evaluations(self) -> int:
        return 1 if self.slow else 3 if self.has_long_evaluations else 12


def plan(num_trials: int, seed: int) -> list[Trial]:
    """The trials 0, 1, ...: in 35 of them every fault meets every mode once, and every lost console meets a mode. A
    longer plan begins with the shorter.
    """
    draw = random.Random(seed)
    drawn: list[tuple[str, str, str]] = []
    while len(drawn) < num_trials:
        consoles = dict(zip(MODES, draw.sample(LOST_CONSOLES, len(LOST_CONSOLES)), strict=True))
        pairs = draw.sample(list(itertools.product(FAULTS, MODES)), len(FAULTS) * len(MODES))
        drawn += [(fault, mode, consoles[mode] if fault == CONSOLE else FILE) for fault, mode in pairs]
    return [draw_trial(random.Random(f"{seed} {number}"), number, *drawn[number]) for number in range(num_trials)]


def draw_trial(draw: random.Random, number: int, fault: str, mode: str, console: str) -> Trial:
    alone = mode in ("single", "virtual")
    launcher = draw.choice([PYTHON, PYTHON, TORCHRUN_ONE, PYTHON if alone else TORCHRUN_RANKS])
    workers = [] if alone or fault in (SEVERAL, CONSOLE) else ["worker"]
    target = draw.choice(["leader", "group", *workers, *([] if launcher == PYTHON else ["agent"])])
    moment = draw.choice([*MOMENTS, "any time"])
    gaps = {"SIGSTOP": draw.uniform(0.5, 3.0), SEVERAL: draw.choice([None, 10 ** draw.uniform(-2.0, 0.1)])}
    several = tuple(draw.choices(STOPS, k=draw.choice([2, 2, 3])))
    stops = several if fault == SEVERAL else (fault,) if fault in STOPS else ()
    if stops[:1] == ("SIGHUP",) and target == "group":
        console = draw.choice([TERMINAL, TERMINAL, FILE])
    transport = draw.choice(["shared_memory", "process_group"]) if mode == "async" else "auto"
    rule = draw.choice(RULES) if mode == "async" else "asynchronous"
    seconds = 1.0 if moment == "saving" else draw.uniform(3.0, 4.0)
    slow = not alone and fault == "SIGKILL" and target != "worker" and moment in ("training", "any time")
    share = 0.5 + draw.random() / 2 if slow else draw.random()
    details = (transport, rule, "training" if slow else moment, share, gaps.get(fault), seconds, slow, console, stops)
    return Trial(number, fault, target, mode, launcher, *details)


def promised(trial: Trial) -> tuple[set[str | None], int | None]:
    """The statuses a run may end with that the fault reaches in mid-training (None: no summary), and the exit code
    (None: any; torchrun has its own).
    """
    torchrun = trial.launcher != PYTHON
    if trial.may_leave:
        return {None, DONE, FAILED, INTERRUPTED}, None
    if trial.fault in ("SIGSTOP", CONSOLE):
        return {DONE}, 0
    if trial.target != "worker":
        return {INTERRUPTED}, None if torchrun else 130
    if trial.launcher == TORCHRUN_RANKS:  # torchrun ends all of its ranks when one ends
        return {DONE, FAILED, INTERRUPTED}, None
    if trial.fault == "SIGKILL" and trial.mode == "sync":
        return {FAILED}, None if torchrun else 1
    return {DONE}, 0
