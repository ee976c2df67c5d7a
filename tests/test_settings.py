"""Settings: flags over a file over defaults, round trip, the words of other tools, and the same through both doors."""

import contextlib
import re

import pytest
import yaml
from doors import SGD, Join, Leave, UsageError, Virtual, asyncsgd, cli
from hypothesis import given, settings
from hypothesis import strategies as st
from tasks import Plane

from asyncsgd.settings.task import task_flags

TASKS = asyncsgd.tasks.TASKS


def meant(line):
    """The settings that a command line would train with, of a script or of ``stilt_mlm.py``."""
    words = line.split() if isinstance(line, str) else line
    ended = cli([*([] if words[:1] == ["train.py"] else ["stilt_mlm.py"]), *words, "--print-config"])
    assert ended.code == 0, ended.err
    return yaml.safe_load(ended.out)


def test_stock_torchrun_hands_every_flag_through_except_nproc_which_is_repaired_elsewhere(capsys):
    from torch.distributed.run import get_args_parser

    def accepts(*arguments):
        with contextlib.suppress(SystemExit):
            parsed = get_args_parser().parse_args(["script.py", *arguments])
            return [parsed.training_script, *parsed.training_script_args] == ["script.py", *arguments]

    flags = set(re.findall(r"(?<=\s)--[a-z][\w-]*", cli("stilt_mlm.py --help").out))
    assert {"--nprocs", "--nproc-per-node", "--workers", "--print-config"} <= flags
    rejected = set()
    for flag in flags:
        if not accepts(flag, "1") or not accepts(f"{flag}=1"):
            rejected.add(flag)
    assert rejected == {"--nproc"}
    assert "ambiguous option: --nproc" in capsys.readouterr().err


def test_a_flag_beats_the_file_the_file_beats_the_default_and_none_takes_a_limit_back(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 5\nbatch-size: 4\nseconds: 60\nlearning_rate: 1e-4\n")
    in_file = {"batch_size": 4, "seq_len": 128, "learning_rate": 1e-4}  # which YAML itself takes for text
    config = f"--config {tmp_path}/config.yaml"
    assert meant(config).items() >= {**in_file, "seed": 5, "seconds": 60.0, "samples": None}.items()
    line = f"{config} --seed 7 --seconds none --learning-rate none"
    assert meant(line) == meant("--seed 7 --batch-size 4")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # the words of other tools
        ("--train_file a.txt --val_file=b.txt", {"data": "a.txt", "eval_data": "b.txt"}),
        ("--tech True --candidates c --cache_dir d", {"tech": True, "candidates": "c", "cache_dir": "d"}),
        ("--tech false --auto-batch", {"tech": False, "auto_batch": True}),
        ("train.py causal_lm --train-file a.txt --val-file b.txt", {"data": "a.txt", "eval_data": "b.txt"}),
        ("train.py question_answering --train_file a --val_file b", {"data": "a", "eval_data": "b"}),
        ("--eval-data a.txt --val_file x=b,c.txt", {"eval_data": ["a.txt", "x=b,c.txt"]}),
        ("train.py token_classification --train_file a --cache_dir d", {"data": "a", "cache_dir": "d"}),
        ("train.py classification --train_file a --compile True", {"data": "a", "compile": True}),
        ("--model_save_dir m --checkpoint-every 1epoch", {"run_dir": "m", "checkpoint_every": "1epoch"}),
        ("--times exponential:1 --nproc 2", {"speeds": "exponential:1"}),
        *((f"--{flag} 3", {"nproc": 3}) for flag in ("nproc", "nproc-per-node", "nproc_per_node", "nprocs", "workers")),
        ("--run-dir=a_b --mask_prob=0.2", {"run_dir": "a_b", "mask_prob": 0.2}),
        # what is open follows from the rest
        ("", {"samples": 9600, "schedule": "linear", "learning_rate": 5e-4, "evaluations": 8}),
        ("train.py classification --data d", {"samples": None, "epochs": 2.0, "evaluations": 4}),
        ("train.py classification --data d --samples 48", {"samples": 48, "epochs": None}),
        ("--optimizer sgd", {"learning_rate": 0.1, "samples": 9600}),
        ("--optimizer sgd --learning-rate 0.3", {"learning_rate": 0.3}),
        ("--target-loss 5", {"samples": 9600, "schedule": "linear"}),
        ("--seconds 60 --target-loss 5", {"samples": None, "schedule": "constant"}),
        ("--seconds 60 --samples 320", {"samples": 320, "schedule": "linear"}),
        ("--epochs 2", {"samples": None, "epochs": 2.0, "schedule": "linear"}),
        # what has an effect is taken
        ("--mode single --accumulate 4", {"accumulate": 4}),
        ("--mode hogwild --hogwild-state shared --optimizer sgd --momentum 0.9", {"hogwild_state": "shared"}),
        ("--nproc 100000 --clock virtual", {"nproc": 100_000}),
    ],
)
def test_a_command_line_means(line, expected):
    assert meant(line).items() >= expected.items()


def one_of(*values):
    return st.sampled_from(values)


