"""The table of loose runs, its pictures, and what it says of runs that are in no mean or on other machines."""

import csv
import dataclasses
import html
import io
import itertools
import re

import pytest
from doors import cli
from marks import slow
from synthetic import SyntheticArm, edit_json, straight, write_finetuning, write_run

from analysis.compare import read_all, render, render_csv

SYNC, ASYNC = (SyntheticArm(name, 4, "measured", None) for name in ("sync", "async"))
pytestmark = pytest.mark.filterwarnings("error")


def compare(*arguments):
    return cli(["analysis.compare", *map(str, arguments)])


def printed(*folders):
    """What the command prints, without the pictures that it draws."""
    return render(read_all(folders)[0], "text")


def rows_of(folder):
    return list(csv.DictReader(io.StringIO(render_csv(read_all([folder])[0]))))


@pytest.fixture
def mixed(tmp_path):
    """One run of sync, two of async and a third that diverged."""
    write_run(tmp_path / "s0", SYNC, straight(9.0, 5.0, seconds=20.0))
    for seed, loss in enumerate((5.0, 5.5)):
        delays = [1, 3 + 2 * seed]
        write_run(tmp_path / f"a{seed}", ASYNC, straight(9.0, loss, seconds=10.0 + seed), seed=seed, delays=delays)
    write_run(tmp_path / "x", ASYNC, [(0, 0.0, 9.0), (160, 2.0, None)], seed=2, status="DIVERGED")
    return tmp_path


def test_the_table_has_means_over_seeds_and_lists_what_is_not_in_them(mixed):
    ended = compare(mixed)
    assert ended.code == 0
    row = next(line.split() for line in ended.out.splitlines() if line.split()[:1] == ["async"])
    assert row[:9] == ["async", "asynchronous", "4", "2/3", "(diverged", "1/3)", "5.2500", "±", "0.3536"]
    assert "not in the means:\n  x: DIVERGED" in ended.out
    assert str(mixed / "figures" / "loss_vs_seconds.png") in ended.out


def test_fine_tunings_are_listed_under_a_heading_of_their_own(mixed):
    assert "fine-tuning" not in printed(mixed)
    write_finetuning(mixed / "tuned", seed=0, macro_f1=0.5, parent={"run": "s0"})
    assert "fine-tuning runs (in analysis.report):\n  tuned: DONE" in printed(mixed)


def test_runs_of_a_task_with_a_head_that_began_from_no_run_are_in_a_table(tmp_path):
    for name, arm in (("a", ASYNC), ("s", SYNC)):
        write_run(tmp_path / name, arm, straight(9.0, 5.0, seconds=20.0), task="classification", parent=None)
    assert printed(tmp_path).count(" 1/1 ") == 2


def test_csv_is_unrounded(mixed):
    rows = list(csv.DictReader(io.StringIO(compare(mixed, "--format", "csv").out)))
    (sync,) = [row for row in rows if row["mode"] == "sync"]
    (other,) = [row for row in rows if row["mode"] == "async"]
    assert sync["loss_mean"] == "5.0"
    assert sync["loss_sd"] == ""
    assert sync["loss_n"] == "1"
    assert float(other["loss_sd"]) == 0.125**0.5
    assert other["runs"] == "3"
    assert other["done"] == "2"
    assert other["diverged"] == "1"
    assert other["delay_max_mean"] == "5.0"


def test_a_run_that_ended_without_a_loss_is_in_no_mean_though_it_is_done(tmp_path):
    for seed, seconds in enumerate((10.0, 12.0)):
        write_run(tmp_path / f"a{seed}", ASYNC, straight(9.0, 5.0, seconds=seconds), seed=seed)
    write_run(tmp_path / "x", ASYNC, [(0, 0.0, 9.0), (160, 2.0, None)], seed=2)
    (row,) = rows_of(tmp_path)
    assert row["runs"] == "3"
    assert row["done"] == "2"
    assert row["diverged"] == "1"
    assert row["seconds_mean"] == "11.0"


