"""Statements of the hot path: SQLAlchemy Core, compiled once per database and handed straight to its driver.

A release runs about twenty small statements; executing them through Core costs more than the disk does. The SQL and the
order of its parameters still come from Core, so that there is one definition for every database.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.sql.expression import ClauseElement

Parameters = Mapping[str, Any]


class Prepared:
    """A statement whose parameters are all named. Rows come back as named tuples of what the driver returned.

    Errors: those of the driver, unwrapped; `Storage` turns them into sentences.
    """

    def __init__(self, statement: ClauseElement, *columns: str) -> None:
        self._statement = statement
        self._row: Any = namedtuple("Row", columns) if columns else None
        self._compiled: dict[str, tuple[str, tuple[str, ...] | None]] = {}

    def run(self, connection: Connection, parameters: Parameters) -> None:
        """Execute it once."""
        self._cursor(connection, parameters).close()

    def many(self, connection: Connection, parameters: Sequence[Parameters]) -> None:
        """Execute it for each."""
        for each in parameters:
            self.run(connection, each)

    def one(self, connection: Connection, parameters: Parameters) -> Any:
        """The first row, or None."""
        cursor = self._cursor(connection, parameters)
        row = cursor.fetchone()
        cursor.close()
        return None if row is None or self._row is None else self._row._make(row)

    def all(self, connection: Connection, parameters: Parameters) -> list[Any]:
        """Every row."""
        cursor = self._cursor(connection, parameters)
        rows = cursor.fetchall()
        cursor.close()
        return [] if self._row is None else [self._row._make(row) for row in rows]

    def _cursor(self, connection: Connection, parameters: Parameters) -> Any:
        dialect = connection.dialect
        known = self._compiled.get(dialect.name)
        if known is None:
            compiled = self._statement.compile(dialect=dialect)
            order = getattr(compiled, "positiontup", None)
            known = self._compiled[dialect.name] = (str(compiled), None if order is None else tuple(order))
        sql, order = known
        cursor = connection.connection.cursor()
        cursor.execute(sql, dict(parameters) if order is None else tuple([parameters[name] for name in order]))
        return cursor
