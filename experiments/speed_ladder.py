"""The optimisation guide as a measurement: from the naive loop to the fastest training, one setting at a time.

    python experiments/speed_ladder.py --quick     # both tasks in under 4 minutes, no verdict on the score
    python experiments/speed_ladder.py             # 5 turns a rung, 8 seeds: about 35 minutes on 2 quiet cores

Two tasks: classify texts, and predict masked words. The naive loop is ``naive_loop.py``: plain PyTorch, which knows
nothing of this library. Every rung is a setting of the library's own training.

The climb: each rung is measured in turns with the trainings of the rungs kept so far, on the same batches. A rung whose
ratio is not above 1 with its whole 95 % interval does not pay here. It is reported, and left out of the stack.
The proof: the naive loop and stacks of the rungs that pay, on the same seeds. The first stack has the rungs that leave
every update as it was. Each further one has one rung more. It says how many times as fast a stack is, and whether its
score is equivalent. The final stack is the last one before the first whose score is not.

Rates are those after a warm-up, evaluations not counted. `--out` holds ladder.json (the measurements), ladder.md and
report.html. `python -m analysis speed_ladder OUT` makes the last two again. A ladder that was interrupted goes on when
the same command is typed again: every training has a folder of its own, and what is finished is not made again."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncsgd.backends.launch import fork_server
from asyncsgd.core.signals import StopRequest
from asyncsgd.data.corpora import limited, select
from asyncsgd.data.documents import Documents
from asyncsgd.errors import OUT_OF_MEMORY, RunError, UsageError
from asyncsgd.records.events import DONE, SCHEMA, read_json
from asyncsgd.records.machine import available_cores, describe_environment
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.run.choose_folder import read_summary
from asyncsgd.run.finish import began_with
from asyncsgd.run.run import cache_folder, resolve_device, run_of
from asyncsgd.run.written import text_of
from asyncsgd.scripts.base import run_script
from asyncsgd.studies.arms import words_of
from asyncsgd.studies.runner import PRELOAD, PlannedJob, Runner
from asyncsgd.worker.evaluation import evaluate_sets, measured
from asyncsgd.worker.profile import flops_per_sample, forget_peaks, hardware, peak_bytes
from naive_loop import BATCH_SIZE, SEQ_LEN, naive_loop

MARGINS = {"classification": 0.03, "masked_lm": 0.05}
"""Declared before the runs: a macro-F1, and nats of evaluation loss."""
SCORE = {"classification": "macro_f1", "masked_lm": "loss"}
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
DEFAULT_THREADS = torch.get_num_threads()
OF_TASK: dict[str, dict[str, Any]] = {
    "classification": {"learning_rate": 5e-4},
    "masked_lm": {"learning_rate": 1e-3, "vocab_size": 4096, "eval_samples": 0},
}
"""The rate of a classification is the default of the task: at 1e-3 some seeds learn one class alone."""
PLAIN: dict[str, Any] = {
    "mode": "single",
    "batch_size": BATCH_SIZE,
    "sampling": "random",
    "seq_len": SEQ_LEN,
    "dropout": 0.1,
    "evaluations": 1,
    "schedule": "constant",
    "warmup": 0,
    "weight_decay": 0.01,
    "clip_norm": 0.0,
}
"""Settings of the first rung, as those of the naive loop; weight decay is what torch's AdamW has by default."""


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
    """One rung: its line in the checklist, and the settings that it changes."""

    name: str
    box: str
    change: Mapping[str, Any]
    same_updates: bool = True
    """Whether updates stay as they were, up to rounding and what is drawn."""

    @property
    def flags(self) -> str:
        """What is typed for it."""
        return " ".join(words_of(self.change)) or "always on"


