"""A model folder is data: none of its code is run, nobody is asked whether it may, and the message says what to do."""

from __future__ import annotations

import io
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncsgd.data.corpora import Corpus
from asyncsgd.data.documents import Documents
from asyncsgd.data.tokenization import load_tokenizer
from asyncsgd.errors import UsageError
from asyncsgd.models import build_model

EXPERIMENTS = Path(__file__).resolve().parents[1] / "experiments"
WORDS = ["alpha", "beta", "gamma", "worker", "server", "gradient", "update", "reads", "writes", "stale", "fresh"]
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 4] + WORDS[i % 5 : i % 5 + 4] + [str(i)]) for i in range(200)]

CUSTOM = """
import pathlib
pathlib.Path({trace!r}).write_text("ran")
from transformers import BertConfig, BertForMaskedLM, BertTokenizerFast
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertForMaskedLM):
    config_class = OwnConfig
class OwnTokenizer(BertTokenizerFast):
    pass
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with its tokenizer."""
    from transformers import BertConfig, BertForMaskedLM

    from asyncsgd.data.tokenization import train_wordpiece

    folder = tmp_path_factory.mktemp("model")
    tokenizer = train_wordpiece(TEXTS, 128)
    config = BertConfig(
        vocab_size=128, hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16
    )
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def update(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def with_its_own_model(folder: Path) -> None:
    classes = {"AutoConfig": "custom.OwnConfig", "AutoModelForMaskedLM": "custom.OwnModel"}
    update(folder / "config.json", model_type="own", architectures=["OwnModel"], auto_map=classes)


def with_its_own_model_and_tokenizer(folder: Path) -> None:
    with_its_own_model(folder)
    classes = {"AutoTokenizer": ["custom.OwnTokenizer", "custom.OwnTokenizer"]}
    update(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)


def with_its_own_model_and_no_tokenizer(folder: Path) -> None:
    with_its_own_model(folder)
    for path in folder.glob("tokenizer*"):
        path.unlink()


def with_names_of_code_it_does_not_need(folder: Path) -> None:
    update(
        folder / "config.json", auto_map={"AutoConfig": "custom.OwnConfig", "AutoModelForMaskedLM": "custom.OwnModel"}
    )
    update(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "custom.OwnTokenizer"]})


class Malicious:
    """Unpickled, it writes a file."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"touch {self.trace}",))


def with_a_malicious_pickle(folder: Path) -> None:
    """Beside the safetensors, as torch.save writes it."""
    torch.save({"weight": Malicious(folder.parent / "trace")}, folder / "pytorch_model.bin")


def with_nothing_but_a_malicious_pickle(folder: Path) -> None:
    with_a_malicious_pickle(folder)
    (folder / "model.safetensors").unlink()


def with_its_own_tokenizer(folder: Path) -> None:
    """Of a configuration that is no model's, so that transformers has no tokenizer for it."""
    (folder / "config.json").unlink()
    classes = {"AutoTokenizer": ["custom.OwnTokenizer", "custom.OwnTokenizer"]}
    update(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=classes)


def with_a_malicious_pickle_of_the_old_format(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Malicious(folder.parent / "trace")))
    (folder / "model.safetensors").unlink()


Foreign = Callable[[Callable[[Path], None]], Path]


@pytest.fixture
def foreign(tmp_path: Path, model: Path) -> Foreign:
    """Make a folder of somebody else's, whose code would leave a file `trace` beside it."""

    def make(spoil: Callable[[Path], None]) -> Path:
        folder = tmp_path / "mine"
        shutil.copytree(model, folder)
        (folder / "custom.py").write_text(CUSTOM.format(trace=str(tmp_path / "trace")))
        spoil(folder)
        return folder

    return make


def command(script: str, folder: Path) -> list[str]:
    """A short run that starts from `folder`."""
    text = folder.parent / "text.txt"
    text.write_text("\n".join(TEXTS))
    labelled = folder.parent / "labelled"
    labelled.mkdir()
    for side, texts in (("train", TEXTS[:100]), ("test", TEXTS[100:])):
        rows = [json.dumps({"text": words, "label": number % 2}) for number, words in enumerate(texts)]
        (labelled / f"{side}.jsonl").write_text("\n".join(rows))
    own = {
        "stilt_mlm": f"--mode single --model {folder} --data {text} --samples 8 --eval-samples 8",
        "stilt_finetune": f"--init-from {folder} --data {labelled} --epochs 1",
    }[script]
    place = f"--seq-len 16 --threads 1 --cache-dir {folder.parent / 'cache'} --run-dir {folder.parent / 'run'}"
    return [sys.executable, str(EXPERIMENTS / f"{script}.py"), *own.split(), *place.split()]


OWN_CODE = (
    "needs code of its own (auto_map in its config.json or tokenizer_config.json), and asyncsgd runs no code that "
    "comes with a model; take a model of an architecture that transformers has, or --model tiny"
)
PICKLED = (
    "the weights (pytorch_model.bin) are damaged or hold more than tensors, and asyncsgd runs no code that comes "
    "with a model; save them as model.safetensors where they can be trusted, or type --model tiny"
)


def load(folder: Path) -> None:
    """What every run does with ``--model`` and ``--init-from``."""
    corpus = Corpus("none", Documents((), None), Documents((), None), "none")
    tokenizer = load_tokenizer(str(folder), corpus, vocab_size=128, cache_dir=folder.parent / "cache")
    build_model(str(folder), tokenizer, seq_len=16, dropout=0.0, seed=0)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (with_its_own_model, OWN_CODE),
        (with_its_own_tokenizer, OWN_CODE),
        (with_its_own_model_and_tokenizer, OWN_CODE),
        (with_its_own_model_and_no_tokenizer, OWN_CODE),
        (with_nothing_but_a_malicious_pickle, PICKLED),
        (with_a_malicious_pickle_of_the_old_format, PICKLED),
        (with_names_of_code_it_does_not_need, None),
        (with_a_malicious_pickle, None),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_model_folder_runs_no_code_and_asks_nobody(
    spoil: Callable[[Path], None], message: str | None, foreign: Foreign, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.StringIO("y\n")
    monkeypatch.setattr(sys, "stdin", stdin)
    folder = foreign(spoil)
    if message is None:
        load(folder)
    else:
        with pytest.raises(UsageError) as caught:
            load(folder)
        assert message in str(caught.value)
        assert str(folder) in str(caught.value)
    assert stdin.tell() == 0
    assert not (folder.parent / "trace").exists()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("script", ["stilt_mlm", "stilt_finetune"])
@pytest.mark.parametrize("stdin", ["<&-", "< answers"])
def test_a_run_from_a_folder_that_needs_its_own_code_is_refused(script: str, stdin: str, foreign: Foreign) -> None:
    folder = foreign(with_its_own_model_and_tokenizer)
    (folder.parent / "answers").write_text("y\n")
    ended = subprocess.run(
        ["bash", "-c", f"{shlex.join(command(script, folder))} {stdin}"],
        cwd=folder.parent,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder.parent / "modules")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = OWN_CODE.replace("--model", "--init-from") if script == "stilt_finetune" else OWN_CODE
    assert (ended.returncode, ended.stderr) == (2, f"error: {folder} {said}\n")
    assert "[y/N]" not in ended.stdout
    assert not (folder.parent / "trace").exists()
