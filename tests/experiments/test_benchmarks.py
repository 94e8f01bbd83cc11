"""The benchmark runs, and races contestants that do the same work. Nothing here is timed."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from dpray.experiments.benchmarks import opacus_sum, rounds, scale, secure_sum, training, work
from dpray.experiments.benchmarks.measure import Contestant, Round, family, race
from dpray.platform.cohort.masked.aggregator import Aggregator
from dpray.platform.cohort.masked.party import Party
from dpray.trainers.models import LinearHead


def test_the_loop_and_the_model_compute_the_same_sum() -> None:
    work.same_work(work.clients(3, 7), LinearHead(work.FEATURES, work.CLASSES))


def test_different_work_is_noticed() -> None:
    class Unclipped(LinearHead):
        def clipped_sum(self, theta, records, clip):  # type: ignore[no-untyped-def]
            return super().clipped_sum(theta, records, np.inf)

    with pytest.raises(ArithmeticError, match="different sums"):
        work.same_work(work.clients(3, 7), Unclipped(work.FEATURES, work.CLASSES))


def test_only_quiet_bursts_count_where_there_are_enough() -> None:
    contestant = Contestant("made up", lambda count: [])
    contestant.bursts = [(0.0, (Round(1.0, 0.5),))] * 3 + [(1.0, (Round(9.0),))] * 5
    assert contestant.timing().seconds == 1.0
    assert contestant.timing().ledger == 0.5
    contestant.bursts = contestant.bursts[1:]
    assert contestant.timing().seconds == 9.0
    assert contestant.timing().disturbed


def test_a_race_gives_every_contestant_its_bursts() -> None:
    contestants = [Contestant(name, lambda count: [Round(1.0)] * count) for name in ("a", "b")]
    race(contestants, rounds=4, wanted=10**9, cycles=2)
    assert [[len(made) for _, made in each.bursts] for each in contestants] == [[4, 4], [4, 4]]


def test_a_race_that_takes_too_long_ends_after_a_whole_cycle() -> None:
    contestants = [Contestant(name, lambda count: [Round(1.0)] * count) for name in ("a", "b")]
    race(contestants, rounds=4, wanted=10**9, cycles=9, limit=0.0)
    assert [len(each.bursts) for each in contestants] == [1, 1]


def test_the_family_is_this_process_and_its_descendants() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in family()
        assert family(child.pid) == [child.pid]
        child.communicate(b"\n")
    assert child.pid not in family()


def test_quick_run_prints_every_ratio(ray_local: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rounds.main(["--quick", "--only", "round", "--only", "step"])
    printed = capsys.readouterr().out
    for name in (rounds.YARDSTICK, rounds.WITHOUT, rounds.DURABLE, rounds.TRAINER, "server step in place"):
        assert f"| {name} | " in printed
    assert "Ledger's share of a round" in printed


def test_many_clients_are_measured_in_memory_and_time(ray_local: ModuleType) -> None:
    found = scale.measure(count=6, records=4, rounds=2)
    assert set(found["pss"]) == {"starting", "in rounds"}
    assert found["pss"]["in rounds"]["driver"] > 0
    assert all(timing["seconds"] > 0 for timing in found["rounds"].values())


@pytest.mark.parametrize("lost", [0, 5])
def test_the_masked_sum_that_is_timed_is_the_sum(lost: int) -> None:
    phases: list[float] = []
    assert secure_sum.whole(secure_sum.CLIENTS - 5, lost, phases).seconds == pytest.approx(sum(phases))


def test_what_a_masking_client_costs_grows_with_its_neighbours_not_with_the_cohort() -> None:
    small, large = secure_sum.cost(100), secure_sum.cost(1000)
    assert small.up < large.up < 5 * small.up
    assert small.down < large.down < 5 * small.down


def test_a_client_of_the_sample_sends_what_it_would_in_the_whole_graph() -> None:
    """All 40 clients run, against one and its neighbours: the same bytes but for a set of members, a bit a client."""
    number, quorum, colluders = 40, 38, 2
    sampled = secure_sum.cost(number)
    asked = secure_sum.session(number, quorum, colluders, sampled.found.degree)
    parties, server = [Party(asked, each) for each in range(number)], Aggregator(asked)
    sent, told = [party.advertise() for party in parties], {}
    up = secure_sum.wire(sent[0])
    for method, tell in (("share", "rosters"), ("mask", "parcels"), ("unmask", "survivors")):
        for message in sent:
            server.receive(message)
        told = getattr(server, tell)()
        extra = (np.arange(secure_sum.CANDIDATES),) if method == "mask" else ()
        sent = [getattr(party, method)(told if method == "unmask" else told[party.number], *extra) for party in parties]
        up += secure_sum.wire(sent[0])
    assert sampled.up == pytest.approx(up / 1e3, rel=0.01)
    assert sampled.bits == 32


def test_bytes_are_counted_as_bytes() -> None:
    assert secure_sum.wire((b"abc", 7, (b"d",))) == 8
    with pytest.raises(TypeError):
        secure_sum.wire("text")


def test_the_training_benchmark_prints_its_ratios_and_whom_it_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    training.main(["--quick", "--only", "head", "--only", "cnn"])
    printed = capsys.readouterr().out
    assert printed.count(f"| {training.PLAIN} | ") == printed.count(f"| {training.OURS} | ") == 2
    assert "Opacus 1.6, ghost clipping: left out, because `--opacus PYTHON` was not given." in printed


def test_rounds_beside_peers(ray_local: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    training.main(["--quick", "--only", "round", "--only", "many", "--only", "flower"])
    printed = capsys.readouterr().out
    assert (
        printed.count("| pool, durable ledger, central | ") == printed.count("| pool, no ledger, distributed | ") == 3
    )
    assert printed.count("pfl-research 0.6, two processes: left") == 2
    assert "Flower 1.42, NumPyClient: left out" in printed


def test_a_peer_that_computes_another_sum_is_noticed(tmp_path: Path) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text("""print('{"seconds": [1.0, 2.0], "norm": 5.0}')""", encoding="utf-8")
    command = [sys.executable, str(peer), "{}"]
    assert training._peer(command, 5.0, 2) == [Round(1.0), Round(2.0)]
    with pytest.raises(ArithmeticError, match=r"norm 5\.0, ours 6\.0"):
        training._peer(command, 6.0, 2)


def test_the_network_and_its_images_are_the_same_in_every_process() -> None:
    twice = [[*opacus_sum.images(2), *opacus_sum.network().parameters()] for _ in range(2)]
    assert all((a == b).all() for a, b in zip(*twice, strict=True))
