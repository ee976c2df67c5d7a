"""The comparison prints exact means over DONE runs, counts all others, and draws both pictures in the same colours."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy
import pandas
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import write_finetuning

from analysis.compare import Statistic, compare, main, render, render_csv
from analysis.report.figures.compare import pictures, save_figures
from analysis.study.alike import by_kind
from analysis.study.run import Run, load_runs
from asyncsgd.records.events import DIVERGED, DONE, FAILED, Evaluation, Fault, Resumed
from asyncsgd.records.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[2]
MISSING_DELAY = {"mean": None, "p50": None, "p95": None, "max": None}


def write_run(
    path,
    *,
    mode="async",
    rule="asynchronous",
    num_workers=4,
    seed=0,
    loss=5.0,
    perplexity=150.0,
    train_seconds=8.0,
    delay=None,
    status=DONE,
    batch_size=8,
    data="f00d",
    num_samples=160,
    oversubscription=1.0,
    fault="",
    num_resumes=0,
    finished=True,
    settings="",
    curve=((0, 9.0), (1, 6.0), (2, None)),
    **recorded,
):
    folder = RunFolder(path, task="masked_lm", better={"accuracy": "higher", "perplexity": "lower"})
    if settings:
        (path / "settings.yaml").write_text(settings)
    weight = recorded.get("eval_weight", 300.0)
    for part, value in curve:
        samples, reached = part * num_samples // 2, loss if value is None else value
        folder.append(
            Evaluation(samples // 8, samples, part * train_seconds / 2, reached, weight, {"accuracy": 0.25}, 0.25)
        )
    if fault:
        folder.append(Fault(fault, 1, 20, train_seconds))
    for _ in range(num_resumes):
        folder.append(Resumed("000000000080", 10, 80, train_seconds, 0))
    if finished:
        folder.write_summary(
            {
                "status": status,
                "mode": mode,
                "rule": rule,
                "from_scratch": True,
                "num_workers": num_workers,
                "threads": 1,
                "seed": seed,
                "batch_size": batch_size,
                "data_fingerprint": data,
                "num_samples": num_samples,
                "num_samples_applied": num_samples,
                "num_updates": num_samples // 8,
                "train_seconds": train_seconds,
                "eval_seconds": 0.75,
                "first_eval_loss": 9.0,
                "final_eval_loss": loss,
                "metrics": {"accuracy": 0.25, "perplexity": perplexity},
                "details": {},
                "eval_weight": 300.0,
                "samples_per_second": num_samples / train_seconds,
                "delay": delay or MISSING_DELAY,
                "oversubscription": oversubscription,
                "clock": "measured",
                "parameters_sha256": "00",
            }
            | recorded
        )
    folder.close()


@pytest.fixture
def mixed(tmp_path):
    """Two async seeds and a diverged one, one sync run, one run that is still going."""
    folder = tmp_path / "runs"
    write_run(folder / "a0", loss=5.0, perplexity=150.0, delay={"mean": 3.0, "p50": 3, "p95": 4.0, "max": 6})
    delay = {"mean": 2.5, "p50": 3, "p95": 5.0, "max": 8}
    write_run(folder / "a1", seed=1, loss=5.5, perplexity=250.0, train_seconds=10.0, delay=delay)
    write_run(
        folder / "a2", seed=2, loss=float("nan"), perplexity=None, status=DIVERGED, fault="worker 1: the loss is NaN"
    )
    write_run(folder / "s0", mode="sync", rule="synchronous", train_seconds=16.0, delay=dict.fromkeys(MISSING_DELAY, 0))
    write_run(folder / "x", finished=False)
    return folder


EXPECTED = """\
data f00d

mode   rule          workers                runs       final loss  accuracy  perplexity  train s  samples/s  delay mean  delay p95  delay max
---------------------------------------------------------------------------------------------------------------------------------------------
sync   synchronous         4                 1/1       5.0000 ± -    0.2500      150.00     16.0       10.0        0.00        0.0          0
async  asynchronous        4  2/3 (diverged 1/3)  5.2500 ± 0.3536    0.2500      200.00      9.0       18.0        2.75        4.5          8

