"""The cryptography of the masked sum, all of it from `cryptography` and `pycryptodome`: this file only names uses.

| what            | primitive                        | bound to                                                  |
|-----------------|----------------------------------|-----------------------------------------------------------|
| key pairs       | X25519                           | one session; never used twice                             |
| agreed secrets  | HKDF-SHA256 of the X25519 secret | session digest (salt), purpose, both parties (info)       |
| masks           | ChaCha20 key stream from zero    | the derived key                                           |
| sealed shares   | ChaCha20-Poly1305                | one key a direction, used once; session as associated data |
| shares          | Shamir over GF(2¹²⁸), 16 bytes   |                                                           |
| signatures      | Ed25519, long-lived identity     | session, purpose, content                                 |

A mask's private key is derived from a 16-byte seed, so that Shamir shares of the seed are shares of the key.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from dpray.platform.cohort.masked.ring import Ring, kind

SECRET = 16
"""Bytes of a secret that is shared: 128 bits."""
KEY = 32
_ONE_USE = bytes(12)  # a nonce: every key seals one message
_FROM_ZERO = bytes(16)


def new_secret() -> bytes:
    """16 bytes of the operating system's randomness."""
    return os.urandom(SECRET)


def derive(secret: bytes, session: bytes, purpose: str, *parties: int) -> bytes:
    """32 bytes for one purpose between these parties in this session."""
    info = "/".join(["dpray masked sum", purpose, *map(str, parties)]).encode()
    return HKDF(SHA256(), KEY, salt=session, info=info).derive(secret)


def mask_key(seed: bytes, session: bytes) -> X25519PrivateKey:
    """The key for pairwise masks that a seed stands for."""
    return X25519PrivateKey.from_private_bytes(derive(seed, session, "mask key"))


def public(key: X25519PrivateKey) -> bytes:
    """Its public part."""
    return key.public_key().public_bytes_raw()


def agree(key: X25519PrivateKey, other: bytes) -> bytes:
    """The secret shared with the owner of a public key.

    Raises:
        ValueError: it is no public key, or one of small order.
    """
    return key.exchange(X25519PublicKey.from_public_bytes(other))


def pair_mask(agreed: bytes, session: bytes, one: int, other: int, dimension: int, bits: int) -> Ring:
    """What the party of the smaller number adds and the other one subtracts; (d,)."""
    return _stream(derive(agreed, session, "pair", min(one, other), max(one, other)), dimension, bits)


def self_mask(seed: bytes, session: bytes, party: int, dimension: int, bits: int) -> Ring:
    """What a party adds on its own; (d,)."""
    return _stream(derive(seed, session, "self", party), dimension, bits)


def _stream(key: bytes, dimension: int, bits: int) -> Ring:
    stream = Cipher(ChaCha20(key, _FROM_ZERO), mode=None).encryptor().update(bytes(dimension * bits // 8))
    return np.frombuffer(stream, dtype=kind(bits))


def seal(agreed: bytes, session: bytes, sender: int, recipient: int, content: bytes) -> bytes:
    """Encrypt and authenticate what one party tells another, once a session."""
    key = derive(agreed, session, "seal", sender, recipient)
    return ChaCha20Poly1305(key).encrypt(_ONE_USE, content, session)


def unseal(agreed: bytes, session: bytes, sender: int, recipient: int, sealed: bytes) -> bytes | None:
    """What was sealed; None if it was not sealed by that sender, for this recipient and session, or was changed."""
    key = derive(agreed, session, "seal", sender, recipient)
    try:
        return ChaCha20Poly1305(key).decrypt(_ONE_USE, sealed, session)
    except InvalidTag:
        return None


def split(secret: bytes, threshold: int, holders: int) -> list[tuple[int, bytes]]:
    """Shares (index from 1, 16 bytes) of a secret, `threshold` of which give it back and fewer say nothing of it."""
    return [(index, bytes(share)) for index, share in Shamir.split(threshold, holders, secret)]


def combine(shares: list[tuple[int, bytes]]) -> bytes:
    """The secret, from exactly its threshold of shares with different indices."""
    return bytes(Shamir.combine(shares))


def commitment(secret: bytes, session: bytes) -> bytes:
    """A digest by which a secret that was put together is known to be the right one."""
    return hashlib.sha256(session + b"commitment" + secret).digest()


def sign(identity: bytes, session: bytes, purpose: str, content: bytes) -> bytes:
    """Signature under an Ed25519 private key (32 bytes)."""
    return Ed25519PrivateKey.from_private_bytes(identity).sign(_signed(session, purpose, content))


def signed(identity: bytes, session: bytes, purpose: str, content: bytes, signature: bytes) -> bool:
    """Whether the owner of an Ed25519 public key has signed this."""
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, _signed(session, purpose, content))
    except (InvalidSignature, ValueError):
        return False
    return True


def new_identity() -> tuple[bytes, bytes]:
    """A long-lived (private, public) Ed25519 pair: the public part is told to everybody by another way."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def _signed(session: bytes, purpose: str, content: bytes) -> bytes:
    return b"dpray masked sum\0" + session + purpose.encode() + b"\0" + content
