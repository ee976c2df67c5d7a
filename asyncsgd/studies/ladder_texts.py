"""The texts of a speed ladder, what is known of them, and the machine that it is climbed on.

The naive loop and the library train on whole texts, so texts that the naive loop may cut are left out, as far as their
number of characters tells.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import psutil
import torch

from asyncsgd.data.documents import Documents, limited, select
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_json
from asyncsgd.records.machine import describe_environment
from asyncsgd.records.run_folder import write_json, write_text
from asyncsgd.run.run import cache_folder, resolve_device
from asyncsgd.studies import naive  # before a run has changed torch's threads
from asyncsgd.studies.config import GivenSettings, LadderConfig
from asyncsgd.studies.ladder import FACTS, Devices, Grown, arm_of, devices_of, grown
from asyncsgd.studies.runner import PlannedJob
from asyncsgd.tasks.labelled_task import LabelledTask
from asyncsgd.worker.profile import flops_per_sample, hardware

SEQ_LEN = 256
"""The longest text, in tokens. A token has at least about 2 characters, so a text of 2 SEQ_LEN characters fits."""
MODELS = (("tiny", SEQ_LEN), ("tiny", 2 * SEQ_LEN), ("small", SEQ_LEN))
"""Models and lengths whose operations are counted. From three of them the report tells how operations grow with the
length and with the model."""


def machine_of(config: LadderConfig, out: Path) -> dict[str, Any]:
    """The machine that trainings compute on; ``memory_bytes`` is the memory of one device.

    Raises:
        UsageError: if the ladder in `out` was begun on another one, or with other versions.
    """
    kind = resolve_device(str(config.base.get("device", "auto")))
    memory = psutil.virtual_memory().total
    if kind == "cuda":
        memory = torch.cuda.get_device_properties(0).total_memory
    environment = describe_environment(naive.DEFAULT_THREADS, 1)
    machine = {**environment, **hardware(kind), "memory_bytes": memory}
    file = out / FACTS
    before = read_json(file)["machine"] if file.is_file() else machine
    for key in ("gpus", "cpu", "cores", "versions"):
        if before[key] != machine[key]:
            raise UsageError(f"{out} was begun with another {key}, and times are compared; type another --out")
    return machine


def grown_in(config: LadderConfig, out: Path) -> Grown:
    """The plan of the ladder in `out`, with all that follows from its runs."""
    from analysis.ladder import verdict_in

    return grown(config, devices_of(machine_of(config, out)), verdict_in(out, config))


def write_texts(config: LadderConfig, out: Path) -> None:
    """Write the texts of all tasks below `out`, and at last the file `FACTS` with what is known of them. If that file
    is there, so are the texts, and nothing is written.
    """
    file = out / FACTS
    if not file.is_file():
        machine = machine_of(config, out)
        devices = devices_of(machine)
        tasks = {name: _write_task(config, name, devices, out) for name in config.ladder.tasks}
        write_json(file, {"machine": machine, "tasks": tasks})


def _write_task(config: LadderConfig, name: str, devices: Devices, out: Path) -> dict[str, Any]:
    """Write the texts of a task.

    Returns:
        what is known of them: ``data``, their name; ``epoch``, the number of all texts to train on; ``longest``, the
        tokens of the longest text of the proof; and ``operations`` (see `_operations`).
    """
    task = config.ladder.tasks[name]
    arm = arm_of(config, devices, name, "texts", None, task.samples)
    settings = dict(arm.settings)
    cache = cache_folder(settings.get("cache_dir"))
    corpus = _task_of(name, settings).read(cache)
    train = short(corpus.train)
    evaluation = limited(short(corpus.eval), config.ladder.eval_samples)
    data = Path(settings["data"]).name
    for stage, number in (("climb", config.ladder.samples), ("proof", task.samples)):
        folder = out / "texts" / name / stage
        folder.mkdir(parents=True, exist_ok=True)
        write_rows(folder / "train.jsonl", limited(train, number))
        write_rows(folder / "validation.jsonl", evaluation)
    settings["data"] = str(folder)  # of the proof, which is the last stage
    prepared = _task_of(name, settings).prepare(0, cache)
    longest = prepared.samples("train").lengths.max()
    operations = _operations(name, settings, cache)
    return {"data": data, "epoch": len(train.texts), "longest": int(longest), "operations": operations}


def _task_of(name: str, settings: GivenSettings) -> Any:
    return PlannedJob(name, name, settings).settings.task


def short(documents: Documents) -> Documents:
    """The texts of about `SEQ_LEN` tokens at most."""
    return select(documents, [len(text) <= 2 * SEQ_LEN for text in documents.texts])


def write_rows(file: Path, documents: Documents) -> None:
    """Write a JSON object for each text, with its label."""
    labels = documents.labels or ("",) * len(documents.texts)
    rows = [{"text": text, "label": label} for text, label in zip(documents.texts, labels, strict=True)]
    lines = msgspec.json.Encoder().encode_lines(rows)
    write_text(file, lines.decode())


def _operations(name: str, settings: GivenSettings, cache: Path) -> dict[str, float]:
    """The number of operations of a forward and a backward pass on one text that fills its length, by model and
    length."""
    operations = {}
    for model, length in MODELS:
        task = _task_of(name, {**settings, "model": model, "seq_len": length}).prepare(0, cache)
        input_ids = torch.full((task.batch_size, length), 5)
        labels = torch.zeros(task.batch_size, dtype=torch.int64)
        if not isinstance(task, LabelledTask):
            positions = torch.arange(input_ids.numel())
            is_masked = positions % 7 == 0  # about 15 % of the tokens, as in training
            labels = torch.where(is_masked, 5, -100).view_as(input_ids)
        batch = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids), "labels": labels}
        operations[f"{model} at {length} tokens"] = flops_per_sample(task, task.model(0), [batch])
    return operations
