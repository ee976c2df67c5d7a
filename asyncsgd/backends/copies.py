"""Copies of prepared folders, for hosts that lack them.

Rank 0 lists the files of the folders that its prepared task names. A host that has no folder with these files asks for
them, and each file comes as a vector of bytes through the pair of the two. A copy lies in the host's cache folder under
the hash of its listing: it is complete where it is there, and the next run finds it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from asyncsgd.data.tokens import fill, folder_in_cache
from asyncsgd.errors import RunError

FORMAT = 1
"""Of a copy in the cache folder."""
_PIECE = 1 << 26
"""Bytes of a file that are in memory at a time."""


class ListedFile(Struct, array_like=True, forbid_unknown_fields=True):
    """A file of a folder."""

    name: str
    """Its path within the folder, with slashes."""
    num_bytes: int
    sha256: str


class ListedFolder(Struct, array_like=True, forbid_unknown_fields=True):
    """A folder of rank 0 with the files in it that are needed."""

    path: str
    files: tuple[ListedFile, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


def listed(path: str, names: Iterable[str] | None = None) -> ListedFolder:
    """A folder with the files of these names; None: with all, also those of folders in it."""
    folder = Path(path)
    if names is None:
        names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    files = []
    for name in names:
        file = folder / name
        files.append(ListedFile(name, file.stat().st_size, _sha256_of(file)))
    return ListedFolder(path, tuple(files))


def found_here(folder: ListedFolder, cache: Path) -> str | None:
    """Where this host has such a folder: under the path that it has on rank 0, as where both see one file system, or
    as a copy in the cache folder. None if it lacks it.

    Raises:
        RunError: if somebody has changed the copy.
    """
    if _has_files(Path(folder.path), folder.files):
        return folder.path
    copy = _copy_of(folder, cache)
    if not copy.is_dir():
        return None
    if not _has_files(copy, folder.files):
        raise RunError(f"{copy} was a copy of {folder.path} on rank 0 and has been changed; delete it")
    return str(copy)


def send(folder: ListedFolder, send_vector: Callable[[Tensor], None]) -> None:
    """Send the files of a folder in the order of its listing."""
    for file in folder.files:
        send_part(Path(folder.path) / file.name, 0, file.num_bytes, send_vector)


def send_part(path: Path, first: int, num_bytes: int, send_vector: Callable[[Tensor], None]) -> None:
    """Send so many bytes of a file from byte `first` on.

    Raises:
        RunError: if the file is shorter.
    """
    with path.open("rb") as file:
        file.seek(first)
        for size in _sizes(num_bytes):
            content = bytearray(size)
            if file.readinto(content) != size:
                raise RunError(f"{path} has become shorter while it was copied; start the run again")
            send_vector(torch.frombuffer(content, dtype=torch.uint8))


def received_part(num_bytes: int, receive_vector: Callable[[Tensor], None]) -> Iterator[bytes]:
    """The bytes that `send_part` sends, piece by piece."""
    for size in _sizes(num_bytes):
        vector = torch.empty(size, dtype=torch.uint8)
        receive_vector(vector)
        yield vector.numpy().tobytes()


def _sizes(num_bytes: int) -> Iterator[int]:
    """Of the pieces in which a file is sent."""
    for first in range(0, num_bytes, _PIECE):
        yield min(_PIECE, num_bytes - first)


def receive(folder: ListedFolder, cache: Path, receive_vector: Callable[[Tensor], None]) -> str:
    """Receive the files of a folder into a copy in the cache folder, and return the path of the copy.

    Raises:
        RunError: if a file is not what the listing says.
        UsageError: if the cache folder cannot be written.
    """
    copy = _copy_of(folder, cache)
    fill(copy, lambda made: _receive_files(folder, made, receive_vector))
    return str(copy)


def _copy_of(folder: ListedFolder, cache: Path) -> Path:
    files = [[file.name, file.num_bytes, file.sha256] for file in folder.files]
    return folder_in_cache(cache.absolute(), "copy", [FORMAT, files])


def _receive_files(folder: ListedFolder, made: Path, receive_vector: Callable[[Tensor], None]) -> None:
    for file in folder.files:
        _check_name(file.name)
        path = made / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as written:
            for piece in received_part(file.num_bytes, receive_vector):
                written.write(piece)
        if _sha256_of(path) != file.sha256:
            raise RunError(f"{file.name} of {folder.path} has not come as rank 0 has it; start the run again")


def _has_files(folder: Path, files: Sequence[ListedFile]) -> bool:
    """Whether these files are in a folder as they are listed."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes or _sha256_of(path) != file.sha256:
            return False
    return folder.is_dir()


def _check_name(name: str) -> None:
    """Refuse a name that leads out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RunError(f"rank 0 has a file called {name!r}, which no folder can have")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
