"""A host whose clients mask: each is a party of its own, with its own keys, masks and row in the journal.

| call    | before it                                      | the host answers                                          |
|---------|------------------------------------------------|-----------------------------------------------------------|
| prepare | journal: the clients take part                 | public keys; the noised messages are made, and held       |
| share   |                                                | sealed shares of each client's two secrets                |
| mask    | journal: the messages, synced                  | the masked messages                                       |
| unmask  | journal: the messages and the set, synced: the | shares that open the sum over that set                    |
|         | point of no return                             |                                                           |

A real site's host has one client. A pool's host does the same for each of its clients: what the server is sent is what
it would be sent by as many sites, and the host, which holds them all, sees what it holds.

Parties live in memory only. A host that was rebuilt in between says `again` and is lost to this try; the next try has
fresh masks, and for a committed set the message that the journal has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dpray.platform.cohort.client import IntArray
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.host import Host, HostSpec
from dpray.platform.cohort.journal import SiteJournal
from dpray.platform.cohort.masked.messages import (
    MaskedInput,
    Members,
    Parcel,
    Roster,
    Session,
    Shares,
    Survivors,
    Unmasking,
)
from dpray.platform.cohort.masked.party import Party
from dpray.platform.cohort.masked.ring import largest_sum, ring_bits
from dpray.platform.cohort.masked_journal import MaskedJournal
from dpray.platform.cohort.queries import Terms
from dpray.platform.cohort.request import Message, Prepared, Request, digest_of
from dpray.platform.cohort.secure_sum import Masked
from dpray.platform.cohort.ticket import JournalRefused, Ticket, members_digest
from dpray.platform.privacy.mechanisms import Regime
from dpray.platform.privacy.noise import GridNoise


@dataclass
class _Try:
    """One try of one sum: its parties by number, and what they are about to send."""

    session: Session
    ticket: Ticket
    names: dict[int, str]
    parties: dict[int, Party]
    messages: dict[int, IntArray]


class MaskingHost(Host):
    """A host under a masked sum; regime `local` is answered as by any host, and `central` is refused.

    Args:
        spec: with `masked` and `everyone`.
    """

    journal_type: ClassVar[type[SiteJournal]] = MaskedJournal
    _journal: MaskedJournal

    def __init__(self, spec: HostSpec) -> None:
        super().__init__(spec)
        if spec.masked is None:
            raise CohortError("A masking host needs to know its masked sum.")
        self._masked: Masked = spec.masked
        self._number = {client: number for number, client in enumerate(spec.everyone)}
        self._tries: dict[str, _Try] = {}

    def contribute(self, request: Request) -> Message:
        """Refused: these clients show no sum without noise."""
        raise CohortError("These clients answer under a masked sum only, and regime `central` is none.")

    def prepare(self, request: Request) -> Prepared:
        """Make and hold the clients' messages, and advertise keys. Under noise shares only: else as `Host.prepare`."""
        if request.regime is not Regime.DISTRIBUTED:
            return super().prepare(request)
        if not request.nonce:
            raise CohortError("These clients answer under a masked sum only.")
        ticket, noise = self._ticket(request)
        spec, among = self._spec, set(request.participants or self._spec.clients)
        members = [client for client in spec.clients if client in among]
        messages = self._journal.enter(ticket, members, members_digest(request.participants or ()))
        fresh = [client for client in members if client not in messages]
        for block, rows in self._rows(request, ticket, noise, fresh):
            messages.update(zip(block, rows, strict=True))
        session = session_of(request, noise, self._masked, spec.terms, spec.quorum, spec.colluders)
        names = {self._number[client]: client for client in members}
        parties = {number: Party(session, number) for number in names}
        held = {number: messages[client] for number, client in names.items()}
        self._tries[ticket.lease] = _Try(session, ticket, names, parties, held)
        return Prepared(tuple(party.advertise() for party in parties.values()), noise)

    def share(self, nonce: str, told: Mapping[int, Roster]) -> list[Shares]:
        """Sealed shares of the secrets of these clients."""
        current = self._current(nonce, told)
        return [current.parties[number].share(roster) for number, roster in told.items()]

    def mask(self, nonce: str, told: Mapping[int, Parcel]) -> list[MaskedInput]:
        """The masked messages of these clients, once the messages are in the journal."""
        current = self._current(nonce, told)
        self._journal.keep(current.ticket, {current.names[number]: current.messages[number] for number in told})
        return [current.parties[number].mask(parcel, current.messages[number]) for number, parcel in told.items()]

    def unmask(self, request: Request) -> list[Unmasking]:
        """Shares that open the sum over `request.participants`, once messages and set are in the journal."""
        participants = request.participants or ()
        inside = set(participants)
        mine = [self._number[client] for client in self._spec.clients if client in inside]
        current = self._current(request.nonce, mine)
        alive = Members.of((self._number[client] for client in participants), current.session.clients)
        survivors = Survivors(current.session.digest, alive)
        for number in mine:
            current.parties[number].check(survivors)
        ticket = replace(current.ticket, head=request.head, lineage=request.lineage)
        messages = {current.names[number]: current.messages[number] for number in mine}
        self._journal.open(ticket, members_digest(participants), messages)
        return [current.parties[number].unmask(survivors) for number in mine]

    def _current(self, nonce: str, asked: Sequence[int] | Mapping[int, object]) -> _Try:
        found = next((each for each in self._tries.values() if each.session.nonce == nonce), None)
        if found is None or not found.parties.keys() >= set(asked):
            raise JournalRefused("again", "Prepare first: this host has no part in that try of the sum.")
        return found


def session_of(
    request: Request, noise: GridNoise, masked: Masked, terms: Terms, quorum: int, colluders: int
) -> Session:
    """The session of a request: the same for clients and server, if they count on the same.

    Raises:
        CohortError: the sum could wrap around in every ring.
    """
    largest = largest_sum(request.query.largest(terms), noise.share, noise.grid, terms.clients)
    key = request.key
    return Session(
        population=request.population,
        run=request.run,
        label=key.label,
        mechanism=key.mechanism,
        step=key.step,
        epoch=request.epoch,
        request=digest_of(request, noise),
        nonce=request.nonce,
        clients=terms.clients,
        quorum=quorum,
        colluders=colluders,
        dimension=request.mechanism.dimension,
        bits=ring_bits(largest),
        degree=masked.degree,
    )
