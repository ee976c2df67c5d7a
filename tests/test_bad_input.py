"""What a tired researcher types: exit code 2, one message that says what to type instead, and nothing left behind."""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gallery import sentences
from marks import slow

import stilt_mlm
from asyncsgd.worker import is_out_of_memory

SCRIPT = Path(__file__).resolve().parents[1] / "experiments" / "stilt_mlm.py"


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(sentences(300, seed=0))
    return path


@pytest.fixture
def script(monkeypatch, tmp_path, tmp_path_factory):
    """The script as a module, in an environment without a launcher or a network."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.chdir(tmp_path)
    return stilt_mlm


Refused = Callable[..., str]


@pytest.fixture
def refused(script, monkeypatch, capsys, cache):
    """Run a command line that must be refused and return the message, which is all there is on stderr."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["stilt_mlm.py", "--cache-dir", str(cache), *map(str, words)])
        capsys.readouterr()
        assert script.main() == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert "Traceback" not in said
        assert list(Path(tempfile.gettempdir()).glob("asyncsgd-*")) == []
        return said.removeprefix("error: ").rstrip("\n")

    return run


def small(text):
    flags = "--mode single --seq-len 32 --batch-size 4 --vocab-size 512 --eval-samples 8 --samples 8"
    return ["--data", str(text), *flags.split()]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--mod async", "unknown flag --mod; did you mean '--mode'?"),
        ("--lr 0.1", "unknown flag --lr; did you mean '--learning-rate'?"),
        ("--mode sync --rule ringmaster", "--rule ringmaster is for --mode async, got --mode sync"),
        ("--nproc", "argument --nproc/--nproc-per-node/--nprocs/--workers: expected one argument"),
        ("--config none.yaml", "--config none.yaml cannot be read: No such file or directory"),
        ("train.py", "unexpected argument 'train.py'"),
        ("--overwrite", "--overwrite does nothing without --run-dir"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused_before_anything_is_made(words, said, refused, tmp_path):
    assert refused(*words.split()).startswith(said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "said"),
    [({"WORLD_SIZE": "2"}, "RANK"), ({"WORLD_SIZE": ""}, "WORLD_SIZE"), ({"WORLD_SIZE": "two"}, "WORLD_SIZE")],
)
def test_launcher_variables_left_over_in_the_shell_are_named(environment, said, refused, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert said in refused("--mode", "sync")


def failed(folder, said):
    """Whether a run folder holds a summary with this failure, and no model."""
    summary = json.loads((folder / "summary.json").read_text())
    return (summary["status"], summary["message"], (folder / "model").exists()) == ("FAILED", said, False)


LATIN1 = "Schöne Grüße\n".encode("latin-1") * 50
TABLE = "\n".join(["id,txt", *(f"{i},{s}" for i, s in enumerate(sentences(100, seed=0).split("\n")))]).encode()


@pytest.mark.parametrize(
    ("name", "content", "said", "is_read"),
    [
        ("d.txt", b" \n\n", "d.txt", True),
        ("nowhere.txt", None, "there is no file or folder 'nowhere.txt'; --data takes pydocs, hub:NAME, a fo", False),
        ("d.txt", LATIN1, "is not UTF-8 (byte offset 3); convert it, for example: iconv", True),
        (
            "d.csv",
            TABLE,
            "has no column 'text'; its columns are id, txt; did you mean 'txt'?; choose one with --t",
            True,
        ),
        ("d.txt", b"one sentence here\n", "has too few documents (1) to set some aside for evaluation; give", True),
        ("d/notes.doc", b"x", "holds no file that can be read; known are .txt", False),
        ("d.pdf", b"x", "files of this kind cannot be read; known are .txt", False),
    ],
)
def test_data_that_cannot_be_read_is_refused(name, content, said, is_read, refused, tmp_path, text):
    if content is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    message = refused(*small(text), "--data", name.partition("/")[0], "--run-dir", "run")
    assert said in message
    assert failed(Path("run"), message) if is_read else not Path("run").exists()


@pytest.fixture
def model(train):
    """A saved model with its tokenizer."""
    return train(mode="single", samples=0).path / "model"


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


@pytest.mark.parametrize(
    ("gone", "written", "said"),
    [
        (
            ["model.safetensors"],
            {},
            "mine: cannot be loaded as a masked-language model: Error no file named model.safetensors",
        ),
        ([], {"model.safetensors": b"torn"}, "cannot be loaded as a masked-language model"),
        (["tokenizer.json", "tokenizer_config.json"], {}, "holds no tokenizer that can be read"),
        (["config.json"], {}, "./mine is neither a run folder (settings.yaml, summary.json, model/) nor a saved model"),
        ([], {"config.json": b'{"model_type": "be'}, "mine"),
        (
            [],
            {
                "custom.py": b"import pathlib; pathlib.Path('executed').touch()",
                "config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "custom.OwnConfig"}}',
            },
            "needs code of its own",
        ),
        (
            ["model.safetensors"],
            {"pytorch_model.bin": pickle.dumps(Bomb())},
            "the weights (pytorch_model.bin) are damaged or hold more than tensors",
        ),
        (["."], {}, "./mine: there is no such folder; name a run folder, a saved model, a name on the Hub, or tiny"),
        (["."], {"": b"x"}, "mine"),
    ],
)
def test_a_model_folder_that_cannot_be_loaded_is_refused(gone, written, said, refused, tmp_path, text, model):
    shutil.copytree(model, tmp_path / "mine")
    for name in gone:
        (shutil.rmtree if name == "." else os.remove)(tmp_path / "mine" / name)
    for name, content in written.items():
        (tmp_path / "mine" / name if name else tmp_path / "mine").write_bytes(content)
    flags = f"--data {text} --mode single --seq-len 32 --samples 8 --eval-samples 8 --model ./mine --run-dir run"
    message = refused(*flags.split())
    assert said in message
    assert not Path("executed").exists()
    if Path("run").exists():
        assert failed(Path("run"), message)


def test_a_sequence_length_beyond_the_models_positions_is_refused_with_the_longest(refused, text, model):
    longest = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    message = refused(*f"--data {text} --mode single --seq-len {longest + 1} --model {model} --run-dir run".split())
    told = f"--seq-len {longest + 1} is longer than the {longest} positions of model {str(model)!r}; type --seq-len "
    assert message == f"{told}{longest}"
    assert failed(Path("run"), message)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu_is_refused(refused, text):
    message = refused(*small(text), "--device", "cuda", "--run-dir", "run")
    assert message == "--device cuda: torch sees no GPU here; type --device cpu, or leave the flag out"
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--rule ringmaster:treshold=4", "has no parameter 'treshold'; did you mean 'threshold'?"),
        ("--rule ringmaster:threshold=0", "--rule ringmaster:threshold=0: "),
        ("--rule dana", "'dana' has a momentum or a force of its own and needs plain SGD at the server; type --opti"),
        ("--speeds exponetial:1", "unknown speeds 'exponetial'; did you mean 'exponential'?"),
        ("--speeds slow:worker=7,factor=3", "--speeds slow:"),
        ("--clock virtual --network bytes=six", "--network"),
        ("--eval-data nowhere.txt", "there is no file or folder 'nowhere.txt'; --eval-data takes a folder, or a file"),
        ("--data hub:", "'hub:' does not name a Hub data set; write hub:NAME or hub:NAME:CONFIG"),
        (
            "--cache-dir text.txt/cache",
            "the cache folder text.txt/cache cannot be made (Not a directory); type",
        ),
    ],
)
def test_a_mistyped_word_leaves_no_folder_behind(flags, said, refused, text):
    command = [*small(text), "--mode", "async", "--nproc", "2", "--run-dir", "run", *flags.split()]
    assert said in refused(*command)
    assert not Path("run").exists()