PROPER = {"allow_nan": False, "allow_infinity": False}
# YAML reads some of these, unquoted, as something that is not text.
TEXTS = one_of("1e-4", "yes", "12:30", "2024-01-01", "a: b", "# c", "~", "ü\u2028x", "\x85") | st.text(min_size=1)
DRAWN = {
    "seed": st.integers(0, 2**32 - 1),
    "samples": st.integers(1, 10**12),
    "learning_rate": st.floats(0, exclude_min=True, **PROPER),
    "schedule": one_of("constant", "linear", "cosine"),
    "warmup": st.integers(0, 10**6),
    "data": TEXTS,
    "eval_data": st.none() | TEXTS | st.lists(TEXTS, min_size=1),
    "mask_prob": st.floats(0, 1, exclude_min=True, exclude_max=True),
    "model": TEXTS,
    "rule": TEXTS,
    "nproc": st.integers(1, 1024),
    "run_dir": TEXTS,
}


@given(st.fixed_dictionaries({}, optional=DRAWN), st.text())
@settings(deadline=None)
def test_what_to_yaml_writes_reads_back_as_equal_settings(tmp_path_factory, values, comment):
    flags = task_flags(asyncsgd.tasks.task_class("masked_lm"))
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    some = flags.make({"mode": "async", **values})
    path.write_text(flags.to_yaml(some, comment=comment), encoding="utf-8")
    assert flags.make(flags.load_yaml(str(path))) == some
    assert flags.make(flags.flatten(some)) == some


@pytest.mark.parametrize("task", TASKS)
def test_a_value_out_of_bounds_or_no_choice_is_refused_with_flag_bound_and_value(task):
    flags = task_flags(asyncsgd.tasks.task_class(task))
    for spec in flags.specs.values():
        refused = [(choice, "x") for choice in spec.choices]
        for name, more in (("at_least", -1), ("above", 0), ("below", 0), ("at_most", 1)):
            bound = spec.metadata[name]
            if bound is not None:
                refused.append((bound, spec.kind(bound + more)))
        for bound, value in refused:
            with pytest.raises(UsageError) as error:
                flags.make({spec.name: value})
            assert str(error.value).startswith(f"{spec.flag} must be ")
            for word in (str(bound), ", got ", str(value)[:2]):
                assert word in str(error.value)


class OwnDefaults(Plane):
    defaults = asyncsgd.Defaults(learning_rate=0.02, schedule="cosine", warmup=0.25, weight_decay=0.1, clip_norm=2.0)


def settings_of_train(kind, folder, **arguments):
    """The library's own tasks find no data, and are refused after the settings are written."""
    asked = {"samples": 8, "quiet": True, "folder": folder / "run", "device": "cpu"} | arguments
    if kind.__module__.startswith("asyncsgd"):
        task = kind(data_name=str(folder / "nowhere.txt"))
        with pytest.raises(UsageError):
            asyncsgd.train(task, **asked)
    else:
        asyncsgd.train(kind(), **asked)
    return yaml.safe_load((folder / "run" / "settings.yaml").read_text())


@pytest.mark.parametrize(
    ("name", "more", "defaults"),
    [
        *((name, {}, (5e-4, "linear", 640, 0.01, 1.0)) for name in TASKS if name != "classification"),
        ("classification", {}, (5e-4, "linear", 0.1, 0.01, 1.0)),
        ("tasks:Plane", {}, (1e-3, "constant", 0, 0.0, 0.0)),
        ("test_settings:OwnDefaults", {}, (0.02, "cosine", 0.25, 0.1, 2.0)),
        ("test_settings:OwnDefaults", {"samples": None, "seconds": 0.01}, (0.1, "constant", 0, 0.1, 2.0)),
    ],
)
def test_a_task_is_trained_alike_through_both_doors(name, more, defaults, tmp_path):
    line = f"train.py {name}"
    if name in TASKS:
        line += " --data d"
        kind = asyncsgd.tasks.task_class(name)
    else:
        kind = {"tasks:Plane": Plane, "test_settings:OwnDefaults": OwnDefaults}[name]
    if more:
        ours = meant(f"{line} --optimizer sgd --seconds 0.01 --warmup 0")
        theirs = settings_of_train(kind, tmp_path, optimizer=SGD(), **more)
    else:
        ours = meant(f"{line} --samples 8")
        theirs = settings_of_train(kind, tmp_path)
    names = ("learning_rate", "schedule", "warmup", "weight_decay", "clip_norm")
    for settings_of_a_door in (ours, theirs):
        assert tuple(settings_of_a_door[name] for name in names) == defaults


def test_a_warmup_below_1_is_a_share():
    hashes = []
    for warmup in (0.25, 20):
        run = asyncsgd.train(Plane(), samples=80, warmup=warmup, quiet=True)
        hashes.append(run.summary["parameters_sha256"])
    assert hashes[0] == hashes[1]


def test_churn_may_be_given_in_any_order():
    first_leaves = Leave(2, 5.0)
    then_leaves = Leave(1, 40.0)
    joins = Join(1, 50.0)
    in_order = Virtual(3, churn=(first_leaves, then_leaves, joins))
    assert Virtual(3, churn=(then_leaves, first_leaves, joins)) == in_order


def test_a_run_is_named_by_its_settings_and_not_by_where_it_is_kept_or_by_a_default_that_is_typed_out(tmp_path):
    for flags in ("", "--learning-rate 1e-3 --cache-dir c", "--learning-rate 1", "--learning-rate 1.0", "--seed 1"):
        line = f"train.py tasks:Plane --samples 8 --device cpu --runs-dir {tmp_path} {flags}"
        assert cli(line).code == 0
    names = {path.name.removesuffix("-2") for path in tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 5
    assert len(names) == 3