def test_two_folders_are_compared_in_one_table(mixed, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_run(other / "s0", SYNC, straight(9.0, 4.0, seconds=20.0), seed=7)
    out = printed(mixed, other)
    assert next(line.split()[3] for line in out.splitlines() if line.split()[:1] == ["sync"]) == "2/2"
    write_run(mixed / "inner" / "s9", SYNC, straight(9.0, 4.0, seconds=20.0), seed=9)
    for again in (mixed, mixed / "inner"):
        assert "lies in two of the folders; name each run once" in compare(mixed, again).err


def test_two_budgets_in_seconds_stand_beside_the_seconds_that_were_measured(tmp_path):
    for seconds in (30, 60):
        arm = dataclasses.replace(ASYNC, settings={"seconds": seconds})
        write_run(tmp_path / f"{seconds}", arm, straight(9.0, 5.0, seconds=seconds))
    write_run(tmp_path / "b", ASYNC, [], seed=1, status="FAILED")  # before its first evaluation: it makes no table
    out = compare(tmp_path, "--format", "md").out
    assert "| budget seconds | runs | loss | metric accuracy | seconds | " in out
    assert "different tables" not in out


@pytest.mark.parametrize("name", [r"$\frac{1$", *slow("$x$ {0} %", r"\$<b>&")])
def test_a_name_is_text_in_tables_and_pictures(tmp_path, name):
    other = dataclasses.replace(ASYNC, algorithm=name)
    for folder, arm in (("s", SYNC), ("o", other)):
        write_run(tmp_path / folder, arm, straight(9.0, 5.0, seconds=20.0))
    ended = compare(tmp_path)
    assert ended.code == 0
    assert ended.err == ""
    assert name in ended.out
    drawn = (tmp_path / "figures" / "loss_vs_seconds.svg").read_text("utf-8")
    assert f"<!-- {html.escape(name, quote=False)}" in drawn.replace("- -", "--")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"data_fingerprint": "beef"}, "data f00d"),
        ({"eval_masking": "word:0.3"}, "evaluation word:0.3"),
        ({"eval_weight": 24.0}, "terms 24"),
        ({"task": "causal_lm"}, "task causal_lm"),
    ],
)
def test_losses_of_unlike_evaluations_are_never_in_one_table(tmp_path, change, told):
    for name in ("a", "b"):
        write_run(tmp_path / name, ASYNC, straight(9.0, 5.0, seconds=10.0), seed=int(name == "b"))
    edit_json(tmp_path / "b" / "summary.json", **change)
    out = printed(tmp_path)
    assert out.startswith("WARNING: losses and metrics of different tables must not be compared\n")
    assert told in out
    assert out.count("1/1") == 2


def test_runs_with_other_settings_are_rows_of_their_own(tmp_path):
    for seed, rate in enumerate((0.1, 0.2)):
        write_run(tmp_path / f"{seed}", ASYNC, straight(9.0, 5.0, seconds=10.0), seed=seed, learning_rate=rate)
    header, *rows = printed(tmp_path).splitlines()[2:5]
    assert "learning_rate" in header.split()
    assert [row.split()[header.split().index("learning_rate")] for row in rows] == ["0.1", "0.2"]


def test_a_seed_that_occurs_twice_and_other_machines_are_warnings(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, ASYNC, straight(9.0, 5.0, seconds=10.0))
    edit_json(tmp_path / "b" / "environment.json", cpu="another")
    out = printed(tmp_path)
    assert "2 runs have seed 0; its ± is not over different seeds only" in out
    assert "WARNING: seconds of different machines must not be compared: a processor, 2 cores (1 runs)" in out


