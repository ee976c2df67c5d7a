"""Which files of a folder are which split: by names as people give them, and as the Hugging Face Hub lays data out."""

from __future__ import annotations

import itertools
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
_PART = r"(?:part|shard|chunk)"
_NAME = re.compile(
    rf"({'|'.join(_WORDS)})([-_](?!{_PART}[-_.]?\d)[a-z]\w*?)?"
    rf"((?:[-_.]?(?:{_PART}[-_.]?)?\d+-of-\d+)|(?(2)[-_.]|[-_.]?)(?:{_PART}[-_.]?)?\d+)?"
)
"""The word of a split, what makes it a set of its own (``validation_matched``), and the number of a shard. Something
stands between a name of its own and a number, since the number is part of the name in ``test_v2``."""
_DESCRIPTIONS = ("labels.json", "dataset_infos.json", "dataset_info.json", "state.json")
"""Files beside the data that say something of them, and are never data; nor is a README."""


def split_meant(name: str) -> str:
    """``train``, ``test`` or ``validation``: what a set of this name is for; empty for another name.

    >>> split_meant("dev_mismatched"), split_meant("test"), split_meant("unsupervised")
    ('validation', 'test', '')
    """
    match = _NAME.fullmatch(name.lower())
    return _WORDS[match[1]] if match else ""


def evaluation_sets(names: Iterable[str], splits: Sequence[str]) -> list[str]:
    """Those of `names` that are for one of `splits`, in the order of these; the one that bears its name first.

    >>> evaluation_sets(["validation_matched", "train", "test_a", "test"], ["test", "validation"])
    ['test', 'test_a', 'validation_matched']
    """

    def place(name: str) -> tuple[int, bool, str]:
        split = split_meant(name)
        return splits.index(split), name != split, name

    return sorted((name for name in names if split_meant(name) in splits), key=place)


def files_of(folder: Path, kinds: Sequence[str]) -> list[Path]:
    """The files of a folder that can be read, in the order of their names, without hidden ones and descriptions."""
    files = []
    for file in sorted(folder.iterdir()):
        name = file.name.lower()
        stem, _, _ = name.partition(".")  # empty where the file is hidden
        if name in _DESCRIPTIONS or stem in ("", "readme"):
            continue
        if name.endswith(tuple(kinds)) and file.is_file():
            files.append(file)
    return files


def splits_of(
    path: Path, kinds: Sequence[str], sides: Mapping[str, Sequence[str]], needs: str | None
) -> tuple[dict[str, list[Path]], list[Path]]:
    """The files of each split of a folder, and those that are in none.

    Files are in the folder or in its subfolder ``data``, and are called as `sides` says, or by the word of a split with
    the number of a shard; or they are in a subfolder that is called by such a word. A name that goes on after the word
    of an evaluation, as ``validation_matched`` does, makes a set of its own. Where nothing is called train, or nothing
    but train, the folder is read whole.

    Args:
        kinds: endings of the files that can be read.
        sides: patterns for the names of the files of each split.
        needs: a split that the folder must have; where it has none, it is not read whole.

    Raises:
        UsageError: if the folder holds data sets in subfolders and nothing else.
    """
    splits: dict[str, list[Path]] = {}
    candidates = []
    for folder in (path, path / "data"):
        if not folder.is_dir():
            continue
        files = files_of(folder, kinds)
        candidates += files
        for file in files:
            name = _set_of(file.name.lower(), sides)
            if name:
                splits.setdefault(name, []).append(file)
        for subfolder in sorted(folder.iterdir()):
            split = _WORDS.get(subfolder.name.lower())
            if split and subfolder.is_dir():
                splits.setdefault(split, []).extend(files_of(subfolder, kinds))
    splits = {name: files for name, files in splits.items() if files}
    here = files_of(path, kinds)
    if needs is None and not {TRAIN} < splits.keys():
        whole = {*here, *splits.get(TRAIN, ())}
        splits = {TRAIN: sorted(whole)} if whole else {}
    if (needs or TRAIN) not in splits:
        folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir()]
        inside = [folder for folder in folders if _has_data(folder, kinds)]
        if inside and not here:
            names = ", ".join(folder.name for folder in inside)
            raise UsageError(f"{path} holds data in subfolders ({names}); name one of them, e.g. {inside[0]}")
    used = set(itertools.chain(*splits.values()))
    return splits, [file for file in candidates if file not in used]


def _set_of(name: str, sides: Mapping[str, Sequence[str]]) -> str:
    """The set that a file belongs to by its name; empty for none."""
    for side, patterns in sides.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return side
    stem, _, _ = name.partition(".")
    match = _NAME.fullmatch(stem)
    if match is None:
        return ""
    word, own_name = match.group(1, 2)
    split = _WORDS[word]
    if not own_name:
        return split
    return "" if split == TRAIN else f"{word}{own_name}"


def _has_data(folder: Path, kinds: Sequence[str]) -> bool:
    """Whether a folder or one of its subfolders has a file that can be read."""
    subfolders = [inside for inside in folder.iterdir() if inside.is_dir()]
    return any(files_of(place, kinds) for place in (folder, *subfolders))


def told(splits: Mapping[str, Sequence[Path]], left_out: Sequence[Path], path: Path) -> str:
    """Which file became which split, in a line."""

    def listed(files: Sequence[Path]) -> str:
        names = [file.relative_to(path).as_posix() for file in files]
        if len(names) < 4:
            return ", ".join(names)
        return f"{names[0]}, {names[1]} ... {names[-1]} ({len(names)} files)"

    parts = [f"{name}: {listed(files)}" for name, files in splits.items()]
    if left_out:
        parts.append(f"not read: {listed(left_out)}")
    return f"{path.name} holds {'; '.join(parts)}"
