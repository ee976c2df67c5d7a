"""``train.py TASK`` as a user meets it: settings, own tasks, runs that are named, and ``python -m asyncsgd``."""

from pathlib import Path

import pytest
import yaml
from doors import Finished, asyncsgd, cli
from gallery import sentences
from marks import slow


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with a text in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text(sentences(100, seed=0))
    return tmp_path


SMALL = (
    "--data text.txt --cache-dir cache --seq-len 24 --batch-size 4 --vocab-size 320 --samples 48 --warmup 0 "
    "--evaluations 2 --learning-rate 3e-3"
)


def test_the_rules_can_be_listed(folder):
    ended = cli("train.py causal_lm --rule help")
    assert ended.code == 0
    assert "ringmaster" in ended.out
    assert not Path("runs").exists()


def test_a_run_is_made_again_from_its_settings_and_not_over_itself(folder):
    line = f"train.py causal_lm {SMALL} --mode single --run-dir first"
    assert cli(line).code == 0
    again = cli(line)
    assert again.code == 2
    assert "first holds this run already, DONE; type another --run-dir, or --overwrite" in again.err
    copy = cli("train.py causal_lm --cache-dir cache --config first/settings.yaml")
    assert "next   python -m analysis compare runs" in copy.out
    (run,) = map(Finished, Path("runs").iterdir())
    assert run.path.name.startswith("causal_lm-single-w1-s0-")
    assert run.summary["parameters_sha256"] == Finished(Path("first")).summary["parameters_sha256"]
    printed = yaml.safe_load(cli(f"train.py causal_lm --config {run.path}/settings.yaml --print-config").out)
    about = {"settings_format": 2, "experiment": "causal_lm", "task": "causal_lm"}
    assert (printed | about).items() >= run.settings.items() >= about.items()

    # A run is named by how it begins, and may go on, be trained further, be exported and be replayed.
    assert cli("train.py causal_lm --cache-dir cache --resume last --samples 96").code == 2  # it has no checkpoint
    more = SMALL.replace(" --vocab-size 320", "")
    assert cli(f"train.py causal_lm {more} --samples 0 --run-dir more --model runs/causal_lm").code == 0
    assert Finished(Path("more")).settings["model"] == str(run.path)
    assert Finished(Path("more")).summary["parameters_sha256"] == run.summary["parameters_sha256"]
    assert cli("asyncsgd export last --out model").code == 0
    assert Path("model/model.safetensors").read_bytes() == (run.path / "model" / "model.safetensors").read_bytes()
    assert cli("asyncsgd replay causal --cache-dir cache").out.endswith("identical\n")


OWN = """
import dataclasses, torch, asyncsgd

@dataclasses.dataclass(frozen=True)
class Line(asyncsgd.Task):
    "A line through points."
    name = "line"
    batch_size: int = 10
    slope: float = 3.0

    def model(self, seed):
        with asyncsgd.seeded(seed):
            return torch.nn.Linear(1, 1)

    def data(self, seed):
        x = torch.linspace(-1.0, 1.0, 40).unsqueeze(1)
        return asyncsgd.TensorData((x, self.slope * x), (x, self.slope * x), self.batch_size, seed)

    def outputs(self, model, batch):
        return model(batch[0])

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()
"""


def test_a_task_of_one_s_own_needs_no_script(folder):
    (folder / "points.py").write_text(OWN)
    line = "train.py points:Line --clock virtual --nproc 3 --times exponential:1 --samples 200 --slope 2 --device cpu"
    line += " --checkpoint-every 100"
    ended = cli(line)
    assert ended.code == 0, ended.err
    (run,) = map(Finished, Path("runs").iterdir())
    assert run.settings["slope"] == 2.0
    assert run.summary["experiment"] == "line"
    assert run.summary["num_workers"] == 3
    assert "A line through points." in cli("train.py points:Line --help").out
    assert cli("asyncsgd replay last --task points:Line").out.endswith("identical\n")
    believed = "the run's task is points:Line, and a folder is not believed about code; type --task points:Line"
    assert believed in cli("asyncsgd replay last").err
    export = f"asyncsgd export {run.path} --out out --checkpoint 000000000200"
    assert believed in cli(export).err
    assert cli(f"{export} --task points:Line").code == 0
    assert Path("out/model.safetensors").read_bytes() == (run.path / "model/model.safetensors").read_bytes()


@pytest.mark.parametrize(("command", "code"), [("", 0), ("--help", 0), ("replay", 2), ("raplay", 2)])
def test_python_m_asyncsgd_says_what_there_is(command, code, folder):
    ended = cli(["asyncsgd", *command.split()])
    assert ended.code == code
    assert "replay" in ended.out + ended.err
    assert code or ended.out.startswith(f"asyncsgd {asyncsgd.__version__} in ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":A", "type my_task:A"),
        ("points:", "type points:CLASS"),
        ("points.py:Line", "type points:Line"),
        ("./points.py:Line", "type points:Line"),
        ("my-task.v2:Mine", "put the task into my_task_v2.py in this folder"),
        ("..points:Line", "letters, digits and _"),
        ("points:Lime", "module 'points' has no attribute 'Lime'"),
    ],
)
def test_what_names_no_class_in_a_module_is_refused_with_what_to_type(name, words, folder):
    (folder / "points.py").write_text(OWN)
    ended = cli(f"train.py {name}")
    assert ended.code == 2, ended.err
    assert words in ended.err, ended.err


@pytest.mark.parametrize("typed", ["--mode sync --rule asynchronous", "--rule=asynchronous --mode pipeline --nproc 2"])
def test_a_rule_that_is_typed_for_a_synchronous_mode_is_refused_though_it_is_the_default(typed, folder):
    ended = cli(f"train.py causal_lm --micro-batches 4 --clip-norm 0 {typed}")
    assert ended.code == 2, ended.err
    assert "--rule asynchronous is for --mode async" in ended.err, ended.err


@pytest.mark.parametrize("backend", ["module://matplotlib_inline.nowhere", *slow("nonsense")])
def test_pictures_are_drawn_whatever_backend_a_notebook_has_named(backend, folder, monkeypatch):
    (folder / "points.py").write_text(OWN)
    line = "train.py points:Line --clock virtual --nproc 2 --times exponential:1 --samples 60 --device cpu"
    assert cli(f"{line} --run-dir runs/a").code == 0
    monkeypatch.setenv("MPLBACKEND", backend)
    for command in ("compare runs", "timeline runs/a"):
        ended = cli(f"analysis.{command}", alone=True)
        assert ended.code == 0, ended.err
    assert Path("runs/figures/loss_vs_samples.png").is_file()
