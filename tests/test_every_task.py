"""Every task of the library trains in every mode: the runs end, score, load in transformers and are replayed."""

import json
import math
import random

import pytest
import transformers
from doors import Finished, FlatModel, asyncsgd, cli, parameters_sha256
from gallery import flags_of, write_tables
from marks import slow

pytestmark = pytest.mark.processes

BATCH_SIZE = 4
NUM_BATCHES = 12
WORDS = {"A": ["bada", "gimo"], "B": ["sune", "rilo"], "O": ["be", "di", "fo", "gu"]}


def write(root):
    """Texts of the words of one kind, in the forms that all tasks read; what is asked for is their first word."""
    draw = random.Random(0)
    for side, number in (("train", 60), ("test", 20), ("dev", 20)):
        rows = []
        for index in range(number):
            kind = "AAAB"[index % 4]
            kinds = [kind, *draw.choices(f"{kind}O", k=draw.randint(4, 18))]
            words = [draw.choice(WORDS[each]) for each in kinds]
            if index % 3:
                answers = {"text": words[:1], "answer_start": [0]}
            else:
                answers = {"text": [], "answer_start": []}
            text = " ".join(words)
            tags = [each if each == "O" else f"B-{each}" for each in kinds]
            row = {"text": text, "label": kind, "tokens": words, "ner_tags": tags}
            row |= {"id": f"{side}{index}", "context": text, "question": "bada", "answers": answers}
            row |= {"second": " ".join(words[:2]), "number": words.count("bada") / 2, "kinds": sorted({*kinds})}
            rows.append(row)
        write_tables(root, **{side: rows})


SCRIPTS = {
    "masked_lm": ("stilt_mlm.py", {"vocab_size": 300, "dropout": 0.1}, "AutoModelForMaskedLM"),
    "classification": ("train.py classification", {}, "AutoModelForSequenceClassification"),
    "classification of pairs": (
        "train.py classification",
        {"text_pair_column": "second", "positive": "A"},
        "AutoModelForSequenceClassification",
    ),
    "classification by numbers": (
        "train.py classification",
        {"text_pair_column": "second", "label_column": "number", "labels": "number"},
        "AutoModelForSequenceClassification",
    ),
    "classification by several labels": (
        "train.py classification",
        {"label_column": "kinds", "labels": "multi"},
        "AutoModelForSequenceClassification",
    ),
    "causal_lm": ("train.py causal_lm", {"vocab_size": 300, "dropout": 0.1}, "AutoModelForCausalLM"),
    "token_classification": ("train.py token_classification", {"vocab_size": 64}, "AutoModelForTokenClassification"),
    "question_answering": (
        "train.py question_answering",
        {"vocab_size": 64, "stride": 8},
        "AutoModelForQuestionAnswering",
    ),
}
MODES = {
    "single": {"mode": "single"},
    "async": {"mode": "async", "nproc": 2, "transport": "shared_memory"},
    "process_group": {"mode": "async", "nproc": 2, "transport": "process_group"},
    "sync": {"mode": "sync", "nproc": 2},
    "hogwild": {"mode": "hogwild", "nproc": 2},
    "virtual": {"mode": "async", "nproc": 3, "clock": "virtual", "speeds": "exponential:1"},
    "in_parts": {"mode": "single", "micro_batches": 3},
}
OTHERS = [task for task in SCRIPTS if task != "masked_lm"]
QUICK = [*(("masked_lm", mode) for mode in MODES), *((task, "virtual") for task in OTHERS)]
REST = [(task, mode) for task in OTHERS for mode in ("async", "sync", "hogwild", "in_parts")]
"""A transport carries vectors, whatever their task, and one process computes in parts as it computes whole batches."""


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Run a task in a mode; the data are made and prepared once."""
    root = tmp_path_factory.mktemp("every_task")
    write(root)

    def run(task, mode):
        script, values, _ = SCRIPTS[task]
        path = root / task / mode
        if task in ("masked_lm", "causal_lm"):
            data = {"data": root / "train.jsonl", "eval_data": root / "test.jsonl"}
        else:
            data = {"data": root}
        small = {
            **data,
            **values,
            "warmup": 0,
            "cache_dir": root / "cache",
            "seq_len": 24,
            "batch_size": BATCH_SIZE,
            "samples": NUM_BATCHES * BATCH_SIZE,
            "evaluations": 2,
            "learning_rate": 1e-3,
            "device": "cpu",
            "run_dir": path,
        }
        ended = cli([*script.split(), *flags_of(small | MODES[mode])])
        assert ended.code == 0, f"{ended.out}{ended.err}"
        return Finished(path)

    return run


def test_no_task_is_forgotten():
    assert {name.split()[0] for name in SCRIPTS} == asyncsgd.tasks.TASKS.keys()


@pytest.mark.parametrize(("task", "mode"), [*QUICK, *slow(*REST)])
def test_a_task_trains_in_a_mode_and_its_model_loads(task, mode, finish):
    run = finish(task, mode)
    summary = run.summary
    assert summary["status"] == "DONE", summary["message"]
    assert summary["task"] == task.split()[0], summary["message"]
    expected = {"sync": [NUM_BATCHES // 2], "hogwild": [NUM_BATCHES, NUM_BATCHES + 1]}
    assert summary["num_updates"] in expected.get(mode, [NUM_BATCHES])
    for event in run.records("arrival", "evaluate"):
        assert math.isfinite(event["loss"])
    header = json.loads((run.path / "events.jsonl").read_text().partition("\n")[0])
    assert summary["metrics"].keys() == header["better"].keys()
    assert all(map(math.isfinite, summary["metrics"].values()))
    assert summary["final_eval_loss"] < summary["first_eval_loss"]

    auto_class = getattr(transformers, SCRIPTS[task][2])
    flat = FlatModel(auto_class.from_pretrained(run.path / "model"))
    assert parameters_sha256(flat.layout, flat.parameters) == summary["parameters_sha256"]

    if mode not in ("sync", "hogwild"):
        replayed = cli(["asyncsgd", "replay", run.path, "--cache-dir", run.cache])
        assert f" {NUM_BATCHES} losses compared" in replayed.out
        assert replayed.out.endswith("identical\n")
        assert replayed.code == 0
