"""Causal language modelling: packed documents are learned as if each were alone, by every runtime alike."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from gallery import sentences
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from asyncsgd.errors import UsageError
from asyncsgd.tasks.causal_lm import CausalLM, pack

SEQ_LEN = 24
BATCH_SIZE = 4
VOCABULARY = 304
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal")
    (folder / "train.txt").write_text(sentences(120, seed=0))
    (folder / "eval.txt").write_text(sentences(40, seed=1))
    return folder


def prepared(root, **values):
    small = {
        "data_name": str(root / "train.txt"),
        "eval_data": str(root / "eval.txt"),
        "seq_len": SEQ_LEN,
        "batch_size": BATCH_SIZE,
        "eval_samples": 0,
    }
    return CausalLM(**small | values).prepare(0, root / "cache")


@pytest.fixture(scope="module")
def task(root):
    return prepared(root, vocab_size=VOCABULARY)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def llama():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape))


def opt():
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 48}
    return OPTForCausalLM(OPTConfig(vocab_size=VOCABULARY, max_position_embeddings=64, word_embed_proj_dim=32, **shape))


def louder(model):
    """With weights larger than usual, so that losses and hits differ between tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def saved(task, model, folder):
    """A pretrained model of the tests' own, in a folder."""
    task.save(louder(model), folder)
    return str(folder)


@pytest.fixture(scope="module", params=[gpt2, llama, opt], ids=lambda make: make.__name__)
def any_task(request, task, root):
    return prepared(root, model_name=saved(task, request.param(), root / request.param.__name__))


def documents_of(task, side, end_id=None):
    """Lines as the tokenizer makes them, with the end behind, cut at the length of a row; one at a time."""
    tokenizer = AutoTokenizer.from_pretrained(task.known["tokenizer"])
    if side == "train":
        texts = sentences(120, seed=0)
    else:
        texts = sentences(40, seed=1)
    held_out = sentences(40, seed=1).split("\n")
    lines = [line for line in texts.split("\n") if side == "eval" or line not in held_out]
    whole = [[*tokenizer(line)["input_ids"], task.known["end_id"]] for line in lines]
    pieces = [ids[first : first + SEQ_LEN] for ids in whole for first in range(0, len(ids), SEQ_LEN)]
    return [torch.tensor(piece) for piece in pieces if len(piece) >= 4]


def whole_side(task, side):
    """A batch of all rows of a side."""
    samples = task.samples(side)
    return task.collate(samples, np.arange(len(samples)), None)


def documents_in(batch, lengths):
    """Each document of a batch, and where it stands: (row, begin, end)."""
    for row, length in enumerate(lengths):
        if "position_ids" in batch:
            positions = batch["position_ids"][row]
        else:
            positions = torch.arange(length)
        firsts = []
        for first in (positions == 0).nonzero().flatten().tolist():
            if first < length:
                firsts.append(first)
        yield from ((row, begin, end) for begin, end in itertools.pairwise([*firsts, length]))


def loss_of(task, model, batch):
    return task.loss(task.outputs(model, batch), batch)


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_the_rows_of_a_side_hold_each_of_its_documents_once(any_task):
    for side in ("train", "eval"):
        batch = whole_side(any_task, side)
        lengths = any_task.samples(side).lengths
        found = Counter(tuple(batch["input_ids"][row, a:b].tolist()) for row, a, b in documents_in(batch, lengths))
        assert found == Counter(tuple(ids.tolist()) for ids in documents_of(any_task, side))


@given(st.lists(st.integers(1, 20), max_size=40))
def test_packing_loses_no_document_and_overfills_no_row(lengths):
    rows = pack(lengths, 20)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    filled = sorted(sum(lengths[document] for document in row) for row in rows)
    for length in filled:
        assert 0 < length <= 20
    assert all(a + b > 20 for a, b in itertools.pairwise(filled))  # no two rows would fit one


def test_only_models_that_keep_documents_apart_get_several_in_a_row(any_task):
    rows = any_task.samples("train")
    num_documents = len(documents_of(any_task, "train"))
    is_opt = any_task.known["weights"].endswith("opt")
    assert any_task.known["packed"] == (not is_opt)
    assert any_task.facts()["num_train_samples"] == len(rows)
    notes = any_task.facts()["notes"]
    assert "train.txt has 120 documents, which are its lines" in notes
    if is_opt:
        assert len(rows) == num_documents
        assert "mixes the documents of a row" in notes[-1]
    else:
        assert len(rows) < 0.9 * num_documents
        assert rows.lengths.mean() > 0.95 * SEQ_LEN
        assert "mixes the documents" not in notes[-1]


def test_loss_and_gradient_are_those_of_transformers_over_single_documents(any_task):
    model = any_task.model(0)
    loss = loss_of(any_task, model, whole_side(any_task, "train"))
    gradients = gradients_of(model, loss)
    documents = documents_of(any_task, "train")
    total = sum(len(ids) - 1 for ids in documents)
    alone = []
    for ids in documents:
        alone.append(model(input_ids=ids[None], labels=ids[None]).loss * ((len(ids) - 1) / total))
    expected = torch.stack(alone).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, gradients_of(model, expected), rtol=1e-4, atol=1e-5)


def test_what_a_tokenizer_puts_in_front_of_a_text_stands_in_front_of_every_document(task, root, tmp_path):
    from tokenizers import processors

    folder = saved(task, gpt2(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", task.known["end_id"])]
    )
    tokenizer.backend_tokenizer.post_processor = processors.Sequence([template])
    tokenizer.save_pretrained(folder)
    begins = prepared(root, model_name=folder)
    batch = begins.data(0).batch(0, 0)
    assert set(batch["input_ids"][batch["position_ids"] == 0].tolist()) == {task.known["end_id"]}
    assert batch["input_ids"].shape[1] <= SEQ_LEN


def test_an_encoder_which_sees_what_it_is_to_predict_is_refused(task, root, tmp_path):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **shape))
    folder = saved(task, model, tmp_path / "model")
    with pytest.raises(UsageError, match=r"is no causal language model.*depends on later ones"):
        prepared(root, model_name=folder)
