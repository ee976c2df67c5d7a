"""``python -m analysis candidates DIR``: the spans of a corpus that a finder proposes for masking, shown in some texts.

It reads the folder that ``experiments/mask_candidates.py`` filled: some texts with their candidates and with the words
that one drawing masks, the share of candidates, and the commonest ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from analysis.commands import run_command
from asyncsgd.errors import UsageError
from asyncsgd.records.events import read_json

EXAMPLES_SHOWN = 10
TERMS_SHOWN = 20


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest and the examples of a folder.

    Raises:
        UsageError: if it is no complete folder of candidates.
    """
    try:
        manifest = read_json(folder / "manifest.json")
        if not manifest["complete"]:
            raise UsageError(f"{folder} is not complete; run mask_candidates.py again, which goes on where it ended")
        return manifest, read_json(folder / "examples.json")["examples"]
    except (OSError, KeyError, msgspec.DecodeError) as error:
        raise UsageError(
            f"{folder} is no folder of candidates ({error}); name one that experiments/mask_candidates.py has filled"
        ) from error


def marked_text(example: Mapping[str, Any]) -> str:
    """A text with its candidates between angle brackets, and what is masked in square ones.

    >>> marked_text({"text": "a solid oxide fuel cell", "candidates": [[2, 13]], "masked": [[8, 13], [19, 23]]})
    'a <solid [oxide]> fuel [cell]'
    """
    text = example["text"]
    opening: dict[int, str] = {}
    closing: dict[int, str] = {}
    for spans, left, right in ((example["candidates"], "<", ">"), (example["masked"], "[", "]")):
        for start, end in spans:
            opening[start] = opening.get(start, "") + left
            closing[end] = right + closing.get(end, "")
    marked = ""
    for position in range(len(text) + 1):
        marked += closing.get(position, "")
        marked += opening.get(position, "")
        marked += text[position : position + 1]
    return marked


def show(folder: Path, number: int) -> None:
    """Print `number` examples and the statistics."""
    from rich.console import Console
    from rich.table import Table

    if number < 1:
        raise UsageError(f"--number must be 1 or more, got {number}")
    manifest, examples = read(folder)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(f"{manifest['finder']} in {manifest['data']}, pieces of {manifest['model']}")
    console.print("<candidate>  [masked in this drawing]\n")
    for example in [examples[n * len(examples) // number] for n in range(min(number, len(examples)))]:
        console.print(marked_text(example) + "\n")
    statistics = manifest["statistics"]
    for side, name in (("train", "training"), ("eval", "evaluation")):
        numbers = statistics[side]
        console.print(
            f"{name}: {numbers['candidate_share']:.1%} of {numbers['pieces']:,} word pieces are candidates; "
            f"{numbers['texts_without_candidates']:,} of {numbers['texts']:,} texts have none"
        )
    table = Table("term", "times in training", title=f"commonest of {statistics['distinct_terms']:,} candidates")
    for term, count in statistics["top_terms"][:TERMS_SHOWN]:
        table.add_row(term, f"{count:,}")
    console.print(table, soft_wrap=False)


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(
        show,
        __doc__,
        argv,
        {
            "folder": {"type": Path, "metavar": "DIR", "help": "a folder that mask_candidates.py has filled"},
            "--number": {
                "type": int,
                "default": EXAMPLES_SHOWN,
                "metavar": "N",
                "help": "texts (default: %(default)s)",
            },
        },
    )


if __name__ == "__main__":
    sys.exit(main())
