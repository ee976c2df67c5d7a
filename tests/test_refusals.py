"""What a tired researcher types: exit code 2, one line that names the flag and the value, and nothing left behind."""

import dataclasses
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from doors import ROOT, Infinite, Leave, Processes, Slow, Task, Virtual, asyncsgd, cli
from gallery import sentences
from refusals import assert_words, refused
from tasks import Plane

TABLE = [{"tokens": ["be", "di"], "ner_tags": ["B-A", "O"], "txt": f"be di {number}"} for number in range(40)]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text and a table in it, without a launcher or a network."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text(sentences(100, seed=0))
    (tmp_path / "latin.txt").write_bytes("Schöne Grüße\n".encode("latin-1") * 50)
    (tmp_path / "table.jsonl").write_text("\n".join(map(json.dumps, TABLE)))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    return tmp_path


def refused_line(line, folder):
    """What is said; that nothing is changed; a run that had begun to read its data has failed with the same words."""
    before = {}
    for path in folder.rglob("*"):
        if path.is_file():
            before[path] = path.read_bytes()
    ended = cli(line)
    assert ended.code == 2, ended
    assert ended.err.startswith("error: "), ended
    assert ended.err.count("\n") == 1, ended
    after = {}
    for path in folder.rglob("*"):
        if path.is_file():
            after[path] = path.read_bytes()
    said = ended.err.removeprefix("error: ").rstrip("\n")
    if (folder / "run").exists():
        summary = json.loads((folder / "run" / "summary.json").read_text())
        assert summary["status"] == "FAILED"
        assert summary["message"] == said
        assert not (folder / "run" / "model").exists()
    new = {path for path in after.keys() - before.keys() if {"run", "cache"}.isdisjoint(path.relative_to(folder).parts)}
    assert new == set()
    assert {path: after.get(path) for path in before} == before
    return said


@dataclasses.dataclass(frozen=True)
class OfOneSize(Task):
    """Its batch size is no field, as in a task that is typed in a hurry."""

    name = "of_one_size"
    batch_size = 8
    model = Plane.model
    data = Plane.data
    outputs = Plane.outputs
    loss = Plane.loss


