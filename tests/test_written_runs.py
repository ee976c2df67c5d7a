"""A run is described once: what its folder holds is the run, whoever asked for it, and in the words of flags."""

import dataclasses
import functools

import pytest
import torch
import yaml
from doors import (
    SGD,
    AdamW,
    AllReduce,
    Asynchronous,
    Exponential,
    Finished,
    Given,
    Hogwild,
    InProcess,
    Join,
    Leave,
    Processes,
    Ringmaster,
    UsageError,
    Virtual,
    asyncsgd,
    cli,
    run_of,
    run_of_folder,
    task_flags,
    text_of,
    train,
    values_of,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tasks import Plane

TASKS = (*asyncsgd.tasks.TASKS, "tasks:Plane")
TEXTS = {
    "rule": ("asynchronous", "synchronous", "ringmaster:threshold=4", "ringmaster:4", "local_sgd:steps=4", "ad_psgd"),
    "speeds": ("constant:1", "exponential", "exponential:2"),
    "network": ("bytes=4e6,worker=1e8,server=1e9",),
    "churn": ("leave:worker=0,seconds=5;join:worker=0,seconds=9",),
    "evaluate_every": ("100", "1epoch"),
}


OF_KINDS = {bool: ("true",), int: (2, 4, 100), float: (0.25, 0.5)}


def class_of(task):
    if task == "tasks:Plane":
        return Plane
    return asyncsgd.tasks.task_class(task)


@st.composite
def command_lines(draw):
    """A task, and some of its flags with values that are each within bounds."""
    task = draw(st.sampled_from(TASKS))
    specs = task_flags(class_of(task)).specs.values()
    mode = draw(st.sampled_from(["single", "sync", "async", "hogwild", "pipeline"]))
    typed = [f"--mode={mode}", "--nproc=2"]
    if draw(st.booleans()):
        typed.append("--clock=virtual")
    some_specs = st.lists(st.sampled_from(sorted(specs)), max_size=4, unique_by=lambda spec: spec.name)
    for spec in draw(some_specs):
        values = spec.choices or TEXTS.get(spec.name) or OF_KINDS.get(spec.kind)
        if values is not None:
            typed.append(f"{spec.flag}={draw(st.sampled_from(values))}")
    return task, typed


@given(command_lines())
@settings(deadline=None, max_examples=150)
def test_what_a_command_line_asks_for_is_what_its_folder_holds(tmp_path_factory, line):
    task, typed = line
    kind = class_of(task)
    try:
        parsed = task_flags(kind).parse(typed, prog="", description="", examples="").settings
        run = run_of("name", parsed)
    except UsageError:
        assume(False)
    folder = tmp_path_factory.mktemp("run")
    (folder / "settings.yaml").write_text(text_of(run, "a command"))
    again = run_of_folder(folder, Given(kind))
    assert again == dataclasses.replace(run, output=again.output)
    by_file = task_flags(kind).parse([f"--config={folder / 'settings.yaml'}"], prog="", description="", examples="")
    assert dataclasses.replace(by_file.settings, output=parsed.output) == parsed


class Mine(Asynchronous):
    """A rule of one's own."""


ASKED = [
    {"optimizer": SGD(0.9), "warmup": 0.25, "schedule": "cosine"},
    {"optimizer": AdamW((0.8, 0.99)), "target_loss": -3.0},
    {"runtime": InProcess(accumulate=2)},
    {"runtime": Virtual(3, Exponential(2.0), churn=(Leave(1, 4.0), Join(1, 9.0))), "rule": Ringmaster(4)},
    {"runtime": Virtual(2), "precision": "bf16", "evaluate_every": 40, "clip_norm": 1.0},
    {"optimizer": functools.partial(torch.optim.RMSprop, alpha=0.9), "rule": Mine(), "runtime": Virtual(2)},
    {"runtime": Processes(2, via="process_group"), "seed": 3},
    {"runtime": AllReduce(2), "keep_best": True},
    {"runtime": Hogwild(2, share_state=True)},
]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: "-".join(asked))
def test_what_python_asks_for_is_what_its_folder_holds(tmp_path, asked):
    train(Plane(batch_size=4), samples=8, folder=tmp_path / "run", quiet=True, device="cpu", **asked)
    own = {}
    if isinstance(asked.get("rule"), Mine):
        own = {"rule": asked["rule"], "optimizer": asked["optimizer"]}
    run = run_of_folder(tmp_path / "run", Given(Plane, **own))
    assert run.task == Plane(batch_size=4)
    assert run.runtime == asked.get("runtime", InProcess())
    assert run.recipe.build == asked.get("optimizer", AdamW())
    assert values_of(run) == Finished(tmp_path / "run").settings
    for name in ("schedule", "warmup", "clip_norm"):
        if name in asked:
            assert getattr(run.steps, name) == asked[name]
    if own:
        with pytest.raises(UsageError, match="the run's rule is not one of the library's"):
            run_of_folder(tmp_path / "run", Given(Plane))
        ended = cli(f"train.py tasks:Plane --resume {tmp_path / 'run'} --samples 16")
        assert "the rule and the optimizer of the run are the user's own, which no flag can give" in ended.err


