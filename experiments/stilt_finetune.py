"""Fine-tuning on a labelled task: the second stage of STILT, and the judge of the first.

    python experiments/stilt_finetune.py --init-from runs/NAME --data ../shared/data/hate_davidson

Takes a run folder of stilt_mlm.py, a saved model, a name on the Hub, or tiny or small for random weights. Fine-tunes it
in one process, or in any mode and under any rule, and scores it on the test split. Leaves one run folder per seed,
which names the pretraining run that it came from. ``--help`` lists the settings."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from asyncsgd.errors import UsageError
from asyncsgd.numbers import out_of_bounds, shortened, whole_number
from asyncsgd.records.console import say
from asyncsgd.records.trackers import names_in
from asyncsgd.records.trackers.tracking import Tracking
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import go_offline
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.run_folder import open_finetune_folder
from asyncsgd.scripts.task import adapt, announce, follow_leader, start_fork_server, told_batch_size, told_names
from asyncsgd.settings.finetuning import FINETUNE_FLAGS, FinetuneSettings, make_finetune_settings
from asyncsgd.signals import StopRequest

if TYPE_CHECKING:
    from asyncsgd.experiment import Experiment

DESCRIPTION = "Fine-tuning on a labelled task, in one process or any mode (the second stage of STILT)."
EXAMPLES = """\
  offline:          python experiments/stilt_finetune.py --init-from runs/NAME
  the baseline:     python experiments/stilt_finetune.py --init-from base/small --seeds 0,1,2
  hate speech:      python experiments/stilt_finetune.py --init-from runs/NAME --data ../shared/data/hate_davidson
  HateCheck too:    python experiments/stilt_finetune.py --config hate.yaml --hatecheck ../shared/data/hatecheck
  asynchronously:   python experiments/stilt_finetune.py --init-from runs/NAME --mode async --nproc 4
  your own table:   python experiments/stilt_finetune.py --init-from FOLDER_OR_ID --data posts.csv --label-column class
"""
SEEDS = {"seeds": "one run per seed, as 0,1,2 (default: the one of --seed)"}


def main() -> int:
    return run_script(run)


def run(argv: list[str], stop: StopRequest) -> int:
    if told_names(argv):
        return 0
    parsed = FINETUNE_FLAGS.parse(
        argv, prog="stilt_finetune.py", description=DESCRIPTION, examples=EXAMPLES, extra_flags=SEEDS
    )
    seeds = seeds_of(parsed.extra_flags.get("seeds"), parsed.settings)
    settings, launch = adapt(parsed, FINETUNE_FLAGS)
    if launch.rank is not None and len(seeds) > 1:
        raise UsageError("--seeds names several runs, and torchrun's ranks are those of one; type python, not torchrun")
    if not launch.leads:
        return follow_leader(lambda: experiment(settings))
    announce(settings, f"fine-tuning, {settings.start.task}", len(seeds))
    context = start_fork_server(settings, launch, settings.start.init_from)
    go_offline(settings.start.init_from, settings.data.data)
    command = "python experiments/stilt_finetune.py " + " ".join(argv)
    made = experiment(settings)
    stop.check()
    if settings.output.find_batch_size:
        return told_batch_size(made, context or fork_server(settings.start.init_from))

    from asyncsgd.training import lead

    exit_code = 0
    for seed in seeds:
        settings = make_finetune_settings(FINETUNE_FLAGS.flatten(settings) | {"seed": seed})
        folder = open_finetune_folder(settings, command)
        print(f"run    {folder.path}", flush=True)
        tracking = Tracking(names_in(settings.output.track), folder.path)
        ended = lead(experiment(settings), launch, folder, context, stop, tracking)
        say(f"next   python -m analysis.report {shlex.quote(str(folder.path.parent))} --out report.html")
        exit_code = exit_code or ended
        if stop():  # perhaps too late for this run to hear it
            return 130
    return exit_code


def experiment(settings: FinetuneSettings) -> Experiment:
    from asyncsgd.scripts.finetuning import finetuning

    made = finetuning(settings)
    made.task.check_names()
    return made


def seeds_of(text: str | None, settings: FinetuneSettings) -> list[int]:
    """The seeds of ``--seeds``, or the one of ``--seed``.

    Raises:
        UsageError: for something that is no list of seeds, a seed twice, or one folder for several runs.
    """
    if text is None:
        return [settings.job.seed]
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
    if settings.job.seed != 0:
        raise UsageError(f"--seed {settings.job.seed} does nothing with --seeds {text}; drop one of the two")
    if len(seeds) > 1 and settings.output.run_dir is not None:
        raise UsageError(
            "--run-dir is the folder of one run, and --seeds names several; type --runs-dir FOLDER instead"
        )
    return seeds


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