def steps_of(task: str, device: str) -> list[Step]:
    """The rungs; the first one is the library itself. Those in one process come before those of several."""
    if device == "cpu":
        num_workers = 2
        larger = 2 * BATCH_SIZE
        precisions = ["bf16"]
    else:
        num_workers = torch.cuda.device_count()
        larger = 8 * BATCH_SIZE
        precisions = ["bf16", "fp16"]
    first = "batches padded to their longest text"
    if task == "masked_lm":
        first += ", decoded at masked positions"
    several = {"nproc": num_workers, "data_parallel": None}
    mixed = [Step(name, "Mixed precision", {"precision": name}) for name in precisions]
    return [
        Step(first, "Tokenised once, dynamic padding, fused optimizer", {}),
        Step("batches of similar lengths", "Length buckets", {"sampling": "group_by_length"}, False),
        Step(f"batches of {larger}", "Larger batch", {"batch_size": larger}, False),
        *mixed,
        Step("batches made ahead", "Loaders, pinned memory", {"prefetch": 2}),
        Step("2 micro-batches", "Gradient accumulation", {"micro_batches": 2}),
        Step("activations computed again", "Gradient checkpointing", {"gradient_checkpointing": True}),
        Step("DataParallel", "All GPUs", {"mode": "single", "data_parallel": True}),
        Step("synchronous workers", "More workers", {"mode": "sync"} | several),
        Step("asynchronous workers", "More workers", {"mode": "async"} | several, False),
        Step("compiled loss", "torch.compile", {"compile": True}),
    ]


def reason_not_to(step: Step, device: str, size: Size, left_out: Sequence[str]) -> str:
    """Why a rung is not measured here; empty where it is."""
    if step.box in left_out:
        return "left out by --leave-out"
    if "compile" in step.change and not size.compiles:
        return "the first batch compiles for a minute, too long for --quick"
    if device == "cuda":
        number = torch.cuda.device_count()
        kind = "GPUs"
    else:
        number = available_cores()
        kind = "cores"
    if "data_parallel" in step.change and (kind == "cores" or number < 2):
        return "it gives each of several GPUs a part of the batch, and here are fewer than two"
    if "mode" in step.change and number < 2:
        return f"two workers need two {kind}"
    return ""


Changes = Mapping[str, Any] | None
"""Settings of this library's training; None: the naive loop."""
Train = Callable[[str, Changes, int], dict[str, Any]]
"""Trains in a folder of that name with a seed; what was measured, or is there already."""
Measured = dict[str, list[dict[str, Any]]]
"""By side, what each of its trainings gave."""


def short_texts(documents: Documents) -> Documents:
    """Those of about `SEQ_LEN` tokens at most, so that both sides train on whole texts."""
    is_short = [len(text) <= 2 * SEQ_LEN for text in documents.texts]
    return select(documents, is_short)


def write_rows(file: Path, documents: Documents) -> None:
    """Write a JSON object for each text, with its label."""
    labels = documents.labels or ("",) * len(documents.texts)
    lines = []
    for text, label in zip(documents.texts, labels, strict=True):
        row = {"text": text, "label": label}
        lines.append(json.dumps(row) + "\n")
    write_text(file, "".join(lines))


