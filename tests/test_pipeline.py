"""Pipelines: stages have the gradients of the whole model, and an asynchronous one is the rule fixed_delay."""

import dataclasses
import importlib.util

import pytest
import torch
import torch.distributed as dist
from doors import (
    SGD,
    AdamW,
    Finished,
    FixedDelay,
    InProcess,
    Pipeline,
    RunError,
    Task,
    TensorData,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
    seeded,
)
from marks import slow
from torch import nn
from torch.nn import functional

VOCABULARY = 24
WIDTH = 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + torch.tanh(self.line(self.norm(hidden)))


class Tower(nn.Module):
    """A row of blocks between an embedding and an output, which may be tied to it."""

    def __init__(self, num_blocks, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.output.weight = self.embedding.weight

    def run_order(self):
        return self.blocks

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.run_order():
            hidden = block(hidden)
        return self.output(self.norm(hidden))


class Shared(Tower):
    """Runs one block again and again, as ALBERT does."""

    def run_order(self):
        return [self.blocks[0]] * len(self.blocks)


@dataclasses.dataclass(frozen=True)
class NextToken(Task):
    """Foretell each token of a row that counts upwards by its first token's size."""

    name = "next_token"
    batch_size: int = 8
    num_blocks: int = 4
    tied: bool = True
    num_frozen: int = 0
    """Of the blocks. Where there are any, the embedding is frozen too."""
    kind: type = Tower

    def model(self, seed):
        with seeded(seed):
            tower = self.kind(self.num_blocks, self.tied)
        if self.num_frozen:
            tower.embedding.requires_grad_(False)
            tower.blocks[: self.num_frozen].requires_grad_(False)
        return tower

    def data(self, seed):
        first = torch.arange(96).unsqueeze(1)
        step = torch.arange(7)
        rows = (first + step * (1 + first % 5)) % VOCABULARY
        return TensorData(rows[:80], rows[80:], self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[:, :-1])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs.flatten(0, 1), batch[:, 1:].flatten())


