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
import dataclasses
import functools
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError
from asyncsgd.measure import Hardware
from asyncsgd.records.machine import available_cores, describe_environment
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.runtime.launch import fork_server
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.run import cache_folder, resolve_device
from asyncsgd.signals import StopRequest
from speed_ladder_trainings import BATCH_SIZE, SCORE, SEQ_LEN, Meter, Stack, Subject

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


@dataclasses.dataclass(frozen=True)
class Size:
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


@dataclasses.dataclass(frozen=True)
class Step:
    """One rung: what it changes in the stack, what is typed for it, and its line in the checklist."""

    name: str
    box: str
    flags: str
    change: Mapping[str, Any]
    same_updates: bool = True
    """Whether updates stay as they were, up to rounding and what is drawn."""


ALWAYS = "always on"
FIRST = Step("batches padded to their longest text", "Tokenised once, dynamic padding", ALWAYS, {})


def steps_of(task: str, device: str, larger: int) -> list[Step]:
    """The rungs after the first one: those in one process come before those of several."""
    number = "2" if device == "cpu" else str(torch.cuda.device_count())
    formats = ("bf16",) if device == "cpu" else ("bf16", "fp16")
    by_length = "group_by_length"
    steps = [
        Step("batches of similar lengths", "Length buckets", f"--sampling {by_length}", {"sampling": by_length}, False),
        Step("fused AdamW", "Fused optimizer", ALWAYS, {"fused": True}),
    ]
    if task == "masked_lm":
        box = "Vocabulary decoded at masked positions only"
        steps.append(Step("decoding at masked positions", box, ALWAYS, {"masked_positions": True}))
    return [
        *steps,
        Step(f"batches of {larger}", "Larger batch", f"--batch-size {larger}", {"batch_size": larger}, False),
        *(Step(name, "Mixed precision", f"--precision {name}", {"precision": name}) for name in formats),
        Step("batches made ahead", "Loaders, pinned memory", "--prefetch 2", {"prefetch": 2}),
        Step("2 micro-batches", "Gradient accumulation", "--micro-batches 2", {"micro_batches": 2}),
        Step(
            "activations computed again",
            "Gradient checkpointing",
            "--gradient-checkpointing",
            {"gradient_checkpointing": True},
        ),
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


Keep = Callable[[str, Callable[[], list[Any]]], list[Any]]
"""Gives what a turn of that name has measured before, or measures it now."""


class Parts:
    """The turns of a ladder that were measured, in a file: one that was interrupted goes on from there.

    Whole turns are kept, since the sides of a turn are compared with each other.

    Args:
        settings: of the ladder, the machine among them.

    Raises:
        UsageError: if the file is of other settings.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]) -> None:
        self._file, self._settings = file, json.loads(json.dumps(settings))
        self._turns: dict[str, list[Any]] = {}
        if not file.is_file():
            return
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            before, self._turns = dict(found["settings"]), dict(found["turns"])
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file} cannot be read ({error!r}); delete it, or type another --out") from error
        names = [name for name in self._settings | before if self._settings.get(name) != before.get(name)]
        if names:
            changed = ", ".join(f"{name} {before.get(name)} -> {self._settings.get(name)}" for name in names)
            raise UsageError(f"{file.parent} holds a ladder of other settings ({changed}); type another --out")

    def keep(self, name: str, measure: Callable[[], list[Any]]) -> list[Any]:
        """As `Keep`; what is measured now is in the file when this returns."""
        if name not in self._turns:
            self._turns[name] = measure()
            write_json(self._file, {"settings": self._settings, "turns": self._turns})
        return self._turns[name]


def in_turns(name: str, turns: int, sides: Sequence[Callable[[int], Any]], keep: Keep) -> list[list[Any]]:
    """What each side gives for each turn; within a turn the sides come in a random order, since machines drift."""

    def measure(turn: int) -> list[Any]:
        order = list(range(len(sides)))
        random.Random(f"{name} {turn}").shuffle(order)
        found = {side: sides[side](turn) for side in order}
        return [found[side] for side in range(len(sides))]

    measured = [keep(f"{name}, turn {turn}", functools.partial(measure, turn)) for turn in range(turns)]
    return [list(side) for side in zip(*measured, strict=True)]


Naive = Callable[[int], dict[str, Any]]
"""Trains with the naive loop in a turn."""
Train = Callable[[Stack, int], dict[str, Any]]
"""Trains with a stack in a turn."""


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
    for step in (FIRST, *steps):
        rung = {"name": step.name, "box": step.box, "flags": step.flags, "reason": "" if step is FIRST else skip(step)}
        sides: list[list[Any]] = [[], []]
        if not rung["reason"]:
            before = naive if step is FIRST else functools.partial(train, stack_of(kept))
            after = functools.partial(train, stack_of([*kept, step]))
            try:
                sides = in_turns(step.name, turns, (before, after), keep)
            except RunError as error:
                if OUT_OF_MEMORY not in str(error):
                    raise
                rung["reason"] = NO_MEMORY
        rungs.append(rung | {"before": sides[0], "after": sides[1]})
        if rung["reason"]:
            _say(f"{step.name}: not measured, {rung['reason']}")
            continue
        gains = pays(rungs[-1])
        if gains or step is FIRST:
            kept.append(step)
        _say(f"{step.name}: {_median_ratio(*sides):.2f}x, {'kept' if gains else 'does not pay'}")
    return kept, rungs


def stack_of(steps: Iterable[Step]) -> Stack:
    """All of these rungs."""
    return functools.reduce(lambda stack, step: dataclasses.replace(stack, **step.change), steps, Stack())


def tried(kept: Sequence[Step]) -> list[list[Step]]:
    """The stacks of the proof, each as its rungs: first those that leave updates as they were, then one more at a time.

    The order is that of the climb. It is decided before any score is known, as a test of one after the other needs it.
    """
    same = [step for step in kept if step.same_updates]
    others = [step for step in kept if not step.same_updates]
    return [[*same, *others[:number]] for number in range(len(others) + 1)]


def _median_ratio(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> float:
    rate = "samples_per_second"
    return statistics.median(fast[rate] / slow[rate] for slow, fast in zip(before, after, strict=True))


def prove(subject: Subject, stacks: Sequence[Sequence[Step]], size: Size, keep: Keep) -> dict[str, Any]:
    """The naive loop and each of `stacks` on the same seeds."""
    samples = size.proof_samples[subject.name] - size.warmup

    def naive(seed: int) -> dict[str, Any]:
        return subject.naive(naive_loop, Meter(size.warmup, samples, subject.device), seed)

    def train(steps: Sequence[Step], seed: int) -> dict[str, Any]:
        found, run = subject.train(stack_of(steps), Meter(size.warmup, samples, subject.device), seed)
        return {"training": found, "score_at_start": subject.score_at_start(run)}

    sides: tuple[Callable[[int], dict[str, Any]], ...] = naive, *(functools.partial(train, steps) for steps in stacks)
    first, *others = in_turns("proof", size.seeds, sides, keep)
    trained = [
        {"rungs": [step.name for step in steps], "trainings": [each["training"] for each in trainings]}
        for steps, trainings in zip(stacks, others, strict=True)
    ]
    return {"naive": first, "stacks": trained, "score_at_start": others[0][0]["score_at_start"]}


def measure(
    name: str, size: Size, flags: argparse.Namespace, device: str, parts: Parts, stop: StopRequest
) -> dict[str, Any]:
    """All of one task, as in ladder.json."""
    from analysis.ladder import ladder_of

    cache, texts = cache_folder(flags.cache_dir), flags.out / "texts" / name
    data = data_of(name, flags)

    def keep(turn: str, measured: Callable[[], list[Any]]) -> list[Any]:
        return parts.keep(f"{name}: {turn}", measured)

    def subject(samples: int) -> Subject:
        return Subject(name, data, samples, size.eval_samples, texts / str(samples), cache, device, stop)

    climbed, proved = subject(size.climb_samples), subject(size.proof_samples[name])
    larger = flags.batch_size or (2 * BATCH_SIZE if device == "cpu" else 8 * BATCH_SIZE)
    _say(f"{name} on {Path(data).name}")
    kept, rungs = climb(
        lambda turn: climbed.naive(naive_loop, Meter(size.warmup, size.climb_samples, device), turn),
        lambda stack, turn: climbed.train(stack, Meter(size.warmup, size.climb_samples, device), turn)[0],
        steps_of(name, device, larger),
        size.turns,
        lambda step: reason_not_to(step, device, size, flags.leave_out),
        keep,
    )
    stacks = tried(kept)
    _say(f"the naive loop and stacks of the rungs that pay ({len(stacks)}), {size.seeds} seeds")
    found = {
        "task": name,
        "data": Path(data).name,
        "model": "tiny",
        "epoch": proved.epoch,
        "climb_samples": size.climb_samples,
        "proof_samples": size.proof_samples[name],
        "score": SCORE[name],
        "lower_is_better": SCORE[name] == "loss",
        "margin": MARGINS[name] if flags.margin is None else flags.margin,
        "loss_margin": MARGINS["masked_lm"],
        "turns": size.turns,
        "rungs": rungs,
        **prove(proved, stacks, size, keep),
        "expected": (),
        "one_worker": None,
        "operations": proved.operations(),
        "longest": proved.longest,
    }
    final = next(steps for steps in stacks if [step.name for step in steps] == list(ladder_of(found).final.rungs))
    expected, one_worker = keep("one worker", lambda: list(proved.expected(stack_of(final), size.climb_samples)))
    return found | {"expected": expected, "one_worker": one_worker}


def data_of(name: str, flags: argparse.Namespace) -> str:
    folder = SHARED / {"classification": "hate_davidson", "masked_lm": "hate_mlm"}[name]
    return getattr(flags, f"{name}_data") or (str(folder) if folder.is_dir() else "pydocs")


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
    flags.add_argument("--tasks", default=",".join(SCORE), help="one or both (default %(default)s)")
    shared = "../shared/data/{}, or pydocs where that is not there"
    flags.add_argument("--classification-data", metavar="DATA", help=f"(default: {shared.format('hate_davidson')})")
    flags.add_argument("--masked-lm-data", metavar="DATA", help=f"(default: {shared.format('hate_mlm')})")
    flags.add_argument("--batch-size", type=int, metavar="B", help="of the larger batch (default: 32, on a GPU 128)")
    flags.add_argument("--margin", type=float, metavar="M", help=f"of equivalence, in place of {MARGINS}")
    flags.add_argument("--seeds", type=int, metavar="N", help="of the proof (default: 8, with --quick 2)")
    flags.add_argument("--turns", type=int, metavar="N", help="of each rung (default: 5, with --quick 3)")
    flags.add_argument(
        "--leave-out", action="append", default=[], metavar="BOX", help="a line of the checklist not to measure; repeat"
    )
    flags.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    flags.add_argument("--cache-dir", metavar="DIR", help="of prepared data (default: the user's cache folder)")
    return flags


def size_of(flags: argparse.Namespace) -> Size:
    """How much the flags ask for.

    Raises:
        UsageError: for a number or a name that cannot be.
    """
    for flag, least in (("seeds", 1), ("turns", 2), ("batch_size", 1)):
        value = getattr(flags, flag)
        if value is not None and value < least:
            raise UsageError(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
    if flags.margin is not None and not 0 < flags.margin < float("inf"):
        raise UsageError(f"--margin must be a number above 0, got {flags.margin}")
    if unknown := set(flags.tasks.split(",")) - set(SCORE):
        raise UsageError(f"--tasks takes {', '.join(SCORE)}; got {', '.join(sorted(unknown))}")
    boxes = {step.box for name in SCORE for step in steps_of(name, "cuda", 2)}
    if unknown := set(flags.leave_out) - boxes:
        raise UsageError(f"--leave-out takes {'; '.join(sorted(boxes))}; got {'; '.join(sorted(unknown))}")
    size = QUICK if flags.quick else FULL
    return dataclasses.replace(size, seeds=flags.seeds or size.seeds, turns=flags.turns or size.turns)


def machine_of(device: str) -> dict[str, Any]:
    """What ladder.json says of the machine; memory is that of one device."""
    machine = describe_environment(available_cores(), 1) | dataclasses.asdict(Hardware.here(device))
    if device == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
        return machine | {
            "device": torch.cuda.get_device_name(),
            "devices": torch.cuda.device_count(),
            "memory_bytes": memory,
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return machine | {"device": "cpu", "devices": available_cores(), "memory_bytes": memory}


def run(argv: list[str], stop: StopRequest) -> int:
    flags = parser().parse_args(argv)
    from analysis.ladder import LADDER, PARTS, SCHEMA
    from analysis.speed_ladder import report

    size, device = size_of(flags), resolve_device(flags.device)
    flags.out = flags.out or Path("runs/speed_ladder" + "-quick" * flags.quick)
    fork_server("tiny")  # starts to import what workers need
    flags.out.mkdir(parents=True, exist_ok=True)
    machine = machine_of(device)
    tasks = {name: data_of(name, flags) for name in flags.tasks.split(",")}
    asked = {key: getattr(flags, key) for key in ("batch_size", "margin", "leave_out")}
    same = {key: machine[key] for key in ("device", "devices", "cpu", "cores", "versions")}
    parts = Parts(flags.out / PARTS, {**dataclasses.asdict(size), **asked, "data": tasks, **same})
    ladders = [measure(name, size, flags, device, parts, stop) for name in tasks]
    found = {"schema": SCHEMA, "quick": flags.quick, "machine": machine, "ladders": ladders}
    write_text(flags.out / LADDER, json.dumps(found, indent=1))
    report(flags.out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(run, argv, goes_on=True)


if __name__ == "__main__":
    sys.exit(main())
