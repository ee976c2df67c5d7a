"""The report's page, tables and pictures: what stands where, that text stays text, that units and clocks are named."""

from __future__ import annotations

import csv
import dataclasses
import html.parser
import io
import json
import math
import os
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path

import matplotlib.image
import numpy
import pytest
from reading import ASYNC, SYNC, results_of, row_of
from synthetic import SyntheticArm, straight, write_run, write_study

from analysis.findings.comparisons import FROM_SCRATCH
from analysis.report.__main__ import main, parser
from analysis.report.figures.pictures import looks
from analysis.report.gallery import gallery, save_gallery
from analysis.report.page import page, render
from analysis.report.tables.comparisons import comparisons, first_tests
from analysis.report.tables.contents import all_tables
from analysis.report.tables.table import as_csv, latex, markdown
from analysis.statistics.intervals import Interval
from asyncsgd.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "br", "img", "input", "link", "hr"}
HOSTILE = "<script>alert(1)</script>"


class Outline(html.parser.HTMLParser):
    """Reads a page strictly: every tag is closed in order, no attribute twice; keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.ids, self.targets, self.tags, self.texts = [], [], [], [], []
        self.attributes = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        names = [name for name, _ in attributes]
        assert len(names) == len(set(names)), f"<{tag}> has an attribute twice: {names}"
        values = dict(attributes)
        self.tags.append(tag)
        self.attributes.append((tag, values))
        if "id" in values:
            self.ids.append(values["id"])
        for value in values.values():
            self.targets += re.findall(r"url\(#([^)]+)\)", value or "")
        if (values.get("href") or "").startswith("#"):
            self.targets.append(values["href"][1:])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def outline(example_page):
    return Outline(example_page)


@pytest.fixture(scope="module")
def empty_page(empty):
    return render(page(empty, Path("report.html"), Path(".")))


@pytest.fixture(scope="module")
def drawn(example):
    return gallery(example)


@pytest.fixture(scope="module")
def pictures(drawn):
    return [(row, picture) for row in drawn.rows for picture in row.pictures]


@pytest.fixture(scope="module")
def known(example):
    """Rows of the example with numbers that can be compared with their cells: a time, and a loss within its margin."""
    time, loss = row_of(example, "time_to_target"), row_of(example, "loss_at_equal_samples")
    tested = dataclasses.replace(loss.equivalence, interval=Interval(0.0124, 0.0064, 0.0184, 0.95, 8), p=0.0313)
    rows = (
        dataclasses.replace(
            time,
            estimate=Interval(-13.9, -17.9, -9.9, 0.95, 8),
            times=dataclasses.replace(time.times, ratio=Interval(1.42, 1.22, 1.62, 0.95, 8)),
            p=0.0078,
            p_holm=0.0234,
        ),
        dataclasses.replace(loss, equivalence=tested, p_equivalence=0.0313, word="equivalent"),
    )
    return dataclasses.replace(example, tests=rows)


def positions(text, *words):
    found = [text.find(word) for word in words]
    assert -1 not in found, words[found.index(-1)]
    return found


def test_the_page_has_its_parts_in_the_order_of_the_eye(example_page):
    order = positions(
        example_page,
        "<h1>Asynchronous training",
        "Evaluation loss versus seconds",
        "Evaluation loss versus samples",
        'id="first-tests-title"',
        'id="trust-title"',
        'id="time-to-target"',
        'id="throughput"',
        'id="delays"',
        'id="final-loss"',
        'id="timeline"',
        'id="learning-rate"',
        'id="downstream"',
        'id="tables"',
        'id="every-run"',
        'id="environment-section"',
        'id="reproduce"',
        'id="left-out"',
    )
    assert order == sorted(order)


def test_the_page_is_well_formed_and_every_id_is_there_once_and_every_reference_leads_somewhere(outline):
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.targets) <= set(outline.ids)
    assert len(outline.targets) > 100  # markers and clips of the pictures, and the contents


def test_the_page_holds_no_script_and_no_address_and_forbids_both(example_page, outline):
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(outline.tags)
    assert "http" not in example_page.replace("http-equiv", "")
    assert "@import" not in example_page
    assert re.findall(r"url\((?!#)", example_page) == []
    assert not [name for _, values in outline.attributes for name in values if name.startswith("on") or name == "src"]
    policies = [values["content"] for _, values in outline.attributes if values.get("http-equiv")]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_every_picture_says_in_words_what_it_shows(outline):
    marked = [values for tag, values in outline.attributes if tag == "svg" and values.get("role") == "img"]
    drawn = [values for tag, values in outline.attributes if tag == "figure"]
    assert len(marked) == len(drawn) > 30
    assert all(len(values["aria-label"]) > 40 for values in marked)
    others = [values for tag, values in outline.attributes if tag == "svg" and values.get("role") != "img"]
    assert all(values.get("aria-hidden") == "true" for values in others)


def test_every_colour_of_a_picture_in_the_page_is_one_that_the_page_sets_for_light_and_dark(example_page):
    drawn = re.findall(r'<svg class="picture".*?</svg>|<svg[^>]*role="img".*?</svg>', example_page, flags=re.DOTALL)
    assert len(drawn) > 30
    used = {name for svg in drawn for name in re.findall(r"var\((--[a-z0-9-]+)\)", svg)}
    fixed = {colour for svg in drawn for colour in re.findall(r"#[0-9a-f]{6}\b", svg)}
    assert fixed <= {"#ffffff", "#000000"}  # clips and hidden parts
    light, dark = example_page.split("@media screen and (prefers-color-scheme: dark)")[:2]
    for name in used:
        assert f"{name}:" in light, name
        assert f"{name}:" in dark.split("* { box-sizing")[0], name


def test_the_clock_is_a_big_word(example_page, empty_page):
    virtual = '<p class="big-clock virtual"><strong>Virtual clock: simulated time</strong>'
    measured = '<p class="big-clock measured"><strong>Measured clock</strong>'
    assert [word in example_page for word in (virtual, measured)] == [True, True]
    assert [word in empty_page for word in (virtual, measured)] == [False, True]


def test_numbers_of_a_page_are_rounded_for_reading(known):
    time, loss = first_tests(known).rows
    assert time[2].text == "-13.90 [-17.90, -9.90] virtual s"
    assert time[2].small == "n = 8, 95 % CI; 1.42\u00d7 [1.22\u00d7, 1.62\u00d7] in mean time, won 8 of 8"
    assert [cell.text for cell in time[3:5]] == ["0.008", "0.023"]
    assert loss[2].text == "0.0124 [0.0064, 0.0184] nats"  # of the equivalence test
    assert (time[6].text, time[6].tone) == ("better", "good")
    assert (loss[6].text, loss[6].tone) == ("equivalent", "open")  # it is secondary, and looks so


def test_six_tests_come_first_the_primary_family_before_the_rest_of_its_group_and_the_others_are_announced(example):
    table = first_tests(example)
    assert [row[0].small for row in table.rows] == ["primary"] * 2 + ["secondary"] * 4
    assert {row[0].text for row in table.rows} == {"async vs sync", "ringmaster vs sync"}
    assert f"{len(example.tests) - 6} more comparisons" in table.notes[1]
    assert table.notes[-1] == (
        "Not registered: 16 families of secondary comparisons. Where no arm is better, about 0.8 of them hold a "
        "difference by chance alone."
    )
    assert {row[6].tone for row in table.rows[2:]} == {"open"}
    whole = next(table for table in all_tables(example, lambda _: "") if table.key == "tests")
    assert len(whole.rows) == len(example.tests)


def test_a_section_without_data_is_left_out_and_the_page_says_why_in_one_line_and_draws_no_empty_picture(
    empty_page, empty
):
    outline = Outline(empty_page)
    assert "figure" not in outline.tags
    assert {"reproduce", "left-out", "every-run"} <= set(outline.ids)
    assert not {"time-to-target", "throughput", "delays", "final-loss", "learning-rate", "downstream"} & set(
        outline.ids
    )
    assert len(outline.ids) == len(set(outline.ids))
    for words in (
        "No run has an evaluation to draw.",
        "No throughput:",
        "No delays:",
        "No final losses:",
        "No timeline:",
        "Exploratory: there is no analysis.yaml",
        "one: no summary.json: the run crashed, was killed or is still running",
    ):
        assert words in outline.text, words
    # a reason of the results goes before a general one
    reasons = {item.name: item.reason for item in empty.left_out}
    for name in ("tests", "time to target", "learning rate", "downstream"):
        assert outline.text.count(reasons[name]) == 2, name


def test_below_the_headline_its_conditions_stand_once_in_words_and_its_details_in_small_type(example):
    first, second = (dataclasses.replace(one, details=(f"Detail {one.treatment}.",)) for one in example.headlines)
    elsewhere = dataclasses.replace(second, group=example.groups[1].name)
    for other, repeated in ((second, 1), (elsewhere, 2)):
        found = page(dataclasses.replace(example, headlines=(first, other)), Path("r"), Path("."))
        told = [statement.conditions for statement in found.statements]
        assert told[0] == "one of 4 workers 3\N{MULTIPLICATION SIGN} slower, simulated"
        assert len([words for words in told if words]) == repeated
        assert [statement.details for statement in found.statements] == [first.details, other.details]
    assert all(f"<li>{text}</li>" in render(found) for text in (*first.details, *elsewhere.details))


def test_groups_that_no_headline_is_about_are_folded(example):
    found = page(example, Path("r"), Path("."))
    assert [row.label for row in found.first] == [""]  # its conditions stand above
    sections = {section.key: section for section in found.sections}
    assert {key for key, section in sections.items() if section.folded} == {
        "curves",
        "every-run",
        "environment-section",
    }
    assert len(sections["curves"].rows) == len(example.groups) - 1
    open_pictures = [picture.title for row in sections["time-to-target"].rows for picture in row.pictures]
    folded = [picture.title for row in sections["time-to-target"].more for picture in row.pictures]
    assert open_pictures == ["one of 4 workers 3\N{MULTIPLICATION SIGN} slower, simulated"]
    assert len(folded) == len(example.groups) - 1


def test_a_check_that_failed_is_named_at_the_top(example):
    item = dataclasses.replace(example.trust[0], title="seeds", value="3 of 6", level="bad")
    text = Outline(render(page(dataclasses.replace(example, trust=(item,)), Path("r"), Path(".")))).text
    assert "Checks that failed: seeds (3 of 6)." in text.split("The tests")[0]


def cells(table, title):
    """The column of a table that begins with `title`."""
    (place,) = (k for k, column in enumerate(table.columns) if column.title.startswith(title))
    return [row[place] for row in table.rows]


def test_what_decides_beside_the_p_values_is_in_the_tables(known):
    tests = comparisons(known)
    assert [cell.text for cell in cells(tests, "margin; p, Holm, equivalence")] == [
        "-",  # of times
        "±0.02; 0.031",
    ]
    assert cells(tests, "won")[0].text == "8 of 8"


def test_everything_left_out_is_in_the_page(outline, example):
    assert example.left_out
    for item in example.left_out:
        assert f"{item.name}: {item.reason}" in outline.text
    assert example.problems
    for problem in example.problems:
        assert problem in outline.text
    assert example.command in outline.text


def test_every_run_is_in_the_page_with_a_relative_link_where_it_has_a_folder(outline, example):
    links = {values["href"] for tag, values in outline.attributes if tag == "a" and "href" in values}
    there = {f"../study/{run.name}/" for run in example.runs if run.exists}
    assert there == {link for link in links if not link.startswith("#")}
    missing = [run.name for run in example.runs if not run.exists]
    assert missing == ["test/sync-w2/s107-r1"]
    assert all(name in outline.text for name in missing)


def test_runs_from_scratch_say_so_at_the_top_beside_their_group_and_in_the_tables(tmp_path):
    curves = {arm.name: [straight(6.0, 4.0, seconds=10.0)] * 2 for arm in (SYNC, ASYNC)}
    found = results_of(write_study(tmp_path, curves, [SYNC, ASYNC], from_scratch=True))
    outline = Outline(render(page(found, Path("r"), Path("."))))
    assert f"synthetic virtual clock {FROM_SCRATCH}" in outline.text
    assert f"virtual clock {FROM_SCRATCH} sync" in outline.text  # the row of the first picture, then its legend
    (row,) = (table for table in all_tables(found, lambda _: "") if table.key == "runs")
    assert [FROM_SCRATCH in cell.text for cell in cells(row, "remark")] == [True] * 4


def test_markup_in_names_is_shown_as_text(example):
    name = f"test/{HOSTILE}{{{{7*7}}}} &amp;"
    run = dataclasses.replace(example.runs[0], name=name)
    made = page(dataclasses.replace(example, title=HOSTILE, runs=(run,)), Path("report.html"), Path("."))
    text = render(made)
    assert "<script" not in text
    assert {HOSTILE, name} <= set(Outline(text).texts)


def test_the_same_results_give_the_same_bytes(example, example_page):
    assert render(page(example, Path("out/report.html"), Path("study"))) == example_page


def test_a_known_algorithm_has_its_colour_and_marker_in_every_report():
    several = ("sync", "async", "ringmaster", "m_sync", "zeta", "rennala", "single", "hogwild", "alpha")
    alone, among = looks(["ringmaster"]), looks(several)
    assert (alone["ringmaster"].colour, alone["ringmaster"].marker) == (
        among["ringmaster"].colour,
        among["ringmaster"].marker,
    )
    assert len({look.colour for look in among.values()}) == len(among)
    assert len({look.marker for look in among.values()}) >= len(among) - 1
    many = looks([f"rule{number}" for number in range(40)])
    assert len({look.slot for look in many.values()}) == 40


def test_both_axes_of_every_picture_are_named_with_a_unit_or_hold_names(pictures):
    categories = ("timeline", "downstream", "hatecheck")
    units = (
        "seconds",
        "nats",
        "samples",
        "(0 to 1)",
        "workers",
        "(updates",
        "times sooner",
        "share",
        "log scale",
        "trials",
    )
    for _, picture in pictures:
        for axes in picture.figure.axes:
            assert axes.get_xlabel(), picture.name
            named = axes.get_ylabel() or picture.name.startswith(categories)
            assert named, picture.name
            if not picture.name.startswith("confusion"):
                assert any(unit in axes.get_xlabel() for unit in units), (picture.name, axes.get_xlabel())


def test_measured_and_virtual_seconds_share_no_picture_and_stand_under_the_word(pictures):
    seconds = {"measured": "training seconds", "virtual": "virtual seconds"}
    seen = set()
    for row, picture in pictures:
        labels = {label for axes in picture.figure.axes for label in (axes.get_xlabel(), axes.get_ylabel())}
        clocks = {clock for clock, label in seconds.items() if any(label in text for text in labels)}
        assert len(clocks) <= 1, picture.name
        if clocks:
            assert {row.clock} == clocks, picture.name
            seen |= clocks
    assert seen == {"measured", "virtual"}


def test_every_picture_with_intervals_says_over_how_many(pictures):
    said = {picture.name: picture.caption + " ".join(entry.text for entry in picture.legend) for _, picture in pictures}
    for _, picture in pictures:
        if "interval" in picture.caption or "band" in picture.caption:
            assert "n = " in said[picture.name], picture.name
    assert sum("n = " in text for text in said.values()) > 15


def test_every_interval_in_a_table_has_its_n(example):
    for table in all_tables(example, lambda _: ""):
        for row in table.rows:
            for cell in row:
                if re.search(r"\d \[-?\d", cell.text):
                    assert re.search(r"n = \d|of \d", cell.small), (table.key, cell)


def test_a_run_that_diverged_is_drawn_to_its_end_with_a_cross_and_is_in_no_mean(pictures):
    panel = next(picture for _, picture in pictures if picture.name.startswith("loss-samples-16-workers"))
    crosses = [line for line in panel.figure.axes[0].lines if line.get_marker() == "x"]
    assert len(crosses) == 1
    low, high = panel.figure.axes[0].get_ylim()
    assert low <= crosses[0].get_ydata()[0] <= high
    assert "async (n = 7)" in [entry.text for entry in panel.legend]
    assert "A cross ends a run that did not finish" in panel.caption


def test_the_final_loss_of_an_arm_of_which_a_run_diverged_has_no_mean(drawn):
    pictures = [picture for row in drawn.sections["final-loss"] for picture in row.pictures]
    assert [picture.name.split("-")[2] for picture in pictures] == ["virtual", "measured"]
    assert pictures[0].caption.endswith("Without a mean: async, 16 workers, virtual clock (diverged 1/8).")
    assert "sync, 4 workers, virtual clock: " in pictures[0].description
    assert "measured" not in pictures[0].description


def test_pictures_are_written_as_png_and_svg_and_show_something(lean, empty, tmp_path):
    folder = tmp_path / "deep" / "pictures"
    paths = save_gallery(lean, folder)
    names = {path.stem for path in paths}
    assert {path.name for path in folder.iterdir()} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    figures = [
        values["id"] for tag, values in Outline(render(page(lean, Path("r"), Path(".")))).attributes if tag == "figure"
    ]
    assert names == set(figures)
    assert len(names) == len(figures) >= len({name.split("-")[0] for name in names}) > 9
    for path in paths:
        assert path.stat().st_size > 4_000, path
        if path.suffix == ".svg":
            root = xml.etree.ElementTree.parse(path).getroot()
            assert root.tag.endswith("svg")
            assert len(list(root.iter())) > 40, path
        else:
            pixels = matplotlib.image.imread(path)
            assert pixels[..., 3:].min(initial=1.0) == 1.0  # nothing shines through
            pixels = pixels[..., :3]
            assert min(pixels.shape[:2]) > 250, path
            assert pixels[0, 0].min() == 1.0  # on white
            assert len(numpy.unique((100 * pixels[::3, ::3]).round() @ [1, 1_000, 1_000_000])) > 4, path
    few = dataclasses.replace(empty, arms=lean.arms, groups=lean.groups, curves=lean.curves)
    again = save_gallery(few, tmp_path)
    assert len(again) == 4
    assert [path.read_bytes() for path in again] == [(folder / path.name).read_bytes() for path in again]


def test_markdown_keeps_its_columns_whatever_the_names(example):
    nasty = dataclasses.replace(example.tests[0], comparison="a|b <b>\nc`d*", reason="x | y")
    tables = [comparisons(dataclasses.replace(example, tests=(nasty,)))]
    lines = markdown(tables).splitlines()
    body = next(line for line in lines if line.startswith("| a"))
    assert body.startswith(r"| a\|b &lt;b&gt; c\`d\* |")
    bars = [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]
    assert set(bars) == {len(tables[0].columns) + 1}


def test_every_table_has_as_many_cells_in_a_row_as_columns_and_a_key_of_its_own(example):
    tables = all_tables(example, lambda _: "")
    assert len({table.key for table in tables}) == len(tables) == 14
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.key


def test_latex_escapes_what_it_would_read_as_a_command(example):
    nasty = dataclasses.replace(example.tests[0], comparison=r"50 % & m_sync #1 $x$ {y} ~ ^ \input{z}")
    tables = [comparisons(dataclasses.replace(example, tests=(nasty,)))]
    text = latex(tables)
    assert r"50 \% \& m\_sync \#1 \$x\$ \{y\} \textasciitilde{} \textasciicircum{} \textbackslash{}input\{z\} &" in text
    for line in text.splitlines():
        if line.endswith(r"\\") and "&" in line:
            assert len(re.findall(r"(?<!\\)&", line)) == len(tables[0].columns) - 1
    whole = latex(all_tables(example, lambda _: ""))
    assert whole.count(r"\begin{tabular}") == whole.count(r"\end{tabular}") == whole.count(r"\begin{table}")
    assert whole.count(r"\begin{longtable}") == whole.count(r"\end{longtable}") == 1  # every run
    assert whole.isascii()


def test_above_the_fold_is_a_group_that_compares_something_where_there_is_one(example, empty, drawn):
    primary = example.groups[0]
    others = [group for group in example.groups[1:] if group.clock == primary.clock and group.reference is not None]
    assert others
    alone = (dataclasses.replace(primary, reference=None), *example.groups[1:])
    found = dataclasses.replace(empty, arms=example.arms, groups=alone, curves=example.curves)
    labels = [row.label for row in gallery(found).first]
    assert primary.name in [row.label for row in drawn.first]
    assert primary.name not in labels
    assert others[0].name in labels


def test_csv_holds_the_unrounded_values(example):
    tables = {table.key: table for table in all_tables(example, lambda _: "")}
    rows = list(csv.DictReader(io.StringIO(as_csv(tables["tests"]))))
    for row, test in zip(rows, example.tests, strict=True):
        assert row["comparison"] == test.comparison
        assert (row["estimate_estimate"] == "") == (test.estimate is None) == (test.by_divergence is not None)
        if test.estimate is not None:
            assert float(row["estimate_estimate"]) == test.estimate.estimate
            assert float(row["estimate_low"]) == test.estimate.low
            assert int(row["estimate_n"]) == test.estimate.n
        assert float(row["p_holm"]) == test.p_holm
        assert (row["margin"] == "") == (test.margin is None)
    trials = list(csv.DictReader(io.StringIO(as_csv(tables["tuning"]))))
    assert json.loads(trials[0]["trials"])[0]["losses"] == list(example.tuning[0].trials[0].losses)


def test_a_value_that_is_not_finite_survives_every_format(example):
    endless = dataclasses.replace(example.table[0], median_seconds=math.inf, reached=2)
    tables = all_tables(dataclasses.replace(example, table=(endless, *example.table[1:])), lambda _: "")
    arms = next(table for table in tables if table.key == "arms-virtual")
    assert arms.rows[0][2].text == "inf"
    assert next(csv.DictReader(io.StringIO(as_csv(arms))))["median_seconds"] == "inf"
    assert "| inf |" in markdown([arms])


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Hand-made runs: two algorithms, two seeds, and one run that was killed."""
    folder = tmp_path_factory.mktemp("study")
    for algorithm, seconds in (("sync", 20.0), ("async", 12.0)):
        for seed in (0, 1):
            arm = SyntheticArm(algorithm, 2, "measured", None)
            write_run(folder / f"{algorithm}-s{seed}", arm, straight(9.0, 5.0 + 0.1 * seed, seconds=seconds), seed=seed)
    (folder / "killed").mkdir()
    (folder / "killed" / "events.jsonl").write_text('{"schema": 1}\n{"kind": "eva')
    return folder


