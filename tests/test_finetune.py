"""Fine-tuning: an independent loop gives the same bits, the chain is written down, and what it can begin from."""

import dataclasses
import json
import random
import shutil

import pytest
import torch
from doors import Finished, UsageError, cli, dropout_seed, prepared_task
from gallery import flags_of
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

WHOLE_LINE = 16
"""Classes whose biases fill a cache line: fused AdamW rounds them alike on the flat vector and on single tensors."""
BATCH = 4
SAMPLES = 40
MARKS = ["bada", "gimo", "sune"]


def texts(number, seed):
    """Texts and the number of their most frequent word."""
    draw = random.Random(seed)
    for _ in range(number):
        label = draw.randrange(len(MARKS))
        words = draw.choices(["be", "di", "fo", "gu", "ka"], k=draw.randint(1, 12)) + [MARKS[label]] * 3
        draw.shuffle(words)
        yield f"{' '.join(words)} {draw.random():.6f}", label


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("posts")
    for side, number in (("train", 60), ("test", 25)):
        rows = [f"{text},{'abc'[label]}" for text, label in texts(number, seed=number)]
        (folder / f"{side}.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.fixture(scope="module")
def parent(train):
    return train(mode="single", samples=40, learning_rate=0.01)


@pytest.fixture
def tune(posts, parent, tmp_path):
    """Fine-tune with some settings, in a new folder; `refused`: what is said, and no folder is left."""
    numbers = iter(range(1000))

    def run(refused=False, **values):
        path = tmp_path / f"run{next(numbers)}"
        small = {
            "model": parent.path,
            "data": posts,
            "cache_dir": tmp_path / "cache",
            "seq_len": 24,
            "batch_size": BATCH,
            "samples": SAMPLES,
            "evaluations": 2,
            "device": "cpu",
            "run_dir": path,
        }
        ended = cli(["train.py", "classification", *flags_of(small | values)])
        assert (ended.code, path.exists()) == ((2, False) if refused else (0, True)), ended.err
        if refused:
            return ended.err
        return Finished(path)

    return run


def saved(run):
    return dict(AutoModelForSequenceClassification.from_pretrained(run.path / "model").named_parameters())


def plain_loop(tuned, parent, weights=None):
    """The same training, written down once more on a model that transformers loads, with torch's own optimizer."""
    settings = tuned.settings
    seed = settings["seed"]
    peak = settings["learning_rate"]
    data = prepared_task("classification", tuned).data(seed)
    with torch.random.fork_rng():
        model = AutoModelForSequenceClassification.from_pretrained(
            parent.path / "model",
            num_labels=WHOLE_LINE,
            hidden_dropout_prob=settings["dropout"],
            attention_probs_dropout_prob=settings["dropout"],
        ).train()
        head = torch.Generator().manual_seed(seed)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name in ("bert.pooler.dense.weight", "classifier.weight"):
                named[name].normal_(0.0, 0.02, generator=head)
            named["bert.pooler.dense.bias"].zero_()
            named["classifier.bias"].zero_()
        matrices = {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": settings["weight_decay"]}
        rest = {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([matrices, rest], lr=0.0, fused=True)
        warmup = round(settings["warmup"] * SAMPLES)
        for index in range(SAMPLES // BATCH):
            batch = data.batch(0, index)
            torch.manual_seed(dropout_seed(seed, 0, index))
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            losses = functional.cross_entropy(logits, batch["labels"], reduction="none")
            loss = functional.cross_entropy(logits, batch["labels"])
            if weights is not None:
                loss = (weights[batch["labels"]] * losses).mean()
            optimizer.zero_grad()
            loss.backward()
            seen = (index + 1) * BATCH
            if seen < warmup:
                factor = seen / warmup
            else:
                factor = 1.0 - 0.9 * (seen - warmup) / (SAMPLES - warmup)
            for group in optimizer.param_groups:
                group["lr"] = peak * factor
            optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("class_weights", [False, True])
def test_a_plain_torch_loop_gives_the_same_parameters_bit_for_bit(tune, parent, posts, tmp_path, class_weights):
    many_classes = tmp_path / "posts"  # the same texts, with names for classes that nobody has
    shutil.copytree(posts, many_classes)
    (many_classes / "labels.json").write_text(json.dumps(list("abcdefghijklmnop")))
    tuned = tune(data=many_classes, seed=3, clip_norm=0, class_weights=class_weights)
    labels = []
    for line in (many_classes / "train.csv").read_text().split("\n")[1:]:
        labels.append(line.rsplit(",", 1)[1])
    counts = torch.tensor([labels.count(label) for label in "abc"])
    if class_weights:
        weights = (60 / (3 * counts.double())).float()
    else:
        weights = None
    expected = plain_loop(tuned, parent, weights)
    found = saved(tuned)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter)
    assert tuned.summary["class_weights"] is class_weights


def test_it_learns_what_can_be_learned_and_its_cases_are_judged_by_what_counts_as_hateful(tune, tmp_path):
    names = {0: "first_h", 1: "second_nh", 2: "third_h"}
    rows = [f"{names[label]},{text},{int(label != 1)}" for text, label in texts(60, seed=1)]
    (tmp_path / "cases.csv").write_text("\n".join(["functionality,text,label", *rows]))
    summary = tune(
        samples=1200, learning_rate=2e-3, dropout=0.0, hatecheck=tmp_path / "cases.csv", hatecheck_positive="a, c"
    ).summary
    assert summary["metrics"]["accuracy"] > 0.9
    checked = summary["hatecheck"]["functionalities"]
    assert sum(item["num_cases"] for item in checked.values()) == 60
    for item in checked.values():
        assert item["accuracy"] > 0.8


def test_the_summary_names_the_pretraining_run(tune, parent):
    summary = tune(seed=7).summary
    pretraining = parent.summary
    assert summary["parent"] == {
        "run": parent.path.name,
        **{name: pretraining[name] for name in ("mode", "rule", "num_workers", "seed", "clock")},
        "learning_rate": 0.01,
        "parameters_sha256": pretraining["parameters_sha256"],
    }
    assert summary["init_sha256"] == pretraining["parameters_sha256"]
    assert pretraining["parameters_sha256"] != summary["initial_model_sha256"]
    assert summary["experiment"] == "classification"
    assert summary["model"] == str(parent.path)
    assert summary["split"] == "test"
    assert summary["labels"] == ["a", "b", "c"]
    assert summary["num_train_samples"] == 60
    assert summary["num_eval_samples"] == 25
    assert summary["from_scratch"] is True  # the parent began with random weights


def test_without_a_length_it_is_two_epochs_in_whole_batches(tune):
    assert tune(samples=None, train_samples=6).summary["num_updates"] == 3
    assert tune(samples=None, epochs=0.5, train_samples=21).summary["num_samples"] == 12


def test_a_saved_model_is_pretrained(tune, parent, tmp_path):
    shutil.copytree(parent.path / "model", tmp_path / "saved")
    summary = tune(model=tmp_path / "saved", samples=8).summary
    assert summary["from_scratch"] is False
    assert summary["parent"] is None
    assert summary["init_sha256"] == parent.summary["parameters_sha256"]


def copied(run, to, **changes):
    shutil.copytree(run.path, to)
    (to / "summary.json").write_text(json.dumps(run.summary | changes))
    return to


def test_only_a_finished_run_of_masked_language_modelling_whose_model_is_whole_can_be_begun_from(
    tune, parent, tmp_path
):
    without_model = copied(parent, tmp_path / "one")
    shutil.rmtree(without_model / "model")
    tuned = tune(samples=8)
    for model, said in (
        (copied(parent, tmp_path / "stopped", status="INTERRUPTED"), "INTERRUPTED"),
        (copied(parent, tmp_path / "other", task="causal_lm"), "is a run of the task causal_lm; name one of masked_lm"),
        (without_model, "no model/"),
    ):
        assert said in tune(refused=True, model=model)
    another = str(copied(parent, tmp_path / "another", parameters_sha256="0"))
    with pytest.raises(UsageError, match="is not the model that was saved there"):
        dataclasses.replace(prepared_task("classification", tuned), model_name=another).prepare(0, tmp_path)
