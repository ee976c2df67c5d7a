"""The optimisation guide as a measurement: from the naive loop to the fastest training, one setting at a time.

    python experiments/speed_ladder.py --quick     # both tasks in under 4 minutes, no verdict on the score
    python experiments/speed_ladder.py             # 5 turns a rung, 8 seeds: about 35 minutes on 2 quiet cores

Two tasks: classify texts, and predict masked words. The naive loop is `naive_loop`, below: plain PyTorch, which knows
nothing of this library. Every rung is a setting of the library's own training.

The climb: each rung is measured in turns with the trainings of the rungs kept so far, on the same batches. A rung whose
ratio is not above 1 with its whole 95 % interval does not pay here. It is reported, and left out of the stack.
The proof: the naive loop and stacks of the rungs that pay, on the same seeds. The first stack has the rungs that leave
every update as it was. Each further one has one rung more. It says how many times as fast a stack is, and whether its
score is equivalent. The final stack is the last one before the first whose score is not.

Rates are those after a warm-up, evaluations not counted. `--out` holds ladder.json (the measurements), ladder.md and
report.html. `python -m analysis speed_ladder OUT` makes the last two again. A ladder that was interrupted goes on when
the same command is typed again: parts.json holds every turn that was measured."""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncsgd import AdamW
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError
from asyncsgd.measure import hardware
from asyncsgd.records.machine import available_cores, describe_environment
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.runtime.launch import fork_server
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.run import cache_folder, resolve_device
from asyncsgd.signals import StopRequest
from speed_ladder_trainings import BATCH_SIZE, SCORE, SEQ_LEN, Meter, Subject

MARGINS = {"classification": 0.03, "masked_lm": 0.05}
"""Declared before the runs: a macro-F1, and nats of evaluation loss."""
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def naive_loop(
    texts: Sequence[str],
    labels: Sequence[int] | None,
    tokenizer: Any,
    model: nn.Module,
    *,
    learning_rate: float,
    samples: int,
    seed: int,
    device: str,
    arrived: Callable[[int, float], None],
) -> None:
    """The guide's loop as it stands in a tutorial, in place on `model`.

    Args:
        labels: the class of each text; None: masked words are predicted.
        arrived: called after every step with the samples and seconds so far.
    """
    encoded = tokenizer(list(texts), padding="max_length", truncation=True, max_length=SEQ_LEN, return_tensors="pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    torch.manual_seed(seed)
    model.train()
    done, total_loss, began = 0, 0.0, time.perf_counter()
    while done < samples:
        for rows in torch.randperm(len(texts)).split(BATCH_SIZE):
            input_ids, attention_mask = encoded["input_ids"][rows], encoded["attention_mask"][rows]
            if labels is None:
                input_ids, targets = masked(input_ids, tokenizer)
            else:
                targets = torch.tensor(labels)[rows]
            outputs = model(
                input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), labels=targets.to(device)
            )
            optimizer.zero_grad()
            outputs.loss.backward()
            optimizer.step()
            total_loss += outputs.loss.item()
            done += len(rows)
            arrived(done, time.perf_counter() - began)
            if done >= samples:
                break


