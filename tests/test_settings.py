"""Settings: precedence, conversion, round trip, every usage error, and the peace with torchrun's own parser."""

from __future__ import annotations

import signal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsgd.errors import UsageError
from asyncsgd.settings.flags import Parsed
from asyncsgd.settings.task import task_flags
from asyncsgd.settings.training import Budget
from asyncsgd.signals import NUMBERS
from asyncsgd.tasks import TASKS, task_class
from asyncsgd.tasks.causal_lm import CausalLM
from asyncsgd.tasks.classification import Classification
from asyncsgd.tasks.masked_lm import MaskedLM
from asyncsgd.tasks.question_answering import QuestionAnswering
from asyncsgd.tasks.token_classification import TokenClassification

FLAGS = task_flags(MaskedLM)
make_settings = FLAGS.make
EXAMPLES = "train.py --mode sync\ntrain.py --model prajjwal1/bert-tiny\ntrain.py --config sweep.yaml"


def parse(*argv):
    return FLAGS.parse(argv, prog="train.py", description="Train.", examples=EXAMPLES)


def write(folder, text):
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def all_flags():
    parser = FLAGS.build_parser("train.py", "", EXAMPLES)
    return [option for action in parser._actions for option in action.option_strings]


def torchrun_accepts(*arguments):
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    try:
        parsed = parser.parse_args(["script.py", *arguments])
    except SystemExit:
        return False
    return [parsed.training_script, *parsed.training_script_args] == ["script.py", *arguments]


def test_stock_torchrun_hands_every_flag_through_except_nproc_which_is_repaired_elsewhere(capsys):
    rejected = {flag for flag in all_flags() for form in ([flag, "1"], [f"{flag}=1"]) if not torchrun_accepts(*form)}
    assert rejected == {"--nproc"}
    assert "ambiguous option: --nproc" in capsys.readouterr().err
    assert {"--nprocs", "--nproc-per-node", "--workers", "--print-config", "-h"} <= set(all_flags())


def test_help_names_every_signal_that_takes_a_checkpoint():
    shown = " ".join(FLAGS.build_parser("stilt_mlm", "", "").format_help().split())
    typed = {signal.SIGINT: "Ctrl-C"}
    *others, last = (typed.get(number, number.name) for number in NUMBERS)
    assert shown.count(f"(default: only when {', '.join(others)} or {last} stops the run") == 2


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as left:
        parse("--version")
    assert (left.value.code, capsys.readouterr().out) == (0, "asyncsgd 0.1.0\n")


@pytest.mark.parametrize("flag", ["--nproc", "--nproc-per-node", "--nprocs", "--workers"])
def test_each_name_of_nproc_sets_nproc(flag):
    parsed = parse(flag, "3")
    assert (parsed.settings.job.nproc, parsed.given) == (3, {"nproc"})


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path):
    config = write(tmp_path, "seed: 5\nbatch-size: 4\n")
    parsed = parse("--config", config, "--seed", "7")
    assert (parsed.settings.job.seed, parsed.settings.task.batch_size, parsed.settings.task.seq_len) == (7, 4, 128)
    assert parsed.given == {"seed", "batch_size"}


def test_none_as_a_flag_takes_the_limit_of_a_file_back(tmp_path):
    config = write(tmp_path, "seconds: 60\nlearning_rate: 0.5\n")
    assert vars(parse("--config", config).settings.budget) == vars(Budget(samples=None, seconds=60.0))
    taken_back = parse("--config", config, "--seconds", "none", "--learning-rate", "none").settings
    assert taken_back == make_settings({})


def test_yaml_numbers_that_pyyaml_takes_for_text_are_numbers(tmp_path):
    assert yaml.safe_load("a: 1e-4")["a"] == "1e-4"
    loaded = FLAGS.load_yaml(write(tmp_path, "learning_rate: 1e-4\nsamples: 1e4\nclip_norm: 0\nseconds: null\n"))
    assert loaded == {"learning_rate": 1e-4, "samples": 10_000, "clip_norm": 0.0, "seconds": None}
    assert [type(value) for value in loaded.values()] == [float, int, float, type(None)]


@pytest.mark.parametrize("text", ["5000", "'5000'", "0.5epoch"])
def test_a_file_says_how_often_with_or_without_quotes(text, tmp_path):
    config = write(tmp_path, f"checkpoint_every: {text}\nevaluate_every: {text}\n")
    settings = parse("--config", config).settings
    assert settings.output.checkpoint_every == settings.budget.evaluate_every == text.strip("'")
    with pytest.raises(UsageError, match=r"--checkpoint-every must be .* got '5000.5'; type e.g."):
        parse("--config", write(tmp_path, "checkpoint_every: 5000.5"))


