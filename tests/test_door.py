"""``asyncsgd COMMAND``: the same settings, runs and words as by the scripts and modules that it stands for."""

import importlib.util
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from commands import Command, until
from doors import ROOT, Ended, Finished, asyncsgd, cli
from doors_campaign import drawn_line, typed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a new user, which holds no checkout."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize("seed", range(4))
def test_a_line_means_the_same_at_both_doors_and_is_refused_in_the_same_words(seed, folder):
    """Lines and runs in every mode, as many as one likes: ``python tests/doors_campaign.py``."""
    draw = random.Random(seed)
    codes = set()
    for number in range(30):
        place = folder / str(number)
        place.mkdir()
        words = drawn_line(draw)
        door, differences = typed(words, place)
        assert differences == [], words
        codes.add(door.code)
    assert codes == {0, 2}


def settings_and_comment(run):
    """What settings.yaml holds but for where the run is kept, and the line that began the run."""
    first, *rest = (run.path / "settings.yaml").read_text().splitlines()
    return yaml.safe_load("\n".join(rest)) | {"runs_dir": None}, first


@pytest.mark.parametrize("flags", ["--seed 3", "--rule ringmaster:threshold=2 --nproc 3"])
def test_a_run_has_the_same_name_settings_and_bits_and_records_what_was_typed(flags, folder):
    line = f"tasks:Plane --clock virtual --samples 24 --device cpu {flags}"
    runs = []
    for command in ("train.py", "asyncsgd train"):
        runs_dir = f"by_{command[:2]}"
        ended = cli(f"{command} {line} --runs-dir {runs_dir}")
        assert ended.code == 0, ended.err
        (path,) = Path(runs_dir).iterdir()
        runs.append(Finished(path))
        typed = {"train.py": "python experiments/train.py"}.get(command, command)
        _, comment = settings_and_comment(runs[-1])
        assert comment == f"# {typed} {line} --runs-dir {runs_dir}"
        door = {"train.py": "python -m analysis"}.get(command, "asyncsgd")
        assert ended.out.splitlines()[-1] == f"next   {door} compare {runs_dir}"
    script, door = runs
    assert door.path.name == script.path.name
    assert settings_and_comment(door)[0] == settings_and_comment(script)[0]
    assert door.summary["parameters_sha256"] == script.summary["parameters_sha256"]
    assert cli(f"asyncsgd compare {door.path.parent} --format csv").code == 0


@pytest.mark.parametrize("line", ["train tasks:Plane --samples 8", "simulate --samples 8"])
def test_a_run_records_a_command_that_a_shell_reads_as_it_was_typed(line, folder):
    words = ["asyncsgd", *line.split(), "--runs-dir", "my runs"]
    ended = cli(words)
    assert ended.code == 0, ended.err
    (path,) = Path("my runs").iterdir()
    _, comment = settings_and_comment(Finished(path))
    assert shlex.split(comment.removeprefix("# ")) == words


def commands_of(ended, script, door):
    """The runs that a study would make, one command a line, each typed at the door."""
    assert ended.code == 0, ended.err
    runs = []
    for line in ended.out.splitlines():
        if line.startswith((script, door)):
            runs.append(line)
    return [line.replace("python experiments/stilt_mlm.py", "asyncsgd train masked_lm") for line in runs]


def test_a_config_is_found_in_the_package_by_its_name_and_as_it_was_typed_in_a_checkout(folder):
    names = ["quick", "quick.yaml", "configs/quick.yaml", "experiments/configs/quick.yaml"]
    script = cli(f"sweep.py {names[-1]} --print-commands")
    expected = commands_of(script, "python experiments/", "asyncsgd train ")
    assert len(expected) == 1  # of the base model, from which the others start
    for name in [*names, "--quick"]:
        door = cli(f"asyncsgd study {name} --print-commands")
        assert commands_of(door, "python ", "asyncsgd train ") == expected
        assert door.err == script.err
        assert "python" not in door.out
    ended = cli("asyncsgd train masked_lm --config experiments/configs/quick.yaml --print-config")
    assert ended.code == 2
    assert "quick.yaml: unknown key 'name'" in ended.err
    assert list(folder.iterdir()) == []


def test_a_file_of_one_s_own_goes_before_a_config_of_the_package(folder):
    small = {"name": "mine", "base": {"samples": 8}, "algorithms": {"one": {"mode": "single"}}, "seeds": [0]}
    Path("configs").mkdir()
    for path in ("quick", "configs/quick.yaml"):
        Path(path).write_text(yaml.safe_dump({**small, "name": path.replace("/", "-")}))
        ended = cli(f"asyncsgd study {path} --dry-run --print-commands")
        assert ended.code == 0, ended.err
        assert ended.out.startswith(f"study  {path.replace('/', '-')}: 1 arm, 1 seed ")
    for path in ("elsewhere/quick.yaml", "quack"):
        ended = cli(f"asyncsgd study {path} --dry-run")
        assert ended.code == 2
        assert f"error: {path} cannot be read " in ended.err


