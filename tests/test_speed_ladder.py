"""A speed ladder as a study: how its plan grows, what it refuses, the naive loop as a run, and that the notebook walks
it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from commands import Command, until
from doors import Ended, cli
from gallery import sentences

from analysis.ladder import read
from asyncsgd.core.signals import StopRequest
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_events
from asyncsgd.settings.shipped import CONFIGS
from asyncsgd.studies.config import LadderConfig, read_config, typed
from asyncsgd.studies.ladder import DIVERGED, DOES_NOT_PAY, NO_MEMORY, PAYS, Devices, climb, grown, stacks_of
from asyncsgd.studies.naive_loop import masked, naive_loop
from asyncsgd.studies.overlay import quick_of, with_setting
from asyncsgd.studies.plan import make_plan
from asyncsgd.studies.progress import Progress
from asyncsgd.studies.runner import PlannedJob, Runner
from asyncsgd.studies.study_folder import StudyFolder

NOTEBOOK = Path(__file__).resolve().parents[1] / "docs" / "speed_ladder.ipynb"
TWO_CORES = Devices("cpu", 2, 2)
FIRST = "batches-padded-to-their-longest-text"


def config_of(*settings, is_quick=True):
    """The shipped config with some settings."""
    config = read_config(CONFIGS / "speed_ladder.yaml")
    if is_quick:
        config = quick_of(config, "speed_ladder.yaml")
    for setting in settings:
        config = with_setting(config, setting)
    return typed(config, LadderConfig, "speed_ladder.yaml")


def verdicts(**words):
    """A verdict for each rung that is named, by the beginning of its folder; the others are not measured yet."""

    def verdict(before, after):
        rung = after.name.split("/")[1]
        return next((word for name, word in words.items() if rung.startswith(name.replace("_", "-"))), "")

    return verdict


ALL_PAY = verdicts(
    **dict.fromkeys(["batches", "bf16", "fp16", "2", "activations", "DataParallel", "dataparallel"], PAYS),
    **dict.fromkeys(["synchronous", "asynchronous", "compiled"], PAYS),
)


def test_a_rung_that_does_not_pay_or_has_no_memory_is_not_in_the_stack_of_the_next_one():
    verdict = verdicts(
        batches_padded=DOES_NOT_PAY,
        batches_of_similar=PAYS,
        batches_of_32=NO_MEMORY,
        bf16=DOES_NOT_PAY,
        batches_made=DIVERGED,
    )
    found = climb(config_of(), "masked_lm", TWO_CORES, verdict)
    words = [(one.rung.name, one.word) for one in found.rungs if not one.word.startswith("it is for cuda")]
    assert words == [
        ("batches padded to their longest text", DOES_NOT_PAY),
        ("batches of similar lengths", PAYS),
        ("batches of 32", NO_MEMORY),
        ("bf16", DOES_NOT_PAY),
        ("batches made ahead", DIVERGED),
        ("2 micro-batches", ""),
    ]
    first, *_, last = found.rungs
    assert (first.before.loop, first.after.loop) == ("naive", "library")
    assert last.before.settings["sampling"] == "group_by_length"  # the first rung stays, though it does not pay
    assert last.before.settings["batch_size"] == 16
    assert not {"precision", "prefetch", "micro_batches"} & last.before.settings.keys()
    assert {**last.before.settings, "micro_batches": 2} == last.after.settings
    assert found.proof == []


def test_the_stacks_of_the_proof_begin_with_what_leaves_updates_as_they_were():
    found = climb(config_of(), "classification", TWO_CORES, ALL_PAY)
    names = [[rung.name for rung in stack] for stack, _ in found.proof]
    naive, safe, *others = names
    assert naive == []
    assert safe == [
        *("batches padded to their longest text", "bf16", "batches made ahead", "2 micro-batches"),
        *("activations computed again", "synchronous workers"),
    ]
    added = ["batches of similar lengths", "batches of 32", "asynchronous workers"]
    assert others == [[*safe, *added[:1]], [*safe, *added[:2]], [*safe, *added]]
    assert [arm.name.rpartition("/")[2] for _, arm in found.proof] == [
        "naive",
        "stack-0",
        "stack-1",
        "stack-2",
        "stack-3",
    ]
    assert stacks_of([]) == [[]]


def test_a_larger_batch_has_a_rate_larger_by_the_square_root_and_workers_share_batch_and_cores():
    found = climb(config_of(), "masked_lm", TWO_CORES, ALL_PAY)
    seen = []
    for _, arm in found.proof:
        values = arm.settings
        seen.append((values["mode"], values["batch_size"], values["learning_rate"], values["threads"]))
    rate = 1e-3 * 2**0.5
    assert seen == [
        ("single", 16, 1e-3, 2),
        ("sync", 8, 1e-3, 1),
        ("sync", 8, 1e-3, 1),
        ("sync", 16, rate, 1),
        ("async", 32, rate, 1),
    ]
    assert {arm.settings["samples"] for _, arm in found.proof} == {96}
    assert {one.after.settings["samples"] for one in found.rungs} == {256 + 16}


@pytest.mark.parametrize(
    ("devices", "left_out"),
    [
        (
            Devices("cpu", 1, 1),
            {
                "batches of 128": "it is for cuda, and this is cpu",
                "fp16": "it is for cuda, and this is cpu",
                "DataParallel": "it is for cuda, and this is cpu",
                "synchronous workers": "it needs 2 cores, and here are 1",
                "asynchronous workers": "it needs 2 cores, and here are 1",
            },
        ),
        (
            Devices("cuda", 1, 8),
            {
                "batches of 32": "it is for cpu, and this is cuda",
                "DataParallel": "it needs 2 GPUs, and here are 1",
                "synchronous workers": "it needs 2 GPUs, and here are 1",
                "asynchronous workers": "it needs 2 GPUs, and here are 1",
            },
        ),
        (Devices("cuda", 4, 8), {"batches of 32": "it is for cpu, and this is cuda"}),
    ],
    ids=["1-core", "1-gpu", "4-gpus"],
)
def test_a_rung_that_the_devices_cannot_do_is_left_out_with_the_reason(devices, left_out):
    found = climb(config_of(is_quick=False), "masked_lm", devices, ALL_PAY)
    assert {one.rung.name: one.word for one in found.rungs if one.word != PAYS} == left_out
    last = found.proof[-1][1].settings
    assert last.get("nproc") == (4 if devices.number == 4 else None)
    assert ("data_parallel" in last) is False


def test_a_rung_for_other_devices_is_left_out_also_where_no_rung_is_kept_yet():
    found = climb(config_of(), "masked_lm", TWO_CORES, lambda before, after: NO_MEMORY)
    words = {one.word for one in found.rungs if one.rung.device == "cuda"}
    assert words == {"it is for cuda, and this is cpu"}


def test_what_the_config_leaves_out_is_not_planned_and_a_box_that_no_rung_has_is_refused():
    found = grown(config_of("ladder.leave_out={Length buckets: too few texts}"), TWO_CORES, ALL_PAY)
    assert found.words["masked_lm, batches of similar lengths"] == "left out: too few texts"
    assert "too long for --quick" in found.words["masked_lm, compiled loss"]
    assert not [run for run in found.runs if "similar" in run.folder or "compiled" in run.folder]
    with pytest.raises(UsageError, match="no rung has the box 'Length bucket'; did you mean 'Length buckets'"):
        config_of("ladder.leave_out={Length bucket: x}")


def test_the_plan_that_grows_keeps_all_that_was_planned_and_is_the_same_again():
    words = {}
    planned = []
    for name in ("batches_padded", "batches_of_similar", "batches_of_32", "bf16", "batches_made", "2", "activations"):
        runs = grown(config_of(), TWO_CORES, verdicts(**words)).runs
        assert runs == grown(config_of(), TWO_CORES, verdicts(**words)).runs
        assert {*planned} < {*runs}
        planned = runs
        words[name] = PAYS
    assert {run.stage for run in planned} == {"climb"}
    whole = grown(config_of(), TWO_CORES, ALL_PAY)
    assert {*planned} < {*whole.runs}
    assert {arm.name for arm in whole.arms} == {run.arm for run in whole.runs}
    assert len({run.folder for run in whole.runs}) == len(whole.runs)
    proof = [run for run in whole.runs if run.stage == "proof"]
    assert len(proof) == 2 * 2 * 5  # tasks, seeds, the naive loop and four stacks


def test_within_a_turn_the_sides_come_in_an_order_of_its_own():
    runs = grown(config_of("ladder.turns=16"), TWO_CORES, verdicts()).runs
    of_task = [run for run in runs if run.folder.startswith("masked_lm/")]
    for turn in range(16):
        assert {run.seed for run in of_task[2 * turn : 2 * turn + 2]} == {turn}
    first = ["/before/" in run.folder for run in of_task[::2]]
    assert 0 < sum(first) < 16


def test_a_plan_knows_no_runs_before_it_has_a_folder_and_its_hash_is_that_of_its_config():
    config = quick_of(read_config(CONFIGS / "speed_ladder.yaml"), "speed_ladder.yaml")
    plan = make_plan(config)
    assert (plan.runs, plan.name) == ((), "speed_ladder-quick")
    assert plan.config_sha256 != make_plan(with_setting(config, "ladder.turns=4")).config_sha256


def test_runs_of_a_ladder_read_the_texts_that_it_has_made_for_their_stage(tmp_path):
    folder = StudyFolder(make_plan(read_config(CONFIGS / "speed_ladder.yaml")), "", tmp_path)
    run = next(run for run in folder.plan.runs if run.folder.startswith("masked_lm/"))
    texts = tmp_path / "texts/masked_lm/climb"
    assert folder.job(run).values.get("data") != str(texts)
    texts.mkdir(parents=True)
    assert folder.job(run).values["data"] == str(texts)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--jobs", "2"], "the runs of a speed ladder are timed against each other, one at a time"),
        (["--shard", "1/2"], "which come next follows from all before them"),
        (["--print-commands"], "leave --jobs, --shard and --print-commands out"),
        (["--set", "ladder.tasks.masked_lm.margin=0"], "margin: expected a number > 0.0"),
        (
            ["--set", "ladder.rungs=[{name: A b, box: x}, {name: a-b, box: y}]"],
            "rungs: 'A b' and another one",
        ),
        (["--set", "seeds=[1, 1]"], "seeds must name each seed once, they share [1]"),
        (["--set", "ladder.turn=2"], "there is no 'turn' there; did you mean 'turns'"),
        (["--set", "base.batch_size="], "write batch_size into base, or into the settings of classification"),
        (["--set", "base.batch_sizes=3"], "batch_sizes"),
    ],
    ids=["jobs", "shard", "commands", "margin", "names", "seeds", "key", "missing", "setting"],
)
def test_what_a_ladder_cannot_do_is_refused_with_the_reason(tmp_path, words, told):
    ended = cli(["speed_ladder.py", "--quick", "--out", str(tmp_path / "out"), *words])
    assert ended.code == 2
    assert told in ended.err
    assert not (tmp_path / "out").exists()


def test_a_ladder_that_was_begun_on_another_machine_is_refused(tmp_path):
    machine = {"gpus": [], "cpu": "another one", "cores": 2, "versions": {}}
    (tmp_path / "facts.json").write_text(json.dumps({"machine": machine, "tasks": {}}))
    ended = cli(["speed_ladder.py", "--quick", "--out", str(tmp_path), "--dry-run"])
    assert ended.code == 2
    assert "was begun with another " in ended.err
    assert "type another --out" in ended.err


def test_the_command_of_a_naive_run_goes_on_with_the_study_in_its_folder():
    job = PlannedJob("masked_lm/proof/naive/s0", "masked_lm", {}, out=Path("my runs"), loop="naive")
    assert job.command == ["asyncsgd", "study", "my runs/config.yaml", "--out", "my runs"]


def test_a_naive_run_whose_loss_is_not_finite_has_diverged(tmp_path):
    (tmp_path / "train.txt").write_text(sentences(40, seed=0))
    values = {"vocab_size": 512, "seq_len": 16, "batch_size": 4, "eval_samples": 4}
    values |= {"learning_rate": 1e30, "samples": 32, "mode": "single", "device": "cpu"}
    for name, folder in (("data", "train.txt"), ("cache_dir", "cache"), ("run_dir", "naive")):
        path = tmp_path / folder
        values[name] = str(path)
    job = PlannedJob("naive", "masked_lm", values, out=tmp_path, loop="naive")
    threads = torch.get_num_threads()
    Runner(None, StopRequest(), None, Progress([], 0, 1)).run([job])
    torch.set_num_threads(threads)
    summary = json.loads((job.path / "summary.json").read_text())
    assert summary["status"] == "DIVERGED"
    assert summary["num_samples"] < 32


def test_the_naive_loop_predicts_15_of_100_words_and_no_special_ones():
    class Words:
        all_special_ids = (0, 1, 4)
        mask_token_id = 4

        def __len__(self):
            return 100

    input_ids = torch.randint(5, 100, (64, 200), generator=torch.Generator().manual_seed(0))
    input_ids[:, 100:] = 0
    with torch.random.fork_rng():
        torch.manual_seed(0)
        changed, labels = masked(input_ids, Words())
    chosen = labels != -100
    assert not chosen[:, 100:].any()
    assert chosen[:, :100].float().mean().item() == pytest.approx(0.15, abs=0.01)
    assert torch.equal(labels[chosen], input_ids[chosen])
    assert torch.equal(changed[~chosen], input_ids[~chosen])
    assert (changed[chosen] == 4).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (changed[chosen] == input_ids[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.02)


def words():
    """What is typed for a small ladder of both tasks, whose data are made in this folder; three rungs are left out."""
    Path("text.txt").write_text(sentences(120, seed=0))
    rows = [f"{line},{'AB'[number % 2]}" for number, line in enumerate(sentences(120, seed=1).splitlines())]
    Path("labelled").mkdir()
    for side, part in (("train", rows[:90]), ("test", rows[90:])):
        Path("labelled", f"{side}.csv").write_text("\n".join(["text,label", *part]))
    left_out = ("Mixed precision", "Gradient checkpointing", '"Loaders, pinned memory"', "Gradient accumulation")
    settings = [
        *("ladder.turns=2", "ladder.samples=32", "ladder.warmup=16", "ladder.eval_samples=16"),
        *("ladder.tasks.classification.samples=64", "ladder.tasks.masked_lm.samples=64"),
        *("ladder.tasks.classification.data=[labelled]", "ladder.tasks.masked_lm.data=[text.txt]"),
        *("base.device=cpu", "base.cache_dir=cache", "base.seq_len=64"),
        *(f"ladder.leave_out={{{box}: not here}}" for box in left_out),
    ]
    typed = ["speed_ladder", "--quick", "--out", "out"]
    for setting in settings:
        typed += ["--set", setting]
    return typed


def planned():
    """The folders of the runs of plan.json, in their order."""
    return [run["folder"] for run in json.loads(Path("out/plan.json").read_text())["runs"]]


def finished():
    """When each run that has ended wrote its summary."""
    return {file.parent: file.stat().st_mtime_ns for file in Path("out").rglob("summary.json")}


class Climbed(NamedTuple):
    """A small ladder of both tasks that was killed twice and has then ended."""

    folder: Path
    plans: list[set[str]]
    """The folders of the runs that were planned at each kill."""
    before: dict[Path, int]
    """What had `finished` at the second kill."""
    ended: Ended


@pytest.fixture(scope="module")
def climbed_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ladder")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.chdir(folder)
        line = words()
        plans = []
        for number in (3, 20):
            running = Command([sys.executable, "-m", "asyncsgd", "study", *line], folder)
            try:
                until(lambda number=number: len(finished()) >= number, f"{number} runs", 600)
            finally:
                running.end()
            plans.append({*planned()})
        before = finished()
        return Climbed(folder, plans, before, cli(["asyncsgd", "study", *line]))


@pytest.fixture
def climbed(climbed_once, monkeypatch):
    """A ladder, in whose folder this process is."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(climbed_once.folder)
    return climbed_once


