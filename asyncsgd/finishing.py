"""The end of a run: its model, its summary, and what the user is told."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from asyncsgd.errors import reason
from asyncsgd.evaluation import evaluating
from asyncsgd.execute import Run
from asyncsgd.experiment import device_of_worker, facts_of, model_at, save_model
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.measure import peak_bytes, throughput
from asyncsgd.records.console import shown_metrics
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
from asyncsgd.records.machine import available_cores
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, RunFolder
from asyncsgd.runtime.base import Result
from asyncsgd.signals import held

TWICE = Result(INTERRUPTED, "interrupted by the user, twice: only the records are saved", has_parameters=False)


def write_last(folder: RunFolder | None, summary: Mapping[str, Any], run: Run | None) -> None:
    """Write the summary and close the folder; signals wait meanwhile. A resume that was refused leaves the old one."""
    if folder is None:
        return
    with held():
        if run is not None or folder.resume is None:
            folder.write_summary(summary)
        folder.close()


def finish(run: Run, result: Result) -> tuple[Result, dict[str, Any]]:
    """Save the model, write the summary and tell the user the results. Return how the run ended, and the summary."""
    totals, delays, acted = run.record.totals, run.record.totals.delays, run.record.rule_acted
    folder = run.record.folder
    sha256, facts = None, facts_of(run.task, run.setup.seed)
    try:
        if result.has_parameters:
            sha256 = parameters_sha256(run.flat.layout, run.flat.parameters)
            if result.status == DONE:
                with evaluating(run.flat.model):
                    facts |= run.task.final(run.flat.model)
            if run.experiment.saves_model and folder is not None:
                summary = _summary(run, result, sha256, facts)
                save_model(run.experiment, run.task, run.flat.model, folder.path / LAST_MODEL, summary, folder.path)
                _save_best(run, result, summary)
        else:
            totals.last = None  # the loss of another version than the run's last one
    except KeyboardInterrupt:
        sha256, result = None, TWICE
    except (OSError, SafetensorError) as error:
        what = reason(error) if isinstance(error, OSError) else str(error)
        result = Result(FAILED, f"the model could not be saved ({what}); mend that and run again")
    cost: dict[str, Any] = {}
    # The run has ended; only what it cost is not known then.
    with contextlib.suppress(KeyboardInterrupt):
        cost = _cost(run, result, totals.as_summary())
    summary = _summary(run, result, sha256, facts) | cost | run.tracking.finish(result.status)
    write_last(folder, summary, run)
    if result.status == DONE and result.message:
        run.tell(result.message)
    if totals.last is not None:
        rate = (
            f"{totals.num_samples / totals.train_seconds:.0f} samples/s" if totals.train_seconds > 0 else "no training"
        )
        metrics = shown_metrics(totals.last.metrics)
        run.tell("   ".join(filter(None, (f"final  eval loss {totals.last.loss:.4f}", metrics, rate))))
        for name, numbers in totals.last.details.get("evaluations", {}).items():
            run.tell(f"       {name} loss {numbers['loss']:.4f}   {shown_metrics(numbers['metrics'])}".rstrip())
    delay = delays.summary()
    if delays:
        run.tell(
            f"delay  p50 {delay['p50']}   p95 {delay['p95']}   max {delay['max']}   mean {delay['mean']:.2f} updates"
        )
    if acted is not None and (sentence := acted.describe(run.setup.rule.name, run.num_workers)):
        run.tell(sentence)
    if run.profile is not None:
        run.tell(run.profile.describe())
    run.tell(f"{result.status.lower():6} {'' if folder is None else folder.path}".rstrip())
    return result, summary


@contextlib.contextmanager
def _holding(flat: FlatModel, parameters: Tensor) -> Iterator[None]:
    """Let the model of `flat` have other parameters meanwhile."""
    before = flat.parameters.clone()
    with torch.no_grad():
        flat.parameters.copy_(parameters)
    try:
        yield
    finally:
        with torch.no_grad():
            flat.parameters.copy_(before)


def _save_best(run: Run, result: Result, summary: Mapping[str, Any]) -> None:
    """Write the model with the lowest evaluation loss beside the last one."""
    folder, best = run.record.folder, result.best
    if best is None or result.best_parameters is None or folder is None:
        return
    known = {key: value for key, value in summary.items() if key not in ("status", "message", "delay")}
    known |= model_at(**vars(best)) | {"parameters_sha256": summary["best"]["parameters_sha256"]}
    with _holding(run.flat, result.best_parameters):
        save_model(run.experiment, run.task, run.flat.model, folder.path / BEST_MODEL, known, folder.path)


def _best_of(run: Run, result: Result) -> dict[str, Any] | None:
    """What the summary says of the version with the lowest evaluation loss; None where it was not kept."""
    if result.best is None or result.best_parameters is None:
        return None
    sha256 = parameters_sha256(run.flat.layout, result.best_parameters)
    return dataclasses.asdict(result.best) | {"parameters_sha256": sha256}


def _summary(run: Run, result: Result, sha256: str | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    acted = run.record.rule_acted
    return (
        {"status": result.status, "message": result.message, "stopped_early": result.stopped_early}
        | run.experiment.summary()
        | run.record.totals.as_summary()
        | {
            "micro_batches": run.record.totals.micro_batches,
            "rule_acted": None if acted is None else dataclasses.asdict(acted),
            "num_parameters": run.flat.layout.num_parameters,
            "init_sha256": run.init_sha256,
            "parameters_sha256": sha256,
            "best": _best_of(run, result),
            **facts,
        }
    )


def _cost(run: Run, result: Result, totals: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary says of memory, of the machine's use and of rates; None where it is not known."""
    runtime, setup = run.setup.runtime, run.setup
    resident, cuda = peak_bytes(run.flat.parameters.device)
    cost: dict[str, Any] = {
        "memory": {"leader": [resident, cuda], "workers": sorted(run.record.totals.peak_bytes.items())},
        "usage": run.usage.finish(),
        "throughput": None,
    }
    if runtime.clock == "measured":
        cost["machine_load"] = run.machine_load.summary()
    if result.status == DONE and runtime.clock == "measured":
        device = device_of_worker(setup.device, 0)
        devices = available_cores() // runtime.threads if device == "cpu" else torch.cuda.device_count()
        cost["throughput"] = throughput(
            run.task,
            run.flat.model,
            totals,
            seed=setup.seed,
            device=device,
            num_devices=max(1, min(run.num_workers, devices)),
            precision=setup.precision,
        )
    return cost
