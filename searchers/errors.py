"""What searches refuse: exceptions whose message is a sentence (what was given, what is allowed, what to do)."""

from __future__ import annotations


class SearchError(RuntimeError):
    """The search cannot do what was asked."""


class SearchUnfinished(SearchError):  # noqa: N818 - an outcome that callers handle, and reads as such
    """The search has not ended with a result (yet); the message says how far it came."""


class SpaceError(ValueError):
    """The space cannot be searched; the message names the key by its path."""