def test_python_and_a_command_line_write_the_same_settings(tmp_path):
    line = "--mode async --clock virtual --nproc 3 --speeds exponential:mean=2.0"
    line += f" --rule {Ringmaster(4)} --optimizer sgd --momentum .5"
    line += f" --samples 8 --batch-size 4 --device cpu --run-dir {tmp_path / 'typed'}"
    assert cli(f"train.py tasks:Plane {line}").code == 0
    asked = {"rule": Ringmaster(4), "optimizer": SGD(0.5), "samples": 8, "device": "cpu", "folder": tmp_path / "asked"}
    train(Plane(batch_size=4), runtime=Virtual(3, Exponential(2.0)), quiet=True, **asked)
    typed = Finished(tmp_path / "typed").settings
    asked = Finished(tmp_path / "asked").settings
    assert typed.pop("experiment") == "plane"
    assert asked.pop("experiment") == "train"
    assert typed == asked


@dataclasses.dataclass(frozen=True)
class Seeded(Plane):
    """A task with a field that is called as a setting of every run."""

    name = "seeded"
    seed: int = 1


def test_a_field_that_is_called_as_a_setting_of_every_run_stays_the_task_s(tmp_path):
    train(Seeded(seed=7), samples=8, seed=3, folder=tmp_path / "run", quiet=True)
    run = run_of_folder(tmp_path / "run", Given(Seeded))
    assert run.task.seed == 7
    assert run.seed == 3
    assert asyncsgd.load(tmp_path).runs["seed"].tolist() == [3]


def test_a_script_s_run_goes_on_in_python_and_one_of_python_by_a_script(tmp_path):
    more = {"checkpoint_every": 8, "device": "cpu", "quiet": True, "learning_rate": 0.02, "evaluations": 2}
    whole = train(Plane(batch_size=4), samples=16, **{**more, "checkpoint_every": None})
    line = "train.py tasks:Plane --batch-size 4 --learning-rate .02 --evaluations 2 --checkpoint-every 8 --device cpu"
    assert cli(f"{line} --samples 8 --run-dir {tmp_path / 'typed'}").code == 0
    train(Plane(batch_size=4), samples=8, folder=tmp_path / "asked", **more)
    longer = train(Plane(batch_size=4), samples=16, folder=tmp_path / "typed", resume=True, **more)
    assert longer.summary["parameters_sha256"] == whole.summary["parameters_sha256"]
    assert cli(f"train.py tasks:Plane --resume {tmp_path / 'asked'} --samples 16").code == 0
    assert asyncsgd.load_run(tmp_path / "asked").summary["parameters_sha256"] == whole.summary["parameters_sha256"]


def test_a_setting_that_an_older_folder_lacks_is_its_default(tmp_path):
    more = {"folder": tmp_path / "run", "checkpoint_every": 8, "device": "cpu", "quiet": True}
    train(Plane(), samples=8, **more)
    settings = Finished(tmp_path / "run").settings
    del settings["keep_best"]
    (tmp_path / "run" / "settings.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(UsageError, match="keep_best False -> True"):
        train(Plane(), samples=16, resume=True, keep_best=True, **more)
    assert train(Plane(), samples=16, resume=True, **more).status == "DONE"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"batch_size": "x"}, "--batch-size must be a whole number, got 'x'"),
        ({"seq_len": -5}, "--seq-len must be 8 or more, got -5"),
        ({"model": 7}, "--model must be text, got 7"),
        ({"mode": [1]}, r"--mode must be text, got \[1\]"),
        ({"threads": "two"}, "--threads must be a whole number, got 'two'"),
        ({"task": 5}, "task is 5, and a folder is not believed about code; type --task MODULE:CLASS"),
        ({"width": 8}, "MaskedLM has other fields: it has no width"),
        ({"settings_format": "2"}, "in format '2', of an older asyncsgd, and this one reads format 2"),
        ({"experiment": "simulate"}, "holds a simulation, which has no task and no checkpoint"),
    ],
    ids=str,
)
def test_a_damaged_setting_is_refused_by_its_flag(tmp_path, damage, told):
    whole = {"settings_format": 2, "task": "masked_lm", "mode": "single", "seed": 3}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(whole))
    assert run_of_folder(tmp_path, Given()).seed == 3
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(whole | damage))
    with pytest.raises(UsageError, match=told):
        run_of_folder(tmp_path, Given())
