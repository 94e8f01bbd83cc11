"""Candidates from a Tune space: complete, public, and drawn without looking at data."""

import json
from typing import ClassVar

import numpy as np
import pytest
from ray import tune
from ray.tune.search.sample import Float

from dpray.searchers.errors import SpaceError
from dpray.searchers.space import candidates, distinct, leaves


class TestGrid:
    def test_the_last_key_runs_fastest_and_constants_pass_through(self):
        space = {"a": tune.grid_search([1, 2]), "fixed": "x", "b": {"c": tune.choice([0.1, 0.2]), "d": [True, None]}}

        found = candidates(space)

        assert [(c["a"], c["b"]["c"]) for c in found] == [(1, 0.1), (1, 0.2), (2, 0.1), (2, 0.2)]
        assert all(c["fixed"] == "x" and c["b"]["d"] == [True, None] for c in found)

    def test_domains_inside_lists_are_searched(self):
        found = candidates({"layers": [tune.choice([8, 16]), 4]})

        assert [c["layers"] for c in found] == [[8, 4], [16, 4]]

    def test_a_choice_between_dictionaries_is_a_choice(self):
        options = [{"name": "sgd", "momentum": 0.9}, {"name": "adam"}]

        assert [c["optimizer"] for c in candidates({"optimizer": tune.choice(options)})] == options

    def test_candidates_do_not_share_mutable_values(self):
        first, second = candidates({"a": tune.choice([1, 2]), "shared": {"list": [1]}})
        first["shared"]["list"].append(2)

        assert second["shared"]["list"] == [1]

    def test_duplicates_are_removed(self):
        assert [c["a"] for c in candidates({"a": tune.choice([1, 2, 1, 2])})] == [1, 2]

    @pytest.mark.parametrize(
        "domain",
        [
            tune.randint(2, 7),
            tune.lograndint(1, 9),
            tune.qrandint(0, 12, 3),
            tune.qrandint(1, 6, 1),
            tune.qlograndint(2, 16, 2),
            tune.quniform(0.1, 0.9, 0.1),
            tune.qloguniform(0.25, 2.0, 0.25),
        ],
        ids=lambda domain: domain.domain_str,
    )
    def test_finite_domains_are_listed_as_tune_samples_them(self, domain):
        """Oracle: Tune's own sampler; 20 000 draws miss none of at most 9 values (each above 2 %: below 1e-100)."""
        listed = [c["x"] for c in candidates({"x": domain})]
        drawn = domain.sample(size=20_000, random_state=np.random.default_rng(0))

        assert listed == sorted(listed)
        assert np.allclose(listed, sorted({round(float(value), 9) for value in drawn}))
        assert {type(value) for value in listed} == {type(domain.cast(1))}

    def test_a_grid_that_is_too_large_asks_for_a_number(self):
        with pytest.raises(SpaceError, match="1000000 candidates"):
            candidates({"a": tune.randint(0, 1000), "b": tune.randint(0, 1000)})


class TestDraws:
    space: ClassVar = {
        "lr": tune.loguniform(1e-4, 1e-1),
        "inner": {"beta": tune.uniform(0.5, 0.9)},
        "k": tune.choice([1, 2]),
    }

    def test_the_public_seed_decides(self):
        assert candidates(self.space, 8, seed=3) == candidates(self.space, 8, seed=3)
        assert candidates(self.space, 8, seed=3) != candidates(self.space, 8, seed=4)

    def test_more_candidates_begin_with_the_fewer(self):
        assert candidates(self.space, 8)[:5] == candidates(self.space, 5)

    def test_draws_are_different_within_bounds_and_plain(self):
        found = candidates(self.space, 64)

        assert len({json.dumps(c) for c in found}) == 64
        assert all(1e-4 <= c["lr"] <= 1e-1 and 0.5 <= c["inner"]["beta"] <= 0.9 and c["k"] in {1, 2} for c in found)
        assert json.loads(json.dumps(found)) == list(found)

    def test_a_small_grid_is_taken_whole(self):
        assert candidates({"a": tune.choice([1, 2, 3])}, 10) == candidates({"a": tune.choice([1, 2, 3])})

    def test_part_of_a_large_grid_is_drawn(self):
        found = candidates({"a": tune.randint(0, 100_000_000)}, 5)

        assert len({c["a"] for c in found}) == 5

    def test_a_continuous_key_asks_for_a_number_and_is_named(self):
        with pytest.raises(SpaceError, match=r"inner/beta.*candidates=16"):
            candidates({"inner": {"beta": tune.uniform(0, 1)}, "a": tune.choice([1, 2])})

    @pytest.mark.parametrize("count", [0, -1, 10_001])
    def test_a_senseless_number_is_refused(self, count):
        with pytest.raises(SpaceError, match=str(count)):
            candidates(self.space, count)


class TestRefusals:
    @pytest.mark.parametrize(
        ("bad", "says"),
        [
            ({"a": {"b": tune.sample_from(lambda config: config["c"])}}, "a/b is drawn by a function"),
            ({"a": {"b": tune.randn(0, 1)}}, "a/b is unbounded"),
            ({"a": tune.qrandn(0, 1, 0.1)}, "a is unbounded"),
            ({"a": Float(None, None)}, "a is unbounded"),
            ({"a": tune.uniform(2, 1)}, "a runs from 2 up to 1"),
            ({"a": tune.randint(3, 3)}, "a has no values"),
            ({"a": tune.choice([])}, "a has no values"),
            ({"a": {"eval": "spec.config.b * 2"}}, "a is an expression"),
            ({"a": tune.choice([1, 2]), "f": {"g": max}}, "f/g is a function"),
            ({"a": tune.choice([1, object()])}, "a is a object"),
            ({"a": tune.choice([1, 2]), "x": float("nan")}, "x is nan"),
            ({"a": tune.choice([1.0, float("inf")])}, "a is inf"),
            ({"a": tune.choice([tune.choice([1, 2]), 3])}, "a offers a choice between domains"),
            ({"a": tune.grid_search([{"x": 1}, {"x": 2}])}, "tune.choice"),
            ({"a": tune.choice([1, 2]), "b": {1: 2}}, "key 1 under 'b'"),
            ({"a": tune.choice([1, 2]), "ref": ("__ref_ph", "0a1b2c3d")}, "ref is a Python object"),
            ({"a": 1, "b": {"c": "x"}}, "nothing to search"),
            ({"a": tune.choice([1])}, "nothing to search"),
            ({}, "nothing to search"),
        ],
    )
    def test_the_key_is_named(self, bad, says):
        with pytest.raises(SpaceError, match=says):
            candidates(bad)


class TestExplicitCandidates:
    def test_they_are_copied_in_order_without_duplicates(self):
        given = [{"a": 2}, {"a": np.float64(1.5)}, {"a": 2}]

        assert distinct(given) == ({"a": 2}, {"a": 1.5})

    def test_a_domain_among_them_is_refused(self):
        with pytest.raises(SpaceError, match=r"Candidate 1 still holds a domain \(m/lr\)"):
            distinct([{"m": {"lr": 1}}, {"m": {"lr": tune.choice([1, 2])}}])

    def test_one_is_not_a_search(self):
        with pytest.raises(SpaceError, match="1 different candidates"):
            distinct([{"a": 1}, {"a": 1}])


def test_leaves_are_named_by_their_path():
    space = {"a": {"b": [0, tune.choice([1, 2])]}, "c": tune.uniform(0, 1)}

    assert [leaf.name for leaf in leaves(space)] == [
        "a/b/1",
        "c",
    ]
