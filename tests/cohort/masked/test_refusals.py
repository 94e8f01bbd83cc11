"""What parties and aggregator refuse: replayed, stale, foreign and malformed messages, and asking for too much."""

from dataclasses import replace

import numpy as np
import pytest

from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.messages import (
    Agreement,
    Agreements,
    Members,
    Parcel,
    ProtocolRefused,
    Roster,
    Survivors,
)
from dpray.platform.cohort.masked.parameters import parameters
from dpray.platform.cohort.masked.party import Party

from .conftest import Sum, identities, parties, session, vectors

OTHERS = [
    {"population": "others"},
    {"run": "another run"},
    {"label": "search"},
    {"mechanism": "top-k votes"},
    {"step": 1},
    {"epoch": 2},
    {"request": "b" * 64},
    {"nonce": "1" * 32},
    {"quorum": 5},
    {"colluders": 2},
    {"dimension": 6},
    {"bits": 32},
]


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_a_session_is_bound_to_everything_that_makes_it(change):
    """Another run's, lease's or try's message, in every phase, is refused by the aggregator."""
    mine, theirs = session(), session(**change)
    assert mine.digest != theirs.digest
    there = Sum(theirs, vectors(theirs))
    there.total()
    for place, phase in enumerate(("advertise", "share", "mask", "unmask")):
        here = Sum(mine, vectors(mine))
        if phase != "advertise":
            here.upto(phase)
        for message in there.record[6 * place : 6 * place + 6]:
            with pytest.raises(ProtocolRefused, match="another session"):
                here.server.receive(message)


@pytest.mark.parametrize("change", OTHERS, ids=lambda change: next(iter(change)))
def test_a_party_refuses_what_another_session_says(change):
    of, other = session(), session(**change)
    for phase in ("share", "mask", "unmask"):
        mine, theirs = Sum(of, vectors(of)), Sum(other, vectors(other))
        told, foreign = mine.upto(phase), theirs.upto(phase)
        party = mine.parties[0]
        with pytest.raises(ProtocolRefused, match="another session"):
            answer(party, phase, foreign if phase == "unmask" else foreign[0], mine.messages[0])
        answer(party, phase, told if phase == "unmask" else told[0], mine.messages[0])


def answer(party, phase, told, message):
    if phase == "mask":
        return party.mask(told, message)
    return getattr(party, phase)(told)


def test_keys_and_shares_of_another_session_are_refused_under_a_forged_digest():
    """Relabelled as this session's, they still do not decrypt: keys are derived from the session."""
    of = session()
    mine, theirs = Sum(of, vectors(of)), Sum(replace(of, nonce="1" * 32), vectors(of))
    parcel, foreign = mine.upto("mask")[0], theirs.upto("mask")[0]
    with pytest.raises(ProtocolRefused, match="not sealed by it for this party and session"):
        mine.parties[0].mask(Parcel(of.digest, foreign.sealed), mine.messages[0])
    (one, first), (two, second), *rest = parcel.sealed
    with pytest.raises(ProtocolRefused, match="not sealed by it"):
        mine.parties[0].mask(Parcel(of.digest, ((one, second), (two, first), *rest)), mine.messages[0])
    mine.parties[0].mask(parcel, mine.messages[0])


@pytest.mark.parametrize("phase", ["share", "mask", "unmask"])
def test_a_party_answers_each_phase_once(phase):
    """Replayed, the same request is refused; so is an earlier one, and a later one before its time."""
    of = session()
    masked = Sum(of, vectors(of))
    told = masked.upto(phase)
    told = told if phase == "unmask" else told[0]
    party = masked.parties[0]
    with pytest.raises(ProtocolRefused, match="each once"):
        party.advertise()
    answer(party, phase, told, masked.messages[0])
    with pytest.raises(ProtocolRefused, match="each once"):
        answer(party, phase, told, masked.messages[0])


def test_the_aggregator_takes_one_message_of_each_party_and_phase():
    of = session()
    masked = Sum(of, vectors(of))
    masked.upto("mask")
    for message in masked.record:
        with pytest.raises(ProtocolRefused, match=r"does not belong|which sent one"):
            masked.server.receive(message)
    with pytest.raises(ProtocolRefused, match="cannot be closed"):
        masked.server.rosters()


