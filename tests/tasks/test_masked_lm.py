"""Logits at masked positions only: the same loss, gradients and sums as with logits everywhere."""

import copy

import pytest
import torch
from torch.nn import functional
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from asyncsgd.errors import UsageError
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.worker.evaluation import evaluate_sets

VOCABULARY = 97
PAD = 1
LENGTHS = (13, 9, 4, 1)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def bert(dropout):
    more = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "max_position_embeddings": 20}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, pad_token_id=PAD, **SHAPE, **more))


def roberta(dropout):
    more = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout, "max_position_embeddings": 20}
    return RobertaForMaskedLM(RobertaConfig(vocab_size=VOCABULARY, pad_token_id=PAD, **SHAPE, **more))


def distilbert(dropout):
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "max_position_embeddings": 20}
    more = {"dropout": dropout, "attention_dropout": dropout}
    return DistilBertForMaskedLM(DistilBertConfig(vocab_size=VOCABULARY, pad_token_id=PAD, **shape, **more))


def test_no_evaluation_set_has_the_name_of_the_evaluation_on_candidates():
    sets = ("general.txt", "texts/candidates.txt")
    with pytest.raises(UsageError, match="is called candidates, so no other set can be"):
        MaskedLM(candidates="found", eval_data=sets)
    assert MaskedLM(eval_data=sets).eval_data == sets


TASK = MaskedLM(batch_size=len(LENGTHS))


def loss_of(model, batch):
    return TASK.loss(TASK.outputs(model, batch), batch)


def sums_of(model, *batches):
    return evaluate_sets(TASK, model, {"main": batches}, 0, 1, torch.device("cpu"))


every_architecture = pytest.mark.parametrize("architecture", [bert, roberta, distilbert])


def model_of(architecture, dropout=0.0):
    """With weights larger than usual, so that losses and hits differ between tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = architecture(dropout)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def batch_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator)
    attention_mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    input_ids[attention_mask == 0] = PAD
    chosen = (torch.rand(input_ids.shape, generator=generator) < 0.3) & (attention_mask == 1)
    chosen[:, 0] = True  # at least one a row
    labels = torch.randint(5, VOCABULARY, input_ids.shape, generator=generator).masked_fill(~chosen, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def masked(batch):
    return batch["labels"].flatten() != -100


def full_logits_loss(model, batch):
    """Logits everywhere, and label -100 at every position that is not masked."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


@every_architecture
def test_loss_and_every_gradient_are_those_of_logits_everywhere_with_label_minus_100(architecture):
    model = model_of(architecture)
    plain = copy.deepcopy(model)
    batch = batch_of()
    loss = loss_of(model, batch)
    loss.backward()
    expected = full_logits_loss(plain, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    compared = 0
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: name + m)
            compared += bool(theirs.grad.any())
    assert compared > 20


@every_architecture
def test_the_model_itself_still_gives_logits_everywhere_to_others(architecture):
    model = model_of(architecture)
    batch = batch_of()
    loss_of(model, batch)
    assert model(input_ids=batch["input_ids"]).logits.shape == (*batch["input_ids"].shape, VOCABULARY)


@every_architecture
def test_sums_are_those_of_float64_without_dropout(architecture):
    model = model_of(architecture, dropout=0.5)
    batch = batch_of()
    exact = copy.deepcopy(model).double().eval()
    sums = sums_of(model, batch)
    with torch.no_grad():
        logits = exact(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits = logits.flatten(0, 1)[masked(batch)]
    labels = batch["labels"].flatten()[masked(batch)]
    assert sums["loss"] == pytest.approx(float(functional.cross_entropy(logits, labels, reduction="sum")), rel=1e-6)
    assert sums["correct"] == int((logits.argmax(-1) == labels).sum())
    assert sums["weight"] == len(labels)
