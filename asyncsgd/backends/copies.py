"""Copies of prepared folders, for hosts that lack them.

Rank 0 lists the files of the folders that its prepared task names. A host that has no folder with these files asks for
them, and each file comes as vectors of bytes through the pair of the two. A copy lies in the host's cache folder under
the hash of its listing. It gets this name when it is complete, and the next run finds it."""

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
"""The format of a copy in the cache folder."""
_PIECE_BYTES = 1 << 26
"""So many bytes of a file are in memory at a time."""


class ListedFile(Struct, array_like=True, forbid_unknown_fields=True):
    """A file of a folder."""

    name: str
    """The path of the file within the folder, with slashes."""
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
    """List the files of these names in a folder; None: all its files, also those of folders in it."""
    folder = Path(path)
    if names is None:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        names = sorted(path.relative_to(folder).as_posix() for path in paths)
    files = []
    for name in names:
        file = folder / name
        files.append(ListedFile(name, file.stat().st_size, _sha256_of(file)))
    return ListedFolder(path, tuple(files))


def found_here(folder: ListedFolder, cache: Path) -> str | None:
    """Find a folder of rank 0 on this host, and return its path; None: this host does not have it. The path may be that
    on rank 0, since the two may see one file system, or that of a copy in the cache folder.

    Raises:
        RunError: if the copy was changed.
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
    """Send `num_bytes` bytes of a file from byte `first` on.

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
    """The sizes of the pieces in which so many bytes are sent."""
    for first in range(0, num_bytes, _PIECE_BYTES):
        yield min(_PIECE_BYTES, num_bytes - first)


def receive(folder: ListedFolder, cache: Path, receive_vector: Callable[[Tensor], None]) -> str:
    """Receive the files of a folder into a copy in the cache folder, and return the path of the copy.

    Raises:
        RunError: if a file is not what the listing says.
        UsageError: if the cache folder cannot be written.
    """
    copy = _copy_of(folder, cache)
    fill(copy, lambda partial: _receive_files(folder, partial, receive_vector))
    return str(copy)


def _copy_of(folder: ListedFolder, cache: Path) -> Path:
    files = [[file.name, file.num_bytes, file.sha256] for file in folder.files]
    return folder_in_cache(cache.absolute(), "copy", [FORMAT, files])


def _receive_files(folder: ListedFolder, partial: Path, receive_vector: Callable[[Tensor], None]) -> None:
    """Receive the files of a folder into the folder `partial`, which `fill` gives its name when it is complete."""
    for file in folder.files:
        _check_name(file.name)
        path = partial / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as written:
            for piece in received_part(file.num_bytes, receive_vector):
                written.write(piece)
        if _sha256_of(path) != file.sha256:
            raise RunError(f"{file.name} of {folder.path} was changed on its way from rank 0; start the run again")


def _has_files(folder: Path, files: Sequence[ListedFile]) -> bool:
    """Whether these files are in a folder as they are listed."""
    for file in files:
        path = folder / file.name
        if not path.is_file() or path.stat().st_size != file.num_bytes or _sha256_of(path) != file.sha256:
            return False
    return folder.is_dir()  # a listing without files is found only if its folder is there


def _check_name(name: str) -> None:
    """Refuse a name that leads out of the folder."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RunError(f"rank 0 has a file called {name!r}, which no folder can have")


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
