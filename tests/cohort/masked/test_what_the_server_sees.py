"""Everything the server receives: masked vectors are uniform, and nothing else depends on a client's message.

| symbol | meaning                                                                              |
|--------|--------------------------------------------------------------------------------------|
| χ²     | Σ over 256 byte values of (observed − expected)²/expected; 255 degrees of freedom      |
"""

import numpy as np
import pytest
from scipy.stats import chi2, ks_1samp, uniform

from dpray.platform.cohort.masked import party as party_module
from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.messages import Advertisement, MaskedInput, Unmasking

from .conftest import Sum, session, vectors

FALSE_ALARM = 1e-6
"""Of each test below, if masks are uniform: the chance that it fails."""
BITS = [32, 64]


def unlike_bytes(vectors):
    """Whether the bytes of masked vectors are not uniform, by χ²; false alarm 10⁻⁶."""
    counts = np.bincount(np.frombuffer(b"".join(vectors), dtype=np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() > chi2.isf(FALSE_ALARM, 255))


def unlike_words(vectors, bits):
    """Whether their elements are not uniform over the ring, by Kolmogorov-Smirnov; false alarm 10⁻⁶."""
    words = np.frombuffer(b"".join(vectors), dtype=f"<u{bits // 8}").astype(np.float64) / 2.0**bits
    return bool(ks_1samp(words, uniform.cdf).pvalue < FALSE_ALARM)


def recorded(messages, bits=64, lost=None, made_by=None, nonce="0" * 32):
    """The record of one session over these messages."""
    of = session(len(messages), 4, dimension=messages.shape[1], bits=bits, nonce=nonce)
    masked = Sum(of, messages, lost or {}, **({} if made_by is None else {"made_by": made_by}))
    total = masked.total()
    return masked.record, total


def inputs(record):
    return [message.data for message in record if isinstance(message, MaskedInput)]


@pytest.mark.parametrize("bits", BITS)
def test_masked_vectors_are_uniform_even_of_zeros(bits):
    """6 clients, 4 000 coordinates, all zero: false alarm 2·10⁻⁶."""
    record, total = recorded(np.zeros((6, 4000), dtype=np.int64), bits)
    assert not unlike_bytes(inputs(record))
    assert not unlike_words(inputs(record), bits)
    np.testing.assert_array_equal(total, 0)


@pytest.mark.parametrize("bits", BITS)
def test_differences_and_sums_of_two_clients_are_uniform_too(bits):
    """Pairs as the server could combine them, of votes: false alarm 30·10⁻⁶."""
    votes = np.random.default_rng(0).integers(0, 2, (6, 4000))
    record, _ = recorded(votes, bits)
    seen = [np.frombuffer(data, dtype=f"<u{bits // 8}") for data in inputs(record)]
    for index, one in enumerate(seen):
        for other in seen[:index]:
            assert not unlike_bytes([(one - other).tobytes()])
            assert not unlike_bytes([(one + other).tobytes()])


def test_one_client_over_many_sessions_is_uniform_with_the_same_message_each_time():
    """300 tries of one key: every try has fresh masks, and their differences are uniform. False alarm 2·10⁻⁶."""
    message = np.tile(np.arange(6)[:, None], (1, 20))
    seen = [np.frombuffer(inputs(recorded(message, nonce=f"{index:032x}")[0])[2], dtype="<u8") for index in range(300)]
    assert not unlike_bytes([each.tobytes() for each in seen])
    assert not unlike_bytes([(one - other).tobytes() for one, other in zip(seen[1:], seen, strict=False)])


@pytest.mark.parametrize("bits", BITS)
def test_a_lost_partys_masks_do_not_open_it(bits):
    """Its input arrives, it is counted lost: with its pairwise masks taken off the vector is uniform still.

    The aggregator is made to forget the input, as if it had come too late: the shares that it then gets are of the
    lost party's mask key. False alarm 10⁻⁶. Negative control: with the self mask taken off as well it is not uniform.
    """
    of = session(6, 4, dimension=4000, bits=bits)
    masked = Sum(of, np.zeros((6, 4000), dtype=np.int64))
    parcels = masked.upto("mask")
    sent = {n: masked.parties[n].mask(parcels[n], masked.messages[n]) for n in parcels}
    seed = masked.parties[5]._seed
    for number in range(5):
        masked.server.receive(sent[number])
    survivors = masked.server.survivors()
    for number in range(5):
        masked.server.receive(masked.parties[number].unmask(survivors))
    shares = masked.server._pooled(lambda message: message.keys)[5]
    np.testing.assert_array_equal(masked.server.total(), 0)
    late = np.frombuffer(sent[5].data, dtype=f"<u{bits // 8}")
    late = late - masked.server._dangling(5, range(5), shares, masked.server.threshold)
    assert not unlike_bytes([late.tobytes()])
    assert unlike_bytes([(late - primitives.self_mask(seed, of.digest, 5, 4000, bits)).tobytes()])


def test_a_vector_without_masks_is_not_uniform():
    """Negative control: the statistical tests see a client that does not mask."""

    class Bare(party_module.Party):
        def mask(self, parcel, steps):
            message = super().mask(parcel, steps)
            return MaskedInput(message.session, self.number, steps.astype("<u8").tobytes())

    record, _ = recorded(vectors(session(6, 4, dimension=4000)), made_by=Bare)
    assert unlike_bytes(inputs(record))
    assert unlike_words(inputs(record), 64)


def test_masks_that_are_used_twice_are_seen(monkeypatch):
    """Negative control: a mask that does not depend on the session makes differences of tries lose their uniformity."""
    stream = primitives._stream
    monkeypatch.setattr(primitives, "_stream", lambda key, dimension, bits: stream(bytes(32), dimension, bits))
    first, second = (inputs(recorded(np.full((6, 4000), number))[0])[2] for number in (3, 4))
    difference = np.frombuffer(second, dtype="<u8") - np.frombuffer(first, dtype="<u8")
    assert unlike_bytes([difference.tobytes()])


def test_nothing_but_masked_inputs_is_made_from_a_message(monkeypatch):
    """With the same secrets and keys, other messages change the masked inputs, and no other byte that is sent.

    Negative control: of the masked inputs every one changes.
    """
    records = []
    for seed in (1, 2):
        rng = np.random.default_rng(0)
        monkeypatch.setattr(primitives, "new_secret", lambda rng=rng: rng.bytes(16))
        monkeypatch.setattr(primitives, "split", _plain_split)
        monkeypatch.setattr(party_module, "X25519PrivateKey", _Keys(rng))
        records.append(recorded(vectors(session(6), seed), lost={"share": {5}, "unmask": {0}})[0])
    first, second = records
    assert len(first) == len(second) == 6 + 5 + 5 + 4
    assert {type(message) for message in first} >= {Advertisement, MaskedInput, Unmasking}
    for one, other in zip(first, second, strict=True):
        assert (one != other) is isinstance(one, MaskedInput)


def _plain_split(secret, threshold, holders):
    from Crypto.Protocol.SecretSharing import Shamir

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("Crypto.Protocol.SecretSharing.rng", lambda size: bytes(range(size)))
        return [(index, bytes(share)) for index, share in Shamir.split(threshold, holders, secret)]


class _Keys:
    """X25519 keys from a seeded generator."""

    def __init__(self, rng):
        self.rng = rng

    def generate(self):
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        return X25519PrivateKey.from_private_bytes(self.rng.bytes(32))


def test_the_shares_that_are_revealed_are_uniform():
    """What the unmasking tells besides the sum: shares of random seeds. 40 sessions, false alarm 10⁻⁶."""
    shares = [
        share
        for index in range(40)
        for message in recorded(np.full((6, 3), 7), lost={"mask": {1}}, nonce=f"{index:032x}")[0]
        if isinstance(message, Unmasking)
        for _, _, share in message.seeds + message.keys
    ]
    assert not unlike_bytes(shares)
