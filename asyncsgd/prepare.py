"""From settings to what training needs: corpus, tokenizer, token arrays, model and the assignment that workers get."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import torch
from torch import nn

from asyncsgd import models, settings
from asyncsgd.churn import parse_churn
from asyncsgd.data.batching import Frame
from asyncsgd.data.corpora import check_sources, load_corpus
from asyncsgd.data.masking import Masking, by_token, by_word
from asyncsgd.data.tokenization import Tokens, load_tokenizer, tokenized_folder
from asyncsgd.errors import UsageError
from asyncsgd.optimizers import SGD, AdamW, BuildOptimizer, OptimizerRecipe
from asyncsgd.rules import Asynchronous, Synchronous, parse_rule
from asyncsgd.rules.base import Rule
from asyncsgd.runtime.base import Budget
from asyncsgd.runtime.worker_process import Assignment
from asyncsgd.schedules import WarmupSchedule, constant, cosine, linear
from asyncsgd.speeds import Constant, Infinite, Speeds, parse_network, parse_speeds
from asyncsgd.tasks.masked_lm import MaskedLM

_CHOOSE = {"token": by_token, "word": by_word}
_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_KEEP_ORDER_OF_STORES = ("x86_64", "AMD64", "i386", "i686")
"""Processors on which the sequence lock of shared memory is right; see `runtime.transport.shared_memory`."""
_SHAPE = {"constant": constant, "linear": linear, "cosine": cosine}


@dataclasses.dataclass(frozen=True)
class Materials:
    """What only the leader can find out, since it takes long: names and numbers that can be sent as text."""

    config: str
    train: str
    evaluation: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad_id: int
    mask_id: int
    vocabulary_size: int
    special_ids: tuple[int, ...]
    device: str


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything a run needs before it has workers."""

    materials: Materials

    assignment: Assignment
    model: nn.Module
    """With the initial values, on the CPU; owned by the run."""
    tokenizer: Any
    data_name: str
    data_fingerprint: str
    num_train_samples: int
    num_eval_samples: int
    new_parameters: tuple[str, ...]
    """See `asyncsgd.models.Built`."""


def check(settings: settings.Settings) -> None:
    """Refuse what can be seen to be wrong without reading a text or importing transformers, before there is a run.

    Raises:
        UsageError: for whatever the user has to change.
    """
    data = settings.data
    check_algorithm(settings.job, settings.optimization)
    device_of(settings.machine, settings.job)
    check_transport(settings.job, platform.machine())
    cache_folder(data.cache_dir)
    check_sources(data.data, data.eval_data)
    models.check_model(os.path.expanduser(settings.model.model), data.seq_len)


def check_algorithm(job: settings.Job, optimization: settings.Optimization) -> None:
    """Read the rule, the speeds, the network and the churn, which settings hold as text.

    Raises:
        UsageError: for the first one that a run would refuse.
    """
    server_recipe(rule_of(job), optimization)
    speeds_of(job)
    if job.network is not None:
        parse_network(job.network)
    if job.churn is not None:
        parse_churn(job.churn, job.nproc)


def prepare(
    data: settings.Data,
    model: settings.Model,
    machine: settings.Machine,
    optimization: settings.Optimization,
    job: settings.Job,
    *,
    eval_samples: int,
) -> Prepared:
    """Load the text, tokenize it, build or load the model; everything slow is cached in the cache folder.

    Raises:
        UsageError: for whatever the user has to change.
    """
    device = device_of(machine, job)
    speeds_of(job)  # refuses before anything slow is done
    name = os.path.expanduser(model.model)  # a YAML file has no shell to do it
    cache = cache_folder(data.cache_dir)
    corpus = load_corpus(data.data, eval_data=data.eval_data, text_column=data.text_column, cache_dir=cache)
    tokenizer = load_tokenizer(name, corpus, vocab_size=data.vocab_size, cache_dir=cache)
    folder = tokenized_folder(corpus, tokenizer, seq_len=data.seq_len, cache_dir=cache)
    initial = models.build_model(name, tokenizer, seq_len=data.seq_len, dropout=model.dropout, seed=job.seed)
    frame = models.frame_of(tokenizer)
    materials = Materials(
        config=models.config_json(initial.model),
        train=str(folder / "train"),
        evaluation=str(folder / "eval"),
        prefix=frame.prefix,
        suffix=frame.suffix,
        pad_id=frame.pad_id,
        mask_id=tokenizer.mask_token_id,
        vocabulary_size=len(tokenizer),
        special_ids=tuple(sorted(tokenizer.all_special_ids)),
        device=device,
    )
    assignment = assignment_of(materials, data, machine, optimization, job, eval_samples=eval_samples)
    num_eval = Tokens.load(folder / "eval").num_samples
    return Prepared(
        materials,
        assignment,
        initial.model,
        tokenizer,
        corpus.name,
        corpus.fingerprint,
        Tokens.load(folder / "train").num_samples,
        min(eval_samples or num_eval, num_eval),
        initial.new_parameters,
    )


def assignment_of(
    materials: Materials,
    data: settings.Data,
    machine: settings.Machine,
    optimization: settings.Optimization,
    job: settings.Job,
    *,
    eval_samples: int,
) -> Assignment:
    """What any process of the run computes, from the settings, which all have, and from what the leader found out."""
    ids = (materials.mask_id, materials.vocabulary_size, materials.special_ids)
    task = MaskedLM(
        config=materials.config,
        train=Path(materials.train),
        evaluation=Path(materials.evaluation),
        frame=Frame(materials.prefix, materials.suffix, materials.pad_id),
        masking=Masking(_CHOOSE[data.mask], data.mask_prob, *ids),
        eval_masking=Masking(_CHOOSE[data.eval_mask], data.eval_mask_prob, *ids),
        batch_size=data.batch_size,
        eval_samples=eval_samples,
    )
    return Assignment(
        task=task,
        seed=job.seed,
        threads=machine.threads,
        device=materials.device,
        precision=_PRECISION[machine.precision],
        inner=recipe_of(optimization),
        num_workers=job.nproc,
        speeds=speeds_of(job),
    )


