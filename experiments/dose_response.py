"""At which fixed delay does asynchronous training lose its wall-clock advantage over synchronous training?

    python experiments/dose_response.py

A dose-response experiment: gradients exactly tau = 0, 1, 2, 4, 8, 16 updates old, against synchronous rounds of tau + 1
workers, the learning rate tuned anew at every tau for both. Tuning, runs and seeds are a sweep
(``experiments/configs/dose_response.yaml``), so the same command goes on where it was stopped.

A fixed delay has no clock of its own. The time model: tau + 1 equal asynchronous workers that never wait, whose k-th
arrival is the k-th update, against synchronous training with as many workers, under the same declared speeds. The times
of arrivals come from the library's virtual clock with the rules `asynchronous` and `synchronous`. The problem has one
dimension, since arrival times depend on neither the problem nor the parameters. The losses come from the sweep.

With --measured, on a quiet machine, real processes run too. Each delay whose tau + 1 workers have cores is run against
synchronous training with as many workers. Learning rates are those tuned on the virtual clock, the seeds are the same,
and runs go one at a time. This is a sweep in a folder of its own, OUT-measured, with rows of its own."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import sweep
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_text
from asyncsgd.scripts.base import run_script
from asyncsgd.studies.config import read_config
from asyncsgd.studies.plan import Plan, make_plan
from asyncsgd.studies.runs import BASE

CONFIG = Path(__file__).parent / "configs" / "dose_response.yaml"
SPEEDS = ("constant:1", "log_normal:0.5", "exponential:1")


def main() -> int:
    return run_script(lambda argv, stop: run(parser().parse_args(argv), stop), goes_on=True)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="dose_response.py",
        description="At which fixed delay does asynchronous training lose its wall-clock advantage?",
        epilog="Delays are those of the config: its numbers of workers, less one.",
        allow_abbrev=False,
    )
    flags.add_argument("--config", type=Path, default=CONFIG, help=f"of the sweep (default: {CONFIG.name})")
    flags.add_argument("--out", type=Path, help="folder of the sweep and of the results (default: runs/NAME)")
    flags.add_argument("--jobs", type=int, default=available_cores(), help="runs side by side (default: the cores)")
    flags.add_argument("--retry", action="store_true", help="run again what FAILED")
    shown = ", ".join(SPEEDS)
    flags.add_argument("--speeds", action="append", help=f"declared speeds; repeat for more (default: {shown})")
    flags.add_argument("--measured", action="store_true", help="also time pairs of real processes, where cores allow")
    return flags


def run(flags: argparse.Namespace, stop: StopRequest) -> int:
    plan = make_plan(read_config(flags.config), str(flags.config))
    delays = delays_of(plan, available_cores() if flags.measured else None)
    out = flags.out if flags.out is not None else Path("runs") / plan.name
    results = out / "dose_response"
    if failed := make(flags.config, out, flags, stop):
        return failed

    import pandas as pd
    import yaml

    from analysis.dose_response import pairs_of, read_dose, save, text
    from asyncsgd.simulation.simulate import arrival_seconds

    dose = read_dose(out)
    pairs = [pairs_of(dose, speeds, arrival_seconds) for speeds in flags.speeds or SPEEDS]
    if flags.measured:
        rates = dict(zip(dose.runs["arm"], dose.runs["learning_rate"], strict=True))
        config = results / "measured.yaml"
        folder = Path(f"{out}-measured")
        results.mkdir(exist_ok=True)
        write_text(config, yaml.safe_dump(measured_config(plan, delays, rates, out), sort_keys=False))
        if failed := make(config, folder, flags, stop):
            return failed
        pairs.append(pairs_of(read_dose(folder)._replace(targets=dose.targets)))
    print(text(dose, pd.concat(pairs)))
    for path in save(dose, pd.concat(pairs), results):
        print(path)
    return 0


def make(config: Path, out: Path, flags: argparse.Namespace, stop: StopRequest) -> int:
    """What is left of a sweep, as ``sweep.py`` makes it; its exit code."""
    words = [str(config), "--out", str(out), "--jobs", str(flags.jobs), *["--retry"] * flags.retry]
    return sweep.run(sweep.parser("sweep.py", "").parse_args(words), "sweep.py", "report", stop)


def delays_of(plan: Plan, cores: int | None) -> list[int]:
    """The delays above 0; with `cores` those whose tau + 1 workers have a core for every thread.

    Raises:
        UsageError: if this is no dose-response config, or there is none. It is said before hours of tuning.
    """
    places = {
        name: sorted({arm.place[0] - 1 for arm in plan.arms if arm.algorithm == name} - {0})
        for name in dict.fromkeys(arm.algorithm for arm in plan.arms)
    }
    delays = places.get("delayed", [])
    if set(places) != {"delayed", "sync"} or places["sync"] != delays or len(delays) < 2:
        raise UsageError(
            "the algorithms of a dose-response config are delayed and sync, on the same two or more numbers of workers "
            f"above 1; got {places} as delays"
        )
    if not all("learning_rate" in trial for arm in plan.arms for trial in arm.trials or ({},)):
        raise UsageError("a dose-response experiment tunes learning_rate at every delay; list its values under tune")
    if cores is None:
        return delays
    threads = int(plan.base.get("threads", 1))
    fitting = [delay for delay in delays if (delay + 1) * threads <= cores]
    if not fitting:
        raise UsageError(f"--measured needs a core for every thread of {delays[0] + 1} workers; there are {cores}")
    return fitting


def measured_config(plan: Plan, delays: list[int], rates: dict[str, float], out: Path) -> dict[str, Any]:
    """A sweep of the same pairs as real processes, at the learning rates of the arms: nothing is tuned again."""
    simulated = ("clock", "speeds", "network")
    base = {key: value for key, value in plan.base.items() if key not in simulated}
    if plan.base_model is not None:
        base["model"] = str(out / BASE / "model")
    algorithms: dict[str, dict[str, Any]] = {
        "sync": {"mode": "sync", "conditions": []},
        "delayed": {"mode": "async", "rule": "fixed_delay:delay={nproc-1}", "conditions": []},
    }
    for arm in plan.arms:
        if arm.place[0] - 1 in delays:
            settings = {key: value for key, value in arm.settings.items() if key not in (*simulated, "mode", "rule")}
            settings["learning_rate"] = rates[arm.name]
            algorithms[arm.algorithm]["conditions"].append(settings)
    return {
        "name": f"{plan.name}-measured",
        "base": base,
        "algorithms": algorithms,
        "seeds": list(plan.config.seeds),
        "analysis": {
            "reference": "sync",
            "primary": {"endpoint": "loss_at_equal_seconds", "num_workers": min(delays) + 1},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
