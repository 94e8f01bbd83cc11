"""Seeds as the commands take them."""

from __future__ import annotations

import argparse


def seeds_of(text: str) -> range:
    """`first:end`, end left out.

    Raises:
        argparse.ArgumentTypeError: something else, or no seed in it.
    """
    try:
        first, end = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not first:end, as in 200:205") from None
    if not 0 <= first < end:
        raise argparse.ArgumentTypeError(f"{text!r} holds no seed: first must be below end")
    return range(first, end)
