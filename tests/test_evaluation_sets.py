"""Several evaluation sets from the command line to the report: records, a resume, a table, files of predictions."""

import pytest
from doors import Finished, asyncsgd, cli
from gallery import write_tables

WORDS = ("ant", "bee", "cat", "dog")


def write(path, number, **more):
    rows = []
    for index in range(number):
        text = f"{path.stem} {index} {WORDS[index % 4]} {WORDS[index % 3]}"
        rows.append({"text": text, "label": "AB"[index % 2], **more})
    write_tables(path.parent, **{path.stem: rows})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, number in {"train": 120, "dev_in": 12, "dev_out": 9, "test_in": 7}.items():
        write(folder / f"{name}.jsonl", number)
    write(folder / "test_in.jsonl", 7, label=-1)
    return folder


def line(folder, out, *more):
    given = {"model": "tiny", "data": folder, "seq_len": 16, "samples": 48, "evaluations": 2, "cache_dir": folder / "c"}
    flags = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), value)]
    return ["train.py", "classification", *flags, "--mode", "single", "--run-dir", out, *more]


def test_every_set_is_in_the_records_in_the_report_and_in_a_file_of_predictions(folder, tmp_path):
    run = Finished(tmp_path / "runs" / "one")
    more = ("--split", "in,out,test_in", "--predictions", tmp_path / "said", "--checkpoint-every", 48)
    ended = cli(line(folder, run.path, *more))
    assert ended.code == 0, ended.err
    assert "note   test_in has no labels, so it is not scored" in ended.out
    for record in run.records("evaluate"):
        assert list(record["details"]["evaluations"]) == ["dev_out"]
        assert record["details"]["evaluations"]["dev_out"]["weight"] == 9
        assert record["weight"] == 12
    table = asyncsgd.load(run.path.parent).table("sets")
    found = run.summary["details"]["evaluations"]["dev_out"]
    assert table["set"].tolist() == ["dev_in", "dev_out"]
    assert table["loss"].tolist() == [run.summary["final_eval_loss"], found["loss"]]
    assert table["accuracy"].tolist() == [run.summary["metrics"]["accuracy"], found["metrics"]["accuracy"]]
    page = asyncsgd.load(run.path.parent).report(tmp_path / "page.html").read_text("utf-8")
    assert "Several evaluation sets" in page
    lengths = {}
    for path in (tmp_path / "said").glob("*.tsv"):
        lengths[path.name] = len(path.read_text().splitlines())
    assert lengths == {"dev_in.tsv": 13, "dev_out.tsv": 10, "test_in.tsv": 8}
    again = cli([*line(folder, run.path, *more), "--print-config"])
    assert "split: in,out,test_in" in again.out


def test_a_run_does_not_go_on_where_the_texts_of_a_further_set_have_changed(folder, tmp_path):
    write(tmp_path / "out.jsonl", 9)
    sets = ("--eval-data", folder / "dev_in.jsonl", "--eval-data", f"other={tmp_path / 'out.jsonl'}")
    asked = line(folder, tmp_path / "run", *sets, "--checkpoint-every", 16)
    assert cli(asked).code == 0
    (tmp_path / "run" / "summary.json").unlink()
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    write(tmp_path / "out.jsonl", 8)
    ended = cli(["train.py", "classification", "--resume", tmp_path / "run"])
    assert checkpoints
    assert ended.code == 2
    assert "began with other texts of other than there are now" in ended.err


def test_sets_are_named_in_one_place(folder, tmp_path):
    ended = cli(line(folder, tmp_path / "run", "--split", "in", "--eval-data", folder / "dev_out.jsonl"))
    assert ended.code == 2
    assert "--eval-data and --split both say what to score on" in ended.err
