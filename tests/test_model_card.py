"""The card beside every saved model: its front matter is read by the Hub's library, and its code loads the model."""

import dataclasses
import os
import re
import shutil
import signal

import pytest
from doors import FlatModel, asyncsgd, cli, parameters_sha256, seeded
from huggingface_hub import ModelCard
from tasks import Plane
from torch import nn


@dataclasses.dataclass(frozen=True)
class Tied(Plane):
    """Two layers that share their matrix."""

    name = "tied"
    width: int = 3

    def model(self, seed):
        with seeded(seed):
            model = nn.Sequential(nn.Linear(16, self.width), nn.Linear(self.width, 16), nn.Linear(16, self.width))
        model[2].weight = model[0].weight
        return model


def read(folder, monkeypatch):
    """The card's text and front matter, and what its code leaves behind, run in the model's folder."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(folder)
    exec(code, names)
    return text, ModelCard(text).data.to_dict(), names


def sha256_of(model):
    flat = FlatModel(model)
    return parameters_sha256(flat.layout, flat.parameters)


@pytest.fixture(scope="module")
def pretrained(train):
    return train(mode="single", samples=16, checkpoint_every="8")


def test_a_masked_language_model_loads_by_its_card_and_says_what_its_summary_says(pretrained, monkeypatch):
    summary = pretrained.summary
    tags = ["asyncsgd", "masked_lm", "single"]
    text, data, names = read(pretrained.path / "model", monkeypatch)
    assert data == {"library_name": "transformers", "pipeline_tag": "fill-mask", "tags": tags}
    assert type(names["model"]).__name__ == "BertForMaskedLM"
    assert names["tokenizer"].mask_token == "[MASK]"
    assert sha256_of(names["model"]) == summary["parameters_sha256"]
    for sentence in (
        "The task is `masked_lm`, in the experiment `stilt_mlm`.",
        f"with the fingerprint `{summary['data_fingerprint']}`",
        "Training began from random weights.",
        "The mode is `single`, 1 worker, rule `synchronous`.",
        "The optimizer is `AdamW(betas=(0.9, 0.999)), weight decay 0.01, clip norm 0`.",
        "The schedule is `learning rate 0.0005 (linear after 0 samples of warmup)`.",
        "It has seen 16 samples in 4 updates.",
        "The run ended as planned (DONE).",
        f"The last evaluation had the loss {summary['final_eval_loss']:.6g}, accuracy ",
        "Delays, in updates: mean 0, p50 0, p95 0, max 0.",
        f"Its {summary['num_parameters']} parameters have the sha256 `{summary['parameters_sha256']}`.",
    ):
        assert sentence in text


def test_the_model_of_a_finished_run_is_that_of_its_end_and_not_of_its_last_checkpoint(pretrained, tmp_path):
    run = tmp_path / "run"
    out = tmp_path / "out"
    shutil.copytree(pretrained.path, run)
    first, *later = sorted((run / "checkpoints").glob("*.json"))
    for path in later:
        path.unlink()
    assert cli(["asyncsgd", "export", run, "--out", out]).code == 0
    files = []
    for folder in (out, run / "model"):
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]
    shutil.rmtree(run / "model")
    ended = cli(["asyncsgd", "export", run, "--out", tmp_path / "other"])
    assert ended.code == 2
    assert "is DONE after 4 updates and has kept no model, and its last checkpoint is of 2" in ended.err
    assert f"type --checkpoint {first.stem}" in ended.err


def test_the_model_of_a_run_that_the_user_stopped_says_so(tmp_path):
    def stop(record):
        if record.kind == "arrival" and record.total_samples == 80:
            os.kill(os.getpid(), signal.SIGTERM)

    asyncsgd.train(Plane(), samples=160, folder=tmp_path / "run", quiet=True, device="cpu", report=stop)
    text = (tmp_path / "run" / "model" / "README.md").read_text(encoding="utf-8")
    assert "- It has seen 80 samples in 10 updates.\n- The run stopped early (INTERRUPTED): interrupted by" in text


def test_a_fine_tuned_model_names_the_model_it_began_from(pretrained, tmp_path, monkeypatch):
    for side in ("train", "test"):
        rows = [f"{word} {side} {place},{label}\n" for place in range(4) for word, label in (("ba", "A"), ("fo", "B"))]
        (tmp_path / f"{side}.csv").write_text("text,label\n" + "".join(rows))
    line = (
        f"classification --data {tmp_path} --model {pretrained.path} --cache-dir {tmp_path}/cache "
        f"--run-dir {tmp_path}/run --seq-len 16 --batch-size 4 --samples 8 --device cpu"
    )
    assert cli(f"train.py {line}").code == 0
    text, data, names = read(tmp_path / "run" / "model", monkeypatch)
    assert names["model"].config.id2label == {0: "A", 1: "B"}
    assert data["pipeline_tag"] == "text-classification"
    assert "base_model" not in data  # a folder is no name on the Hub
    assert f"Training began from `{pretrained.path}`." in text
    assert f"That was the model of the run `{pretrained.path.name}` (mode single)." in text
    assert "macro_f1 " in text
    assert f"The command was `python experiments/train.py {line}`." in text
    again = line.replace(f"{tmp_path}/run", f"{tmp_path}/again").replace("--samples 8", "--samples 0")
    assert cli(["asyncsgd", "train", *again.split()]).code == 0
    assert f"The command was `asyncsgd train {again}`." in read(tmp_path / "again" / "model", monkeypatch)[0]


def test_an_own_model_is_built_by_its_task_and_gets_its_values_from_the_file(tmp_path, monkeypatch):
    run = asyncsgd.train(Tied(width=5), samples=8, folder=tmp_path / "run", quiet=True, device="cpu")
    text, data, names = read(tmp_path / "run" / "model", monkeypatch)
    assert data == {"tags": ["asyncsgd", "tied", "single"]}
    assert "Training began from" not in text  # the task does not say
    assert sha256_of(names["model"]) == run.summary["parameters_sha256"]
