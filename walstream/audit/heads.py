"""Heads: who holds the key says that the chain has this record, at this number. Pure but for reading a file of them.

    {"head":{"chain":"C","n":N,"hash":"H","offset":O,"at":"…","key":"K"},"signature":"S"}

``S`` is the Ed25519 signature over the bytes of the head as they stand there, in hexadecimal, or ``null``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson

from .keys import Signer, Verifier

NAME: Final = "heads.jsonl"

# A head is flat and none of its texts holds a brace, so it ends at the first one. It may stand behind other words: what
# was printed on standard output is found again in whatever log it ended in.
_LINE: Final = re.compile(rb'\{"head":(\{[^{}]*\}),"signature":(?:"([0-9a-f]{128})"|null)\}')


@dataclass(frozen=True, slots=True)
class Head:
    """One head, parsed.

    Attributes:
        chain: hash of the chain's first record.
        n, hash: of the record that it vouches for, and with it for all before.
        offset: of the last event up to there; 0 if there was none.
        at: when it was made, in UTC.
        key: id of the key; ``None`` if it is not signed.
        body: the bytes that are signed.
        signature: ``None`` if it is not signed.
    """

    chain: str
    n: int
    hash: str
    offset: int
    at: str
    key: str | None
    body: bytes
    signature: bytes | None

    @property
    def line(self) -> bytes:
        """As it is written, with a line break."""
        signature = b"null" if self.signature is None else b'"%b"' % self.signature.hex().encode()
        return b'{"head":%b,"signature":%b}\n' % (self.body, signature)

    def fault(self, verifier: Verifier | None) -> str | None:
        """What is wrong with its signature; ``None`` if nothing is, or nobody knows the key."""
        if verifier is None:
            return None
        if self.signature is None:
            return "it is not signed"
        if not verifier.holds(self.signature, self.body):
            return f"its signature is not of the key {verifier.id}"
        return None


def make_head(chain: str, n: int, hash_: str, offset: int, signer: Signer | None) -> Head:
    """A head as of now."""
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    key = signer.verifier.id if signer else None
    body = orjson.dumps({"chain": chain, "n": n, "hash": hash_, "offset": offset, "at": at, "key": key})
    return Head(chain, n, hash_, offset, at, key, body, signer.sign(body) if signer else None)


def heads_in(text: bytes) -> Iterator[Head]:
    """Every head in ``text``, in its order; whatever else stands there is passed over."""
    for found in _LINE.finditer(text):
        body, signature = found.groups()
        try:
            value = orjson.loads(body)
            head = Head(
                str(value["chain"]),
                int(value["n"]),
                str(value["hash"]),
                int(value["offset"]),
                str(value["at"]),
                value["key"],
                body,
                bytes.fromhex(signature.decode()) if signature else None,
            )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
            continue
        yield head


def read_heads(path: Path) -> list[Head]:
    """The heads in a file, or in all files of a directory.

    Raises:
        OSError: it cannot be read.
    """
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]
    return [head for file in files for head in heads_in(file.read_bytes())]