@pytest.mark.parametrize(
    "line", ["--rule help", "--nproc 3 --samples 30 --seed 4", "--nproc 0", "--samplse 3", "--help"]
)
def test_a_simulation_is_the_same_at_both_doors(line, folder):
    ended = [cli(f"{command} {line} --runs-dir runs") for command in ("simulate.py", "asyncsgd simulate")]
    script, door = ended
    said = script.out.replace("python experiments/simulate.py", "asyncsgd simulate")
    said = said.replace("simulate.py", "asyncsgd simulate")
    runs = sorted(folder.glob("runs/*"))
    assert door.code == script.code
    assert door.err == script.err
    assert door.out == (said.replace(runs[0].name, runs[1].name) if runs else said)
    if runs:
        one, other = ((run / "settings.yaml").read_text().splitlines() for run in runs)
        assert other[1:] == one[1:]
        assert (one[0], other[0]) == tuple(
            f"# {command} {line} --runs-dir runs" for command in ("python experiments/simulate.py", "asyncsgd simulate")
        )


def test_a_task_is_checked_from_the_command_line(folder):
    ended = cli("asyncsgd check tasks:Plane --batch-size 4")
    assert ended.code == 0
    assert ended.err == ""
    lines = ended.out.splitlines()
    assert lines[0] == "model  16 numbers are trained"
    assert lines[1].endswith("on the first batch, of weight 4")
    assert lines[-2:] == ["no mistake was found in tasks:Plane", "next   asyncsgd train tasks:Plane"]
    Path("wrong_door.py").write_text(
        "import dataclasses, torch, tasks\n@dataclasses.dataclass(frozen=True)\nclass Wrong(tasks.Plane):\n"
        "    name = 'wrong'\n    def model(self, seed):\n        return torch.nn.Linear(16, 1)\n"
    )
    refused = cli("asyncsgd check wrong_door:Wrong")
    assert refused.code == 2
    assert refused.out == ""
    assert "write `with asyncsgd.seeded(seed):`" in refused.err
    raising = Path("raising.py").absolute()
    line = "return functional.cross_entropy(outputs, batch[1].long())"
    raising.write_text(
        "import tasks\nfrom torch.nn import functional\n"
        f"class Raising(tasks.Plane):\n    def loss(self, outputs, batch):\n        {line}\n"
    )
    told = cli("asyncsgd check raising:Raising")
    assert told.code == 2
    assert told.out == ""
    assert told.err.startswith("error: raising:Raising: RuntimeError: ")
    assert told.err.endswith(f"; mend {raising}:5, in loss: {line}\n")
    assert told.err.count("\n") == 1
    assert "unknown flag --mode" in cli("asyncsgd check tasks:Plane --mode sync").err
    gpu = cli("asyncsgd check tasks:Plane --device gpu")
    assert gpu.code == 2
    assert "--device must be one of auto, cpu, cuda, got 'gpu'" in gpu.err
    if not torch.cuda.is_available():
        assert "torch sees no GPU here" in cli("asyncsgd check tasks:Plane --device cuda").err
    assert list(folder.glob("runs")) == []


def test_the_version_is_one_line(folder):
    assert cli(["asyncsgd", "--version"]) == Ended(0, f"asyncsgd {asyncsgd.__version__}\n", "")


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_without_a_command_every_one_is_listed(words, folder):
    ended = cli(["asyncsgd", *words])
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.startswith(f"asyncsgd {asyncsgd.__version__} in ")
    for command in ("train TASK", "replay RUN", "resume RUN", "export RUN", "predict RUN", "compare RUNS_DIR", "watch"):
        assert f"\n  asyncsgd {command} " in ended.out
    assert "\nto begin: asyncsgd train " in ended.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trian masked_lm", "'trian' is no command of asyncsgd; did you mean 'train'?"),
        ("zzz", "'zzz' is no command of asyncsgd; asyncsgd --help lists them"),
        ("masked_lm --mode async", "'masked_lm' is no command but a task; type asyncsgd train masked_lm"),
        ("train maskd_lm", "; got 'maskd_lm'; did you mean 'masked_lm'?"),
        ("train masked_lm --sampels 3", "unknown flag --sampels; did you mean '--samples'?"),
        ("report nowhere", "nowhere: no such folder; make one: "),
        ("replay nowhere", "nowhere is no folder"),
        ("study", "name a config, e.g. quick, or type --quick"),
        ("study quikc", "quikc cannot be read "),
        ("check maskd_lm", "; got 'maskd_lm'; did you mean 'masked_lm'?"),
    ],
)
def test_a_slip_is_refused_with_what_to_type(line, said, folder):
    ended = cli(f"asyncsgd {line}")
    assert ended.code == 2
    assert ended.out == ""
    assert said in ended.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [*("train", "train causal_lm", "resume", "replay", "export", "predict", "report"), "study", "simulate", "check"],
)
def test_help_names_the_command_as_it_was_typed(command, folder):
    ended = cli(f"asyncsgd {command} --help")
    assert ended.code == 0
    assert ended.out.startswith(f"usage: asyncsgd {command} ")
    assert "python -m" not in ended.out