def test_a_mistyped_word_is_refused_without_the_imports_of_a_run(tmp_path, text):
    program = (
        "import json, os, runpy, sys\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    sys.argv = line\n"
        "    try:\n"
        "        runpy.run_path(line[0], run_name='__main__')\n"
        "    except SystemExit as exit:\n"
        "        heavy = {'transformers', 'datasets', 'tokenizers', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "        print(exit.code, sorted(heavy), os.path.exists('run'))\n"
    )
    train = SCRIPT.with_name("train.py")
    tuning = ["classification", "--run-dir", "run"]
    lines = [
        [str(script), *flags, "--cache-dir", str(tmp_path / "cache")]
        for script, flags in (
            (SCRIPT, [*small(text), "--run-dir", "run", "--model", "./nowhere"]),
            (SCRIPT, [*small(text), "--run-dir", "run", "--mode", "async", "--rule", "asynchronus"]),
            (train, [*tuning, "--data", "nowhere.csv"]),
            (train, [*tuning, "--model", "./nowhere"]),
        )
    ]
    command = [sys.executable, "-c", program, json.dumps(lines)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert [line for line in done.stdout.splitlines() if line.startswith("2")] == ["2 [] False"] * 4, done.stderr


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--model tiny --vocab-size 512 --data hub:tweet_eval:hate", "use --data pydocs or --data FILE"),
        *slow(("--model bert-base-uncased", "or use --model tiny or --model FOLDER")),
    ],
)
def test_a_hub_name_without_a_network_is_refused_soon_and_says_what_to_do(flags, said, tmp_path, text, cache):
    nobody = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")}
    known = {name: value for name, value in os.environ.items() if name not in ("HF_HUB_OFFLINE", "WORLD_SIZE", "RANK")}
    command = [sys.executable, str(SCRIPT), *f"--data {text} --mode single --cache-dir {cache}".split()]
    began = time.monotonic()
    done = subprocess.run(
        [*command, *flags.split(), "--run-dir", "run"],
        cwd=tmp_path,
        env={**known, **nobody},
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert time.monotonic() - began < 60  # the Hub's own libraries would go on trying for longer
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert failed(tmp_path / "run", done.stderr.removeprefix("error: ").rstrip("\n"))


def test_a_folder_that_is_no_run_folder_is_refused_and_stays_as_it_is(refused, text, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for overwrite in ([], ["--overwrite"]):
        message = refused(*small(text), "--run-dir", "mine", *overwrite)
        assert message == "mine exists and is not a run folder; type another --run-dir"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("flag", ["--runs-dir", "--run-dir"])
def test_a_place_that_cannot_be_written_is_refused(flag, refused, text):
    below_a_file = text / "runs"
    message = refused(*small(text), flag, below_a_file)
    assert message.startswith(f"{below_a_file} cannot be written (Not a directory); type {flag} ")


@pytest.mark.processes
def test_a_temporary_folder_with_a_name_too_long_for_a_socket_leaves_no_shared_memory(
    refused, text, tmp_path, monkeypatch
):
    """The path of a Unix socket has 107 characters, and clusters like long names for TMPDIR."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    message = refused(*small(text), "--mode", "async", "--nproc", "2", "--run-dir", "run")
    assert "TMPDIR" in message


def test_what_torch_says_when_it_is_refused_memory_is_told_from_other_errors():
    with pytest.raises(RuntimeError) as refused_memory:
        torch.empty(2**50)
    assert is_out_of_memory(refused_memory.value)
    assert is_out_of_memory(MemoryError())
    wrapped = RuntimeError("a stage failed")  # as torch's pipelines say it
    wrapped.__cause__ = refused_memory.value
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
