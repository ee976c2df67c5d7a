"""Many runs from one file: tune every arm alike, register the analysis, test on fresh seeds, fine-tune, go on later.

    asyncsgd study quick

What is finished is skipped, so the same command goes on where a stopped or killed study was. docs/study.md says what a
config holds."""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncsgd.backends.launch import refuse_ranks
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.events import FAILED, FINISHED
from asyncsgd.records.machine import available_cores
from asyncsgd.records.trackers import names_in
from asyncsgd.scripts.base import Typed, go_offline, run_script
from asyncsgd.settings.flags import Parser
from asyncsgd.settings.numbers import out_of_bounds, shortened, whole_number
from asyncsgd.settings.shipped import config_file, config_names
from asyncsgd.studies.check import check
from asyncsgd.studies.config import read_config
from asyncsgd.studies.overlay import quick_of, text_of, with_setting
from asyncsgd.studies.plan import StudyPlan, make_plan, share
from asyncsgd.studies.runs import STAGES
from asyncsgd.studies.stages import WAITS_FOR, carry_out, fork_server_for
from asyncsgd.studies.study_folder import StudyFolder, locked
from asyncsgd.tasks import TASKS

SUMMARY = str(__doc__).partition("\n")[0]
EXAMPLE = """\
examples:
  what would be run, and how long:  {line} {config} --dry-run
  run it, or go on with it:         {line} {config}
  a config's quick: block:          {line} {with_block} --quick
  another value of one setting:     {line} {config} --set base.samples=400
  the tables and pictures:          {analysis} report runs/quick --out report.html
  an array job of 8:                {line} study.yaml --shard $SLURM_ARRAY_TASK_ID/8"""


class StudyCommand(NamedTuple):
    """What differs between the commands that carry out studies."""

    typed: Typed
    summary: str = SUMMARY
    """In its help."""
    config: str | None = None
    """The config that is run where none is named; None: one must be named."""
    any_study: Typed = Typed.of_script("sweep.py")
    """The command for every study, in the examples of its help."""

    @classmethod
    def of_script(cls, name: str, about: str | None) -> StudyCommand:
        """A script of experiments/ that carries out the config of its own name; `about` is its docstring."""
        return cls(Typed.of_script(f"{name}.py"), str(about).partition("\n")[0], name)


SWEEP = StudyCommand(Typed.of_script("sweep.py"))


