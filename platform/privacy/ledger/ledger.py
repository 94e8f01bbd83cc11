"""The ledger: populations, their budgets, and every release ever charged to them.

Example:
    ledger = Ledger("sqlite:///dpray-ledger.db")
    population = ledger.population("ward-7", records_per_client=400)
    population.account("record", Budget(epsilon=6, delta=1e-5))
    run = population.run("first try")
    run.reserve(Plan((PlannedRelease("training", "clipped sum", Unit.RECORD, quanta, steps=70),)))
    release = run.release(ReleaseKey("training", "clipped sum", 0), {"theta": theta}, mechanism, share, compute)
    run.close()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from sqlalchemy import select

from dpray.platform.privacy.ledger import declaring, schema, standing
from dpray.platform.privacy.ledger.chain import Head, current_head
from dpray.platform.privacy.ledger.errors import LedgerError
from dpray.platform.privacy.ledger.plan import checked_name, whole
from dpray.platform.privacy.ledger.population import Population
from dpray.platform.privacy.ledger.storage import Storage
from dpray.platform.privacy.ledger.values import ValueFiles
from dpray.platform.privacy.ledger.verify import problems


class Ledger:
    """An open ledger. Safe to share between threads; processes open it by its URL each.

    Args:
        url: `sqlite:///path` (file 0600, durable on commit) or `postgresql://…` (needs dpray[postgres]).
        create: make what is not there. False, for commands that only look: a missing file, ledger or population is
            refused and nothing is created.
        values_dir: folder for values above 1 MiB; default: `<file>.values` beside an SQLite file, none (values stay in
            their rows) on PostgreSQL.
        wait: seconds to wait for another writer.

    Errors: LedgerError in a sentence.
    """

    def __init__(
        self,
        url: str = "sqlite:///dpray-ledger.db",
        create: bool = True,
        *,
        values_dir: Path | str | None = None,
        wait: float = 60.0,
    ) -> None:
        self._create = create
        self._storage = Storage(str(url), create=create, wait=wait)
        folder = Path(values_dir).expanduser().absolute() if values_dir is not None else _beside(self._storage.path)
        self._files = None if folder is None else ValueFiles(folder)

    def __repr__(self) -> str:
        return f"Ledger({self.url!r})"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the ledger is, without a password."""
        return self._storage.shown

    def population(
        self,
        name: str,
        *,
        records_per_user: int | None = None,
        records_per_client: int | None = None,
        declaration: Mapping[str, Any] | None = None,
    ) -> Population:
        """Open a population, or create it.

        Args:
            records_per_user, records_per_client: declared public maxima m. An account coarser than a release is charged
                m² times its μ². None leaves what was declared.
            declaration: public facts that bind the name to its data, public part and clients (`declaring.py`): recorded
                at first use, the same ever after. None leaves what was declared.

        Errors: LedgerError for another number or declaration than the one on record, a client larger than the number,
        or a missing population where nothing is created.
        """
        checked_name("population", name)
        given = declaring.Declared(
            None if records_per_user is None else whole("records_per_user", records_per_user, least=1),
            None if records_per_client is None else whole("records_per_client", records_per_client, least=1),
            declaring.text_of(declaration),
        )
        self._storage.write(lambda transaction: declaring.declare(transaction, name, given, create=self._create))
        return Population(name, self._storage, self._files)

    def populations(self) -> tuple[Population, ...]:
        """Every population, by name."""
        query = select(schema.populations.c.name).order_by(schema.populations.c.name)
        names = self._storage.read(lambda connection: connection.execute(query).scalars().all())
        return tuple(Population(name, self._storage, self._files) for name in names)

    def head(self) -> Head:
        """The end of the chain. Keep it where the ledger's writer cannot write: `verify` takes it as an anchor."""
        return self._storage.read(current_head)

    @property
    def identity(self) -> str:
        """What names this ledger, and every copy of it, for ever: the digest of its first entry, of a random number."""
        first = select(schema.entries.c.digest).where(schema.entries.c.sequence == 1)
        return str(self._storage.read(lambda connection: connection.execute(first).scalar_one_or_none()))

    def descent(self, passed: Iterable[int]) -> tuple[Head, str, dict[int, str]]:
        """(end of the chain, `identity`, digests of the entries `passed` by number), of one moment.

        Entries that the ledger lacks are left out. By these a keeper of an anchor can tell that the ledger went on.
        """
        return self._storage.read(lambda connection: (current_head(connection), *standing.descent(connection, passed)))

    def verify(self, anchors: Iterable[Head] = ()) -> tuple[str, ...]:
        """What is wrong with the ledger, in sentences; nothing if it is whole. See `verify.py` for what is found."""
        heads = tuple(anchors)
        try:
            damaged = self._storage.integrity()
            return damaged + self._storage.read(lambda connection: problems(connection, self._files, anchors=heads))
        except LedgerError as error:
            return (str(error),)

    def close(self) -> None:
        """Close the connections. Runs are closed by `Run.close`, not here."""
        self._storage.close()


def _beside(path: Path | None) -> Path | None:
    return None if path is None else path.with_name(path.name + ".values")
