"""Fine-tune: the second stage of STILT, always in the same way, in one process. Reads top to bottom.

AdamW, linear warmup and linear decay, mean cross-entropy, no early stopping: nothing is chosen by looking at the
texts that are scored, so scoring them on the way costs time and nothing else. What a run computes is a function of its
settings and of the model it starts from, bit for bit, on one machine and number of threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from asyncsgd import models, scores
from asyncsgd.data.corpora import Corpus
from asyncsgd.data.labelled import (
    HateCheck,
    LabelledBatches,
    LabelledData,
    LabelledEvaluation,
    check_labelled,
    hatecheck_files,
    load_hatecheck,
    load_labelled,
)
from asyncsgd.data.random import dropout_seed
from asyncsgd.data.tokenization import load_tokenizer, tokenize_beginnings
from asyncsgd.errors import RunError, UsageError, nearest, reason
from asyncsgd.evaluation import Measured
from asyncsgd.experiment import cache_folder, device_of_worker, resolve_device
from asyncsgd.finetune_settings import FinetuneSettings, Functional, LabelledText, Start, Tuning, make_finetune_settings
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.objectives.classification import Classification, ClassSums, inverse_frequency
from asyncsgd.optimizers import AdamW, Optimizer, OptimizerRecipe
from asyncsgd.origin import Origin, hash_of, read_origin
from asyncsgd.progress import say
from asyncsgd.record import DONE, FAILED, INTERRUPTED, Evaluation, RunFolder, describe_environment
from asyncsgd.run_folder import open_finetune_folder
from asyncsgd.runtime.base import Budget, EvaluationPoints, Result, TrainingClock, diverged
from asyncsgd.schedules import WarmupSchedule, linear
from asyncsgd.signals import StopRequest, held
from asyncsgd.training import BEFORE_TRAINING, EXIT_CODES, OUT_OF_MEMORY, TWICE, is_out_of_memory

VOCABULARY = 8192
"""Of the tokenizer that random weights (tiny, small) get, trained on the training texts."""

HEADINGS = f"{'samples':>10} {'updates':>9} {'train_s':>9} {'eval_loss':>10} {'accuracy':>9} {'macro_F1':>9}"

MEASURED = (
    "num_samples",
    "num_updates",
    "train_seconds",
    "eval_seconds",
    "samples_per_second",
    "first_eval_loss",
    "final_eval_loss",
    "metrics",
    "details",
    "eval_weight",
    "hatecheck",
    "parameters_sha256",
)
"""The summary's fields that a run without a result has as null."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs before it begins."""

    origin: Origin
    data: LabelledData
    tokenizer: Any
    flat: FlatModel
    """The classifier, bound to a flat vector."""
    objective: Classification
    batches: LabelledBatches
    evaluation: LabelledEvaluation
    hatecheck: HateCheck | None
    hateful: tuple[int, ...]
    """The classes that count as hateful in `hatecheck`."""
    num_cut: int
    """Texts longer than the sequences."""
    init_sha256: str
    """Of the masked-language model that the encoder comes from."""
    new_parameters: tuple[str, ...]
    """Of the classifier: what the encoder does not bring; see `asyncsgd.models.Built`."""


def check(settings: FinetuneSettings) -> None:
    """Refuse what can be seen to be wrong without reading a text or importing transformers, before there is a run.

    Raises:
        UsageError: for whatever the user has to change.
    """
    data = settings.data
    resolve_device(settings.machine.device)
    cache_folder(data.cache_dir)
    check_labelled(data.data, data.text_column, data.label_column)
    if settings.functional.hatecheck is not None:
        hatecheck_files(settings.functional.hatecheck)
    try:
        models.check_model(read_origin(settings.start.init_from).model, data.seq_len)
    except UsageError as error:
        raise UsageError(str(error).replace("--model", "--init-from")) from error


def run(values: Mapping[str, object], command: str) -> int:
    """Fine-tune with the settings named in `values`, in a new folder; return the exit code.

    Raises:
        UsageError: where the user has to change something.
    """
    settings = make_finetune_settings(values)
    return lead(settings, open_finetune_folder(settings, command))


