"""Fine-tuning: an independent loop gives the same bits, the chain is written down, every ending has its summary."""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, BertConfig, BertForMaskedLM

import stilt_finetune
from asyncsgd import models
from asyncsgd.data.random import dropout_seed
from asyncsgd.errors import UsageError
from asyncsgd.flat import Layout
from asyncsgd.records.events import read_events
from asyncsgd.runtime.processes import fork_server
from asyncsgd.runtime.ranks import Launch
from asyncsgd.scripts.finetuning import finetuning
from asyncsgd.scripts.run_folder import open_finetune_folder
from asyncsgd.settings.finetuning import FINETUNE_FLAGS, make_finetune_settings
from asyncsgd.signals import StopRequest
from asyncsgd.study.estimate import Estimator
from asyncsgd.study.plan import PlannedRun
from asyncsgd.study.sweep import Job
from asyncsgd.training import lead

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "stilt_finetune.py"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
NUM_LABELS = 3
WHOLE_LINE = 16
"""Classes whose biases fill a cache line: fused AdamW rounds them alike on the flat vector and on single tensors."""
BATCH = 4


class Tuned:
    """A finished fine-tuning run and what it left in its folder."""

    def __init__(self, path, exit_code):
        self.path, self.exit_code = path, exit_code

    @property
    def summary(self):
        return json.loads((self.path / "summary.json").read_text())

    def evaluations(self):
        return [record for record in read_events(self.path / "events.jsonl") if record["kind"] == "evaluate"]


@pytest.fixture(scope="module")
def posts(tmp_path_factory):
    """Texts whose label is their most frequent word, in a folder with splits."""
    folder = tmp_path_factory.mktemp("posts")
    draw = random.Random(0)
    marks = ["bada", "gimo", "sune"]
    for side, number in (("train", 60), ("test", 25)):
        lines = ["text,label"]
        for _ in range(number):
            label = draw.randrange(NUM_LABELS)
            words = draw.choices(["be", "di", "fo", "gu", "ka"], k=draw.randint(1, 12)) + [marks[label]] * 3
            draw.shuffle(words)
            lines.append(f"{' '.join(words)} {draw.random():.6f},{'abc'[label]}")
        (folder / f"{side}.csv").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def parent(train):
    return train(mode="single", samples=40, learning_rate=0.01).path


@pytest.fixture(scope="module")
def many_classes(posts, tmp_path_factory):
    """The same texts, with names for classes that nobody has."""
    folder = tmp_path_factory.mktemp("many") / "posts"
    shutil.copytree(posts, folder)
    (folder / "labels.json").write_text(json.dumps(list("abcdefghijklmnop")))
    return folder


Tune = Callable[..., Tuned]


@pytest.fixture
def tune(posts, parent, tmp_path):
    """Fine-tune in this process with some settings, in a new folder."""
    numbers = iter(range(1000))

    def run(**values):
        path = tmp_path / f"run{next(numbers)}"
        small = {
            "init_from": str(parent),
            "data": str(posts),
            "cache_dir": str(tmp_path / "cache"),
            "seq_len": 24,
            "batch_size": BATCH,
            "samples": 40,
            "evaluations": 2,
            "device": "cpu",
            "run_dir": str(path),
        }
        settings = make_finetune_settings(small | values)
        launch = Launch(settings.job.nproc, None, False)
        folder = open_finetune_folder(settings, "tests")
        return Tuned(path, lead(finetuning(settings), launch, folder, fork_server("tiny")))

    return run


def plain_loop(settings, parent, weights=None):
    """The same training, written down once more on a model that the library loads, with torch's own optimizer."""
    experiment, seed, tuning = finetuning(settings), settings.job.seed, settings.tuning
    data = experiment.task.prepare(seed, experiment.cache).data(seed)
    with torch.random.fork_rng():
        model = AutoModelForSequenceClassification.from_pretrained(
            parent / "model",
            num_labels=WHOLE_LINE,
            hidden_dropout_prob=tuning.dropout,
            attention_probs_dropout_prob=tuning.dropout,
        ).train()
        head = torch.Generator().manual_seed(seed)
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name in ("bert.pooler.dense.weight", "classifier.weight"):
                named[name].normal_(0.0, 0.02, generator=head)
            named["bert.pooler.dense.bias"].zero_()
            named["classifier.bias"].zero_()
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        rest = [p for p in model.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": tuning.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=0.0,
            fused=True,
        )
        total = math.ceil(tuning.samples / BATCH) * BATCH
        warmup = round(tuning.warmup * total)
        for index in range(total // BATCH):
            batch = data.batch(0, index)
            torch.manual_seed(dropout_seed(seed, 0, index))
            logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
            if weights is None:
                loss = functional.cross_entropy(logits, batch.labels)
            else:
                losses = functional.cross_entropy(logits, batch.labels, reduction="none")
                loss = (weights[batch.labels] * losses).mean()
            optimizer.zero_grad()
            loss.backward()
            if tuning.clip_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), tuning.clip_norm)
            seen = (index + 1) * BATCH
            factor = seen / warmup if seen < warmup else 1.0 - 0.9 * (seen - warmup) / (total - warmup)
            for group in optimizer.param_groups:
                group["lr"] = tuning.learning_rate * factor
            optimizer.step()
    return model