def masked(input_ids: torch.Tensor, tokenizer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """15 % of the words chosen: 80 % of them masked, 10 % replaced, 10 % kept; -100 where nothing is predicted."""
    special = torch.isin(input_ids, torch.tensor(tokenizer.all_special_ids))
    chosen = (torch.rand(input_ids.shape) < 0.15) & ~special
    labels = torch.where(chosen, input_ids, -100)
    draw = torch.rand(input_ids.shape)
    changed = torch.where(chosen & (draw < 0.8), tokenizer.mask_token_id, input_ids)
    other = torch.randint(len(tokenizer), input_ids.shape)
    return torch.where(chosen & (draw >= 0.9), other, changed), labels


class Size(NamedTuple):
    """How much is measured."""

    turns: int
    climb_samples: int
    """Texts that a training of the climb goes through once. A multiple of the samples in a run of batches of one
    length, so that stacks with different batches train on the same lengths. In few runs, lengths differ within each."""
    warmup: int
    """Samples before the rate is measured."""
    seeds: int
    proof_samples: Mapping[str, int]
    eval_samples: int
    compiles: bool
    """Whether torch.compile is measured, which takes about a minute for the first batch."""


FULL = Size(5, 1024, 64, 8, {"classification": 6144, "masked_lm": 3072}, 1000, compiles=True)
QUICK = Size(3, 256, 16, 2, {"classification": 128, "masked_lm": 96}, 64, compiles=False)


class Step(NamedTuple):
    """One rung: its line in the checklist, what is typed for it, and what it changes; see `PLAIN` of the trainings."""

    name: str
    box: str
    flags: str
    change: Mapping[str, Any]
    same_updates: bool = True
    """Whether updates stay as they were, up to rounding and what is drawn."""


ALWAYS = "always on"


def steps_of(task: str, device: str) -> list[Step]:
    """The rungs; the first one is the library itself. Those in one process come before those of several."""
    cpu, number = device == "cpu", "2" if device == "cpu" else str(torch.cuda.device_count())
    first = "batches padded to their longest text" + ", decoded at masked positions" * (task == "masked_lm")
    larger, by_length = (2 if cpu else 8) * BATCH_SIZE, "group_by_length"
    checkpointing = "--gradient-checkpointing"
    return [
        Step(first, "Tokenised once, dynamic padding", ALWAYS, {}),
        Step("batches of similar lengths", "Length buckets", f"--sampling {by_length}", {"sampling": by_length}, False),
        Step("fused AdamW", "Fused optimizer", ALWAYS, {"optimizer": AdamW()}),
        Step(f"batches of {larger}", "Larger batch", f"--batch-size {larger}", {"batch_size": larger}, False),
        *(
            Step(name, "Mixed precision", f"--precision {name}", {"precision": name})
            for name in (("bf16",) if cpu else ("bf16", "fp16"))
        ),
        Step("batches made ahead", "Loaders, pinned memory", "--prefetch 2", {"prefetch": 2}),
        Step("2 micro-batches", "Gradient accumulation", "--micro-batches 2", {"micro_batches": 2}),
        Step("activations computed again", "Gradient checkpointing", checkpointing, {"gradient_checkpointing": True}),
        Step("DataParallel", "All GPUs", "--mode single --data-parallel", {"workers": "data_parallel"}),
        Step("synchronous workers", "More workers", f"--mode sync --nproc {number}", {"workers": "sync"}),
        Step("asynchronous workers", "More workers", f"--mode async --nproc {number}", {"workers": "async"}, False),
        Step("compiled loss", "torch.compile", "--compile", {"compile": True}),
    ]


def reason_not_to(step: Step, device: str, size: Size, left_out: Sequence[str]) -> str:
    """Why a rung is not measured here; empty where it is."""
    if step.box in left_out:
        return "left out by --leave-out"
    if "compile" in step.change and not size.compiles:
        return "the first batch compiles for a minute, too long for --quick"
    number, kind = (torch.cuda.device_count(), "GPUs") if device == "cuda" else (available_cores(), "cores")
    if step.change.get("workers") == "data_parallel" and (kind == "cores" or number < 2):
        return "it gives each of several GPUs a part of the batch, and here are fewer than two"
    if "workers" in step.change and number < 2:
        return f"two workers need two {kind}"
    return ""


Turn = list[dict[str, Any]]
"""What each side has measured in one turn."""
Keep = Callable[[str, Callable[[], Turn]], Turn]
"""Gives what a turn of that name has measured before, or measures it now."""


def kept_in(file: Path, settings: Mapping[str, Any]) -> Keep:
    """Keep whole turns in a file, since the sides of a turn are compared: an interrupted ladder goes on from there.

    Args:
        settings: of the ladder, the machine among them.

    Raises:
        UsageError: if the file is of other settings.
    """
    there: dict[str, Any] = {"settings": json.loads(json.dumps(settings)), "turns": {}}
    if file.is_file():
        before = json.loads(file.read_text(encoding="utf-8"))
        if changed := [name for name, value in there["settings"].items() if before["settings"].get(name) != value]:
            raise UsageError(
                f"{file.parent} holds a ladder of other settings ({', '.join(changed)}); type another --out"
            )
        there = before

    def keep(name: str, measure: Callable[[], Turn]) -> Turn:
        turns: dict[str, Turn] = there["turns"]
        if name not in turns:
            turns[name] = measure()
            write_json(file, there)
        return turns[name]

    return keep


def in_turns(name: str, turns: int, sides: Sequence[Callable[[int], dict[str, Any]]], keep: Keep) -> list[Turn]:
    """What each side gives for each turn; within a turn the sides come in a random order, since machines drift."""

    def measure(turn: int) -> Turn:
        order = list(range(len(sides)))
        random.Random(f"{name} {turn}").shuffle(order)
        found = {side: sides[side](turn) for side in order}
        return [found[side] for side in range(len(sides))]

    measured = [keep(f"{name}, turn {turn}", functools.partial(measure, turn)) for turn in range(turns)]
    return [list(side) for side in zip(*measured, strict=True)]


Naive = Callable[[int], dict[str, Any]]
"""Trains with the naive loop in a turn."""
Train = Callable[[Mapping[str, Any], int], dict[str, Any]]
"""Trains with the changes of some rungs in a turn."""


def climb(
    naive: Naive, train: Train, steps: Sequence[Step], turns: int, skip: Callable[[Step], str], keep: Keep
) -> tuple[list[Step], list[dict[str, Any]]]:
    """Measure one rung after the other.

    Args:
        skip: why a rung is not measured; empty where it is.

    Returns:
        The first rung and those that pay, and all rungs as in ladder.json.
    """
    from analysis.ladder import NO_MEMORY, pays

    kept: list[Step] = []
    rungs = []
    for step in steps:
        rung = {"name": step.name, "box": step.box, "flags": step.flags, "reason": skip(step) if kept else ""}
        sides: list[Turn] = [[], []]
        if not rung["reason"]:
            before = functools.partial(train, changes_of(kept)) if kept else naive
            try:
                sides = in_turns(step.name, turns, (before, functools.partial(train, changes_of([*kept, step]))), keep)
            except RunError as error:
                if OUT_OF_MEMORY not in str(error):
                    raise
                rung["reason"] = NO_MEMORY
        rungs.append(rung | {"before": sides[0], "after": sides[1]})
        if rung["reason"]:
            _say(f"{step.name}: not measured, {rung['reason']}")
            continue
        gains, rate = pays(rungs[-1]), "samples_per_second"
        if gains or not kept:
            kept.append(step)
        ratio = statistics.median(fast[rate] / slow[rate] for slow, fast in zip(*sides, strict=True))
        _say(f"{step.name}: {ratio:.2f}x, {'kept' if gains else 'does not pay'}")
    return kept, rungs


def changes_of(steps: Sequence[Step]) -> dict[str, Any]:
    """What these rungs change together."""
    return {name: value for step in steps for name, value in step.change.items()}


def tried(kept: Sequence[Step]) -> list[list[Step]]:
    """The stacks of the proof, each as its rungs: first those that leave updates as they were, then one more at a time.

    The order is that of the climb. It is decided before any score is known, as a test of one after the other needs it.
    """
    same = [step for step in kept if step.same_updates]
    others = [step for step in kept if not step.same_updates]
    return [[*same, *others[:number]] for number in range(len(others) + 1)]


def measure(name: str, data: str, size: Size, flags: argparse.Namespace, device: str, keep: Keep, stop: Any) -> Any:
    """All of one task, as in ladder.json."""
    cache, texts = cache_folder(flags.cache_dir), flags.out / "texts" / name
    _say(f"{name} on {Path(data).name}")

    def sides(samples: int, measured: int) -> tuple[Subject, Naive, Train]:
        subject = Subject(name, data, samples, size.eval_samples, texts / str(samples), cache, device, stop)
        meter = functools.partial(Meter, size.warmup, measured, device)
        return (
            subject,
            lambda turn: subject.naive(naive_loop, meter(), turn),
            lambda changes, turn: subject.train(changes, meter(), turn),
        )

    def keep_of_task(turn: str, measure: Callable[[], Turn]) -> Turn:
        return keep(f"{name}: {turn}", measure)

    def skip(step: Step) -> str:
        return reason_not_to(step, device, size, flags.leave_out)

    _, naive, train = sides(size.climb_samples, size.climb_samples)
    kept, rungs = climb(naive, train, steps_of(name, device), size.turns, skip, keep_of_task)
    stacks = tried(kept)
    _say(f"the naive loop and stacks of the rungs that pay ({len(stacks)}), {size.seeds} seeds")
    samples = size.proof_samples[name]
    subject, naive, train = sides(samples, samples - size.warmup)
    trains = [functools.partial(train, changes_of(steps)) for steps in stacks]
    first, *others = in_turns("proof", size.seeds, (naive, *trains), keep_of_task)
    return {
        "task": name,
        "data": Path(data).name,
        "model": "tiny",
        "epoch": subject.epoch,
        "climb_samples": size.climb_samples,
        "proof_samples": samples,
        "score": SCORE[name],
        "lower_is_better": SCORE[name] == "loss",
        "margin": MARGINS[name] if flags.margin is None else flags.margin,
        "loss_margin": MARGINS["masked_lm"],
        "turns": size.turns,
        "rungs": rungs,
        "naive": first,
        "stacks": [
            {"rungs": [step.name for step in steps], "trainings": trainings}
            for steps, trainings in zip(stacks, others, strict=True)
        ],
        "score_at_start": others[0][0]["score_at_start"],
        "operations": subject.operations(),
        "longest": subject.longest,
    }


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="speed_ladder.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("--quick", action="store_true", help="small and short: under 4 minutes, no verdict on the score")
    flags.add_argument("--out", type=Path, help="folder (default: runs/speed_ladder, with --quick and -quick behind)")
    shared = "../shared/data/{}, or pydocs where that is not there"
    flags.add_argument("--classification-data", metavar="DATA", help=f"(default: {shared.format('hate_davidson')})")
    flags.add_argument("--masked-lm-data", metavar="DATA", help=f"(default: {shared.format('hate_mlm')})")
    flags.add_argument("--margin", type=float, metavar="M", help=f"of equivalence, in place of {MARGINS}")
    boxes = sorted({step.box for step in steps_of("classification", "cuda")[1:]})
    flags.add_argument(
        "--leave-out",
        action="append",
        default=[],
        choices=boxes,
        metavar="BOX",
        help=f"a line of the checklist not to measure; repeat: {'; '.join(boxes)}",
    )
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flags.add_argument("--cache-dir", metavar="DIR", help="of prepared data (default: the user's cache folder)")
    return flags


def machine_of(device: str) -> dict[str, Any]:
    """What ladder.json says of the machine; memory is that of one device."""
    name, devices = "cpu", available_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        name, devices = torch.cuda.get_device_name(), torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory
    machine = describe_environment(available_cores(), 1) | hardware(device)
    return machine | {"device": name, "devices": devices, "memory_bytes": memory}


def run(argv: list[str], stop: StopRequest) -> int:
    flags = parser().parse_args(argv)
    from analysis.ladder import LADDER, PARTS
    from analysis.speed_ladder import report

    if flags.margin is not None and not 0 < flags.margin < float("inf"):
        raise UsageError(f"--margin must be a number above 0, got {flags.margin}")
    size, device = QUICK if flags.quick else FULL, resolve_device(flags.device)
    flags.out = flags.out or Path("runs/speed_ladder" + "-quick" * flags.quick)
    fork_server("tiny")  # starts to import what workers need
    flags.out.mkdir(parents=True, exist_ok=True)
    machine, data = machine_of(device), {}
    for name, folder in (("classification", SHARED / "hate_davidson"), ("masked_lm", SHARED / "hate_mlm")):
        data[name] = getattr(flags, f"{name}_data") or (str(folder) if folder.is_dir() else "pydocs")
    settings = size._asdict() | {"margin": flags.margin, "leave_out": flags.leave_out, "data": data}
    same = {key: machine[key] for key in ("device", "devices", "cpu", "cores", "versions")}
    keep = kept_in(flags.out / PARTS, settings | same)
    ladders = [measure(name, data[name], size, flags, device, keep, stop) for name in data]
    write_text(flags.out / LADDER, json.dumps({"quick": flags.quick, "machine": machine, "ladders": ladders}, indent=1))
    report(flags.out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(run, argv, goes_on=True)


if __name__ == "__main__":
    sys.exit(main())
