"""Make one table: `python -m dpray.experiments.papers.dp_hype adult`. Run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_hype import private, private_shown, shown
from dpray.experiments.papers.dp_hype.tables import TABLES, Choice, Worth, fill, jobs
from dpray.experiments.papers.seeds import seeds_of
from dpray.platform.datasets import DatasetMissing

_CACHE = Path("~/.cache/dpray/dp_hype")
_PRIVATE = "private"


def main(arguments: list[str] | None = None) -> int:
    """Fill a table's CSVs, and write it as text and as a plot beside them."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.papers.dp_hype", description=__doc__)
    parser.add_argument("table", choices=[*sorted(TABLES), _PRIVATE])
    parser.add_argument("--seeds", type=seeds_of, help="first:end, end left out; the table's own by default")
    parser.add_argument("--workers", type=int, default=2, help=f"processes; `{_PRIVATE}` has Ray's two")
    parser.add_argument("--out", type=Path, default=Path("dp_hype_results"), help="folder of CSVs, text and plot")
    parser.add_argument("--cache", type=Path, default=_CACHE, help=f"folder of local scores, {_CACHE} by default")
    parser.add_argument("--show", action="store_true", help="run nothing: write what is there")
    given = parser.parse_args(arguments)
    begun = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    try:
        text = _trained(given, told) if given.table == _PRIVATE else _voted(given, told)
    except DatasetMissing as error:
        told(f"`{given.table}` was skipped: {error}")
        return 1
    (given.out / f"{given.table}.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _voted(given: argparse.Namespace, told: Callable[[str], None]) -> str:
    table = TABLES[given.table]
    seeds = given.seeds or table.seeds
    todo = [] if given.show else jobs(table, seeds, given.cache.expanduser())
    ran = fill(todo, given.out, table.name, workers=given.workers, told=told) if todo else 0
    worths = [row for row in rows.read(given.out / f"{table.name}_candidates.csv", Worth) if row.seed in seeds]
    choices = [row for row in rows.read(given.out / f"{table.name}.csv", Choice) if row.seed in seeds]
    found = shown.order(shown.gathered(worths, choices))
    shown.draw(table, found, given.out / f"{table.name}.png")
    told(f"done: {ran} populations measured in this run, {len(choices)} rows of choices")
    return shown.written(table, found)


def _trained(given: argparse.Namespace, told: Callable[[str], None]) -> str:
    seeds = given.seeds or private.SEEDS
    place = given.out / f"{_PRIVATE}.csv"
    ran = 0
    if not given.show:
        with private.ray_for_all():
            todo = private.jobs(seeds)
            ran = rows.fill(todo, place, private.Trained, private.job_of, private.trained, every=1, told=told)
    found = [row for row in rows.read(place, private.Trained) if row.seed in seeds]
    private_shown.draw(found, given.out / f"{_PRIVATE}.png")
    told(f"done: {ran} populations trained on in this run, {len(found)} rows")
    return private_shown.written(found)


if __name__ == "__main__":
    raise SystemExit(main())