def settings_of(tuned):
    return make_finetune_settings(FINETUNE_FLAGS.load_yaml(tuned.path / "settings.yaml"))


def saved(tuned):
    return dict(AutoModelForSequenceClassification.from_pretrained(tuned.path / "model").named_parameters())


@pytest.mark.parametrize("class_weights", [False, True])
def test_a_plain_torch_loop_gives_the_same_parameters_bit_for_bit(tune, parent, many_classes, class_weights):
    tuned = tune(data=str(many_classes), seed=3, clip_norm=0, save_model=True, class_weights=class_weights)
    labels = [line.rsplit(",", 1)[1] for line in (many_classes / "train.csv").read_text().split("\n")[1:]]
    counts = torch.tensor([labels.count(label) for label in "abc"])
    weights = (60 / (3 * counts.double())).float() if class_weights else None
    expected = dict(plain_loop(settings_of(tuned), parent, weights).named_parameters())
    found = saved(tuned)
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_a_plain_loop_with_torch_s_own_clipping_gives_the_same_parameters_but_for_rounding(tune, parent, many_classes):
    tuned = tune(data=str(many_classes), clip_norm=0.5, save_model=True, samples=16)
    expected = dict(plain_loop(settings_of(tuned), parent).named_parameters())
    for name, parameter in saved(tuned).items():
        assert torch.allclose(parameter, expected[name], atol=1e-5), name
    free = saved(tune(data=str(many_classes), clip_norm=0, save_model=True, samples=16))
    assert any(not torch.allclose(parameter, free[name], atol=1e-5) for name, parameter in expected.items())


def test_class_weights_change_what_is_learned(tune):
    plain, weighted = tune().summary, tune(class_weights=True).summary
    assert plain["parameters_sha256"] != weighted["parameters_sha256"]
    assert (plain["class_weights"], weighted["class_weights"]) == (False, True)
    assert plain["first_eval_loss"] == weighted["first_eval_loss"]  # the scored loss is never weighted


def test_it_learns_what_can_be_learned_and_its_cases_are_judged_by_what_counts_as_hateful(tune, tmp_path):
    draw = random.Random(1)
    rows = ["functionality,text,label"]
    for number in range(60):
        name, mark, hateful = [("first_h", "bada", 1), ("second_nh", "gimo", 0), ("third_h", "sune", 1)][number % 3]
        words = draw.choices(["be", "di", "fo", "gu", "ka"], k=draw.randint(1, 12)) + [mark] * 3
        rows.append(f"{name},{' '.join(words)},{hateful}")
    (tmp_path / "cases.csv").write_text("\n".join(rows))
    summary = tune(
        samples=1200,
        learning_rate=2e-3,
        dropout=0.0,
        hatecheck=str(tmp_path / "cases.csv"),
        hatecheck_positive="a, c",
    ).summary
    assert summary["metrics"]["accuracy"] > 0.9
    assert summary["final_eval_loss"] < 0.5 < summary["first_eval_loss"]
    checked = summary["hatecheck"]["functionalities"]
    assert {name: item["num_cases"] for name, item in checked.items()} == {
        "first_h": 20,
        "second_nh": 20,
        "third_h": 20,
    }
    assert all(item["accuracy"] > 0.8 for item in checked.values())


def bert(seed):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    with models.seeded(seed):
        return BertForMaskedLM(BertConfig(vocab_size=64, **shape))


def test_the_head_and_the_pooler_are_a_function_of_the_seed_whatever_the_model():
    one, other = (models.build_classifier(bert(seed), ["a", "b"], dropout=0.1, seed=9).model for seed in (0, 1))
    for name in ("classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"):
        assert torch.equal(one.get_parameter(name), other.get_parameter(name))
    again = models.build_classifier(bert(0), ["a", "b"], dropout=0.1, seed=10).model
    assert not torch.equal(one.get_parameter("classifier.weight"), again.get_parameter("classifier.weight"))
    assert float(one.get_parameter("classifier.weight").std().detach()) == pytest.approx(0.02, rel=0.3)


def test_the_encoder_is_that_of_the_masked_language_model_and_a_copy():
    masked_lm = bert(0)
    classifier = models.build_classifier(masked_lm, ["a", "b"], dropout=0.1, seed=9).model
    for name, parameter in masked_lm.base_model.named_parameters():
        assert torch.equal(classifier.get_parameter(f"bert.{name}"), parameter)
        assert classifier.get_parameter(f"bert.{name}").data_ptr() != parameter.data_ptr()
    assert classifier.config.id2label == {0: "a", 1: "b"}