class Trainings:
    """Trainings of a task on some of its texts, each in a folder of its own; what is finished is not made again.

    Args:
        task: classification or masked_lm.
        data: as the task takes it.
        texts: how many to train on, of those that the naive loop does not cut.
        samples: of a training.
        flags: `out`, `device` and `cache_dir`.
    """

    def __init__(
        self, task: str, data: str, texts: int, samples: int, size: Size, runner: Runner, flags: argparse.Namespace
    ) -> None:
        self._name = task
        self._samples = samples
        self._warmup = size.warmup
        self._runner = runner
        self._out = flags.out
        self.settings = {**PLAIN, **OF_TASK[task], "device": flags.device, "cache_dir": flags.cache_dir, "data": data}
        cache = Path(flags.cache_dir)
        corpus = self._task().read(cache)
        folder = flags.out / "texts" / task / str(texts)
        folder.mkdir(parents=True, exist_ok=True)
        evaluation = short_texts(corpus.eval)
        train = short_texts(corpus.train)
        self.epoch = len(train.texts)
        write_rows(folder / "validation.jsonl", limited(evaluation, size.eval_samples))
        write_rows(folder / "train.jsonl", limited(train, texts))
        self.settings["data"] = str(folder)
        self.task = self._task().prepare(0, cache)
        corpus = self.task.read(cache)
        self._texts = corpus.train.texts
        self._labels: list[int] | None = None
        if task != "masked_lm":
            names = corpus.train.labels or ()
            self._labels = [corpus.labels.index(name) for name in names]

    def _task(self, **other: Any) -> Any:
        settings = {**self.settings, **other, "samples": self._samples}
        job = PlannedJob("", self._name, settings)
        return job.settings.task

    def train(self, folder: str, changes: Changes, seed: int) -> dict[str, Any]:
        """As `Train`."""
        from analysis.ladder import training_of

        path = self._out / folder
        values = self._values(changes or {}, seed)
        own = {**values, "run_dir": str(path)}
        job = PlannedJob(folder, self._name, own, saves_model=False, out=self._out, study="speed_ladder")
        asked = {name: values[name] for name in values if name not in ("data", "cache_dir")}
        recorded = {"run": folder, "asked": asked}
        if changes is None:
            path.mkdir(parents=True, exist_ok=True)
            file = path / "naive.json"
            if not file.is_file():
                write_json(file, self._naive(seed, job))
            return recorded | read_json(file)
        summary = read_summary(path)
        if summary.get("status") != DONE:
            self._runner.run([job])
            summary = read_summary(path)
        status = summary.get("status")
        if status != DONE:
            raise RunError(f"{path} ended {status}: {summary.get('message')}")
        return recorded | training_of(path, self._warmup, SCORE[self._name])

    def _values(self, changes: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """What a training is asked for."""
        values = {**self.settings, **changes, "samples": self._samples, "seed": seed}
        values = {name: value for name, value in values.items() if value is not None}
        # the square root of the batch keeps the noise of AdamW's steps (Malladi et al., NeurIPS 2022)
        values["learning_rate"] *= (values["batch_size"] / BATCH_SIZE) ** 0.5
        number = values.get("nproc", 1)
        values["threads"] = max(1, available_cores() // number)
        if values["mode"] == "sync":
            values["batch_size"] //= number
        return values

    def _naive(self, seed: int, job: PlannedJob) -> dict[str, Any]:
        from transformers import AutoTokenizer

        device = torch.device(self.settings["device"])
        tokenizer = AutoTokenizer.from_pretrained(self.task.known["tokenizer"])
        model = self.task.model(seed).to(device)
        arrivals: list[tuple[int, float, float]] = []
        busy_gpu: list[float] = []

        def arrived(samples: int, seconds: float) -> None:
            if samples >= self._warmup:
                arrivals.append((samples, seconds, time.process_time()))
            if device.type == "cuda":
                with contextlib.suppress(Exception):  # nvidia-ml-py is not installed
                    busy_gpu.append(torch.cuda.utilization() / 100)

        forget_peaks(device)
        torch.set_num_threads(DEFAULT_THREADS)
        with torch.random.fork_rng():
            rate = self.settings["learning_rate"]
            where = self.settings["device"]
            naive_loop(self._texts, self._labels, tokenizer, model, rate, self._samples, seed, where, arrived)
        memory = peak_bytes(device)
        sets = self.task.data(seed).evaluation
        at_end = measured(self.task, evaluate_sets(self.task, model, sets, 0, 1, device))
        first, begin, cpu_before = arrivals[0]
        last, end, cpu_after = arrivals[-1]
        seconds = end - begin
        cpu_seconds = cpu_after - cpu_before
        self._describe(job, seed, at_end.weight)
        return {
            "samples_per_second": (last - first) / seconds,
            "warmup_seconds": begin,
            "loss": at_end.loss,
            "score": at_end.metrics.get(SCORE[self._name], at_end.loss),
            "memory_bytes": memory[0],
            "gpu_bytes": memory[1],
            "busy_cores": cpu_seconds / seconds,
            "busy_gpu": statistics.fmean(busy_gpu) if busy_gpu else None,
        }

    def _describe(self, job: PlannedJob, seed: int, weight: float | None) -> None:
        """Write what the naive loop began from as every run does, so that it can be compared with one."""
        settings = job.settings
        device = self.settings["device"]
        cache = Path(self.settings["cache_dir"])
        run = run_of("naive_loop", settings)
        task = run.task.prepare(seed, cache)
        run = dataclasses.replace(run, task=task)
        write_text(job.path / "settings.yaml", text_of(run))
        where = {"device": device, "num_devices": run.num_devices, **hardware(device)}
        environment = describe_environment(DEFAULT_THREADS, 1) | where
        write_json(job.path / "environment.json", environment)
        facts = run.summary() | began_with(run, run.flat())
        write_json(job.path / "summary.json", {"schema": SCHEMA, "status": DONE, **facts, "eval_weight": weight})

    def operations(self) -> dict[str, float]:
        """Of a forward and a backward pass on one text that fills its length, by model and length."""
        cache = Path(self.settings["cache_dir"])
        operations = {}
        for model, length in (("tiny", SEQ_LEN), ("tiny", 2 * SEQ_LEN), ("small", SEQ_LEN)):
            task = self._task(model=model, seq_len=length).prepare(0, cache)
            input_ids = torch.full((task.batch_size, length), 5)
            mask = torch.ones_like(input_ids)
            labels = torch.zeros(task.batch_size, dtype=torch.int64)
            if self._labels is None:
                positions = torch.arange(input_ids.numel())
                is_masked = positions % 7 == 0
                labels = torch.where(is_masked, 5, -100).view_as(input_ids)
            batch = {"input_ids": input_ids, "attention_mask": mask, "labels": labels}
            operations[f"{model} at {length} tokens"] = flops_per_sample(task, task.model(0), [batch])
        return operations


def in_turns(name: str, turns: int, sides: Mapping[str, Changes], train: Train) -> Measured:
    """What each side gives for each turn; within a turn the sides come in a random order, since machines drift."""
    found: Measured = {side: [] for side in sides}
    for turn in range(turns):
        order = list(sides)
        random.Random(f"{name} {turn}").shuffle(order)
        for side in order:
            found[side].append(train(f"{name}/{side}/s{turn}", sides[side], turn))
    return found


def climb(
    task: str, train: Train, steps: Sequence[Step], turns: int, skip: Callable[[Step], str], folder: Path
) -> tuple[list[Step], list[dict[str, Any]]]:
    """Measure one rung after the other.

    Args:
        skip: why a rung is not measured; empty where it is.
        folder: of all trainings.

    Returns:
        The first rung and those that pay, and all rungs as in ladder.json.
    """
    from analysis.ladder import NO_MEMORY, pays

    kept: list[Step] = []
    rungs = []
    for step in steps:
        reason = ""
        before: Changes = None
        if kept:
            reason = skip(step)
            before = changes_of(kept)
        sides: dict[str, Changes] = {"before": before, "after": changes_of([*kept, step])}
        found: Measured = {"before": [], "after": []}
        if not reason:
            name = re.sub(r"[^a-z0-9]+", "-", step.name.lower())
            try:
                found = in_turns(f"{task}/{name}", turns, sides, train)
            except RunError as error:
                if OUT_OF_MEMORY not in str(error):
                    raise
                reason = NO_MEMORY
        rungs.append({"name": step.name, "box": step.box, "flags": step.flags, "reason": reason, **found})
        if reason:
            _say(f"{step.name}: not measured, {reason}")
            continue
        gains = pays(rungs[-1], folder)
        if gains or not kept:
            kept.append(step)
        rate = "samples_per_second"
        pairs = zip(found["before"], found["after"], strict=True)
        ratio = statistics.median(fast[rate] / slow[rate] for slow, fast in pairs)
        word = "kept" if gains else "does not pay"
        _say(f"{step.name}: {ratio:.2f}x, {word}")
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


def measure(name: str, data: str, size: Size, flags: argparse.Namespace, runner: Runner) -> dict[str, Any]:
    """All of one task, as in ladder.json."""
    _say(f"{name} on {Path(data).name}")
    samples = size.proof_samples[name]
    climbed = Trainings(name, data, size.climb_samples, size.climb_samples + size.warmup, size, runner, flags)
    skip = functools.partial(reason_not_to, device=flags.device, size=size, left_out=flags.leave_out)
    kept, rungs = climb(name, climbed.train, steps_of(name, flags.device), size.turns, skip, flags.out)
    stacks = tried(kept)
    _say(f"the naive loop and stacks of the rungs that pay ({len(stacks)}), {size.seeds} seeds")
    proved = Trainings(name, data, samples, samples, size, runner, flags)
    sides = {f"stack-{number}": changes_of(steps) for number, steps in enumerate(stacks)}
    found = in_turns(f"{name}/proof", size.seeds, {"naive": None, **sides}, proved.train)
    naive, *others = found.values()
    proofs = []
    for steps, trainings in zip(stacks, others, strict=True):
        proof = {"rungs": [step.name for step in steps], "trainings": trainings}
        proofs.append(proof)
    lengths = proved.task.samples("train").lengths
    return {
        "task": name,
        "data": Path(data).name,
        "model": "tiny",
        "epoch": proved.epoch,
        "climb_samples": size.climb_samples,
        "proof_samples": samples,
        "score": SCORE[name],
        "lower_is_better": SCORE[name] == "loss",
        "margin": MARGINS[name] if flags.margin is None else flags.margin,
        "loss_margin": MARGINS["masked_lm"],
        "turns": size.turns,
        "rungs": rungs,
        "naive": naive,
        "stacks": proofs,
        "score_at_start": others[0][0]["score_at_start"],
        "operations": proved.operations(),
        "longest": int(lengths.max()),
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
    name = "cpu"
    devices = available_cores()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device == "cuda":
        name = torch.cuda.get_device_name()
        devices = torch.cuda.device_count()
        memory = torch.cuda.get_device_properties(0).total_memory
    machine = describe_environment(available_cores(), 1) | hardware(device)
    return machine | {"device": name, "devices": devices, "memory_bytes": memory}


def refuse_others(file: Path, settings: Mapping[str, Any]) -> None:
    """Keep what the trainings of a folder share.

    Raises:
        UsageError: if it holds others.
    """
    before = read_json(file) if file.is_file() else {}
    now = json.loads(json.dumps(settings))
    changed = [name for name in before if before[name] != now.get(name)]
    if changed:
        names = ", ".join(changed)
        raise UsageError(f"{file.parent} holds a ladder of other settings ({names}); type another --out")
    write_json(file, now)


def shared_or_pydocs(name: str) -> str:
    """A shared folder of data; pydocs where it is not there."""
    folder = SHARED / name
    return str(folder) if folder.is_dir() else "pydocs"


def run(argv: list[str], stop: StopRequest) -> int:
    flags = parser().parse_args(argv)
    from analysis.ladder import LADDER, SETTINGS
    from analysis.speed_ladder import report

    if flags.margin is not None and not 0 < flags.margin < float("inf"):
        raise UsageError(f"--margin must be a number above 0, got {flags.margin}")
    size = QUICK if flags.quick else FULL
    flags.device = resolve_device(flags.device)
    if not flags.out:
        flags.out = Path("runs/speed_ladder-quick" if flags.quick else "runs/speed_ladder")
    flags.cache_dir = str(cache_folder(flags.cache_dir))
    runner = Runner(fork_server("tiny", *PRELOAD), stop, side_by_side=1)
    flags.out.mkdir(parents=True, exist_ok=True)
    machine = machine_of(flags.device)
    data = {
        "classification": flags.classification_data or shared_or_pydocs("hate_davidson"),
        "masked_lm": flags.masked_lm_data or shared_or_pydocs("hate_mlm"),
    }
    settings = size._asdict() | {"margin": flags.margin, "leave_out": flags.leave_out, "data": data}
    settings |= {key: machine[key] for key in ("device", "devices", "cpu", "cores", "versions")}
    refuse_others(flags.out / SETTINGS, settings)
    ladders = [measure(name, data[name], size, flags, runner) for name in data]
    write_json(flags.out / LADDER, {"quick": flags.quick, "machine": machine, "ladders": ladders})
    report(flags.out)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return run_script(run, argv, goes_on=True)


if __name__ == "__main__":
    sys.exit(main())
