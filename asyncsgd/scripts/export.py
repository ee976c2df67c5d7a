"""Write the last model of a run, or that of a checkpoint, as a folder that transformers reads.

    python -m asyncsgd export runs/stilt_mlm-async-w4-s0-3f9a1c --out model-at-5000
    python -m asyncsgd export runs/stilt_mlm-async-w4-s0-3f9a1c --checkpoint 000000005000 --out model-at-5000

Without ``--checkpoint`` it is the model at the end of a run that is DONE, and of any other run that of its newest
checkpoint that is whole. With ``--best`` it is the one of the lowest evaluation loss up to there."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
from pathlib import Path

from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, find_run
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.scripts.base import add_task_flag


def run(argv: list[str], prog: str) -> int:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Write the last model of a run, or that of a checkpoint.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="a run folder, how its name begins, or last")
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="its name in RUN/checkpoints (default: the end of a run that is DONE, else the newest checkpoint)",
    )
    parser.add_argument(
        "--best", action="store_true", help="of the evaluations up to it, the model with the lowest loss (--keep-best)"
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the model")
    add_task_flag(parser)
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    folder = find_run(given.run)
    out = given.out
    if out.exists():
        raise UsageError(f"{out} is there already; type another --out")
    summary = read_summary(folder) if given.checkpoint is None else {}
    finished = summary.get("status") == DONE
    saved = folder / (BEST_MODEL if given.best else LAST_MODEL)
    if finished and saved.is_dir():
        from asyncsgd.tasks.models import save_whole  # imports torch, which is slow

        def copy(new: Path) -> None:
            shutil.copytree(saved, new, dirs_exist_ok=True)

        try:
            save_whole(copy, out)
        except OSError as error:
            raise UsageError(f"{out} cannot be written: {error}") from error
        which = "best model" if given.best else "model at the end"
        num_samples = (summary["best"] if given.best else summary)["num_samples"]
        print(f"saved  the {which} of the run, after {num_samples} samples, in {out}")
    else:
        made = make(folder, given, summary["num_updates"] if finished else None)
        print(f"saved  {made} in {out}")
    return 0


def make(folder: Path, given: argparse.Namespace, num_updates: int | None) -> str:
    """Build the run's model, give it the parameters of a checkpoint and save it; what it is.

    Raises:
        UsageError: if there is no such checkpoint, or none after `num_updates`, at the end of a run that is DONE.
    """
    import torch

    from asyncsgd.core.checkpoints import KeptState, find, load_state
    from asyncsgd.records.totals import Totals
    from asyncsgd.run.finish import model_at, save_model
    from asyncsgd.run.written import Given, run_beside
    from asyncsgd.scripts.task import class_given

    checkpoint = find(folder, lambda checkpoint: given.checkpoint in (None, checkpoint.name)).checkpoint
    if num_updates not in (None, checkpoint.version):
        raise UsageError(
            f"{folder} is DONE after {num_updates} updates and has kept no model, and its last checkpoint is of "
            f"{checkpoint.version}; type --checkpoint {checkpoint.name}"
        )
    run = run_beside(folder, Given(class_given(given.task), cache=given.cache_dir)).prepared()
    torch.set_num_threads(run.runtime.threads)
    kept = KeptState(load_state(folder, checkpoint.name, rule_module=type(run.rule).__module__))
    totals = Totals()
    totals.load_state(checkpoint.totals)
    known = totals.as_summary()
    parameters = kept.parameters
    values = None
    if kept.statistics is not None:
        run = dataclasses.replace(run, changing_buffers=tuple(kept.statistics["names"]))
        values = kept.statistics["values"]
    if given.best:
        best, best_parameters, values = kept.best
        if best is None or best_parameters is None:
            raise UsageError(f"{folder} has kept its last model only; train with --keep-best, or drop --best")
        parameters = best_parameters
        known = model_at(best)
    flat = run.flat(parameters, statistics=values)
    if not given.best:
        run.show_statistics(flat)
    save_model(run, flat, given.out, known, folder)
    return f"the model after {known['num_samples']} samples and {known['num_updates']} updates"
