"""Make one table: `python -m dpray.experiments.papers.dp_fedsofim paper`. Run again, it goes on where it stopped."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from dpray.experiments.papers import rows
from dpray.experiments.papers.dp_fedsofim import shown, shown_tuned, tables
from dpray.experiments.papers.dp_fedsofim.data import TASKS, ground
from dpray.experiments.papers.seeds import seeds_of
from dpray.platform.datasets import DatasetMissing


def main(arguments: list[str] | None = None) -> int:
    """Fill a table's CSV, and write it as text and as plots beside it."""
    parser = argparse.ArgumentParser(prog="python -m dpray.experiments.papers.dp_fedsofim", description=__doc__)
    parser.add_argument("table", choices=["paper", "tuned"], help="the paper's settings, or all methods tuned alike")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), help="all whose data is here by default")
    parser.add_argument("--seeds", type=seeds_of, default=tables.SEEDS, help="of `paper`: first:end, end left out")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--out", type=Path, default=Path("dp_fedsofim_results"), help="folder of CSV, text and plots")
    parser.add_argument("--float64", action="store_true", help="of `paper`: products as the product has them")
    parser.add_argument("--show", action="store_true", help="run nothing: write what is there")
    given = parser.parse_args(arguments)
    begun = time.monotonic()

    def told(text: str) -> None:
        print(f"{time.monotonic() - begun:6.0f} s  {text}", flush=True)

    tasks = given.tasks or list(TASKS)
    if not given.show:
        tasks = [task for task in tasks if _here(task, told)]
        if not tasks:
            return 1
    text = _paper(given, tasks, told) if given.table == "paper" else _tuned(given, tasks, told)
    print(text)
    return 0


def _paper(given: argparse.Namespace, tasks: list[str], told: Callable[[str], None]) -> str:
    if not given.show:
        todo = tables.jobs(tasks, given.seeds, single=not given.float64)
        tables.fill(todo, given.out, workers=given.workers, told=told)
    found = [row for row in rows.read(given.out / "paper.csv", tables.Row) if row.seed in given.seeds]
    text = shown.written(found)
    (given.out / "paper.md").write_text(text, encoding="utf-8")
    shown.draw(found, given.out / "paper.png")
    shown.draw_differences(found, given.out / "differences.png")
    shown.draw_curves(found, given.out / "curves.png")
    return text


def _tuned(given: argparse.Namespace, tasks: list[str], told: Callable[[str], None]) -> str:
    if not given.show:
        tables.fill_tuned(tables.tuned_jobs(tasks), given.out, workers=given.workers, told=told)
    found = rows.read(given.out / "tuned.csv", tables.Tuned)
    text = shown_tuned.written(found)
    (given.out / "tuned.md").write_text(text, encoding="utf-8")
    shown_tuned.draw(found, given.out / "tuned.png")
    return text


def _here(task: str, told: Callable[[str], None]) -> bool:
    try:
        ground(task)
    except DatasetMissing as error:
        told(f"`{task}` was skipped: {error}")
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(main())