def lead(settings: FinetuneSettings, folder: RunFolder, stop: StopRequest | None = None) -> int:
    """Prepare, train, score; return the exit code. The run folder says how it ended, whatever happens.

    Args:
        settings: valid.
        folder: new; owned by this call.
        stop: what has listened for Ctrl-C and SIGTERM so far; None: nothing has.

    Raises:
        UsageError: where the user has to change something; the folder then holds a FAILED summary.
    """
    found: dict[str, Any] = _identity(settings)
    with contextlib.closing(folder), stop or StopRequest() as listening:
        try:
            result = _attempt(settings, folder, listening, found)
            with held():
                folder.write_summary({"status": result.status, "message": result.message} | found)
        except UsageError as error:
            folder.write_summary({"status": FAILED, "message": str(error)} | found)
            raise
        except OSError as error:
            message = f"{folder.path} cannot be written ({error.strerror}); free some space and run again"
            result = Result(FAILED, message)
    if result.message:
        print(f"{result.status}: {result.message}", file=sys.stderr, flush=True)
    return EXIT_CODES.get(result.status, 1)


def _attempt(settings: FinetuneSettings, folder: RunFolder, stop: StopRequest, found: dict[str, Any]) -> Result:
    """Do all of it, and put into `found` what the summary is to say, as soon as it is known."""
    prepared = None
    try:
        torch.set_num_threads(settings.machine.threads)
        device = resolve_device(settings.machine.device)
        with stop.at_once():
            prepared = prepare(settings, device_of_worker(device, 0))
        folder.write_environment(describe_environment(settings.machine.threads, 1) | {"device": device})
        found |= _prepared_summary(prepared)
        _describe(settings, prepared)
        result = _train(settings.tuning, settings.start.seed, prepared, folder, stop, found)
        sha256 = parameters_sha256(prepared.flat.layout, prepared.flat.parameters)
        if result.status == DONE and prepared.hatecheck is not None:
            found |= {"hatecheck": _hatecheck_scores(prepared, prepared.hatecheck, settings.data.seq_len)}
        if settings.output.save_model:
            name = str(prepared.tokenizer.name_or_path)
            models.save_whole(lambda new: models.save_pretrained(prepared.flat.model, name, new), folder.path / "model")
        found |= {"parameters_sha256": sha256}
        _say_result(result, found, folder)
        return result
    except UsageError:
        raise
    except KeyboardInterrupt:
        return BEFORE_TRAINING if prepared is None else TWICE
    except RunError as error:
        return Result(FAILED, str(error))
    except (OSError, SafetensorError) as error:
        refused = reason(error) if isinstance(error, OSError) else error
        return Result(FAILED, f"{getattr(error, 'filename', None) or folder.path}: {refused}")
    except Exception as error:
        if is_out_of_memory(error):
            return Result(FAILED, OUT_OF_MEMORY)
        traceback.print_exc()
        return Result(FAILED, f"{type(error).__name__}: {error}")


# ---- preparation -------------------------------------------------------------------------------------------


def prepare(settings: FinetuneSettings, device: str) -> Prepared:
    """Read the origin, the texts and the model; build the classifier on `device`.

    Raises:
        UsageError: for whatever the user has to change.
    """
    seed, text = settings.start.seed, settings.data
    origin = read_origin(settings.start.init_from)
    data = _load_data(text)
    hatecheck, hateful = _load_hatecheck(settings.functional, data)
    cache = cache_folder(text.cache_dir)
    dropout = settings.tuning.dropout
    corpus = Corpus(data.name, data.train, data.eval, data.fingerprint)
    try:
        tokenizer = load_tokenizer(origin.model, corpus, vocab_size=VOCABULARY, cache_dir=cache)
        initial = models.build_model(origin.model, tokenizer, seq_len=text.seq_len, dropout=dropout, seed=seed)
    except UsageError as error:
        raise UsageError(str(error).replace("--model", "--init-from")) from error
    init_sha256 = hash_of(initial.model, origin)
    built = models.build_classifier(initial.model, data.labels, dropout=dropout, seed=seed)
    flat = FlatModel(built.model.to(device))
    frame = models.frame_of(tokenizer)
    train = tokenize_beginnings(data.train.texts, tokenizer, seq_len=text.seq_len)
    evaluation = tokenize_beginnings(data.eval.texts, tokenizer, seq_len=text.seq_len)
    classes = data.classes(data.train)
    counts = np.bincount(classes, minlength=len(data.labels))
    weights = inverse_frequency(counts) if settings.tuning.class_weights else None
    capacity = text.seq_len - len(frame.prefix) - len(frame.suffix)
    return Prepared(
        origin=origin,
        data=data,
        tokenizer=tokenizer,
        flat=flat,
        objective=Classification(built.model, weights),
        batches=LabelledBatches(train, classes, frame, settings.tuning.batch_size, seed),
        evaluation=LabelledEvaluation(evaluation, data.classes(data.eval), frame),
        hatecheck=hatecheck,
        hateful=hateful,
        num_cut=int((train.lengths >= capacity).sum() + (evaluation.lengths >= capacity).sum()),
        init_sha256=init_sha256,
        new_parameters=built.new_parameters,
    )


