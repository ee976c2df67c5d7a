"""Pretrain the base model of the study once, in one process, and keep it: what every arm and the baseline start from.

    python experiments/make_base.py

Leaves a folder (``base/small``) that ``--model`` and ``--init-from`` take:

    base/small/
      config.json, model.safetensors, tokenizer files
      base.json     its parameters' sha256, its settings, the fingerprint of its text, its losses; written last
      run/          the run folder of the pretraining, see docs/run_folder.md

The base model itself starts from random weights, so the summary of its run says ``"from_scratch": true``. What
continues from the folder starts from a pretrained model and says false; the pretraining is short, and base.json says
how short. On a GPU, or with another number of threads, the same settings give other last bits and another hash."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncsgd.errors import UsageError
from asyncsgd.records.environment import available_cores
from asyncsgd.records.events import SCHEMA
from asyncsgd.records.run_folder import write_json
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.base import run_script
from asyncsgd.scripts.run_folder import open_run_folder, owned, set_aside
from asyncsgd.settings.flags import Parser
from asyncsgd.settings.training import FLAGS, Settings, load_run_settings, make_settings
from asyncsgd.signals import StopRequest

GENERAL_TEXT = Path(__file__).resolve().parents[2] / "shared" / "data" / "wiki_paragraphs"
DEFAULTS: Mapping[str, object] = {
    "mode": "single",
    "model": "small",
    "samples": 40_000,
    "batch_size": 16,
    "seq_len": 128,
    "learning_rate": 5e-4,
    "warmup": 2_000,
}
"""Beside those of `asyncsgd.settings.training`. About 10 minutes on 2 cores for `small` (73 samples a second when
idle). After 4,800 samples of this text, 5e-4 had an evaluation loss of 6.73 and 1e-3 one of 6.92."""


def main() -> int:
    return run_script(run)


def run(argv: list[str], stop: StopRequest) -> int:
    given = vars(parser().parse_args(argv))
    overwrite, out = (
        given.pop("overwrite", False),
        Path(given.pop("out", None) or f"base/{given.get('model', 'small')}"),
    )
    values = {**DEFAULTS, "threads": available_cores(), **given}
    if "data" not in given:
        values["data"] = default_data()
    settings = make_settings(values | {"run_dir": str(out / "run")})
    if settings.model.model not in ("tiny", "small"):
        raise UsageError(
            f"--model {settings.model.model}: a base model is made from random weights; type --model small, "
            f"or give a pretrained model to experiments/stilt_mlm.py --model itself"
        )
    with owned(out / "run"):  # refuses, before anything is moved, while another command makes the same base model
        if not overwrite:
            refuse_other_settings(out, settings)
        if overwrite or not (out / "base.json").is_file():
            from asyncsgd.scripts.pretraining import pretraining

            pretraining(settings).task.check_names()
            make_room(out, overwrite)
    if (out / "base.json").is_file():
        return verify(out)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"base   {out}, from random weights, {settings.budget.samples} samples of {settings.data.data}", flush=True)

    from asyncsgd.scripts.pretraining import pretraining
    from asyncsgd.training import lead

    experiment = pretraining(settings)
    folder = open_run_folder("make_base", settings, "python experiments/make_base.py " + " ".join(argv))
    exit_code = lead(experiment, Launch(1, None, False), folder, None, stop)
    if exit_code == 0:
        keep(out)
        tell_what_is_next(out)
    return exit_code


def parser() -> argparse.ArgumentParser:
    """Values stay text: `make_settings` converts and checks them, with a message for each."""
    made = Parser(
        prog="make_base.py",
        description="Pretrain the base model of the study once, in one process, and keep it with its hash.",
        epilog="examples:\n  python experiments/make_base.py\n"
        "  python experiments/make_base.py --out base/tiny --model tiny --samples 8000\n"
        "  python experiments/stilt_mlm.py --model base/small --data ../shared/data/hate_mlm",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--out", metavar="DIR", help="folder of the base model (default: base/ and the model's name)")
    add("--model", metavar="{tiny,small}", help=f"shape of the model (default: {DEFAULTS['model']})")
    add("--data", metavar="TEXT", help="text, as in stilt_mlm.py (default: pydocs, and wiki_paragraphs where present)")
    add("--samples", metavar="N", help=f"sequences to train on (default: {DEFAULTS['samples']})")
    add("--seq-len", metavar="N", help=f"tokens per sequence (default: {DEFAULTS['seq_len']})")
    add("--batch-size", metavar="N", help=f"sequences in one gradient (default: {DEFAULTS['batch_size']})")
    add("--learning-rate", metavar="X", help=f"peak learning rate of AdamW (default: {DEFAULTS['learning_rate']})")
    add("--warmup", metavar="N", help=f"samples until the peak (default: {DEFAULTS['warmup']})")
    add("--vocab-size", metavar="N", help="of the tokenizer trained on the text (default: 8192)")
    add("--seed", metavar="N", help="of weights, order and masks (default: 0)")
    add("--threads", metavar="N", help="CPU threads; part of the bits of the result (default: all cores)")
    add("--device", metavar="{auto,cpu,cuda}", help="auto takes cuda where there is one (default: auto)")
    add("--cache-dir", metavar="DIR", help="folder for prepared data (default: the user's cache folder)")
    add("--overwrite", action="store_true", help="make it again; what is there is kept under another name")
    return made


def default_data() -> str:
    """pydocs, joined with general text where it lies beside the repository."""
    if not GENERAL_TEXT.is_dir():
        print("data   wiki_paragraphs is not there: pydocs alone", flush=True)
        return "pydocs"
    return f"pydocs+{os.path.relpath(GENERAL_TEXT)}"


def refuse_other_settings(out: Path, settings: Settings) -> None:
    """Nothing happens where no base model was begun.

    Raises:
        UsageError: if the base model, finished or not, was begun with other settings.
    """
    if not (out / "base.json").is_file() and not (out / "run" / "settings.yaml").is_file():
        return
    old = load_run_settings(out / "run" / "settings.yaml")
    different = FLAGS.differing_keys(FLAGS.flatten(old), FLAGS.flatten(settings))
    if different:
        listed = ", ".join(f"{key} {before} -> {now}" for key, before, now in different)
        raise UsageError(f"{out} holds a base model with other settings ({listed}); type another --out, or --overwrite")


def make_room(out: Path, overwrite: bool) -> None:
    """An unfinished base model may be begun again; what is no base model is not ours to touch."""
    begun = (out / "base.json").is_file() or (out / "run" / "settings.yaml").is_file()
    if begun and overwrite:
        print(f"kept   the earlier base model, as {set_aside(out)}", flush=True)
    elif out.exists() and not (out.is_dir() and {path.name.split(".")[0] for path in out.iterdir()} <= {"run"}):
        raise UsageError(f"{out} exists and holds no base model (no base.json); type another --out")


def keep(out: Path) -> None:
    """Move the model to where ``--model OUT`` finds it; base.json comes last and says that all is there."""
    summary = json.loads((out / "run" / "summary.json").read_text(encoding="utf-8"))
    saved = out / "run" / "model"
    for path in sorted(saved.iterdir()):
        os.replace(path, out / path.name)
    saved.rmdir()
    wanted = (
        "parameters_sha256",
        "num_parameters",
        "data",
        "data_fingerprint",
        "num_samples",
        "num_updates",
        "train_seconds",
        "first_eval_loss",
        "final_eval_loss",
        "metrics",
        "threads",
        "seed",
    )
    base: dict[str, Any] = {key: summary[key] for key in wanted}
    settings = FLAGS.load_yaml(out / "run" / "settings.yaml")
    write_json(out / "base.json", {"schema": SCHEMA, "from_scratch_pretraining": True, **base, "settings": settings})
    print(f"kept   {out}, parameters sha256 {base['parameters_sha256'][:16]}...", flush=True)


def verify(out: Path) -> int:
    """Say that the base model is there, after its parameters were hashed again.

    Raises:
        UsageError: if its parameters are not the ones that were written.
    """
    base = json.loads((out / "base.json").read_text(encoding="utf-8"))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

    from asyncsgd.models import saved_parameters_sha256

    sha256 = saved_parameters_sha256(out)
    if sha256 != base["parameters_sha256"]:
        raise UsageError(
            f"{out} was changed after it was made: its parameters have sha256 {sha256[:16]}..., base.json says "
            f"{base['parameters_sha256'][:16]}...; type --overwrite to make it again"
        )
    print(f"there  {out}, made with these settings; parameters sha256 {sha256[:16]}... verified", flush=True)
    tell_what_is_next(out)
    return 0


def tell_what_is_next(out: Path) -> None:
    print(f"next   python experiments/stilt_mlm.py --model {out} --data FILE_OR_FOLDER", flush=True)


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
