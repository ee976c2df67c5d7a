"""Fine-tuning on a labelled task: the second stage of STILT, and the judge of the first.

    python experiments/stilt_finetune.py --init-from runs/NAME --data ../shared/data/hate_davidson

Takes a run folder of stilt_mlm.py (or a saved model, a name on the Hub, or tiny or small for random weights),
fine-tunes it always in the same way in one process, scores it on the test split, and leaves one run folder per seed
that names the pretraining run it came from. ``--help`` lists the settings."""

from __future__ import annotations

import os
import sys

from asyncsgd import __version__
from asyncsgd.errors import UsageError
from asyncsgd.finetune_settings import FINETUNE_FLAGS, FinetuneSettings, make_finetune_settings
from asyncsgd.launch import go_offline
from asyncsgd.numbers import out_of_bounds, shortened, whole_number
from asyncsgd.record import available_cores
from asyncsgd.run_folder import open_finetune_folder
from asyncsgd.script import run_script
from asyncsgd.signals import StopRequest

DESCRIPTION = "Fine-tuning on a labelled task, always in the same way (the second stage of STILT)."
EXAMPLES = """\
  offline:          python experiments/stilt_finetune.py --init-from runs/NAME
  the baseline:     python experiments/stilt_finetune.py --init-from base/small --seeds 0,1,2
  hate speech:      python experiments/stilt_finetune.py --init-from runs/NAME --data ../shared/data/hate_davidson
  HateCheck too:    python experiments/stilt_finetune.py --config hate.yaml --hatecheck ../shared/data/hatecheck
  your own table:   python experiments/stilt_finetune.py --init-from FOLDER_OR_ID --data posts.csv --label-column class
"""
SEEDS = {"seeds": "one run per seed, as 0,1,2 (default: the one of --seed)"}


def main() -> int:
    return run_script(run)


def run(argv: list[str], stop: StopRequest) -> int:
    parsed = FINETUNE_FLAGS.parse(
        argv, prog="stilt_finetune.py", description=DESCRIPTION, examples=EXAMPLES, more=SEEDS
    )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UsageError("fine-tuning is one process, and the launcher started several; type python, not torchrun")
    seeds = seeds_of(parsed.more.get("seeds"), parsed.settings)
    announce(parsed.settings, len(seeds))
    go_offline(parsed.settings.start.init_from, parsed.settings.data.data)
    command = "python experiments/stilt_finetune.py " + " ".join(argv)

    from asyncsgd.finetune import check, lead

    check(parsed.settings)
    stop.check()
    exit_code = 0
    for seed in seeds:
        settings = make_finetune_settings(FINETUNE_FLAGS.flatten(parsed.settings) | {"seed": seed})
        folder = open_finetune_folder(settings, command)
        print(f"run    {folder.path}", flush=True)
        ended = lead(settings, folder, stop)
        exit_code = exit_code or ended
        if ended == 130:
            break
    return exit_code


def seeds_of(text: str | None, settings: FinetuneSettings) -> list[int]:
    """The seeds of ``--seeds``, or the one of ``--seed``.

    Raises:
        UsageError: for something that is no list of seeds, a seed twice, or one folder for several runs.
    """
    if text is None:
        return [settings.start.seed]
    parts = [part.strip() for part in text.split(",")]
    try:
        seeds = [whole_number(part) for part in parts]
    except ValueError as error:
        raise UsageError(
            f"--seeds must be whole numbers with commas between them, and {error}; type e.g. --seeds 0,1,2"
        ) from error
    for seed in seeds:
        if wanted := out_of_bounds(seed, at_least=0, below=2**32):
            raise UsageError(f"--seeds must be {wanted}, got {shortened(seed)}; type e.g. --seeds 0,1,2")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"--seeds {text} names a seed twice; keep one")
    if settings.start.seed != 0:
        raise UsageError(f"--seed {settings.start.seed} does nothing with --seeds {text}; drop one of the two")
    if len(seeds) > 1 and settings.output.run_dir is not None:
        raise UsageError(
            "--run-dir is the folder of one run, and --seeds names several; type --runs-dir FOLDER instead"
        )
    return seeds


def announce(settings: FinetuneSettings, num_runs: int) -> None:
    """The first line, before anything heavy is imported."""
    threads, cores = settings.machine.threads, available_cores()
    runs = "" if num_runs == 1 else f"  {num_runs} runs, one after another,"
    over = f", oversubscribed {threads / cores:.1f}x" if threads > cores else ""
    print(
        f"asyncsgd {__version__}  fine-tuning, {settings.start.task}{runs}  one process with {threads} "
        f"thread{'s' if threads > 1 else ''} on {cores} core{'s' if cores > 1 else ''}{over}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