def test_an_empty_file_changes_nothing(tmp_path):
    assert parse("--config", write(tmp_path, "# nothing\n")) == Parsed(FLAGS.make({}), frozenset())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lerning_rate: 1", "unknown key 'lerning_rate' 'learning_rate'"),
        ("samples: many", "samples whole 'many'"),
        ("samples: true", "samples whole True"),
        ("learning_rate: .nan", "learning_rate number nan"),
        ("seq_len: null", "seq_len whole None"),
        ("data: 5", "data text 5 quotes"),
        ("overwrite: 'yes'", "overwrite true false 'yes'"),
        ("batch_size: 1\nbatch-size: 2", "'batch_size' twice"),
        ("[1, 2]", "'mode: async' list"),
        ("mode: [", "not YAML"),
        ("mode: sync\naccumulate: 2", "and the command line together"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_by_name(tmp_path, text, words):
    with pytest.raises(UsageError) as error:
        parse("--config", write(tmp_path, text))
    assert all(word in str(error.value) for word in ("config.yaml", *words.split()))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"--config .*absent\.yaml cannot be read: No such file"):
        parse("--config", str(tmp_path / "absent.yaml"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--sede 5", "unknown flag --sede '--seed'"),
        ("--moed=sync", "unknown flag --moed '--mode'"),
        ("--qqqq", "unknown flag --qqqq --help"),
        ("train", "unexpected 'train' --mode async"),
        ("--seed", "argument --seed: expected one argument"),
        ("--samples 1e400", "--samples whole '1e400'"),
        ("--learning-rate inf", "--learning-rate number 'inf'"),
    ],
)
def test_a_command_line_that_cannot_be_meant_says_what_to_type(line, words):
    with pytest.raises(UsageError) as error:
        parse(*line.split())
    assert all(word in str(error.value) for word in words.split())
    assert error.value.exit_code == 2


def test_a_flag_may_have_underscores_and_a_value_keeps_its_own():
    parsed = parse("--eval_data", "my_text", "--mask_prob=0.2", "--run-dir=a_b").settings
    assert (parsed.task.eval_data, parsed.task.mask_prob, parsed.output.run_dir) == ("my_text", 0.2, "a_b")
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
        (task_flags(Classification), "--train_file a --compile True", {"data": "a", "compile": True}),
        (FLAGS, "--model_save_dir m --checkpoint-every 1epoch", {"run_dir": "m", "checkpoint_every": "1epoch"}),
        (FLAGS, "--times exponential:1 --nproc 2", {"speeds": "exponential:1"}),
        (task_flags(Classification), "--model runs/x --nproc_per_node 2", {"model": "runs/x", "nproc": 2}),
    ],
)
def test_the_words_of_other_tools_are_taken_for_the_flag_that_means_the_same(script, argv, settings):
    flat = script.flatten(script.parse(argv.split(), prog="t", description="", examples="").settings)
    assert {name: flat[name] for name in settings} == settings


def test_a_file_of_before_names_the_task_and_the_settings_as_they_were_called(tmp_path):
    flags = task_flags(Classification)
    old = write(tmp_path, "task: classification\ninit_from: tiny\nsave_model: true\nepochs: 2.0\n")
    assert flags.make(flags.load_yaml(old)) == flags.make({})
    with pytest.raises(UsageError, match="unknown key 'task'"):
        flags.load_yaml(write(tmp_path, "task: causal_lm\n"))


@pytest.mark.parametrize(
    ("task", "length"),
    [("masked_lm", (9600, None, 8)), ("classification", (None, 2.0, 4)), ("question_answering", (9600, None, 8))],
)
def test_a_task_says_how_long_it_is_trained_unless_the_user_does(task, length):
    flags = task_flags(task_class(task))
    budget = flags.make({}).budget
    assert (budget.samples, budget.epochs, budget.evaluations) == length
    assert (flags.make({"seconds": 5}).budget.samples, flags.make({"seconds": 5}).budget.epochs) == (None, None)
    assert (flags.make({"samples": 48}).budget.samples, flags.make({"samples": 48}).budget.epochs) == (48, None)


def test_tech_is_a_masking_of_its_own():
    assert make_settings({"tech": True, "candidates": "c"}).task.tech


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
def test_open_settings_are_resolved_from_the_others(values, expected):
    assert FLAGS.flatten(make_settings(values)).items() >= expected.items()


