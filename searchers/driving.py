"""Drive a search without Tune, in this process and under a time limit: for tests and for trying a searcher out."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from ray.tune.search import Searcher

from dpray.searchers.base import PrivateSearcher
from dpray.searchers.trial import CANDIDATE, RESERVED


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Result of a call, or a failed test if it has not returned in time (it is left to end with the process)."""
    outcome: dict[str, Any] = {}

    def run() -> None:
        try:
            outcome["value"] = call()
        except BaseException as error:  # handed to the test
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        pytest.fail(f"The experiment did not end within {seconds:g} s.")
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def drive(
    search: PrivateSearcher,
    *,
    at_once: int = 1,
    stop_after: int | None = None,
    fails: Callable[[str, dict[str, Any]], bool] = lambda trial, config: False,
    result: Callable[[int], dict[Any, Any]] = lambda index: {"evaluated": 1},
    prefix: str = "trial",
) -> list[tuple[int, str]]:
    """Drive a search as Tune does, evaluating in this process, until it ends or `stop_after` trials have ended.

    Returns:
        The points in the order they were suggested. Fails the test where Tune would hang: the search answers None with
        nothing in flight, or has not ended after `num_samples` suggestions.
    """
    search.set_max_concurrency(max(at_once, search.max_concurrent) if at_once > 1 else search.max_concurrent)
    live: list[tuple[str, dict[str, Any]]] = []
    points: list[tuple[int, str]] = []
    trainable, ended = search.trainable(), 0
    allowance = search.num_samples
    while stop_after is None or ended < stop_after:
        suggestion = None
        if len(live) < at_once:
            name = f"{prefix}{len(points)}"
            suggestion = search.suggest(name)
            if suggestion == Searcher.FINISHED:
                assert not live, "The search finished while trials were in flight."
                break
            if isinstance(suggestion, dict):
                points.append(point(suggestion))
                live.append((name, suggestion))
                assert len(points) <= allowance, f"The search has not ended after num_samples={allowance} suggestions."
                continue
        if not live:
            pytest.fail("The search answered None with nothing in flight: Tune would wait for ever.")
        name, config = live.pop(0)
        if fails(name, config):
            search.on_trial_complete(trial_id=name, result=None, error=True)
        else:
            run_trial(trainable, config)
            search.on_trial_complete(trial_id=name, result=result(ended), error=False)
        ended += 1
    return points


def run_trial(trainable: type, config: dict[str, Any]) -> dict[str, Any]:
    """Run a trial's step in this process."""
    trial: Any = object.__new__(trainable)
    trial.config = dict(config)
    report: dict[str, Any] = trial.step()
    return report


def point(config: Mapping[str, Any]) -> tuple[int, str]:
    """Number and values of a suggested point, comparable."""
    return config[CANDIDATE], json.dumps({k: v for k, v in config.items() if k not in RESERVED}, sort_keys=True)
