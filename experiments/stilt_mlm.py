"""Continued masked-language-model pretraining, synchronously or asynchronously: the first stage of STILT.

    torchrun experiments/stilt_mlm.py --mode async --nproc 4

Prepares the text (by default the English documentation of the installed Python packages), trains with the workers
and the rule asked for, evaluates exactly at fixed points, and leaves everything in one run folder. ``--help`` lists
the settings."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import sys
from multiprocessing.context import ForkServerContext

from asyncsgd import __version__
from asyncsgd.errors import UsageError
from asyncsgd.launch import Launch, go_offline
from asyncsgd.modes import InProcess, Virtual, kind_of
from asyncsgd.progress import say
from asyncsgd.record import available_cores
from asyncsgd.run_folder import open_run_folder
from asyncsgd.runtime.processes import fork_server
from asyncsgd.script import run_script
from asyncsgd.settings import Parsed, Settings, parse_settings
from asyncsgd.signals import StopRequest

DESCRIPTION = "Continued masked-language-model pretraining, synchronously or asynchronously (the first stage of STILT)."
EXAMPLES = """\
  laptop, no network:   torchrun experiments/stilt_mlm.py --mode async --nproc 4
  compare with:         torchrun experiments/stilt_mlm.py --mode sync --nproc 4
  one slow worker:      torchrun experiments/stilt_mlm.py --mode async --nproc 2 --speeds slow:worker=0,factor=3
  16 virtual workers:   python experiments/stilt_mlm.py --clock virtual --nproc 16 --speeds exponential:1
  your model and text:  torchrun --nproc-per-node 4 experiments/stilt_mlm.py --mode async --model FOLDER_OR_HUB_ID \\
                          --data posts.csv --text-column text --learning-rate 5e-5 --dropout 0.1
"""


def main() -> int:
    return run_script(run)


def run(argv: list[str], stop: StopRequest) -> int:
    if "help" in _values_of(argv, "--speeds"):
        from asyncsgd.speeds import describe_speeds

        print(describe_speeds())
        return 0
    if "help" in _values_of(argv, "--rule"):
        from asyncsgd.rules import describe_rules

        print(describe_rules())
        return 0
    parsed = parse_settings(argv, prog="stilt_mlm.py", description=DESCRIPTION, examples=EXAMPLES)
    settings, launch = adapt(parsed)
    if not launch.leads:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 hears it and stops the others in good order
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        from asyncsgd.pretraining import pretraining
        from asyncsgd.training import follow

        return follow(pretraining(settings))
    announce(settings)
    context = start_fork_server(settings, launch)  # its imports and ours go on side by side

    from asyncsgd.pretraining import check, pretraining

    check(settings)
    stop.check()
    folder = open_run_folder("stilt_mlm", settings, "python experiments/stilt_mlm.py " + " ".join(argv))
    print(f"run    {folder.path}", flush=True)
    go_offline(settings.model.model, settings.data.data)

    from asyncsgd.training import lead

    exit_code = lead(pretraining(settings), launch, folder, context, stop)
    say(f"next   python -m analysis.compare {shlex.quote(str(folder.path.parent))}")
    return exit_code


def adapt(parsed: Parsed) -> tuple[Settings, Launch]:
    """The settings with the launcher's number of workers in them."""
    settings = parsed.settings
    launch = Launch.read(os.environ, settings.job.nproc, nproc_given="nproc" in parsed.given)
    job = dataclasses.replace(settings.job, nproc=launch.num_workers)
    settings = dataclasses.replace(settings, job=job)
    kind = kind_of(settings.job.mode, settings.job.clock)
    if kind is InProcess and launch.num_workers > 1:
        raise UsageError(
            f"--mode single is one process, and the launcher started {launch.num_workers}; type python, not torchrun"
        )
    if kind is Virtual and launch.rank is not None:
        raise UsageError(
            "--clock virtual is one process, and the launcher started several; type python, or torchrun without "
            "--nproc-per-node, and --nproc for the number of virtual workers"
        )
    if launch.several_hosts and not kind.several_hosts:
        raise UsageError(
            f"--mode {settings.job.mode} runs on one host, and torchrun started ranks on several; type --mode sync"
        )
    return settings, launch


def announce(settings: Settings) -> None:
    """The first line, before anything heavy is imported."""
    kind = kind_of(settings.job.mode, settings.job.clock)
    if kind is Virtual:
        print(
            f"asyncsgd {__version__}  {settings.job.nproc} virtual workers in one process; seconds are drawn from "
            f"{settings.job.speeds or 'constant:1'}, not measured",
            flush=True,
        )
        return
    workers, threads, cores = settings.job.nproc, settings.machine.threads, available_cores()
    load = f"{cores} core{'s' if cores > 1 else ''}"
    if workers * threads > cores:
        load += f", oversubscribed {workers * threads / cores:.1f}x: not a measurement of speed"
    server = " and a server" if kind.has_server else ""
    print(
        f"asyncsgd {__version__}  mode {settings.job.mode}  {workers} worker{'s' if workers > 1 else ''} with {threads}"
        f" thread{'s' if threads > 1 else ''} each{server} on {load}",
        flush=True,
    )


def start_fork_server(settings: Settings, launch: Launch) -> ForkServerContext | None:
    """Where workers come from, started early; None where there are none to start."""
    kind = kind_of(settings.job.mode, settings.job.clock)
    if kind.in_one_process or (launch.rank is not None and not kind.has_server):
        return None
    return fork_server(settings.model.model)


def _values_of(argv: list[str], flag: str) -> list[str]:
    return [argv[i + 1] for i in range(len(argv) - 1) if argv[i] == flag] + [
        a[len(flag) + 1 :] for a in argv if a.startswith(flag + "=")
    ]


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
