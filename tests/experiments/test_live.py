"""What a run says where there is no terminal."""

import io

from rich.console import Console

from dpray.experiments.live import Live


def test_a_phase_is_told_at_its_first_step_and_then_four_times():
    written = io.StringIO()
    with Live(Console(file=written, width=80)).phase("search", 80) as phase:
        for done in range(1, 81):
            phase(done, f"candidate {done - 1}")
    assert [line.split()[1] for line in written.getvalue().splitlines()] == ["1/80", "20/80", "40/80", "60/80", "80/80"]
