"""Settings: precedence, conversion, round trip, every usage error, and the peace with torchrun's own parser."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import signal
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import stilt_finetune
import stilt_mlm
from asyncsgd.errors import UsageError
from asyncsgd.settings.finetuning import FINETUNE_FLAGS
from asyncsgd.settings.flags import Flags, Parsed, flag_of
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.training import (
    FLAGS,
    Budget,
    Job,
    Output,
    Settings,
    Steps,
    load_run_settings,
    make_settings,
)
from asyncsgd.signals import NUMBERS
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification

EXAMPLES = "train.py --mode sync\ntrain.py --model prajjwal1/bert-tiny\ntrain.py --config sweep.yaml"


def parse(*argv: str) -> Parsed:
    return FLAGS.parse(argv, prog="train.py", description="Train.", examples=EXAMPLES)


def write(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def all_flags() -> list[str]:
    parser = FLAGS.build_parser("train.py", "", EXAMPLES)
    return [option for action in parser._actions for option in action.option_strings]


def torchrun_accepts(*arguments: str) -> bool:
    from torch.distributed.run import get_args_parser

    parser: argparse.ArgumentParser = get_args_parser()
    try:
        parsed = parser.parse_args(["script.py", *arguments])
    except SystemExit:
        return False
    return [parsed.training_script, *parsed.training_script_args] == ["script.py", *arguments]


def test_stock_torchrun_hands_every_flag_through_except_nproc_which_is_repaired_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rejected = {flag for flag in all_flags() for form in ([flag, "1"], [f"{flag}=1"]) if not torchrun_accepts(*form)}
    assert rejected == {"--nproc"}
    assert "ambiguous option: --nproc" in capsys.readouterr().err
    assert {"--nprocs", "--nproc-per-node", "--workers", "--print-config", "-h"} <= set(all_flags())


def test_every_field_is_a_flag_and_no_name_is_used_twice() -> None:
    groups = [type(getattr(Settings(), group.name)) for group in dataclasses.fields(Settings)]
    names = [field.name for group in groups for field in dataclasses.fields(group)]
    assert len(names) == len(set(names)) > 30
    assert {"--" + name.replace("_", "-") for name in names} <= set(all_flags())


@pytest.mark.parametrize("script", [stilt_mlm, stilt_finetune], ids=lambda script: script.__name__)
def test_help_has_one_heading_for_its_examples_and_leaves_their_lines_as_they_are(script: ModuleType) -> None:
    shown = FLAGS.build_parser(script.__name__, "", script.EXAMPLES).format_help()
    assert shown.count("examples:") == 1
    indented = textwrap.indent(textwrap.dedent(script.EXAMPLES), "  ")
    assert shown.endswith("\nexamples:\n" + indented)
    for line, following in itertools.pairwise(indented.splitlines()):
        if line.endswith("\\"):  # a continued line stands further in than the one that it continues
            assert len(following) - len(following.lstrip()) > len(line) - len(line.lstrip())
    assert "the earlier one is kept as NAME.before-N" in " ".join(shown.split())


def test_help_names_every_signal_that_takes_a_checkpoint() -> None:
    shown = " ".join(FLAGS.build_parser("stilt_mlm", "", "").format_help().split())
    typed = {signal.SIGINT: "Ctrl-C"}
    *others, last = (typed.get(number, number.name) for number in NUMBERS)
    assert shown.count(f"(default: only when {', '.join(others)} or {last} stops the run") == 2


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--version")
    assert (left.value.code, capsys.readouterr().out) == (0, "asyncsgd 0.1.0\n")


@pytest.mark.parametrize("flag", ["--nproc", "--nproc-per-node", "--nprocs", "--workers"])
def test_each_name_of_nproc_sets_nproc(flag: str) -> None:
    parsed = parse(flag, "3")
    assert (parsed.settings.job.nproc, parsed.given) == (3, {"nproc"})


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path: Path) -> None:
    config = write(tmp_path, "seed: 5\nbatch-size: 4\n")
    parsed = parse("--config", config, "--seed", "7")
    assert (parsed.settings.job.seed, parsed.settings.data.batch_size, parsed.settings.data.seq_len) == (7, 4, 128)
    assert parsed.given == {"seed", "batch_size"}


def test_none_as_a_flag_takes_the_limit_of_a_file_back(tmp_path: Path) -> None:
    config = write(tmp_path, "seconds: 60\nlearning_rate: 0.5\n")
    assert parse("--config", config).settings.budget == Budget(samples=None, seconds=60.0)
    taken_back = parse("--config", config, "--seconds", "none", "--learning-rate", "none").settings
    assert taken_back == Settings()


def test_yaml_numbers_that_pyyaml_takes_for_text_are_numbers(tmp_path: Path) -> None:
    assert yaml.safe_load("a: 1e-4")["a"] == "1e-4"
    loaded = FLAGS.load_yaml(write(tmp_path, "learning_rate: 1e-4\nsamples: 1e4\nclip_norm: 0\nseconds: null\n"))
    assert loaded == {"learning_rate": 1e-4, "samples": 10_000, "clip_norm": 0.0, "seconds": None}
    assert [type(value) for value in loaded.values()] == [float, int, float, type(None)]


@pytest.mark.parametrize("text", ["5000", "'5000'", "0.5epoch"])
def test_a_file_says_how_often_with_or_without_quotes(text: str, tmp_path: Path) -> None:
    config = write(tmp_path, f"checkpoint_every: {text}\nevaluate_every: {text}\n")
    settings = parse("--config", config).settings
    assert settings.output.checkpoint_every == settings.budget.evaluate_every == text.strip("'")
    with pytest.raises(UsageError, match=r"--checkpoint-every must be .* got '5000.5'; type e.g."):
        parse("--config", write(tmp_path, "checkpoint_every: 5000.5"))


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "# nothing\n")) == Parsed(Settings(), frozenset())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lerning_rate: 1", "config.yaml: unknown key 'lerning_rate'; did you mean 'learning_rate'?"),
        ("workers: 4", "config.yaml: unknown key 'workers'; did you mean 'nproc'?"),
        ("zzz: 4", "config.yaml: unknown key 'zzz'"),
        ("samples: many", "config.yaml: samples must be a whole number, got 'many'"),
        ("samples: 1.5", "config.yaml: samples must be a whole number, got 1.5"),
        ("samples: true", "config.yaml: samples must be a whole number, got True"),
        ("learning_rate: .nan", "config.yaml: learning_rate must be a number, got nan"),
        ("seq_len: null", "config.yaml: seq_len must be a whole number, got None"),
        ("data: 5", "config.yaml: data must be text, got 5; put it in quotes"),
        ("data: ''", "config.yaml: data must be text, got ''"),
        ("overwrite: 'yes'", "config.yaml: overwrite must be true or false, got 'yes'"),
        ("batch_size: 1\nbatch-size: 2", "config.yaml: the key 'batch_size' is there twice; keep one"),
        ("seed: 1\nseed: 2", "config.yaml: the key 'seed' is there twice (line 1); keep one"),
        ("nproc: 010", "config.yaml: nproc must be a whole number, got '010'"),
        ("seconds: 1:30", "config.yaml: seconds must be a number, got '1:30'"),
        ("batch_size: 0x10", "config.yaml: batch_size must be a whole number, got '0x10'"),
        ("batch_size: 1_000", "config.yaml: batch_size must be a whole number, got '1_000'"),
        ("seed: " + "9" * 5000, "config.yaml: seed must be a whole number, got '999"),
        ("nproc: " + "[" * 3000 + "]" * 3000, "config.yaml: line 1 is nested more than 50 deep"),
        ("[1, 2]", "config.yaml must hold lines like 'mode: async', got list"),
        ("mode: [", "config.yaml is not YAML: while parsing"),
        (
            "mode: asinc",
            "--mode must be one of single, sync, async, hogwild, pipeline, got 'asinc'; did you",
        ),
        ("mode: sync\naccumulate: 2", "config.yaml and the command line together)"),
    ],
)
def test_a_file_that_cannot_be_meant_is_rejected_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse("--config", write(tmp_path, text))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--config .*absent\.yaml cannot be read: No such file"):
        parse("--config", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sede", "5"], "unknown flag --sede; did you mean '--seed'?"),
        (["--moed=sync"], "unknown flag --moed; did you mean '--mode'?"),
        (["--qqqq"], "unknown flag --qqqq; --help lists every flag"),
        (["--see", "1"], "unknown flag --see; did you mean '--seed'?"),
        (["train"], "unexpected argument 'train'; every setting is a flag, e.g. --mode async"),
        (["--seed"], "argument --seed: expected one argument; --help lists every flag"),
        (["--seed", "one"], "--seed must be a whole number, got 'one'"),
        (["--samples", "1e400"], "--samples must be a whole number, got '1e400'"),
        (["--learning-rate", "inf"], "--learning-rate must be a number, got 'inf'"),
    ],
)
def test_a_command_line_that_cannot_be_meant_says_what_to_type(argv: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(*argv)
    assert str(error.value) == message
    assert error.value.exit_code == 2


def test_a_flag_may_have_underscores_and_a_value_keeps_its_own() -> None:
    parsed = parse("--eval_data", "my_text", "--mask_prob=0.2", "--run-dir=a_b").settings
    assert (parsed.data.eval_data, parsed.data.mask_prob, parsed.output.run_dir) == ("my_text", 0.2, "a_b")
    with pytest.raises(UsageError, match="unknown flag --mask_porb"):
        parse("--mask_porb", "0.2")


@pytest.mark.parametrize(
    ("script", "argv", "settings"),
    [
        (FLAGS, "--train_file a.txt --val_file=b.txt", {"data": "a.txt", "eval_data": "b.txt"}),
        (FLAGS, "--tech True --candidates c --cache_dir d", {"tech": True, "candidates": "c", "cache_dir": "d"}),
        (FLAGS, "--tech false --auto-batch", {"tech": False, "auto_batch": True}),
        (task_flags(CausalLM), "--train-file a.txt --val-file b.txt", {"data": "a.txt", "eval_data": "b.txt"}),
        (task_flags(QuestionAnswering), "--train_file a --val_file b", {"data": "a", "eval_data": "b"}),
        (task_flags(TokenClassification), "--train_file a --cache_dir d", {"data": "a", "cache_dir": "d"}),
        (FINETUNE_FLAGS, "--init-from tiny --train_file a --compile True", {"data": "a", "compile": True}),
    ],
)
def test_the_words_of_other_tools_are_taken_for_the_flag_that_means_the_same(
    script: Any, argv: str, settings: dict[str, Any]
) -> None:
    flat = script.flatten(script.parse(argv.split(), prog="t", description="", examples="").settings)
    assert {name: flat[name] for name in settings} == settings


@pytest.mark.parametrize(
    ("script", "argv", "message"),
    [
        (FLAGS, "--model_save_dir m", "unknown flag --model_save_dir; type --run-dir FOLDER; the model is then in"),
        (task_flags(CausalLM), "--model-save-dir=m", "unknown flag --model-save-dir; type --run-dir FOLDER; the model"),
        (
            FINETUNE_FLAGS,
            "--val_file b",
            "unknown flag --val_file; type --data FOLDER, with train.* and validation.* in it",
        ),
        (task_flags(TokenClassification), "--val_file b", "unknown flag --val_file; type --data FOLDER, with train.*"),
        (FLAGS, "--tech 5", "--tech must be true or false, got '5'"),
    ],
)
def test_the_words_of_other_tools_lead_to_the_flags_that_do_the_same(script: Any, argv: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        script.parse(argv.split(), prog="t", description="", examples="")
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, "--tech needs a folder that mask_candidates.py has filled; add --candidates DIR"),
        ({"candidates": "c", "mask": "word"}, "--tech is a masking of its own, got --mask word"),
        ({"candidates": "c", "candidate_share": 0.5}, "--candidate-share is for --mask candidates, got --tech"),
    ],
)
def test_tech_is_a_masking_of_its_own(more: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_settings({"tech": True, **more})
    assert make_settings({"tech": True, "candidates": "c"}).data.tech


def test_make_settings_rejects_a_name_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="unknown key 'learnin_rate'; did you mean 'learning_rate'"):
        make_settings({"learnin_rate": 1})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"samples": 9600, "schedule": "linear", "learning_rate": 5e-4}),
        ({"optimizer": "sgd"}, {"learning_rate": 0.1}),
        ({"optimizer": "sgd", "learning_rate": 0.3}, {"learning_rate": 0.3}),
        ({"target_loss": 5}, {"samples": 9600, "schedule": "linear"}),
        ({"seconds": 60}, {"samples": None, "schedule": "constant"}),
        ({"seconds": 60, "target_loss": 5}, {"samples": None, "schedule": "constant"}),
        ({"seconds": 60, "samples": 320}, {"samples": 320, "schedule": "linear"}),
        ({"seconds": 60, "samples": 320, "schedule": "cosine"}, {"schedule": "cosine"}),
        ({"samples": 0}, {"samples": 0, "schedule": "linear"}),
        ({"epochs": 2}, {"samples": None, "epochs": 2.0, "schedule": "linear"}),
        ({"epochs": 0.5, "seconds": 60}, {"samples": None, "schedule": "linear"}),
    ],
)
def test_open_settings_are_resolved_from_the_others(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert FLAGS.flatten(make_settings(values)).items() >= expected.items()


def test_settings_built_in_python_are_resolved_too() -> None:
    built = Settings(optimization=Steps(optimizer="sgd"), budget=Budget(seconds=1.0))
    assert built == make_settings({"optimizer": "sgd", "seconds": 1})


OUT_OF_BOUNDS = [
    ({"nproc": 0}, "--nproc must be 1 or more, got 0; type e.g. --nproc 4"),
    ({"accumulate": 0}, "--accumulate must be 1 or more, got 0"),
    ({"seed": -1}, "--seed must be 0 or more and less than 4294967296, got -1"),
    ({"seed": 2**32}, "--seed must be 0 or more and less than 4294967296"),
    ({"samples": -1}, "--samples must be 0 or more, got -1; type e.g. --samples 9600"),
    ({"seconds": 0}, "--seconds must be more than 0, got 0.0; type e.g. --seconds 60"),
    ({"target_loss": 0}, "--target-loss must be more than 0, got 0.0; type e.g. --target-loss 5.0"),
    ({"evaluations": 0}, "--evaluations must be 1 or more, got 0"),
    ({"eval_samples": -1}, "--eval-samples must be 0 or more, got -1"),
    ({"learning_rate": 0}, "--learning-rate must be more than 0, got 0.0; type e.g. --learning-rate 0.0005"),
    ({"warmup": -1}, "--warmup must be 0 or more, got -1"),
    ({"weight_decay": -0.1}, "--weight-decay must be 0 or more, got -0.1"),
    ({"optimizer": "sgd", "momentum": 1}, "--momentum must be 0 or more and less than 1, got 1.0"),
    ({"beta1": 1}, "--beta1 must be 0 or more and less than 1, got 1.0"),
    ({"beta2": -1}, "--beta2 must be 0 or more and less than 1, got -1.0"),
    ({"clip_norm": -1}, "--clip-norm must be 0 or more, got -1.0"),
    ({"seq_len": 7}, "--seq-len must be 8 or more, got 7"),
    ({"batch_size": 0}, "--batch-size must be 1 or more, got 0; type e.g. --batch-size 16"),
    ({"mask_prob": 0}, "--mask-prob must be more than 0 and less than 1, got 0.0; type e.g. --mask-prob 0.15"),
    ({"mask_prob": 1}, "--mask-prob must be more than 0 and less than 1, got 1.0"),
    ({"eval_mask_prob": 1}, "--eval-mask-prob must be more than 0 and less than 1, got 1.0"),
    ({"vocab_size": 0}, "--vocab-size must be 1 or more, got 0"),
    ({"dropout": 1}, "--dropout must be 0 or more and less than 1, got 1.0"),
    ({"dropout": -0.1}, "--dropout must be 0 or more and less than 1, got -0.1"),
    ({"epochs": 0}, "--epochs must be more than 0, got 0.0; type e.g. --epochs 2"),
    ({"patience": 0}, "--patience must be 1 or more, got 0; type e.g. --patience 3"),
    ({"micro_batches": 0}, "--micro-batches must be 1 or more, got 0; type e.g. --micro-batches 4"),
    ({"threads": 0}, "--threads must be 1 or more, got 0"),
]

NOT_A_CHOICE = [
    (
        {"mode": "asynch"},
        "--mode must be one of single, sync, async, hogwild, pipeline, got 'asynch'; did you",
    ),
    ({"transport": "tcp"}, "--transport must be one of auto, shared_memory, process_group, got 'tcp'"),
    ({"mode": "hogwild", "hogwild_state": "x"}, "--hogwild-state must be one of worker, shared, got 'x'"),
    ({"optimizer": "adam"}, "--optimizer must be one of sgd, adamw, got 'adam'; did you mean 'adamw'?"),
    ({"schedule": "step"}, "--schedule must be one of constant, linear, cosine, got 'step'"),
    ({"mask": "span"}, "--mask must be one of token, word, candidates, got 'span'"),
    ({"eval_mask": "candidates"}, "--eval-mask must be one of token, word, got 'candidates'"),
    ({"device": "gpu"}, "--device must be one of auto, cpu, cuda, got 'gpu'"),
    ({"precision": "fp8"}, "--precision must be one of fp32, bf16, fp16, got 'fp8'"),
]

WITHOUT_EFFECT = [
    ({"mode": "single", "nproc": 2}, "--mode single has one worker, got --nproc 2"),
    ({"accumulate": 2, "nproc": 2}, "--accumulate is for --mode single, got --mode async"),
    (
        {"mode": "sync", "accumulate": 2, "batch_size": 8, "micro_batches": 3},
        "--accumulate is for --mode single, got --mode sync; type --batch-size 16 --micro-batches 6, which makes as",
    ),
    (
        {"mode": "sync", "rule": "ringmaster"},
        "--rule is for --mode async, got --mode sync; drop --rule, or type --mode",
    ),
    ({"mode": "single", "rule": "ringmaster"}, "--rule is for --mode async, got --mode single"),
    ({"mode": "hogwild", "rule": "ringmaster"}, "--rule is for --mode async, got --mode hogwild"),
    ({"mode": "sync", "transport": "shared_memory"}, "--transport is for --mode async, got --mode sync"),
    ({"clock": "virtual", "mode": "sync"}, "--clock virtual is for --mode async, got --mode sync"),
    ({"clock": "virtual", "mode": "hogwild"}, "--clock virtual is for --mode async, got --mode hogwild"),
    ({"clock": "virtual", "transport": "process_group"}, "--transport does nothing with --clock virtual"),
    ({"network": "bytes=1,worker=1,server=1"}, "--network is for --clock virtual"),
    ({"mode": "single", "speeds": "exponential:1"}, "--speeds is for several workers, got --mode single"),
    ({"hogwild_state": "shared"}, "--hogwild-state is for --mode hogwild, got --mode single"),
    (
        {"mode": "hogwild", "hogwild_state": "shared", "optimizer": "sgd"},
        "--hogwild-state does nothing for --optimizer",
    ),
    (
        {"momentum": 0.9},
        "--momentum is for --optimizer sgd, got --optimizer adamw; drop --momentum, or type --optimizer",
    ),
    ({"optimizer": "sgd", "beta1": 0.8}, "--beta1 is for --optimizer adamw, got --optimizer sgd"),
    ({"optimizer": "sgd", "beta2": 0.8}, "--beta2 is for --optimizer adamw, got --optimizer sgd"),
    (
        {"seconds": 9, "schedule": "linear"},
        "--schedule linear needs a number of samples to stretch over; add --samples",
    ),
    ({"seconds": 9, "schedule": "cosine"}, "--schedule cosine needs a number of samples to stretch over"),
    ({"samples": 0, "seconds": 9}, "--seconds does nothing with --samples 0"),
    ({"samples": 0, "target_loss": 9}, "--target-loss does nothing with --samples 0"),
    ({"samples": 0, "evaluate_every": "8"}, "--evaluate-every does nothing with --samples 0"),
    ({"samples": 80, "epochs": 2}, "--epochs 2 and --samples 80 both say how long; drop one of the two"),
    ({"samples": 0, "patience": 2}, "--patience does nothing with --samples 0"),
    (
        {"patience": 8},
        "--patience 8 ends no run of --evaluations 8, the last of which is at the end; type --evaluations",
    ),
    ({"evaluations": 9, "evaluate_every": "1epoch"}, "--evaluations 9 and --evaluate-every 1epoch both say when to"),
    ({"evaluate_every": "0.0epoch"}, "--evaluate-every must be a number of samples from 1 up, or epochs, got '0.0ep"),
    ({"checkpoint_every": "0epoch"}, "--checkpoint-every must be a number of samples from 1 up, or epochs, got '0epo"),
    ({"checkpoint_every": "0"}, "--checkpoint-every must be a number of samples from 1 up, or epochs, got '0'"),
    ({"model": "bert-base-uncased", "vocab_size": 99}, "--vocab-size is for --model tiny, small and tiny-distilbert"),
    ({"text_column": "tweet"}, "--text-column does nothing for --data pydocs"),
    ({"mask": "candidates"}, "--mask candidates needs a folder that mask_candidates.py has filled; add --candidates"),
    ({"mask": "word", "candidates": "c", "candidate_share": 0.5}, "--candidate-share is for --mask candidates, got"),
    ({"candidate_share": 1.5}, "--candidate-share must be 0 or more and at most 1"),
    ({"run_dir": "a", "runs_dir": "b"}, "--runs-dir does nothing when --run-dir names the run's folder"),
]


@pytest.mark.parametrize(("values", "message"), OUT_OF_BOUNDS + NOT_A_CHOICE + WITHOUT_EFFECT)
def test_a_run_that_cannot_be_meant_is_refused_with_what_to_type(values: dict[str, Any], message: str) -> None:
    argv = [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), str(value))]
    for attempt in (lambda: make_settings(values), lambda: parse(*argv)):
        with pytest.raises(UsageError) as error:
            attempt()
        assert str(error.value).startswith(message)


@pytest.mark.parametrize("flags", [FLAGS, FINETUNE_FLAGS], ids=["pretraining", "fine-tuning"])
@pytest.mark.parametrize("number", [10**12 + 1, 10**20, "9" * 400], ids=["1e12", "1e20", "400 digits"])
def test_every_whole_number_has_a_largest_value_and_a_larger_one_is_refused_with_it(
    flags: Flags[Any], number: Any
) -> None:
    for name in (spec.name for spec in flags.specs.values() if spec.kind is int):
        with pytest.raises(
            UsageError, match=f"^{flag_of(name)} must be .*(at most|less than) [0-9]+, got .*; type e.g. "
        ):
            flags.make({name: number})


@pytest.mark.parametrize("text", ["010", "1_000", "0x10", "1:30", " 8", "8 ", "٣", "1e", "--", "1,5"])
def test_a_number_has_one_spelling(text: str) -> None:
    for name, kind in (("nproc", "a whole number"), ("learning_rate", "a number")):
        with pytest.raises(UsageError, match=re.escape(f"{flag_of(name)} must be {kind}, got {text!r}")):
            make_settings({name: text})


def test_virtual_workers_may_be_many_and_real_ones_not() -> None:
    assert make_settings({"nproc": 100_000, "clock": "virtual"}).job.nproc == 100_000
    for mode in ("sync", "async", "hogwild"):
        assert make_settings({"nproc": 1024, "mode": mode}).job.nproc == 1024
        with pytest.raises(UsageError, match="type --nproc 1024 or less"):
            make_settings({"nproc": 1025, "mode": mode})


def test_validate_refuses_what_replace_has_spoilt() -> None:
    with pytest.raises(UsageError, match="--mode single has one worker"):
        FLAGS.validate(dataclasses.replace(Settings(), job=Job(mode="single", nproc=4)))


def test_not_a_number_is_out_of_bounds() -> None:
    with pytest.raises(UsageError, match="--learning-rate must be more than 0, got nan"):
        FLAGS.validate(Settings(optimization=Steps(learning_rate=float("nan"))))


@pytest.mark.parametrize(
    "values",
    [
        {"mode": "single", "accumulate": 4},
        {"mode": "async", "rule": "ringmaster:threshold=4", "transport": "process_group", "nproc": 4},
        {"mode": "hogwild", "hogwild_state": "shared"},
        {"mode": "hogwild", "hogwild_state": "shared", "optimizer": "sgd", "momentum": 0.9},
        {"text_column": "tweet", "eval_data": "tweets.jsonl"},
        {"model": "small", "vocab_size": 1000},
        {"precision": "fp16", "device": "cpu"},
    ],
)
def test_a_setting_that_has_an_effect_is_accepted(values: dict[str, Any]) -> None:
    assert FLAGS.flatten(make_settings(values)).items() >= values.items()


def one_of(*values: str) -> st.SearchStrategy[str]:
    return st.sampled_from(values)


PROPER = {"allow_nan": False, "allow_infinity": False}
# YAML reads some of these, unquoted, as something that is not text.
TEXTS = one_of("none", "null", "1e-4", "yes", "12:30", "2024-01-01", "a: b", "# c", "~", "ü\u2028x", "\x85") | st.text(
    min_size=1
)
SHARES = st.floats(0, 1, exclude_max=True)
POSITIVE = st.floats(0, exclude_min=True, **PROPER)  # type: ignore[arg-type]


@st.composite
def valid_settings(draw: st.DrawFn) -> Settings:
    mode = draw(one_of("single", "sync", "async", "hogwild"))
    optimizer = draw(one_of("sgd", "adamw"))
    seconds = draw(st.none() | st.floats(0, 1e9, exclude_min=True))
    only_seconds = seconds is not None and draw(st.booleans())

    def whole(name: str) -> st.SearchStrategy[int]:
        return st.integers(FLAGS.specs[name].metadata["at_least"], FLAGS.specs[name].metadata["at_most"])

    strategies: dict[str, st.SearchStrategy[Any]] = {
        "seed": st.integers(0, 2**32 - 1),
        "target_loss": st.none() | POSITIVE,
        "evaluations": whole("evaluations"),
        "eval_samples": whole("eval_samples"),
        "learning_rate": st.none() | POSITIVE,
        "schedule": st.none() | st.just("constant") if only_seconds else one_of("constant", "linear", "cosine"),
        "warmup": whole("warmup"),
        "weight_decay": st.floats(0, **PROPER),  # type: ignore[arg-type]
        "clip_norm": st.floats(0, **PROPER),  # type: ignore[arg-type]
        "data": TEXTS,
        "eval_data": st.none() | TEXTS,
        "seq_len": whole("seq_len"),
        "batch_size": whole("batch_size"),
        "mask": one_of("token", "word"),
        "mask_prob": st.floats(0, 1, exclude_min=True, exclude_max=True),
        "eval_mask": one_of("token", "word"),
        "eval_mask_prob": st.floats(0, 1, exclude_min=True, exclude_max=True),
        "cache_dir": st.none() | TEXTS,
        "model": TEXTS,
        "dropout": SHARES,
        "device": one_of("auto", "cpu", "cuda"),
        "precision": one_of("fp32", "bf16", "fp16"),
        "threads": whole("threads"),
        draw(one_of("run_dir", "runs_dir")): TEXTS,
    }
    if not only_seconds:
        strategies["samples"] = st.integers(1, 10**12)
    if mode == "single":
        strategies["accumulate"] = whole("accumulate")
    else:
        strategies["nproc"] = st.integers(1, 1024)
    if mode == "async":
        strategies |= {"rule": TEXTS, "transport": one_of("auto", "shared_memory", "process_group")}
    if mode == "hogwild" and optimizer == "adamw":
        strategies["hogwild_state"] = one_of("worker", "shared")
    strategies |= {"momentum": SHARES} if optimizer == "sgd" else {"beta1": SHARES, "beta2": SHARES}
    drawn = {name: draw(strategy) for name, strategy in strategies.items()}
    if drawn.get("run_dir") is not None:
        drawn["overwrite"] = draw(st.booleans())
    return make_settings({"mode": mode, "optimizer": optimizer, "seconds": seconds, **drawn})


@given(valid_settings(), st.text())
@settings(deadline=None)
def test_what_to_yaml_writes_reads_back_as_equal_settings(
    tmp_path_factory: pytest.TempPathFactory, some: Settings, comment: str
) -> None:
    path = write(tmp_path_factory.getbasetemp(), FLAGS.to_yaml(some, comment=comment))
    parsed = parse("--config", path)
    assert parsed == Parsed(some, frozenset(FLAGS.flatten(some)))
    assert FLAGS.settings_hash(parsed.settings) == FLAGS.settings_hash(some)
    assert make_settings(FLAGS.flatten(some)) == some


def test_yaml_shows_every_default_resolved() -> None:
    shown = yaml.safe_load(FLAGS.to_yaml(make_settings({"optimizer": "sgd"})))
    assert shown == FLAGS.flatten(make_settings({"optimizer": "sgd"}))
    assert (shown["learning_rate"], shown["samples"], shown["schedule"]) == (0.1, 9600, "linear")


def test_a_run_folder_s_settings_neither_name_its_place_nor_overwrite_it() -> None:
    kept = Settings(output=Output(run_dir="mine", overwrite=True))
    missing = FLAGS.flatten(kept).keys() - yaml.safe_load(FLAGS.to_yaml(kept, places=False)).keys()
    assert missing == FLAGS.places >= {"runs_dir", "run_dir", "overwrite", "resume", "cache_dir"}


def test_print_config_prints_the_resolved_settings_and_leaves_with_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        parse("--print-config", "--mode", "sync", "--learning-rate", "1e-5")
    assert left.value.code == 0
    config = write(tmp_path, capsys.readouterr().out)
    assert parse("--config", config).settings == make_settings({"mode": "sync", "learning_rate": 1e-5})


def test_print_config_refuses_settings_that_cannot_run() -> None:
    with pytest.raises(UsageError, match="--nproc must be 1 or more"):
        parse("--print-config", "--nproc", "0")


@pytest.mark.parametrize("values", [{"seed": 1}, {"rule": "ringmaster"}, {"nproc": 2}, {"learning_rate": 2e-3}])
def test_the_hash_changes_with_what_is_run(values: dict[str, Any]) -> None:
    assert FLAGS.settings_hash(make_settings(values)) != FLAGS.settings_hash(Settings())


@pytest.mark.parametrize("values", [{"runs_dir": "a"}, {"run_dir": "a"}, {"cache_dir": "a"}, {"learning_rate": 5e-4}])
def test_the_hash_does_not_change_with_where_it_is_kept_or_with_a_default_typed_out(values: dict[str, Any]) -> None:
    assert FLAGS.settings_hash(make_settings(values)) == FLAGS.settings_hash(Settings())


def test_the_hash_is_six_hexadecimal_digits_and_the_same_for_1_and_1_point_0() -> None:
    whole, real = (FLAGS.settings_hash(Settings(optimization=Steps(learning_rate=rate))) for rate in (1, 1.0))
    assert whole == real
    assert len(whole) == 6
    int(whole, 16)


def test_settings_that_came_later_leave_the_names_of_runs_as_they_were() -> None:
    def hashed(**values: object) -> str:
        return FLAGS.settings_hash(make_settings({"mode": "async", **values}))

    assert hashed() == hashed(eval_mask="token", eval_mask_prob=0.15) == hashed(warmup="640.0") == "3685ef"
    assert hashed(mask="word", mask_prob=0.3, seed=2) == "e816ca"
    others: list[dict[str, object]] = [{"micro_batches": 2}, {"evaluate_every": "5"}, {"patience": 2}, {"epochs": 2}]
    for values in (*others, {"eval_mask": "word"}, {"candidates": "c"}):
        assert hashed(**values) != "3685ef"


def test_a_run_from_before_eval_mask_was_evaluated_with_the_masks_it_trained_with(tmp_path: Path) -> None:
    old = load_run_settings(write(tmp_path, "mask: word\nmask_prob: 0.3\n"))
    assert (old.data.eval_mask, old.data.eval_mask_prob) == ("word", 0.3)
    new = load_run_settings(write(tmp_path, FLAGS.to_yaml(make_settings({"mask": "word"}))))
    assert (new.data.eval_mask, new.data.eval_mask_prob) == ("token", 0.15)


def test_differing_keys_are_those_of_the_run_and_not_of_its_place() -> None:
    old = FLAGS.flatten(Settings())
    new = FLAGS.flatten(make_settings({"seed": 3, "seconds": 60, "runs_dir": "b", "cache_dir": "c"}))
    assert FLAGS.differing_keys(old, new) == [
        ("seed", 0, 3),
        ("samples", 9600, None),
        ("seconds", None, 60.0),
        ("schedule", "linear", "constant"),
    ]
    assert FLAGS.differing_keys(old, old) == []