def rule_of(job: settings.Job) -> Rule:
    """The rule that the server follows; synchronous modes are that rule by definition, Hogwild applies what comes."""
    return {"async": parse_rule(job.rule), "hogwild": Asynchronous()}.get(job.mode, Synchronous())


def speeds_of(job: settings.Job) -> Speeds | None:
    """How long gradients take: None where they take what they take.

    Raises:
        UsageError: for a name or value that is wrong, or that real workers cannot follow.
    """
    if job.speeds is None:
        return Constant() if job.clock == "virtual" else None
    speeds = parse_speeds(job.speeds)
    speeds.on(job.nproc, job.seed)  # refuses e.g. a straggler that is not there
    if isinstance(speeds, Infinite) and job.clock != "virtual":
        raise UsageError("--speeds infinite is for --clock virtual: a real worker that never answers ends no run")
    return speeds


def recipe_of(optimization: settings.Optimization) -> OptimizerRecipe:
    """The optimizer that the settings name."""
    builders: dict[str, BuildOptimizer] = {
        "sgd": SGD(optimization.momentum),
        "adamw": AdamW((optimization.beta1, optimization.beta2)),
    }
    build = builders[optimization.optimizer]
    return OptimizerRecipe(build, optimization.weight_decay, optimization.clip_norm)


def server_recipe(rule: Rule, optimization: settings.Optimization) -> OptimizerRecipe:
    """The server's optimizer: what the settings name, or plain SGD where workers step it locally.

    Raises:
        UsageError: if the rule cannot do with it.
    """
    if rule.local_steps:
        return OptimizerRecipe(SGD())
    recipe = recipe_of(optimization)
    if rule.needs_plain_sgd and recipe != OptimizerRecipe(SGD()):
        raise UsageError(
            f"rule {rule.name!r} has a momentum or a force of its own and needs plain SGD at the server; type "
            f"--optimizer sgd --momentum 0 --weight-decay 0 --clip-norm 0"
        )
    return recipe


def schedule_of(optimization: settings.Optimization, budget: settings.Budget) -> WarmupSchedule:
    """The learning rate as a function of the samples that arrived."""
    return WarmupSchedule(
        optimization.learning_rate, optimization.warmup, budget.samples, _SHAPE[optimization.schedule]
    )


def transport_of(job: settings.Job, processor: str) -> str | None:
    """What carries gradients to the server; None where there is no server. All workers are on its host so far.

    Args:
        processor: as `platform.machine` names it; ``auto`` takes shared memory where its lock is right.

    >>> transport_of(settings.Job(), "x86_64"), transport_of(settings.Job(), "aarch64")
    ('shared_memory', 'process_group')
    """
    if job.clock == "virtual" or job.mode not in ("async", "hogwild"):
        return None
    if job.mode == "async" and job.transport == "auto" and processor not in _KEEP_ORDER_OF_STORES:
        return "process_group"
    return "process_group" if job.transport == "process_group" else "shared_memory"


def check_transport(job: settings.Job, processor: str) -> None:
    """Refuse shared memory where a reader could take a vector that is half written for a whole one.

    Raises:
        UsageError: on processors that may reorder stores.
    """
    if transport_of(job, processor) != "shared_memory" or processor in _KEEP_ORDER_OF_STORES:
        return
    asked, instead = "--transport shared_memory", "--transport process_group"
    if job.mode == "hogwild":
        asked, instead = "--mode hogwild", "--mode async --transport process_group"
    raise UsageError(
        f"{asked} needs an x86 processor, which keeps the order of stores; this one is {processor or 'unknown'}; "
        f"type {instead}"
    )


def budget_of(budget: settings.Budget) -> Budget:
    """The limits a runtime looks at."""
    return Budget(budget.samples, budget.seconds, budget.target_loss)


def device_of_worker(device: str, worker: int) -> str:
    """``cuda`` becomes the GPU of `worker`, round robin; ``cpu`` stays."""
    return f"cuda:{worker % torch.cuda.device_count()}" if device == "cuda" else device


def device_of(machine: settings.Machine, job: settings.Job) -> str:
    """The kind of device that the run's workers compute on; see `resolve_device`.

    Raises:
        UsageError: if it is not there, or the mode cannot use it.
    """
    device = resolve_device(machine.device)
    if job.mode == "hogwild" and device != "cpu":
        raise UsageError(
            "--mode hogwild needs --device cpu: updates of several processes to one GPU buffer have no defined order"
        )
    return device


def resolve_device(device: str) -> str:
    """``auto`` becomes cuda or cpu.

    Raises:
        UsageError: if cuda is asked for and not there.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU here; type --device cpu, or leave the flag out")
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def cache_folder(cache_dir: str | None) -> Path:
    """`cache_dir`, or asyncsgd's folder in the user's cache; made if it is not there.

    Raises:
        UsageError: if it cannot be written.
    """
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncsgd"
    folder = Path(cache_dir) if cache_dir is not None else default
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the cache folder {folder} cannot be made ({error.strerror}); type --cache-dir FOLDER"
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the cache folder {folder} cannot be written; type --cache-dir FOLDER")
    return folder
