"""The paper's grid: 100 candidates, most of them hopeless by design.

| symbol | meaning                                                    | values                                         |
|--------|------------------------------------------------------------|------------------------------------------------|
| η      | learning rate of SGD                                       | .5, .1, .05, 5e-4, 1e-4, 1e-6 … 1e-8           |
| γ      | factor on the rate after every local epoch (StepLR)        | 0, .1, .25, .99, 1                             |
| β      | momentum                                                   | 0, .9                                          |
| p      | number of candidates                                       | 100                                            |
"""

from __future__ import annotations

from itertools import product

Config = dict[str, float]

RATES = (0.5, 0.1, 0.05, 5e-4, 1e-4, 1e-6, 5e-7, 1e-7, 5e-8, 1e-8)
GAMMAS = (0.0, 0.1, 0.25, 0.99, 1.0)
MOMENTA = (0.0, 0.9)
GRID: tuple[Config, ...] = tuple(
    {"learning_rate": rate, "gamma": gamma, "momentum": momentum}
    for rate, gamma, momentum in product(RATES, GAMMAS, MOMENTA)
)
"""H_1 … H_p, in the order of the authors' code."""

SANE = tuple(number for number, config in enumerate(GRID) if config["learning_rate"] >= 0.05 and config["gamma"] > 0)
"""What somebody who has trained a network before would draw from: rates .5, .1 and .05, any γ but 0, any β."""

SLOW = 1e-6
"""Rates up to this one hardly leave where they start: even with β = .9 a step is 10·η times the largest gradient at
most, and a whole training moves the parameters by some thousandths. They may share one training, of rate 0."""


def standing_for(config: Config, slow: float = SLOW) -> Config:
    """The candidate whose training stands for this one's: itself, or for a slow one the one that does not move."""
    return {"learning_rate": 0.0, "gamma": 1.0, "momentum": 0.0} if config["learning_rate"] <= slow else config
