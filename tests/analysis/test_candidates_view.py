"""``python -m analysis candidates``: what a reader sees of a folder of candidates."""

import json

import pytest

from analysis.candidates import main

SIDE = {"texts": 3, "texts_without_candidates": 1, "pieces": 40, "candidate_pieces": 10, "candidate_share": 0.25}
STATISTICS = {"train": SIDE, "eval": SIDE, "distinct_terms": 2, "top_terms": [["oxide", 7], ["cell [bold]", 2]]}


def folder_with(path, *, complete=True, **changed):
    path.mkdir(exist_ok=True)
    manifest = {"complete": complete, "finder": "terms:x", "data": "d", "model": "tiny", "statistics": STATISTICS}
    (path / "manifest.json").write_text(json.dumps(manifest | changed))
    examples = []
    for n in range(5):
        examples.append({"text": f"text {n} [x] oxide", "candidates": [[11, 16]], "masked": [[0, 4]]})
    (path / "examples.json").write_text(json.dumps({"examples": examples}))
    return path


def test_texts_are_shown_with_their_candidates_and_masks(tmp_path, capsys):
    assert main([str(folder_with(tmp_path)), "--number", "2"]) == 0
    told = capsys.readouterr().out
    assert "[text] 0 [x] <oxide>" in told
    assert "[text] 2 [x] <oxide>" in told
    assert "[text] 1" not in told
    assert "training: 25.0% of 40 word pieces are candidates; 1 of 3 texts have none" in told
    assert "cell [bold]" in told


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"complete": False}, "is not complete; run mask_candidates.py again"),
        ({}, "is no folder of candidates"),
    ],
)
def test_other_folders_are_refused_in_one_line(tmp_path, capsys, changed, message):
    folder_with(tmp_path, **changed)
    if not changed:
        (tmp_path / "examples.json").unlink()
    assert main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert main([str(tmp_path / "nothing")]) == 2
    (tmp_path / "manifest.json").write_text('{"complete": tr')
    assert main([str(tmp_path)]) == 2
    assert "is no folder of candidates (" in capsys.readouterr().err