def _load_data(text: LabelledText) -> LabelledData:
    return load_labelled(
        text.data,
        text_column=text.text_column,
        label_column=text.label_column,
        cache_dir=cache_folder(text.cache_dir),
        split=text.split,
        train_samples=text.train_samples,
        eval_samples=text.eval_samples,
    )


def _load_hatecheck(functional: Functional, data: LabelledData) -> tuple[HateCheck | None, tuple[int, ...]]:
    if functional.hatecheck is None:
        return None, ()
    wanted = [label.strip() for label in (functional.hatecheck_positive or "hate").split(",")]
    for label in wanted:
        if label not in data.labels:
            raise UsageError(
                f"--hatecheck: {data.name} has no label {label!r}{nearest(label, data.labels)}; say which labels count "
                f"as hateful with --hatecheck-positive LABEL[,LABEL]; the labels are {', '.join(data.labels)}"
            )
    if len(set(wanted)) == len(data.labels):
        raise UsageError("--hatecheck-positive names every label; leave out those that are not hateful")
    return load_hatecheck(functional.hatecheck), tuple(data.labels.index(label) for label in dict.fromkeys(wanted))


# ---- training ----------------------------------------------------------------------------------------------


def num_batches(tuning: Tuning, num_train: int) -> int:
    """How many batches a run has: its samples, or its epochs, rounded up to whole batches.

    >>> num_batches(Tuning(epochs=2.0, batch_size=16), 100), num_batches(Tuning(samples=33, batch_size=16), 100)
    (13, 3)
    """
    samples = tuning.samples if tuning.samples is not None else math.ceil((tuning.epochs or 0.0) * num_train)
    return math.ceil(samples / tuning.batch_size)


def schedule_of(tuning: Tuning, num_samples: int) -> WarmupSchedule:
    """The learning rate as a function of the samples seen, those of the step's own batch included."""
    return WarmupSchedule(tuning.learning_rate, round(tuning.warmup * num_samples), num_samples, linear)


def optimizer_on(flat: FlatModel, tuning: Tuning) -> Optimizer:
    """AdamW on the classifier's vector."""
    recipe = OptimizerRecipe(AdamW(), tuning.weight_decay, tuning.clip_norm)
    return recipe.on(flat.parameters, flat.layout.num_decayed)


def gradient(prepared: Prepared, seed: int, index: int) -> float:
    """Compute the gradient of batch `index` into the flat vector; return the batch's loss."""
    batch = prepared.batches.batch(index).to(prepared.flat.parameters.device)
    prepared.flat.release_gradients()
    torch.manual_seed(dropout_seed(seed, 0, index))  # the one allowed use of torch's default generator
    loss = prepared.objective.loss(batch)
    loss.backward()
    prepared.flat.gather_gradients()
    return float(loss.detach())


def _train(
    tuning: Tuning,
    seed: int,
    prepared: Prepared,
    folder: RunFolder,
    stop_requested: Callable[[], bool],
    found: dict[str, Any],
) -> Result:
    """Train, evaluate at fixed points, the last one at the end; `found` has the last evaluation's scores when DONE."""
    total = num_batches(tuning, len(prepared.data.train.texts))
    total_samples = total * tuning.batch_size
    schedule, optimizer = schedule_of(tuning, total_samples), optimizer_on(prepared.flat, tuning)
    points = EvaluationPoints(Budget(samples=total_samples), tuning.evaluations)
    clock, eval_seconds = TrainingClock(), 0.0
    say(HEADINGS)

    def evaluate(num_updates: int) -> Evaluation:
        nonlocal eval_seconds
        clock.pause()
        began = time.perf_counter()
        sums = evaluate_all(prepared)
        seconds = time.perf_counter() - began
        eval_seconds += seconds
        record = _measured(prepared.data.labels, sums).record(
            version=num_updates,
            num_samples=num_updates * tuning.batch_size,
            train_seconds=clock.seconds,
            eval_seconds=seconds,
        )
        folder.append(record)
        _say_evaluation(record)
        clock.resume()
        return record

    last = evaluate(0)
    found["first_eval_loss"] = last.loss
    result, index = None, 0
    while result is None and index < total:
        loss = gradient(prepared, seed, index)
        if not math.isfinite(loss):
            result = diverged(f"the training loss of batch {index} is not finite")
            break
        optimizer.step(prepared.flat.gradients, schedule((index + 1) * tuning.batch_size))
        index += 1
        if points.passed(index * tuning.batch_size, 0.0):
            last = evaluate(index)
            if not math.isfinite(last.loss):
                result = diverged(f"the evaluation loss at version {index} is not finite")
        if result is None and index < total and stop_requested():
            result = Result(INTERRUPTED, f"stopped by the user after {index} of {total} updates; it has no scores")
    seconds = clock.seconds
    found |= {
        "num_samples": index * tuning.batch_size,
        "num_updates": index,
        "train_seconds": seconds,
        "eval_seconds": eval_seconds,
        "samples_per_second": index * tuning.batch_size / seconds if seconds > 0 else None,
    }
    if result is None:
        found |= {
            "final_eval_loss": last.loss,
            "metrics": last.metrics,
            "details": last.details,
            "eval_weight": last.weight,
        }
    return result or Result(DONE)


