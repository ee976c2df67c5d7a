"""The three comparisons of a language model: what is planned, what is refused, and what the report says."""

import html
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import get_args

import pytest

import asyncsgd
from analysis.comparison_report import printed
from analysis.comparison_sections import parts_of, sentences
from analysis.comparisons import read
from analysis.language_model import main as report
from analysis.parallelism import main as parallelism_report
from analysis.report import main as asyncsgd_report
from analysis.special import REPORTS
from asyncsgd.errors import UsageError
from asyncsgd.studies.config import Report, read_config
from asyncsgd.studies.overlay import quick_of
from asyncsgd.studies.plan import make_plan

CONFIGS = Path(__file__).resolve().parents[1] / "asyncsgd" / "configs"
SEEDS = range(8)


def config():
    return quick_of(read_config(CONFIGS / "language_model.yaml"), "language_model.yaml")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["comparisons"]["workers"].update(reference="none"), "must name the reference 'none'"),
        (lambda c: c["models"]["gpt2"].update(task="chess"), "MODULE:CLASS; got 'chess'"),
        (lambda c: c["grid"]["threshold"].pop("gpt2"), "must give a loss for each model: gpt2, distilbert"),
        (lambda c: (c.pop("comparisons"), c.pop("grid")), "names neither comparisons nor a grid"),
        (lambda c: c["base"].update(batch_size=0), r"^arm workers/gpt2/single: --batch-size must be"),
        (lambda c: c["models"].update({"google/bert": {}}), r"folder, so without a slash - at `key` in `\$.models`"),
        (lambda c: c["comparisons"].update(grid=c["comparisons"]["workers"]), "grid is where the runs of the grid lie"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    changed = config()
    change(changed)
    with pytest.raises(UsageError, match=message):
        make_plan(changed)


def test_a_setting_of_a_model_takes_the_place_of_that_of_all_runs():
    changed = config()
    changed["base"]["dropout"] = 0.1
    changed["models"]["gpt2"]["dropout"] = 0.2
    dropouts = {arm.name.split("/")[1]: arm.settings["dropout"] for arm in make_plan(changed).arms}
    assert dropouts == {"gpt2": 0.2, "distilbert": 0.1}


def made(folder, name, loss, rate, seed, status="DONE"):
    """A run folder with a curve that falls from 9 to `loss` in samples / `rate` seconds."""
    path = folder / name / f"s{seed}"
    path.mkdir(parents=True)
    losses = [9.0, (9.0 + loss) / 2, loss]
    perplexity = math.exp(loss)
    if math.isnan(loss):  # JSON has no name for it
        losses = [9.0, None, None]
        perplexity = None
    summary = {"schema": 2, "status": status, "mode": "single", "seed": seed, "num_workers": 1, "batch_size": 4}
    summary |= {
        "num_samples": 100,
        "train_seconds": 100 / rate,
        "samples_per_second": rate,
        "num_parameters": 10,
        "data_fingerprint": "f00d",
        "init_sha256": f"{seed}",
        "final_eval_loss": losses[-1],
        "metrics": {"perplexity": perplexity},
        "memory": {"leader": [2**30, 0], "workers": [[0, [2**30, 0]]]},
        "throughput": {"tokens_per_second": 64 * rate, "model_flops_utilisation": 0.25},
    }
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "environment.json").write_text(json.dumps({"cpu": "a processor", "cores": 2, "device": "cpu"}))
    records = [{"kind": "header", "schema": 2, "task": "masked_lm", "better": {}}]
    for samples, now in zip((0, 50, 100), losses, strict=True):
        facts = {"version": samples, "total_samples": samples, "train_seconds": samples / rate, "eval_seconds": 0.0}
        records.append({"kind": "evaluate", **facts, "loss": now, "weight": 1.0, "metrics": {}})
    (path / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def folder(tmp_path):
    """Sync is twice as fast and as good; async loses half a nat; bf16 is as fp32. The grid has one point of each."""
    runs = tmp_path / "runs"
    runs.mkdir()
    planned = config()
    planned["grid"] |= {"learning_rate": [1e-3, 2e-3], "batch_size": [4], "seq_len": [32]}
    planned["grid"]["threshold"] = {"gpt2": 7.0, "distilbert": 1.0}
    (runs / "config.yaml").write_text(json.dumps(planned))
    for seed in SEEDS:
        noise = 0.01 * math.sin(seed)
        for model in ("gpt2", "distilbert"):
            made(runs, f"workers/{model}/single", 6.0 + noise, 100.0 + seed, seed)
            made(runs, f"workers/{model}/sync", 6.0 - noise, 200.0 + 2 * seed, seed)
            made(runs, f"workers/{model}/async", 6.5 + 2 * noise, 300.0, seed)
            made(runs, f"precision/{model}/fp32", 6.0 + noise, 100.0, seed)
            made(runs, f"precision/{model}/bf16", 6.0 - noise, 100.0 + seed, seed)
            made(runs, f"grid/{model}/lr0.001-b4-l32", 5.0, 100.0, seed)
    return runs


def arm_of(found, *place):
    """The row of a comparison, model and arm."""
    (arm,) = [arm for arm in found.arms.itertuples() if (arm.comparison, arm.model, arm.arm) == place]
    return arm


def test_arms_are_judged_against_their_reference_on_the_same_seeds(folder):
    found = read(folder)
    single, sync, worse = [arm_of(found, "workers", "gpt2", arm) for arm in ("single", "sync", "async")]
    assert single.word == ""
    assert sync.word == "equivalent"
    assert worse.word == "worse"
    assert sync.speed.estimate == pytest.approx(2.0)
    assert worse.difference.estimate == pytest.approx(0.5, abs=0.02)
    assert worse.p_holm == pytest.approx(4 * 2 / 2**8)
    assert sync.memory_gib == 1.0
    assert sync.mfu == 0.25
    assert sync.tokens_per_second == pytest.approx(64 * 207)
    told = sentences(found)
    assert len(told) == 6
    assert "gpt2, sync: 2.00 times the samples a second of single" in told[0]
    assert "the loss is equivalent within ±0.1 nats" in told[0]


@pytest.mark.parametrize(
    ("change", "word", "told"),
    [
        (
            {"margin": 0.5},
            "undecided",
            "the margin of ±0.5 is 17 % of the reference's improvement, and the plan gives no",
        ),
        (
            {"margin": 0.5, "margin_reason": "half a nat is little"},
            "equivalent",
            "17 % of the improvement of single: half",
        ),
        (
            {"margin": 2.0, "margin_reason": "half a nat is little"},
            "undecided",
            "67 % of the reference's improvement, too",
        ),
    ],
)
def test_a_margin_above_a_tenth_of_what_the_reference_gained_needs_a_reason(folder, change, word, told):
    file = folder / "config.yaml"
    planned = json.loads(file.read_text())
    planned["comparisons"]["workers"] |= change
    file.write_text(json.dumps(planned))
    make_plan(planned)
    found = read(folder)
    assert arm_of(found, "workers", "gpt2", "sync").word == word
    assert any(line.startswith("gpt2, sync: ") and told in line for line in sentences(found))
    assert told in printed(parts_of(found), [])


def test_the_page_prints_the_geometric_mean_of_the_perplexities(folder):
    """Losses of 6 + .01 sin(seed), so e to their mean."""
    perplexity = arm_of(read(folder), "workers", "gpt2", "single").perplexity
    perplexities = [math.exp(6.0 + 0.01 * math.sin(seed)) for seed in SEEDS]
    assert perplexity.estimate == pytest.approx(statistics.geometric_mean(perplexities))
    text = printed(parts_of(read(folder)), [])
    assert f"| {perplexity.estimate:.1f} " in text
    assert "geometric mean of the perplexities" in text


def test_seconds_to_a_loss_are_interpolated_and_of_the_runs_that_reached_it(folder):
    points = read(folder).grid.set_index("model")
    reached = points.loc["gpt2"]
    missed = points.loc["distilbert"]
    assert reached["seconds"].estimate == pytest.approx(0.5)  # half of the way from 9 to 5
    assert reached["reached"] == 8
    assert reached["runs"] == 8
    assert missed["seconds"].n == 0
    assert missed["reached"] == 0


@pytest.mark.parametrize(("ends", "first"), [([5.0] * 8, "0.002"), ([5.0] * 7 + [8.0], "0.001")])
def test_the_grid_has_those_first_that_most_seeds_reached_the_loss_with_and_the_fastest_of_them(folder, ends, first):
    for seed, ended in zip(SEEDS, ends, strict=True):
        made(folder, "grid/gpt2/lr0.002-b4-l32", ended, 200.0, seed)  # twice as fast as at 0.001
    grid = parts_of(read(folder))[-1]
    shown = grid.frame
    rates = shown[shown["model"] == "gpt2"]["learning_rate"].tolist()
    assert rates[0] == first
    assert sorted(rates) == ["0.001", "0.002"]
    assert "The first rows were chosen by the numbers that they show, so they are a little too good." in grid.notes


def test_a_run_that_diverged_is_a_result(folder):
    """One of the eight of an arm, and all of a learning rate of the grid."""
    shutil.rmtree(folder / "workers/gpt2/sync/s3")
    made(folder, "workers/gpt2/sync", math.nan, 200.0, 3, "DIVERGED")
    for seed in SEEDS:
        made(folder, "grid/gpt2/lr0.002-b4-l32", math.nan, 100.0, seed, "DIVERGED")
    found = read(folder)
    sync = arm_of(found, "workers", "gpt2", "sync")
    assert sync.diverged == 1
    assert sync.loss.n == 7
    assert sync.word == ""
    # the comparison has four questions, also where one of them cannot be asked
    assert arm_of(found, "workers", "gpt2", "async").p_holm == pytest.approx(4 * 2 / 2**8)
    point = found.grid.set_index(["model", "learning_rate"]).loc["gpt2", 2e-3]
    assert point["reached"] == 0
    assert point["runs"] == 8
    assert point["loss"].n == 0
    assert point["samples_per_second"].n == 0
    assert "gpt2, sync: 1 of 8 runs diverged, so its loss is not judged." in sentences(found)
    for seed in SEEDS:
        shutil.rmtree(folder / f"precision/gpt2/bf16/s{seed}")
        made(folder, "precision/gpt2/bf16", math.nan, 100.0, seed, "DIVERGED")
    assert "gpt2, bf16: 8 of 8 runs diverged, so its loss is not judged." in sentences(read(folder))
    assert parallelism_report([str(folder), "--out", str(folder / "page.html")]) == 0
    text = printed(parts_of(found), [])
    assert "| 1 diverged |" in text
    assert "0 of 8 | diverged |" in text


@pytest.mark.parametrize(
    ("command", "left"),
    [
        (report, "workers/gpt2/async"),
        (report, "grid/gpt2/lr0.001-b4-l32"),
        (parallelism_report, "workers/gpt2/single"),
    ],
)
def test_a_study_of_which_one_run_is_made_is_reported(command, left, folder, tmp_path, capsys):
    for path in folder.glob("*/*/*/s*"):
        if path != folder / left / "s0":
            shutil.rmtree(path)
    assert command([str(folder)]) == 0
    assert ("| reference |" in capsys.readouterr().out) == left.endswith("single")
    assert command([str(folder), "--out", str(tmp_path / "page.html")]) == 0


@pytest.mark.parametrize(
    ("left_out", "first"),
    [
        ([], "gpt2, sync: 2.00 times the samples a second of single"),
        (["workers/*/*/s*", "precision/*/bf16/s*"], "No verdict: no arm is compared with another one."),
        (["*/*/*/s*/summary.json"], "No verdict: none of 96 test runs has a result yet."),
    ],
)
def test_the_verdict_of_a_study_of_comparisons_is_what_its_page_says(left_out, first, folder, capsys):
    for pattern in left_out:
        for path in folder.glob(pattern):
            path.unlink() if path.is_file() else shutil.rmtree(path)
    study = asyncsgd.load(folder)
    page = html.unescape(study.report().read_text())
    lines = [line.strip() for line in study.verdict.splitlines()]
    assert lines[0].startswith(first)
    for line in lines:
        assert line in page
    assert "there is no sync arm" not in page
    assert repr(study) == study.verdict
    assert first in html.unescape(study._repr_html_())
    for form, start in (("sentence", ""), ("md", "**")):
        assert asyncsgd_report([str(folder), "--format", form]) == 0
        assert capsys.readouterr().out.startswith(f"{start}{first}")


def test_the_page_of_every_study_is_that_of_the_special_report_that_its_config_names(folder):
    page = asyncsgd.load(folder).report().read_text()
    assert 'id="comparison-precision"' in page
    assert 'id="ways"' not in page
    file = folder / "config.yaml"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "report": "parallelism"}))
    page = asyncsgd.load(folder).report().read_text()
    assert sorted(map(page.index, ('id="comparison-precision"', 'id="ways"', 'id="runs"')))
    file.write_text(json.dumps({**config, "report": "paralelism"}))
    page = asyncsgd.load(folder).report().read_text()
    assert "config.yaml names the report paralelism, which is none of dose_response," in page
    with pytest.raises(UsageError, match="Invalid enum value 'paralelism'"):
        make_plan({**config, "report": "paralelism"})
    assert set(REPORTS) == set(get_args(Report))


def test_a_special_report_that_cannot_be_made_is_said_on_the_page(folder):
    config = json.loads((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(json.dumps({**config, "report": "dose_response"}))
    assert "The report dose_response cannot be made: " in asyncsgd.load(folder).report().read_text()


def test_two_seeds_bear_no_verdict_and_what_is_in_no_number_is_printed_with_the_tables(folder, tmp_path, capsys):
    for path in folder.glob("*/*/*/s[2-7]"):
        shutil.rmtree(path)
    assert report([str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "no verdict on the loss" in capsys.readouterr().out
    first = "2 seeds bear no verdict; this is what was measured."
    assert first in (tmp_path / "page.html").read_text()
    assert asyncsgd.load(folder).verdict.startswith(first)
    (folder / "workers/gpt2/sync/s1/summary.json").write_text("{")
    assert report([str(folder)]) == 0
    first, *_ = capsys.readouterr().out.partition("left out:\n")[2].splitlines()
    assert first.startswith("  workers/gpt2/sync/s1: UNREADABLE")
    assert report([str(tmp_path)]) == 2
    assert "asyncsgd study language_model --quick" in capsys.readouterr().err
