"""One spelling for each character of a corpus, before a tokenizer or a finder sees it.

    python experiments/normalize_corpus.py --train-file IN.txt --val-file IN2.txt \\
        --op-train-file OUT.txt --op-val-file OUT2.txt

A line stays a line, but for words hyphenated at a line's end, which are joined. Files are read in blocks, so one of any
size takes little memory, and any number of processes writes the same bytes. What was changed stands beside each output,
in OUT.txt.report.json. asyncsgd/domain_masking/normalizing.py says what is changed and what is not."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from asyncsgd.backends.pool import process_pool
from asyncsgd.core.signals import StopRequest
from asyncsgd.domain_masking.normalizing import INPUT_KINDS, normalize_file
from asyncsgd.errors import UsageError
from asyncsgd.records.machine import available_cores
from asyncsgd.scripts.base import run_script
from asyncsgd.settings.flags import Parser
from asyncsgd.settings.numbers import out_of_bounds, whole_number


def run(argv: list[str], stop: StopRequest) -> int:
    given = parser().parse_args(argv)
    wanted = out_of_bounds(given.processes, at_least=1)
    if wanted:
        raise UsageError(f"--processes must be {wanted}, got {given.processes}; type e.g. --processes 2")
    if (given.val_file is None) != (given.op_val_file is None):
        raise UsageError("--val-file and --op-val-file go together; type both or none")
    if given.op_train_file == given.op_val_file:
        raise UsageError(f"--op-train-file and --op-val-file are both {given.op_train_file}; name two files")
    files = [(given.train_file, given.op_train_file)]
    if given.val_file is not None:
        files.append((given.val_file, given.op_val_file))
    lower = given.lower
    column = given.text_column
    with process_pool(given.processes, modules=["asyncsgd.domain_masking.normalizing"]) as mapped:
        for source, target in files:
            before = time.perf_counter()
            changes = normalize_file(Path(source), Path(target), lower=lower, text_column=column, mapped=mapped)
            seconds = time.perf_counter() - before
            print(f"wrote  {target} ({seconds:.1f} s)", flush=True)
            for kind, number in changes.items():
                print(f"{number:14,}  {kind.replace('_', ' ')}")
    return 0


def parser() -> argparse.ArgumentParser:
    made = Parser(description=str(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    kinds = ", ".join(INPUT_KINDS)
    made.add_argument("--train-file", required=True, metavar="IN", help=f"text to normalize ({kinds})")
    made.add_argument("--op-train-file", required=True, metavar="OUT", help="where it is written (.txt, .txt.gz)")
    made.add_argument("--val-file", metavar="IN", help="text to evaluate on (default: none)")
    made.add_argument("--op-val-file", metavar="OUT", help="where it is written")
    made.add_argument("--text-column", default="text", metavar="NAME", help="of .parquet files (default: text)")
    made.add_argument("--lower", action="store_true", help="make all letters small")
    made.add_argument(
        "--processes", type=whole_number, default=available_cores(), metavar="N", help="(default: the cores here)"
    )
    return made


if __name__ == "__main__":
    sys.exit(run_script(run, ends_with_process=True))