@dataclasses.dataclass(frozen=True)
class Padded(NextToken):
    """With rows of different lengths, through a small language model whose output is tied to its embedding."""

    architecture: str = "BertForMaskedLM"

    def model(self, seed):
        import transformers

        if self.architecture == "BertForMaskedLM":
            shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
            shape |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        elif self.architecture == "DistilBertForMaskedLM":
            shape = {"dim": 32, "n_layers": 4, "n_heads": 2, "hidden_dim": 64}
            shape |= {"dropout": 0.0, "attention_dropout": 0.0}
        else:
            shape = {"n_embd": 32, "n_layer": 4, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
            shape |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        kind = getattr(transformers, self.architecture)
        with seeded(seed):
            return kind(kind.config_class(vocab_size=VOCABULARY, **shape)).train()

    def outputs(self, model, batch):
        mask = torch.ones_like(batch[:, :-1])
        mask[batch[:, 0] % 2 == 1, 4:] = 0
        return model(input_ids=batch[:, :-1], attention_mask=mask).logits


@dataclasses.dataclass(frozen=True)
class ByProcessor(NextToken):
    """Has parameters of several kinds, which may have other values on each rank."""

    differ: bool = True

    def model(self, seed):
        tower = super().model(seed)
        tower.blocks[0].number = nn.Parameter(torch.tensor([7], dtype=torch.int16), requires_grad=False)
        tower.blocks[1].same = nn.Parameter(torch.ones(1).expand(WIDTH), requires_grad=False)
        if self.differ and dist.is_initialized():
            with torch.no_grad():
                for parameter in tower.parameters():
                    if parameter.requires_grad:
                        parameter += 0.01 * dist.get_rank()
                tower.blocks[0].number += dist.get_rank()
        return tower


def vector_of(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def parameters(run):
    return vector_of(run.model())


def arrivals(folder, *keys):
    found = []
    for record in Finished(folder).records("arrival"):
        found.append([record[key] for key in keys])
    return found


def losses_of(run):
    return [evaluation.loss for evaluation in run.evaluations]


def relative(some, others):
    """The length of the difference, as a share of the length of `others`."""
    difference = torch.linalg.vector_norm(some - others)
    return float(difference / torch.linalg.vector_norm(others))


def train(task, runtime=None, **more):
    given = {"samples": 40, "micro_batches": 4, "learning_rate": 0.05, "quiet": True} | more
    return asyncsgd.train(task, runtime=runtime or InProcess(), **given)


with_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None,
    reason="needs the extra deepspeed: python -m pip install -c constraints.txt -e '.[deepspeed]'",
)


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
    task = NextToken(tied=tied)
    replicas = processes // stages
    more = {"samples": 5 * replicas * task.batch_size, "weight_decay": 0.01, "optimizer": AdamW(), "clip_norm": 0.5}
    expected = train(task, InProcess(replicas), evaluations=1, folder=tmp_path / "one", **more)
    run = train(task, Pipeline(processes, stages, schedule), evaluations=1, folder=tmp_path / "run", **more)
    assert relative(parameters(run), parameters(expected)) < 1e-5
    losses = []
    for folder in ("run", "one"):
        losses.append([loss for (loss,) in arrivals(tmp_path / folder, "loss")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-5)
    used = Finished(tmp_path / "run").records("stages")[1]["stages"]
    assert [row[:2] for row in used] == [list(divmod(rank, stages)) for rank in range(processes)]
    hidden_bytes = 5 * task.batch_size * 6 * WIDTH * 4
    embedding_bytes = 5 * VOCABULARY * WIDTH * 4
    last = stages - 1
    for _, stage, computed, passed, exchanged, sent in used:
        if schedule == "deepspeed":
            assert computed is None
        else:
            assert 0 < computed < passed
        assert exchanged >= 0
        within_the_replica = 0
        if stage < last:
            within_the_replica += hidden_bytes
        if stage > 0:
            within_the_replica += hidden_bytes
        if tied and stage in (0, last):
            within_the_replica += embedding_bytes
        if replicas == 1:
            assert sent == within_the_replica
        else:
            assert sent > within_the_replica


@pytest.mark.parametrize(("processes", "stages"), [(2, 2), *slow((4, 2))])
def test_all_stages_begin_with_the_parameters_of_rank_0(processes, stages):
    more = {"samples": 32, "optimizer": SGD()}
    expected = train(ByProcessor(differ=False), Pipeline(processes, stages), **more)
    run = train(ByProcessor(), Pipeline(processes, stages), **more)
    assert torch.equal(parameters(run), parameters(expected))


@pytest.mark.slow
@with_deepspeed
def test_deepspeeds_run_is_that_of_1f1b_bit_for_bit():
    ours = train(NextToken(), Pipeline(2, 2, "1f1b"), optimizer=AdamW())
    deepspeeds = train(NextToken(), Pipeline(2, 2, "deepspeed"), optimizer=AdamW())
    assert torch.equal(parameters(ours), parameters(deepspeeds))


FROZEN = NextToken(tied=False, num_frozen=3)


@pytest.mark.parametrize(
    ("task", "num_stages", "optimizer"),
    [
        (Padded(), 2, SGD()),
        (NextToken(tied=False, num_frozen=1), 2, SGD()),
        (FROZEN, 2, SGD()),
        *slow(
            (FROZEN, 2, torch.optim.Adafactor),
            (Padded(architecture="GPT2LMHeadModel"), 4, SGD()),
            (Padded(architecture="DistilBertForMaskedLM"), 3, SGD()),
        ),
    ],
    ids=str,
)
def test_the_stages_of_a_language_model_or_with_frozen_blocks_take_the_steps_of_the_whole(task, num_stages, optimizer):
    run = train(task, Pipeline(num_stages, num_stages), optimizer=optimizer)
    whole = train(task, None, optimizer=optimizer)
    first = vector_of(task.model(0))
    assert relative(first, parameters(whole)) > 1e-4
    assert relative(parameters(run), parameters(whole)) < 1e-6
    assert run.evaluations[-1].loss == pytest.approx(whole.evaluations[-1].loss, rel=1e-5)


@pytest.mark.parametrize(
    ("stages", "optimizer", "task"),
    [
        (2, SGD(0.5), NextToken()),
        *slow((4, SGD(0.5), NextToken()), (3, SGD(), NextToken(num_blocks=7)), (2, SGD(), FROZEN)),
        *slow((2, torch.optim.Adafactor, NextToken())),
    ],
    ids=str,
)
def test_an_asynchronous_pipeline_is_the_rule_fixed_delay(tmp_path, stages, optimizer, task):
    more = {"samples": 160, "schedule": "linear", "optimizer": optimizer, "evaluations": 3}
    expected = train(task, Virtual(1), rule=FixedDelay(1), folder=tmp_path / "expected", **more)
    run = train(task, Pipeline(stages, stages, "2bw"), folder=tmp_path / "run", **more)
    assert relative(parameters(run), parameters(expected)) < 1e-6
    assert losses_of(run) == pytest.approx(losses_of(expected), rel=1e-6)
    same = ("version", "total_samples", "uses", "read_version", "learning_rate", "batches")
    assert arrivals(tmp_path / "run", *same) == arrivals(tmp_path / "expected", *same)


@pytest.mark.parametrize(
    ("runtime", "optimizer"),
    [
        (Pipeline(2, 2, "2bw"), AdamW()),
        *slow((Pipeline(4, 2, "1f1b"), AdamW()), (Pipeline(2, 2, "2bw"), torch.optim.Adafactor)),
    ],
)
def test_a_pipeline_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path, runtime, optimizer):
    more = {"optimizer": optimizer, "evaluate_every": 40, "checkpoint_every": 32, "keep_best": True}
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    train(NextToken(), runtime, samples=64, folder=run, **more)
    resumed = train(NextToken(), runtime, samples=120, folder=run, resume=True, **more)
    expected = train(NextToken(), runtime, samples=120, folder=whole, **more)
    assert torch.equal(parameters(resumed), parameters(expected))
    assert resumed.summary["best"] == expected.summary["best"]
    assert expected.summary["best"] is not None


def test_a_pipeline_goes_on_in_parts_of_one_size(tmp_path):
    more = {"micro_batches": 4, "checkpoint_every": 16, "evaluations": 1, "device": "cpu", "quiet": True}
    asyncsgd.train(NextToken(), runtime=Pipeline(2, 2), samples=16, folder=tmp_path / "run", **more)
    line = ["asyncsgd", "resume", tmp_path / "run", "--samples", "32", "--task", "test_pipeline:NextToken"]
    refused = cli([*line, "--micro-batches", "5"])
    assert refused.err == "error: --micro-batches 5 of a pipeline have one size; type a divisor of 8\n"


@pytest.mark.parametrize(
    ("runtime", "more", "said"),
    [
        ((1, 1), {}, "needs a process for each stage"),
        ((3, 2), {}, "--nproc 3 must be a multiple of --stages 2"),
        ((4, 4), {"micro_batches": 2}, "--micro-batches 2 is fewer than the stages"),
        ((5, 5), {"micro_batches": 8}, "which cannot be cut into 5 stages"),
        ((2, 2), {"micro_batches": 3}, "must divide --batch-size 8"),
        ((2, 2), {"precision": "fp16"}, "no loss scale"),
        ((2, 2, "2bw"), {"clip_norm": 1.0}, "cannot clip"),
        ((4, 2, "2bw"), {}, "has one replica"),
        ((2, 2), {"gradient_checkpointing": True}, "--gradient-checkpointing is for models that are not"),
        ((2, 2), {"task": NextToken(kind=Shared)}, "one after the other, each once"),
        ((2, 2), {"task": NextToken(num_blocks=0)}, "no list of two or more blocks"),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(runtime, more, said):
    with pytest.raises(UsageError, match=said):
        train(**{"task": NextToken(), "runtime": Pipeline(*runtime)} | more)


class WithShortLastPart(NextToken):
    def split(self, batch, parts):
        *others, last = super().split(batch, parts)
        return [*others, last[:, :-1] if parts == 4 else last]


def test_parts_of_which_the_last_is_shorter_end_a_pipeline_with_the_reason():
    """Both ranks find it. The first to end is named, by its error or as the rank that has printed one."""
    reasons = (
        r"of \(2, 6, 16\) and \(2, 5, 16\), and a pipeline needs one shape|rank 1 .it raised the error that stands"
    )
    with pytest.raises(RunError, match=reasons):
        train(WithShortLastPart(), Pipeline(2, 2))
