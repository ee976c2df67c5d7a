"""A report of comparisons as a command: tables and numbers beside the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from pandas import DataFrame

from analysis import special, tables, ways
from analysis.commands import run_command, write
from analysis.comparison_sections import TablePart, parts_of, sentences
from analysis.comparisons import Comparisons, read
from analysis.load import load
from analysis.page import render


def run_report(command: str, about: str | None, arguments: Sequence[str] | None) -> int:
    """Carry out the command of a special report; return the exit code.

    Args:
        command: the name of the command and of the special report.
        about: the docstring of the command's module.
    """
    file = {"type": Path, "metavar": "FILE"}

    def run(runs: Path, out: Path | None, numbers: Path | None) -> None:
        found = read(runs)
        table = ways.ways_of(found) if command == "parallelism" else DataFrame()
        print("\n".join(sentences(found)))
        if numbers is not None:
            write(numbers, as_json(found, table))
            print(f"json   {numbers}")
        if out is None:
            parts = parts_of(found)
            if command == "parallelism":
                parts += ways.parts_of(found, table)
            print(printed(parts, found.left_out))
        else:
            write(out, render(special.page_of(load(runs), out, command)))
            print(f"page   {out}")

    return run_command(
        run,
        about,
        arguments,
        {
            "runs": {"type": Path, "metavar": "RUNS_DIR", "help": "folder of a study that compares arms"},
            "--out": {**file, "help": "write the page there; without it tables are printed"},
            "--json": {**file, "dest": "numbers", "help": "write all numbers there"},
        },
    )


def printed(parts: Sequence[TablePart], left_out: Sequence[str]) -> str:
    """What is printed without ``--out``: the tables, and each run that is in none of them."""
    blocks = []
    for part in parts:
        table = tables.markdown(part.frame, part.title).rstrip()
        blocks.append("\n\n".join((table, *part.notes)))
    lines = ["\n\n".join(blocks)]
    if left_out:
        lines.append("left out:")
        lines += [f"  {line}" for line in left_out]
    return "\n".join(lines)


def as_json(found: Comparisons, ways_table: DataFrame) -> str:
    """All numbers of the tables; an interval is three of them."""
    if "metrics" in ways_table:
        metrics = DataFrame([*ways_table["metrics"]])
        ways_table = pd.concat([ways_table.drop(columns="metrics"), metrics], axis=1)
    content = {"name": found.name, "num_seeds": found.num_seeds}
    for name, frame in {"arms": found.arms, "grid": found.grid, "ways": ways_table}.items():
        content[name] = json.loads(tables.with_plain_numbers(frame).to_json(orient="records"))
    content["left_out"] = found.left_out
    return json.dumps(content, indent=1)
