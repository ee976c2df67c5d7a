"""Pipelines: stages have the gradients of the whole model, and an asynchronous one is the rule fixed_delay."""

import dataclasses
import importlib.util

import pytest
import torch
from doors import (
    SGD,
    AdamW,
    Finished,
    FixedDelay,
    Pipeline,
    Task,
    TensorData,
    UsageError,
    Virtual,
    asyncsgd,
    seeded,
)
from marks import slow
from torch import nn
from torch.nn import functional

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

    name = "next_token"
    batch_size: int = 8
    num_blocks: int = 4
    tied: bool = True
    num_frozen: int = 0
    """Of the blocks. Where there are any, the embedding is frozen too."""

    def model(self, seed):
        with seeded(seed):
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
        runtime=Pipeline(processes, stages, schedule),
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
    log = Finished(tmp_path / "run")
    assert [record["loss"] for record in log.records("arrival")] == pytest.approx(losses, rel=1e-5)
    assert run.evaluations[-1].loss == pytest.approx(_evaluated(task, run.model()), rel=1e-5)
    used = log.records("stages")[1]["stages"]
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
    run = asyncsgd.train(task, runtime=Pipeline(2, 2, schedule), learning_rate=0.05, **arguments)
    rule = {"rule": FixedDelay(1), "runtime": Virtual(1)} if schedule == "2bw" else {}
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
    expected = asyncsgd.train(task, rule=FixedDelay(1), runtime=Virtual(1), folder=tmp_path / "expected", **arguments)
    pipeline = Pipeline(stages, stages, "2bw")
    run = asyncsgd.train(task, runtime=pipeline, folder=tmp_path / "run", **arguments)
    assert relative(parameters(run), parameters(expected)) < 1e-6
    assert [e.loss for e in run.evaluations] == pytest.approx([e.loss for e in expected.evaluations], rel=1e-6)
    same = ("version", "total_samples", "uses", "read_version", "learning_rate", "batches")
    told = [
        [[record[key] for key in same] for record in Finished(tmp_path / name).records("arrival")]
        for name in ("run", "expected")
    ]
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("schedule", "optimizer"), [("2bw", AdamW()), *slow(("1f1b", AdamW()), ("2bw", torch.optim.Adafactor))]
)
def test_a_pipeline_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, schedule, optimizer):
    arguments = {
        "optimizer": optimizer,
        "runtime": Pipeline(2, 2, schedule),
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
        ((1, 1), {}, "needs a process for each stage"),
        ((3, 2), {}, "--nproc 3 processes cannot hold --stages 2"),
        ((4, 4), {"micro_batches": 2}, "fewer than the 4 stages"),
        ((5, 5), {"micro_batches": 8}, "which cannot be cut into 5 stages"),
        ((2, 2), {"micro_batches": 3}, "must divide --batch-size 8"),
        ((2, 2), {"precision": "fp16"}, "no loss scale"),
        ((2, 2, "2bw"), {"clip_norm": 1.0}, "cannot clip"),
        ((4, 2, "2bw"), {}, "has one replica"),
        ((2, 2), {"gradient_checkpointing": True}, "--gradient-checkpointing is for models that are not"),
        ((2, 2), {"prefetch": 2}, "--prefetch is for models that are not"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(runtime, more, said):
    with pytest.raises(UsageError, match=said):
        asyncsgd.train(
            NextToken(), runtime=Pipeline(*runtime), samples=80, **{"micro_batches": 4, "quiet": True, **more}
        )


class Shared(Tower):
    """Runs one block again and again, as ALBERT does."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for _ in self.blocks:
            hidden = self.blocks[0](hidden)
        return self.output(self.norm(hidden))


@dataclasses.dataclass(frozen=True)
class Uncut(NextToken):
    """A model that has no row of blocks, or has one and runs another."""

    def model(self, seed):
        with seeded(seed):
            return Shared(3) if self.num_blocks else nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY))


@pytest.mark.parametrize(
    ("num_blocks", "said"), [(3, "one after the other, each once"), (0, "no list of two or more blocks")]
)
def test_a_model_that_cannot_be_cut_is_refused(num_blocks, said):
    with pytest.raises(UsageError, match=said):
        asyncsgd.train(Uncut(num_blocks=num_blocks), runtime=Pipeline(2, 2), samples=80, micro_batches=4, quiet=True)


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
    with seeded(0):
        return getattr(transformers, kind)(config).train()


@dataclasses.dataclass(frozen=True)
class Padded(NextToken):
    """With rows of different lengths, through a language model."""

    architecture: str = "Bert"

    def model(self, seed):
        return language_model(self.architecture)

    def outputs(self, model, batch):
        mask = torch.ones_like(batch[:, :-1])
        mask[batch[:, 0] % 2 == 1, 4:] = 0
        return model(input_ids=batch[:, :-1], attention_mask=mask).logits


@pytest.mark.parametrize(
    ("architecture", "num_stages"), [("Bert", 2), *slow(("Bert", 4), ("DistilBert", 3), ("GPT2", 2), ("GPT2", 4))]
)
def test_the_stages_of_a_language_model_take_the_steps_of_the_whole(architecture, num_stages):
    task = Padded(architecture=architecture)
    arguments = {"samples": 16, "micro_batches": 4, "optimizer": SGD(), "learning_rate": 1.0, "quiet": True}
    whole = asyncsgd.train(task, **arguments)
    run = asyncsgd.train(task, runtime=Pipeline(num_stages, num_stages), **arguments)
    first = torch.cat([parameter.detach().flatten() for parameter in task.model(0).parameters()])
    assert relative(first, parameters(whole)) > 1e-3
    assert relative(parameters(run), parameters(whole)) < 1e-5
    assert run.evaluations[-1].loss == pytest.approx(whole.evaluations[-1].loss, rel=1e-5)
