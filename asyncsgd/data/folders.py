"""Which files of a folder are which split: by names as people give them, and as the Hugging Face Hub lays data out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from asyncsgd.errors import UsageError

TRAIN = "train"
SIDES = {TRAIN: ("train.*",), "test": ("test.*",), "validation": ("validation.*", "valid.*", "dev.*", "eval.*")}
"""What the files of each split are called."""

_WORDS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "evaluation"), "validation"),
}
_NAME = re.compile(rf"({'|'.join(_WORDS)})([-_][a-z]\w*?)?([-_.]?\d+(-of-\d+)?)?")
"""The word of a split, what makes it a set of its own (``validation_matched``), and the number of a shard."""
_DESCRIPTIONS = ("labels.json", "dataset_infos.json", "dataset_info.json", "state.json")
"""Files beside the data that say something of them, and are never data; nor is a README."""


def split_meant(name: str) -> str:
    """``train``, ``test`` or ``validation``: what a set of this name is for; empty for another name.

    >>> split_meant("dev_mismatched"), split_meant("test"), split_meant("unsupervised")
    ('validation', 'test', '')
    """
    found = _NAME.fullmatch(name.lower())
    return _WORDS[found[1]] if found else ""


def evaluation_sets(names: Iterable[str], splits: Sequence[str]) -> list[str]:
    """Those of `names` that are for one of `splits`, in the order of these; the one that bears its name first.

    >>> evaluation_sets(["validation_matched", "train", "test_a", "test"], ["test", "validation"])
    ['test', 'test_a', 'validation_matched']
    """
    meant = [
        (splits.index(split_meant(name)), name != split_meant(name), name)
        for name in names
        if split_meant(name) in splits
    ]
    return [name for _, _, name in sorted(meant)]


def files_of(folder: Path, kinds: Sequence[str]) -> list[Path]:
    """The files of a folder that can be read, in the order of their names, without hidden ones and descriptions."""
    return [
        file
        for file in sorted(folder.iterdir())
        if file.name.lower().endswith(tuple(kinds))
        and file.name[0] != "."
        and file.name.lower() not in _DESCRIPTIONS
        and file.name.lower().partition(".")[0] != "readme"
        and file.is_file()
    ]


def splits_of(
    path: Path, kinds: Sequence[str], sides: Mapping[str, Sequence[str]], needs: str | None
) -> tuple[dict[str, list[Path]], list[Path]]:
    """The files of each split of a folder, and those that are in none.

    Files are in the folder or in its subfolder ``data``, and are called as `sides` says, or by the word of a split with
    the number of a shard; or they are in a subfolder that is called by such a word. What goes on behind the word of an
    evaluation makes a set of its own. Where nothing is called train, or nothing but train, the folder is read whole.

    Args:
        kinds: endings of the files that can be read.
        sides: patterns for the names of the files of each split.
        needs: a split that the folder must have; where it has none, it is not read whole.

    Raises:
        UsageError: if the folder holds data sets in subfolders and nothing else.
    """
    named: dict[str, list[Path]] = {}
    places = [place for place in (path, path / "data") if place.is_dir()]
    for place in places:
        for file in files_of(place, kinds):
            if name := _set_of(file.name.lower(), sides):
                named.setdefault(name, []).append(file)
        for folder in sorted(place.iterdir()):
            if folder.is_dir() and folder.name.lower() in _WORDS:
                named.setdefault(_WORDS[folder.name.lower()], []).extend(files_of(folder, kinds))
    named = {name: files for name, files in named.items() if files}
    here = files_of(path, kinds)
    if needs is None and not {TRAIN} < named.keys():
        named = {TRAIN: sorted({*here, *named.get(TRAIN, ())})} if here or TRAIN in named else {}
    if (needs or TRAIN) not in named:
        inside = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and _has_data(folder, kinds)]
        if inside and not here:
            names = ", ".join(folder.name for folder in inside)
            raise UsageError(f"{path} holds data in subfolders ({names}); name one of them, e.g. {inside[0]}")
    used = {file for files in named.values() for file in files}
    return named, [file for place in places for file in files_of(place, kinds) if file not in used]


def _set_of(name: str, sides: Mapping[str, Sequence[str]]) -> str:
    """The set that a file belongs to by its name; empty for none."""
    for side, patterns in sides.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return side
    found = _NAME.fullmatch(name.partition(".")[0])
    if found is None or (found[2] and _WORDS[found[1]] == TRAIN):
        return ""
    return f"{found[1]}{found[2]}" if found[2] else _WORDS[found[1]]


def _has_data(folder: Path, kinds: Sequence[str]) -> bool:
    inside = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    return any(files_of(each, kinds) for each in inside)


def told(splits: Mapping[str, Sequence[Path]], left_out: Sequence[Path], path: Path) -> str:
    """Which file became which split, in a line."""

    def listed(files: Sequence[Path]) -> str:
        names = [file.relative_to(path).as_posix() for file in files]
        return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} files)"

    parts = [f"{name}: {listed(files)}" for name, files in splits.items()]
    if left_out:
        parts.append(f"not read: {listed(left_out)}")
    return f"{path.name} holds {'; '.join(parts)}"