@pytest.mark.parametrize("task", TASKS)
def test_a_value_out_of_bounds_or_no_choice_is_refused_with_flag_bound_and_value(task):
    flags = task_flags(task_class(task))
    for spec in flags.specs.values():
        outside = [
            (spec.metadata[bound], spec.kind(spec.metadata[bound] + more))
            for bound, more in (("at_least", -1), ("above", 0), ("below", 0), ("at_most", 1))
            if spec.metadata[bound] is not None
        ]
        for bound, value in [*outside, *((choice, "x") for choice in spec.choices)]:
            with pytest.raises(UsageError) as error:
                flags.make({spec.name: value})
            assert str(error.value).startswith(f"{spec.flag} must be ")
            assert all(word in str(error.value) for word in (str(bound), ", got ", str(value)[:2]))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": "single", "nproc": 2}, "--mode single --nproc 2"),
        ({"accumulate": 2, "nproc": 2}, "--accumulate --mode async"),
        ({"mode": "sync", "rule": "ringmaster"}, "--rule --mode sync"),
        ({"mode": "sync", "transport": "shared_memory"}, "--transport --mode sync"),
        ({"clock": "virtual", "mode": "hogwild"}, "--clock virtual --mode hogwild"),
        ({"clock": "virtual", "transport": "process_group"}, "--transport --clock virtual"),
        ({"network": "bytes=1,worker=1,server=1"}, "--network --clock virtual"),
        ({"mode": "single", "speeds": "exponential:1"}, "--speeds --mode single"),
        ({"hogwild_state": "shared"}, "--hogwild-state --mode single"),
        ({"mode": "hogwild", "hogwild_state": "shared", "optimizer": "sgd"}, "--hogwild-state --optimizer"),
        ({"momentum": 0.9}, "--momentum --optimizer adamw"),
        ({"optimizer": "sgd", "beta1": 0.8}, "--beta1 --optimizer sgd"),
        ({"optimizer": "sgd", "beta2": 0.8}, "--beta2 --optimizer sgd"),
        ({"seconds": 9, "schedule": "cosine"}, "--schedule cosine --samples"),
        ({"samples": 0, "seconds": 9}, "--seconds --samples 0"),
        ({"samples": 0, "target_loss": 9}, "--target-loss --samples 0"),
        ({"samples": 0, "evaluate_every": "8"}, "--evaluate-every --samples 0"),
        ({"samples": 0, "patience": 2}, "--patience --samples 0"),
        ({"samples": 80, "epochs": 2}, "--epochs 2 --samples 80"),
        ({"patience": 8}, "--patience 8 --evaluations 8"),
        ({"evaluations": 9, "evaluate_every": "1epoch"}, "--evaluations 9 --evaluate-every 1epoch"),
        ({"evaluate_every": "0.0epoch"}, "--evaluate-every '0.0epoch'"),
        ({"checkpoint_every": "0"}, "--checkpoint-every '0'"),
        ({"model": "bert-base-uncased", "vocab_size": 99}, "--vocab-size --model tiny"),
        ({"text_column": "tweet"}, "--text-column --data pydocs"),
        ({"mask": "candidates"}, "--mask candidates mask_candidates.py --candidates"),
        ({"mask": "word", "candidates": "c", "candidate_share": 0.5}, "--candidate-share --mask candidates"),
        ({"tech": True}, "--tech mask_candidates.py --candidates"),
        ({"tech": True, "candidates": "c", "mask": "word"}, "--tech --mask word"),
        ({"tech": True, "candidates": "c", "candidate_share": 0.5}, "--tech --candidate-share"),
        ({"run_dir": "a", "runs_dir": "b"}, "--runs-dir --run-dir"),
        ({"mode": "sync", "nproc": 1025}, "--nproc 1025 1024"),
    ],
)
def test_a_setting_without_effect_is_refused_and_the_flags_are_named(values, words):
    with pytest.raises(UsageError) as error:
        make_settings(values)
    assert all(word in str(error.value) for word in words.split())


def test_virtual_workers_may_be_many():
    assert make_settings({"nproc": 100_000, "clock": "virtual"}).job.nproc == 100_000


def test_not_a_number_is_refused():
    with pytest.raises(UsageError, match="--learning-rate must be a number, got nan"):
        make_settings({"learning_rate": float("nan")})


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
def test_a_setting_that_has_an_effect_is_accepted(values):
    assert FLAGS.flatten(make_settings(values)).items() >= values.items()


