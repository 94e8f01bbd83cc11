"""Make one table: `python -m dpray.experiments.papers.dp_hype adult`. Run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_hype.shown import draw, gathered, order, written
from dpray.experiments.papers.dp_hype.tables import TABLES, Choice, Worth, fill, jobs
from dpray.experiments.papers.seeds import seeds_of
from dpray.platform.datasets import DatasetMissing

_CACHE = Path("~/.cache/dpray/dp_hype")


def main(arguments: list[str] | None = None) -> int:
    """Fill a table's CSVs, and write it as text and as a plot beside them."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.papers.dp_hype", description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--seeds", type=seeds_of, help="first:end, end left out; the table's own by default")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("dp_hype_results"), help="folder of CSVs, text and plot")
    parser.add_argument("--cache", type=Path, default=_CACHE, help=f"folder of local scores, {_CACHE} by default")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    table = TABLES[given.table]
    seeds = given.seeds or table.seeds

    def told(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    todo = jobs(table, seeds, given.cache.expanduser())
    try:
        ran = fill(todo, given.out, table.name, workers=given.workers, told=told)
    except DatasetMissing as error:
        told(f"{table.title} was skipped: {error}")
        return 1
    worths = [row for row in rows.read(given.out / f"{table.name}_candidates.csv", Worth) if row.seed in seeds]
    choices = [row for row in rows.read(given.out / f"{table.name}.csv", Choice) if row.seed in seeds]
    found = order(gathered(worths, choices))
    text = written(table, found)
    (given.out / f"{table.name}.md").write_text(text, encoding="utf-8")
    draw(table, found, given.out / f"{table.name}.png")
    print(text)
    told(f"done: {ran} populations measured in this run, {len(worths)} candidates' rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
