"""The end of a run: its model, its summary, and what the user is told."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncsgd.core.flat import FlatModel, parameters_sha256
from asyncsgd.core.limits import Best, Result
from asyncsgd.core.signals import signals_held
from asyncsgd.errors import UsageError, reason
from asyncsgd.records.console import shown_metrics
from asyncsgd.records.events import DONE, FAILED, INTERRUPTED
from asyncsgd.records.hardware import rounds_otherwise
from asyncsgd.records.model_card import model_card
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, RunFolder
from asyncsgd.records.totals import Totals
from asyncsgd.run.choose_folder import has_checkpoint
from asyncsgd.run.execute import Live
from asyncsgd.run.found import found_by
from asyncsgd.run.run import Run, device_of_worker
from asyncsgd.settings.yaml_reader import read_of_run
from asyncsgd.tasks.base import Task, fingerprint
from asyncsgd.tasks.check import normalising_over_batch
from asyncsgd.tasks.models import save_whole
from asyncsgd.tasks.tensors import train_fingerprint
from asyncsgd.worker.evaluation import evaluating, scored
from asyncsgd.worker.profile import flops_per_sample, peak_bytes, peak_flops

RATES = ("tokens_per_second", "model_flops_per_sample", "peak_flops_per_second", "model_flops_utilisation")
SHORTEST_SECONDS = 1.0
"""A training that was shorter gets no rates: they would be those of its beginning."""
SAMPLE_ORDER = "order of samples"
"""The name under which `hashes_at_start` has the number of the task's order of samples."""
INITIAL_PARAMETERS = "initial parameters"
"""The name under which `hashes_at_start` has the hash of the initial parameters."""
BATCHES = 8
"""Samples have different lengths, so tokens and operations are means over so many batches."""
INTERRUPTED_AT_ONCE = Result(
    INTERRUPTED, "interrupted by the user, at once: only the records are saved", has_parameters=False
)
AMID_A_STEP = dataclasses.replace(
    INTERRUPTED_AT_ONCE, message="interrupted by the user, and killed before its step had ended"
)


def facts_of(run: Run) -> dict[str, Any]:
    """The facts of a prepared run's task, with a fingerprint of its data and a name for them."""
    facts = {"data": run.task.name, **run.task.facts()}
    if "data_fingerprint" not in facts:
        facts["data_fingerprint"] = fingerprint(run.task.data(run.seed))
    return facts


def facts_at_start(run: Run, flat: FlatModel) -> dict[str, Any]:
    """`facts_of` a run that is about to train, and what else it begins from: the hash of its whole model, a fingerprint
    of training data that have no other one, and whether a layer normalises over the batch.
    """
    task = run.task
    sha256 = parameters_sha256(flat.layout, flat.parameters)
    facts = {"data": task.name, "init_sha256": sha256, **task.facts()}
    if "data_fingerprint" not in facts:
        data = task.data(run.seed)
        facts["data_fingerprint"] = fingerprint(data)
        facts["train_fingerprint"] = train_fingerprint(data, task.batch_size, run.limits.samples)
    facts["initial_model_sha256"] = sha256
    facts["normalises_over_batch"] = normalising_over_batch(flat.model) is not None
    return facts


