r"""Simulate a rule on a closed-form problem under virtual time, with any number of workers.

    python experiments/simulate.py --rule ringmaster:threshold=6,stops=true --nproc 6174 --times half_normal \
        --problem tridiagonal --learning-rate 0.25 --seconds 500

Leaves a run folder like a real run's, with the clock marked as virtual and the excess f(x) - f* as the loss.
``--rule help``, ``--times help`` and ``--problem help`` list what there is."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.task import told_names, values_of
from asyncsgd.settings.flags import Flags, group, setting
from asyncsgd.signals import StopRequest
from asyncsgd.simulation.settings import SimulationSettings

EXPERIMENT = "simulate"
"""In the summary, where a training run has the name of its own script."""


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(run, argv)


def run(argv: list[str], stop: StopRequest) -> int:
    if show_help(argv):
        return 0
    flags = Flags(Settings, lambda settings: ())
    given = flags.parse(argv, prog="simulate.py", description=str(__doc__), examples="").settings

    from asyncsgd.simulation.simulate import asked_arguments

    command, arguments = "python experiments/simulate.py " + " ".join(argv), asked_arguments(given.simulate)
    return simulate(given.simulate, arguments, Path(given.output.runs_dir), command, stop)


@dataclasses.dataclass(frozen=True)
class Output:
    """Where the run is written."""

    runs_dir: str = setting("runs", "folder in which the run gets a folder")


@dataclasses.dataclass(frozen=True)
class Settings:
    """All flags."""

    simulate: SimulationSettings = group(SimulationSettings, "what to simulate")  # noqa: RUF009
    output: Output = group(Output, "output")  # noqa: RUF009


def show_help(argv: list[str]) -> bool:
    """Print the list that ``--rule help``, ``--times help`` or ``--problem help`` asks for."""
    if "help" in values_of(argv, "--rule"):
        from asyncsgd.rules import describe_rules

        print(describe_rules())
    elif "help" in values_of(argv, "--problem"):
        from asyncsgd.simulation.problems import describe_problems

        print(describe_problems())
    else:
        return told_names(argv)
    return True


def simulate(
    settings: SimulationSettings, arguments: dict[str, Any], runs_dir: Path, command: str, stop: StopRequest
) -> int:
    """Run, write the folder, say what came out; the exit code."""
    import torch

    import asyncsgd
    from asyncsgd.measure import hardware
    from asyncsgd.records.console import Recorder, teller
    from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
    from asyncsgd.records.machine import describe_environment
    from asyncsgd.records.run_folder import RunFolder
    from asyncsgd.scripts.run_folder import free_folder
    from asyncsgd.simulation.simulate import vector_sha256

    try:
        folder = RunFolder(free_folder(runs_dir, name_of(settings)), task=EXPERIMENT)
        write_settings(folder.path / "settings.yaml", settings, command)
        environment = describe_environment(1, settings.workers) | {"oversubscription": None}
        folder.write_environment(environment | hardware("cpu"))
    except OSError as error:
        raise UsageError(f"{runs_dir} cannot be written ({error.strerror}); type --runs-dir FOLDER") from error
    tell = teller(folder)
    tell(f"run    {folder.path}\nrule   {arguments['rule']}\nproblem {settings.problem}   speeds {settings.speeds}")
    recorder = Recorder(folder, settings.samples)
    try:
        with stop.during_a_run():
            done = asyncsgd.simulate(**arguments, report=recorder, stop_requested=stop)
    except UsageError as error:
        folder.write_summary({"experiment": EXPERIMENT, "status": FAILED, "message": str(error)})
        raise
    except KeyboardInterrupt:
        message = "interrupted by the user, twice: only the records are saved"
        folder.write_summary({"experiment": EXPERIMENT, "status": INTERRUPTED, "message": message})
        raise
    except OSError as error:
        raise UsageError(f"{folder.path} cannot be written ({error.strerror}); free some space, run again") from error
    finally:
        recorder.close()
    result, rule = done.result, arguments["rule"]
    problem = hashlib.sha256(settings.problem.encode()).hexdigest()
    folder.write_summary(
        {
            "status": result.status,
            "message": result.message,
            "experiment": EXPERIMENT,
            "mode": "async",
            "rule": str(rule),
            "from_scratch": None,
            "num_workers": settings.workers,
            "seed": settings.seed,
            "batch_size": 1,
            "clock": "virtual",
            "speeds": settings.speeds,
            "oversubscription": None,
        }
        | recorder.totals.as_summary()
        | {
            "rule_acted": None if done.rule_acted is None else dataclasses.asdict(done.rule_acted),
            "data": settings.problem,
            "data_fingerprint": problem,
            "init_sha256": vector_sha256(torch.from_numpy(arguments["instance"].initial())),
            "parameters_sha256": vector_sha256(done.parameters),
        }
    )
    folder.close()
    if result.message:
        print(f"{result.status}: {result.message}", file=sys.stderr)
    if done.rule_acted is not None and (sentence := done.rule_acted.describe(rule.name, settings.workers)):
        tell(sentence)
    tell(f"done   {folder.path}" if result.status == DONE else f"saved  {folder.path}")
    return {DONE: 0, INTERRUPTED: 130}.get(result.status, 1)


def name_of(settings: SimulationSettings) -> str:
    """What the run folder of these settings is called."""
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:6]
    return f"simulate-{settings.rule.partition(':')[0]}-w{settings.workers}-s{settings.seed}-{digest}"


def write_settings(path: Path, settings: SimulationSettings, command: str) -> None:
    import yaml

    text = yaml.safe_dump({"simulate": dataclasses.asdict(settings)}, sort_keys=False)
    path.write_text(f"# {command}\n{text}", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
