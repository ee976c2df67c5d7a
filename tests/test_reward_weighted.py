"""The example of a loss of one's own: it is the weighted loss that its first lines write down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doors import UsageError, check

import reward_weighted
from reward_weighted import RewardWeighted

SCRIPT = Path(reward_weighted.__file__)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Prepared, on a text whose lines have either reward."""
    root = tmp_path_factory.mktemp("rewards")
    lines = [f"ba di {'return' * (number % 2)} {'fo ' * (number % 7)}{number}" for number in range(120)]
    (root / "text.txt").write_text("\n".join(lines))
    task = RewardWeighted(data_name=str(root / "text.txt"), vocab_size=300, seq_len=32, batch_size=6)
    return task.prepare(0, root / "cache")


@pytest.fixture(scope="module")
def batch(task):
    return task.data(0).batch(0, 0)


@pytest.fixture(scope="module")
def model(task):
    return task.model(0).eval()


def loss_of(task, model, batch):
    return task.loss(task.outputs(model, batch), batch).item()


def rows_of(batch, rows):
    return {name: tensor[rows] for name, tensor in batch.items()}


@pytest.mark.parametrize("reward", [1.0, 0.25, 3.0])
def test_with_equal_rewards_it_is_the_loss_of_a_causal_language_model_and_has_its_gradient(reward, task, batch, model):
    equal = {**batch, "rewards": torch.full((6,), reward)}
    outputs = task.outputs(model, equal).detach().requires_grad_()
    ours = task.loss(outputs, equal)
    causal = super(RewardWeighted, task).loss(outputs, equal)
    assert ours.item() == pytest.approx(causal.item(), rel=1e-6)
    (here,), (there,) = torch.autograd.grad(ours, outputs), torch.autograd.grad(causal, outputs)
    assert torch.allclose(here, there, rtol=1e-5, atol=1e-9)
    assert task.weight(equal) == pytest.approx(reward * super(RewardWeighted, task).weight(equal))


def test_a_text_of_reward_0_is_not_there_and_one_of_reward_2_is_there_twice(task, batch, model):
    ones = {**batch, "rewards": torch.ones(6)}
    without_last = {**batch, "rewards": torch.tensor([1.0, 1, 1, 1, 1, 0])}
    assert loss_of(task, model, without_last) == pytest.approx(loss_of(task, model, rows_of(ones, slice(5))), rel=1e-6)
    assert loss_of(task, model, without_last) != pytest.approx(loss_of(task, model, ones), rel=1e-6)
    twice = {}
    for name, tensor in ones.items():
        twice[name] = torch.cat([tensor, tensor[:1]])
    doubled = {**batch, "rewards": torch.tensor([2.0, 1, 1, 1, 1, 1])}
    assert loss_of(task, model, doubled) == pytest.approx(loss_of(task, model, twice), rel=1e-6)


def test_rewards_are_those_of_the_texts(task, batch):
    from transformers import AutoTokenizer

    texts = AutoTokenizer.from_pretrained(task.known["tokenizer"]).batch_decode(batch["input_ids"])
    assert batch["rewards"].tolist() == pytest.approx([1.0 if "return" in text else 0.1 for text in texts])
    assert len(set(batch["rewards"].tolist())) == 2


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_a_batch_that_teaches_nothing_or_teaches_away_is_refused(value, task, monkeypatch):
    monkeypatch.setattr(reward_weighted, "reward", lambda text: value)
    with pytest.raises(UsageError, match="a batch has a negative reward, or none above 0"):
        task.data(0).batch(0, 0)


def test_a_part_of_a_batch_without_rewards_has_neither_loss_nor_weight(task, batch, model):
    part = {**batch, "rewards": torch.zeros(6)}
    assert loss_of(task, model, part) == 0.0
    assert task.weight(part) == 0.0


def test_check_finds_no_mistake_in_it(task):
    checked = check(task)
    assert checked.unused == ()
    assert checked.notes == ()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("flags", ["--mode async --nproc 2", "--clock virtual --nproc 3 --speeds exponential:1"])
def test_the_script_trains(flags, tmp_path):
    (tmp_path / "text.txt").write_text("\n".join(f"ba di {'return' * (n % 2)} fo {n}" for n in range(120)))
    small = "--data text.txt --vocab-size 300 --seq-len 16 --batch-size 4 --samples 64 --warmup 0 --evaluations 1"
    command = [sys.executable, str(SCRIPT), *flags.split(), *small.split(), "--cache-dir", "cache", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text())
    assert summary["final_eval_loss"] < summary["first_eval_loss"]
