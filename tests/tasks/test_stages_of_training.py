"""From one labelled task to the next: what of a model is kept, as transformers keeps it, and what is refused."""

import pytest
import torch
import transformers
from encoders import MODELS, TINY, save_model
from gallery import write_tables

from asyncsgd.errors import UsageError
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.models import build_head
from asyncsgd.tasks.token_classification import TokenClassification

OUTPUT_LAYER = {"Bert": "classifier.", "DistilBert": "classifier.", "DebertaV2": "classifier."}
OUTPUT_LAYER |= {"Roberta": "classifier.out_proj."}
WORDS = ["ant", "bee", "cat", "dog"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders with texts of two, three and three other labels, and words with tags."""
    root = tmp_path_factory.mktemp("labels")
    for name, labels in (("two", "xy"), ("three", "abc"), ("other", "abd")):
        for side in ("train", "test"):
            rows = []
            for n in range(12):
                word = WORDS[n % 4]
                row = {
                    "text": f"{word} {side} {n}",
                    "label": labels[n % len(labels)],
                    "tokens": [word, side],
                    "ner_tags": ["B-A", "O"],
                }
                rows.append(row)
            write_tables(root / name, **{side: rows})
    return root


def task_on(data, name, model, kind=Classification, **values):
    return kind(data_name=str(data / name), model_name=str(model), seq_len=16, dropout=0.0, **values)


@pytest.mark.parametrize("family", MODELS)
def test_between_labelled_stages_all_is_kept_but_the_output_layer_as_transformers_does(family, data, tmp_path):
    save_model(family, tmp_path / "encoder")
    first = task_on(data, "three", tmp_path / "encoder").prepare(0, tmp_path / "cache")
    first.save(first.model(0), tmp_path / "first")
    second = task_on(data, "two", tmp_path / "first").prepare(1, tmp_path / "cache")
    model = second.model(1)
    output = OUTPUT_LAYER[family]
    theirs, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "first", num_labels=2, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {name for name, *_ in report["mismatched_keys"]} == {f"{output}weight", f"{output}bias"}
    expected = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == expected[name].shape
        assert torch.equal(parameter, expected[name]) or name.startswith(output)
    # The new output layer is a function of the seed.
    drawn = dict(model.named_parameters())[f"{output}weight"]
    again = dict(second.model(1).named_parameters())[f"{output}weight"]
    assert torch.equal(drawn, again)
    told = second.facts()["notes"][-1]
    assert told.endswith(f"new, from the seed: {output}bias, {output}weight; dropped: {output}bias, {output}weight")


def test_to_another_kind_of_labels_the_encoder_is_kept_and_what_has_no_place_is_dropped(data, tmp_path):
    save_model("Bert", tmp_path / "encoder")
    first = task_on(data, "two", tmp_path / "encoder").prepare(0, tmp_path / "cache")
    first.save(first.model(0), tmp_path / "first")
    tagger = task_on(data, "two", tmp_path / "first", TokenClassification).prepare(1, tmp_path / "cache")
    kept = dict(tagger.model(1).named_parameters())
    before = dict(first.model(0).named_parameters())
    for name in kept:
        if name.startswith("bert."):
            assert torch.equal(kept[name], before[name])
    assert "dropped: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier" in tagger.facts()["notes"][-1]
    # And back: the pooler is new.
    tagger.save(tagger.model(1), tmp_path / "tagger")
    back = task_on(data, "two", tmp_path / "tagger").prepare(2, tmp_path / "cache").facts()["notes"][-1]
    assert "new, from the seed: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier" in back


def test_the_output_layer_is_kept_on_demand_only_for_the_same_kind_and_the_same_labels(data, tmp_path):
    save_model("Bert", tmp_path / "encoder")
    first = task_on(data, "three", tmp_path / "encoder").prepare(0, tmp_path / "cache")
    first.save(first.model(0), tmp_path / "first")
    kept = task_on(data, "three", tmp_path / "first", output_layer="keep").prepare(1, tmp_path / "cache")
    before = dict(first.model(0).named_parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in kept.model(1).named_parameters())
    assert kept.facts()["notes"][-1].endswith("new, from the seed: none; dropped: none")
    for name, said in (("other", "a, b, c, and here it is a, b, d"), ("two", "a, b, c, and here it is x, y")):
        with pytest.raises(UsageError, match=f"--head keep: the model has the labels {said}"):
            task_on(data, name, tmp_path / "first", output_layer="keep").prepare(1, tmp_path / "cache")
    with pytest.raises(UsageError, match="--head keep: the model is a BertForMaskedLM"):
        task_on(data, "two", tmp_path / "encoder", output_layer="keep").prepare(1, tmp_path / "cache")


def test_the_output_layer_of_a_published_model_whose_configuration_says_less_is_kept(data, tmp_path):
    save_model("Bert", tmp_path / "encoder")
    first = task_on(data, "three", tmp_path / "encoder").prepare(0, tmp_path / "cache")
    model = first.model(0)
    model.config.problem_type = None
    first.save(model, tmp_path / "first")
    kept = task_on(data, "three", tmp_path / "first", output_layer="keep").prepare(1, tmp_path / "cache")
    before = dict(model.named_parameters())
    assert all(torch.equal(parameter, before[name]) for name, parameter in kept.model(1).named_parameters())
    answerer = transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=64, **TINY))
    built = build_head(answerer, "QuestionAnswering", ["start", "end"], keep=True, dropout=0.0, seed=0)
    assert built.new_parameters == ()
