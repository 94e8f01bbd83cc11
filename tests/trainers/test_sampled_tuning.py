"""A search whose trainings are on samples: each is charged with its sampler, or refused before anything is spent."""

from functools import partial

import pytest

from dpray.platform.cohort.sampled import Sampled
from dpray.platform.privacy import pld
from dpray.platform.privacy.budget import Budget, floor_quanta, to_mu
from dpray.platform.privacy.ledger import BudgetExceeded, Ledger
from dpray.platform.privacy.mechanisms import Unit
from dpray.platform.privacy.sampling import PoissonSampling
from dpray.trainers import DPFedFCTrainer, FedFCSettings
from dpray.trainers.fedgd import DPFedGDTrainer, FedGDSettings
from dpray.trainers.hold_out import Correct, HoldOut
from dpray.trainers.models import LinearHead
from dpray.trainers.trainable import TrainerTuning, search_epsilon

T, F, K, Q, DELTA = 4, 4, 3, 0.2, 1e-5
ACCOUNT, EACH = Budget(4.0, DELTA), Budget(1.0, DELTA)
SAMPLING = PoissonSampling(Q)
ROUND = floor_quanta(0.5)
SETTINGS = partial(FedGDSettings.from_config, defaults={"rounds": T, "clip": 1.0})


@pytest.fixture
def account(tmp_path):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        yield ledger.population("people").account(Unit.RECORD, ACCOUNT, kind="pld")


@pytest.fixture
def cohort(alone_cohort, make_blobs):
    class Listening(alone_cohort):
        """Remembers what was asked, and at which price."""

        prices = ()

        def sum(self, attempt, query, mechanism, regime):
            self.prices = (*self.prices, (attempt.run.name, query, mechanism.sampling_probability))
            return super().sum(attempt, query, mechanism, regime)

    return Listening(LinearHead(F, K), {"a": make_blobs(200, 1), "b": make_blobs(300, 2)}, noise=3)


@pytest.fixture
def make(cohort, make_blobs, tmp_path):
    opened = []

    def made(trainings=2, kind=DPFedGDTrainer, settings=SETTINGS, **changes):
        options = {"quanta": T * ROUND, "regime": "central", "sampling": SAMPLING, **changes}
        if "hold_out" not in options:
            options["evaluation"] = make_blobs(90, 9)
        options |= {"example": {"learning_rate": 1.0}, "name": "tuning", "trainings": trainings}
        where = f"sqlite:///{tmp_path}/ledger.db", "people", LinearHead(F, K), settings
        opened.append(TrainerTuning(kind, cohort, *where, storage=tmp_path / "slots", **options))
        return opened[-1]

    yield made
    for each in opened:
        each.close()


def untouched(account):
    return (account.spent, account.reserved, account.spent_epsilon) == (0, 0, 0.0)


def test_every_training_is_charged_with_the_sampler_that_its_clients_draw_from(make, account, cohort):
    tuning = make(trainings=2, budget=EACH, quanta=None)
    rows = [tuning.train({"learning_rate": rate}).metrics for rate in (0.5, 1.0)]
    lines = account.statement().lines
    assert [(line.run, line.steps, line.sampling_probability) for line in lines] == [
        ("tuning/000", T, Q),
        ("tuning/001", T, Q),
    ]
    assert len(cohort.prices) == 2 * T
    for _, query, charged in cohort.prices:
        assert isinstance(query, Sampled)
        assert query.sampling == SAMPLING
        assert charged == Q
    each = tuning.handle.quanta // T
    assert [row["privacy/epsilon_run"] for row in rows] == pytest.approx([SAMPLING.epsilon(each, T, DELTA)] * 2)
    assert 0.998 * EACH.epsilon <= rows[0]["privacy/epsilon_run"] <= EACH.epsilon
    both = pld.epsilon([pld.PoissonGaussian(1 / to_mu(each), Q, 2 * T)], DELTA)  # composed, not added up
    assert rows[1]["privacy/epsilon_search"] == pytest.approx(both, rel=1e-6)
    assert tuning.epsilon == pytest.approx(account.spent_epsilon, rel=1e-9)
    assert account.spent_epsilon < 1.9 * EACH.epsilon
    assert search_epsilon(account, "another") == 0.0


def test_what_was_trained_is_read_and_paid_once(make, account, cohort):
    first = make().train({"learning_rate": 1.0})
    spent = account.spent_epsilon
    again = make().train({"learning_rate": 1.0})
    assert (again.run, again.theta.tolist()) == (first.run, first.theta.tolist())
    assert (account.spent_epsilon, len(cohort.prices)) == (spent, T)


def test_a_search_that_does_not_fit_its_composition_sets_nothing_aside(make, account, cohort):
    with pytest.raises(BudgetExceeded, match=r"Training \d+ of the 40 of search 'tuning' does not fit"):
        make(trainings=40, quanta=T * floor_quanta(3.0))
    assert untouched(account)
    assert cohort.prices == ()


def test_a_score_is_a_gaussian_beside_the_sampled_rounds(make, account, alone_cohort, make_blobs):
    score = floor_quanta(0.3)
    kept = alone_cohort(Correct(LinearHead(F, K)), {"a": make_blobs(400, 5)}, noise=4)
    tuning = make(hold_out=HoldOut(kept, score, "central"))
    row = tuning.train({"learning_rate": 1.0}).metrics
    assert sorted(line.sampling_probability for line in account.statement().lines) == [Q, 1.0]
    rounds = pld.PoissonGaussian(1 / to_mu(ROUND), Q, T)
    expected = pld.epsilon([rounds, pld.Gaussian(1 / 0.3)], DELTA)
    assert row["privacy/epsilon_run"] == pytest.approx(expected, rel=1e-6)
    assert row["privacy/epsilon_search"] == pytest.approx(expected, rel=1e-6)
    assert expected > pld.epsilon([rounds], DELTA) * 1.05  # negative control: the score costs something
    assert "privacy/mu_run" not in row


FC = partial(FedFCSettings.from_config, defaults={"rounds": T, "clip": 1.0, "covariance_clip": 2.0})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"unit": "client"}, "protects the unit `client`, and `record`s were to be sampled"),
        ({"kind": DPFedFCTrainer, "settings": FC}, "cannot be trained on samples"),
    ],
)
def test_what_cannot_be_sampled_is_refused_before_anything_is_set_aside(changes, sentence, make, account):
    with pytest.raises(ValueError, match=sentence):
        make(**changes)
    assert untouched(account)
    assert list(account.population.runs()) == []


def test_accounts_of_the_other_kind_are_refused(tmp_path, make, cohort):
    with Ledger(f"sqlite:///{tmp_path}/ledger.db") as ledger:
        people = ledger.population("people")
        account = people.account(Unit.RECORD, ACCOUNT)
        with pytest.raises(ValueError, match="has no finite μ, and the accounts of population 'people' are of kind"):
            make()
        assert (account.spent, account.reserved, list(people.runs())) == (0, 0, [])
    assert cohort.prices == ()


def test_without_sampling_the_same_noise_costs_more(make, account):
    """Negative control: what is charged depends on the sampler."""
    tuning = make(trainings=1)
    sampled = tuning.train({"learning_rate": 1.0}).metrics["privacy/epsilon_run"]
    whole = pld.epsilon([pld.Gaussian(1 / to_mu(T * ROUND))], DELTA)
    assert whole > 2 * sampled