def test_both_kinds_of_share_about_one_neighbour_are_never_given():
    """Over all parties' answers: for every owner each holder gave one share, of one kind."""
    of = session(6, 4)
    masked = Sum(of, vectors(of), {"mask": {5}, "unmask": {4}})
    masked.total()
    kinds = {}
    for message in masked.record:
        if type(message).__name__ == "Unmasking":
            seeds, keys = {owner for owner, *_ in message.seeds}, {owner for owner, *_ in message.keys}
            assert not seeds & keys
            for owner in seeds | keys:
                kinds.setdefault(owner, set()).add(owner in keys)
    assert kinds == {owner: {owner == 5} for owner in range(6)}


def test_a_second_survivor_set_is_refused_and_tells_nothing():
    of = session(6, 4)
    masked = Sum(of, vectors(of))
    survivors = masked.upto("unmask")
    fewer = replace(survivors, members=Members.of(range(5), 6))
    masked.parties[0].unmask(survivors)
    for again in (fewer, survivors):
        with pytest.raises(ProtocolRefused, match="each once"):
            masked.parties[0].unmask(again)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (Members.of([1, 2, 3, 4, 5], 6), "with this one among them"),
        (Members.of([0, 1, 2], 6), "3 parties survive, and the quorum is 4"),
        (Members(b""), "no set"),
        (Members(b"\xff"), "no set"),
        (Members(b"\x3f\x00"), "no set"),
        (Members.of([0, 1, 2, 3, 5], 6), "no set"),
    ],
    ids=["without itself", "below the quorum", "empty", "too many", "too long", "with one that never took part"],
)
def test_a_survivor_set_that_exposes_is_refused(members, sentence):
    of = session(6, 4)
    masked = Sum(of, vectors(of), {"advertise": {5}})
    masked.upto("unmask")
    with pytest.raises(ProtocolRefused, match=sentence):
        masked.parties[0].unmask(Survivors(of.digest, members))
    with pytest.raises(ProtocolRefused, match=sentence):
        masked.parties[0].check(Survivors(of.digest, members))


def test_a_party_whose_neighbours_are_all_said_to_be_lost_does_not_open_its_message():
    """A server that chooses who is lost: the quorum of 950 is met, and few are left around the party."""
    of = session(1000, 950, 50, 3)
    found = parameters(1000, 950, 50)
    group = [Party(of, number) for number in range(found.degree + 1)]
    keys = [party.advertise() for party in group]
    everybody = Members.of(range(1000), 1000)
    sealed = {
        party.number: dict(
            party.share(Roster(of.digest, everybody, tuple(k for k in keys if k.sender != party.number))).sealed
        )
        for party in group
    }
    parcel = Parcel(of.digest, tuple((number, sealed[number][0]) for number in range(1, len(group))))
    group[0].mask(parcel, np.zeros(3, dtype=np.int64))
    left = set(range(1000)) - set(range(1, found.degree - found.threshold + 3))
    with pytest.raises(ProtocolRefused, match="might stand alone"):
        group[0].unmask(Survivors(of.digest, Members.of(left, 1000)))
    group[0].unmask(Survivors(of.digest, Members.of(left | {1}, 1000)))


def test_a_neighbour_that_never_shared_cannot_be_said_to_survive():
    of = session(6, 4)
    masked = Sum(of, vectors(of), {"share": {5}})
    survivors = masked.upto("unmask")
    with pytest.raises(ProtocolRefused, match="no shares were passed on"):
        masked.parties[0].unmask(replace(survivors, members=Members.of(range(6), 6)))


def roster(of=None):
    masked = Sum(of or session(6, 4), vectors(of or session(6, 4)))
    return masked, masked.upto("share")[0]


def with_keys(rosters, **changes):
    first, *rest = rosters.neighbours
    return replace(rosters, neighbours=(replace(first, **changes), *rest))


