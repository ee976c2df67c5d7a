"""A model of the user's own: the README's example, the page about it, the script, and what is refused."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_IMPORTED = """
    import sys
    assert not {"transformers", "datasets"} & set(sys.modules), "heavy imports"
"""

pytestmark = pytest.mark.processes


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def readme_example():
    return next(block for block in blocks(ROOT / "README.md") if "class Spirals" in block)


def run(folder, name, code):
    (folder / name).write_text(code, encoding="utf-8")
    return subprocess.run([sys.executable, name], cwd=folder, capture_output=True, text=True, timeout=300)


def test_the_readme_s_example_trains_on_both_clocks_and_replays_without_transformers(tmp_path):
    code = readme_example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    done = run(tmp_path, "mine.py", code + NOT_IMPORTED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Replayed(identical=True") == 2
    losses = [float(found) for found in re.findall(r"final  eval loss ([\d.]+)", done.stdout)]
    assert len(losses) == 2
    assert max(losses) < 0.6  # two arms: ln 2 at the beginning


def test_without_the_guard_one_message_says_what_is_missing(tmp_path):
    done = run(tmp_path, "bad.py", readme_example().replace('if __name__ == "__main__":', "if True:"))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith('put what it does under if __name__ == "__main__":')
    assert "worker 0" not in done.stdout + done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_page_about_own_models_is_two_files_that_run(tmp_path):
    task, *rest = blocks(ROOT / "docs" / "own_model.md")
    (tmp_path / "cubic.py").write_text(task, encoding="utf-8")
    code = 'if __name__ == "__main__":\n' + textwrap.indent("\n".join(rest), "    ")
    done = run(tmp_path, "study.py", code)
    assert done.returncode == 0, done.stderr
    assert "identical=True" in done.stdout
    assert done.stdout.splitlines()[-1] == "True"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--mode single",
        "--mode async --nproc 2 --transport process_group",
        "--mode sync --nproc 2",
        "--mode hogwild --nproc 2",
    ],
)
def test_the_script_runs_in_every_mode(tmp_path, flags):
    command = [sys.executable, str(ROOT / "experiments" / "own_model.py"), *flags.split()]
    more = ["--samples", "640", "--evaluations", "1", "--train-images", "400", "--learning-rate", "3e-3"]
    done = subprocess.run([*command, *more], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"final  eval loss 1\.\d+   accuracy 0\.\d+", done.stdout)
