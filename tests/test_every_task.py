"""Every task of the library trains in every mode: the runs end, score, load in transformers and are replayed."""

import json
import math
import random

import pytest
import transformers
from doors import Finished, FlatModel, asyncsgd, cli, parameters_sha256
from gallery import flags_of
from marks import slow

pytestmark = pytest.mark.processes

BATCH_SIZE, NUM_BATCHES = 4, 12
WORDS = {"A": ["bada", "gimo"], "B": ["sune", "rilo"], "O": ["be", "di", "fo", "gu"]}


def texts(root):
    """A language of six words."""
    draw = random.Random(0)
    for side, number in (("train", 60), ("eval", 20)):
        lines = [" ".join(draw.choices(WORDS["A"] + WORDS["O"], k=draw.randint(4, 20))) for _ in range(number)]
        (root / f"{side}.txt").write_text("\n".join(lines))
    return {
        "data": root / "train.txt",
        "eval_data": root / "eval.txt",
        "vocab_size": 300,
        "dropout": 0.1,
        "warmup": 0,
    }


def labelled(root):
    """Texts whose label is the kind of word that they have, most often A."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("test", 12)):
        lines = [f"{' '.join(draw.choices(WORDS[kind] + WORDS['O'], k=9))},{kind}" for kind in "AAAB" * (number // 4)]
        (root / f"{side}.csv").write_text("\n".join(["text,label", *lines]))
    return {"data": root, "model": "tiny"}


def tagged(root):
    """Sentences whose words have the tag of their kind."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("test", 12)):
        rows = []
        for _ in range(number):
            kinds = ["A", "O", *draw.choices("ABO", k=5)]
            tags = [kind if kind == "O" else f"B-{kind}" for kind in kinds]
            rows.append(json.dumps({"tokens": [draw.choice(WORDS[kind]) for kind in kinds], "ner_tags": tags}))
        (root / f"{side}.jsonl").write_text("\n".join(rows))
    return {"data": root, "vocab_size": 64, "warmup": 0}


def asked(root):
    """Texts in which the word behind the first A is asked for; those without an A have no answer."""
    draw = random.Random(0)
    for side, number in (("train", 40), ("dev", 12)):
        rows = []
        for index in range(number):
            words = draw.choices(WORDS["B"] + WORDS["O"], k=draw.randint(4, 30))
            answers = {"text": [], "answer_start": []}
            if index % 3:
                words[1:3] = ["bada", "sune"]
                answers = {"text": ["sune"], "answer_start": [len(" ".join(words[:2])) + 1]}
            rows.append({"id": f"{side}{index}", "context": " ".join(words), "question": "bada", "answers": answers})
        (root / f"{side}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return {"data": root, "vocab_size": 64, "stride": 8, "warmup": 0}


SCRIPTS = {
    "masked_lm": ("stilt_mlm.py", texts, "AutoModelForMaskedLM"),
    "classification": ("train.py classification", labelled, "AutoModelForSequenceClassification"),
    "causal_lm": ("train.py causal_lm", texts, "AutoModelForCausalLM"),
    "token_classification": ("train.py token_classification", tagged, "AutoModelForTokenClassification"),
    "question_answering": ("train.py question_answering", asked, "AutoModelForQuestionAnswering"),
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
QUICK = [*(("masked_lm", mode) for mode in MODES), *((task, "virtual") for task in SCRIPTS if task != "masked_lm")]
REST = [(task, mode) for task in SCRIPTS for mode in MODES if (task, mode) not in QUICK]


@pytest.fixture(scope="module")
def finish(tmp_path_factory):
    """Run a task in a mode; each task's data are made and prepared once."""
    roots = {}

    def run(task, mode):
        script, data, _ = SCRIPTS[task]
        root = roots.setdefault(task, tmp_path_factory.mktemp(task))
        path = root / mode
        small = {
            **data(root),
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
    assert SCRIPTS.keys() == asyncsgd.tasks.TASKS.keys()


@pytest.mark.parametrize(("task", "mode"), [*QUICK, *slow(*REST)])
def test_a_task_trains_in_a_mode_and_its_model_loads(task, mode, finish):
    run = finish(task, mode)
    summary = run.summary
    assert (summary["status"], summary["task"]) == ("DONE", task), summary["message"]
    expected = {"sync": [NUM_BATCHES // 2], "hogwild": [NUM_BATCHES, NUM_BATCHES + 1]}
    assert summary["num_updates"] in expected.get(mode, [NUM_BATCHES])
    assert all(math.isfinite(event["loss"]) for event in run.records("arrival", "evaluate"))
    assert list(summary["metrics"]) == list(asyncsgd.tasks.task_class(task).better)
    assert all(map(math.isfinite, summary["metrics"].values()))
    assert summary["final_eval_loss"] < summary["first_eval_loss"]

    flat = FlatModel(getattr(transformers, SCRIPTS[task][2]).from_pretrained(run.path / "model"))
    assert parameters_sha256(flat.layout, flat.parameters) == summary["parameters_sha256"]

    if mode not in ("sync", "hogwild"):
        replayed = cli(["asyncsgd", "replay", run.path, "--cache-dir", run.cache])
        assert f" {NUM_BATCHES} losses compared" in replayed.out
        assert replayed.out.endswith("identical\n")
        assert replayed.code == 0