def test_rosters_that_are_not_as_they_must_be_are_refused():
    masked, good = roster()
    _, foreign = roster(session(6, 4, run="another run"))
    own = masked.record[0]
    bad = {
        "no set": replace(good, members=Members.of(range(1, 6), 6)),
        "quorum": replace(good, members=Members.of([0, 1, 2], 6)),
        "5 neighbours each": replace(good, neighbours=good.neighbours[1:]),
        "all different": replace(good, neighbours=(good.neighbours[0], *good.neighbours[:4])),
        "neighbours each, all": replace(good, neighbours=(own, *good.neighbours[1:])),
    }
    keys = [
        with_keys(good, mask_key=b"short"),
        with_keys(good, mask_key=bytes(32)),
        with_keys(good, seal_key=bytes(32)),
        with_keys(good, mask_key=own.mask_key),
        with_keys(good, seal_key=good.neighbours[0].mask_key),
        with_keys(good, session=foreign.session),
    ]
    for sentence, wrong in [*bad.items(), *(("malformed, foreign, repeated", each) for each in keys)]:
        with pytest.raises(ProtocolRefused, match=sentence):
            masked.parties[0].share(wrong)
    masked.parties[0].share(good)


def test_parcels_that_are_not_as_they_must_be_are_refused():
    of = session(6, 4)
    masked = Sum(of, vectors(of))
    good = masked.upto("mask")[0]
    sealed, x = good.sealed, masked.messages[0]
    changed = (sealed[0][0], bytes([sealed[0][1][0] ^ 1]) + sealed[0][1][1:])
    for wrong, sentence in [
        ((changed, *sealed[1:]), "not sealed by it"),
        (((sealed[0][0], b""), *sealed[1:]), "not sealed by it"),
        ((sealed[0], *sealed), "once from each neighbour"),
        (((0, sealed[0][1]), *sealed[1:]), "once from each neighbour"),
        (sealed[:2], "3 parties hold shares"),
    ]:
        with pytest.raises(ProtocolRefused, match=sentence):
            masked.parties[0].mask(Parcel(of.digest, tuple(wrong)), x)
    bare = primitives.seal(masked.parties[1]._sealing[0], of.digest, 1, 0, bytes(34))
    with pytest.raises(ProtocolRefused, match="party 1 has no index"):
        masked.parties[0].mask(Parcel(of.digest, ((1, bare), *sealed[1:])), x)
    for message in (np.zeros(4, dtype=np.int64), np.zeros(5)):
        with pytest.raises(ProtocolRefused, match="vectors of 5 integers"):
            masked.parties[0].mask(good, message)
    masked.parties[0].mask(good, x)


@pytest.mark.parametrize(
    ("phase", "changes"),
    [
        ("advertise", {"mask_key": b"x"}),
        ("advertise", {"sender": 6}),
        ("advertise", {"sender": -1}),
        ("share", {"commitment": b""}),
        ("share", {"sealed": ()}),
        ("share", {"sender": 9}),
        ("mask", {"data": b"123"}),
        ("unmask", {"seeds": ()}),
        ("unmask", {"keys": ((1, 1, bytes(16)),)}),
        ("unmask", {"seeds": tuple((owner, 1, b"short") for owner in range(6))}),
    ],
)
def test_malformed_messages_are_refused_and_change_nothing(phase, changes):
    of = session()
    good = Sum(of, vectors(of))
    told = good.upto(phase) if phase != "advertise" else None
    party = good.parties[0]
    if phase == "advertise":
        message = party.advertise()
    else:
        message = answer(party, phase, told if phase == "unmask" else told[0], good.messages[0])
    with pytest.raises(ProtocolRefused, match=r"malformed|not awaited"):
        good.server.receive(replace(message, **changes))
    good.server.receive(message)


def test_a_false_share_is_found_instead_of_a_wrong_sum():
    of = session()
    for kind, lost in (("seeds", {}), ("keys", {"mask": {5}})):
        masked = Sum(replace(of, quorum=5), vectors(of), {**lost, "unmask": {0}})
        masked.upto("total")
        other = masked.parties[0]
        message = other.unmask(masked.survivors)
        false = tuple((owner, index, bytes(16)) for owner, index, _ in getattr(message, kind))
        masked.server.receive(replace(message, **{kind: false}))
        masked.server._answers = dict(sorted(masked.server._answers.items()))  # the false shares are used
        with pytest.raises(ProtocolRefused, match="do not give the"):
            masked.server.total()


