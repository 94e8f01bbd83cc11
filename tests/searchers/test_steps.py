"""Step rules: pure functions of what was released, indifferent to units, and what `noise_aware` gains and costs."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpray.searchers.steps import AdaGrad, Context, NoiseAware, Sgd, iterates, rule

RULES = [Sgd(2.0), Sgd(2.0, average=0.5), AdaGrad(), AdaGrad(0.5, average=0.25), NoiseAware(), NoiseAware(damping=0.0)]


def box(d, *, sigma=0.1, half=2.0, iterations=20):
    return Context(sigma, np.full(d, -half), np.full(d, half), iterations)


def released(seed=0, t=7, d=3):
    return np.random.default_rng(seed).standard_normal((t, d))


class TestFormulas:
    def test_sgd_adds_up_gradients(self):
        gradients = released(t=4) / 10

        path = iterates(Sgd(0.5), np.zeros(3), gradients, box(3))

        assert path == pytest.approx(np.concatenate([np.zeros((1, 3)), -0.5 * np.cumsum(gradients, axis=0)]))

    def test_adagrad_divides_by_the_norm_of_a_coordinates_history(self):
        path = iterates(AdaGrad(1.0), [0.0], [[3.0], [4.0], [-12.0]], box(1))

        assert path[:, 0] == pytest.approx([0.0, -1.0, -1.0 - 4 / 5, -1.0 - 4 / 5 + 12 / 13])

    def test_noise_aware_adds_the_noises_expected_energy(self):
        path = iterates(NoiseAware(rate=1.0, damping=2.0), [0.0], [[3.0], [4.0]], box(1, sigma=2.0))

        assert path[:, 0] == pytest.approx([0.0, -3 / math.sqrt(9 + 8), -3 / math.sqrt(9 + 8) - 4 / math.sqrt(25 + 16)])

    def test_noise_aware_without_noise_is_adagrad(self):
        gradients, context = released(), box(3, sigma=0.0, half=50.0)

        same = iterates(AdaGrad(1.5), np.zeros(3), gradients, context)

        assert iterates(NoiseAware(rate=1.5), np.zeros(3), gradients, context) == pytest.approx(same)

    def test_noise_aware_moves_a_quarter_of_a_narrow_range_at_most(self):
        context = Context(0.0, np.array([0.0, 0.0]), np.array([0.2, 100.0]), 20)

        first = NoiseAware().next(np.array([[0.1, 50.0]]), np.array([[5.0, 5.0]]), context)

        assert first == pytest.approx([0.1 - 0.05, 50.0 - 1.5])

    @pytest.mark.parametrize(("share", "last"), [(0.0, 1), (0.25, 2), (0.5, 4), (1.0, 8)])
    def test_the_result_averages_the_last_share_of_the_iterates(self, share, last):
        thetas = released(t=8)

        for each in (Sgd(1.0, share), AdaGrad(1.0, share), NoiseAware(average=share)):
            assert each.result(thetas) == pytest.approx(thetas[-last:].mean(axis=0))

    def test_a_coordinate_without_a_gradient_stays(self):
        for each in (AdaGrad(), NoiseAware()):
            path = iterates(each, [0.5, 0.5], [[0.0, 1.0], [0.0, 1.0]], box(2, sigma=0.0))

            assert path[:, 0].tolist() == [0.5] * 3


class TestEveryRule:
    @pytest.mark.parametrize("each", RULES, ids=repr)
    @given(seed=st.integers(0, 1_000), sigma=st.floats(0, 10))
    def test_iterates_and_result_stay_in_the_box(self, each, seed, sigma):
        context = box(3, sigma=sigma)

        path = iterates(each, [9.0, 0.0, -9.0], 5 * released(seed), context)

        assert path.shape == (8, 3)
        for point in (*path, each.result(path)):
            assert (point >= context.lower - 1e-12).all()
            assert (point <= context.upper + 1e-12).all()

    @pytest.mark.parametrize("each", RULES, ids=repr)
    def test_the_past_does_not_depend_on_what_is_released_later(self, each):
        gradients, context = released(), box(3)

        assert (
            iterates(each, np.zeros(3), gradients[:4], context) == iterates(each, np.zeros(3), gradients, context)[:5]
        ).all()

    @pytest.mark.parametrize("each", RULES, ids=repr)
    def test_arguments_are_left_alone(self, each):
        gradients, start = released(), np.zeros(3)
        before = gradients.copy()

        iterates(each, start, gradients, box(3))

        assert (gradients == before).all()
        assert (start == 0).all()

    @pytest.mark.parametrize("each", [AdaGrad(), NoiseAware()], ids=repr)
    @given(unit=st.floats(1e-6, 1e6))
    def test_the_unit_of_the_loss_does_not_matter(self, each, unit):
        usual = iterates(each, np.zeros(3), released(), box(3, sigma=0.3))

        assert iterates(each, np.zeros(3), unit * released(), box(3, sigma=0.3 * unit)) == pytest.approx(usual)

    def test_it_matters_to_sgd(self):
        usual = iterates(Sgd(0.1), np.zeros(3), released(), box(3))

        assert iterates(Sgd(0.1), np.zeros(3), 2 * released(), box(3)) != pytest.approx(usual)

    @pytest.mark.parametrize("each", RULES, ids=repr)
    def test_the_description_is_plain_json_and_tells_rules_apart(self, each):
        described = json.dumps(each.describe())

        assert sum(json.dumps(other.describe()) == described for other in RULES) == 1


def regret(each, seed, *, sigma=0.4, d=40, clear=8, steps=20):
    """Half squared distance to the optimum, of a bowl that is flat in all coordinates but `clear` ones."""
    rng = np.random.default_rng([3, seed])
    curvature = np.where(np.arange(d) < clear, 1.0, 0.02)
    context = Context(sigma, np.full(d, -6.0), np.full(d, 0.0), steps)
    best = rng.uniform(-5.0, -1.0, d)
    thetas, gradients = [rng.uniform(-6.0, 0.0, d)], []
    for _ in range(steps):
        gradients.append(curvature * (thetas[-1] - best) + sigma * rng.standard_normal(d))
        following = each.next(np.array(thetas), np.array(gradients), context)
        thetas.append(np.clip(following, context.lower, context.upper))
    return float(0.5 * (curvature * (each.result(np.array(thetas)) - best) ** 2).sum())


class TestNoiseAware:
    """200 seeds, differences of paired runs; limits at 4 standard errors: a false alarm in 30 000 runs of the test."""

    @staticmethod
    def gain(one, other, **options):
        differences = np.array([regret(other, s, **options) - regret(one, s, **options) for s in range(200)])
        return differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences)))

    def test_it_beats_adagrad_under_noise(self):
        assert self.gain(NoiseAware(), AdaGrad()) > 4

    def test_a_rule_that_believes_in_ten_times_the_noise_does_not(self):
        """Negative control: the gain is due to the right σ, not to smaller steps."""
        assert self.gain(NoiseAware(damping=100.0), AdaGrad()) < -4

    def test_all_of_the_step_needs_no_more_than_the_last_quarter(self):
        assert self.gain(NoiseAware(), NoiseAware(average=1.0)) > 4


class TestByName:
    def test_names_and_rates(self):
        assert rule("sgd", 0.1) == Sgd(0.1)
        assert rule("adagrad") == AdaGrad(1.0)
        assert rule("noise_aware") == NoiseAware()
        assert rule("noise_aware", 0.5) == NoiseAware(0.5)
        assert rule(AdaGrad(2.0)) == AdaGrad(2.0)

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("adam",), r"no step rule 'adam'; there are sgd, adagrad, noise_aware"),
            (("sgd",), "needs a rate"),
            ((AdaGrad(), 2.0), "which has its own"),
            (("sgd", 0.0), "finite and above 0"),
            (("adagrad", math.inf), "finite and above 0"),
            (("noise_aware", math.nan), "finite and above 0"),
        ],
    )
    def test_refusals_are_sentences(self, arguments, sentence):
        with pytest.raises(ValueError, match=sentence):
            rule(*arguments)

    @pytest.mark.parametrize("damping", [-1.0, math.inf, math.nan, True])
    def test_damping_is_a_finite_number_from_0(self, damping):
        with pytest.raises(ValueError, match="damping"):
            NoiseAware(damping=damping)

    @pytest.mark.parametrize("average", [-0.1, 1.1, math.nan, True])
    def test_an_average_is_a_share(self, average):
        with pytest.raises(ValueError, match="share of the iterates"):
            Sgd(1.0, average)