@pytest.mark.processes
def test_a_training_of_the_module_stops_at_ctrl_c_and_says_how_it_goes_on(folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    line = "train tasks:Plane --clock virtual --samples 100000000 --device cpu --run-dir run"
    command = Command([sys.executable, "-m", "asyncsgd", *line.split()], folder)
    try:
        events = Path("run/events.jsonl")
        until(lambda: events.exists() and events.stat().st_size > 20_000, "it trains")
        os.kill(command.process.pid, signal.SIGINT)
        assert command.process.wait(60) == 130
        assert Finished(Path("run")).summary["status"] == "INTERRUPTED"
        assert "# python -m asyncsgd train tasks:Plane" in Path("run/settings.yaml").read_text()
        assert Path("out.txt").read_text().endswith("\nnext   python -m asyncsgd train tasks:Plane --resume run\n")
        assert command.pids() == []
    finally:
        command.end()


COMPLETED = {
    "tr": ["train"],
    "train ma": ["masked_lm"],
    "train masked_lm --mode async --learning": ["--learning-rate"],
    "train question_answering --max-a": ["--max-answer-length"],
    "train masked_lm --max-a": [],
    "train mine:Spirals --eval-sam": ["--eval-samples"],
    "study qu": ["quick"],
    "study quick --dry": ["--dry-run"],
    "report runs --for": ["--format"],
    "replay last --task points:Line --cache": ["--cache-dir"],
    "completion ": ["bash", "zsh"],
}


def test_a_shell_completes_commands_tasks_configs_and_the_flags_of_each(folder):
    ended = cli("asyncsgd completion bash")
    assert ended.code == 0, ended.err
    lines = [ended.out, 't() { COMP_CWORD=$(($# - 1)); COMP_WORDS=("$@"); _asyncsgd; echo "${COMPREPLY[@]}"; }']
    for line in COMPLETED:
        # The shell takes a colon for a word of its own.
        words = line.replace(":", " : ").split(" ")
        lines.append(shlex.join(["t", "asyncsgd", *words]))
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=60)
    assert dict(zip(COMPLETED, map(str.split, done.stdout.splitlines()), strict=True)) == COMPLETED
    # Both shells read the same table.
    cases = [line for line in ended.out.splitlines() if line.endswith(" ;;")]
    assert [line for line in cli("asyncsgd completion zsh").out.splitlines() if line.endswith(" ;;")] == cases
    assert "invalid choice: 'fish'" in cli("asyncsgd completion fish").err


SCRIPT = """import sys
from asyncsgd.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
"""What pip makes of the entry point."""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(importlib.util.find_spec("setuptools") is None, reason="a wheel is built with setuptools")
def test_the_wheel_alone_trains_studies_and_reports_without_a_network(tmp_path):
    source = tmp_path / "source"
    for name in ("asyncsgd", "analysis"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w"]
    subprocess.run([sys.executable, *build, str(tmp_path), str(source)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("asyncsgd-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as files:
        files.extractall(installed)
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "\nasyncsgd = asyncsgd.__main__:main\n" in entry_points.read_text()
    shutil.rmtree(source)
    script = tmp_path / "asyncsgd"
    script.write_text(SCRIPT)
    empty = tmp_path / "empty"
    empty.mkdir()
    nowhere = "http://127.0.0.1:9"
    environment = os.environ | {"PYTHONPATH": str(installed), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "HF_HUB_OFFLINE": "0"}

    def typed(line):
        words = [sys.executable, str(script), *line.split()]
        done = subprocess.run(words, cwd=empty, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        return done.stdout

    assert typed("--help").startswith(f"asyncsgd {asyncsgd.__version__} in {installed / 'asyncsgd'}\n")
    trained = typed("train masked_lm --samples 64 --mode async --nproc 2 --model tiny")
    assert trained.endswith("\nnext   asyncsgd compare runs\n")
    assert f"\ndata   reading pydocs; what takes long is done once and kept in {tmp_path / 'cache'}" in trained
    assert "async" in typed("compare runs")
    assert typed("replay last").endswith("identical\n")
    planned = typed("study quick --quick --dry-run")
    assert planned.startswith("study  quick: 9 arms, 6 seeds   folder runs/quick\n")
    assert "in all about" in planned
    assert typed("report runs --format sentence")
