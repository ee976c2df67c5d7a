"""A task's settings of any type that can be written come back as they were: from flags, YAML, a resume and a replay."""

import dataclasses
import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from doors import (
    Finished,
    UsageError,
    cli,
    fields_of,
    flags_of,
    load_run,
    read_fields,
    replay,
    setting,
    task_flags,
    train,
)
from tasks import Plane


class Activation(enum.Enum):
    TANH = "tanh"
    RELU = "relu"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass(frozen=True)
class Wide(Plane):
    name = "wide"
    layers: tuple[int, ...] = (8, 8)
    pair: tuple[int, str] = (3, "a")
    shares: list[float] = dataclasses.field(default_factory=lambda: [0.5])
    words: tuple[str, ...] = ()
    any_list: list = dataclasses.field(default_factory=list)
    act: Activation = Activation.TANH
    level: Level | None = None
    where: Path = Path("here")
    places: tuple[Path, ...] = ()
    limit: int | str = 3
    rate: float | None = 0.5
    sizes: int | tuple[int, ...] = 4
    power: Literal[1, 2] = 1
    widths: tuple[int, ...] = setting((4,), "of layers", at_least=2)


GIVEN = [
    ("layers", "4,16,", (4, 16)),
    ("layers", "4", (4,)),
    ("layers", "", ()),
    ("pair", "5, b", (5, "b")),
    ("shares", "0.25,1e-4", [0.25, 1e-4]),
    ("words", "one,two", ("one", "two")),
    ("any_list", "a,b", ["a", "b"]),
    ("act", "relu", Activation.RELU),
    ("level", "2", Level.HIGH),
    ("level", "none", None),
    ("where", "there/below", Path("there/below")),
    ("places", "a,b/c", (Path("a"), Path("b/c"))),
    ("limit", "12", 12),
    ("limit", "all", "all"),
    ("rate", "none", None),
    ("rate", "2", 2.0),
    ("sizes", "5", 5),
    ("sizes", "5,6", (5, 6)),
    ("power", "2", 2),
    ("widths", "2,3", (2, 3)),
]


def typed(*flags):
    return task_flags(Wide).parse(flags, prog="", description="", examples="").settings.task


def same(one, other):
    """Equal and of the same types, also within lists and tuples."""
    return repr(one) == repr(other)


@pytest.mark.parametrize(("name", "text", "value"), GIVEN, ids=lambda one: str(one))
def test_a_flag_yaml_and_a_run_folder_give_the_same_value_of_the_same_type(name, text, value, tmp_path):
    flags = task_flags(Wide)
    expected = dataclasses.replace(Wide(), **{name: value})
    assert same(typed(f"--{name.replace('_', '-')}={text}"), expected)
    assert same(typed(*flags_of({name: value}, flags.specs)), expected)
    settings = dataclasses.replace(flags.make({}), task=expected)
    (tmp_path / "settings.yaml").write_text(flags.to_yaml(settings))
    assert same(typed("--config", str(tmp_path / "settings.yaml")), expected)
    recorded = yaml.safe_load(yaml.safe_dump(fields_of(expected)))
    assert same(Wide(**read_fields(Wide, recorded)), expected)


def test_text_that_looks_like_a_number_stays_text_in_a_file(tmp_path):
    flags = task_flags(Wide)
    settings = flags.make({"limit": "12"})
    (tmp_path / "settings.yaml").write_text(flags.to_yaml(settings))
    assert typed("--config", str(tmp_path / "settings.yaml")).limit == "12"


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--layers=4,x", r"--layers must be tuple\[int, ...\], got '4,x' \(Expected `int`, got `str` - at `\$\[1\]`\)"),
        ("--pair=4", "--pair must be .* length 2"),
        ("--act=sigmoid", "--act must be one of tanh, relu, got 'sigmoid'"),
        ("--power=3", "--power must be .*, got '3'"),
        ("--widths=4,1", r"--widths must be 2 or more, got \(4, 1\)"),
    ],
)
def test_another_value_is_refused_in_the_words_of_its_flag(flag, words):
    with pytest.raises(UsageError, match=words):
        typed(flag)


@pytest.mark.parametrize(
    "kind",
    [dict, dict[str, int], set[int], Any, object, str | Path, list[int] | tuple[int, ...], complex, Sequence[int]],
    ids=str,
)
def test_what_no_flag_can_say_is_refused_by_name(kind):
    fields = [("opts", kind, dataclasses.field(default=None))]
    own = dataclasses.make_dataclass("Own", fields, bases=(Plane,), frozen=True, namespace={"name": "own"})
    with pytest.raises(UsageError, match=r"the field 'opts' of Own is of type .*, which no flag can give"):
        _ = task_flags(own).specs


def test_a_script_shows_resumes_and_replays_them(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parent)
    name = "test_kinds_of_settings:Wide"
    shown = " ".join(cli(f"train.py {name} --help").out.split())
    for words in ("--layers VALUE", "(default: 8,8)", "(default: tanh)", "(default: here)"):
        assert words in shown
    line = f"train.py {name} --mode single --samples 32 --checkpoint-every 16 --layers 4,4 --act relu --run-dir"
    run = tmp_path / "run"
    assert cli(f"{line} {run}").code == 0
    assert cli(f"train.py {name} --resume {run} --samples 48 --layers 4,4").code == 0
    assert "cannot go on" in cli(f"train.py {name} --resume {run} --samples 64 --layers 4,8").err
    assert Finished(run).summary["num_samples"] == 48
    assert replay(run, Wide).identical


def test_train_resumes_and_replays_them_and_takes_a_dict_too(tmp_path):
    given = {"folder": tmp_path / "run", "checkpoint_every": 16, "evaluations": 1, "quiet": True}
    task = Wide(layers=(4,), act=Activation.RELU, where=Path("x"), shares=[1.0, 2.0])
    train(task, samples=32, **given)
    assert train(task, samples=48, resume=True, **given).summary["num_samples"] == 48
    assert replay(tmp_path / "run", Wide).identical
    assert load_run(tmp_path / "run", Wide).model() is not None