def evaluate_all(prepared: Prepared) -> ClassSums:
    """The sums over the whole evaluation set."""
    device, evaluation = prepared.flat.parameters.device, prepared.evaluation
    num = len(prepared.data.labels)
    total = ClassSums(0.0, np.zeros((num, num), dtype=np.int64))
    for index in range(len(evaluation)):
        total += prepared.objective.sums(evaluation.batch(index).to(device))
    return total


def _measured(labels: tuple[str, ...], sums: ClassSums) -> Measured:
    """`loss` is the mean per text, never weighted by class; `accuracy` is of texts."""
    confusion = sums.confusion
    num_texts = int(confusion.sum())
    found = {"macro_f1": scores.macro_f1(confusion), "accuracy": scores.accuracy(confusion)}
    return Measured(
        loss=sums.loss / num_texts,
        weight=float(num_texts),
        metrics={name: value for name, value in found.items() if value is not None},
        details={
            "per_class_f1": dict(zip(labels, scores.per_class_f1(confusion), strict=True)),
            "confusion": confusion.tolist(),
        },
    )


def _hatecheck_scores(prepared: Prepared, cases: HateCheck, seq_len: int) -> dict[str, object]:
    tokens = tokenize_beginnings(cases.texts, prepared.tokenizer, seq_len=seq_len)
    nothing = np.zeros(len(cases.texts), dtype=np.int64)
    batches = LabelledEvaluation(tokens, nothing, models.frame_of(prepared.tokenizer))
    device = prepared.flat.parameters.device
    predicted = np.empty(len(cases.texts), dtype=np.int64)
    predicted[batches.order] = np.concatenate(
        [prepared.objective.predictions(batches.batch(index).to(device)) for index in range(len(batches))]
    )
    return cases.scores(np.isin(predicted, prepared.hateful))


# ---- what is said and written ------------------------------------------------------------------------------


def _identity(settings: FinetuneSettings) -> dict[str, Any]:
    """The summary's fields that are known before anything has run, and null for all that is measured."""
    origin: Origin | None = None
    with contextlib.suppress(UsageError, OSError):
        origin = read_origin(settings.start.init_from)
    return {
        "experiment": "stilt_finetune",
        "task": settings.start.task,
        "seed": settings.start.seed,
        "model": settings.start.init_from,
        "from_scratch": None if origin is None else origin.from_scratch,
        "parent": None if origin is None else origin.parent,
        "init_sha256": None,
        "class_weights": settings.tuning.class_weights,
        "batch_size": settings.tuning.batch_size,
        "threads": settings.machine.threads,
    } | dict.fromkeys(MEASURED)


def _prepared_summary(prepared: Prepared) -> dict[str, Any]:
    data = prepared.data
    return {
        "init_sha256": prepared.init_sha256,
        "data": data.name,
        "data_fingerprint": data.fingerprint,
        "data_notes": list(data.notes),
        "split": data.split,
        "labels": list(data.labels),
        "num_train_samples": len(data.train.texts),
        "num_eval_samples": len(data.eval.texts),
        "num_parameters": prepared.flat.layout.num_parameters,
        "new_parameters": len(prepared.new_parameters),
    }


