"""Every task of the library trains in every mode: the runs end, score, load in transformers and are replayed."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.records.events import read_events
from asyncsgd.replaying import PreparedReplay, experiment_of_run
from asyncsgd.runtime.log import read_log
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.runtime.transport.codec import decode_found, encode_found
from asyncsgd.scripts.finetuning import finetuning
from asyncsgd.scripts.pretraining import pretraining
from asyncsgd.scripts.run_folder import open_finetune_folder, open_run_folder
from asyncsgd.scripts.task import TaskScript, task_script
from asyncsgd.settings.finetuning import FINETUNE_FLAGS
from asyncsgd.settings.flags import Flags
from asyncsgd.settings.training import FLAGS
from asyncsgd.tasks import TASKS, task_class
from asyncsgd.training import lead

pytestmark = pytest.mark.processes

BATCH_SIZE, NUM_BATCHES = 4, 12
WORDS = {"A": ["bada", "gimo"], "B": ["sune", "rilo"], "O": ["be", "di", "fo", "gu"]}


def texts(root: Path) -> dict[str, object]:
    """A language of six words."""
    draw = random.Random(0)
    for side, number in (("train", 60), ("eval", 20)):
        lines = [" ".join(draw.choices(WORDS["A"] + WORDS["O"], k=draw.randint(4, 20))) for _ in range(number)]
        (root / f"{side}.txt").write_text("\n".join(lines))
    return {
        "data": str(root / "train.txt"),
        "eval_data": str(root / "eval.txt"),
        "vocab_size": 300,
        "dropout": 0.1,
        "warmup": 0,
    }


def labelled(root: Path) -> dict[str, object]:
    """Texts whose label is the kind of word that they have, most often A."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("test", 12)):
        lines = [f"{' '.join(draw.choices(WORDS[kind] + WORDS['O'], k=9))},{kind}" for kind in "AAAB" * (number // 4)]
        (root / f"{side}.csv").write_text("\n".join(["text,label", *lines]))
    return {"data": str(root), "init_from": "tiny", "save_model": True}


def tagged(root: Path) -> dict[str, object]:
    """Sentences whose words have the tag of their kind."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("test", 12)):
        rows = []
        for _ in range(number):
            kinds = ["A", "O", *draw.choices("ABO", k=5)]
            tags = [kind if kind == "O" else f"B-{kind}" for kind in kinds]
            rows.append(json.dumps({"tokens": [draw.choice(WORDS[kind]) for kind in kinds], "ner_tags": tags}))
        (root / f"{side}.jsonl").write_text("\n".join(rows))
    return {"data": str(root), "vocab_size": 64, "warmup": 0}


def asked(root: Path) -> dict[str, object]:
    """Texts in which the word behind the first A is asked for; those without an A have no answer."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("dev", 12)):
        rows = []
        for index in range(number):
            words = draw.choices(WORDS["B"] + WORDS["O"], k=draw.randint(4, 30))
            answers: dict[str, list[object]] = {"text": [], "answer_start": []}
            if index % 3:
                words[1:3] = ["bada", "sune"]
                answers = {"text": ["sune"], "answer_start": [len(" ".join(words[:2])) + 1]}
            rows.append({"id": f"{side}{index}", "context": " ".join(words), "question": "bada", "answers": answers})
        (root / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": str(root), "vocab_size": 64, "stride": 8, "warmup": 0}


@dataclasses.dataclass(frozen=True)
class Subject:
    """How runs of a task are made and what loads the models that they leave."""

    flags: Flags[Any]
    experiment: Callable[[Any], Any]
    folder: Callable[[Any, str], Any]
    data: Callable[[Path], dict[str, object]]
    auto_class: str


def of_script(script: TaskScript[Any], data: Callable[[Path], dict[str, object]], auto_class: str) -> Subject:
    return Subject(script.flags, script.experiment, script.folder, data, auto_class)


SUBJECTS = {
    "masked_lm": Subject(
        FLAGS,
        pretraining,
        lambda settings, command: open_run_folder("stilt_mlm", settings, command),
        texts,
        "AutoModelForMaskedLM",
    ),
    "classification": Subject(
        FINETUNE_FLAGS, finetuning, open_finetune_folder, labelled, "AutoModelForSequenceClassification"
    ),
    "causal_lm": of_script(
        task_script(task_class("causal_lm"), "clm", description="", examples=""), texts, "AutoModelForCausalLM"
    ),
    "token_classification": of_script(
        task_script(task_class("token_classification"), "train_tagger", description="", examples=""),
        tagged,
        "AutoModelForTokenClassification",
    ),
    "question_answering": of_script(
        task_script(task_class("question_answering"), "answer_questions", description="", examples=""),
        asked,
        "AutoModelForQuestionAnswering",
    ),
}
MODES: dict[str, dict[str, object]] = {
    "single": {"mode": "single"},
    "async": {"mode": "async", "nproc": 2, "transport": "shared_memory"},
    "process_group": {"mode": "async", "nproc": 2, "transport": "process_group"},
    "sync": {"mode": "sync", "nproc": 2},
    "hogwild": {"mode": "hogwild", "nproc": 2},
    "virtual": {"mode": "async", "nproc": 3, "clock": "virtual", "speeds": "exponential:1"},
    "in_parts": {"mode": "single", "micro_batches": 3},
}
REPLAYED = ("single", "async", "process_group", "virtual", "in_parts")

Finished = tuple[Path, int]


@pytest.fixture(scope="module")
def finish(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Mapping[str, object]], Finished]:
    """Run a task in a mode; each task's data are made and prepared once."""
    names = ("causal_lm", "token_classification", "question_answering")
    context = fork_server("tiny", *(module for name in names for module in task_class(name).preload))
    roots: dict[str, Path] = {}

    def run(task: str, mode: Mapping[str, object]) -> Finished:
        subject = SUBJECTS[task]
        root = roots.setdefault(task, tmp_path_factory.mktemp(task))
        path = root / f"run{len(list(root.glob('run*')))}"
        small = {
            **subject.data(root),
            "cache_dir": str(root / "cache"),
            "seq_len": 24,
            "batch_size": BATCH_SIZE,
            "samples": NUM_BATCHES * BATCH_SIZE,
            "evaluations": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
            "run_dir": str(path),
        }
        settings = subject.flags.make(small | mode)
        launch = Launch(settings.job.nproc, None, False)
        return path, lead(subject.experiment(settings), launch, subject.folder(settings, "tests"), context)

    return run


def summary_of(path: Path) -> dict[str, Any]:
    return json.loads((path / "summary.json").read_text())


def test_no_task_is_forgotten() -> None:
    assert SUBJECTS.keys() == TASKS.keys()


@pytest.mark.parametrize("task", SUBJECTS)
def test_what_a_task_has_found_out_reaches_torchruns_other_ranks(task: str, tmp_path: Path) -> None:
    subject = SUBJECTS[task]
    settings = subject.flags.make({**subject.data(tmp_path), "cache_dir": str(tmp_path / "cache"), "seq_len": 24})
    experiment = subject.experiment(settings)
    prepared = experiment.task.prepare(0, experiment.cache)
    assert prepared != experiment.task
    assert decode_found(experiment.task, encode_found(prepared)) == prepared


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("task", SUBJECTS)
def test_a_task_trains_in_a_mode_and_its_model_loads(
    task: str, mode: str, finish: Callable[[str, Mapping[str, object]], Finished]
) -> None:
    path, exit_code = finish(task, MODES[mode])
    summary, better = summary_of(path), task_class(task).better
    assert (exit_code, summary["status"], summary["task"]) == (0, "DONE", task), summary["message"]
    expected = {"sync": [NUM_BATCHES // 2], "hogwild": [NUM_BATCHES, NUM_BATCHES + 1]}
    assert summary["num_updates"] in expected.get(mode, [NUM_BATCHES])

    events = list(read_events(path / "events.jsonl"))
    losses = [event["loss"] for event in events if event["kind"] in ("arrival", "evaluate")]
    assert all(map(math.isfinite, losses))
    assert list(summary["metrics"]) == list(better)
    assert all(map(math.isfinite, summary["metrics"].values()))
    assert summary["final_eval_loss"] < summary["first_eval_loss"]

    model = getattr(transformers, SUBJECTS[task].auto_class).from_pretrained(path / "model")
    flat = FlatModel(model)
    assert parameters_sha256(flat.layout, flat.parameters) == summary["parameters_sha256"]

    if mode in REPLAYED:
        records = read_log(path / "events.jsonl")
        replayed = PreparedReplay(experiment_of_run(path, str(path.parent / "cache")), records)
        assert replayed.run() is None
        assert replayed.num_checked == NUM_BATCHES
        replayed.check_data(summary)
        assert replayed.parameters_sha256 == summary["parameters_sha256"]
