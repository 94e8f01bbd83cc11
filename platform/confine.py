"""User code on private data, confined: whatever it does, an ordinary answer comes out and nothing else.

| what user code does                         | what the client answers             | what others can see |
|---------------------------------------------|-------------------------------------|---------------------|
| raises (SystemExit and KeyboardInterrupt too) | nothing: zero row, worst score     | nothing             |
| returns NaN, another shape, another type    | the same                            | nothing             |
| prints, warns, logs                         | as if it had not                    | nothing             |
| kills the process, or runs out of memory    | after two deaths on one key the same | timing              |
| never returns                               | killed at its time limit, then as above | timing          |

A death cannot be caught, so it is remembered: a *marker* names the client whose code is running, in a file beside the
journal that outlives the process (not the machine: a lost host is a dropout, not a crash). The rebuilt process reads it
and the journal counts it. After `PATIENCE` deaths of one client on one key its code is not run for that key again.
Nobody else's is skipped for it, or one client's record would silence others: a host with n clients dies at most
`deaths_at_most(n)` times on one key and then answers, and is waited for as long as that takes at most (`slowest`).

What a call changes in its process (random state of NumPy, Python and torch, NumPy's error state, torch's default type,
warnings, signal handlers, environment, working folder, umask) is put back after it, so that the next client's code runs
as if alone. What an object of the user's keeps for itself is not.

*Guarantee.* The content of an exception (message, traceback, cause) is never formatted, stored or sent. Not covered:
timing, files or sockets that user code opens itself, threads of its own that go on after it has returned, and code
that rewrites the modules around it on purpose.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.random import mtrand

T = TypeVar("T")

PATIENCE = 2
"""Deaths of the process in one client's code, on one key, before that code is skipped."""
RESTART = 20.0
"""Seconds that a new process and the loading of its records may take, as counted by `slowest`."""
EVERYONE = "*"
"""The marker of a pass over all clients of a host at once; one death sends them one by one."""
_RECORD = 4096
_SIGNALS = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)
_HUSHED = threading.RLock()


def silence() -> None:
    """Send standard output and error of this process to nowhere, for good: Ray would forward them to the driver."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (1, 2):
        os.dup2(nowhere, number)
    os.close(nowhere)
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - stays open as long as the process lives
    sys.stderr = sys.stdout


@contextmanager
def hushed() -> Iterator[None]:
    """Send what is printed, warned or logged inside the block to nowhere, in a process that may speak otherwise.

    C libraries and child processes are silenced, too, and so is everything else in the process meanwhile; threads take
    turns. Not covered: what a thread or child process left running says afterwards, and streams opened inside.
    """
    with _HUSHED, warnings.catch_warnings(), open(os.devnull, "w", encoding="utf-8") as nowhere:
        warnings.simplefilter("ignore")
        streams, disabled = (sys.stdout, sys.stderr), logging.root.manager.disable
        _flush(*streams)
        saved = [os.dup(number) for number in (1, 2)]
        try:
            for number in (1, 2):
                os.dup2(nowhere.fileno(), number)
            sys.stdout = sys.stderr = nowhere
            logging.disable(sys.maxsize)
            yield
        finally:
            logging.disable(disabled)
            # What waits in a buffer must be written while its file descriptor still leads nowhere.
            _flush(sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__, *streams)
            sys.stdout, sys.stderr = streams
            for number, kept in zip((1, 2), saved, strict=True):
                os.dup2(kept, number)
                os.close(kept)


def _flush(*streams: object) -> None:
    """Flush Python's streams and those of the C library."""
    for stream in streams:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[attr-defined]
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).fflush(None)


def brief(key: str) -> str:
    """A key that fits a marker beside a client's name, whatever its length: itself, or its digest."""
    return key if len(key.encode()) <= _RECORD // 4 else f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


