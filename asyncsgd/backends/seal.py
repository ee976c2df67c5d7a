"""Tags by which each end of a pair knows that the other end has the token, and that nothing was changed on its way.

Both ends have a token. Each sends 32 random bytes and the names of the algorithms that it has. Out of the token and
both greetings come two keys, one for each direction (HKDF with SHA-256, RFC 5869). So nothing of an earlier start, of
another pair or of the other direction is valid. A tag covers a counter, the length and the content: what was made,
changed, repeated, left out or put in another order has no valid tag. Nothing is encrypted.

There are two algorithms: HMAC with SHA-256 (RFC 2104), of the standard library, and AES-GCM with the content as
associated data (NIST SP 800-38D), which is faster and needs the package ``cryptography``."""

from __future__ import annotations

import hmac
import importlib.util
import struct
from collections.abc import Sequence
from typing import Any, Literal

Algorithm = Literal["aes-gcm", "hmac-sha256"]
TAG_BYTES = 32
"""The length of a tag as it is sent. A shorter tag has zeros after it."""
_HEADER = struct.Struct("!QQ")
_NONCE = struct.Struct("!IQ")
_PROTOCOL = b"asyncsgd pair 2"


class Untrusted(Exception):
    """What came is not used: its tag is wrong, it is too long, or the other end cannot prove that it has the token."""


def available() -> tuple[Algorithm, ...]:
    """The algorithms of this process, the preferred one first."""
    if importlib.util.find_spec("cryptography") is None:
        return ("hmac-sha256",)
    return ("aes-gcm", "hmac-sha256")


def common(ours: Sequence[str], theirs: Sequence[str]) -> Algorithm:
    """The best algorithm that both ends have.

    >>> common(("aes-gcm", "hmac-sha256"), ("hmac-sha256",))
    'hmac-sha256'

    Raises:
        Untrusted: if there is none.
    """
    both = [name for name in available() if name in ours and name in theirs]
    if not both:
        raise Untrusted("it has no algorithm for tags that is known here")
    return both[0]


def derive_key(token: bytes, salt: bytes, info: bytes) -> bytes:
    """32 bytes of HKDF with SHA-256: ``HMAC(HMAC(salt, token), info | 1)``, RFC 5869 with one block."""
    extracted = hmac.digest(salt, token, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


class Seal:
    """Makes or checks the tags of one direction of a pair, in order.

    Messages and pieces of vectors are counted apart, since the two are received by different threads.

    >>> sending, receiving = (Seal("hmac-sha256", bytes(32)) for _ in range(2))
    >>> tag = sending.tag(0, b"first")
    >>> receiving.check(0, b"first", tag)
    >>> receiving.check(0, b"first", tag)
    Traceback (most recent call last):
    asyncsgd.backends.seal.Untrusted: what came has a wrong tag
    """

    def __init__(self, algorithm: Algorithm, key: bytes) -> None:
        self._algorithm = algorithm
        self._key = key
        self._counts = [0, 0]

    def tag(self, kind: int, content: Any) -> bytes:
        """The tag of the next content of this kind, 32 bytes.

        Args:
            kind: 0 for messages, 1 for vectors.
            content: bytes, or a buffer of them.
        """
        count = self._counts[kind]
        self._counts[kind] += 1
        header = _HEADER.pack(kind, len(content))
        nonce = _NONCE.pack(kind, count)
        if self._algorithm == "hmac-sha256":
            code = hmac.new(self._key, nonce + header, "sha256")
            code.update(content)
            return code.digest()
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

        cipher = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        cipher.authenticate_additional_data(header)
        cipher.authenticate_additional_data(content)
        cipher.finalize()
        return cipher.tag.ljust(TAG_BYTES, b"\0")

    def check(self, kind: int, content: Any, tag: bytes) -> None:
        """Raise `Untrusted` unless `tag` is that of the next content of this kind."""
        check_equal(tag, self.tag(kind, content))


def check_equal(tags: bytes, expected: bytes) -> None:
    """Raise `Untrusted` unless the tags that came are those that were expected."""
    if not hmac.compare_digest(tags, expected):
        raise Untrusted("what came has a wrong tag")


def seals(token: bytes, name: str, greetings: tuple[bytes, bytes], algorithm: Algorithm) -> tuple[Seal, Seal]:
    """Return the seals of both directions of a pair: for what the server sends, and for what the worker sends.

    Args:
        token: the token that both ends have.
        name: the name of the pair.
        greetings: the greetings as they were sent, the server's first. They hold the random bytes of both ends, and the
            algorithms that they offered. So nobody on the way can remove the better algorithm from an offer, a
            downgrade.
    """
    salt = b"".join(hmac.digest(b"greeting", greeting, "sha256") for greeting in greetings)
    seals = []
    for direction in (b"server", b"worker"):
        info = b"|".join((_PROTOCOL, algorithm.encode(), name.encode(), direction))
        seals.append(Seal(algorithm, derive_key(token, salt, info)))
    return seals[0], seals[1]
