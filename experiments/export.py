"""Write the model of a checkpoint as a folder that transformers reads.

    python experiments/export.py runs/stilt_mlm-async-w4-s0-3f9a1c --out model-at-5000
    python experiments/export.py runs/stilt_mlm-async-w4-s0-3f9a1c --checkpoint 000000005000 --out model-at-5000

Without ``--checkpoint`` it is the newest one that is whole."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from asyncsgd.errors import UsageError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write the model of a checkpoint.", allow_abbrev=False)
    parser.add_argument("run_dir", type=Path, help="a run folder with checkpoints")
    parser.add_argument("--checkpoint", metavar="NAME", help="its name in RUN_DIR/checkpoints (default: the newest)")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the model")
    parser.add_argument("--cache-dir", help="folder of prepared data, if the run had another than the default")
    arguments = parser.parse_args(argv)
    try:
        export(arguments)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def export(arguments: argparse.Namespace) -> None:
    """Build the run's model, give it the parameters of the checkpoint and save it.

    Raises:
        UsageError: if there is no such checkpoint, or the folder is there already.
    """
    folder, name = arguments.run_dir, arguments.checkpoint
    if arguments.out.exists():
        raise UsageError(f"{arguments.out} is there already; type another --out")
    if not (folder / "settings.yaml").is_file():
        raise UsageError(f"{folder} is not a run folder: it has no settings.yaml")

    import torch

    from asyncsgd.checkpoints import find, load_state
    from asyncsgd.experiment import facts_of, save_model
    from asyncsgd.flat import FlatModel, parameters_sha256
    from asyncsgd.records.totals import Totals
    from asyncsgd.replaying import experiment_of_run

    checkpoint = find(folder, lambda checkpoint: name in (None, checkpoint.name)).checkpoint
    experiment = experiment_of_run(folder, arguments.cache_dir)
    task = experiment.task.prepare(experiment.setup.seed, experiment.cache)
    flat = FlatModel(task.model(experiment.setup.seed))
    state = load_state(folder, checkpoint.name)
    with torch.no_grad():
        flat.parameters.copy_(state.get("server", state)["parameters"])
    totals = Totals()
    totals.load_state(checkpoint.totals)
    summary = experiment.summary() | totals.as_summary() | facts_of(task, experiment.setup.seed)
    summary |= {
        "num_parameters": flat.layout.num_parameters,
        "parameters_sha256": parameters_sha256(flat.layout, flat.parameters),
    }
    save_model(experiment, task, flat.model, arguments.out, summary, folder)
    print(
        f"saved  the model after {checkpoint.total_samples} samples and {checkpoint.version} updates in {arguments.out}"
    )


if __name__ == "__main__":
    sys.exit(main())
