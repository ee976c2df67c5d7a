"""Write the last model of a run, or that of a checkpoint, as a folder that transformers reads.

    python -m asyncsgd export runs/stilt_mlm-async-w4-s0-3f9a1c --out model-at-5000
    python -m asyncsgd export runs/stilt_mlm-async-w4-s0-3f9a1c --checkpoint 000000005000 --out model-at-5000

Without ``--checkpoint`` it is the model at the end of a run that is DONE, and of any other run that of its newest
checkpoint that is whole. With ``--best`` it is the one of the lowest evaluation loss up to there."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from asyncsgd.errors import UsageError
from asyncsgd.records.events import DONE
from asyncsgd.records.run_folder import BEST_MODEL, LAST_MODEL, find_run
from asyncsgd.scripts.run_folder import read_summary

if TYPE_CHECKING:
    from asyncsgd.checkpoints import Checkpoint  # imports torch, which is slow


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m asyncsgd export",
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
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    given = parser.parse_args(argv)
    given.run_dir = find_run(given.run)
    export(given)
    return 0


def export(arguments: argparse.Namespace) -> None:
    """Copy the model that a finished run has written, or make that of a checkpoint.

    Raises:
        UsageError: if there is no such checkpoint, none at the end of a finished run, or the folder is there already.
    """
    folder, name = arguments.run_dir, arguments.checkpoint
    if arguments.out.exists():
        raise UsageError(f"{arguments.out} is there already; type another --out")
    if not (folder / "settings.yaml").is_file():
        raise UsageError(f"{folder} is not a run folder: it has no settings.yaml")

    summary = read_summary(folder) if name is None else {}
    finished = summary.get("status") == DONE
    saved = folder / (BEST_MODEL if arguments.best else LAST_MODEL)
    if finished and saved.is_dir():
        partial = arguments.out.with_name(arguments.out.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(saved, partial)
        partial.rename(arguments.out)
        which = "best model" if arguments.best else "model at the end"
        num_samples = (summary["best"] if arguments.best else summary)["num_samples"]
        print(f"saved  the {which} of the run, after {num_samples} samples, in {arguments.out}")
        return

    from asyncsgd.checkpoints import find

    checkpoint = find(folder, lambda checkpoint: name in (None, checkpoint.name)).checkpoint
    if finished and checkpoint.version != summary["num_updates"]:
        raise UsageError(
            f"{folder} is DONE after {summary['num_updates']} updates and has kept no model, and its last checkpoint "
            f"is of {checkpoint.version}; type --checkpoint {checkpoint.name}"
        )
    make(arguments, checkpoint)


def make(arguments: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """Build the run's model, give it the parameters of the checkpoint and save it."""
    from asyncsgd.checkpoints import load_state
    from asyncsgd.finishing import facts_of, model_at, save_model
    from asyncsgd.flat import parameters_sha256
    from asyncsgd.records.totals import Totals
    from asyncsgd.replaying import run_again

    folder = arguments.run_dir
    run = run_again(folder, arguments.cache_dir).prepared()
    state = load_state(folder, checkpoint.name)
    totals = Totals()
    totals.load_state(checkpoint.totals)
    parameters, known = (state["backend"].get("ranks") or state["method"])["parameters"], totals.as_summary()
    if arguments.best:
        best, parameters = state["judge"]["best"], state["judge"]["best_parameters"]
        if best is None:
            raise UsageError(f"{folder} has kept its last model only; train with --keep-best, or drop --best")
        known = known | {"delay": {}} | model_at(**vars(best))
    flat = run.flat(parameters)
    summary = run.summary() | known | facts_of(run)
    summary |= {
        "num_parameters": flat.layout.num_parameters,
        "parameters_sha256": parameters_sha256(flat.layout, flat.parameters),
    }
    save_model(run, flat.model, arguments.out, summary, folder)
    print(
        f"saved  the model after {known['num_samples']} samples and {known['num_updates']} updates in {arguments.out}"
    )