def test_a_tagger_has_the_encoder_and_a_head_of_the_seed_too():
    masked_lm = bert(0)
    tagger = models.build_tagger(masked_lm, ["B", "I", "O"], dropout=0.3, seed=9)
    for name, parameter in masked_lm.base_model.named_parameters():
        assert torch.equal(tagger.model.get_parameter(f"bert.{name}"), parameter)
    assert tagger.new_parameters == ("classifier.bias", "classifier.weight")
    drawn = torch.empty(3, 32).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(9))
    assert torch.equal(tagger.model.classifier.weight, drawn)
    assert (tagger.model.config.id2label, tagger.model.dropout.p) == ({0: "B", 1: "I", 2: "O"}, 0.3)


def test_a_half_precision_configuration_does_not_round_the_encoder():
    masked_lm = bert(0)
    masked_lm.config.dtype = torch.bfloat16
    classifier = models.build_classifier(masked_lm, ["a", "b"], dropout=0.0, seed=9).model
    weight = masked_lm.base_model.embeddings.word_embeddings.weight
    assert torch.equal(classifier.get_parameter("bert.embeddings.word_embeddings.weight"), weight)


def test_the_summary_names_the_pretraining_run_and_the_scores_are_those_of_its_table(tune, parent):
    tuned = tune(seed=7)
    summary, pretraining = tuned.summary, json.loads((parent / "summary.json").read_text())
    assert tuned.exit_code == 0
    assert summary["parent"] == {
        "run": parent.name,
        "mode": "single",
        "rule": "synchronous",
        "num_workers": 1,
        "seed": 0,
        "clock": "measured",
        "learning_rate": 0.01,
        "parameters_sha256": pretraining["parameters_sha256"],
    }
    assert pretraining["experiment"] == "stilt_mlm"
    assert summary["init_sha256"] == pretraining["parameters_sha256"]
    assert (
        summary.items()
        >= {
            "schema": 2,
            "experiment": "stilt_finetune",
            "task": "classification",
            "status": "DONE",
            "message": "",
            "seed": 7,
            "model": str(parent),
            "from_scratch": True,  # the parent began with random weights
            "split": "test",
            "labels": ["a", "b", "c"],
            "num_train_samples": 60,
            "num_eval_samples": 25,
            "class_weights": False,
            "batch_size": BATCH,
            "num_samples": 40,
            "num_updates": 10,
            "hatecheck": None,
        }.items()
    )
    table = np.array(summary["details"]["confusion"])
    assert table.sum() == 25
    assert summary["metrics"]["accuracy"] == np.trace(table) / 25
    f1 = [score for score in summary["details"]["per_class_f1"].values() if score is not None]
    assert list(summary["details"]["per_class_f1"]) == ["a", "b", "c"]
    assert summary["metrics"]["macro_f1"] == pytest.approx(sum(f1) / len(f1))
    assert not (tuned.path / "model").exists()
    assert json.loads((tuned.path / "environment.json").read_text())["num_workers"] == 1


def test_epochs_are_counted_in_training_texts_and_rounded_up_to_whole_batches(tune):
    assert tune(samples=None, epochs=0.5, train_samples=21).summary["num_samples"] == 12
    assert tune(samples=None, train_samples=6).summary["num_updates"] == 3  # two epochs by default


def test_random_weights_are_from_scratch_and_have_no_parent(tune):
    summary = tune(init_from="tiny", samples=8).summary
    assert (summary["from_scratch"], summary["parent"], summary["status"]) == (True, None, "DONE")


@pytest.mark.parametrize(
    ("base", "from_scratch"),
    [(None, False), ({"from_scratch_pretraining": True}, False), ({"from_scratch": True}, True)],
)
def test_a_saved_model_is_pretrained_unless_its_base_json_says_otherwise(tune, parent, tmp_path, base, from_scratch):
    shutil.copytree(parent / "model", tmp_path / "saved")
    if base is not None:
        (tmp_path / "saved" / "base.json").write_text(json.dumps(base))
    summary = tune(init_from=str(tmp_path / "saved"), samples=8).summary
    assert (summary["from_scratch"], summary["parent"]) == (from_scratch, None)
    assert summary["init_sha256"] == json.loads((parent / "summary.json").read_text())["parameters_sha256"]


def test_a_run_that_continued_a_pretrained_model_is_not_from_scratch(tune, parent, tmp_path):
    continued = copied_run(parent, tmp_path / "continued", from_scratch=False)
    assert tune(init_from=str(continued), samples=8).summary["from_scratch"] is False


