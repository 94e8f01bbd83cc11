"""The benchmark of DP-HYPE's local search runs, and races equal work. Nothing here is timed."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from dpray.experiments.benchmarks import hype, hype_client, hype_vote
from dpray.trainers.local_search import StackedMLP


def test_the_paper_s_grid_has_a_hundred_candidates() -> None:
    every = hype_vote.grid(1000)
    assert len({tuple(each.items()) for each in every}) == len(every) == 100


def test_quick_run_prints_every_contestant(capsys: pytest.CaptureFixture[str]) -> None:
    hype.main(["--quick", "--only", "client"])
    printed = capsys.readouterr().out
    for name in (hype_client.PLAIN, *hype_client.BOUNDS):
        assert f"| {name} | " in printed


def test_different_work_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubled(self: StackedMLP, *arguments: object) -> object:
        gradients, finite = once(self, *arguments)  # type: ignore[arg-type]
        return [2 * each for each in gradients], finite

    once = StackedMLP.gradients
    monkeypatch.setattr(StackedMLP, "gradients", doubled)
    with pytest.raises(ArithmeticError, match="differ from the plain loop"):
        hype_client.same_work(replace(hype_client.QUICK, epochs=3))


def test_a_small_vote_on_adult_runs_through_tune(ray_local: ModuleType, data_dir: Path) -> None:
    printed = "\n".join(hype_vote.rows(hype_vote.QUICK, data_dir))
    assert "| 48 | 2 | " in printed
    assert "12 of 12 candidates were evaluated" in printed


def test_without_adult_the_vote_is_left_out_with_the_reason(tmp_path: Path) -> None:
    assert "adult.npz" in " ".join(hype_vote.rows(hype_vote.QUICK, tmp_path))