@pytest.mark.slow
@pytest.mark.processes
def test_a_naive_run_is_the_plain_loop_bit_for_bit_and_is_recorded_as_every_run_is(climbed):
    folder = Path("out/masked_lm") / FIRST / "before/s0"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["status"], summary["experiment"], summary["num_samples"]) == ("DONE", "naive_loop", 48)
    arrivals = [record for record in read_events(folder / "events.jsonl") if record["kind"] == "arrival"]
    assert [record["total_samples"] for record in arrivals] == [16, 32, 48]

    from transformers import AutoTokenizer

    from asyncsgd.core.flat import FlatModel, parameters_sha256

    texts = "out/texts/masked_lm/climb"
    values = {"data": texts, "vocab_size": 4096, "eval_samples": 0, "seq_len": 64, "dropout": 0.1}
    task = PlannedJob("", "masked_lm", values).settings.task.prepare(0, Path("cache"))
    model = task.model(0)
    lines = Path(texts, "train.jsonl").read_text().splitlines()
    rows = [json.loads(line)["text"] for line in lines]
    losses = []
    tokenizer = AutoTokenizer.from_pretrained(task.known["tokenizer"])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    naive_loop(
        rows, None, tokenizer, model, 1e-3, 48, 0, "cpu", lambda samples, loss, seconds: losses.append(loss), seq_len=64
    )
    torch.set_num_threads(threads)
    assert [record["loss"] for record in arrivals] == losses
    flat = FlatModel(model)
    assert parameters_sha256(flat.layout, flat.parameters) == summary["parameters_sha256"]


