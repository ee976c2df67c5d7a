"""Pipelines: stages have the gradients of the whole model, and an asynchronous one is the rule fixed_delay."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from marks import slow
from torch import nn
from torch.nn import functional

import asyncsgd
from asyncsgd import modes
from asyncsgd.errors import UsageError
from asyncsgd.optimizers import SGD, AdamW
from asyncsgd.records.events import EVENTS, read_events
from asyncsgd.rules import FixedDelay
from asyncsgd.stages import Anatomy, Stage, anatomy
from asyncsgd.tasks.base import Task
from asyncsgd.tasks.tensors import TensorData

VOCABULARY, WIDTH = 24, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.line = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden):
        return hidden + self.dropout(torch.tanh(self.line(self.norm(hidden))))


class Tower(nn.Module):
    """A row of blocks between an embedding and an output that is tied to it."""

    def __init__(self, num_blocks, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.output(self.norm(hidden))


@dataclasses.dataclass(frozen=True)
class NextToken(Task):
    """Foretell each token of a row that counts upwards by its first token's size."""

    name: ClassVar[str] = "next_token"
    better: ClassVar[Mapping[str, Any]] = {}
    batch_size: int = 8
    num_blocks: int = 4
    tied: bool = True
    num_frozen: int = 0
    """Of the blocks. Where there are any, the embedding is frozen too."""

    def model(self, seed):
        with asyncsgd.seeded(seed):
            tower = Tower(self.num_blocks, self.tied)
        if self.num_frozen:
            tower.embedding.requires_grad_(False)
            tower.blocks[: self.num_frozen].requires_grad_(False)
        return tower

    def data(self, seed):
        first, step = torch.arange(96).unsqueeze(1), torch.arange(7)
        rows = (first + step * (1 + first % 5)) % VOCABULARY
        return TensorData(rows[:80], rows[80:], self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[:, :-1])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())


def parameters(run):
    return torch.cat([parameter.detach().flatten() for parameter in run.model().parameters()])


def relative(some, others):
    return float(torch.linalg.vector_norm(some - others) / torch.linalg.vector_norm(others))


with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs the extra deepspeed: python -m pip install -c constraints.txt -e '.[deepspeed]'",
)


def reference(task, num_steps, num_replicas, optimizer, clip_norm):
    """Plain steps along the mean gradient of `num_replicas` batches; the parameters and the losses."""
    model, data = task.model(0), task.data(0)
    optimizer = optimizer([{"params": list(model.parameters()), "lr": 0.05}])
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        for replica in range(num_replicas):
            batch = data.batch(0, step * num_replicas + replica)
            loss = task.loss(task.outputs(model, batch), batch)
            (loss / num_replicas).backward()
            losses.append(float(loss.detach()))
        if clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), losses


@pytest.mark.parametrize(
    ("processes", "stages", "schedule", "tied"),
    [
        (2, 2, "1f1b", True),
        (2, 2, "gpipe", False),
        *slow((4, 4, "1f1b", True), (4, 4, "gpipe", True), (4, 2, "1f1b", True), (3, 3, "gpipe", False)),
        pytest.param(2, 2, "deepspeed", True, marks=[pytest.mark.slow, with_deepspeed]),
    ],
)
def test_a_synchronous_pipeline_is_one_process(tmp_path, processes, stages, schedule, tied):
    task, replicas = NextToken(tied=tied), processes // stages
    run = asyncsgd.train(
        task,
        runtime=modes.Pipeline(processes, stages, schedule),
        samples=5 * replicas * task.batch_size,
        micro_batches=4,
        learning_rate=0.05,
        weight_decay=0.01,
        optimizer=AdamW(),
        clip_norm=0.5,
        evaluations=1,
        folder=tmp_path / "run",
        quiet=True,
    )
    decayed = torch.optim.AdamW
    expected, losses = reference(task, 5, replicas, lambda groups: decayed(_by_decay(groups), fused=True), 0.5)
    assert relative(parameters(run), expected) < 1e-5
    records = list(read_events(tmp_path / "run" / EVENTS))
    assert [record["loss"] for record in records if record["kind"] == "arrival"] == pytest.approx(losses, rel=1e-5)
    assert run.evaluations[-1].loss == pytest.approx(_evaluated(task, run.model()), rel=1e-5)
    (used,) = [record["stages"] for record in records if record["kind"] == "stages"][1:]
    assert [row[:2] for row in used] == [list(divmod(rank, stages)) for rank in range(processes)]
    for replica, stage, computed, passed, exchanged, sent in used:
        assert computed is None if schedule == "deepspeed" else 0 < computed < passed
        assert exchanged >= 0
        hidden = 5 * task.batch_size * 6 * WIDTH * 4
        passes = hidden * ((stage < stages - 1) + (stage > 0))
        embedding = 5 * VOCABULARY * WIDTH * 4 * (tied and stage in (0, stages - 1))
        assert sent == passes + embedding or (replicas > 1 and sent > passes + embedding), (replica, stage)


