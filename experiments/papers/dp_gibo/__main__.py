"""Make one table: `python -m dpray.experiments.papers.dp_gibo lasso`. Run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from dpray.experiments.papers.dp_gibo.shown import draw, written
from dpray.experiments.papers.dp_gibo.tables import TABLES, available, fill, jobs, read
from dpray.experiments.papers.seeds import seeds_of


def main(arguments: list[str] | None = None) -> int:
    """Fill a table's CSV, and write it as text and as a plot beside it."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.papers.dp_gibo", description=__doc__)
    parser.add_argument("table", choices=sorted(TABLES))
    parser.add_argument("--seeds", type=seeds_of, help="first:end, end left out; the table's own by default")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, default=Path("dp_gibo_results"), help="folder of CSV, text and plot")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    table, missing = available(TABLES[given.table])
    seeds = given.seeds or table.seeds
    place = given.out / f"{table.name}.csv"

    def told(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    for sentence in missing:
        told(sentence)
    ran = fill(jobs(table, seeds), place, workers=given.workers, told=told)
    rows = [row for row in read(place) if row.seed in seeds]
    if not rows:
        told("Nothing was run.")
        return 1
    text = written(table, rows, missing)
    (given.out / f"{table.name}.md").write_text(text, encoding="utf-8")
    draw(table, rows, given.out / f"{table.name}.png")
    print(text)
    told(f"done: {ran} jobs in this run, {len(rows)} rows in {place}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
