"""The end of a run: its model, its summary, and what the user is told."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from asyncsgd.errors import UsageError, reason
from asyncsgd.evaluation import evaluating
from asyncsgd.execute import Live
from asyncsgd.flat import parameters_sha256
from asyncsgd.measure import peak_bytes, throughput
from asyncsgd.models import save_whole
from asyncsgd.recorded_run import read_of_run
from asyncsgd.records.console import shown_metrics
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
from asyncsgd.records.machine import available_cores
from asyncsgd.records.model_card import model_card
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, RunFolder
from asyncsgd.runtime.base import Result
from asyncsgd.settings.run import Run, device_of_worker
from asyncsgd.signals import held
from asyncsgd.tasks.base import Task, fingerprint

TWICE = Result(INTERRUPTED, "interrupted by the user, twice: only the records are saved", has_parameters=False)


def facts_of(run: Run) -> dict[str, Any]:
    """The facts of a prepared run's task, with a fingerprint of its data and a name for them."""
    facts = {"data": run.task.name, **run.task.facts()}
    if "data_fingerprint" not in facts:
        facts["data_fingerprint"] = fingerprint(run.task.data(run.seed))
    return facts


def model_at(version: int, num_samples: int, eval_loss: float, metrics: Mapping[str, float]) -> dict[str, Any]:
    """What the card of the version with the lowest evaluation loss says in place of its run's summary."""
    return {
        "num_samples": num_samples,
        "num_updates": version,
        "final_eval_loss": eval_loss,
        "metrics": metrics,
        "chosen_for": "the lowest evaluation loss of its run",
    }


def save_model(run: Run, model: nn.Module, folder: Path, summary: Mapping[str, Any], run_folder: Path | None) -> None:
    """Write a model of a run and its card, README.md; `folder` is there when both are complete.

    Args:
        run: prepared.
        summary: what is known of the run, as summary.json has it; see `model_card`.
        run_folder: its files are what the card is made from too. None, or a file missing: it says less.
    """
    task, recipe = run.task, run.recipe
    optimizer = repr(recipe.build) if dataclasses.is_dataclass(recipe.build) else str(recipe)
    steps = {
        "optimizer": f"{optimizer}, weight decay {recipe.weight_decay:g}, clip norm {recipe.clip_norm:g}",
        "schedule": str(run.schedule),
        "precision": run.machine.precision,
    }
    environment, command, base_model = {}, None, summary.get("base_model")
    with contextlib.suppress(OSError, UsageError):
        if run_folder is not None:
            environment = read_of_run(run_folder, "environment.json")
            first = (run_folder / "settings.yaml").read_text(encoding="utf-8").partition("\n")[0]
            command = first.removeprefix("# ") if first.startswith("# python ") else None
    card = model_card(
        summary,
        steps=steps,
        environment=environment,
        command=command,
        loading=_loading(task, run.seed),
        auto_class=task.auto_class,
        hub_model=base_model if isinstance(base_model, str) and not Path(base_model).expanduser().exists() else None,
    )

    def save(new: Path) -> None:
        task.save(model, new)
        if not (new / "README.md").exists():
            (new / "README.md").write_text(card, encoding="utf-8", errors="replace")

    save_whole(save, folder)


def _loading(task: Task, seed: int) -> str:
    """Code that loads the model of `task` in the folder where it is saved."""
    if task.auto_class is not None:
        return (
            f"from transformers import {task.auto_class}, AutoTokenizer\n\n"
            f'model = {task.auto_class}.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")'
        )
    kind, module = type(task), type(task).__module__
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "the_script").stem
    fields = dataclasses.fields(task)  # type: ignore[arg-type]
    values = [
        f"{field.name}={value!r}"
        for field in fields
        if not field.metadata.get("found") and repr(value := getattr(task, field.name)) != repr(field.default)
    ]
    prepared = f'.prepare({seed}, Path("cache"))' if any(field.metadata.get("found") for field in fields) else ""
    return (
        ("from pathlib import Path\n\n" if prepared else "")
        + f"from safetensors.torch import load_model\n\nfrom {module} import {kind.__qualname__}\n\n"
        f"model = {kind.__qualname__}({', '.join(values)}){prepared}.model({seed})\n"
        'load_model(model, "model.safetensors")'
    )


def write_last(folder: RunFolder | None, summary: Mapping[str, Any], live: Live | None) -> None:
    """Write the summary and close the folder; signals wait meanwhile. A resume that was refused leaves the old one."""
    if folder is None:
        return
    with held():
        if live is not None or folder.resume is None:
            folder.write_summary(summary)
        folder.close()