@pytest.mark.parametrize(
    ("schedule", "num_frozen", "optimizer"),
    [("1f1b", 1, SGD()), ("1f1b", 3, SGD()), *slow(("2bw", 3, SGD()), ("1f1b", 3, torch.optim.Adafactor))],
)
def test_a_pipeline_leaves_frozen_blocks_as_they_are(schedule, num_frozen, optimizer):
    task = NextToken(tied=False, num_frozen=num_frozen)
    arguments = {"samples": 40, "micro_batches": 2, "optimizer": optimizer, "quiet": True}
    run = asyncsgd.train(task, runtime=modes.Pipeline(2, 2, schedule), learning_rate=0.05, **arguments)
    rule = {"rule": FixedDelay(1), "runtime": modes.Virtual(1)} if schedule == "2bw" else {}
    expected = asyncsgd.train(task, learning_rate=0.05, **rule, **arguments)
    assert relative(parameters(run), parameters(expected)) < 1e-6


def _by_decay(groups):
    (group,) = groups
    matrices = [parameter for parameter in group["params"] if parameter.ndim > 1]
    others = [parameter for parameter in group["params"] if parameter.ndim <= 1]
    return [
        {"params": matrices, "lr": group["lr"], "weight_decay": 0.01},
        {"params": others, "lr": group["lr"], "weight_decay": 0.0},
    ]


def _evaluated(task, model):
    batches = task.data(0).evaluation["main"]
    with torch.no_grad():
        losses = [(float(task.loss(task.outputs(model, b), b)), len(b)) for b in map(batches.__getitem__, range(2))]
    return sum(loss * rows for loss, rows in losses) / sum(rows for _, rows in losses)


@pytest.mark.parametrize(
    ("stages", "optimizer", "blocks"),
    [(2, SGD(0.5), 4), *slow((4, SGD(0.5), 4), (3, SGD(), 7), (2, torch.optim.Adafactor, 4))],
    ids=str,
)
def test_an_asynchronous_pipeline_is_the_rule_fixed_delay(tmp_path, stages, optimizer, blocks):
    task = NextToken(num_blocks=blocks)
    arguments = {
        "samples": 160,
        "learning_rate": 0.05,
        "schedule": "linear",
        "optimizer": optimizer,
        "evaluations": 3,
        "micro_batches": 4,
        "quiet": True,
    }
    expected = asyncsgd.train(
        task, rule=FixedDelay(1), runtime=modes.Virtual(1), folder=tmp_path / "expected", **arguments
    )
    pipeline = modes.Pipeline(stages, stages, "2bw")
    run = asyncsgd.train(task, runtime=pipeline, folder=tmp_path / "run", **arguments)
    assert relative(parameters(run), parameters(expected)) < 1e-6
    assert [e.loss for e in run.evaluations] == pytest.approx([e.loss for e in expected.evaluations], rel=1e-6)
    same = ("version", "total_samples", "uses", "read_version", "learning_rate", "batches")
    told = [
        [[record[key] for key in same] for record in read_events(folder / EVENTS) if record["kind"] == "arrival"]
        for folder in (tmp_path / "run", tmp_path / "expected")
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("schedule", "optimizer"), [("2bw", AdamW()), *slow(("1f1b", AdamW()), ("2bw", torch.optim.Adafactor))]
)
def test_a_pipeline_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, schedule, optimizer):
    arguments = {
        "optimizer": optimizer,
        "runtime": modes.Pipeline(2, 2, schedule),
        "micro_batches": 2,
        "learning_rate": 0.01,
        "evaluate_every": 40,
        "checkpoint_every": 32,
        "keep_best": True,
        "quiet": True,
    }
    whole = asyncsgd.train(NextToken(), samples=120, folder=tmp_path / "whole", **arguments)
    asyncsgd.train(NextToken(), samples=64, folder=tmp_path / "run", **arguments)
    run = asyncsgd.train(NextToken(), samples=120, folder=tmp_path / "run", resume=True, **arguments)
    assert torch.equal(parameters(run), parameters(whole))
    assert run.summary["best"] == whole.summary["best"] is not None


