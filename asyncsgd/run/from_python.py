"""A run that Python describes, from `asyncsgd.train` or a run folder: started, carried out, and handed back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from asyncsgd.backends.launch import Launch, fork_server
from asyncsgd.backends.token import check_hosts
from asyncsgd.errors import RunError, UsageError
from asyncsgd.records.events import EVENTS, FAILED, Evaluation, Record, read_events
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, RunFolder
from asyncsgd.records.trackers import Identity, names_in
from asyncsgd.records.tracking import Tracking
from asyncsgd.run import runtimes
from asyncsgd.run.callbacks import Callback
from asyncsgd.run.choose_folder import open_named_folder
from asyncsgd.run.elastic import agreed_launch
from asyncsgd.run.lifecycle import Ended, carry_out
from asyncsgd.run.other_host import follow_as_host, follow_as_rank
from asyncsgd.run.run import Run, cache_folder
from asyncsgd.run.written import task_and_seed
from asyncsgd.settings.groups import Output
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.check import check_can_be_sent, is_main_of_package, refuse_in_worker

if TYPE_CHECKING:  # it takes a second to import, which training should not
    import pandas

_NO_BEST = "the run has kept its last model only; train with keep_best=True, or type --keep-best"


@dataclasses.dataclass(frozen=True)
class TrainedRun:
    """A run that has ended."""

    summary: Mapping[str, Any]
    """The summary of the run, as summary.json has it."""
    evaluations: tuple[Evaluation, ...]
    """The evaluations in order: the first is at the start of the run, the last at its end."""
    folder: Path | None
    """The folder of the run; None for a run that has written nothing."""
    _model: Callable[[bool], nn.Module]

    @property
    def status(self) -> str:
        """How the run ended: DONE, DIVERGED, INTERRUPTED or FAILED."""
        return str(self.summary.get("status"))

    def frame(self) -> pandas.DataFrame:
        """A row for every evaluation: updates, samples, seconds, loss and every metric as metric.NAME."""
        import pandas

        rows = []
        for evaluation in self.evaluations:
            row: dict[str, float] = {
                "updates": evaluation.version,
                "samples": evaluation.total_samples,
                "seconds": evaluation.train_seconds,
                "loss": evaluation.loss,
            }
            for name, value in evaluation.metrics.items():
                row[f"metric.{name}"] = math.nan if value is None else value
            rows.append(row)
        return pandas.DataFrame(rows)

    def model(self, *, best: bool = False) -> nn.Module:
        """The trained model, on the CPU and in evaluation mode.

        Args:
            best: return the model of the lowest evaluation loss, in place of the last one; see ``summary["best"]``.

        Raises:
            UsageError: if the run has not kept it.
        """
        return self._model(best).cpu().eval()


def start(
    run: Run,
    folder: Path | None,
    *,
    resume: bool,
    quiet: bool = False,
    report: Callable[[Record], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainedRun:
    """Train a run that `asyncsgd.train` has described, or that was read from a run folder. The arguments are those of
    `asyncsgd.train`."""
    runtime = run.runtime
    if folder is not None:
        _check_can_be_written(run.task)
    trackers = names_in(run.output.track)
    launch = _launch(runtime, run.output)
    if not launch.is_needed(has_server=runtime.has_server):
        raise SystemExit(0)  # rank 0 starts the workers, so torchrun's other ranks have nothing to do
    leads_other_host = launch.leads_other_host and runtime.has_server
    run_of_follower = run
    if folder is not None:  # on another host a mirror keeps its copies in a folder of the same name
        run_of_follower = dataclasses.replace(run, output=dataclasses.replace(run.output, run_dir=str(folder)))
    if not launch.leads and not leads_other_host:
        follow_as_rank(run_of_follower, launch, goes_on=_goes_on_in)  # it never returns: this rank ends with the run
    needs_fork_server = not runtime.in_one_process and launch.starts_workers(has_server=runtime.has_server)
    if not runtime.in_one_process:
        refuse_in_worker()
        check_can_be_sent(run.task, f"the task {type(run.task).__name__}")
    if needs_fork_server:
        _check_workers_can_start(run)
    with threads_as_before():
        context = fork_server(None, *runtime.preload, *run.task.preload) if needs_fork_server else None
        if launch.is_elastic:
            if folder is None or not resume:
                raise UsageError(
                    "with --nnodes MIN:MAX a run goes on in its folder; give train folder=FOLDER and resume=True"
                )
            launch = agreed_launch(run, launch, folder, lambda: None)  # nobody listens yet: Ctrl-C raises by itself
            leads_other_host = launch.leads_other_host  # hosts come and go with a server alone
        if leads_other_host and context is not None:
            follow_as_host(run_of_follower, launch, context, goes_on=_goes_on_in)  # it never returns
        opened = None if folder is None else open_named_folder(folder, run, resume=resume)
        seen = _evaluations_so_far(opened)

        def note(record: Record) -> None:
            if isinstance(record, Evaluation):
                seen.append(record)
            if report is not None:
                report(record)

        tracking = None if opened is None else Tracking(trackers, Identity.of(opened.path))
        ended = carry_out(
            run, launch, opened, context, quiet=quiet, receivers=(note,), callbacks=callbacks, tracking=tracking
        )
    if ended.unexpected is not None:
        raise ended.unexpected
    if ended.result.status == FAILED:
        raise RunError(ended.result.message)
    score_error = ended.summary.get("score_error")
    if score_error is not None:
        warnings.warn(f"the run is without score: {score_error}", stacklevel=2)
    path = None if opened is None else opened.path
    return TrainedRun(ended.summary, tuple(seen), path, functools.partial(_model_in_memory, ended))


def _check_can_be_written(task: Task) -> None:
    if not dataclasses.is_dataclass(task):
        raise UsageError(
            f"{type(task).__name__} is no dataclass, so its fields cannot be written into settings.yaml; write "
            f"@dataclasses.dataclass(frozen=True) above the class, or give no folder"
        )


def _check_workers_can_start(run: Run) -> None:
    """Refuse what a worker process cannot be sent, and a script that would train again in it."""
    check_can_be_sent(run.recipe.build, f"optimizer {run.recipe.name}")
    if run.shape is not None:
        check_can_be_sent(run.shape, f"schedule {run.steps.schedule}")
    check_guard()


def _evaluations_so_far(opened: RunFolder | None) -> list[Evaluation]:
    """The evaluations up to the checkpoint from which a run goes on; empty for a new run."""
    if opened is None or opened.resume is None:
        return []
    records = read_events(opened.path / EVENTS, opened.resume.checkpoint.events_bytes)
    return [Evaluation.of(record) for record in records if record["kind"] == "evaluate"]


def _model_in_memory(ended: Ended, best: bool) -> nn.Module:
    """The last model of a run that this process has trained, or the best one."""
    live = ended.live
    result = ended.result
    if live is None or not result.has_parameters:
        raise UsageError(f"the run is {result.status} and has no parameters; run it again")
    if not best:
        return live.flat.model
    if result.best_parameters is None:
        raise UsageError(_NO_BEST)
    return live.run.flat(result.best_parameters, statistics=result.best_statistics).model


def saved_model(folder: Path, task: Task | type[Task] | None, best: bool) -> nn.Module:
    """The last model of a run folder, or the best one, on the CPU.

    Raises:
        UsageError: if the folder does not hold it.
    """
    from safetensors.torch import load_file, load_model

    weights = folder / (BEST_MODEL if best else LAST_MODEL) / "model.safetensors"
    if not weights.is_file():
        raise UsageError(_NO_BEST if best else f"{folder} holds no model; run it again")
    task_of_run, seed = task_and_seed(folder, task)
    model = task_of_run.prepare(seed, cache_folder(None)).model(seed)
    try:
        model.load_state_dict(load_file(weights))
    except RuntimeError:  # earlier versions wrote a tied weight once, under one of its names
        load_model(model, str(weights))
    return model


def _launch(runtime: runtimes.Runtime, output: Output) -> Launch:
    """This process's rank if torchrun made several, otherwise a launch of this process alone."""
    launch = Launch.read(os.environ, runtime.num_workers, nproc_given=True)  # a runtime names its number of workers
    runtime.check_launch(launch.rank, launch.several_hosts)
    if launch.several_hosts:  # else how hosts meet is of no use, and the same script trains alone
        check_hosts(output, launch, has_server=runtime.has_server)
    return launch


def _goes_on_in(folder: Path) -> str:
    """Say in words how a run goes on from the copy of its checkpoints on a mirror."""
    return f"the same script, where train is given folder={str(folder)!r} and resume=True"


def check_guard() -> None:
    """Refuse a script that would start training again in every worker process that imports it."""
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if is_main_of_package() or not script.is_file():
        return  # nobody imports it again
    if not re.search(r"^if .*__name__", script.read_text("utf-8", "replace"), re.MULTILINE):
        raise UsageError(
            f"worker processes import this script, and would train in turn; in {script.name}, put what it does under "
            f'if __name__ == "__main__":'
        )


@contextlib.contextmanager
def threads_as_before() -> Iterator[None]:
    """Put torch's number of threads back afterwards."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
