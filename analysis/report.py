"""``python -m analysis report RUNS_DIR``: one page (or tables, pictures, a sentence) of what a study shows.

The page is one file without scripts, fonts or addresses. Equal studies give equal bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import carried_out
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


def parser() -> argparse.ArgumentParser:
    """The flags; building them imports nothing heavy."""
    flags = argparse.ArgumentParser(
        prog="python -m analysis report",
        description="Report of a study: one self-contained page, or its tables, or its pictures.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("runs_dir", type=Path, metavar="RUNS_DIR", help="a sweep's folder, or any folder with runs")
    flags.add_argument("--out", type=Path, metavar="FILE", help="the file (html: default RUNS_DIR/report.html)")
    flags.add_argument("--format", choices=FORMATS, default="html", help="html is the page; sentence the verdict")
    flags.add_argument("--table", metavar="NAME", help="only this table (md, latex, csv); csv holds one: default tests")
    flags.add_argument("--figures", type=Path, metavar="DIR", help="also write every picture there as PDF and SVG")
    flags.add_argument("--arms", metavar="KEY,KEY", help="settings in which arms of loose runs are meant to differ")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code (2 for what the user has to change)."""
    flags = parser().parse_args(arguments)
    return carried_out(lambda: _run(flags.runs_dir, flags.out, flags.format, flags.table, flags.figures, flags.arms))


def _run(
    runs_dir: Path, out: Path | None, form: str, table: str | None, figures: Path | None, arms: str | None
) -> None:
    if table is not None and form in ("html", "sentence"):
        raise UsageError("--table goes with tables, not with the page; add --format md, latex or csv")
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise UsageError(f"--out {out}: name a file in a folder that is there, such as {runs_dir / 'report.html'}")
    if figures is not None and figures.exists() and not figures.is_dir():
        raise UsageError(f"--figures {figures} is a file; name a folder, such as {figures.with_suffix('')}_pictures")
    from analysis.load import load

    study = load(runs_dir, arms.split(",") if arms else ())
    file = runs_dir / "report.html" if out is None else out
    if form == "html":
        from analysis.page import page, render

        text = render(page(study, file))
    else:
        text = f"{study.verdict}\n" if form == "sentence" else tables_of(study, form, table)
    if form == "html" or out is not None:
        _write(file, text)
        print(*([study.verdict] if form == "html" else []), file, sep="\n")
    else:
        print(text, end="", flush=True)
    if figures is not None:
        from analysis.gallery import save

        names = save(study, figures)
        aside = sys.stdout if form == "html" or out is not None else sys.stderr  # not between the tables
        print(f"{figures}: {len(names)} pictures, each as PDF and SVG", file=aside)


def tables_of(study: Study, form: str, name: str | None) -> str:
    """One table or all that have a row, as Markdown, LaTeX or CSV."""
    from analysis import tables
    from analysis.load import TABLES

    made = {key: (title, of(study)) for key, (title, of) in TABLES.items()}
    made = {key: (title, frame) for key, (title, frame) in made.items() if len(frame)}
    if name is not None and name not in made:
        listed = ", ".join(made) or "none at all"
        raise UsageError(f"this study has no table {name!r}{nearest(name, made)}; it has: {listed}")
    if form == "csv":
        key = name or ("tests" if "tests" in made else next(iter(made)))
        if name is None:
            others = ", ".join(other for other in made if other != key)
            print(f"csv holds one table, this is {key}; --table NAME gives another: {others}", file=sys.stderr)
        return tables.numbers(made[key][1]).to_csv(index=False)
    chosen = made if name is None else {name: made[name]}
    if form == "md":
        return "\n".join(tables.markdown(frame, title) for title, frame in chosen.values())
    return "\n".join(tables.latex(frame, key, title) for key, (title, frame) in chosen.items())


def _write(path: Path, text: str) -> None:
    """Write all of it or nothing: whoever has the page open never reloads half of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
            return
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({error.strerror or error}); choose another --out") from error


if __name__ == "__main__":
    sys.exit(main())