class Marker:
    """The file that says on which key and in whose code this process is; 0600, not synced: it outlives a process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def left(self) -> tuple[str, str] | None:
        """(key, client) that a dead process left behind; None if it ended in peace."""
        text = os.pread(self._file, _RECORD, 0).partition(b"\0")[0].decode(errors="replace")
        key, separator, client = text.rpartition("\n")
        return (key, client) if separator else None

    def set(self, key: str, client: str) -> None:
        """Say whose code starts now."""
        os.pwrite(self._file, f"{key}\n{client}".encode()[: _RECORD - 1] + b"\0", 0)

    def clear(self) -> None:
        """Say that it has ended."""
        os.pwrite(self._file, b"\0", 0)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def deaths_at_most(clients: int) -> int:
    """How often a host of so many clients can die of user code on one key: once in the pass over all, then each."""
    return 1 + PATIENCE * clients


def rehearsal_deaths(clients: int, candidates: int) -> int:
    """The same for a rehearsal: each client once with all candidates together, then with each of them alone."""
    return clients * (1 + PATIENCE * candidates)


def slowest(clients: int, limit: float) -> float:
    """Seconds that user code on a host can take over one key, by public numbers only: then it has answered.

    Every pass takes at most `limit` a client, and each death costs a pass and the start of a new process.
    """
    return (1 + deaths_at_most(clients)) * (clients * limit + RESTART)


@contextmanager
def _put_back() -> Iterator[None]:
    """Put back what user code may change in its process without meaning harm. Nothing here raises."""
    restored = [_random(), _handlers(), _environment(), _folder(), _torch()]
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            yield
    finally:
        for restore in (each for group in restored for each in group):
            with suppress(Exception):  # a folder that is gone, a generator that was replaced
                restore()


Restores = list[Callable[[], object]]


def _random() -> Restores:
    generator, legacy, plain = mtrand.get_bit_generator(), np.random.get_state(), random.getstate()  # noqa: NPY002
    return [
        lambda: mtrand.set_bit_generator(generator),
        lambda: np.random.set_state(legacy),  # noqa: NPY002
        lambda: random.setstate(plain),
    ]


def _torch() -> Restores:
    """Torch's generator and switches; a torch that is first imported by user code gets those of a fresh one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return [lambda: sys.modules["torch"].manual_seed(0), *_fresh_switches()]
    state, kind, threads = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
    gradients, anomaly = torch.is_grad_enabled(), torch.is_anomaly_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    precision, onednn = torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled
    return [
        lambda: torch.set_rng_state(state),
        lambda: torch.set_default_dtype(kind),
        lambda: torch.set_num_threads(threads),
        lambda: torch.set_grad_enabled(gradients),
        lambda: torch.autograd.set_detect_anomaly(anomaly),
        lambda: torch.use_deterministic_algorithms(deterministic, warn_only=warns),
        lambda: torch.set_float32_matmul_precision(precision),
        lambda: setattr(torch.backends.mkldnn, "enabled", onednn),
        lambda: torch.set_flush_denormal(False),  # cannot be asked; nothing of ours sets it
    ]


def _fresh_switches() -> Restores:
    return [
        lambda: sys.modules["torch"].set_grad_enabled(True),
        lambda: sys.modules["torch"].set_default_dtype(sys.modules["torch"].float32),
        lambda: sys.modules["torch"].autograd.set_detect_anomaly(False),
        lambda: sys.modules["torch"].use_deterministic_algorithms(False),
        lambda: sys.modules["torch"].set_float32_matmul_precision("highest"),
        lambda: sys.modules["torch"].set_flush_denormal(False),
    ]


def _handlers() -> Restores:
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:  # never so outside the main thread, where none can be set
                signal.signal(number, handler)

    return [restore]


def _environment() -> Restores:
    before, mask = dict(os.environ), os.umask(0o077)
    os.umask(mask)

    def restore() -> None:
        if dict(os.environ) != before:
            os.environ.clear()
            os.environ.update(before)

    return [restore, lambda: os.umask(mask)]


def _folder() -> Restores:
    """The working folder, by descriptor: it may have been renamed, or be gone already."""
    try:
        before = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return []
    return [lambda: os.fchdir(before), lambda: os.close(before)]


class Confinement:
    """Runs the user's code for one key.

    Args:
        key: the release or rehearsal that is asked for, as `brief` has it.
        marker: where deaths are noted; None: nowhere.
        deaths: earlier deaths of the process on this key, by client.
        limit: seconds one call may take; None: no limit. The kernel's alarm clock ends the process (SIGALRM), whatever
            it is doing.
        patience: deaths in one client's code before it is skipped.
    """

    def __init__(
        self,
        key: str,
        marker: Marker | None = None,
        deaths: Mapping[str, int] | None = None,
        limit: float | None = None,
        patience: int = PATIENCE,
    ) -> None:
        self._key, self._marker, self._limit, self._patience = key, marker, limit, patience
        self._deaths = dict(deaths or {})

    def skips(self, client: str) -> bool:
        """Whether this client's code is not to be run for this key any more."""
        allowed = 1 if client == EVERYONE else self._patience
        return self._deaths.get(client, 0) >= allowed

    def run(self, client: str, call: Callable[[], T]) -> T | None:
        """The call's result, or None for whatever else may happen. The result is checked inside `call`, too."""
        if self.skips(client):
            return None
        with _put_back(), self._watched(client):
            try:
                return call()
            except BaseException:  # SystemExit and KeyboardInterrupt of user code are answers like all others
                return None

    @contextmanager
    def _watched(self, client: str) -> Iterator[None]:
        if self._marker is not None:
            self._marker.set(self._key, client)
        if self._limit is not None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, self._limit)
        try:
            yield
        finally:
            if self._limit is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if self._marker is not None:
                self._marker.clear()
