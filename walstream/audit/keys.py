"""Ed25519 keys: PEM files, or PEM in the environment. The private one signs heads, the public one verifies them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from walstream.errors import ConfigError

ENVIRONMENT: Final = "WALSTREAM_AUDIT_KEY"
"""Holds the private key, as PEM, where no file is named."""

_HINT: Final = "`walstream audit keygen FILE` makes one; so does `openssl genpkey -algorithm ed25519`"


@dataclass(frozen=True, slots=True)
class Verifier:
    """A public key."""

    key: Ed25519PublicKey

    @property
    def id(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 over the key's 32 bytes."""
        raw = self.key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        return sha256(raw).hexdigest()[:16]

    def holds(self, signature: bytes, message: bytes) -> bool:
        """Whether the owner of the key signed ``message``."""
        try:
            self.key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Signer:
    """A private key."""

    key: Ed25519PrivateKey

    @property
    def verifier(self) -> Verifier:
        """The public key that belongs to it."""
        return Verifier(self.key.public_key())

    def sign(self, message: bytes) -> bytes:
        return self.key.sign(message)


def load_signer(file: str | Path | None) -> Signer | None:
    """The private key in ``file``, or in the environment; ``None`` if neither is given.

    Raises:
        ConfigError: it cannot be read, or is no private Ed25519 key.
    """
    if file is not None:
        pem, where = _read(Path(file)), str(file)
    elif text := os.environ.get(ENVIRONMENT):
        pem, where = text.encode(), ENVIRONMENT
    else:
        return None
    key = _load(pem, where)
    if not isinstance(key, Signer):
        raise ConfigError(f"{where} holds a public key, and signing takes the private one", hint=_HINT)
    return key


def load_verifier(file: str | Path) -> Verifier:
    """The public key in ``file``; that of a private key also serves.

    Raises:
        ConfigError: it cannot be read, or is no Ed25519 key.
    """
    key = _load(_read(Path(file)), str(file))
    return key.verifier if isinstance(key, Signer) else key


def generate(file: Path) -> tuple[Path, str]:
    """Make a key pair: the private key in ``file`` (readable by its owner only), the public one beside it as ``.pub``.

    Returns:
        The file of the public key, and the key's id.

    Raises:
        ConfigError: one of the files is there already, or cannot be written.
    """
    key = Ed25519PrivateKey.generate()
    public = file.with_name(f"{file.name}.pub")
    private_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for path, pem, mode in ((file, private_pem, 0o600), (public, public_pem, 0o644)):
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be made: {error.strerror}", hint="a key is never overwritten; choose another name"
            ) from None
        with os.fdopen(descriptor, "wb") as out:
            out.write(pem)
    return public, Verifier(key.public_key()).id


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"the key {file} cannot be read: {error.strerror}", hint=_HINT) from None


def _load(pem: bytes, where: str) -> Signer | Verifier:
    private: object = None
    public: object = None
    try:
        if b"PRIVATE KEY" in pem:
            private = serialization.load_pem_private_key(pem, password=None)
        else:
            public = serialization.load_pem_public_key(pem)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(f"{where} holds no key in PEM (or one with a password)", hint=_HINT) from None
    if isinstance(private, Ed25519PrivateKey):
        return Signer(private)
    if isinstance(public, Ed25519PublicKey):
        return Verifier(public)
    raise ConfigError(f"{where} holds a key of another kind than Ed25519", hint=_HINT)
