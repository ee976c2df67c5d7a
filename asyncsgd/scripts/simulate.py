r"""Simulate a rule on a closed-form problem under virtual time, with any number of workers.

    asyncsgd simulate --rule ringmaster:threshold=6,stops=true --nproc 6174 --times half_normal \
        --problem tridiagonal --learning-rate 0.25 --seconds 500

Leaves a run folder like a real run's, with the clock marked as virtual and the excess f(x) - f* as the loss.
``--rule help``, ``--times help`` and ``--problem help`` list what there is."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import sys
from pathlib import Path

from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.scripts.base import Typed
from asyncsgd.scripts.task import told_names, values_of
from asyncsgd.settings.flags import Flags
from asyncsgd.settings.specs import group, setting
from asyncsgd.simulation.settings import SimulationSettings, text_of_simulation


@dataclasses.dataclass(frozen=True)
class RunsFolder:
    """Where the run is written."""

    runs_dir: str = setting("runs", "folder in which the run gets a folder")


@dataclasses.dataclass(frozen=True)
class SimulationFlags:
    """All flags."""

    simulate: SimulationSettings = group(SimulationSettings, "what to simulate")  # noqa: RUF009
    output: RunsFolder = group(RunsFolder, "output")  # noqa: RUF009


def run_as_script(argv: list[str], stop: StopRequest) -> int:
    """Simulate as ``experiments/simulate.py``."""
    return run(argv, stop, Typed.of_script("simulate.py"))


def run(argv: list[str], stop: StopRequest, typed: Typed) -> int:
    """Simulate, write the folder, say what came out; the exit code."""
    if "help" in values_of(argv, "--problem"):
        from asyncsgd.simulation.problems import describe_problems

        print(describe_problems())
        return 0
    flags = Flags(SimulationFlags, lambda settings: ())
    if told_names(argv, flags):
        return 0
    description = str(__doc__).replace("asyncsgd simulate", typed.line)
    given = flags.parse(argv, prog=typed.prog, description=description, examples="").settings
    settings = given.simulate
    runs_dir = Path(given.output.runs_dir)

    from asyncsgd.records.console import Recorder, teller
    from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
    from asyncsgd.records.machine import describe_environment
    from asyncsgd.records.run_folder import RunFolder, write_text
    from asyncsgd.run.choose_folder import free_folder
    from asyncsgd.simulation.simulate import asked_arguments, simulate, vector_sha256
    from asyncsgd.worker.profile import hardware

    arguments = asked_arguments(settings)
    rule = arguments["rule"]
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()[:6]
    name = f"simulate-{rule.name}-w{settings.workers}-s{settings.seed}-{digest}"
    try:
        folder = RunFolder(free_folder(runs_dir, name), task="simulate", loss_unit="")
        command = f"{typed.line} {shlex.join(argv)}"
        write_text(folder.path / "settings.yaml", text_of_simulation(settings, command))
        environment = describe_environment(1, settings.workers) | {"oversubscription": None}
        folder.write_environment(environment | {"device": "cpu"} | hardware("cpu"))
        tell = teller(folder)
        tell(f"run    {folder.path}\nrule   {rule}\nproblem {settings.problem}   speeds {settings.speeds}")
        recorder = Recorder(folder, settings.samples)
        try:
            with stop.during_a_run():
                done = simulate(**arguments, report=recorder, stop_requested=stop)
        except (UsageError, KeyboardInterrupt) as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            message = "interrupted by the user, twice: only the records are saved" if interrupted else str(error)
            status = INTERRUPTED if interrupted else FAILED
            folder.write_summary({"experiment": "simulate", "status": status, "message": message})
            raise
        finally:
            recorder.close()
    except OSError as error:
        raise UsageError(f"{runs_dir} cannot be written ({error.strerror}); type --runs-dir FOLDER") from error
    result = done.result
    acted = done.rule_acted
    ended = {"status": result.status, "message": result.message, "experiment": "simulate", "mode": "async"}
    what = {"rule": str(rule), "from_scratch": None, "num_workers": settings.workers, "seed": settings.seed}
    where = {"batch_size": 1, "clock": "virtual", "speeds": settings.speeds, "oversubscription": None}
    came_out = {
        "rule_acted": None if acted is None else dataclasses.asdict(acted),
        "data": settings.problem,
        "data_fingerprint": hashlib.sha256(settings.problem.encode()).hexdigest(),
        "init_sha256": vector_sha256(arguments["instance"].initial()),
        "parameters_sha256": vector_sha256(done.parameters.numpy()),
    }
    folder.write_summary(ended | what | where | recorder.totals.as_summary() | came_out)
    folder.close()
    if result.message:
        print(f"{result.status}: {result.message}", file=sys.stderr)
    if acted is not None and (sentence := acted.describe(rule.name, settings.workers)):
        tell(sentence)
    tell(f"done   {folder.path}" if result.status == DONE else f"saved  {folder.path}")
    return {DONE: 0, INTERRUPTED: 130}.get(result.status, 1)
