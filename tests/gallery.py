"""Runs of ``experiments/stilt_mlm.py`` on a small text, which many tests look at: each is trained once, for all of the
processes that the tests are shared out to."""

import functools
import hashlib
import json
import random
from collections.abc import Callable

import torch
from doors import Finished, cli
from filelock import FileLock

BATCH_SIZE = 4
Train = Callable[..., Finished]


def sentences(number, seed):
    draw = random.Random(seed)
    syllables = [c + v for c in "bdfgklmnprst" for v in "aeiou"]
    words = []
    for _ in range(300):
        words.append("".join(draw.choices(syllables, k=draw.randint(1, 3))))
    return "\n".join(" ".join(draw.choices(words, k=draw.randint(3, 25))) + "." for _ in range(number))


def write_tables(folder, **sides):
    """A file of rows for each side."""
    folder.mkdir(parents=True, exist_ok=True)
    for side, rows in sides.items():
        (folder / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def shaken(task, seed):
    """Its model in evaluation mode, with weights larger than usual: it does not say the same of every token."""
    model = task.model(seed).eval()
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=draw), alpha=0.05)
    return model


def flags_of(values):
    """A command line: None is spelled none, a flag without a value is there or not."""
    line = []
    for name, value in values.items():
        if value is not False:
            line += [
                f"--{name.replace('_', '-')}",
                *([] if value is True else ["none" if value is None else str(value)]),
            ]
    return line


def write_texts(root):
    with FileLock(root / "texts.lock"):
        if not (root / "eval.txt").exists():
            (root / "train.txt").write_text(sentences(400, seed=0))
            (root / "eval.txt").write_text(sentences(150, seed=1))


def trainer(root):
    """What runs with some settings below `root`, where equal settings run once."""
    # The evaluation set makes 7 batches, so that 2 and 3 workers have shards of different sizes.
    small = {
        "data": root / "train.txt",
        "eval_data": root / "eval.txt",
        "cache_dir": root / "cache",
        "vocab_size": 512,
        "seq_len": 32,
        "batch_size": BATCH_SIZE,
        "samples": 80,
        "evaluations": 1,
        "warmup": 0,
        "clip_norm": 0,
        "device": "cpu",
        "threads": 1,
    }

    @functools.cache
    def trained(line):
        path = root / hashlib.sha256(repr(line).encode()).hexdigest()[:12]
        with FileLock(f"{path}.lock"):
            if not path.exists():
                ended = cli(["stilt_mlm.py", *line, "--run-dir", path])
                assert ended.code == 0, f"{ended.out}{ended.err}"
                (path / "printed.txt").write_text(ended.out)
        return Finished(path)

    return lambda **values: trained(tuple(flags_of(small | values)))