@pytest.mark.parametrize(
    ("runtime", "more", "said"),
    [
        (modes.Pipeline(1, 1), {}, "needs a process for each stage"),
        (modes.Pipeline(3, 2), {}, "--nproc 3 processes cannot hold --stages 2"),
        (modes.Pipeline(4, 4), {"micro_batches": 2}, "fewer than the 4 stages"),
        (modes.Pipeline(5, 5), {"micro_batches": 8}, "which cannot be cut into 5 stages"),
        (modes.Pipeline(2, 2), {"micro_batches": 3}, "does not divide"),
        (modes.Pipeline(2, 2), {"precision": "fp16"}, "no loss scale"),
        (modes.Pipeline(2, 2, "2bw"), {"clip_norm": 1.0}, "cannot clip"),
        (modes.Pipeline(4, 2, "2bw"), {}, "has one replica"),
        (modes.Pipeline(2, 2), {"gradient_checkpointing": True}, "--gradient-checkpointing is for models that are not"),
        (modes.Pipeline(2, 2), {"prefetch": 2}, "--prefetch is for models that are not"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(runtime, more, said):
    with pytest.raises(UsageError, match=said):
        asyncsgd.train(NextToken(), runtime=runtime, samples=80, **{"micro_batches": 4, "quiet": True, **more})


class Shared(Tower):
    """Runs one block again and again, as ALBERT does."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for _ in self.blocks:
            hidden = self.blocks[0](hidden)
        return self.output(self.norm(hidden))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Shared(3), "one after the other, each once"),
        (nn.Sequential(nn.Embedding(9, 9)), "no list of two or more blocks"),
    ],
    ids=["shared", "no blocks"],
)
def test_a_model_that_cannot_be_cut_is_refused(model, said):
    batch = NextToken().data(0).batch(0, 0)
    with pytest.raises(UsageError, match=said):
        anatomy(NextToken(), model, batch)


def language_model(architecture):
    """A small one with four blocks and an output that is tied to its embedding."""
    import transformers

    off = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    gpt2 = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    shape = {
        "Bert": {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64},
        "DistilBert": {"dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 64},
        "GPT2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0},
    }[architecture]
    names = gpt2 if architecture == "GPT2" else off[2:] if architecture == "DistilBert" else off[:2]
    config = getattr(transformers, f"{architecture}Config")(vocab_size=VOCABULARY, **shape, **dict.fromkeys(names, 0.0))
    kind = "GPT2LMHeadModel" if architecture == "GPT2" else f"{architecture}ForMaskedLM"
    with asyncsgd.seeded(0):
        return getattr(transformers, kind)(config).train()


@dataclasses.dataclass(frozen=True)
class Padded(NextToken):
    """With rows of different lengths."""

    def outputs(self, model, batch):
        mask = torch.ones_like(batch[:, :-1])
        mask[: len(mask) // 2, 4:] = 0
        return model(input_ids=batch[:, :-1], attention_mask=mask).logits


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("architecture", ["Bert", "DistilBert", "GPT2"])
def test_the_stages_of_a_language_model_have_the_gradients_of_the_whole(architecture, num_stages):
    task = Padded()
    batch, whole = task.data(0).batch(0, 0), language_model(architecture)
    loss = task.loss(task.outputs(whole, batch), batch)
    loss.backward()
    parts = anatomy(task, whole, batch)
    stages = [
        Stage(task, language_model(architecture), parts, num_stages=num_stages, number=number)
        for number in range(num_stages)
    ]
    received = []
    sent = []
    for stage in stages:
        assert stage.shape(batch) == (8, 6, 32)
        hidden = None if stage.is_first else sent[-1].detach().requires_grad_()
        received += [] if hidden is None else [hidden]
        sent.append(stage(batch, hidden))
    last = task.loss(sent.pop(), batch)
    last.backward()
    for one, other in zip(reversed(sent), reversed(received), strict=True):
        one.backward(other.grad)
    assert float(last.detach()) == pytest.approx(float(loss.detach()), rel=1e-6)
    total = {}
    for stage in stages:
        names = stage.names_in_model()
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            total[names[name]] = total.get(names[name], torch.zeros(())) + parameter.grad
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    assert total.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(total[name], gradient, rtol=1e-5, atol=1e-7)


@given(st.lists(st.integers(0, 9), min_size=4, max_size=9), st.integers(2, 4))
def test_no_cut_has_a_cheaper_costliest_stage(costs, num_stages):
    parts = Anatomy("blocks", (), tuple(costs), WIDTH)
    if parts.num_blocks < num_stages:
        with pytest.raises(UsageError, match="which cannot be cut"):
            parts.cut(num_stages)
        return

    def costliest(ends):
        bounds = [0, *ends, parts.num_blocks]
        stages = [sum(costs[1 + a : 1 + b]) for a, b in itertools.pairwise(bounds)]
        stages[0] += costs[0]
        stages[-1] += costs[-1]
        return max(stages)

    cut = parts.cut(num_stages)
    assert [number for blocks in cut for number in blocks] == list(range(parts.num_blocks))
    assert all(len(blocks) for blocks in cut)
    best = min(map(costliest, itertools.combinations(range(1, parts.num_blocks), num_stages - 1)))
    assert costliest(tuple(blocks.stop for blocks in cut[:-1])) == best
