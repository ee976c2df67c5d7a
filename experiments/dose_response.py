"""At which fixed delay does asynchronous training lose its wall-clock advantage over synchronous training?

    python experiments/dose_response.py

A dose-response experiment: gradients exactly tau = 0, 1, 2, 4, 8, 16 updates old, against synchronous rounds of tau + 1
workers, the learning rate tuned anew at every tau for both. Tuning, runs and seeds are a sweep
(``asyncsgd/configs/dose_response.yaml``), so the same command goes on where it was stopped.

A fixed delay has no clock of its own. The time model: tau + 1 equal asynchronous workers that never wait, whose k-th
arrival is the k-th update, against synchronous training with as many workers, under the same declared speeds. The times
of arrivals come from the library's virtual clock with the rules `asynchronous` and `synchronous`. The problem has one
dimension, since arrival times depend on neither the problem nor the parameters. The losses come from the sweep.

With --measured, on a quiet machine, real processes run too. Each delay whose tau + 1 workers have cores is run against
synchronous training with as many workers. Learning rates are those tuned on the virtual clock, the seeds are the same,
and runs go one at a time. This is a sweep in a folder of its own, OUT-measured, with rows of its own."""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import write_text
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.study import StudyCommand, carry_out_study, config_of, file_of, parser_of
from asyncsgd.studies.plan import Arm, StudyPlan, make_plan
from asyncsgd.studies.runs import BASE

COMMAND = StudyCommand.of_script("dose_response", __doc__)


def main() -> int:
    return run_script(lambda argv, stop: run(parser().parse_args(argv), stop), goes_on=True)


def parser() -> argparse.ArgumentParser:
    """The flags of every study, and two more."""
    flags = parser_of(COMMAND)
    flags.add_argument("--speeds", action="append", help="declared speeds; repeat for more (default: three kinds)")
    flags.add_argument("--measured", action="store_true", help="also time pairs of real processes, where cores allow")
    return flags


def run(flags: argparse.Namespace, stop: StopRequest) -> int:
    config, _ = config_of(file_of(flags, COMMAND), flags.quick, flags.settings)
    plan = make_plan(config)
    delays = delays_of(plan, available_cores() if flags.measured else None)
    out = flags.out if flags.out is not None else Path("runs") / plan.name
    results = out / "dose_response"
    failed = carry_out_study(flags, COMMAND, stop)
    if failed or flags.dry_run or flags.print_commands:
        return failed

    import pandas as pd
    import yaml

    from analysis.dose import pairs_of, read_dose
    from analysis.dose_response import SPEEDS, save, text
    from asyncsgd.simulation.simulate import arrival_seconds

    dose = read_dose(out)
    pairs = [pairs_of(dose, speeds, arrival_seconds) for speeds in flags.speeds or SPEEDS]
    if flags.measured:
        rates = dict(zip(dose.runs["arm"], dose.runs["learning_rate"], strict=True))
        flags.config = results / "measured.yaml"
        flags.quick = False
        flags.settings = []
        flags.out = Path(f"{out}-measured")
        results.mkdir(exist_ok=True)
        write_text(flags.config, yaml.safe_dump(measured_config(plan, delays, rates, out), sort_keys=False))
        failed = carry_out_study(flags, COMMAND, stop)
        if failed:
            return failed
        measured = read_dose(flags.out)._replace(targets=dose.targets)
        pairs.append(pairs_of(measured))
    table = pd.concat(pairs)
    print(text(dose, table))
    for path in save(dose, table, results):
        print(path)
    return 0


def delays_of(plan: StudyPlan, cores: int | None) -> list[int]:
    """The delays above 0; with `cores` those whose tau + 1 workers have a core for every thread.

    Raises:
        UsageError: if this is no dose-response config, or there is none. It is said before hours of tuning.
    """
    places: dict[str, list[int]] = {}
    for arm in plan.arms:
        known = places.setdefault(arm.algorithm, [])
        delay = delay_of(arm)
        if delay > 0 and delay not in known:
            bisect.insort(known, delay)
    delays = places.get("delayed", [])
    if places != {"delayed": delays, "sync": delays} or len(delays) < 2:
        raise UsageError(
            "the algorithms of a dose-response config are delayed and sync, on the same two or more numbers of workers "
            f"above 1; got {places} as delays"
        )
    for arm in plan.arms:
        if arm.trials and all("learning_rate" in trial for trial in arm.trials):
            continue
        raise UsageError("a dose-response experiment tunes learning_rate at every delay; list its values under tune")
    if cores is None:
        return delays
    threads = int(plan.base.get("threads", 1))
    fitting = [delay for delay in delays if (delay + 1) * threads <= cores]
    if not fitting:
        raise UsageError(f"--measured needs a core for every thread of {delays[0] + 1} workers; there are {cores}")
    return fitting


def delay_of(arm: Arm) -> int:
    return arm.workers_and_clock[0] - 1


def without(settings: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def measured_config(plan: StudyPlan, delays: list[int], rates: dict[str, float], out: Path) -> dict[str, Any]:
    """A sweep of the same pairs as real processes, at the learning rates of the arms: nothing is tuned again."""
    of_clock = {"clock", "speeds", "network"}
    base = without(plan.base, of_clock)
    if plan.base_model is not None:
        base["model"] = str(out / BASE / "model")
    algorithms: dict[str, dict[str, Any]] = {
        "sync": {"mode": "sync", "conditions": []},
        "delayed": {"mode": "async", "rule": "fixed_delay:delay={nproc-1}", "conditions": []},
    }
    for arm in plan.arms:
        if delay_of(arm) in delays:
            settings = without(arm.settings, of_clock | {"mode", "rule"})
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