def test_a_saved_classifier_is_the_one_that_was_scored(tune):
    tuned = tune(save_model=True)
    model = AutoModelForSequenceClassification.from_pretrained(tuned.path / "model")
    assert Layout.of(model).num_parameters == tuned.summary["num_parameters"]
    assert model.config.id2label == {0: "a", 1: "b", 2: "c"}


def copied_run(parent, to, **changes):
    shutil.copytree(parent, to)
    summary = json.loads((to / "summary.json").read_text()) | changes
    (to / "summary.json").write_text(json.dumps(summary))
    return to


def test_only_a_finished_pretraining_run_whose_model_is_whole_can_be_begun_from(tune, parent, tmp_path):
    without_model, bare = copied_run(parent, tmp_path / "one"), copied_run(parent, tmp_path / "two")
    shutil.rmtree(without_model / "model")
    (bare / "summary.json").unlink()
    for run, word in (
        (copied_run(parent, tmp_path / "stopped", status="INTERRUPTED"), "INTERRUPTED"),
        (copied_run(parent, tmp_path / "changed", parameters_sha256="0" * 64), "sha256"),
        (tune(samples=8).path, "stilt_finetune"),
        (without_model, "no model/"),
        (bare, "no summary.json"),
        (tmp_path, "neither"),
        ("./nowhere", "--init-from ./nowhere"),
    ):
        with pytest.raises(UsageError, match=word):
            tune(init_from=str(run))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "--init-from"),
        ("--init-from tiny --label-column class", "--label-column --data pydocs"),
        ("--init-from tiny --hatecheck-positive a", "--hatecheck-positive --hatecheck"),
        ("--init-from tiny --split train", "--split test, validation 'train'"),
        ("--init-from tiny --keep-best", "--keep-best --save-model"),
        ("--init-from tiny --seeds 0,1 --run-dir x", "--run-dir --seeds"),
        ("--init-from tiny --seeds 0,0", "--seeds 0,0 twice"),
        ("--init-from tiny --seeds 0;1", "--seeds whole commas"),
        ("--init-from tiny --seeds 0,1 --seed 4", "--seed 4 --seeds 0,1"),
        ("--init-from tiny --data words.txt", "words.txt .csv"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused_and_leaves_no_folder(line, words, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    with pytest.raises(UsageError) as error:
        stilt_finetune.run(line.split(), StopRequest())
    assert all(word in str(error.value) for word in words.split())
    assert [path.name for path in tmp_path.iterdir()] == ["words.txt"]


def test_several_seeds_make_a_run_each_in_one_process(posts, parent, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = f"--init-from {parent} --data {posts} --cache-dir {tmp_path / 'cache'} --seq-len 24 --samples 16"
    code = stilt_finetune.run([*flags.split(), "--seeds", "0,3", "--runs-dir", str(tmp_path / "runs")], StopRequest())
    out = capsys.readouterr().out.splitlines()
    assert code == 0
    summaries = [json.loads(path.read_text()) for path in sorted((tmp_path / "runs").glob("*/summary.json"))]
    assert [summary["seed"] for summary in summaries] == [0, 3]
    assert len({summary["parameters_sha256"] for summary in summaries}) == 2
    assert out[0].startswith("asyncsgd 0.1.0  fine-tuning, classification  2 runs, one after another  mode single")
    beginnings = [line.split()[0] for line in out]
    for word in ("run", "model", "labels", "step", "samples", "final", "done", "next"):
        assert beginnings.count(word) == 2, word
    assert any(line.startswith("final  eval loss ") and "macro_f1 0." in line for line in out)


def test_a_sweep_can_ask_how_long_a_run_takes(posts, parent, tmp_path):
    values = {"data": str(posts), "cache_dir": str(tmp_path), "seq_len": 24, "samples": 400}
    estimator = Estimator()
    jobs = [
        Job(PlannedRun("x", "finetune", "x", 0), values | more)
        for more in ({"init_from": str(parent)}, {"init_from": "tiny", "seed": 4})
    ]
    seconds = estimator.of(jobs[0])
    assert 0 < seconds < 60
    assert estimator.of(jobs[1]) == seconds  # measured once


@pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets are not beside the repository (../shared/data)")
def test_a_hate_speech_classifier_is_tested_by_functionality(tune):
    summary = tune(
        data=str(SHARED / "hate_davidson" / "small"),
        hatecheck=str(SHARED / "hatecheck" / "small"),
        hatecheck_positive="hate,offensive",
        train_samples=40,
        eval_samples=40,
        samples=16,
    ).summary
    assert (summary["status"], summary["labels"]) == ("DONE", ["hate", "offensive", "neither"])
    checked = summary["hatecheck"]
    assert (checked["num_cases"], len(checked["functionalities"])) == (290, 29)
    right = sum(item["accuracy"] * item["num_cases"] for item in checked["functionalities"].values())
    assert checked["accuracy"] == pytest.approx(right / 290)