def test_secrets_do_not_travel():
    import pickle

    with pytest.raises(TypeError, match="stay in its process"):
        pickle.dumps(Party(session(), 0))


@pytest.mark.parametrize("number", [-1, 6])
def test_a_party_is_one_of_the_session(number):
    with pytest.raises(ProtocolRefused, match="no party"):
        Party(session(), number)


# against an active server

ACTIVE = session(6, 5, active=True)


def test_without_identities_an_active_session_is_refused():
    with pytest.raises(ProtocolRefused, match="identity"):
        Party(ACTIVE, 0)


def test_keys_that_their_owner_did_not_sign_are_refused():
    """A server that puts keys of its own in a client's place; the same swap goes unseen without the option."""
    masked = Sum(ACTIVE, vectors(ACTIVE))
    told = masked.upto("share")[0]
    own = primitives.public(primitives.mask_key(bytes(16), ACTIVE.digest))
    with pytest.raises(ProtocolRefused, match="not signed by it"):
        masked.parties[0].share(with_keys(told, mask_key=own))
    masked.parties[0].share(told)
    plain, told = roster(session(6, 5))
    plain.parties[0].share(with_keys(told, mask_key=own))


def test_two_survivor_sets_cannot_both_be_agreed_on():
    """The server shows half of the parties another set: neither half has the t signatures that a share asks for."""
    masked = Sum(ACTIVE, vectors(ACTIVE))
    survivors = masked.upto("agree")
    other = replace(survivors, members=Members.of(range(5), 6))
    shown = {number: survivors if number in (3, 4, 5) else other for number in range(6)}
    signed = {number: masked.parties[number].agree(shown[number]) for number in range(6)}
    together = Agreements(ACTIVE.digest, tuple(signed.values()))
    for number, party in enumerate(masked.parties):
        with pytest.raises(ProtocolRefused, match="3 parties have signed this survivor set, and 4 are needed"):
            party.unmask(shown[number], together)


def test_a_party_gives_shares_for_the_set_it_signed_only():
    masked = Sum(ACTIVE, vectors(ACTIVE))
    agreements = masked.upto("unmask")
    other = replace(masked.survivors, members=Members.of(range(5), 6))
    party = masked.parties[0]
    with pytest.raises(ProtocolRefused, match="agreed to another"):
        party.unmask(other, agreements)
    with pytest.raises(ProtocolRefused, match="no agreement"):
        party.unmask(masked.survivors)
    forged = Agreements(ACTIVE.digest, tuple(Agreement(ACTIVE.digest, i, bytes(64)) for i in range(6)))
    with pytest.raises(ProtocolRefused, match="1 parties have signed"):
        party.unmask(masked.survivors, forged)
    repeated = Agreements(ACTIVE.digest, (agreements.signed[1],) * 6)
    with pytest.raises(ProtocolRefused, match="2 parties have signed"):
        party.unmask(masked.survivors, repeated)
    party.unmask(masked.survivors, agreements)


def test_identities_are_told_apart():
    private, public = identities(6)
    assert primitives.signed(public[0], b"s", "p", b"c", primitives.sign(private[0], b"s", "p", b"c"))
    assert not primitives.signed(public[1], b"s", "p", b"c", primitives.sign(private[0], b"s", "p", b"c"))
    assert not primitives.signed(b"", b"s", "p", b"c", bytes(64))
    assert len({party.number for party in parties(ACTIVE)}) == 6


def test_an_aggregator_that_is_done_takes_nothing_more():
    of = session()
    masked = Sum(of, vectors(of))
    masked.total()
    with pytest.raises(ProtocolRefused, match="over"):
        masked.server.receive(masked.record[-1])
    with pytest.raises(ProtocolRefused, match="cannot be closed"):
        Aggregator(of).total()
