"""A checkpoint that does not fit the model is refused by the tensors that do not; a missing head is new and said so."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    ModernBertConfig,
)

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenizer import load_tokenizer
from asyncsgd.errors import UsageError
from asyncsgd.tasks import models

Change = Callable[[dict[str, Tensor]], None]
SHAPE = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.fixture(scope="module")
def saved(train):
    """A saved model with its tokenizer."""
    return train(mode="single", samples=0).path / "model"


@pytest.fixture
def checkpoint(saved, tmp_path):
    """Makes a folder with the saved model's tensors after a change."""

    def make(change):
        folder = shutil.copytree(saved, tmp_path / "changed")
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return str(folder)

    return make


def build(folder):
    nothing = Corpus("none", Documents(()), Documents(()), "none")
    tokenizer = load_tokenizer(folder, nothing, vocab_size=512, cache_dir=Path(folder).parent / "cache")
    return models.build_model(folder, tokenizer, seq_len=16, dropout=0.0, seed=0)


def without(part):
    def change(tensors):
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


PLACES = "bert.embeddings.position_embeddings.weight"
BIAS = "bert.encoder.layer.0.output.dense.bias"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            without("encoder.layer.1."),
            "16 of 42 tensors are missing, e.g. bert.encoder.layer.1.attention.output.LayerNorm.bias; ",
        ),
        (
            lambda tensors: tensors.update({PLACES: torch.zeros(7, 128)}),
            f"1 of 42 tensors has another shape, e.g. {PLACES}; ",
        ),
        (lambda tensors: tensors[BIAS].fill_(torch.nan), f"1 of 42 tensors holds NaN or infinity, e.g. {BIAS}; "),
        (lambda tensors: tensors[BIAS].fill_(torch.inf), f"1 of 42 tensors holds NaN or infinity, e.g. {BIAS}; "),
    ],
    ids=["missing", "shape", "nan", "inf"],
)
def test_tensors_that_do_not_fit_are_refused_by_name_and_number(change, said, checkpoint):
    folder = checkpoint(change)
    with pytest.raises(UsageError) as refused:
        build(folder)
    assert str(refused.value).startswith(f"{folder}: {said}")


def test_a_missing_head_is_drawn_from_the_seed_recorded_and_said(saved, tmp_path, train):
    folder = shutil.copytree(saved, tmp_path / "headless")
    AutoModel.from_pretrained(saved).save_pretrained(folder)
    built = build(str(folder))
    assert len(built.new_parameters) == 5
    for name in built.new_parameters:
        assert name.startswith("cls.predictions.")
    again = build(str(folder)).model.state_dict()
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(tensor, again[name])
    run = train(mode="single", samples=0, model=str(folder), vocab_size=8192)
    assert run.summary["new_parameters"] == 5
    assert run.summary["from_scratch"] is False
    assert (
        "note   5 tensors are not in the checkpoint, so they are drawn from the seed"
        in (run.path / "printed.txt").read_text()
    )
    assert train(mode="single", samples=0, model=str(saved), vocab_size=8192).summary["new_parameters"] == 0


def test_an_encoder_that_has_no_place_in_the_classifier_is_refused(saved):
    masked_lm = build(str(saved)).model
    masked_lm.base_model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"2 tensors of the encoder have no place in a BertForSeq.*, e.g. extra.bias"):
        models.build_head(masked_lm, "SequenceClassification", ["a", "b"], dropout=0.0, seed=0)


def bert(seed):
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    with models.seeded(seed):
        return BertForMaskedLM(BertConfig(vocab_size=64, **shape))


def test_a_new_head_is_a_function_of_the_seed_whatever_the_model():
    one, other = (
        models.build_head(bert(seed), "SequenceClassification", ["a", "b"], dropout=0.1, seed=9).model
        for seed in (0, 1)
    )
    for name in ("classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"):
        assert torch.equal(one.get_parameter(name), other.get_parameter(name))
    tagger = models.build_head(bert(0), "TokenClassification", ["B", "I", "O"], dropout=0.3, seed=9)
    drawn = torch.empty(3, 32).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(9))
    assert torch.equal(tagger.model.classifier.weight, drawn)


def test_a_half_precision_configuration_does_not_round_the_encoder():
    masked_lm = bert(0)
    masked_lm.config.dtype = torch.bfloat16
    classifier = models.build_head(masked_lm, "SequenceClassification", ["a", "b"], dropout=0.0, seed=9).model
    weight = masked_lm.base_model.embeddings.word_embeddings.weight
    assert torch.equal(classifier.get_parameter("bert.embeddings.word_embeddings.weight"), weight)


def test_all_dropout_layers_have_the_dropout_that_is_asked_for(tmp_path):
    for config in (ModernBertConfig(vocab_size=20, pad_token_id=0, **SHAPE), AlbertConfig(vocab_size=20, **SHAPE)):
        AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path)
        masked_lm = models.load_model(str(tmp_path), 20, seq_len=8, dropout=0.25, seed=0).model
        built = models.build_head(masked_lm, "SequenceClassification", ["a", "b"], dropout=0.25, seed=0).model
        for model in (masked_lm, built):
            assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.25}


def test_a_dropout_that_the_configuration_spells_without_a_point_is_the_one_that_is_asked_for(tmp_path):
    config = BertConfig(vocab_size=20, attention_probs_dropout_prob=0, **SHAPE)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    model = models.load_model(str(tmp_path), 20, seq_len=8, dropout=0.25, seed=0).model
    assert model.config.attention_probs_dropout_prob == 0.25


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("roberta", {"pad_token_id": 1}),
        ("xlm-roberta", {"pad_token_id": 3}),
        ("mpnet", {"pad_token_id": 1}),
        ("camembert", {"pad_token_id": 0}),
        ("esm", {"pad_token_id": 1, "mask_token_id": 4, "position_embedding_type": "absolute"}),
        ("bert", {}),
    ],
)
def test_the_longest_sequence_is_the_longest_that_the_model_itself_computes(family, more, tmp_path):
    """RoBERTa and its kin number positions from the padding's on, so 34 rows are 34 tokens of BERT only."""
    model = AutoModelForMaskedLM.from_config(
        AutoConfig.for_model(family, vocab_size=20, max_position_embeddings=34, **SHAPE, **more)
    )
    model.save_pretrained(tmp_path)

    def computes(length):
        ids = torch.full((1, length), 7)
        try:
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
        except (IndexError, RuntimeError):
            return False
        return True

    longest = max(filter(computes, range(28, 40)))
    given = {"num_tokens": 20, "dropout": 0.0, "seed": 0}
    models.load_model(str(tmp_path), seq_len=longest, **given)
    with pytest.raises(UsageError, match=f"--seq-len {longest + 1} is longer .*type --seq-len {longest}$"):
        models.load_model(str(tmp_path), seq_len=longest + 1, **given)
