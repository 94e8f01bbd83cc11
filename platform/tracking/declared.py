"""The names a run may show, and nothing else.

Every metric is either *public* (a fact that no record influences, or that is public by declaration) or *released* (the
noised output of a charged release, or something computed from such outputs and public data alone). A name in neither
registry is refused: a value that nobody declared is a value that nobody accounted for. Wall-clock measurements of
clients' work are in neither on purpose: how long private data take is not protected by any release.

Names are matched by `fnmatch` patterns, case by case.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Real
from types import MappingProxyType
from typing import Literal

Kind = Literal["public", "released"]

_EVALUATION: dict[str, str] = {
    "accuracy": "of the released model on data declared public",
    "loss": "of the released model on data declared public",
    "evaluation/*": "of the released model on data declared public",
}

PUBLIC_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "privacy/mu": "spent by the account, over its lifetime",
        "privacy/epsilon": "of privacy/mu at the account's delta",
        "privacy/epsilon_run": "of this run's own spend alone",
        "privacy/epsilon_search": "of everything a search has spent, trainings of all its trials included",
        "privacy/epsilon_remaining": "of what is left: epsilon(sqrt(mu_B^2 - mu^2))",
        "privacy/share_spent": "spent part of the budget's mu^2",
        "privacy/share_run": "this run's part of the budget's mu^2",
        "search/candidates": "number of candidates",
        "search/candidate": "index of a trial's candidate",
        "search/evaluated": "candidates evaluated so far",
        "search/clients_answered": "clients that evaluated a candidate",
        "search/votes_per_client": "k of the vote",
        "search/sigma": "standard deviation of the noise in a vote, or on a coordinate of a released gradient",
        "search/pure_epsilon": "pure epsilon of a winner that is released alone",
        "search/scale": "scale of the Gumbel noise on a count that such a winner is chosen from",
        "search/held_out_sigma": "standard deviation of the noise in search/held_out",
        "search/clip": "bound on a user's gradient",
        "search/iterations": "planned number of releases",
        "search/points": "most points of an iteration",
        "round/clients": "clients whose sum was used",
        "round/records": "records of those clients, public by declaration",
        "round/sigma": "standard deviation of the noise on the round's sum",
        "round/clip": "clipping bound",
        "round/learning_rate": "of the server step",
        "round/lost": "1 for a round whose release was lost, else 0",
        **_EVALUATION,
    }
)

RELEASED_METRICS: Mapping[str, str] = MappingProxyType(
    {
        "search/noisy_votes": "noised number of votes of a candidate (step = candidate)",
        "search/winner": "index of the candidate released as the best",
        "search/noisy_gap": "noised votes of the winner minus those of the next",
        "search/failure_bound": "bound on naming a wrong winner, from the noisy gap",
        "search/held_out": "noised accuracy on held-out records, a release of its own",
        "search/gradient_norm": "L2 norm of the noised mean gradient",
        "search/noise_to_signal": "expected L2 norm of the noise over the norm of the noised gradient",
        "search/signal_to_noise": "estimate of the signal in the noised gradient over its noise",
        "search/score": "noised mean of the users' losses at the result, a release of its own",
        "search/step_norm": "L2 norm of a search's step, in the coordinates of its box",
        "iterate/*": "a searched setting, as released",
        "round/gradient_norm": "L2 norm of the noised mean gradient",
        "round/step_norm": "L2 norm of the server's step",
        "round/parameter_norm": "L2 norm of the parameters",
        "round/signal_to_noise": "estimate of the signal in the noised mean gradient over its noise",
        "round/momentum_signal_to_noise": "estimate of the signal in the momentum over its noise",
        "round/momentum_over_rho": "squared length of DP-FedSOFIM's momentum over its damping",
        "round/curvature_over_rho": "largest eigenvalue of DP-FedSOFIM's curvature of rank r over its damping",
        "round/noise_to_signal": "expected L2 norm of the noise over the norm of the noised sum",
        **_EVALUATION,
    }
)


class UndeclaredMetric(ValueError):  # noqa: N818
    """A metric that may not be shown. The message has its name, never its value."""


@dataclass(frozen=True)
class Declared:
    """Patterns of the metric names a run may show, each with its meaning."""

    public: Mapping[str, str]
    released: Mapping[str, str]

    def extended(
        self, public: Mapping[str, str] | None = None, released: Mapping[str, str] | None = None
    ) -> "Declared":
        """The same registry with further patterns, for an algorithm that lives outside this project."""
        return Declared({**self.public, **(public or {})}, {**self.released, **(released or {})})

    def check(self, kind: Kind, metrics: Mapping[str, object]) -> dict[str, float]:
        """The metrics as floats.

        Raises:
            UndeclaredMetric: a name not declared as `kind`, or a value that is not a finite number.
        """
        allowed, other = (self.public, self.released) if kind == "public" else (self.released, self.public)
        checked: dict[str, float] = {}
        for name, value in metrics.items():
            if not _matches(name, allowed):
                hint = (
                    f"it is declared as {'released' if kind == 'public' else 'public'}: log it as that"
                    if _matches(name, other)
                    else "declare it first if it is public or the output of a charged release"
                )
                raise UndeclaredMetric(f"The metric {name!r} is not declared {kind}; {hint}. Its value was dropped.")
            if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
                raise UndeclaredMetric(f"The metric {name!r} is not one finite number. Its value was dropped.")
            checked[name] = float(value)
        return checked


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


DECLARED = Declared(PUBLIC_METRICS, RELEASED_METRICS)
