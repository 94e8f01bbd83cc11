"""How clients are dealt to hosts, and what no cohort can be built from."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.platform.cohort.client import Records, Site
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.layout import balanced, checked_clients, without_place


@given(counts=st.lists(st.integers(1, 50), min_size=1, max_size=30), hosts=st.integers(1, 8))
def test_every_client_has_one_host_and_no_host_is_empty(counts, hosts):
    named = {f"c{index}": count for index, count in enumerate(counts)}
    dealt = balanced(named, hosts)
    assert [client for host in dealt for client in host] == list(named)
    assert len(dealt) == min(hosts, len(counts))
    assert all(dealt)


def test_hosts_get_about_equally_many_records():
    named = {f"c{index}": count for index, count in enumerate([100, *[10] * 10])}
    assert [sum(named[client] for client in host) for host in balanced(named, 2)] == [100, 100]


@pytest.mark.parametrize(
    ("shards", "sentence"),
    [
        ({}, "at least one client"),
        ({"a": Records(np.zeros((0, 2)), np.zeros(0))}, "'a' has no records"),
        ({"": Records(np.zeros((1, 2)), np.zeros(1))}, "name"),
        ({".": Site(lambda: None, 3)}, "names its site's folder"),
        ({"..": Site(lambda: None, 3)}, "names its site's folder"),
        ({"a": Site(lambda: None, 0)}, "declared number of records"),
        ({"a": Site(lambda: None, 3), "b": Records(np.zeros((1, 2)), np.zeros(1))}, "not both"),
        ({"a": Records(np.zeros((1, 2)), np.zeros(1)), "b": Records(np.zeros((1, 3)), np.zeros(1))}, "one schema"),
    ],
)
def test_what_no_cohort_can_be_built_from_is_refused_in_a_sentence(shards, sentence):
    with pytest.raises(CohortError, match=sentence):
        checked_clients(shards)


NODES = [{"CPU": 2.0, "node:head": 1.0}, {"CPU": 1.0, "site:a": 1.0}]


@pytest.mark.parametrize(
    ("needs", "nodes", "nowhere"),
    [
        ([{"site:a": 1}, {"site:b": 1}], NODES, {1}),
        ([{"site:a": 1}], [NODES[0]], {0}),
        ([{"site:a": 1, "node:head": 1}], NODES, {0}),  # both labels, but not on one node
        ([{}, {}], NODES, set()),
        ([{"CPU": 1}] * 3, NODES, set()),
        ([{"CPU": 1}] * 3, [NODES[0]], {0, 1, 2}),  # which of them runs, nodes do not say
        ([{}], [], {0}),
    ],
)
def test_a_host_has_a_place_where_one_node_has_all_it_needs(needs, nodes, nowhere):
    assert without_place(needs, nodes) == nowhere
