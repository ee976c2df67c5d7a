"""The flags of the texts that this project began with, spelled as they are there."""

from pathlib import Path

import pytest
from doors import Finished, cli
from gallery import sentences

TRAINS = "--seq-len 24 --batch-size 4 --vocab-size 300 --samples 16 --evaluations 1 --eval-samples 8 --warmup 0"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for side, number in (("train", 120), ("val", 40)):
        Path(f"{side}.txt").write_text(sentences(number, seed=number))
    Path("terms.txt").write_text("\n".join(Path("train.txt").read_text().replace(".", "").split()[:60:3]))
    return tmp_path


def typed(line):
    ended = cli(line)
    assert ended.code == 0, ended.err
    return ended


@pytest.mark.processes
def test_a_corpus_is_normalized_its_candidates_are_found_and_they_alone_are_masked(folder):
    files = "--train_file train.txt --val_file val.txt --op_train_file op_train.txt --op_val_file op_val.txt"
    typed(f"normalize_corpus.py {files}")
    both = "--train_file op_train.txt --val_file op_val.txt --cache_dir cache"
    typed(f"mask_candidates.py {both} --vocab-size 300 --finder terms:terms.txt --out candidates")
    typed(f"stilt_mlm.py {both} --tech True --candidates candidates --model_save_dir saved --mode single {TRAINS}")
    run = Finished(Path("saved"))
    assert run.summary["status"] == "DONE"
    assert run.settings["tech"] is True
    assert run.settings["data"] == "op_train.txt"
    assert run.model().num_parameters() == run.summary["num_parameters"]


def test_a_checkpoint_is_taken_every_epoch(folder):
    more = "--train_file train.txt --val_file val.txt --cache_dir cache --mode single --checkpoint-every 1epoch"
    typed(f"train.py causal_lm {more} --model_save_dir saved {TRAINS} --samples none --epochs 3 --keep 9")
    run = Finished(Path("saved"))
    epoch = run.summary["num_train_samples"]
    taken = [record["total_samples"] for record in run.records("checkpoint")]
    assert len(taken) >= 2
    for number, at in enumerate(taken, start=1):
        assert number * epoch <= at < number * epoch + 4