def test_a_run_beside_other_programs_is_noted_where_its_seconds_are_in_the_table(tmp_path):
    for seed, share in enumerate((0.07, 0.54)):
        load = {"own_share": 0.4, "others_share": share, "stolen_share": 0.03, "cores": 2}
        for arm in (ASYNC, dataclasses.replace(ASYNC, clock="virtual")):
            name = f"{arm.name}-{seed}"
            write_run(tmp_path / name, arm, straight(9.0, 5.0, seconds=10.0), seed=seed, machine_load=load)
    out = printed(tmp_path)
    told = "NOTE: other programs used 57 % of the machine during async-w4-1, so its seconds are no speed comparison"
    assert [line for line in out.splitlines() if "other programs" in line] == [told]


def test_rows_with_unlike_updates_are_noted_below_their_table(tmp_path):
    for arm, size in ((ASYNC, 16), (SYNC, 64)):
        for seed in (0, 1):
            path = tmp_path / f"{arm.name}-{seed}"
            updates = 160 // size + seed  # the last ones may be smaller
            write_run(path, arm, straight(9.0, 5.0, seconds=10.0), seed=seed, num_updates=updates)
    more = f"async makes {(10 + 11) / (2 + 3):.3g} times as many updates of the same samples as sync"
    told = f"NOTE: Unequal batches: {more} ({320 / 21:.3g} and {320 / 5:.3g} samples an update)\n"
    assert told in printed(tmp_path)
    assert "Unequal" not in printed(tmp_path / f"{ASYNC.name}-0")


def test_a_picture_has_the_mean_of_the_runs_that_the_table_has(tmp_path):
    for size, losses in {16: (5.0, 5.5), 32: (6.0,)}.items():
        arm = dataclasses.replace(ASYNC, batch_size=size)
        for seed, loss in enumerate(losses):
            write_run(tmp_path / f"{size}-{seed}", arm, straight(9.0, loss, seconds=10.0), seed=seed)
    write_run(
        tmp_path / "x", ASYNC, straight(9.0, 8.0, seconds=2.0, samples=40), seed=2, status="INTERRUPTED", budget=160
    )
    out = compare(tmp_path).out
    assert "2/3" in out
    assert "1/1" in out
    drawn = (tmp_path / "figures" / "loss_vs_samples.svg").read_text("utf-8")
    assert re.findall(r"<!-- (.* \(n = \d\)) -->", drawn) == ["async, batch 16 (n = 2)", "async, batch 32 (n = 1)"]


def test_measured_and_virtual_seconds_share_no_picture(tmp_path):
    write_run(tmp_path / "a", ASYNC, straight(9.0, 5.0, seconds=10.0))
    write_run(tmp_path / "b", dataclasses.replace(ASYNC, clock="virtual"), straight(9.0, 5.0, seconds=10.0))
    compare(tmp_path, "--out", tmp_path / "pictures")
    names = {path.stem for path in (tmp_path / "pictures").iterdir()}
    assert names == {"loss_vs_seconds", "loss_vs_virtual_seconds", "loss_vs_samples"}


def test_groups_of_one_mode_with_other_worker_counts_look_unlike_in_the_legend(tmp_path):
    for number, workers in itertools.product((0, 1), (2, 4)):
        arm = dataclasses.replace(ASYNC, algorithm=("sync", "async")[number], num_workers=workers)
        write_run(tmp_path / arm.name, arm, straight(9.0, 5.0, seconds=10.0 * workers))
    compare(tmp_path)
    legend = (tmp_path / "figures" / "loss_vs_samples.svg").read_text().partition('<g id="legend_1">')[2]
    lines = re.findall(r'<g id="line2d_\d+">\s*<path d="[^"]*" style="([^"]*stroke: [^"]*)"', legend)
    assert len(lines) == 4
    assert len(set(lines)) == 4
    assert len({re.search("stroke: (#[0-9a-f]+)", line)[1] for line in lines}) == 4


def test_what_the_user_has_to_change_is_exit_code_2(tmp_path, mixed):
    assert compare(tmp_path / "nothing").code == 2
    (tmp_path / "file").write_text("")
    ended = compare(mixed, "--out", tmp_path / "file")
    assert ended.code == 2
    assert ended.err.startswith("error: ")
