"""A whole masked sum in one process, with parties lost where a test wants it, and a record of what the server gets."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from dpray.platform.cohort.masked import primitives
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.messages import Session
from dpray.platform.cohort.masked.party import Party

PHASES = ("advertise", "share", "mask", "agree", "unmask")


def session(clients=6, quorum=None, colluders=1, dimension=5, **changes):
    made = Session(
        population="people",
        run="run",
        label="training",
        mechanism="clipped sum",
        step=0,
        epoch=1,
        request="a" * 64,
        nonce="0" * 32,
        clients=clients,
        quorum=quorum or clients,
        colluders=colluders,
        dimension=dimension,
        bits=64,
    )
    return replace(made, **changes)


@cache
def identities(clients):
    pairs = [primitives.new_identity() for _ in range(clients)]
    return tuple(private for private, _ in pairs), {number: public for number, (_, public) in enumerate(pairs)}


def parties(of, made_by=Party):
    if not of.active:
        return [made_by(of, number) for number in range(of.clients)]
    private, public = identities(of.clients)
    return [made_by(of, number, private[number], public) for number in range(of.clients)]


@dataclass
class Sum:
    """A session that runs phase by phase. `lost[phase]`: parties that do not answer in it, nor later."""

    of: Session
    messages: np.ndarray
    lost: Mapping[str, Collection[int]] = field(default_factory=dict)
    made_by: type[Party] = Party

    def __post_init__(self):
        self.parties = parties(self.of, self.made_by)
        self.server = Aggregator(self.of)
        self.record = []
        self.gone = set()

    def ask(self, phase, answer, of):
        """Let everybody in `of` that is still there answer."""
        self.gone |= set(self.lost.get(phase, ()))
        for number in sorted(of):
            if number not in self.gone:
                message = answer(self.parties[number])
                self.record.append(message)
                self.server.receive(message)

    def upto(self, phase):
        """Run the phases before `phase`, and return what its parties are told."""
        self.ask("advertise", lambda party: party.advertise(), range(self.of.clients))
        told = self.server.rosters()
        if phase == "share":
            return told
        self.ask("share", lambda party: party.share(told[party.number]), told)
        parcels = self.server.parcels()
        if phase == "mask":
            return parcels
        self.ask("mask", lambda party: party.mask(parcels[party.number], self.messages[party.number]), parcels)
        self.survivors = self.server.survivors()
        if phase == "agree" or (phase == "unmask" and not self.of.active):
            return self.survivors
        agreements = None
        if self.of.active:
            self.ask("agree", lambda party: party.agree(self.survivors), self.survivors.members)
            agreements = self.server.agreements()
        if phase == "unmask":
            return agreements
        self.ask("unmask", lambda party: party.unmask(self.survivors, agreements), self.survivors.members)
        return None

    def total(self):
        self.upto("total")
        return self.server.total()


def vectors(of, seed=0, size=1000):
    return np.random.default_rng(seed).integers(-size, size, (of.clients, of.dimension))