def one_of(*values):
    return st.sampled_from(values)


PROPER = {"allow_nan": False, "allow_infinity": False}
# YAML reads some of these, unquoted, as something that is not text.
TEXTS = one_of("none", "null", "1e-4", "yes", "12:30", "2024-01-01", "a: b", "# c", "~", "ü\u2028x", "\x85") | st.text(
    min_size=1
)
POSITIVE = st.floats(0, exclude_min=True, **PROPER)  # type: ignore[arg-type]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**32 - 1),
            "samples": st.integers(0, 10**12),
            "learning_rate": POSITIVE,
            "schedule": one_of("constant", "linear", "cosine"),
            "warmup": st.integers(0, 10**6),
            "weight_decay": st.floats(0, **PROPER),
            "data": TEXTS,
            "eval_data": st.none() | TEXTS,
            "seq_len": st.integers(8, 10**6),
            "mask": one_of("token", "word"),
            "mask_prob": st.floats(0, 1, exclude_min=True, exclude_max=True),
            "cache_dir": st.none() | TEXTS,
            "model": TEXTS,
            "dropout": st.floats(0, 1, exclude_max=True),
            "rule": TEXTS,
            "nproc": st.integers(1, 1024),
            "run_dir": TEXTS,
        },
    ),
    st.text(),
)
@settings(deadline=None)
def test_what_to_yaml_writes_reads_back_as_equal_settings(tmp_path_factory, values, comment):
    some = make_settings({"mode": "async", **values})
    path = write(tmp_path_factory.getbasetemp(), FLAGS.to_yaml(some, comment=comment))
    assert parse("--config", path) == Parsed(some, frozenset(FLAGS.flatten(some)))
    assert make_settings(FLAGS.flatten(some)) == some


def test_yaml_shows_every_default_resolved():
    shown = yaml.safe_load(FLAGS.to_yaml(make_settings({"optimizer": "sgd"})))
    assert shown == FLAGS.flatten(make_settings({"optimizer": "sgd"}))
    assert (shown["learning_rate"], shown["samples"], shown["schedule"]) == (0.1, 9600, "linear")


def test_a_run_folder_s_settings_neither_name_its_place_nor_overwrite_it():
    kept = make_settings({"run_dir": "mine", "overwrite": True})
    missing = FLAGS.flatten(kept).keys() - yaml.safe_load(FLAGS.to_yaml(kept, places=False)).keys()
    assert missing == FLAGS.places >= {"runs_dir", "run_dir", "overwrite", "resume", "cache_dir"}


def test_print_config_prints_the_resolved_settings_and_leaves_with_0(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        parse("--print-config", "--mode", "sync", "--learning-rate", "1e-5")
    assert left.value.code == 0
    config = write(tmp_path, capsys.readouterr().out)
    assert parse("--config", config).settings == make_settings({"mode": "sync", "learning_rate": 1e-5})


@pytest.mark.parametrize("values", [{"seed": 1}, {"rule": "ringmaster"}, {"nproc": 2}, {"learning_rate": 2e-3}])
def test_the_hash_changes_with_what_is_run(values):
    assert FLAGS.settings_hash(make_settings(values)) != FLAGS.settings_hash(make_settings({}))


@pytest.mark.parametrize("values", [{"runs_dir": "a"}, {"run_dir": "a"}, {"cache_dir": "a"}, {"learning_rate": 5e-4}])
def test_the_hash_does_not_change_with_where_it_is_kept_or_with_a_default_typed_out(values):
    assert FLAGS.settings_hash(make_settings(values)) == FLAGS.settings_hash(make_settings({}))


def test_the_hash_is_six_hexadecimal_digits_and_the_same_for_1_and_1_point_0():
    whole, real = (FLAGS.settings_hash(make_settings({"learning_rate": rate})) for rate in (1, 1.0))
    assert whole == real
    assert len(whole) == 6
    int(whole, 16)


def test_differing_keys_are_those_of_the_run_and_not_of_its_place():
    old = FLAGS.flatten(make_settings({}))
    new = FLAGS.flatten(make_settings({"seed": 3, "seconds": 60, "runs_dir": "b", "cache_dir": "c"}))
    assert FLAGS.differing_keys(old, new) == [
        ("seed", 0, 3),
        ("samples", 9600, None),
        ("seconds", None, 60.0),
        ("schedule", "linear", "constant"),
    ]
    assert FLAGS.differing_keys(old, old) == []
