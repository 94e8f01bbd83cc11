"""Clients on Ray: the actor that hosts them, and how it is started.

The constructor keeps its argument and does nothing, so that it cannot fail; records are loaded on the first call, from
an object reference (a pool's shard, a read-only view of shared memory) or by the site's loader. Ray rebuilds a lost
actor from the same argument (`max_restarts=-1`) and the journal on disk holds what it must not forget; Ray never
repeats a call by itself (`max_task_retries=0`), because calls draw noise.

*Guarantee.* No method raises: what could hold private values, an exception's text above all, is not put into Ray's
hands, and the process writes nothing to its standard streams, which Ray forwards. Ray itself is inside the trust
boundary: whoever administers it can read an actor's memory.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from threadpoolctl import threadpool_limits

from dpray.platform.cohort.client import IntArray, Records, Stack, site_stack
from dpray.platform.cohort.errors import CohortError
from dpray.platform.cohort.host import Host, HostSpec
from dpray.platform.cohort.layout import CPU
from dpray.platform.cohort.masked.messages import MaskedInput, Parcel, Roster, Shares, Unmasking
from dpray.platform.cohort.masking import MaskingHost
from dpray.platform.cohort.request import Message, Prepared, Ready, Refusal, Request
from dpray.platform.cohort.ticket import JournalRefused, LedgerEnd
from dpray.platform.confine import silence
from dpray.platform.privacy.ledger import Head, ReleaseKey

T = TypeVar("T")


@dataclass(frozen=True)
class PoolShard:
    """Loads a pool host's records from Ray's object store: stacked arrays, without a copy."""

    x: Any
    y: Any
    offsets: IntArray

    def __call__(self) -> Stack:
        """The shard; its arrays are read-only views of shared memory."""
        x, y = ray.get([self.x, self.y])
        return Stack(x, y, self.offsets)


@dataclass(frozen=True)
class SiteShard:
    """Loads a site's records where the actor is."""

    load: Callable[[], Records]
    records: int

    def __call__(self) -> Stack:
        """The site's one shard."""
        return site_stack(self.load, self.records)


class ClientHost:
    """The Ray actor around a `Host`; every method returns the host's answer or a `Refusal`."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._host: Host | None = None

    def ready(self) -> Ready | Refusal:
        """Load, if that has not been done, and say so."""
        return self._answer(lambda host: host.ready())

    def contribute(self, request: Request) -> Message | Refusal:
        """`Host.contribute`."""
        return self._answer(lambda host: host.contribute(request))

    def prepare(self, request: Request) -> Prepared | Refusal:
        """`Host.prepare`."""
        return self._answer(lambda host: host.prepare(request))

    def reveal(
        self,
        run: tuple[str, str],
        key: ReleaseKey,
        participants: tuple[str, ...],
        head: Head,
        lineage: Mapping[int, str],
    ) -> list[Message] | Refusal:
        """`Host.reveal`."""
        return self._answer(lambda host: host.reveal(run, key, participants, head, lineage))

    def share(self, nonce: str, told: Mapping[int, Roster]) -> list[Shares] | Refusal:
        """`MaskingHost.share`."""
        return self._answer(lambda host: _masking(host).share(nonce, told))

    def mask(self, nonce: str, told: Mapping[int, Parcel]) -> list[MaskedInput] | Refusal:
        """`MaskingHost.mask`."""
        return self._answer(lambda host: _masking(host).mask(nonce, told))

    def unmask(self, request: Request) -> list[Unmasking] | Refusal:
        """`MaskingHost.unmask`."""
        return self._answer(lambda host: _masking(host).unmask(request))

    def evaluate_all(self, run: tuple[str, str], candidates: Mapping[int, Mapping[str, Any]]) -> int | Refusal:
        """`Host.evaluate_all`."""
        return self._answer(lambda host: host.evaluate_all(run, candidates))

    def forget(self, run: tuple[str, str]) -> Refusal | None:
        """`Host.forget`."""
        return self._answer(lambda host: host.forget(run))

    def anchor(self) -> Head | Refusal | None:
        """`Host.anchor`."""
        return self._answer(lambda host: host.anchor())

    def advance(self, end: LedgerEnd) -> Refusal | None:
        """`Host.advance`."""
        return self._answer(lambda host: host.advance(end))

    def _answer(self, call: Callable[[Host], T]) -> T | Refusal:
        try:
            if self._host is None:
                self._host = self._open()
            return call(self._host)
        except JournalRefused as refused:
            return Refusal(refused.kind, refused.sentence, refused.seen)
        except CohortError as refused:
            return Refusal("load" if self._host is None else "query", str(refused))
        except sqlite3.Error as error:  # of the site's file: user code's errors do not come this far
            return Refusal(
                "failed",
                f"A site's journal could not be written or read ({type(error).__name__}), and no release was made by "
                "its clients. See whether the disk at the site is full.",
            )
        except BaseException as error:  # its text may hold private values; its type is one of this package's own making
            return Refusal("failed", f"A host of clients failed ({type(error).__name__}); no release was made by it.")

    def _open(self) -> Host:
        silence()
        host = Host(self._spec) if self._spec.masked is None else MaskingHost(self._spec)
        threadpool_limits(limits=1)
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(1)
        return host


def _masking(host: Host) -> MaskingHost:
    if not isinstance(host, MaskingHost):
        raise CohortError("These clients answer under a trusted sum only.")
    return host


def start_host(spec: HostSpec, *, namespace: str, needs: Mapping[str, float]) -> Any:
    """Create the actor of a host, named `spec.name` in `namespace`; it dies with the job.

    Args:
        spec: what it is made of.
        namespace: the cohort's own.
        needs: a CPU for a host of a pool; the labels that pin a site's actor (no CPU, or the site's trials and its
            clients would wait for each other).
    """
    labels = {name: amount for name, amount in needs.items() if name != CPU}
    placed: dict[str, Any] = {"num_cpus": needs.get(CPU, 0), "resources": labels}
    return (
        ray.remote(ClientHost)
        .options(name=spec.name, namespace=namespace, max_restarts=-1, max_task_retries=0, **placed)
        .remote(spec)
    )