def finish(live: Live, result: Result) -> tuple[Result, dict[str, Any]]:
    """Save the model, write the summary and tell the user the results. Return how the run ended, and the summary."""
    totals, delays, acted = live.record.totals, live.record.totals.delays, live.record.rule_acted
    folder = live.record.folder
    sha256, facts = None, facts_of(live.run)
    try:
        if result.has_parameters:
            sha256 = parameters_sha256(live.flat.layout, live.flat.parameters)
            if result.status == DONE:
                with evaluating(live.flat.model):
                    facts |= live.run.task.final(live.flat.model)
            if live.run.saves_model and folder is not None:
                summary = _summary(live, result, sha256, facts)
                save_model(live.run, live.flat.model, folder.path / LAST_MODEL, summary, folder.path)
                _save_best(live, result, summary)
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
        cost = _cost(live, result, totals.as_summary())
    summary = _summary(live, result, sha256, facts) | cost | live.tracking.finish(result.status)
    write_last(folder, summary, live)
    if result.status == DONE and result.message:
        live.tell(result.message)
    if totals.last is not None:
        rate = (
            f"{totals.num_samples / totals.train_seconds:.0f} samples/s" if totals.train_seconds > 0 else "no training"
        )
        metrics = shown_metrics(totals.last.metrics)
        live.tell("   ".join(filter(None, (f"final  eval loss {totals.last.loss:.4f}", metrics, rate))))
        for name, numbers in totals.last.details.get("evaluations", {}).items():
            live.tell(f"       {name} loss {numbers['loss']:.4f}   {shown_metrics(numbers['metrics'])}".rstrip())
    delay = delays.summary()
    if delays:
        live.tell(
            f"delay  p50 {delay['p50']}   p95 {delay['p95']}   max {delay['max']}   mean {delay['mean']:.2f} updates"
        )
    if acted is not None and (sentence := acted.describe(live.run.rule.name, live.num_workers)):
        live.tell(sentence)
    if live.profile is not None:
        live.tell(live.profile.describe())
    live.tell(f"{result.status.lower():6} {'' if folder is None else folder.path}".rstrip())
    return result, summary


def _save_best(live: Live, result: Result, summary: Mapping[str, Any]) -> None:
    """Write the model with the lowest evaluation loss beside the last one."""
    folder, best = live.record.folder, result.best
    if best is None or result.best_parameters is None or folder is None:
        return
    known = {key: value for key, value in summary.items() if key not in ("status", "message", "delay")}
    known |= model_at(**vars(best)) | {"parameters_sha256": summary["best"]["parameters_sha256"]}
    save_model(live.run, live.run.flat(result.best_parameters).model, folder.path / BEST_MODEL, known, folder.path)


def _best_of(live: Live, result: Result) -> dict[str, Any] | None:
    """What the summary says of the version with the lowest evaluation loss; None where it was not kept."""
    if result.best is None or result.best_parameters is None:
        return None
    sha256 = parameters_sha256(live.flat.layout, result.best_parameters)
    return dataclasses.asdict(result.best) | {"parameters_sha256": sha256}


def _summary(live: Live, result: Result, sha256: str | None, facts: Mapping[str, Any]) -> dict[str, Any]:
    acted = live.record.rule_acted
    return (
        {"status": result.status, "message": result.message, "stopped_early": result.stopped_early}
        | live.run.summary()
        | live.record.totals.as_summary()
        | {
            "micro_batches": live.record.totals.micro_batches,
            "rule_acted": None if acted is None else dataclasses.asdict(acted),
            "num_parameters": live.flat.layout.num_parameters,
            "init_sha256": live.init_sha256,
            "parameters_sha256": sha256,
            "best": _best_of(live, result),
            **facts,
        }
    )


def _cost(live: Live, result: Result, totals: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary says of memory, of the machine's use and of rates; None where it is not known."""
    runtime, run = live.run.runtime, live.run
    resident, cuda = peak_bytes(live.flat.parameters.device)
    cost: dict[str, Any] = {
        "memory": {"leader": [resident, cuda], "workers": sorted(live.record.totals.peak_bytes.items())},
        "usage": live.usage.finish(),
        "throughput": None,
    }
    if runtime.clock == "measured":
        cost["machine_load"] = live.machine_load.summary()
    if result.status == DONE and runtime.clock == "measured":
        device = device_of_worker(run.device, 0)
        devices = available_cores() // runtime.threads if device == "cpu" else torch.cuda.device_count()
        cost["throughput"] = throughput(
            live.run.task,
            live.flat.model,
            totals,
            seed=run.seed,
            device=device,
            num_devices=max(1, min(live.num_workers, devices)),
            precision=run.precision,
        )
    return cost
