"""What searches refuse: exceptions whose message is a sentence (what was given, what is allowed, what to do)."""

from __future__ import annotations

from collections.abc import Mapping


class SearchError(RuntimeError):
    """The search cannot do what was asked."""


class SearchUnfinished(SearchError):  # noqa: N818 - an outcome that callers handle, and reads as such
    """The search has not ended with a result (yet); the message says how far it came."""


class SpaceError(ValueError):
    """The space cannot be searched; the message names the key by its path."""


class EvaluateAgain(SearchError):  # noqa: N818 - a request, not a fault
    """What a step has evaluated is no longer there (the process that held it died): its missing points come again."""


def unfinished(failure: Exception | None, reason: str | None, progress: Mapping[str, int] | None) -> SearchUnfinished:
    """The error of a search that is asked for a result it does not have.

    Args:
        failure: of its release, if that is why.
        reason: why it ended, if it has.
        progress: its counts; None before it has started.
    """
    if failure is not None:
        return SearchUnfinished(f"The search has no result, because its release failed: {failure}")
    if reason is not None:
        return SearchUnfinished(f"The search ended without a result: {reason}")
    if progress is None:
        return SearchUnfinished("The search has not started: run it with tune.Tuner(search.trainable(), …).fit().")
    return SearchUnfinished(
        f"The search has not finished: {progress['evaluated']} of {progress['planned']} evaluations are done. "
        "Run it on with TuneConfig(num_samples=search.num_samples)."
    )
