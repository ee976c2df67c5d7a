"""Type lines drawn at random at both doors, ``asyncsgd train TASK`` and scripts of experiments/, and compare the runs.

    python tests/doors_campaign.py --lines 3000 --runs 30 --seed 0

1. A line is refused at both in the same words, or its run has the same name and settings.yaml. Nothing is trained.
2. Runs in every mode have the same settings, and the same parameters where these do not depend on who was faster.

Exit code 1 where the doors differ, and the lines are printed. The seed says which lines are drawn."""

import argparse
import contextlib
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from doors import ROOT, Finished, asyncsgd, cli, task_flags
from gallery import write_texts

TASKS = ["masked_lm", "causal_lm", "classification", "token_classification", "question_answering", "tasks:Plane"]
FLAGS = {
    "--mode": ["single", "sync", "async", "hogwild", "pipeline", "asynch"],
    "--nproc": ["1", "2", "5", "0", "two"],
    "--clock": ["virtual", "measured"],
    "--times": ["exponential:1", "slow:worker=0,factor=3", "slow"],
    "--rule": ["asynchronous", "ringmaster:threshold=4", "koloskova", "rennala", "help"],
    "--samples": ["0", "64", "1e3", "-1", "none"],
    "--epochs": ["1", "2.5"],
    "--seed": ["0", "7"],
    "--batch-size": ["4", "16"],
    "--batch_size": ["3"],
    "--learning-rate": ["1e-3", ".5", "fast"],
    "--optimizer": ["adamw", "sgd", "adam"],
    "--schedule": ["constant", "linear"],
    "--evaluations": ["1", "4"],
    "--warmup": ["0", ".1"],
    "--data": ["text.txt", "posts.csv"],
    "--model": ["tiny", "nowhere"],
    "--config": ["some.yaml", "none.yaml"],
    "--resume": ["last", "nothing"],
    "--run-dir": ["run"],
    "--sampels": ["3"],
    "--micro-batches": ["4"],
    "--keep-best": [],
    "--print-config": [],
    "--help": [],
}
VALUES = ("0", "1", "3", "64", ".5", "1e-3", "none", "-1", "two", "true", "some.yaml")
NOT_DRAWN = ("find_batch_size", "resume")  # the first trains; the second is in `FLAGS`
SCRIPTS = {
    "train.py": ("asyncsgd train", ""),
    "stilt_mlm.py": ("asyncsgd train masked_lm", "masked_lm"),
    "own_model.py": ("asyncsgd train own_model:Shapes", "shapes"),
}
"""What is typed at the door in place of each, and what its runs are called there; empty: as at the script."""

SMALL = "--samples 64 --evaluations 1 --device cpu --threads 1"
SCHEDULES = ("1f1b", "gpipe", "2bw")
MODES = (
    *("--mode single", "--mode single --accumulate 2 --clip-norm 1", "--mode single --micro-batches 2 --keep-best"),
    *("--mode sync --nproc 2", "--mode sync --nproc 3 --seed 1", "--mode sync --nproc 2 --optimizer sgd"),
    *("--mode async --nproc 1", "--mode async --nproc 1 --transport process_group", "--mode async --nproc 2"),
    *("--mode async --nproc 2 --rule ringmaster:threshold=2", "--mode hogwild --nproc 1", "--mode hogwild --nproc 2"),
    *("--mode hogwild --nproc 1 --hogwild-state shared", "--clock virtual --nproc 4 --times exponential:1"),
    *(f"--clock virtual --nproc 3 --rule {rule}" for rule in ("synchronous", "ringmaster", "local_sgd", "diloco")),
    *(f"--clock virtual --nproc 4 --rule {rule}" for rule in ("ad_psgd", "sgp", "streaming_diloco", "easgd")),
    *(
        f"--mode pipeline --nproc 2 --stages 2 --micro-batches 2 --clip-norm 0 --pipeline-schedule {name}"
        for name in SCHEDULES
    ),
)
"""Each is run by masked_lm or by the example of a model of one's own, in turn."""
RACES = ("--mode async --nproc 2", "--mode hogwild --nproc 2")


def drawn_line(draw):
    """A task with some flags, and what may be wrong with it."""
    return draw.choice((line_of_common_flags, line_of_all_flags))(draw)


def line_of_common_flags(draw):
    """A task with up to four flags of `FLAGS`."""
    words = [draw.choice(TASKS)]
    for flag in draw.sample(sorted(FLAGS), draw.choice([0, 1, 2, 4])):
        words += [flag, *draw.sample(FLAGS[flag], min(1, len(FLAGS[flag])))]
    return words


def line_of_all_flags(draw):
    """A task of the library with up to six of all of its flags, most of them with a value that may be."""
    task = draw.choice(TASKS[:-1])
    words = [task]
    specs = list(task_flags(asyncsgd.tasks.task_class(task)).specs.values())
    for spec in draw.sample(specs, draw.randint(1, 6)):
        if spec.name in NOT_DRAWN:
            continue
        known = [*spec.choices, str(spec.default).lower()]
        if spec.metadata["named"] is not None:
            known += spec.metadata["named"].by_name
        values = known if draw.random() < 0.8 else VALUES
        words += [draw.choice(spec.flags), draw.choice(values)]
    return words