def hashes_at_start(run: Run, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hashes of what a run began from. A run that goes on, and another host that takes part, must find it as
    it was.

    Args:
        run: the run, prepared.
        facts: see `facts_at_start`.
    """
    began = {"data": facts["data_fingerprint"], INITIAL_PARAMETERS: facts["initial_model_sha256"]}
    for one in facts.get("evaluation_sets", ())[1:]:
        began[f"texts of {one['name']}"] = one["fingerprint"]
    if "candidates_sha256" in facts:
        began["candidates"] = facts["candidates_sha256"]
    if run.task.sample_order is not None:
        began[SAMPLE_ORDER] = run.task.sample_order
    return began


def comparable(
    began: Mapping[str, Any], elsewhere: Iterable[Mapping[str, Any]], here: Mapping[str, Any]
) -> dict[str, Any]:
    """Return those of `began`, from which a run has begun elsewhere, that must be equal here.

    Initial parameters that are drawn have other last bits on another processor. They are no part of what goes on:
    a checkpoint, or rank 0, has the parameters.

    Args:
        began: see `hashes_at_start`.
        elsewhere: the environments in which the run was made.
        here: the environment of this process.
    """
    compared = dict(began)
    if any(rounds_otherwise(environment, here) for environment in elsewhere):
        del compared[INITIAL_PARAMETERS]
    return compared


def model_at(best: Best) -> dict[str, Any]:
    """What is known of the version with the lowest evaluation loss, for `save_model`."""
    counts = {"num_samples": best.num_samples, "num_updates": best.version, "final_eval_loss": best.eval_loss}
    return {**counts, "metrics": best.metrics, "chosen_for": "the lowest evaluation loss of its run"}


def save_model(run: Run, flat: FlatModel, folder: Path, known: Mapping[str, Any], run_folder: Path | None) -> None:
    """Write a model of a run and its card, README.md; `folder` is there when both are complete.

    Args:
        run: prepared.
        known: what is known of this version, as summary.json has it; see `model_card`.
        run_folder: its files are what the card is made from too. None, or a file missing: it says less.
    """
    task = run.task
    recipe = run.recipe
    optimizer = repr(recipe.build) if dataclasses.is_dataclass(recipe.build) else str(recipe)
    optimizer += f", weight decay {recipe.weight_decay:g}, clip norm {recipe.clip_norm:g}"
    known = {
        **run.summary(),
        **facts_of(run),
        "num_parameters": flat.layout.num_parameters,
        "parameters_sha256": known.get("parameters_sha256") or parameters_sha256(flat.layout, flat.parameters),
        "steps": {"optimizer": optimizer, "schedule": str(run.schedule), "precision": run.machine.precision},
        **known,
    }
    with contextlib.suppress(OSError, UsageError):
        if run_folder is not None:
            known["versions"] = read_of_run(run_folder, "environment.json").get("versions")
            first = (run_folder / "settings.yaml").read_text(encoding="utf-8").partition("\n")[0]
            is_command = first.startswith(("# python ", "# asyncsgd "))  # a run of asyncsgd.train has none
            known["command"] = first.removeprefix("# ") if is_command else None
    base_model = known.get("base_model")
    hub_model = base_model if isinstance(base_model, str) and not Path(base_model).expanduser().exists() else None
    card = model_card(known, loading=_loading(task, run.seed), auto_class=task.auto_class, hub_model=hub_model)

    def save(new: Path) -> None:
        task.save(flat.model, new)
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
    module = type(task).__module__
    if module == "__main__":
        module = Path(getattr(sys.modules["__main__"], "__file__", None) or "the_script").stem
    prepared = f'.prepare({seed}, Path("cache"))' if found_by(task) else ""
    return (
        ("from pathlib import Path\n\n" if prepared else "")
        + f"from safetensors.torch import load_file\n\nfrom {module} import {type(task).__qualname__}\n\n"
        f'model = {task!r}{prepared}.model({seed})\nmodel.load_state_dict(load_file("model.safetensors"))'
    )


def write_last(folder: RunFolder | None, summary: Mapping[str, Any]) -> None:
    """Write the summary and close the folder; signals wait meanwhile. A resume that was refused leaves the old one."""
    if folder is None:
        return
    with signals_held():
        if folder.is_taken_up:
            folder.write_summary(summary)
        folder.close()


def note_interrupted(live: Live) -> None:
    """Write what summary.json says if this process is killed from now on; it may be amid a step."""
    folder = live.record.folder
    if folder is not None:
        with contextlib.suppress(Exception):  # the step may change what is counted here
            totals = copy.copy(live.record.totals)
            totals.last = None  # the loss of another version than the run's last one
            folder.write_summary(_summary(live, AMID_A_STEP, None, live.facts, totals))


def finish(live: Live, result: Result) -> tuple[Result, dict[str, Any]]:
    """Save the model, write the summary and tell the user the results. Return how the run ended, and the summary."""
    run = live.run
    totals = live.record.totals
    folder = live.record.folder
    flat = live.flat
    sha256: str | None = None
    facts = dict(live.facts)
    try:
        if result.has_parameters:
            sha256 = parameters_sha256(flat.layout, flat.parameters)
            run.show_statistics(flat)
            if result.status == DONE:
                errors: list[str] = []
                with evaluating(flat.model):
                    facts |= scored("final", lambda: run.task.final(flat.model), errors)
                totals.score_error = totals.score_error or next(iter(errors), None)
            if run.saves_model and folder is not None:
                summary = _summary(live, result, sha256, facts, totals)
                save_model(run, flat, folder.path / LAST_MODEL, summary, folder.path)
                if result.best is not None and result.best_parameters is not None:
                    best = run.flat(result.best_parameters, statistics=result.best_statistics)
                    known = model_at(result.best)
                    save_model(run, best, folder.path / BEST_MODEL, known, folder.path)
        else:
            totals.last = None  # the loss of another version than the run's last one
    except KeyboardInterrupt:
        sha256 = None
        result = INTERRUPTED_AT_ONCE
    except Exception as error:  # of a task's own save(), too
        what = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        result = _without_model(live, result, f"the model could not be saved ({what})")
    summary = _summary(live, result, sha256, facts, totals)
    with contextlib.suppress(KeyboardInterrupt):  # the run has ended; only what it cost is not known then
        summary |= _cost(live, summary)
    summary |= live.tracking.finish(result.status)
    write_last(folder, summary)
    for line in _results(live, result, summary):
        live.tell(line)
    return result, summary


def _without_model(live: Live, result: Result, why: str) -> Result:
    """The result of a run that ended as `result` says, and whose model could not be saved. One that would be DONE has
    failed, and every other one ended as it did."""
    folder = live.record.folder
    status = result.status
    if status == DONE:
        status = FAILED
        how = f"type --resume {folder.path}" if folder is not None and has_checkpoint(folder.path) else "run again"
        why += f"; mend that and {how}"
    message = f"{result.message}; {why}" if result.message else why
    return dataclasses.replace(result, status=status, message=message)


def _results(live: Live, result: Result, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that the user is told at the end of a run."""
    rate = summary["samples_per_second"]
    delay = summary["delay"]
    acted = live.record.rule_acted
    if result.status == DONE and result.message:
        yield result.message
    if summary["score_error"] is not None:
        yield f"score  {summary['score_error']}"
    if summary["metrics"] is not None:
        shown = [f"final  eval loss {summary['final_eval_loss']:.4f}", shown_metrics(summary["metrics"])]
        yield "   ".join(filter(None, [*shown, "no training" if rate is None else f"{rate:.0f} samples/s"]))
        for name, numbers in summary["details"].get("evaluations", {}).items():
            yield f"       {name} loss {numbers['loss']:.4f}   {shown_metrics(numbers['metrics'])}".rstrip()
    if result.status == DONE and summary["num_samples"] and not summary["num_updates"]:
        yield f"note   {live.run.rule.name} took no update in the whole run, so the model is as it was at the beginning"
    if delay["max"] is not None:
        yield f"delay  p50 {delay['p50']}   p95 {delay['p95']}   max {delay['max']}   mean {delay['mean']:.2f} updates"
    if acted is not None and (sentence := acted.describe(live.run.rule.name, live.num_workers)):
        yield sentence
    if live.profile is not None:
        yield live.profile.describe()
    yield f"{result.status.lower():6} {'' if live.record.folder is None else live.record.folder.path}".rstrip()


def _summary(
    live: Live, result: Result, sha256: str | None, facts: Mapping[str, Any], totals: Totals
) -> dict[str, Any]:
    acted = live.record.rule_acted
    best = None
    if result.best is not None and result.best_parameters is not None:
        best_sha256 = parameters_sha256(live.flat.layout, result.best_parameters)
        best = dataclasses.asdict(result.best) | {"parameters_sha256": best_sha256}
    return {
        **{"status": result.status, "message": result.message, "stopped_early": result.stopped_early},
        **live.run.summary(),
        **totals.as_summary(),
        "micro_batches": totals.micro_batches,
        "rule_acted": None if acted is None else dataclasses.asdict(acted),
        "num_parameters": live.flat.layout.num_parameters,
        "parameters_sha256": sha256,
        **_of_statistics(live, sha256 is not None),
        "best": best,
        **facts,
    }


def _of_statistics(live: Live, is_known: bool) -> dict[str, Any]:
    """What the summary says of running statistics; nothing of a model without them."""
    statistics = live.flat.statistics
    budget = live.run.budget
    if statistics is None:
        return {}
    return {
        "statistics_sha256": statistics.sha256 if is_known else None,
        "statistics": statistics.kinds,
        "batch_statistics": budget.batch_statistics or "running",
        "statistics_batches": budget.statistics_batches,
    }


def _cost(live: Live, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the summary says of memory, of the machine's use and of rates; None where it is not known."""
    resident, cuda = peak_bytes(live.flat.parameters.device)
    cost: dict[str, Any] = {
        "memory": {"leader": [resident, cuda], "workers": sorted(live.record.totals.peak_bytes.items())},
        "usage": live.machine.finish(),
        "throughput": None,
    }
    if live.run.runtime.clock == "measured":
        cost["machine_load"] = live.machine.load()
        if summary["status"] == DONE:
            cost["throughput"] = _throughput(live, summary)
    return cost


def _throughput(live: Live, summary: Mapping[str, Any]) -> dict[str, float | None]:
    run = live.run
    task = live.run.task
    rate = summary["samples_per_second"]
    known: dict[str, float | None] = dict.fromkeys(RATES)
    if rate is None or summary["train_seconds"] < SHORTEST_SECONDS:
        return known
    with contextlib.suppress(Exception):  # a user's own task may have fewer batches, and the run has ended well
        data = task.data(run.seed)
        batches = [data.batch(0, index) for index in range(BATCHES)]
        tokens = [task.count_tokens(batch) for batch in batches]
        if None not in tokens:
            known["tokens_per_second"] = rate * sum(filter(None, tokens)) / (len(batches) * task.batch_size)
        known["model_flops_per_sample"] = flops_per_sample(task, live.flat.model, batches) or None
    with contextlib.suppress(RuntimeError):  # e.g. no product in this number format
        known["peak_flops_per_second"] = peak_flops(device_of_worker(run.device, 0), run.precision)
    flops = known["model_flops_per_sample"]
    peak = known["peak_flops_per_second"]
    if flops and peak:
        num_devices = run.num_devices // (run.runtime.threads if run.device == "cpu" else 1)
        known["model_flops_utilisation"] = flops * rate / (max(1, num_devices) * peak)
    return known
