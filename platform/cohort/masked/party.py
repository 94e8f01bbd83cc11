"""A client's side of the masked sum (SecAgg+: Bonawitz et al. 2017; Bell et al. 2020).

| symbol | code          | meaning                                                                         | shape |
|--------|---------------|---------------------------------------------------------------------------------|-------|
| x_u    | `steps`       | noised message of party u, integers on the grid                                 | (d,)  |
| N(u)   | `neighbours`  | parties that u shares masks and secrets with; k of them                         |       |
| b_u    | `_seed`       | seed of u's self mask, 16 bytes                                                 |       |
| a_u    | `_key_seed`   | seed of u's key for pairwise masks, 16 bytes                                    |       |
| s_uv   | `_pairs`      | secret agreed by u and v: X25519 of a_u's key and v's public one                |       |
| y_u    | `MaskedInput` | x_u + PRG(b_u) + Σ_{v∈N(u), v>u} PRG(s_uv) − Σ_{v∈N(u), v<u} PRG(s_uv) mod 2^m  | (d,)  |
| t      | `threshold`   | shares that open a secret; its k + 1 holders are N(u) and u                     |       |

**Model.** The server follows the protocol and may keep, and pool with up to c colluding clients, all that it is sent.
Clients follow it, too: a false message makes the sum wrong, not open. Who is lost does not depend on data or graph.

*Guarantee.* Beyond the sum over the announced survivors, at least the quorum, server and colluders learn nothing of an
honest client's message, by the security of X25519, HKDF, ChaCha20 and ChaCha20-Poly1305 and but for a probability of
`Parameters.exposed` (≤ 2⁻⁴⁰) over the random graph. A lost party's late input stays closed: its pairwise masks may be
opened, and then its self mask is not. Every honest party gives, once, one of the two kinds of share about each owner,
so both could be put together only with 2t ≤ k + 1 + (colluding holders). Not protected: who takes part and when.

**Against an active server** (`Session.active`): keys are signed under identities that parties know by another way, so
that the server cannot take a client's place; everybody is everybody's neighbour; and before it gives a share, a party
wants t signatures under the very set it was shown, its own among them. As 2t > n + c, no two different sets get them.
Without the option a server that deviates can show different survivors to different clients, or be a client itself.

**Keys** are drawn for each session and bound to its digest: population, run, release key, lease epoch, request, and a
nonce of the try. A message of another session, run, lease or try is refused for its digest, and fails to decrypt.

Phases: advertise → share → mask → (agree) → unmask, each once. What is refused (`ProtocolRefused`) changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.messages import (
    Advertisement,
    Agreement,
    Agreements,
    MaskedInput,
    Members,
    Parcel,
    ProtocolRefused,
    Roster,
    Session,
    Shares,
    Survivors,
    Unmasking,
)
from dpray.platform.cohort.masked.parameters import Parameters, parameters
from dpray.platform.cohort.masked.ring import IntArray, encode, kind

_INDEX = 2
"""Bytes of a share's index."""