@pytest.mark.slow
@pytest.mark.processes
def test_a_small_ladder_of_both_tasks_that_is_killed_goes_on_with_its_plan_and_is_reported(climbed):
    assert climbed.ended.code == 0, climbed.ended.err
    assert climbed.before.items() <= finished().items()
    first, second = climbed.plans
    assert first <= second <= {*planned()}
    made = {folder.relative_to("out").as_posix() for folder in finished() if ".before-" not in str(folder)}
    assert made == {*planned()}
    assert "report.html" in climbed.ended.out
    assert not Path("out/ladder.json").exists()
    found = read(Path("out"))
    assert [ladder.given["task"] for ladder in found.ladders] == ["classification", "masked_lm"]
    for ladder in found.ladders:
        for told in ladder.not_compared:
            assert ": the seconds of " in told
            assert "other programs used" in told
        left_out = ladder.rungs[ladder.rungs["box"] == "Mixed precision"]
        assert [*left_out["reason"]] == ["left out: not here"] * 2
        assert (ladder.rungs["reason"][ladder.rungs["word"] == "not measured"] != "").all()
        assert len(ladder.naive) == 2
        assert len(ladder.final.trainings) == 2
        assert ladder.final is ladder.stacks[-1]
        assert ladder.final.word == "too few seeds"
    reported = subprocess.run([sys.executable, "-m", "analysis", "speed_ladder", "out"], capture_output=True, text=True)
    for part in ("TRAINING SPEED COMPARISON", "Theoretical speed-up", "2 seeds are too few", "Before and after"):
        assert part in reported.stdout
    assert "Theoretical speed-up" in Path("out/report.html").read_text()
    first, *cells = notebook()  # the first cell climbs the whole quick ladder
    program = "\n\n".join(["from pathlib import Path\nimport asyncsgd\nOUT = Path('out')", *cells])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "TRAINING SPEED COMPARISON" in done.stdout
    (flags,) = re.findall(r"^FLAGS = (.*)$", first, re.MULTILINE)
    assert cli(["asyncsgd", "study", "speed_ladder", *ast.literal_eval(flags), "--dry-run", "--out", "other"]).code == 0


def notebook():
    """The code cells."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in code)
    for cell in code:
        compile("".join(cell["source"]), NOTEBOOK.name, "exec")
