"""The thread between a run and MLflow: the run appends to its spool and goes on, the courier brings it over in batches.

A batch leaves when enough entries wait or a few seconds have passed. While MLflow does not answer, entries wait in the
spool: one warning says so, attempts follow at growing intervals, and whatever is left at the end is sent when the run
is resumed, or by `replay`.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dpray.platform.tracking.address import LOCKED, check_uri, shown
from dpray.platform.tracking.delivery import ROOT, Delivery, RunMissing, Unreachable
from dpray.platform.tracking.spool import Entry, Spool

_CHUNK = 500
_LOCKED_TRIES, _LOCKED_PAUSE = 4, 0.25
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
# What MLflow and its parts print about a store that does not answer, or is new.
_NOISY = ("mlflow.store.db.utils", "alembic.runtime.migration", "urllib3.connectionpool", "mlflow.tracking.client")

log = logging.getLogger("dpray.tracking")


class Courier:
    """Carries one spool to one store.

    Args:
        spool: what the run writes.
        delivery: the way into the store.
        uri: address, for messages.
        batch: entries after which a batch leaves at once.
        interval: seconds after which a batch leaves anyway.
    """

    def __init__(self, spool: Spool, delivery: Delivery, uri: str, batch: int = 200, interval: float = 2.0) -> None:
        self.spool = spool
        self._delivery = delivery
        self._uri = shown(uri)
        self._batch, self._interval = batch, interval
        self._condition = threading.Condition()
        self._waiting = 0
        self._resume_at = 0.0
        # Tickets of `flush`: an attempt serves those that were asked for before it began.
        self._asked = self._served = 0
        self._stopping = False
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="dpray-tracking", daemon=True)
        self._thread.start()

    @property
    def delivered(self) -> bool:
        """Whether MLflow has everything."""
        return self.spool.cursor >= self.spool.end

    @property
    def run_ids(self) -> dict[str, str]:
        """MLflow's run ids by part, as far as they are known."""
        return self._delivery.run_ids

    def record(self, entry: Entry) -> None:
        """Spool one entry; returns before MLflow has it."""
        self.spool.append(entry)
        with self._condition:
            self._waiting += 1
            if self._waiting >= self._batch:
                self._condition.notify_all()

    def flush(self, timeout: float) -> bool:
        """Send what waits, now; returns whether MLflow has everything after at most `timeout` seconds."""
        with self._condition:
            if self.delivered or not self._thread.is_alive():
                return self.delivered
            self._asked += 1
            ticket = self._asked
            self._condition.notify_all()
            answered = self._condition.wait_for(lambda: self.delivered or self._served >= ticket, timeout)
        if not answered:
            self._warn(f"it did not answer within {timeout:g} s")
        return self.delivered

    def stop(self, timeout: float) -> bool:
        """Send what waits and end the thread; returns whether MLflow has everything."""
        delivered = self.flush(timeout)
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join(timeout=0.5)
        if not self._thread.is_alive():
            self.spool.close()
        return delivered

    def _work(self) -> None:
        pause = _FIRST_PAUSE
        with _silenced(threading.get_ident()):
            while (ticket := self._next()) is not None:
                reason = self._attempt()
                with self._condition:
                    if reason is None:
                        pause, self._resume_at = _FIRST_PAUSE, 0.0
                    else:
                        self._warn(reason)
                        self._resume_at, pause = time.monotonic() + pause, min(2 * pause, _LONGEST_PAUSE)
                    self._served = ticket
                    self._condition.notify_all()

    def _next(self) -> int | None:
        """Wait for something to do; returns the newest ticket, or None when the work ends."""
        with self._condition:
            while not self._condition.wait_for(self._urgent, self._interval):
                if not self.delivered and time.monotonic() >= self._resume_at:
                    break
            self._waiting = 0
            return None if self._stopping else self._asked

    def _urgent(self) -> bool:
        full = self._waiting >= self._batch and time.monotonic() >= self._resume_at
        return self._stopping or self._asked > self._served or full

    def _attempt(self) -> str | None:
        """Carry everything that waits; returns why that was not possible."""
        try:
            carry(self.spool, self._delivery)
        except Unreachable as error:
            return str(error)
        except Exception as error:  # a view of the run must not end the run
            log.debug("tracking failed", exc_info=True)
            return type(error).__name__
        if self._warned:
            self._warned = False
            log.warning("MLflow at %s is back; it has what was kept meanwhile.", self._uri)
        return None

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "MLflow at %s cannot be used (%s). The run goes on; what it shows is kept in %s and sent later.",
                self._uri,
                reason,
                self.spool.path,
            )


def carry(spool: Spool, delivery: Delivery) -> None:
    """Bring MLflow up to date with the spool.

    Raises:
        Unreachable: what was not sent stays in the spool.
    """
    for attempt in range(_LOCKED_TRIES):
        try:
            return _carry(spool, delivery)
        except Unreachable as error:
            delivery.disconnect()
            if str(error) != LOCKED or attempt == _LOCKED_TRIES - 1:
                raise
            time.sleep(_LOCKED_PAUSE * 2**attempt)
    return None


def _carry(spool: Spool, delivery: Delivery) -> None:
    delivery.connect()
    if delivery.identity != spool.identity:
        spool.adopt(delivery.identity)
    if not delivery.has_root:
        spool.advance(0)
    while spool.cursor < spool.end:
        entries, position = spool.read(_CHUNK)
        try:
            delivery.deliver(entries)
        except RunMissing:
            if spool.cursor == 0:
                raise Unreachable("it lost runs while they were written") from None
            delivery.disconnect()
            spool.advance(0)
            return _carry(spool, delivery)
        spool.advance(position)
    return None


def replay(folder: Path, uri: str) -> bool:
    """Send what a run that has ended left in its spool; returns False if the folder has no spool.

    Args:
        folder: the run's spool.
        uri: address of the store.

    Raises:
        TrackingAddressError: the address cannot work.
        Unreachable: nothing answers; the spool is as it was.
    """
    uri = check_uri(uri)
    if not (folder / "spool.jsonl").exists():
        return False
    spool = Spool(folder)
    try:
        header = spool.header
        delivery = Delivery(uri, folder, header["experiment"], header["run"], spool.identity)
        with _silenced(threading.get_ident()):
            carry(spool, delivery)
    finally:
        spool.close()
    return True


@contextlib.contextmanager
def _silenced(thread: int) -> Iterator[None]:
    """Keep MLflow's own messages about its store off the console, from one thread only."""

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    loggers = [logging.getLogger(name) for name in _NOISY]
    for logger in loggers:
        logger.addFilter(elsewhere)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(elsewhere)


__all__ = ["ROOT", "Courier", "carry", "replay"]