class Party:
    """One client in one session.

    Args:
        session: what the client itself takes the session to be.
        number: which of its parties the client is.
        identity: its long-lived Ed25519 private key, and
        identities: everybody's public ones, by number; both if, and only if, the session is `active`.

    Raises:
        ProtocolRefused: no such party, or identities missing.
    """

    def __init__(
        self,
        session: Session,
        number: int,
        identity: bytes | None = None,
        identities: Mapping[int, bytes] | None = None,
    ) -> None:
        if not 0 <= number < session.clients:
            raise ProtocolRefused(f"A session of {session.clients} parties has no party {number}.")
        if session.active and (identity is None or identities is None):
            raise ProtocolRefused("Against an active server a party needs its identity and everybody's public ones.")
        self.session, self.number = session, number
        self._identity, self._identities = identity or b"", dict(identities or {})
        self._phase = "advertise"
        self._seed, self._key_seed = primitives.new_secret(), primitives.new_secret()
        self._seal_key = X25519PrivateKey.generate()
        self._mask_key = primitives.mask_key(self._key_seed, session.digest)
        self._parameters: Parameters | None = None
        self._members = Members(b"")
        self._keys: dict[int, Advertisement] = {}
        self._sealing: dict[int, bytes] = {}
        self._pairs: dict[int, bytes] = {}
        self._held: dict[int, tuple[int, bytes, bytes]] = {}
        self._agreed: Members | None = None

    def advertise(self) -> Advertisement:
        """Two public keys, signed if the session asks for it."""
        self._at("advertise")
        keys = primitives.public(self._seal_key), primitives.public(self._mask_key)
        bare = Advertisement(self.session.digest, self.number, *keys)
        self._phase = "share"
        if not self.session.active:
            return bare
        return Advertisement(*keys_of(bare), self._sign("keys", bare.content))

    def share(self, roster: Roster) -> Shares:
        """Split both secrets among the neighbours and oneself; sealed for each of them.

        Raises:
            ProtocolRefused: too few take part; not the neighbours that the parameters ask for; keys that are malformed,
                repeated, foreign or not signed.
        """
        self._at("share")
        self._here(roster)
        members, neighbours = roster.members, [each.sender for each in roster.neighbours]
        if not members.fits(self.session.clients) or self.number not in members:
            raise ProtocolRefused("The roster is no set of this session's parties with this one among them.")
        if len(members) < self.session.quorum:
            raise ProtocolRefused(f"{len(members)} parties take part, and the quorum is {self.session.quorum}.")
        found = session_parameters(self.session, len(members))
        if len(set(neighbours)) != found.degree or len(neighbours) != found.degree or self.number in neighbours:
            raise ProtocolRefused(f"{len(members)} parties have {found.degree} neighbours each, all different.")
        agreed = {each.sender: self._agreed_with(each, members) for each in roster.neighbours}
        sealing = {other: secret for other, (secret, _) in agreed.items()}
        holders = sorted([*neighbours, self.number])
        seeds = primitives.split(self._seed, found.threshold, len(holders))
        keys = primitives.split(self._key_seed, found.threshold, len(holders))
        sealed = []
        for holder, (index, seed), (_, key) in zip(holders, seeds, keys, strict=True):
            if holder == self.number:
                self._held[holder] = index, seed, key
                continue
            content = index.to_bytes(_INDEX, "little") + seed + key
            digest = self.session.digest
            sealed.append((holder, primitives.seal(sealing[holder], digest, self.number, holder, content)))
        self._parameters, self._members, self._sealing = found, members, sealing
        self._pairs = {other: secret for other, (_, secret) in agreed.items()}
        self._keys = {each.sender: each for each in roster.neighbours}
        self._phase = "mask"
        committed = primitives.commitment(self._seed, self.session.digest)
        return Shares(self.session.digest, self.number, committed, tuple(sealed))

    def mask(self, parcel: Parcel, steps: IntArray) -> MaskedInput:
        """y_u: the message under its self mask and the pairwise masks with all neighbours that have shared.

        Args:
            parcel: their sealed shares.
            steps: x_u, (d,) int64.

        Raises:
            ProtocolRefused: not d integers; shares from others than neighbours, from one twice, not sealed by them for
                this party and session; or fewer holders than the threshold.
        """
        self._at("mask")
        self._here(parcel)
        session, digest = self.session, self.session.digest
        if steps.shape != (session.dimension,) or steps.dtype.kind != "i":
            raise ProtocolRefused(f"This session adds vectors of {session.dimension} integers.")
        senders = [sender for sender, _ in parcel.sealed]
        if len(set(senders)) != len(senders) or not set(senders) <= self._keys.keys():
            raise ProtocolRefused("Shares are expected once from each neighbour, and from nobody else.")
        if len(senders) + 1 < self._given.threshold:
            raise ProtocolRefused(
                f"{len(senders) + 1} parties hold shares of this one's secrets, and {self._given.threshold} are needed "
                "to open them: its message could not be opened together with others."
            )
        opened = {sender: self._opened(sender, sealed) for sender, sealed in parcel.sealed}
        masked = encode(steps, session.bits)
        masked = masked + primitives.self_mask(self._seed, digest, self.number, session.dimension, session.bits)
        for other in senders:
            mask = primitives.pair_mask(self._pairs[other], digest, self.number, other, session.dimension, session.bits)
            masked = masked + mask if self.number < other else masked - mask
        self._held |= opened
        self._phase = "agree" if session.active else "unmask"
        return MaskedInput(digest, self.number, masked.astype(kind(session.bits)).tobytes())

    def agree(self, survivors: Survivors) -> Agreement:
        """A signature under the survivor set: one set only.

        Raises:
            ProtocolRefused: as `unmask`.
        """
        self._at("agree")
        self._checked(survivors)
        self._agreed, self._phase = survivors.members, "unmask"
        signature = self._sign("survivors", survivors.members.bits)
        return Agreement(self.session.digest, self.number, signature)

    def unmask(self, survivors: Survivors, agreements: Agreements | None = None) -> Unmasking:
        """The point of no return: of each neighbour that has shared, and of oneself, one share.

        The self-mask seed's share of a survivor, the mask-key seed's of a lost party; never both, and once a session.
        Whoever calls this has written down message and participant set before (see `journal`).

        Raises:
            ProtocolRefused: asked before; this party is no survivor, or survivors are fewer than the quorum, no part
                of the roster, or too few around this party; without t signatures under the set in an active session.
        """
        self._at("unmask")
        self._checked(survivors)
        if self.session.active:
            self._confirmed(survivors, agreements)
        alive = survivors.members
        seeds = tuple((owner, index, seed) for owner, (index, seed, _) in self._held.items() if owner in alive)
        keys = tuple((owner, index, key) for owner, (index, _, key) in self._held.items() if owner not in alive)
        self._phase = "over"
        self._seed, self._key_seed, self._held, self._sealing, self._pairs = b"", b"", {}, {}, {}
        return Unmasking(self.session.digest, self.number, seeds, keys)

    def check(self, survivors: Survivors) -> None:
        """Refuse, as `unmask` would, before anything is written down for it."""
        self._at("unmask")
        self._checked(survivors)

    @property
    def _given(self) -> Parameters:
        if self._parameters is None:  # pragma: no cover - phases come in order
            raise ProtocolRefused("This party has no neighbours yet.")
        return self._parameters

    def _at(self, phase: str) -> None:
        if self._phase != phase:
            raise ProtocolRefused(f"This party is asked to {phase}, and its next step is {self._phase!r}: each once.")

    def _here(self, message: Roster | Parcel | Survivors | Agreements) -> None:
        if message.session != self.session.digest:
            raise ProtocolRefused(f"A {type(message).__name__} of another session, run, lease or try.")

    def _agreed_with(self, keys: Advertisement, members: Members) -> tuple[bytes, bytes]:
        """The secrets for sealing and for masks, with a neighbour whose keys are as they must be."""
        other = keys.sender
        own = primitives.public(self._seal_key), primitives.public(self._mask_key)
        refused = ProtocolRefused(f"The keys of party {other} are malformed, foreign, repeated or not signed by it.")
        if keys.session != self.session.digest or other not in members:
            raise refused
        if len({keys.seal_key, keys.mask_key, *own}) != 4:
            raise refused
        if self.session.active and not primitives.signed(
            self._identities.get(other, b""), keys.session, "keys", keys.content, keys.signature
        ):
            raise refused
        try:
            return primitives.agree(self._seal_key, keys.seal_key), primitives.agree(self._mask_key, keys.mask_key)
        except ValueError:
            raise refused from None

    def _opened(self, sender: int, sealed: bytes) -> tuple[int, bytes, bytes]:
        content = primitives.unseal(self._sealing[sender], self.session.digest, sender, self.number, sealed)
        if content is None or len(content) != _INDEX + 2 * primitives.SECRET:
            raise ProtocolRefused(f"The shares from party {sender} were not sealed by it for this party and session.")
        index, rest = int.from_bytes(content[:_INDEX], "little"), content[_INDEX:]
        if index < 1:
            raise ProtocolRefused(f"A share of party {sender} has no index.")
        return index, rest[: primitives.SECRET], rest[primitives.SECRET :]

    def _checked(self, survivors: Survivors) -> None:
        self._here(survivors)
        alive = survivors.members
        if not alive.fits(self.session.clients) or not alive <= self._members or self.number not in alive:
            raise ProtocolRefused("The survivors are no set of this session's parties with this one among them.")
        if len(alive) < self.session.quorum:
            raise ProtocolRefused(f"{len(alive)} parties survive, and the quorum is {self.session.quorum}.")
        around = {other for other in self._keys if other in alive}
        if not around <= self._held.keys():
            raise ProtocolRefused("A neighbour is said to survive from whom no shares were passed on.")
        if len(around) + 1 < self._given.threshold:
            raise ProtocolRefused(
                f"{len(around) + 1} parties around this one survive, and {self._given.threshold} are needed: opened "
                "now, its message might stand alone."
            )

    def _confirmed(self, survivors: Survivors, agreements: Agreements | None) -> None:
        if agreements is None or self._agreed != survivors.members:
            raise ProtocolRefused("This party has agreed to another survivor set, or was shown no agreement of others.")
        self._here(agreements)
        digest, content = self.session.digest, survivors.members.bits
        valid = {
            each.sender
            for each in agreements.signed
            if each.sender in survivors.members
            and each.session == digest
            and primitives.signed(self._identities.get(each.sender, b""), digest, "survivors", content, each.signature)
        } | {self.number}
        if len(valid) < self._given.threshold:
            raise ProtocolRefused(
                f"{len(valid)} parties have signed this survivor set, and {self._given.threshold} are needed."
            )

    def _sign(self, purpose: str, content: bytes) -> bytes:
        return primitives.sign(self._identity, self.session.digest, purpose, content)

    def __getstate__(self) -> Any:
        raise TypeError("A party's secrets stay in its process.")


def keys_of(advertisement: Advertisement) -> tuple[bytes, int, bytes, bytes]:
    """Everything of an advertisement but its signature."""
    return advertisement.session, advertisement.sender, advertisement.seal_key, advertisement.mask_key


def session_parameters(session: Session, taking_part: int) -> Parameters:
    """Degree and threshold among those who take part; the same for parties and aggregator."""
    return parameters(taking_part, session.quorum, session.colluders, session.degree, session.active)
