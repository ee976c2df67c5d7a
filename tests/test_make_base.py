"""The base model: made once, loadable, known by its hash, and never written over by accident."""

import json
import random
from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import make_base
from asyncsgd.errors import UsageError
from asyncsgd.flat import FlatModel, parameters_sha256
from asyncsgd.init_from import read_origin
from asyncsgd.settings.training import FLAGS
from asyncsgd.signals import StopRequest

Make = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    draw = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "worker", "server", "gradient"]
    path.write_text("\n".join(" ".join(draw.choices(words, k=12)) + f" {line}" for line in range(200)))
    return path


@pytest.fixture
def make(text, tmp_path, capsys, monkeypatch):
    """Run the script in this process, quickly; returns its exit code and what it printed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*more):
        quick = (
            f"--out {tmp_path / 'base'} --model tiny --data {text} --cache-dir {text.parent} --samples 32 --seq-len 24"
        )
        code = make_base.run(
            [*quick.split(), "--warmup", "0", "--threads", "1", "--device", "cpu", *more], StopRequest()
        )
        return code, capsys.readouterr().out

    return run


def test_the_folder_loads_and_base_json_has_the_hash_of_what_is_loaded(make, tmp_path):
    code, out = make()
    assert code == 0
    base = json.loads((tmp_path / "base" / "base.json").read_text())
    flat = FlatModel(AutoModelForMaskedLM.from_pretrained(tmp_path / "base"))
    assert base["parameters_sha256"] == parameters_sha256(flat.layout, flat.parameters)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "base")) > 5
    assert "The command was `python experiments/make_base.py --out " in (tmp_path / "base" / "README.md").read_text()
    summary = json.loads((tmp_path / "base" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["experiment"], summary["from_scratch"]) == ("DONE", "stilt_mlm", True)
    same = ("parameters_sha256", "data_fingerprint", "final_eval_loss", "first_eval_loss", "num_samples")
    assert {key: base[key] for key in same} == {key: summary[key] for key in same}
    assert base["from_scratch_pretraining"] is True
    assert base["settings"] == FLAGS.load_yaml(tmp_path / "base" / "run" / "settings.yaml")
    assert base["settings"].items() >= {"mode": "single", "model": "tiny", "samples": 32, "seed": 0}.items()
    assert out.splitlines()[-1].startswith(f"next   python experiments/stilt_mlm.py --model {tmp_path / 'base'}")


def test_what_starts_from_it_is_not_from_scratch(make, tmp_path):
    make()
    origin = read_origin(str(tmp_path / "base"))
    assert (origin.from_scratch, origin.parent) == (False, None)
    assert origin.parameters_sha256 == json.loads((tmp_path / "base" / "base.json").read_text())["parameters_sha256"]


def test_made_again_with_the_same_settings_it_is_there_and_verified(make, tmp_path):
    make()
    before = (tmp_path / "base" / "base.json").stat().st_mtime_ns
    code, out = make()
    assert code == 0
    assert out.startswith(f"there  {tmp_path / 'base'}, made with these settings; parameters sha256 ")
    assert "verified" in out
    assert (tmp_path / "base" / "base.json").stat().st_mtime_ns == before


def test_other_settings_are_refused_and_overwrite_keeps_the_earlier_model_under_another_name(make, tmp_path):
    make()
    first = json.loads((tmp_path / "base" / "base.json").read_text())["parameters_sha256"]
    with pytest.raises(UsageError, match=r"holds a base model with other settings \(seed 0 -> 1\); type another --out"):
        make("--seed", "1")
    code, out = make("--seed", "1", "--overwrite")
    assert code == 0
    assert "kept   the earlier base model, as" in out
    assert json.loads((tmp_path / "base.before-1" / "base.json").read_text())["parameters_sha256"] == first
    assert json.loads((tmp_path / "base" / "base.json").read_text())["parameters_sha256"] != first


def test_a_model_that_was_changed_is_noticed(make, tmp_path):
    make()
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.base_model.embeddings.word_embeddings.weight[7, 3] += 1e-6
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match="was changed after it was made: its parameters have sha256"):
        make()


def test_a_folder_that_is_no_base_model_is_left_alone(make, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match=r"exists and holds no base model \(no base\.json\); type another --out"):
        make()
    assert [path.name for path in (tmp_path / "base").iterdir()] == ["thesis.tex"]


def test_a_pretrained_model_is_no_start_for_a_base_model(make):
    with pytest.raises(UsageError, match="a base model is made from random weights; type --model small"):
        make("--model", "bert-base-uncased")
    with pytest.raises(UsageError, match=r"--samples must be a whole number, got 'many'"):
        make("--samples", "many")
