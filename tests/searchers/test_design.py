"""Designs: golden numbers, a dense derivative kernel, numerical optima, boxes, kept points, importances, refusals."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brute, minimize

from dpray.searchers import design as designs
from dpray.searchers.design import design, joint, pairs, rotation, simplex, smallest, trace, weights
from dpray.searchers.joint_design import Objective, reflected, scattered

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text())


def torch_trace(points, noise, importance):
    """Eq. 2 by brute force: every derivative of the kernel by automatic differentiation, A inverted."""
    Z = torch.as_tensor(points, dtype=torch.float64)
    origin = torch.zeros(Z.shape[1], dtype=torch.float64)

    def kernel(u, v):
        return torch.exp(-((u - v) ** 2).sum(-1) / 2)

    C = torch.func.jacrev(lambda u: kernel(u, Z))(origin)  # (N, d)
    prior = torch.func.jacrev(torch.func.jacrev(kernel, 0), 1)(origin, origin)
    A = kernel(Z[:, None], Z[None]) + noise * torch.eye(len(Z), dtype=torch.float64)
    return torch.diagonal(prior - C.T @ torch.linalg.inv(A) @ C) @ torch.as_tensor(importance, dtype=torch.float64)


def numerical_optimum(d, b, noise, starts=8):
    """Smallest trace that BFGS finds from random places, gradient by automatic differentiation of a dense solve."""

    def objective(x):
        X = torch.tensor(x.reshape(b, d), requires_grad=True)
        A = torch.exp(-((X[:, None] - X[None]) ** 2).sum(-1) / 2) + noise * torch.eye(b, dtype=torch.float64)
        C = X * torch.exp(-(X**2).sum(1, keepdim=True) / 2)
        value = d - (C * torch.linalg.solve(A, C)).sum()
        value.backward()
        return value.item(), X.grad.numpy().ravel()

    generator = np.random.default_rng([d, b])
    sizes = np.resize([0.3, 0.8], starts)
    found = [
        minimize(
            objective,
            size * generator.standard_normal(b * d),
            jac=True,
            method="L-BFGS-B",
            options={"ftol": 1e-14, "gtol": 1e-9},
        )
        for size in sizes
    ]
    return min(each.fun for each in found)


def kept_points(d, m=None, seed=0, distance=0.3):
    generator = np.random.default_rng(seed)
    return 0.4 * generator.standard_normal((m or d, d)) + distance / math.sqrt(d)


class TestGolden:
    @pytest.mark.parametrize("row", golden("gibo_design_trace")["rows"], ids=lambda row: f"d{row['d']}-s{row['s']}")
    def test_closed_forms(self, row):
        for made, expected in (
            (simplex(row["d"], row["s"]), row["simplex"]),
            (pairs(row["d"], row["s"]), row["pairs"]),
        ):
            assert made.trace == pytest.approx(expected["trace"], rel=1e-11)
            # The golden radius minimises to the square root of the unit roundoff, hence the tolerance.
            np.testing.assert_allclose(np.linalg.norm(made.points, axis=1), expected["radius"], rtol=1e-6)

    @pytest.mark.parametrize("row", golden("gibo_joint_optimum_trace")["rows"], ids=lambda row: f"b{row['b']}")
    @pytest.mark.parametrize("method", [design, joint])
    def test_joint_optimum(self, row, method):
        assert method(row["d"], row["b"], row["s"]).trace == pytest.approx(row["trace"], abs=1e-6)

    def test_trace_at_points(self):
        given_ = golden("gibo_trace_at_points")
        assert given_["lengthscale"] == given_["outputscale"] == 1.0
        assert trace(given_["points"], given_["noise"]) == pytest.approx(given_["trace"], rel=1e-12)

    def test_posterior_gradient(self):
        given_ = golden("gibo_posterior_gradient")
        W = weights(given_["points"], given_["noise"])
        np.testing.assert_allclose(W @ given_["y"], given_["gradient"], rtol=1e-12)


class TestTrace:
    @settings(max_examples=30, deadline=None)
    @given(d=st.integers(1, 5), b=st.integers(1, 7), m=st.integers(0, 4), seed=st.integers(0, 10**6))
    def test_equals_the_dense_formula_at_any_points(self, d, b, m, seed):
        generator = np.random.default_rng(seed)
        X, D, omega = generator.standard_normal((b, d)), generator.standard_normal((m, d)), generator.uniform(0.1, 3, d)
        s = float(10 ** generator.uniform(-4, 1))
        expected = torch_trace(np.concatenate([D, X]), s, omega).item()

        assert trace(X, s, kept=D, importance=omega) == pytest.approx(expected, rel=1e-8, abs=1e-10)
        assert Objective(s, omega, D, b)(X)[0] == pytest.approx(expected, rel=1e-8, abs=1e-10)

    def test_equals_gpytorch_derivative_kernel(self):
        from gpytorch.kernels import RBFKernelGrad

        X = torch.as_tensor(kept_points(3, 6))
        kernel = RBFKernelGrad().double()
        kernel.lengthscale = 1.0
        full = kernel(torch.cat([torch.zeros(1, 3, dtype=torch.float64), X])).to_dense().detach().numpy()
        values = np.arange(4, full.shape[0], 4)  # outputs come as value, three derivatives, point after point
        C, A = full[1:4][:, values], full[np.ix_(values, values)] + 0.01 * np.eye(6)

        assert trace(X.numpy(), 0.01) == pytest.approx(np.trace(full[1:4, 1:4] - C @ np.linalg.inv(A) @ C.T), rel=1e-10)
        np.testing.assert_allclose(weights(X.numpy(), 0.01), C @ np.linalg.inv(A), rtol=1e-8, atol=1e-10)

    @settings(max_examples=40, deadline=None)
    @given(d=st.integers(1, 5), b=st.integers(1, 6), m=st.integers(0, 5), seed=st.integers(0, 10**6))
    def test_gradient_equals_finite_differences(self, d, b, m, seed):
        generator = np.random.default_rng(seed)
        X, D = generator.standard_normal((2, max(b, m), d))
        objective = Objective(float(10 ** generator.uniform(-2, 1)), generator.uniform(0, 3, d), D[:m], b)
        X, gradient = X[:b], objective(X[:b])[1]
        numerical = np.empty_like(X)
        for place in np.ndindex(X.shape):
            step = np.zeros_like(X)
            step[place] = 1e-6
            numerical[place] = (objective(X + step)[0] - objective(X - step)[0]) / 2e-6

        np.testing.assert_allclose(gradient, numerical, rtol=1e-5, atol=1e-7)

    def test_weights_are_the_gradient_of_the_posterior_mean(self):
        X, y = kept_points(3, 7), np.linspace(-1, 1, 7)
        K = np.exp(-((X[:, None] - X[None]) ** 2).sum(-1) / 2)
        coefficients = np.linalg.solve(K + 0.05 * np.eye(7), y)

        def mean(u):
            return np.exp(-((X - u) ** 2).sum(1) / 2) @ coefficients

        expected = [(mean(1e-5 * axis) - mean(-1e-5 * axis)) / 2e-5 for axis in np.eye(3)]
        np.testing.assert_allclose(weights(X, 0.05) @ y, expected, rtol=1e-7)


class TestClosedForms:
    @pytest.mark.parametrize("noise", [1e-4, 0.01, 1.0])
    @pytest.mark.parametrize("d", [1, 2, 3, 4, 5])
    @pytest.mark.parametrize("size", ["d + 1", "2d"])
    def test_equal_the_numerical_joint_optimum(self, d, size, noise):
        b = d + 1 if size == "d + 1" else 2 * d
        made = design(d, b, noise)

        assert made.trace == pytest.approx(numerical_optimum(d, b, noise), abs=1e-6)
        assert made.trace == pytest.approx((simplex(d, noise) if size == "d + 1" else pairs(d, noise)).trace, rel=1e-9)

    @pytest.mark.parametrize(("d", "b"), [(1, 1), (3, 1), (3, 2), (4, 3), (4, 6), (4, 7), (5, 7), (5, 9)])
    @pytest.mark.parametrize("noise", [0.01, 1.0])
    def test_every_size_up_to_pairs_equals_the_numerical_joint_optimum(self, d, b, noise):
        assert design(d, b, noise).trace == pytest.approx(numerical_optimum(d, b, noise, starts=12), abs=1e-6)

    @pytest.mark.parametrize("replicates", [1, 2, 5])
    def test_replicated_pairs_have_the_stated_trace(self, replicates):
        made, s = pairs(4, 0.02, replicates), 0.02
        h2 = np.sum(made.points[0] ** 2)
        expected = 4 * (1 - 2 * h2 * np.exp(-h2) / (1 - np.exp(-2 * h2) + s / replicates))

        assert made.points.shape == (8 * replicates, 4)
        assert made.trace == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("make", [simplex, pairs])
    def test_any_other_radius_is_worse(self, make):
        best = make(4, 0.01)

        for factor in (0.99, 1.01):
            assert trace(factor * best.points, 0.01) > best.trace

    @pytest.mark.parametrize("noise", [0.01, 1e-4])
    def test_more_than_pairs_is_joint_and_better_than_replicates(self, noise):
        assert design(2, 8, noise).trace < pairs(2, noise, 2).trace - 1e-4

    def test_joint_is_clearly_better_than_one_point_at_a_time(self):
        greedy = np.empty((0, 5))
        for _ in range(6):
            greedy = np.concatenate([greedy, joint(5, 1, 0.01, kept=greedy).points])

        assert trace(greedy, 0.01) > 2 * design(5, 6, 0.01).trace

    def test_the_level_does_not_reach_the_gradient_of_a_closed_form(self):
        for made in (simplex(5, 0.01), pairs(5, 0.01), design(5, 8, 0.01)):
            np.testing.assert_allclose(made.weights.sum(axis=1), 0.0, atol=1e-10)

    @pytest.mark.parametrize("noise", [1e-10, 1e-6, 1e6, 1e100])
    def test_extreme_noise(self, noise):
        for b in (1, 3, 4, 6, 9):
            made = design(3, b, noise)
            assert np.isfinite(made.points).all()
            assert np.isfinite(made.weights).all()
            assert 0 < made.trace <= 3

    def test_computed_once(self):
        assert design(7, 8, 0.01) is design(7, 8, 0.01)
        assert design(2, 9, 0.01) is design(2, 9, 0.01)


class TestJoint:
    @pytest.mark.parametrize(("d", "b"), [(2, 1), (3, 4), (4, 6), (5, 10)])
    def test_finds_the_closed_form_from_its_own_starts(self, d, b):
        assert joint(d, b, 0.01).trace == pytest.approx(design(d, b, 0.01).trace, abs=1e-6)

    @settings(max_examples=25, deadline=None)
    @given(d=st.integers(1, 4), b=st.integers(1, 9), m=st.integers(0, 6), seed=st.integers(0, 10**6))
    def test_stays_in_the_box_and_is_what_it_says(self, d, b, m, seed):
        generator = np.random.default_rng(seed)
        lower = -generator.choice([0.0, 0.01, 0.5, np.inf], d)
        upper = generator.choice([0.0, 0.2, 2.0, np.inf], d)
        upper[0] = 1.0
        kept, omega = kept_points(d, m or 1, seed)[:m], generator.uniform(0.1, 3, d)
        made = design(d, b, 0.01, lower=lower, upper=upper, kept=kept, importance=omega)

        assert made.points.shape == (b, d)
        assert made.weights.shape == (d, m + b)
        assert ((made.points >= lower) & (made.points <= upper)).all()
        assert made.trace == pytest.approx(trace(made.points, 0.01, kept=kept, importance=omega), rel=1e-9)
        np.testing.assert_allclose(made.weights, weights(np.concatenate([kept, made.points]), 0.01), rtol=1e-9)

    @pytest.mark.parametrize("b", [3, 6, 8])
    def test_is_stationary(self, b):
        kept, omega = kept_points(3, 4), np.array([1.0, 2.0, 0.5])
        made = joint(3, b, 0.01, kept=kept, importance=omega)

        assert np.abs(Objective(0.01, omega, kept, b)(made.points)[1]).max() < 1e-4 * made.trace

    @pytest.mark.parametrize("noise", [0.01, 0.3])
    def test_on_a_border_one_dimension_equals_a_search_of_all_pairs(self, noise):
        grid = brute(lambda x: trace(np.abs(x)[:, None], noise), [(0, 2), (0, 2)], Ns=30, full_output=True)

        made = design(1, 2, noise, lower=[0.0], upper=[2.0])
        assert made.trace == pytest.approx(grid[1], abs=1e-6)
        assert made.trace > design(1, 2, noise).trace

    def test_on_a_border_the_others_are_as_if_free(self):
        made = design(3, 6, 0.01, lower=[0.0, -2, -2], upper=[2, 2, 2])

        assert made.trace < design(1, 2, 0.01, lower=[0.0], upper=[2.0]).trace + pairs(2, 0.01).trace + 1e-6

    def test_a_dimension_of_width_zero_keeps_its_variance(self):
        made = design(3, 4, 0.01, lower=[-1, 0, -1], upper=[1, 0, 1])

        assert (made.points[:, 1] == 0).all()
        assert made.trace == pytest.approx(1 + pairs(2, 0.01).trace, abs=1e-6)

    def test_only_dimensions_without_room_are_important(self):
        made = design(2, 3, 0.01, importance=[1, 0], lower=[0, -1], upper=[0, 1])
        assert made.trace == pytest.approx(1.0)

    def test_a_box_in_which_the_closed_form_fits_changes_nothing(self):
        assert design(4, 5, 0.01, lower=-np.ones(4), upper=np.ones(4)) is design(4, 5, 0.01)

    def test_a_start_is_followed_downhill(self):
        start = 0.3 * scattered(4, 3)
        made = joint(3, 4, 0.01, start=start)

        assert made.trace < trace(start, 0.01)
        optimum = joint(3, 4, 0.01, start=made.points)
        assert optimum.trace == pytest.approx(made.trace, abs=1e-8)

    def test_is_the_same_in_another_process_whatever_the_number_of_threads(self):
        program = (
            "import numpy as np; from dpray.searchers.design import design\n"
            "kept = np.sin(np.arange(200.0)).reshape(20, 10); low = np.where(np.arange(10) % 2, 0.0, -1.0)\n"
            "made = design(10, 24, 0.01, kept=kept, lower=low, upper=np.ones(10))\n"
            "turned = design(10, 11, 0.01, rotation=np.linalg.qr(kept[:10])[0])\n"
            "print(*(a.tobytes().hex() for d in (made, turned) for a in (d.points, d.weights)), made.trace.hex())"
        )
        outputs = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
                capture_output=True,
                text=True,
                check=True,
                timeout=120,
            ).stdout
            for threads in ("1", "2")
        }
        assert len(outputs) == 1


class TestKept:
    def test_knowing_more_is_never_worse(self):
        for m in (1, 5, 9):
            assert design(4, 5, 0.01, kept=kept_points(4, m)).trace < design(4, 5, 0.01).trace

    def test_points_far_away_change_nothing(self):
        far = 40 + kept_points(3, 5)
        assert design(3, 4, 0.01, kept=far).trace == pytest.approx(design(3, 4, 0.01).trace, abs=1e-6)

    def test_a_batch_beside_kept_pairs_is_at_least_as_good_as_replicates(self):
        twice = pairs(3, 0.01, 2)
        made = design(3, 6, 0.01, kept=twice.points[np.r_[0:3, 6:9]])

        assert made.trace <= twice.trace + 1e-9

    def test_the_batch_goes_where_little_is_known(self):
        known = pairs(4, 0.01).points
        made = design(4, 2, 0.01, kept=known[np.abs(known[:, 2]) == 0])

        assert np.abs(made.points[:, 2]).min() > 0.4
        assert made.trace == pytest.approx(pairs(4, 0.01).trace, abs=1e-3)

    def test_weights_take_kept_values_first(self):
        kept, slope = kept_points(3, 4), np.array([1.0, -2.0, 0.5])
        made = design(3, 6, 1e-4, kept=kept)
        values = 0.1 * np.concatenate([kept, made.points]) @ slope

        np.testing.assert_allclose(made.weights @ values, 0.1 * slope, atol=0.03)

    def test_none_and_no_rows_are_the_same(self):
        assert design(3, 4, 0.01, kept=np.empty((0, 3))) is design(3, 4, 0.01)


class TestImportance:
    def test_a_common_factor_scales_the_trace(self):
        once, thrice = design(4, 6, 0.01), design(4, 6, 0.01, importance=np.full(4, 3.0))

        assert thrice.trace == pytest.approx(3 * once.trace, rel=1e-12)
        np.testing.assert_array_equal(once.points, thrice.points)

    def test_few_points_go_to_the_important_dimension(self):
        made = design(3, 2, 0.01, importance=[1.0, 9.0, 1.0])

        assert made.trace == pytest.approx(2 + 9 * pairs(1, 0.01).trace, abs=1e-6)
        np.testing.assert_allclose(made.points[:, [0, 2]], 0.0, atol=1e-3)

    def test_dimensions_of_no_importance_are_not_probed_for(self):
        assert design(4, 4, 0.01, importance=[1, 0, 1, 0]).trace == pytest.approx(pairs(2, 0.01).trace, abs=1e-6)

    def test_a_design_for_other_importances_is_worse(self):
        omega = np.array([5.0, 1.0, 0.2])
        assert design(3, 4, 0.01, importance=omega).trace < trace(design(3, 4, 0.01).points, 0.01, importance=omega)


class TestRotation:
    @settings(max_examples=15, deadline=None)
    @given(d=st.integers(1, 12), extra=st.integers(-3, 12), seed=st.integers(0, 10**6))
    def test_keeps_the_trace(self, d, extra, seed):
        b, R = max(1, d + extra), rotation(d, np.random.default_rng(seed))
        plain, turned = design(d, b, 0.01), design(d, b, 0.01, rotation=R)

        np.testing.assert_allclose(turned.points, plain.points @ R)
        assert turned.trace == plain.trace
        assert trace(turned.points, 0.01) == pytest.approx(plain.trace, rel=1e-9)
        np.testing.assert_allclose(turned.weights, weights(turned.points, 0.01), rtol=1e-8, atol=1e-10)

    def test_is_orthogonal(self):
        R = rotation(6, np.random.default_rng(0))
        np.testing.assert_allclose(R @ R.T, np.eye(6), atol=1e-14)

    def test_is_uniform_where_a_plain_qr_is_not(self):
        # The first entry is symmetric about 0: among 400, fewer than 120 or more than 280 positive ones come by chance
        # with probability below 1e-15.
        generator = np.random.default_rng(0)
        ours = sum(rotation(3, generator)[0, 0] > 0 for _ in range(400))
        plain = sum(np.linalg.qr(generator.standard_normal((3, 3)))[0][0, 0] > 0 for _ in range(400))

        assert 120 <= ours <= 280
        assert not 120 <= plain <= 280

    def test_turned_out_of_the_box_it_is_optimised_in_it(self):
        h = np.abs(pairs(3, 0.01).points).max() * 1.001
        R = rotation(3, np.random.default_rng(1))
        made = design(3, 4, 0.01, lower=np.full(3, -h / 2), upper=np.full(3, h / 2), rotation=R)

        assert np.abs(made.points).max() <= h / 2
        assert made.trace == pytest.approx(joint(3, 4, 0.01, lower=[-h / 2] * 3, upper=[h / 2] * 3).trace, rel=0.05)


class TestSmallest:
    @pytest.mark.parametrize("bias", [2.9, 1.7, 0.5, 0.3, 0.15, 0.08])
    def test_is_minimal(self, bias):
        made, reached = smallest(3, 0.01, bias, most=20)
        b = len(made.points)

        assert reached
        assert made.trace <= bias
        assert b == 1 or design(3, b - 1, 0.01).trace > bias
        assert b == next(size for size in range(1, 21) if design(3, size, 0.01).trace <= bias)

    def test_a_bound_met_exactly_is_met(self):
        made, reached = smallest(3, 0.01, design(3, 4, 0.01).trace, most=6)
        assert (len(made.points), reached) == (4, True)

    @pytest.mark.parametrize("most", [1, 3, 6])
    def test_says_so_where_the_bound_is_out_of_reach(self, most):
        made, reached = smallest(3, 0.01, 1e-3, most=most)

        assert not reached
        assert made.trace == design(3, most, 0.01).trace
        assert len(made.points) == most

    def test_box_kept_points_and_importances_count(self):
        place = {"lower": [0, -1, -1], "upper": [1, 1, 1], "kept": kept_points(3, 4), "importance": [1, 2, 1]}
        made, reached = smallest(3, 0.01, 0.4, most=20, **place)
        b = len(made.points)

        assert reached
        assert made.trace <= 0.4 < design(3, b - 1, 0.01, **place).trace
        assert made.weights.shape == (3, 4 + b)

    @pytest.mark.parametrize("bias", [0, -1.0, math.nan, math.inf, True])
    def test_refuses_a_bound_that_is_none(self, bias):
        with pytest.raises(ValueError, match="ε_bias"):
            smallest(3, 0.01, bias, most=4)

    def test_refuses_no_points(self):
        with pytest.raises(ValueError, match="largest batch must be at least 1"):
            smallest(3, 0.01, 0.5, most=0)


class TestRefusals:
    @pytest.mark.parametrize("noise", [0, 0.0, -0.01, math.nan, math.inf, 1e-11, "1", True, None])
    @pytest.mark.parametrize(
        "call",
        [
            lambda noise: design(3, 4, noise),
            lambda noise: joint(3, 4, noise),
            lambda noise: simplex(3, noise),
            lambda noise: pairs(3, noise),
            lambda noise: trace([[1.0]], noise),
            lambda noise: weights([[1.0]], noise),
            lambda noise: smallest(3, noise, 0.5, most=4),
        ],
    )
    def test_noise(self, call, noise):
        with pytest.raises(ValueError, match="noise"):
            call(noise)

    @pytest.mark.parametrize(("d", "b"), [(0, 1), (-1, 1), (2.0, 1), (True, 1), (3, 0), (3, -2), (3, 4.0)])
    @pytest.mark.parametrize("method", [design, joint])
    def test_sizes(self, method, d, b):
        with pytest.raises(ValueError, match="must be"):
            method(d, b, 0.01)

    @pytest.mark.parametrize(
        ("place", "words"),
        [
            ({"lower": [0.1, -1]}, "dimension 0 goes from 0.1 to inf"),
            ({"upper": [1, -0.5]}, "dimension 1 goes from -inf to -0.5"),
            ({"lower": [math.nan, -1]}, "must contain 0"),
            ({"lower": [-1.0]}, "Borders must be 2 numbers"),
            ({"upper": 1.0}, "Borders must be 2 numbers"),
            ({"lower": [0, 0], "upper": [0, 0]}, "single point θ"),
            ({"kept": [[1.0, 2.0, 3.0]]}, "Kept points must have d = 2"),
            ({"kept": [1.0, 2.0]}, "kept must be a real matrix"),
            ({"kept": [[math.nan, 2.0]]}, "kept must be finite"),
            ({"importance": [1.0]}, "Importances must be 2"),
            ({"importance": [1.0, -1.0]}, "none negative"),
            ({"importance": [0.0, 0.0]}, "not all zero"),
            ({"importance": [1.0, math.nan]}, "finite"),
        ],
    )
    @pytest.mark.parametrize("method", [design, joint])
    def test_place(self, method, place, words):
        with pytest.raises(ValueError, match=words):
            method(2, 3, 0.01, **place)

    @pytest.mark.parametrize("matrix", [np.ones((2, 2)), np.eye(3), np.full((2, 2), np.nan), 2 * np.eye(2)])
    def test_rotations(self, matrix):
        with pytest.raises(ValueError, match="orthogonal"):
            design(2, 3, 0.01, rotation=matrix)

    def test_starts_of_another_shape(self):
        with pytest.raises(ValueError, match="shape of the batch"):
            joint(2, 3, 0.01, start=np.ones((2, 2)))

    @pytest.mark.parametrize("points", [[], [1.0], [["a"]], [[math.inf]], np.empty((2, 0))])
    def test_points(self, points):
        with pytest.raises(ValueError, match="points"):
            trace(points, 0.01)

    def test_replicates(self):
        with pytest.raises(ValueError, match="replicates"):
            pairs(2, 0.01, 0)


def test_designs_cannot_be_changed():
    for made in (design(3, 4, 0.01), joint(2, 3, 0.01), design(3, 4, 0.01, rotation=np.eye(3))):
        for array in (made.points, made.weights):
            with pytest.raises(ValueError, match="read-only"):
                array[0, 0] = 1.0


def test_starts_do_not_depend_on_a_generator():
    first = scattered(30, 7)

    assert np.abs(first).max() <= 1
    assert len(np.unique(first.round(9))) == first.size
    assert np.abs(np.corrcoef(first.T) - np.eye(7)).max() < 0.7
    assert not np.array_equal(first, scattered(30, 7, shift=1))


def test_reflection_stays_inside():
    lower, upper = np.array([0.0, -1.0, -np.inf]), np.array([2.0, 0.1, np.inf])
    points = np.array([[-0.5, 0.3, 9.0], [-7.0, 7.0, -9.0], [1.0, 0.0, 0.0]])

    np.testing.assert_allclose(reflected(points, lower, upper), [[0.5, -0.1, 9.0], [2.0, -1.0, -9.0], [1.0, 0.0, 0.0]])


def test_the_module_loads_neither_torch_nor_ray():
    program = "import sys, dpray.searchers.design; print('torch' in sys.modules, 'ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.split() == ["False", "False"]
    assert designs.__doc__