class Left(NamedTuple):
    """What a command has said and left behind."""

    code: int
    out: str
    err: str
    files: dict[str, str]
    """settings.yaml by the name of the run's folder."""
    hashes: list[str]
    """Of the parameters of the runs."""


def carried_out(script, words, folder, *, trains):
    """Type a line in a folder of its own, and read what it says and leaves as if it had been typed at the door.

    Args:
        script: empty: at the door.
        trains: whether it is carried out, in a process of its own. If not, it ends before its run is prepared.
    """
    folder.mkdir()
    (folder / "some.yaml").write_text("mode: async\nnproc: 3\nseed: 5\n")
    door, name = SCRIPTS.get(script, ("asyncsgd train", ""))
    flags = words[len(door.split()) - 2 :]
    with contextlib.chdir(folder), contextlib.ExitStack() as stack:
        if not trains:
            stack.enter_context(patch("asyncsgd.run.lifecycle.lead", return_value=0))
            stack.enter_context(patch("asyncsgd.backends.launch.fork_server"))
        ended = cli([*(script or door).split(), *flags], alone=trains)

    def at_door(text):
        if not script:
            return text
        text = text.replace(f"python experiments/{script}", door).replace(script, door)
        text = text.replace("python -m analysis", "asyncsgd")
        text = text.replace("task: __main__:", "task: own_model:")  # what a script that is run calls its own class
        stem = script.removesuffix(".py")
        return re.sub(rf"\b{stem}(?=-|$)", name, text, flags=re.MULTILINE) if name else text

    runs = sorted(path.parent for path in folder.rglob("settings.yaml"))
    files = {at_door(str(run.relative_to(folder))): at_door((run / "settings.yaml").read_text()) for run in runs}
    assert trains or ended.code == 0 or not files, "a line that is refused leaves a folder"
    hashes = [Finished(run).summary.get("parameters_sha256") for run in runs if trains]
    return Left(ended.code, at_door(ended.out), at_door(ended.err), files, hashes)


def scripts_of(words):
    """The scripts at which a line can be typed too; the help of one task's own has its own description."""
    own = [script for script, (door, _) in SCRIPTS.items() if door == f"asyncsgd train {words[0]}"]
    return ["train.py", *(own if "--help" not in words else [])]


def typed(words, folder, *, trains=False):
    """What a line says and leaves at the door, and what differs where it is typed at a script, a sentence each."""
    number = sum(1 for _ in folder.iterdir())
    door = carried_out("", words, folder / str(number), trains=trains)
    names = ["code", "files"]
    if not trains:
        names += ["out", "err"]
    elif not any(race in " ".join(words) for race in RACES):
        names.append("hashes")
    differences = []
    for script in scripts_of(words):
        number += 1
        other = carried_out(script, words, folder / str(number), trains=trains)
        for name in names:
            ours = getattr(door, name)
            theirs = getattr(other, name)
            if ours != theirs:
                differences.append(f"{name} of {script}: {theirs!r}, and at the door {ours!r}")
    return door, differences


def lines_of_runs(texts):
    """Small runs, one after the other: a task, and a mode."""
    text = f"--data {texts}/train.txt --eval-data {texts}/eval.txt --eval-samples 8 --seq-len 32 --vocab-size 512"
    tasks = (f"masked_lm {text}", "own_model:Shapes --width 4 --train-images 200")
    modes = itertools.cycle(MODES)
    for number in itertools.count():
        mode = next(modes)
        task = tasks[0 if "pipeline" in mode else number % 2]  # the other one has no row of equal blocks to cut
        yield f"{task} {SMALL} {mode}".split()


def main():
    parser = argparse.ArgumentParser(description="Type random lines at both doors, and compare what they give.")
    parser.add_argument(
        "--lines", type=int, default=100, help="number of lines that end before training (default: 100)"
    )
    parser.add_argument("--runs", type=int, default=10, help="number of lines that train (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "experiments"))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    os.environ["HF_HUB_OFFLINE"] = "1"
    draw = random.Random(arguments.seed)
    lines = [(drawn_line(draw), False) for _ in range(arguments.lines)]
    counts = Counter()
    with tempfile.TemporaryDirectory(prefix="doors-") as name:
        folder = Path(name)
        write_texts(folder)
        lines += [(words, True) for words in itertools.islice(lines_of_runs(folder), arguments.runs)]
        for number, (words, trains) in enumerate(lines):
            place = folder / f"line-{number}"
            place.mkdir()
            door, differences = typed(words, place, trains=trains)
            if trains:
                print(" ".join(words), "differs" if differences else "ok", flush=True)
                differences += [f"exit code {door.code}: {door.err}"] if door.code else []
            kind = "a run" if trains else "settings" if door.files else "a refusal" if door.code else "printed"
            counts[kind] += 1
            counts["different"] += bool(differences)
            if differences:
                print(f"asyncsgd train {' '.join(words)}", *differences, sep="\n  ", flush=True)
            shutil.rmtree(place)
    print(dict(counts))
    sys.exit(1 if counts["different"] else 0)


if __name__ == "__main__":
    main()