MASKED = "stilt_mlm.py --run-dir run --cache-dir cache "
CAUSAL, TAGGING, ANSWERING = (
    f"train.py {name} --run-dir run --cache-dir cache "
    for name in ("causal_lm", "token_classification", "question_answering")
)
SMALL = f"{MASKED}--data text.txt --mode single --seq-len 32 --vocab-size 512 --eval-samples 8 --samples 8 "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # flags
        (f"{MASKED}--mod async", "--mod '--mode'"),
        (f"{MASKED}--mask_porb=0.2", "--mask_porb '--mask-prob'"),
        (f"{MASKED}--nproc", "--nproc expected one argument"),
        (f"{MASKED}train", "unexpected 'train'"),
        (f"{MASKED}--samples 1e400", "--samples whole '1e400'"),
        (f"{MASKED}--learning-rate nan", "--learning-rate number nan"),
        (f"{MASKED}--config none.yaml", "--config none.yaml"),
        # settings without effect
        (f"{MASKED}--mode single --nproc 2", "--mode single --nproc 2"),
        (f"{MASKED}--accumulate 2 --nproc 2", "--accumulate --mode async"),
        (f"{MASKED}--mode sync --rule ringmaster", "--rule ringmaster --mode sync"),
        (f"{MASKED}--mode sync --transport shared_memory", "--transport --mode sync"),
        (f"{MASKED}--clock virtual --mode hogwild", "--clock virtual --mode hogwild"),
        (f"{MASKED}--clock virtual --transport process_group", "--transport --clock virtual"),
        (f"{MASKED}--clock virtual --prefetch 2", "--prefetch 2"),
        (f"{MASKED}--network bytes=1,worker=1,server=1", "--network --clock virtual"),
        (f"{MASKED}--mode single --speeds exponential:1", "--speeds --mode single"),
        (f"{MASKED}--hogwild-state shared --mode single", "--hogwild-state --mode single"),
        (f"{MASKED}--momentum 0.9", "--momentum --optimizer adamw"),
        (f"{MASKED}--optimizer sgd --beta2 0.8", "--beta2 --optimizer sgd"),
        (f"{MASKED}--seconds 9 --schedule cosine", "--schedule cosine --samples"),
        (f"{MASKED}--samples 0 --target-loss 9", "--target-loss --samples 0"),
        (f"{MASKED}--samples 80 --epochs 2", "--epochs 2 --samples 80"),
        (f"{MASKED}--patience 8", "--patience 8 --evaluations 8"),
        (f"{MASKED}--evaluations 9 --evaluate-every 1epoch", "--evaluations 9 --evaluate-every 1epoch"),
        (f"{MASKED}--batch-size 4 --micro-batches 5", "--micro-batches 5 4"),
        (f"{MASKED}--find-batch-size", "--run-dir --find-batch-size"),
        (f"{MASKED}--runs-dir b", "--runs-dir --run-dir"),
        ("stilt_mlm.py --overwrite", "--overwrite --run-dir"),
        (f"{MASKED}--model bert-base-uncased --vocab-size 99", "--vocab-size --model tiny"),
        (f"{MASKED}--text-column tweet", "--text-column --data pydocs"),
        (f"{MASKED}--mask word --candidates c --candidate-share 0.5", "--candidate-share --mask candidates"),
        (f"{MASKED}--mask candidates --candidates nothing", "nothing is no folder of candidates"),
        (f"{MASKED}--tech True", "--tech mask_candidates.py --candidates"),
        # rules, speeds and networks
        (f"{MASKED}--rule asynchronus", "'asynchronus' 'asynchronous'"),
        (f"{MASKED}--rule ringmaster:treshold=4", "'treshold' 'threshold'"),
        (f"{MASKED}--rule dana", "'dana' plain SGD --optimizer"),
        (f"{MASKED}--nproc 2 --speeds exponetial:1", "'exponetial' 'exponential'"),
        (f"{MASKED}--clock virtual --network bytes=six", "--network"),
        # tasks
        ("train.py causal", "'causal' 'causal_lm'"),
        ("train.py test_refusals:OfOneSize --find-batch-size --cache-dir cache", "batch_size: int = 32"),
        ("train.py json:JSONDecoder", "json:JSONDecoder dataclass asyncsgd.Task"),
        (f"{CAUSAL}--data nowhere", "'nowhere' --data"),
        (f"{CAUSAL}--eval-data nowhere", "'nowhere' --eval-data"),
        (f"{CAUSAL}--model ./nowhere", "--model ./nowhere"),
        (f"{CAUSAL}--model .", "config.json --model"),
        (f"{TAGGING}", "--data"),
        (f"{TAGGING}--data ./text.txt", "text.txt .parquet"),
        (f"{TAGGING}--data table.jsonl --tags-column tokens", "both 'tokens' --tags-column"),
        (f"{ANSWERING}--data table.jsonl --stride 999", "--stride 999 --seq"),
        # data
        (f"{MASKED}--data hub:", "'hub:' hub:NAME"),
        (f"{MASKED}--data latin.txt", "utf-8 position 3"),
        (f"{MASKED}--data table.jsonl", "'text' 'txt' --text-column"),
        (f"{MASKED}--data mine", ".txt"),
        # places
        (f"{SMALL}--cache-dir text.txt/cache", "text.txt/cache Not a directory"),
        ("stilt_mlm.py --run-dir mine --data text.txt", "mine is not a run folder --run-dir"),
        ("stilt_mlm.py --run-dir mine --overwrite --data text.txt", "mine is not a run folder --run-dir"),
        ("stilt_mlm.py --runs-dir text.txt/runs --data text.txt", "text.txt/runs Not a directory --runs-dir"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_leaves_nothing_behind(line, words, folder):
    said = refused_line(line, folder)
    assert_words(said, words)


def test_a_host_without_the_folder_to_go_on_from_has_to_know_the_mode(folder, monkeypatch):
    monkeypatch.setenv("GROUP_RANK", "1")  # as torchrun numbers the second host
    said = refused_line("stilt_mlm.py --resume elsewhere", folder)
    assert "this host has no elsewhere/settings.yaml" in said
    assert "type --mode async or --mode sync" in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1", "'lerning_rate' 'learning_rate'"),
        ("samples: many", "samples whole 'many'"),
        ("learning_rate: .nan", "learning_rate number nan"),
        ("data: 5", "data text 5 quotes"),
        ("overwrite: 'yes'", "overwrite true false 'yes'"),
        ("batch_size: 1\nbatch-size: 2", "'batch_size' twice"),
        ("[1, 2]", "'mode: async' list"),
        ("mode: [", "not YAML"),
        ("mode: sync\naccumulate: 2", "and the command line together"),
        ("checkpoint_every: 5000.5", "'5000.5'"),
        ("task: causal_lm", "config.yaml causal_lm masked_lm command"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(text, words, folder):
    (folder / "config.yaml").write_text(text)
    said = refused_line("stilt_mlm.py --config config.yaml", folder)
    assert_words(said, words)


@pytest.mark.parametrize(
    ("flags", "python", "words"),
    [
        ("--samples=-1", {"samples": -1}, "samples 0 or more -1"),
        ("--seconds=-1", {"seconds": -1.0}, "seconds more than 0 -1"),
        ("--evaluations 0", {"evaluations": 0}, "evaluations 1 or more 0"),
        ("--epochs 0", {"epochs": 0, "samples": None}, "epochs more than 0"),
        ("--schedule lineal", {"schedule": "lineal"}, "schedule 'lineal' 'linear'"),
        (f"--seed {2**32}", {"seed": 2**32}, "seed less than 4294967296"),
        ("--checkpoint-every 0", {"checkpoint_every": 0, "folder": "never_made"}, "samples from 1 up"),
        ("--nproc 0", lambda: {"runtime": Virtual(0)}, "1 or more 0"),
        ("--mode sync --nproc 1025", lambda: {"runtime": asyncsgd.AllReduce(1025)}, "1025 1024"),
        ("--nproc 2 --speeds slow:worker=5", lambda: {"runtime": Processes(2, speeds=Slow(5, 4.0))}, "worker 5"),
        (
            "--nproc 2 --speeds infinite:0.5",
            lambda: {"runtime": Processes(2, speeds=Infinite(0.5))},
            "infinite virtual",
        ),
        ("--warmup 0.25 --seconds 1", {"samples": None, "seconds": 1.0, "warmup": 0.25}, "0.25 share"),
        ("--micro-batches 9", {"micro_batches": 9}, "--micro-batches 9 8"),
        ("--gradient-checkpointing", {"gradient_checkpointing": True}, "Linear gradient_checkpointing_enable"),
        (
            "--clock virtual --churn leave:worker=7,seconds=4",
            lambda: {"runtime": Virtual(1, churn=(Leave(7, 4.0),))},
            "worker 7",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_both_doors(flags, python, words, folder):
    said = refused_line(f"train.py tasks:Plane --run-dir run --device cpu {flags}", folder)
    assert_words(said, words)
    with refused(words):
        arguments = python() if callable(python) else python
        asyncsgd.train(Plane(), quiet=True, **{"samples": 8} | arguments)


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("gone", "written", "words"),
    [
        ("model.safetensors", {}, "mine model.safetensors"),
        ("model.safetensors", {"model.safetensors": b"torn"}, "cannot be loaded by AutoModelForMaskedLM"),
        ("config.json", {}, "neither a run folder nor a saved model"),
        ("model.safetensors", {"pytorch_model.bin": pickle.dumps(Bomb())}, "pytorch_model.bin more than tensors"),
        (
            "config.json",
            {
                "custom.py": b"import pathlib; pathlib.Path('executed').touch()",
                "config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "custom.OwnConfig"}}',
            },
            "needs code of its own",
        ),
    ],
)
def test_a_model_folder_that_cannot_be_loaded_is_refused_and_nothing_in_it_is_executed(
    gone, written, words, folder, train
):
    shutil.copytree(train(mode="single", samples=0).path / "model", folder / "mine" / "model")
    (folder / "mine" / "model" / gone).unlink()
    for name, content in written.items():
        (folder / "mine" / "model" / name).write_bytes(content)
    said = refused_line(f"{SMALL.replace('--vocab-size 512', '')} --model ./mine/model", folder)
    assert_words(said, words)


def test_a_sequence_length_beyond_the_models_positions_is_refused_with_the_longest(folder, train):
    model = train(mode="single", samples=0).path / "model"
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    line = f"{MASKED}--data text.txt --mode single --seq-len {longest + 1} --model {model}"
    assert f"--seq-len {longest + 1} is longer than the {longest} positions" in refused_line(line, folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused(folder):
    assert "type --device cpu" in refused_line(f"{SMALL}--device cuda", folder)


@pytest.mark.parametrize("environment", [{"WORLD_SIZE": "2"}, {"WORLD_SIZE": "two", "RANK": "0"}], ids=str)
def test_launcher_variables_left_over_in_the_shell_are_named(environment, folder, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert "RANK" in (said := refused_line("stilt_mlm.py --mode sync", folder)) or "WORLD_SIZE" in said


@pytest.mark.processes
def test_a_hub_name_without_a_network_is_refused_soon_and_says_what_to_do(folder, tmp_path_factory):
    nobody = {"HTTPS_PROXY": "http://127.0.0.1:9", "HF_HOME": str(tmp_path_factory.mktemp("hf")), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, str(ROOT / "experiments" / "stilt_mlm.py"), *SMALL.split()[1:]]
    done = subprocess.run(
        [*command, "--data", "hub:tweet_eval:hate"],
        env={**os.environ, **nobody},
        capture_output=True,
        text=True,
        timeout=60,  # the Hub's own libraries would go on trying for longer
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "use --data pydocs or --data FILE" in done.stderr


@pytest.mark.processes
def test_a_temporary_folder_with_a_name_too_long_for_a_socket_leaves_no_shared_memory(folder, monkeypatch):
    """The path of a Unix socket has 107 characters, and clusters like long names for TMPDIR."""
    long = folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    assert "TMPDIR" in refused_line(SMALL.replace("--mode single", "--mode async --nproc 2"), folder)
    assert list(long.iterdir()) == []