not in the means:
  a2: DIVERGED; the evaluation at version 20 has no finite loss; fault at version 20: worker 1: the loss is NaN
  x: UNFINISHED; no summary.json: the run crashed, was killed or is still running
"""  # noqa: E501


def test_the_text_table_has_exact_means_and_lists_what_is_not_in_them(mixed):
    assert render(compare(load_runs(mixed)[0]), "text") == EXPECTED


def test_the_markdown_table_has_the_same_cells(mixed):
    lines = render(compare(load_runs(mixed)[0]), "md").splitlines()
    assert lines[3] == "|---|---|" + "---:|" * 10
    assert lines[5] == (
        "| async | asynchronous | 4 | 2/3 (diverged 1/3) | 5.2500 ± 0.3536 | 0.2500 | 200.00 "
        "| 9.0 | 18.0 | 2.75 | 4.5 | 8 |"
    )


def test_csv_is_unrounded_with_empty_cells_for_what_is_missing(mixed):
    sync, asynchronous = csv.DictReader(io.StringIO(render_csv(compare(load_runs(mixed)[0]))))
    assert (sync["loss_mean"], sync["loss_sd"], sync["loss_n"]) == ("5.0", "", "1")
    assert asynchronous["loss_sd"] == repr(0.125**0.5)
    assert (asynchronous["num_done"], asynchronous["num_all"], asynchronous["num_diverged"]) == ("2", "3", "1")
    assert (asynchronous["delay_p95_mean"], asynchronous["delay_max"]) == ("4.5", "8")


def test_perplexity_is_the_mean_of_the_runs_not_the_exponential_of_the_mean_loss(mixed):
    asynchronous = compare(load_runs(mixed)[0]).tables[0].rows[1]
    assert asynchronous.metrics["perplexity"].mean == 200.0


def test_a_missing_value_is_a_dash_and_shows_over_how_many_runs_the_mean_is(tmp_path):
    write_run(tmp_path / "a", perplexity=None)
    write_run(tmp_path / "b", seed=1, perplexity=100.0)
    comparison = compare(load_runs(tmp_path)[0])
    cells = render(comparison, "md").splitlines()[4].split(" | ")
    assert cells[6] == "100.00 (n=1)"
    assert cells[9:] == ["-", "-", "- |"]
    assert comparison.problems == ()


def test_a_group_without_a_finished_run_is_a_row_of_dashes(tmp_path):
    write_run(tmp_path / "a", status=FAILED, fault="rank 2 was lost")
    comparison = compare(load_runs(tmp_path)[0])
    assert render(comparison, "md").splitlines()[4] == ("| async | asynchronous | 4 | 0/1 | - | - | - | - | - | - |")
    assert comparison.left_out == ("a: FAILED; fault at version 20: rank 2 was lost",)


def test_different_data_are_separate_tables_and_pictures_with_a_warning(tmp_path):
    write_run(tmp_path / "a", data="one")
    write_run(tmp_path / "b", data="two")
    runs, _ = load_runs(tmp_path)
    comparison = compare(runs)
    assert [table.evaluation_set for table in comparison.tables] == ["one", "two"]
    assert [[row.num_all for row in table.rows] for table in comparison.tables] == [[1], [1]]
    assert comparison.warnings == (
        "not pooled: rows differ in data",
        "WARNING: these tables differ in data; losses and metrics of different tables must not be compared",
    )
    assert [path.name for path in save_figures(runs, tmp_path / "out")] == [
        f"loss_vs_{axis}_{data}.{extension}"
        for data in ("one", "two")
        for axis in ("seconds", "samples")
        for extension in ("png", "svg")
    ]


def test_different_evaluation_masks_are_different_tests(tmp_path):
    write_run(tmp_path / "a", eval_masking="token:0.15")
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", eval_masking="word:0.3")
    runs, _ = load_runs(tmp_path)
    comparison = compare(runs)
    assert [table.evaluation_set for table in comparison.tables] == ["f00d", "f00d masked word:0.3"]
    assert [[row.num_all for row in table.rows] for table in comparison.tables] == [[2], [1]]
    assert [picture.name for picture in pictures(runs)[::2]] == ["loss_vs_seconds_f00d", "loss_vs_seconds_f00d-masked-"]


def test_runs_of_another_task_on_the_same_data_have_a_table_and_pictures_of_their_own(tmp_path, capsys):
    write_run(tmp_path / "masked", task="masked_lm", loss=5.0)
    write_run(tmp_path / "causal", task="causal_lm", loss=8.0, perplexity=20.0)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "not pooled: rows differ in task\n"
        "WARNING: these tables differ in task; losses and metrics of different tables must not be compared\n\n"
        "data f00d, task causal_lm\n"
    )
    assert [line.split()[4] for line in out.splitlines() if line.startswith("async")] == ["8.0000", "5.0000"]
    names = [f"loss_vs_{axis}_{task}.png" for axis in ("samples", "seconds") for task in ("causal-lm", "masked-lm")]
    assert sorted(path.name for path in (tmp_path / "figures").glob("*.png")) == names


def test_losses_on_64_and_on_500_samples_are_never_pooled(tmp_path):
    for seed, weight in ((0, 64.0), (1, 500.0)):
        write_run(tmp_path / f"r{seed}", seed=seed, eval_weight=weight)
    runs, _ = load_runs(tmp_path)
    shown = render(compare(runs), "text")
    assert shown.startswith("not pooled: rows differ in loss terms\n")
    assert [picture.name for picture in pictures(runs)[::2]] == ["loss_vs_seconds_64", "loss_vs_seconds_500"]
    assert [line for line in shown.splitlines() if line.startswith("data")] == [
        "data f00d, loss terms 64",
        "data f00d, loss terms 500",
    ]


def test_a_run_that_failed_before_its_first_evaluation_is_beside_those_on_its_data(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, status=FAILED, task="masked_lm", eval_weight=None, curve=())
    (table,) = compare(load_runs(tmp_path)[0]).tables
    assert [(row.num_done, row.num_all) for row in table.rows] == [(1, 2)]


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("learning_rate", (0.01, 0.1)),
        ("samples", (160, 320)),
        ("seconds", (30.0, 60.0)),
        ("model", ("small", "tiny")),
        ("speeds", ("none", "slow:worker=0,factor=3")),
        ("threads", (1, 2)),
        ("clip_norm", (0.0, 1.0)),
    ],
)
def test_runs_with_other_settings_are_rows_of_their_own_with_a_column_and_a_label(tmp_path, key, values):
    for seed, value in enumerate(values):
        write_run(tmp_path / f"r{seed}", seed=seed, settings=yaml.safe_dump({"seed": seed, key: value}))
    runs, _ = load_runs(tmp_path)
    comparison = compare(runs)
    assert comparison.warnings == (f"not pooled: rows differ in {key}",)
    ((first, second),) = (table.rows for table in comparison.tables)
    assert ([first.settings[key], second.settings[key]], first.num_all, second.num_all) == ([*values], 1, 1)
    lines = render(comparison, "md").splitlines()
    header, *rows = (line.split(" | ") for line in (lines[4], *lines[6:8]))
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in values]
    assert (header[3], [row[3] for row in rows]) == (key, texts)
    labels = [f"async, 4 workers, {key} {value} (n = 1)" for value in values]
    assert [[entry.text for entry in picture.legend] for picture in pictures(runs)] == [labels, labels]


def test_runs_that_differ_in_seed_evaluations_and_the_path_of_equal_data_share_a_row(tmp_path):
    for seed in (0, 1):
        told = {"seed": seed, "evaluations": 2 + seed, "data": f"copy{seed}.txt", "eval_samples": 500 + seed}
        write_run(tmp_path / f"r{seed}", seed=seed, settings=yaml.safe_dump(told))
    comparison = compare(load_runs(tmp_path)[0])
    assert comparison.warnings == ()
    assert [row.num_all for table in comparison.tables for row in table.rows] == [2]


def test_rates_of_different_modes_have_a_column_and_need_no_label(tmp_path):
    write_run(tmp_path / "a", settings="learning_rate: 0.01\n")
    write_run(tmp_path / "s", mode="sync", rule="synchronous", settings="learning_rate: 0.1\n")
    runs, _ = load_runs(tmp_path)
    assert compare(runs).warnings == ()
    lines = render(compare(runs), "md").splitlines()
    assert [line.split(" | ")[3] for line in (lines[2], *lines[4:6])] == ["learning_rate", "0.1", "0.01"]
    assert [entry.text for entry in pictures(runs)[0].legend] == ["sync, 4 workers (n = 1)", "async, 4 workers (n = 1)"]


@given(
    st.lists(
        st.fixed_dictionaries(
            {"mode": st.sampled_from(["sync", "async"]), "seed": st.integers(0, 9)},
            optional={key: st.integers(0, 1) for key in ("learning_rate", "samples", "warmup")},
        ),
        min_size=1,
        max_size=8,
    )
)
def test_two_runs_are_of_one_kind_exactly_if_they_differ_in_their_seed_alone(told):
    runs = [
        Run(Path(str(k)), str(k), {"status": DONE, "mode": one["mode"]}, pandas.DataFrame(), (), one)
        for k, one in enumerate(told)
    ]
    kind_of = {run: kind for kind, group in by_kind(runs, ["seed"]).items() for run in group}
    rest = [{key: value for key, value in one.items() if key != "seed"} for one in told]
    for one in range(len(runs)):
        for other in range(one):
            assert (kind_of[runs[one]] == kind_of[runs[other]]) == (rest[one] == rest[other])


def test_a_seed_that_occurs_twice_in_a_group_is_a_warning(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    (warning,) = compare(load_runs(tmp_path)[0]).tables[0].warnings
    assert warning == "WARNING: async, 4 workers: 2 runs have seed 0; its ± is not over different seeds only"


def test_batch_size_is_a_column_where_it_varies(tmp_path):
    write_run(tmp_path / "a")
    assert "batch" not in render(compare(load_runs(tmp_path)[0]), "text")
    write_run(tmp_path / "b", batch_size=16)
    lines = render(compare(load_runs(tmp_path)[0]), "md").splitlines()
    assert [line.split(" | ")[2:5] for line in (lines[2], *lines[4:6])] == [
        ["workers", "batch", "runs"],
        ["4", "8", "1/1"],
        ["4", "16", "1/1"],
    ]


def test_runs_without_any_summary_still_make_a_report(tmp_path):
    write_run(tmp_path / "a", finished=False)
    assert render(compare(load_runs(tmp_path)[0]), "text").startswith(
        "no run has a summary yet\n\nnot in the means:\n  a:"
    )


@pytest.fixture(scope="module")
def runs_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    # a plain sum of these losses depends on its order
    for seed, loss in enumerate((0.1, 1e16, 0.3, 4.7)):
        write_run(folder / f"r{seed}", seed=seed, loss=loss, train_seconds=8.0 + seed)
    for seed in (4, 5):
        write_run(folder / f"r{seed}", seed=seed, mode="sync", rule="synchronous", status=FAILED)
    return load_runs(folder)[0]


@settings(max_examples=20, deadline=None)
@given(order=st.permutations(range(6)))
def test_the_order_of_the_runs_changes_nothing(runs_once, order):
    permuted = [runs_once[index] for index in order]
    assert compare(permuted) == compare(runs_once)
    assert list(map(lines, pictures(permuted))) == list(map(lines, pictures(runs_once)))


@pytest.fixture
def all_modes(tmp_path):
    for mode, rule in (("single", "asynchronous"), ("sync", "synchronous"), ("async", "asynchronous"), ("hogwild", "")):
        for seed in (0, 1):
            write_run(
                tmp_path / f"{mode}{seed}", mode=mode, rule=rule or None, seed=seed, num_workers=1 + (mode != "single")
            )
    return load_runs(tmp_path)[0]


def lines(picture):
    """Colour, dashes, marker and points of every line."""
    return [
        (line.get_color(), line._unscaled_dash_pattern, line.get_marker(), numpy.asarray(line.get_xydata()).tolist())
        for line in picture.figure.axes[0].get_lines()
    ]


def test_a_mode_has_one_colour_in_both_pictures_and_no_two_modes_share_it(all_modes):
    seconds, samples = ({entry.text: entry.look.colour for entry in picture.legend} for picture in pictures(all_modes))
    assert seconds == samples
    assert len(set(seconds.values())) == len(seconds) == 4


def test_dashes_tell_conditions_of_one_algorithm_apart_and_colours_and_markers_algorithms(tmp_path):
    for workers in (1, 2, 4):
        write_run(tmp_path / f"w{workers}", num_workers=workers)
    write_run(tmp_path / "r", rule="ringmaster")
    seconds, _ = pictures(load_runs(tmp_path)[0])
    drawn = {entry.text: (entry.look.colour, entry.look.marker, str(entry.dash)) for entry in seconds.legend}
    *plain, other = drawn.values()
    assert len({dash for *_, dash in plain}) == 3
    assert len({(colour, marker) for colour, marker, _ in plain}) == 1
    assert not set(other[:2]) & set(plain[0][:2])


def test_only_masked_tokens_are_called_masked_tokens(tmp_path):
    write_run(tmp_path / "shapes", task="shapes")
    seconds, _ = pictures(load_runs(tmp_path)[0])
    assert seconds.figure.axes[0].get_ylabel() == "evaluation loss"


def test_axes_have_units_and_legends_count_the_runs_in_the_mean(mixed):
    seconds, samples = pictures(load_runs(mixed)[0])
    assert [picture.name for picture in (seconds, samples)] == ["loss_vs_seconds", "loss_vs_samples"]
    assert seconds.figure.axes[0].get_xlabel() == "training seconds"
    assert seconds.figure.axes[0].get_ylabel() == "evaluation loss (nats per masked token)"
    assert samples.figure.axes[0].get_xlabel() == "samples"
    assert [entry.text for entry in seconds.legend] == ["sync, 4 workers (n = 1)", "async, 4 workers (n = 2)"]
    assert "A cross ends a run that did not finish; it is in no mean." in seconds.caption


def test_only_the_seconds_picture_marks_oversubscribed_runs(tmp_path):
    write_run(tmp_path / "a", oversubscription=2.0)
    write_run(tmp_path / "s", mode="sync", rule="synchronous")
    runs, _ = load_runs(tmp_path)
    seconds, samples = (picture.caption for picture in pictures(runs))
    assert "The machine had more threads than cores, so its seconds are no speed comparison." in seconds
    assert "more threads than cores" not in samples
    assert compare(runs).tables[0].warnings == (
        "NOTE: The machine had more threads than cores, so its seconds are no speed comparison. (async, 4 workers)",
    )


def test_seconds_that_were_measured_in_parts_are_marked_and_no_speed_comparison(tmp_path):
    write_run(tmp_path / "a", num_resumes=2)
    write_run(tmp_path / "s", mode="sync", rule="synchronous")
    write_run(tmp_path / "v", clock="virtual", num_resumes=1)  # goes on bit for bit, its seconds too
    runs, _ = load_runs(tmp_path)
    note = "Some runs were stopped and resumed, so their seconds are no speed comparison."
    assert f"NOTE: {note} (async, 4 workers)" in compare(runs).tables[0].warnings
    assert compare(runs).problems == ("a: resumed: its seconds were measured in 3 parts",)
    captions = {picture.name: picture.caption for picture in pictures(runs)}
    assert [name for name, caption in captions.items() if note in caption] == ["loss_vs_seconds"]


def test_a_mean_curve_covers_only_what_every_run_covers(tmp_path):
    write_run(tmp_path / "a", loss=5.0, train_seconds=8.0)
    write_run(tmp_path / "b", seed=1, loss=5.0, train_seconds=12.0)
    mean = lines(pictures(load_runs(tmp_path)[0])[0])[-1]
    # a is 9, 6, 5 at 0, 4, 8 seconds and b the same at 0, 6, 12
    assert mean[3] == [[0.0, 9.0], [4.0, 6.5], [6.0, 5.75], [8.0, pytest.approx((5.0 + 6.0 - 1 / 3) / 2)]]


def test_measured_and_virtual_seconds_share_no_picture(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", clock="virtual")
    made = pictures(load_runs(tmp_path)[0])
    assert [picture.name for picture in made] == ["loss_vs_seconds", "loss_vs_virtual_seconds", "loss_vs_samples"]
    assert [len(picture.legend) for picture in made] == [1, 1, 2]
    assert made[1].figure.axes[0].get_xlabel() == "virtual seconds"


def test_a_diverged_run_does_not_flatten_the_others(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", seed=1, loss=1e6, status=DIVERGED)
    seconds, _ = pictures(load_runs(tmp_path)[0])
    assert seconds.figure.axes[0].get_ylim() == pytest.approx((4.8, 9.2))
    assert "the curves of runs that diverged (1) end where they did" in seconds.caption


@pytest.mark.parametrize("form", ["text", "md", "csv"])
def test_the_command_prints_the_table_and_the_paths_of_two_pictures(mixed, capsys, form):
    assert main([str(mixed), "--format", form]) == 0
    out, err = capsys.readouterr()
    paths = [mixed / "figures" / f"loss_vs_{axis}.{end}" for axis in ("seconds", "samples") for end in ("png", "svg")]
    printed = (err if form == "csv" else out).splitlines()
    assert printed[-4:] == [str(path) for path in paths]
    assert printed[-5].endswith(": x")
    assert all(path.stat().st_size > 10_000 for path in paths)
    if form == "text":
        assert out.startswith(EXPECTED)
    if form == "csv":
        assert len(list(csv.reader(io.StringIO(out)))) == 3


def test_pictures_go_where_out_says(mixed, tmp_path, capsys):
    assert main([str(mixed), "--out", str(tmp_path / "deep" / "er")]) == 0
    assert (tmp_path / "deep" / "er" / "loss_vs_samples.png").is_file()
    assert not (mixed / "figures").exists()


def test_a_second_call_on_the_same_folder_prints_the_same(mixed, capsys):
    assert main([str(mixed)]) == 0
    first = capsys.readouterr()
    assert main([str(mixed)]) == 0
    assert capsys.readouterr() == first


def test_what_the_user_has_to_change_is_exit_code_2_without_a_traceback(mixed, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for arguments, told in (
        ([str(tmp_path / "nowhere")], "no such folder"),
        ([str(tmp_path / "empty")], "no run folder here"),
        ([str(mixed), "--out", str(tmp_path / "file")], "choose --out DIR"),
        ([str(mixed), "--formt", "md"], "--formt"),
        ([str(mixed), "--format", "html"], "html"),
        ([], "RUNS_DIR"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "analysis.compare", *arguments], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 2, done
        assert told in done.stderr
        assert "Traceback" not in done.stderr


def test_a_standard_deviation_needs_two_values():
    assert Statistic.of([2.0]) == Statistic(2.0, None, 1)
    assert Statistic.of([2.0, 4.0]).sd == 2**0.5


def test_fine_tuning_runs_are_listed_aside_and_in_no_mean_or_picture(tmp_path, capsys):
    write_run(tmp_path / "a")
    path = write_finetuning(tmp_path / "tuned", seed=0, macro_f1=0.6, parent={"run": "a"})
    runs, _ = load_runs(tmp_path)
    comparison = compare(runs)
    assert [(row.num_all, row.loss.mean) for table in comparison.tables for row in table.rows] == [(1, 5.0)]
    assert comparison.finetuning == ("tuned: DONE",)
    assert main([str(tmp_path), "--out", str(tmp_path / "figures")]) == 0
    out = capsys.readouterr().out
    assert "fine-tuning runs (in analysis.report):\n  tuned: DONE\n" in out
    assert "not in the pictures" not in out
    edited = path / "summary.json"
    edited.write_text(edited.read_text().replace('"macro_f1": 0.6', '"macro_f1": "good"'))
    runs, _ = load_runs(tmp_path)
    assert compare(runs).left_out == ("tuned: UNREADABLE; summary.json is damaged: its macro_f1 is 'good'",)