def test_the_command_writes_the_page_beside_the_runs_and_prints_the_sentence(study, capsys):
    assert main([str(study)]) == 0
    printed = capsys.readouterr().out.splitlines()
    file = study / "report.html"
    assert printed[-1] == str(file)
    outline = Outline(file.read_text(encoding="utf-8"))
    assert printed[0] in outline.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "<script" not in file.read_text(encoding="utf-8")
    assert "too few seeds" in outline.text
    assert [path.name for path in study.iterdir() if path.name.startswith(".")] == []


def test_the_command_prints_tables_and_nothing_else(study, capsys, tmp_path):
    assert main([str(study), "--format", "md"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("### Table 1. Arms")
    assert main([str(study), "--format", "csv", "--table", "runs", "--figures", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert {row["name"] for row in csv.DictReader(io.StringIO(printed.out))} == {
        path.name for path in study.iterdir() if path.is_dir()
    }
    assert "pictures, each as PNG and SVG" in printed.err
    assert main([str(study), "--format", "csv"]) == 0
    assert "csv holds one table, this is tests; --table NAME gives another: arms-measured" in capsys.readouterr().err
    assert main([str(study), "--format", "latex", "--table", "tests", "--out", str(tmp_path / "t.tex")]) == 0
    assert r"\label{tab:tests}" in (tmp_path / "t.tex").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{nowhere}"], "no such folder"),
        (["{study}", "--out", "{nowhere}/report.html"], "make it first: mkdir -p"),
        (["{study}", "--out", "{study}"], "is a folder; name a file in it"),
        (["{study}", "--figures", "{file}"], "is a file; name a folder"),
        (["{study}", "--table", "tests"], "--table goes with tables, not with the page"),
        (["{study}", "--format", "md", "--table", "test"], "did you mean 'tests'?"),
        (["{study}", "--seed", "-1"], "--seed must be 0 or more, got -1"),
    ],
)
def test_what_cannot_be_used_is_told_with_exit_code_2(study, tmp_path, capsys, arguments, told):
    (tmp_path / "file.txt").write_text("")
    places = {"nowhere": tmp_path / "nowhere", "study": study, "file": tmp_path / "file.txt"}
    assert main([argument.format(**places) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err
    assert printed.err.startswith("error: ")
    assert printed.out == ""


def test_an_unknown_format_is_refused_by_name(capsys):
    with pytest.raises(SystemExit) as raised:
        parser().parse_args(["runs", "--format", "pdf"])
    assert raised.value.code == 2
    assert "html" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_to_is_told(study, tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main([str(study), "--out", str(tmp_path / "report.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_file_where_a_folder_is_needed_for_pictures_is_told(empty, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="choose --figures DIR"):
        save_gallery(empty, tmp_path / "file" / "deeper")


def test_a_device_is_written_to_and_not_replaced(study):
    assert main([str(study), "--format", "csv", "--out", os.devnull]) == 0
    assert Path(os.devnull).is_char_device()


def test_a_reader_that_has_seen_enough_is_no_error(study):
    command = [sys.executable, "-m", "analysis.report", str(study), "--format", "md"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    _, told = process.communicate(timeout=120)
    assert (process.returncode, told.decode()) == (0, "")
