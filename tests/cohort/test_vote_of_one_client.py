"""One client's data replaced by anything: the sum of ballots moves within Δ = √(2·min(k, p−k)), and nothing else does.

The server is told, by a host: how many clients answered for a candidate, the noise that the host counts with, and
noised ballots. Noise and the clients' private seeds are the same in both worlds, so what differs is the data's doing.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records
from dpray.platform.cohort.host import Host
from dpray.platform.cohort.queries import Votes
from dpray.platform.privacy.budget import floor_quanta
from dpray.platform.privacy.ledger import ReleaseKey
from dpray.platform.privacy.mechanisms import Regime, TopKVotes
from dpray.platform.privacy.noise import NoiseSource

from .conftest import DIMENSION, SEARCH, RowSum, ask, client_names, records, shards_of

P = 5
EVERYONE = client_names(4)
RUN = ("people", "run")
CASES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def misbehave(kind, given):
    """A score, or what user code may do instead of giving one."""
    mean = float(np.nan_to_num(given.x).mean())
    match kind:
        case 1:
            raise ValueError(str(given.x))
        case 2:
            raise SystemExit(str(given.x))
        case 3:
            raise KeyboardInterrupt
        case 4:
            raise MemoryError
        case 5:
            return math.nan
        case 6:
            return math.inf
        case 7:
            return "not a number"
        case 8:
            return given.x
        case 9:
            given.x[:] = 0.0
        case 10:
            return mean * 1e300 * 1e300
        case 11:
            return mean
    return None


@st.composite
def clients(draw):
    """Records of one client: as many as declared, whatever stands in them and whatever its code does with them."""
    given = records(draw(st.integers(0, 999)), label=draw(st.integers(-1, 12)))
    x = given.x * draw(st.sampled_from([1.0, -1.0, 1e30, 1e300]))
    spoiled = draw(st.sampled_from([None, math.nan, math.inf, -math.inf]))
    if spoiled is not None:
        x[draw(st.integers(0, len(x) - 1)), draw(st.integers(0, DIMENSION - 1))] = spoiled
    return Records(x, given.y)


def asked(k, regime):
    mechanism = TopKVotes(k, P)
    key = ReleaseKey("search", mechanism.name, 0)
    query = Votes("search", P, k)
    return replace(ask(), key=key, query=query, mechanism=mechanism, regime=regime, quanta=floor_quanta(0.5))


def told(host, k, regime):
    """All that the server is told over a search and its vote: the noised sum, in votes, and the rest."""
    host._seeds = {name: name.encode() for name in EVERYONE}
    answered = [host.evaluate(SEARCH, candidate, {"target": 0.1 * candidate}) for candidate in range(P)]
    request = asked(k, regime)
    if regime is Regime.CENTRAL:
        messages, prepared = [host.contribute(request)], None
        grid = request.mechanism.noise(request.mu).grid
    else:
        prepared = host.prepare(request)
        messages = host.reveal(RUN, request.key, EVERYONE, request.head)
        grid = prepared.noise.grid
    total = sum(message.steps for message in messages) * grid
    return total, (answered, prepared, [message.clients for message in messages])


@pytest.mark.parametrize("regime", list(Regime))
@given(first=clients(), second=clients(), who=st.integers(0, 3), k=st.integers(1, P - 1))
@example(first=records(1), second=records(2, label=1), who=0, k=2)
@CASES
def test_replacing_a_client_moves_the_votes_within_the_sensitivity_and_tells_nothing_else(
    make_host, regime, first, second, who, k
):
    worlds = []
    for number, mine in enumerate((first, second)):
        site = f"{regime}-{who}-{k}-{number}-{hash(first.x.tobytes() + second.x.tobytes())}-{first.y[0]}-{second.y[0]}"
        here = {**shards_of(4), EVERYONE[who]: mine}
        host = make_host(here, task=RowSum(misbehave), site=site, noise=NoiseSource(7))
        worlds.append(told(host, k, regime))
    (one, rest), (other, same) = worlds
    moved = one - other
    assert np.linalg.norm(moved) <= math.sqrt(2 * min(k, P - k)) * (1 + 1e-12)
    assert moved.sum() == 0
    assert rest == same


@pytest.mark.parametrize("k", range(1, P))
def test_the_sensitivity_is_attained(make_host, k):
    """A client that likes the first candidates best against one that likes the last ones best."""
    totals = []
    for number, x in enumerate((0.0, 0.1 * (P - 1))):
        mine = Records(np.full((5, DIMENSION), x), np.zeros(5, dtype=np.int64))
        here = {**shards_of(4), EVERYONE[0]: mine}
        host = make_host(here, site=f"{k}-{number}", noise=NoiseSource(7))
        totals.append(told(host, k, Regime.DISTRIBUTED)[0])
    assert np.linalg.norm(totals[0] - totals[1]) == pytest.approx(math.sqrt(2 * min(k, P - k)))
    assert TopKVotes(k, P).sensitivity == pytest.approx(math.sqrt(2 * min(k, P - k)))


def test_a_task_that_tells_of_its_data_is_seen(make_host, monkeypatch):
    """Negative control: a host that drops a client whose code fails is told from one that does not."""
    good, bad = records(1), records(1, label=1)
    monkeypatch.setattr(Host, "evaluate", lambda self, *asked, real=Host.evaluate: real(self, *asked) - failing(self))
    rest = [
        told(make_host({**shards_of(4), EVERYONE[0]: mine}, task=RowSum(misbehave), site=site), 2, Regime.CENTRAL)[1]
        for site, mine in (("good", good), ("bad", bad))
    ]
    assert rest[0] != rest[1]


def failing(host):
    """How many of a host's clients have code that fails."""
    return sum(int(shard.y[0] == 1) for shard in host.shards(EVERYONE))
