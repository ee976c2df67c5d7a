"""The pages of the documentation, and that the commands and the code of two of them run."""

import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from doors import cli
from gallery import write_tables
from marks import slow
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


PAGES = [ROOT / "README.md", *DOCS.rglob("*.md")]
OF_OTHERS = re.findall(
    r"\S+",
    "--backend-store-uri --cpu --dist --index-url --logdir --master-addr --master-port --multi-gpu --na-prob-file "
    "--nnodes --no-browser --node-rank --num-processes --shm-size --rdzv-backend --rdzv-endpoint --rdzv-conf "
    "--local-addr --rdzv-id --max-restarts --nodes --ntasks-per-node --cpus-per-task --from-file",
)
"""Flags of pip, pytest, torchrun, docker, ..."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_every_flag_of_a_page_exists(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)[^):]*\)", text):
        assert (page.parent / link).exists()
    rooms = (ROOT / "asyncsgd", ROOT / "analysis", ROOT / "experiments")
    files = [*(path for room in rooms for path in room.rglob("*.py")), ROOT / "tests" / "kill_campaign.py"]
    sources = [path.read_text("utf-8") for path in files]
    flags = re.findall(r'"(--[a-z_-]+)"', "".join(sources))
    fields = re.findall(r"^ +(\w+): .*= setting\(", "".join(sources), re.MULTILINE)
    aliases = re.findall(r"aliases=\((.*?),?\)", "".join(sources))
    fields += re.findall(r'"(\w+)"', "".join(aliases))
    fields += re.findall(r'name="(\w+)"', "".join(sources))
    known = {flag.replace("_", "-") for flag in (*flags, *(f"--{field}" for field in fields), *OF_OTHERS)}
    assert {flag.replace("_", "-") for flag in re.findall(r"(?<![\w-])(--[a-z][a-z_-]*)", text)} <= known


def test_the_index_lists_every_page():
    linked = re.findall(r"\]\(([^)]+)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    assert {page.name for page in DOCS.glob("*.md")} <= {"index.md", *linked}


def blocks(page, language):
    """The fenced blocks of a page in one language; commands have none."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if kind == language]


def commands(page):
    """The commands of a page that are said to run, without their comments."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if "# not tried here" not in line]


def test_the_recipes_for_clusters_can_be_read():
    """By a shell and as YAML: nobody has run them."""
    (script,) = blocks("machines.md", "bash")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    (job,) = blocks("machines.md", "yaml")
    service, pods = yaml.safe_load_all(job)
    template = pods["spec"]["template"]["spec"]
    assert template["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": pods["metadata"]["name"]}
    for text in (script, template["containers"][0]["args"][0]):
        words = shlex.split(text.split("torchrun", 1)[1].replace("'", ""))
        assert words[words.index("-m") :][:5] == ["-m", "asyncsgd", "train", "masked_lm", "--mode"]


MANY = {"kinds": [], "joined": "", "x": 0, "y": 0}, {"kinds": ["x", "y"], "joined": "x;y", "x": 1, "y": 1}
IN_RUNS = re.compile("runs/").search  # of a command that leaves a run for others, or begins at one
Do = Callable[[str], None]


@pytest.fixture
def do(tmp_path, monkeypatch):
    """Do what a command says, in this process and with few samples, in a folder that has the data it names."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    lines = [f"ba di {'return' * (number % 2)} fo {number}" for number in range(120)]
    Path("text.txt").write_text("\n".join(lines))
    Path("posts.csv").write_text("\n".join(["body", *lines]))
    for side in ("train", "test"):
        texts = []
        labelled = ["text,label"]
        tagged = []
        pairs = ["premise,hypothesis,label"]
        rated = []
        many = []
        for number, line in enumerate(lines):
            text = f"{side} {line}"
            label = "AB"[number % 2]
            texts.append({"body": text})
            labelled.append(f"{text},{label}")
            tagged.append({"tokens": [side, line], "ner_tags": ["O", "B-A"]})
            pairs.append(f"{side},{line},{label}")
            rated.append({"text": side, "second": line, "score": number})
            many.append({"text": text, **MANY[number % 2]})
        for folder, rows in (("texts", texts), ("tagged", tagged), ("rated", rated), ("many", many)):
            write_tables(Path(folder), **{side: rows})
        for folder, rows in (("labelled", labelled), ("pairs", pairs)):
            Path(folder).mkdir(exist_ok=True)
            Path(folder, f"{side}.csv").write_text("\n".join(rows))
    Path("texts.csv").write_text("premise,hypothesis,label\nba,di,A\nfo,ba,B\n")
    for side in ("train", "test"):
        for color in ("red", "blue"):
            folder = Path("photos", side, color)
            folder.mkdir(parents=True)
            for number in range(16):
                Image.new("RGB", (20, 16), color).save(folder / f"{number}.png")
    Path("glue").mkdir()
    for side, labels in {"train": "AB", "dev_matched": "AB", "dev_mismatched": "BA"}.items():
        rows = [f"{side} {number}\t{labels[number % 2]}" for number in range(64)]
        Path("glue", f"{side}.tsv").write_text("\n".join(["text\tlabel", *rows]))
    without_labels = [f"test_matched {number}" for number in range(64)]
    Path("glue", "test_matched.tsv").write_text("\n".join(["text", *without_labels]))
    data = {"classification": "labelled", "token_classification": "tagged"}

    def run(command):
        line = shlex.split(command.replace(" 5000", " 16").replace(" FOLDER", " tagged"))
        assert line.pop(0) == "python"
        if line[:2] == ["-m", "asyncsgd"]:
            ended = cli([*line[1:], "--cache-dir", "cache"])
        else:
            line[0] = line[0].removeprefix("experiments/")
            line += ["--samples", "48", "--evaluations", "1", "--cache-dir", "cache", "--device", "cpu"]
            of_images = line[0] == "own_resnet.py"
            if "--data" not in line and not of_images:
                line += ["--data", data.get(line[1], "text.txt")]
            if "texts" in line:
                line += ["--text-column", "body"]
            if "--clock" not in line and "--mode" not in line:
                line += ["--mode", "single"]
            ended = cli(line)
        assert ended.code == 0, ended.err

    return run


@pytest.mark.slow
def test_every_way_of_using_a_model_works_with_a_run_s_model_and_with_an_exported_one(do, capsys):
    for command in filter(IN_RUNS, commands("tasks.md")):
        do(command)
    codes = blocks("tasks.md", "python")
    assert len(codes) == 4
    for code in codes:
        (run,) = re.findall(r"runs/(\w+)/model", code)
        if not Path("exported", run).exists():
            do(f"python -m asyncsgd export runs/{run} --out exported/{run}")
        for version in (code, code.replace(f"runs/{run}/model", f"exported/{run}")):
            capsys.readouterr()
            exec(version, {})
            assert capsys.readouterr().out.strip()


LONG = ("pydocs:pairs", "--images")
"""In commands that build their data for many seconds."""
TYPED = [line for page in ("tasks.md", "running.md", "own_model.md") for line in commands(page) if not IN_RUNS(line)]


def is_long(command):
    return any(word in command for word in LONG)


@pytest.mark.parametrize(
    "command",
    [*(line for line in TYPED if not is_long(line)), *slow(*(line for line in TYPED if is_long(line)))],
)
def test_what_the_pages_about_tasks_and_running_say_can_be_typed(command, do):
    do(command)
