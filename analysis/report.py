"""``python -m analysis report RUNS_DIR``: one page (or tables, pictures, a sentence) of what a study shows.

The page is one file without scripts, fonts or addresses. Equal studies give equal bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import run_command, write
from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:  # scipy, pandas and matplotlib take seconds to import, which --help and a typing error should not
    from analysis.load import Study

FORMATS = ("html", "md", "latex", "csv", "sentence")
EXAMPLE = """\
examples:
  python -m analysis report runs
  python -m analysis report runs --out report.html --figures pictures
  python -m analysis report runs --format sentence
  python -m analysis report runs --format csv --table tests > tests.csv
  python -m analysis report runs --format latex --table paper

The page goes to RUNS_DIR/report.html unless --out says otherwise; the rest goes to standard output."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code (2 for what the user has to change)."""
    return run_command(
        _run,
        __doc__,
        arguments,
        {
            "runs_dir": {"type": Path, "metavar": "RUNS_DIR", "help": "a study's folder, or any folder with runs"},
            "--out": {"type": Path, "metavar": "FILE", "help": "the file (html: default RUNS_DIR/report.html)"},
            "--format": {
                "dest": "form",
                "choices": FORMATS,
                "default": "html",
                "help": "html: page; sentence: verdict",
            },
            "--table": {"metavar": "NAME", "help": "only this table (md, latex, csv); csv holds one: default tests"},
            "--figures": {"type": Path, "metavar": "DIR", "help": "also write every picture there as PDF and SVG"},
            "--arms": {"metavar": "KEY,KEY", "help": "settings in which arms of loose runs are meant to differ"},
        },
        EXAMPLE,
    )


def _run(
    runs_dir: Path, out: Path | None, form: str, table: str | None, figures: Path | None, arms: str | None
) -> None:
    if table is not None and form in ("html", "sentence"):
        raise UsageError("--table goes with tables, not with the page; add --format md, latex or csv")
    from analysis.load import load

    names = [name.strip() for name in arms.split(",")] if arms else []
    study = load(runs_dir, names)
    if form == "html":
        file = study.report(out)
        print(study.verdict, file, sep="\n")
    else:
        text = f"{study.verdict}\n" if form == "sentence" else tables_of(study, form, table)
        if out is None:
            print(text, end="", flush=True)
        else:
            write(out, text)
            print(out)
    if figures is not None:
        from analysis.gallery import save

        pictures = save(study, figures)
        tables_are_printed = form != "html" and out is None
        progress = sys.stderr if tables_are_printed else sys.stdout
        print(f"{figures}: {len(pictures)} pictures, each as PDF and SVG", file=progress)


def tables_of(study: Study, form: str, name: str | None) -> str:
    """One table or all that have a row, as Markdown, LaTeX or CSV."""
    from analysis import tables

    made = {key: (title, frame) for key, (title, frame) in study.made_tables().items() if len(frame)}
    if name is not None and name not in made:
        listed = ", ".join(made) or "none at all"
        raise UsageError(f"this study has no table {name!r}{nearest(name, made)}; it has: {listed}")
    if form == "csv":
        key = name or ("tests" if "tests" in made else next(iter(made)))
        if name is None:
            others = ", ".join(other for other in made if other != key)
            print(f"csv holds one table, this is {key}; --table NAME gives another: {others}", file=sys.stderr)
        return tables.with_plain_numbers(made[key][1]).to_csv(index=False)
    chosen = made if name is None else {name: made[name]}
    if form == "md":
        said = [] if name is not None else [_as_markdown(study)]
        return "\n".join([*said, *(tables.markdown(frame, title) for title, frame in chosen.values())])
    return "\n".join(tables.latex(frame, key, title) for key, (title, frame) in chosen.items())


def _as_markdown(study: Study) -> str:
    """The headlines with their details, as the page begins with them."""
    lines = []
    for headline in study.headlines:
        lines += [f"**{headline.text}**", ""]
        lines += [f"- {detail}" for detail in headline.details]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