def _describe(settings: FinetuneSettings, prepared: Prepared) -> None:
    origin, data, tuning = prepared.origin, prepared.data, settings.tuning
    kind = "from scratch" if origin.from_scratch else "pretrained"
    if origin.parent is not None:
        workers = origin.parent["num_workers"]
        several = "" if workers == 1 else "s"
        kind = f"{kind}, {origin.parent['mode']}, {workers} worker{several}, seed {origin.parent['seed']}"
    num_parameters = prepared.flat.layout.num_parameters / 1e6
    samples = f"{len(data.train.texts)} training, {len(data.eval.texts)} {data.split} texts"
    say(
        f"model  {settings.start.init_from} ({kind}, {num_parameters:.2f} M parameters)   "
        f"data  {data.name} ({samples})   seed {settings.start.seed}"
    )
    new = ", ".join(prepared.new_parameters)
    say(
        f"head   {len(prepared.new_parameters)} of {len(prepared.flat.layout.names)} tensors drawn from the seed: {new}"
    )
    counts = np.bincount(data.classes(data.train), minlength=len(data.labels))
    weighted = ", each weighted by its inverse frequency" if tuning.class_weights else ""
    say(f"labels {'  '.join(f'{label} {count}' for label, count in zip(data.labels, counts, strict=True))}{weighted}")
    for note in data.notes:
        say(f"note   {note}")
    if prepared.num_cut:
        say(f"note   {prepared.num_cut} texts fill --seq-len {settings.data.seq_len}; what is longer is cut")
    total = num_batches(tuning, len(data.train.texts))
    clip = f", gradients clipped at norm {tuning.clip_norm:g}" if tuning.clip_norm else ""
    say(
        f"step   adamw, learning rate {tuning.learning_rate:g} (linear, after {tuning.warmup:.0%} of warmup), "
        f"{total} updates of {tuning.batch_size} texts{clip}"
    )


def _say_evaluation(record: Evaluation) -> None:
    counts = f"{record.total_samples:>10} {record.version:>9} {record.train_seconds:>9.1f}"
    say(f"{counts} {record.loss:>10.4f} {record.metrics['accuracy']:>9.4f} {record.metrics['macro_f1']:>9.4f}")


def _say_result(result: Result, found: Mapping[str, Any], folder: RunFolder) -> None:
    if result.status == DONE:
        each = "  ".join(
            f"{label} {'-' if score is None else f'{score:.3f}'}"
            for label, score in found["details"]["per_class_f1"].items()
        )
        metrics = found["metrics"]
        say(f"final  accuracy {metrics['accuracy']:.4f}   macro-F1 {metrics['macro_f1']:.4f}   F1 per class  {each}")
    if found["hatecheck"] is not None:
        functional = found["hatecheck"]
        share = f"{functional['accuracy']:.4f} of {functional['num_cases']} cases right"
        names = sorted(functional["functionalities"].items(), key=lambda item: (item[1]["accuracy"], item[0]))
        worst = ", ".join(f"{name} {item['accuracy']:.2f}" for name, item in names[:3])
        say(f"check  HateCheck {share}; lowest {worst}")
    say(f"{result.status.lower():6} {folder.path}")
    say(f"next   python -m analysis.report {folder.path.parent} --out report.html")


# ---- how long it will take ---------------------------------------------------------------------------------


def estimate_seconds(values: Mapping[str, object]) -> float:
    """How long a run with these settings takes by itself, from three gradients and one batch of evaluation.

    Raises:
        UsageError: where the user has to change something.
    """
    settings = make_finetune_settings(values)
    # Equal but for where they start, a seed and a place: one measurement for all runs of a sweep.
    start = Start(init_from=settings.start.init_from)
    key = dataclasses.replace(settings, start=dataclasses.replace(start, init_from=""), output=type(settings.output)())
    if key not in _ESTIMATES:
        torch.set_num_threads(settings.machine.threads)
        prepared = prepare(settings, device_of_worker(resolve_device(settings.machine.device), 0))
        device = prepared.flat.parameters.device
        gradient(prepared, 0, 0)  # a first one is slower
        began = time.perf_counter()
        for index in (0, 8, 16):  # of three length groups
            gradient(prepared, 0, index)
        step = (time.perf_counter() - began) / 3
        middle = prepared.evaluation.batch(len(prepared.evaluation) // 2)
        began = time.perf_counter()
        prepared.objective.sums(middle.to(device))
        evaluation = (time.perf_counter() - began) * len(prepared.evaluation)
        total = num_batches(settings.tuning, len(prepared.data.train.texts))
        _ESTIMATES[key] = total * step + (settings.tuning.evaluations + 1) * evaluation
    return _ESTIMATES[key]


_ESTIMATES: dict[FinetuneSettings, float] = {}
