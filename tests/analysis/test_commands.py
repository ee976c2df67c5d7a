"""``python -m analysis``: what commands there are."""

from pathlib import Path

import pytest

from analysis.__main__ import COMMANDS, main

ANALYSIS = Path(__file__).resolve().parents[2] / "analysis"


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_every_module_that_can_be_started_is_listed_with_how_it_is_typed(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3].rstrip(":") for line in lines] == list(COMMANDS)
    for line in lines:
        assert line.startswith("python -m analysis ")
        assert ": " in line
        assert line.endswith(".")
    started = {path.stem for path in ANALYSIS.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    started |= {path.parent.name for path in ANALYSIS.glob("*/__main__.py")}
    assert started - {"__main__"} == set(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_says_what_the_list_says_of_it_as_a_sentence(command, capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    (shows,) = [line.partition(": ")[2] for line in lines if line.split()[3].rstrip(":") == command]
    with pytest.raises(SystemExit):
        main([command, "--help"])
    usage, described = capsys.readouterr().out.split("\n\n")[:2]
    assert usage.startswith(f"usage: python -m analysis {command} ")
    assert described == shows[0].upper() + shows[1:]


@pytest.mark.parametrize(("typed", "hint"), [("raport", "; did you mean 'report'?"), ("zzz", "")])
def test_another_word_is_refused_with_the_nearest_command(typed, hint, capsys):
    assert main([typed, "runs"]) == 2
    assert capsys.readouterr().err == f"error: {typed!r} is no command of python -m analysis{hint}\n"


def test_a_command_may_be_typed_as_a_word(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["lab-notes", "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m analysis lab_notes")


@pytest.mark.parametrize("config", ["algorithms: {}", ""])
def test_a_study_without_models_is_refused_by_a_report_on_models(config, tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(config)
    assert main(["parallelism", str(tmp_path)]) == 2
    assert "(its config.yaml has no models); make one:" in capsys.readouterr().err
