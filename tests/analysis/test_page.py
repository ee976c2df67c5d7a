"""The page, the tables and the pictures of a study: what stands where, how much of it, and that nothing is loaded."""

import csv
import dataclasses
import html.parser
import io
import re
import shutil
import subprocess

import numpy as np
import pytest
from doors import UsageError, asyncsgd, cli
from scenarios import (
    ASYNC,
    BUDGET_SECONDS,
    EIGHT,
    FIRST_LOSS,
    SOONER,
    SYNC,
    diverges,
    ends_at,
    reaches,
    study_of,
    two_arms,
)
from synthetic import SyntheticArm, edit_json, planned, write_finetuning, write_plan, write_run

CURVES = [[reaches(time) for time in times] for times in (EIGHT, SOONER)]
pytestmark = pytest.mark.filterwarnings("error")


class Outline(html.parser.HTMLParser):
    """Reads a page strictly: every tag is closed in order; keeps what the tests ask for."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open = []
        self.ids = []
        self.targets = []
        self.shown = []
        self.labels = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        assert len(values) == len(attributes), f"<{tag}> has an attribute twice"
        self.ids += [values.get("id")] * ("id" in values)
        self.targets += [found for value in values.values() for found in re.findall(r"url\(#([^)]+)\)", value or "")]
        self.targets += [values.get("href", "")[1:]] * values.get("href", "").startswith("#")
        self.labels += [values.get("aria-label")] * ("aria-label" in values)
        self.open.append(tag)
        if tag in ("meta", "br"):
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "details", "svg", "title"} & {*self.open}:
            self.shown.append(data)


@pytest.fixture(scope="module")
def page(example, tmp_path_factory):
    return example.report(tmp_path_factory.mktemp("out") / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def outline(page):
    return Outline(page)


def test_the_page_is_small_enough_to_read_and_to_send(page, outline):
    assert len(page.encode()) <= 1.5e6
    assert len(" ".join(outline.shown).split()) <= 700


def test_the_page_holds_no_script_and_no_address_and_forbids_both(page):
    assert "<script" not in page
    assert not re.search(r"https?://|//[a-z]|@import|src=", page)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in page


def test_every_id_is_there_once_and_every_reference_leads_somewhere(outline):
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.targets) <= set(outline.ids)


def test_the_eye_meets_the_headline_the_forest_the_curves_the_tests_and_what_to_trust(page, example):
    marks = ["<h1>", *(f'id="{name}"' for name in ("forest", "loss-seconds", "loss-samples", "first-tests"))]
    marks += ['class="trust"', "<details"]
    assert sorted(map(page.index, marks)) == [page.index(mark) for mark in marks]
    assert page.count("<h1>") == 1
    assert example.headlines[0].text in page.replace("&#39;", "'")
    assert page.partition('id="first-tests"')[2].partition("</section>")[0].count("<tr") == 7


def test_every_picture_says_in_numbers_what_it_shows(outline):
    assert len(outline.labels) >= 20
    for label in outline.labels:
        assert re.search(r"\d", label)


def test_every_run_is_in_the_page_with_a_link_where_it_has_a_folder_and_why_it_is_left_out(page, example):
    for run in example.runs.itertuples():
        assert (f">{run.run}</a>" in page) == (run.status != "MISSING"), run.run
        assert not run.left_out or f"{run.run}: {run.left_out}" in page


@pytest.mark.parametrize(("budget", "told"), [({}, []), (SYNC.settings, ["2 more tests are in Table 2."])])
def test_the_page_says_how_many_tests_stand_in_the_table_alone(budget, told, tmp_path):
    """The first six are shown. Without a budget in seconds two pairs have three tests each, and with one four."""
    arms = []
    for algorithm in ("sync", "async", "ringmaster"):
        arms.append(dataclasses.replace(SYNC, algorithm=algorithm, settings=budget))
    slower, sooner = CURVES
    study = study_of(tmp_path, list(zip(arms, (slower, sooner, sooner), strict=True)))
    text = study.report(tmp_path / "report.html").read_text("utf-8")
    assert re.findall(r"\d+ more tests[^<]*", text) == told


def test_markup_in_names_is_shown_as_text(tmp_path):
    def hostile(study):
        edit_json(study / "plan.json", study="<script>alert(1)</script>")

    study = two_arms(tmp_path, *CURVES, afterwards=hostile)
    text = study.report(tmp_path / "report.html").read_text("utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<script" not in study._repr_html_()


@pytest.mark.slow
def test_equal_studies_give_equal_bytes(example, example_folder, page, tmp_path):
    again = asyncsgd.load(example_folder).report(tmp_path / "report.html").read_text("utf-8")
    assert again.partition("<h1>")[2].partition("<details")[0] == page.partition("<h1>")[2].partition("<details")[0]


def test_a_study_of_one_killed_run_has_a_page(empty, tmp_path):
    text = empty.report(tmp_path / "report.html").read_text("utf-8")
    assert "<h1>No verdict: none of 1 test runs has a result yet.</h1>" in text
    assert "<svg" not in text


@pytest.mark.parametrize("kind", ["forest", "loss", "reached", "against"])
def test_a_picture_can_be_had_from_python(example, kind):
    if kind == "against":
        options = {"x": "workers", "y": "samples_per_second"}
    else:
        options = {}
    figure = example.plot(kind, **options)
    for axes in figure.axes:
        assert axes.get_xlabel()


def test_the_mean_curve_of_an_arm_is_of_the_runs_that_did_not_diverge(tmp_path):
    ends = [3.0 + 0.1 * seed for seed in range(6)]
    theirs = [ends_at(end) for end in ends]
    ours = [diverges(ends_at(0.5), 10), *map(ends_at, ends[1:])]
    (axes,) = two_arms(tmp_path, theirs, ours).plot("loss").axes
    for label, alive in (("sync (n = 6)", ends), ("async (n = 5)", ends[1:])):
        (line,) = (line for line in axes.lines if line.get_label() == label)
        seconds, losses = line.get_data()
        assert losses == pytest.approx(FIRST_LOSS + (np.mean(alive) - FIRST_LOSS) * seconds / BUDGET_SECONDS)


def test_a_confusion_matrix_is_of_all_fine_tunings_of_an_arm_in_percent_of_the_true_class(tmp_path):
    runs = []
    for seed, counts in enumerate((((40, 10), (10, 40)), ((30, 20), (0, 50)))):
        name = f"test/{SYNC.name}/s{seed}"
        tuned = f"finetune/{SYNC.name}/s{seed}-f0"
        write_run(tmp_path / name, SYNC, ends_at(5.0), seed=seed)
        write_finetuning(tmp_path / tuned, seed=seed, macro_f1=0.5, parent={"run": name}, confusion=counts)
        runs.append(planned(name, "test", SYNC.name, seed))
        runs.append(planned(tuned, "finetune", SYNC.name, seed, parent=name, finetune_seed=seed))
    write_plan(tmp_path, [SYNC], runs)
    page = asyncsgd.load(tmp_path).report(tmp_path / "report.html").read_text("utf-8")
    assert "hate right in 70%; other right in 90%" in page


def test_the_forest_shows_how_many_times_sooner_as_the_table_does(study):
    loaded = asyncsgd.load(study)
    times, _ = loaded.plot("forest").axes
    (point,) = (line.get_xdata()[0] for line in times.lines if line.get_marker() in ("s", "o"))
    intervals = []
    for line in times.lines:
        if line.get_linestyle() == "-" and line.get_marker() == "None":
            intervals.append(line.get_xdata())
    low, high = sorted(intervals[0])
    assert point == pytest.approx(sum(EIGHT) / sum(SOONER), rel=1e-2)
    assert 1 < low < point < high
    shown = loaded.table("tests").iloc[0]
    assert (low, point, high) == (shown["times_sooner_low"], shown["times_sooner"], shown["times_sooner_high"])
    left, right = times.get_xlim()
    assert left > right  # as in the right half, the treatment is better on the left


def test_an_unknown_plot_or_table_is_refused_with_what_there_is(example):
    with pytest.raises(UsageError, match="there is no plot 'tree'; there are: forest, loss, reached, against"):
        example.plot("tree")
    with pytest.raises(UsageError, match="there is no table 'test'; did you mean 'tests'"):
        example.table("test")


def test_a_folder_without_a_test_run_has_no_picture_of_the_loss(tmp_path):
    write_finetuning(tmp_path / "tuned", seed=0, macro_f1=0.5, parent={"run": "gone"})
    with pytest.raises(UsageError, match="there is no test run to draw"):
        asyncsgd.load(tmp_path).plot("loss")


def test_the_page_of_tuning_alone_and_that_of_one_run_need_no_plan(tmp_path):
    for number in (1, 2):
        path = write_run(tmp_path / f"tuning/a/t{number}-s0", SYNC, ends_at(5.0), learning_rate=number)
    assert "Table 3" in asyncsgd.load(tmp_path).report().read_text("utf-8")
    assert 'href="././"' in asyncsgd.load(path).report().read_text("utf-8")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("command") / "s"
    two_arms(folder, *CURVES)
    return folder


def report(*arguments):
    return cli(["analysis.report", *map(str, arguments)])


def test_the_command_writes_the_page_beside_the_runs_and_prints_the_verdict(study):
    ended = report(study)
    assert ended.code == 0
    assert ended.err == ""
    assert ended.out.startswith("Asynchronous training reached the target 1.40 to 1.69")
    assert ended.out.splitlines()[-1] == str(study / "report.html")
    assert (study / "report.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_the_verdict_alone_is_a_format(study):
    assert report(study, "--format", "sentence").out.strip() == asyncsgd.load(study).verdict


def test_tables_go_to_standard_output_alone(study):
    markdown = report(study, "--format", "md")
    latex = report(study, "--format", "latex")
    table = report(study, "--format", "csv")
    assert markdown.out.count("**Table 2. Tests**") == 1
    assert "| better |" in markdown.out
    assert latex.out.count(r"\toprule") == latex.out.count(r"\bottomrule") >= 4
    rows = list(csv.DictReader(io.StringIO(table.out)))
    assert [row["endpoint"] for row in rows][:2] == ["time_to_target", "target_reached"]
    assert float(rows[0]["times_sooner"]) == pytest.approx(sum(EIGHT) / sum(SOONER), rel=1e-2)
    assert "csv holds one table, this is tests" in table.err


# The columns of ICML are 3.25 inches wide.
COLUMN = r"""\documentclass[10pt,twocolumn]{article}
\usepackage{booktabs}
\usepackage[textwidth=6.75in]{geometry}
\setlength{\columnsep}{0.25in}
\begin{document}
\input{table}
\end{document}
"""


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="there is no pdflatex on this machine")
def test_a_table_for_a_paper_fits_a_column(example_folder, tmp_path):
    table = report(example_folder, "--format", "latex", "--table", "paper").out
    assert r"arm & time (s) & times sooner & loss & verdict \\" in table
    assert "nan" not in table
    (tmp_path / "table.tex").write_text(table.replace("ringmaster", r"staleness\_\allowbreak aware"))
    (tmp_path / "paper.tex").write_text(COLUMN)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True)
    assert "Overfull" not in done.stdout


def test_a_picture_says_of_its_arms_what_tells_them_apart(tmp_path):
    one = SyntheticArm("single", 1, "measured", None)
    small, (curves, ours) = SyntheticArm("sync_small", batch_size=4), CURVES
    figure = study_of(tmp_path, [(SYNC, curves), (ASYNC, ours), (small, curves), (one, curves)]).plot("forest")
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["async vs sync, 4 workers, simulated"]


def test_the_losses_of_two_tasks_share_no_picture(tmp_path):
    tasks = ("masked_lm", "causal_lm")
    for task in tasks:
        for workers in (2, 4):
            arm = SyntheticArm("async", workers, speeds=None)
            write_run(tmp_path / task / str(workers), arm, CURVES[0][0], task=task, delays=[workers - 1] * 4)
    name = "loss-delay-p95-virtual"
    several = {f"{name}-0", f"{name}-1"}
    for folder, names in ((tmp_path, several), (tmp_path / tasks[0], {name})):
        assert report(folder, "--figures", folder / "pictures").code == 0
        drawn = {path.stem for path in (folder / "pictures").glob("loss-delay-*.svg")}
        assert drawn == names


def test_figures_are_written_as_pdf_and_svg_with_their_fonts(study, tmp_path):
    ended = report(study, "--format", "sentence", "--figures", tmp_path / "pictures")
    assert ended.code == 0
    names = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert {"forest.pdf", "forest.svg", "loss-seconds.pdf", "loss-samples.svg"} <= names
    assert b"/FontFile2" in (tmp_path / "pictures" / "forest.pdf").read_bytes()
    assert "<text" not in (tmp_path / "pictures" / "forest.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--table", "tests"], "--table goes with tables"),
        (["--format", "md", "--table", "test"], "has no table 'test'; did you mean 'tests'"),
        (["--out", "nowhere/report.html"], "nowhere/report.html"),
        (["--figures", __file__], "File exists"),
    ],
)
def test_what_cannot_be_used_is_told_with_exit_code_2(study, arguments, told):
    ended = report(study, *arguments)
    assert ended.code == 2
    assert told in ended.err
    assert ended.err.startswith("error: ")


def test_the_numbers_at_an_axis_keep_their_digits(tmp_path):
    curves = [ends_at(5.0, first=5.0 + number / 1000) for number in range(10, 16)]
    page = two_arms(tmp_path, curves, curves).report(tmp_path / "page.html").read_text("utf-8")
    picture = page.partition('<figure id="loss-samples"')[2].partition("</figure>")[0]
    numbers = re.findall(r"text-anchor: end[^>]*>([\d.]+)</text>", picture)
    assert len(numbers) > 3
    assert len(set(numbers)) == len(numbers)