def parser_of(command: StudyCommand) -> argparse.ArgumentParser:
    example = command.any_study
    flags = Parser(
        prog=command.typed.prog,
        description=command.summary,
        epilog=EXAMPLE.format(
            line=example.line,
            config=example.config("quick"),
            with_block=example.config("language_model"),
            analysis=example.analysis,
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    examples = "asyncsgd/configs has examples"
    if command.typed.door:
        examples = f"a file, or of the package {', '.join(config_names())}"
    if command.config is not None:
        examples += f" (default: {command.config}.yaml)"
    flags.add_argument("config", type=Path, nargs="?", metavar="CONFIG.yaml", help=f"what to run; {examples}")
    alone = "without a config, run quick.yaml" if command.config is None else "minutes on 2 cores"
    flags.add_argument("--quick", action="store_true", help=f"lay the config's quick: block over the rest; {alone}")
    flags.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one setting of the config, e.g. base.samples=400 or seeds=[1,2]; repeat for more",
    )
    flags.add_argument("--out", type=Path, metavar="DIR", help="the study's folder (default: runs/NAME)")
    flags.add_argument(
        "--jobs",
        type=whole_number,
        metavar="N",
        help="runs side by side on the virtual clock and in fine-tuning (default: the cores); runs that measure time "
        "always have the machine to themselves",
    )
    flags.add_argument("--retry", action="store_true", help="run again what FAILED")
    flags.add_argument("--track", metavar="NAMES", help="also show every run in a tracker; docs/running.md")
    flags.add_argument("--shard", default="1/1", metavar="I/N", help="make only the I-th of N parts")
    flags.add_argument("--dry-run", action="store_true", help="say what would be run and how long it takes, and stop")
    flags.add_argument(
        "--print-commands",
        action="store_true",
        help="print a command for each run that can be made now, and make none; the analysis is registered before the "
        "commands of test runs are printed",
    )
    return flags


def main(command: StudyCommand = SWEEP) -> int:
    """Carry out a study as a script of experiments/."""
    flags = parser_of(command)
    return run_script(lambda argv, stop: carry_out_study(flags.parse_args(argv), command, stop), goes_on=True)


def run(argv: list[str], stop: StopRequest, typed: Typed) -> int:
    """Carry out a study as ``asyncsgd study``."""
    command = StudyCommand(typed, any_study=typed)
    return carry_out_study(parser_of(command).parse_args(argv), command, stop)


def carry_out_study(flags: argparse.Namespace, command: StudyCommand, stop: StopRequest) -> int:
    """Carry out the study that the flags name; return the exit code."""
    typed = command.typed
    refuse_ranks()
    names_in(flags.track)  # refuses
    file = file_of(flags, command)
    is_quick = flags.quick and file != config_file("quick")  # which is quick as a whole
    config, text = config_of(file, is_quick, flags.settings)
    plan = make_plan(config, str(file))
    out = flags.out if flags.out is not None else Path("runs") / plan.name
    jobs = available_cores() if flags.jobs is None else flags.jobs
    if wanted := out_of_bounds(jobs, at_least=1):
        raise UsageError(f"--jobs must be {wanted}, got {shortened(jobs)}")
    shard = shard_of(flags.shard)
    lock = out / f".lock-{shard[0]}-of-{shard[1]}"
    if plan.ladder is not None and (flags.jobs not in (None, 1) or shard != (1, 1) or flags.print_commands):
        raise UsageError(
            "the runs of a speed ladder are timed against each other, one at a time, and which come next follows from "
            "all before them; leave --jobs, --shard and --print-commands out"
        )
    study = StudyFolder(plan, text, out, flags.track, typed.door)
    plan = study.plan  # of a ladder with all that follows from what has ended
    if {plan.task(run) for run in plan.runs} <= TASKS.keys():  # what another task loads is not known
        go_offline(*plan.models_and_data())

    if flags.dry_run or flags.print_commands:
        check(plan)
        study.read_state()
        try:
            announce(study)
            if flags.print_commands:
                print_commands(study, shard, lock)
            else:
                estimate(study, jobs, shard, flags.retry)
            sys.stdout.flush()
        except BrokenPipeError:  # its reader has seen enough (| head)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0

    context = fork_server_for(plan)  # imports while this process reads what there is
    study.read_state()  # before anything is written into a folder that may be somebody else's
    unfinished = {run.arm for run in plan.runs if study.status(run) not in FINISHED}
    check(plan, unfinished)
    with locked(lock):
        study.begin()
        announce(study)
        failed = carry_out(study, context, stop, jobs=jobs, retry=flags.retry, shard=shard)
    plan = study.plan
    folders_of_shard = {folder for stage in STAGES for folder in share(plan, stage, shard)}
    failing = {job.folder for job in failed} - study.given_up
    num_finished = 0
    num_without_model = 0
    runs = [run for run in plan.runs if run.folder not in study.given_up]
    for run in runs:
        status = study.status(run)
        if status == FAILED and run.folder in folders_of_shard:
            failing.add(run.folder)
        if status in FINISHED:
            num_finished += 1
        elif run.stage == "finetune" and run.parent is not None and study.job(run) is None:
            num_without_model += 1
    if failing:
        print(f"{counted(len(failing), 'run')} FAILED; the same command with --retry runs them again", file=sys.stderr)
    if num_without_model:
        verb = "has" if num_without_model == 1 else "have"
        print(
            f"{counted(num_without_model, 'fine-tuning run')} {verb} no model to start from, "
            "since its pretraining run is not DONE",
            file=sys.stderr,
        )
    state = "done" if num_finished == len(runs) else "so far"
    print(f"{state}   {out}: {num_finished} of {len(runs)} runs")
    if num_finished and config.get("report") is not None:
        print(f"page   {page_of(out)}")
    else:
        print(f"next   {typed.analysis} report {shlex.quote(str(out))} --out report.html")
    return 1 if failing else 0


def file_of(flags: argparse.Namespace, command: StudyCommand) -> Path:
    """The file of the config that the flags name, or of the command's own."""
    typed = command.typed
    named = flags.config or command.config
    if named is None and not flags.quick:
        raise UsageError(f"name a config, e.g. {typed.config('quick')}, or type --quick")
    file = config_file(named or "quick")
    whole = file.stem.removesuffix("-quick")
    if not file.exists() and whole != file.stem and whole in config_names():
        typed_instead = f"{typed.line} {typed.config(whole)} --quick"
        raise UsageError(f"{named} is now the quick: block of {whole}.yaml; type {typed_instead}")
    return file


def config_of(file: Path, is_quick: bool, settings: Sequence[str]) -> tuple[Mapping[str, Any], str]:
    """The config with all that is laid over it, and the text that the study's folder keeps: that of the file where
    nothing is.

    Args:
        is_quick: whether the ``quick:`` block is laid over the rest.
        settings: what was typed after each ``--set``.
    """
    config = read_config(file)
    laid_over = []
    if is_quick:
        config = quick_of(config, str(file))
        laid_over.append("--quick")
    for word in settings:
        config = with_setting(config, word)
        laid_over.append(shlex.join(("--set", word)))
    if not laid_over:
        return config, file.read_text(encoding="utf-8")
    return config, text_of(config, f"{file.name} with {' '.join(laid_over)}")


def page_of(out: Path) -> Path:
    """Write the page of a study that names its report; return the file."""
    from analysis.load import load

    return load(out).report()


def shard_of(text: str) -> tuple[int, int]:
    """
    >>> shard_of("2/8")
    (2, 8)
    """
    index, _, number = text.partition("/")
    if not (index.isdecimal() and number.isdecimal() and 1 <= int(index) <= int(number)):
        raise UsageError(f"--shard must look like 2/8 (the second of eight parts), got {shortened(text)}")
    return int(index), int(number)


def counted(number: int, what: str, width: int = 0) -> str:
    """
    >>> counted(1, "run"), counted(12, "run", width=4)
    ('1 run', '  12 runs')
    """
    return f"{number:{width}} {what}" if number == 1 else f"{number:{width}} {what}s"


def announce(study: StudyFolder) -> None:
    """What is planned and how far it is."""
    plan = study.plan
    size = f"{counted(len(plan.arms), 'arm')}, {counted(len(plan.config.seeds), 'seed')}"
    print(f"study  {plan.name}: {size}   folder {study.out}")
    for stage in STAGES:
        runs = plan.of_stage(stage)
        if runs:
            counts = collections.Counter(map(study.status, runs))
            statuses = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
            print(f"{stage:8}  {counted(len(runs), 'run', 4)}: {statuses}")
        for run in runs:
            if study.status(run) in FINISHED:
                continue
            job = study.job(run, pretend=True)
            if job is not None and job.why_not_runnable:
                print(f"          {run.folder} is left out: {job.why_not_runnable}")
    if plan.ladder is not None and not plan.of_stage("proof"):
        print("note   what these runs show decides which come next")
    for reference, seconds in sorted(study.budget_seconds.items()):
        print(budget_text(plan, reference, f"{seconds:.6g}"))
    if power := power_text(plan):
        print(power)
    sys.stdout.flush()


def budget_text(plan: StudyPlan, reference: str, seconds: str) -> str:
    """Who gets how many seconds in the test runs."""
    unit = "virtual s" if plan.arm(reference).virtual else "s"
    arms = ", ".join(name for name, timed_by in plan.timed_by.items() if timed_by == reference)
    return f"budget    {seconds} {unit}, what {reference} takes for its samples: every test run of {arms}"


def power_text(plan: StudyPlan) -> str:
    """What the registered tests can find with the plan's seeds, at the level at which Holm's method judges first."""
    from analysis.stats import detectable_effect, minimum_pairs

    if plan.analysis is None or not plan.family:
        return ""
    alpha = plan.analysis.alpha
    number = len(plan.family)
    num_seeds = len(plan.config.seeds)
    seeds = counted(num_seeds, "seed")
    needed = minimum_pairs(number, alpha)
    if num_seeds < needed:
        return (
            f"note   with {seeds} no difference can be found in a primary family of "
            f"{counted(number, 'comparison')}, however large it is: that takes {needed} seeds"
        )
    level = f"{alpha:g}" if number == 1 else f"{alpha:g} / {number} (Holm's method, {number} comparisons)"
    effect = detectable_effect(num_seeds, alpha / number)
    return (
        f"power     {seeds}: the sign-flip test at {level} finds a difference of {effect:.1f} standard deviations of "
        f"the differences in 80 % of studies; with fewer than {needed} seeds it finds none"
    )


def print_commands(study: StudyFolder, shard: tuple[int, int], lock: Path) -> None:
    """The runs that can be made now, one command a line; those of later stages depend on what these find. The analysis
    is registered before the commands of test runs are printed, with the lock of those who make runs of the shard.
    """
    for stage in STAGES:
        todo = study.to_do(stage, shard, retry=True)
        if todo and stage == "test" and study.plan.analysis is not None:
            is_registered = (study.out / "analysis.yaml").exists()  # then it is only looked at, also beside a study
            with contextlib.nullcontext() if is_registered else locked(lock):
                study.begin()
                study.register()
        for job in todo:
            print(shlex.join(job.command))
        if (stage == "base" or stage in WAITS_FOR.values()) and study.unfinished(stage):
            print("# the commands of later runs depend on these; print them again afterwards", file=sys.stderr)
            return


def estimate(study: StudyFolder, jobs: int, shard: tuple[int, int], retry: bool) -> None:
    """Time a few gradients and say how long the whole takes on this machine."""
    from asyncsgd.studies.estimate import Estimator

    estimator = Estimator()
    known = set(study.budget_seconds)
    total = 0.0
    study.assume_budgets(estimator.training_seconds)
    for reference in sorted(set(study.budget_seconds) - known):
        print(budget_text(study.plan, reference, f"about {study.budget_seconds[reference]:.3g}"))
    for stage in STAGES:
        todo = study.to_do(stage, shard, retry=retry, pretend=True)
        if todo:
            seconds = estimator.seconds(todo, jobs)
            total += seconds
            print(f"{stage:8}  {counted(len(todo), 'run', 4)} to make: about {seconds / 60:.1f} minutes")
    print(f"in all about {total / 60:.1f} minutes on this machine, {jobs} side by side where clocks are not measured")
