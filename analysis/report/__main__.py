"""``python -m analysis.report RUNS_DIR``: one page (or tables, or pictures) of what a study shows.

The page is one file without scripts, fonts or addresses, laid out by `analysis/report/report.html.jinja`. Its numbers
come from `analysis.findings.results`, its pictures from `analysis.report.gallery`, its tables from
`analysis.report.tables.contents`. Equal studies give equal bytes.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import carried_out
from asyncsgd.errors import UsageError, nearest

if TYPE_CHECKING:  # scipy, pandas and matplotlib take seconds to import, which --help and a typing error should not
    from analysis.findings.results import Results

FORMATS = ("html", "md", "latex", "csv")


EXAMPLE = """\
examples:
  python -m analysis.report runs
  python -m analysis.report runs --out report.html --figures pictures
  python -m analysis.report runs --format md
  python -m analysis.report runs --format csv --table tests > tests.csv

The page goes to RUNS_DIR/report.html unless --out says otherwise; tables go to standard output."""


def parser() -> argparse.ArgumentParser:
    """The flags; building them imports nothing heavy."""
    flags = argparse.ArgumentParser(
        prog="python -m analysis.report",
        description="Report of a study: one self-contained page, or its tables, or its pictures.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    flags.add_argument("runs_dir", type=Path, metavar="RUNS_DIR", help="a sweep's folder, or any folder with runs")
    flags.add_argument("--out", type=Path, metavar="FILE", help="the file (html: default RUNS_DIR/report.html)")
    flags.add_argument("--format", choices=FORMATS, default="html", help="html is the page, the others are tables")
    flags.add_argument("--table", metavar="NAME", help="only this table (md, latex, csv); csv holds one: default tests")
    flags.add_argument("--figures", type=Path, metavar="DIR", help="also write every picture there as PNG and SVG")
    flags.add_argument(
        "--seed", type=int, default=0, help="of the draws behind bootstrap shares and large permutations"
    )
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code (2 for what the user has to change)."""
    flags = parser().parse_args(arguments)
    return carried_out(lambda: _run(flags.runs_dir, flags.out, flags.format, flags.table, flags.figures, flags.seed))


def _run(runs_dir: Path, out: Path | None, form: str, table: str | None, figures: Path | None, seed: int) -> None:
    if table is not None and form == "html":
        raise UsageError("--table goes with tables, not with the page; add --format md, latex or csv")
    if seed < 0:
        raise UsageError(f"--seed must be 0 or more, got {seed}")
    if out is not None:
        _check_file(out)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise UsageError(f"--figures {figures} is a file; name a folder, such as {figures.with_suffix('')}_pictures")
    import numpy

    from analysis.findings.results import results
    from analysis.study.read import load_study

    study = load_study(runs_dir)
    found = results(study, numpy.random.default_rng(seed))
    file = runs_dir / "report.html" if out is None else out
    if form == "html":
        from analysis.findings.sentence import conditions
        from analysis.report.page import page, render

        text = render(page(found, file, runs_dir))
    else:
        text = _tables(found, form, table)
    if form == "html" or out is not None:
        _write(file, text)
        for headline in found.headlines if form == "html" else ():
            print(headline.text)
            words = [conditions(group) for group in found.groups if group.name == headline.group]
            print(*(f"  {text}" for text in (*words, *headline.details)), sep="\n")
        print(file)
    else:
        print(text, end="", flush=True)
    if figures is not None:
        from analysis.report.gallery import save_gallery

        paths = save_gallery(found, figures)
        print(f"{figures}: {len(paths) // 2} pictures, each as PNG and SVG", file=_aside(form, out))


def _tables(found: Results, form: str, name: str | None) -> str:
    from analysis.report.tables import contents as report_contents
    from analysis.report.tables import table as report_tables

    made = {table.key: table for table in report_contents.all_tables(found, lambda _: "")}
    wanted = name
    if name is None and form == "csv":
        wanted = "tests" if "tests" in made else next(iter(made))
    if wanted is not None and wanted not in made:
        listed = ", ".join(made) or "none at all"
        raise UsageError(f"this study has no table {wanted!r}{nearest(wanted, made)}; it has: {listed}")
    if form == "csv":
        assert wanted is not None
        if name is None:
            others = ", ".join(key for key in made if key != wanted)
            print(f"csv holds one table, this is {wanted}; --table NAME gives another: {others}", file=sys.stderr)
        return report_tables.as_csv(made[wanted])
    chosen = list(made.values()) if wanted is None else [made[wanted]]
    return report_tables.markdown(chosen) if form == "md" else report_tables.latex(chosen)


def _aside(form: str, out: Path | None) -> io.TextIOBase:
    """Where remarks go: not between the tables."""
    return sys.stdout if form == "html" or out is not None else sys.stderr  # type: ignore[return-value]


def _check_file(path: Path) -> None:
    """Refuse before anything is computed what could not be written afterwards."""
    if path.is_dir():
        raise UsageError(f"--out {path} is a folder; name a file in it, such as {path / 'report.html'}")
    if not path.parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.parent}; make it first: mkdir -p {path.parent}")


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
