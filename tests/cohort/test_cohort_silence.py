"""Nothing of what user code raises, prints or returns on private data reaches Ray's logs or the driver."""

import base64
import logging
import struct
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from dpray.platform.cohort import Cohort, GradientSum, Records
from dpray.platform.privacy.mechanisms import Regime

from .conftest import CLIP, DIMENSION, SEARCH, RowSum, gradient_mechanism, records, shards_of

CANARY = 0.7316294857120394
QUERY = GradientSum(np.zeros(DIMENSION), CLIP)


def written_forms(value):
    """A number as it could turn up in a file."""
    single, double = struct.pack("<f", value), struct.pack("<d", value)
    forms = {repr(value).encode(), repr(value)[:10].encode(), single, double}
    for raw in (single, double):
        forms |= {raw.hex().encode(), base64.b64encode(raw).rstrip(b"=")[:-1]}
    return forms


def found_in(folder, forms):
    """Files below `folder` that hold one of the forms; the object store's memory is not a log."""
    hits = []
    for path in Path(folder).rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            hits += [path.name for form in forms if form in content]
    return hits


def logs(ray):
    return Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"


def says(kind, records):
    """User code that tries every way out."""
    value = float(records.x[0, 0])
    print(value)
    print(value, file=sys.stderr, flush=True)
    warnings.warn(f"{value}", stacklevel=1)
    logging.getLogger("ray").error("%r", value)
    logging.getLogger("mine").error("%r", value)
    if kind == 1:
        raise ValueError(value, records.x)
    if kind == 2:
        raise SystemExit(f"{value}")
    if kind == 3:
        return f"{value}"
    return np.full(DIMENSION, np.nan)


@pytest.fixture
def canaries():
    shards = shards_of(4)
    for index, name in enumerate(shards):
        shard = records(index, label=index + 1)
        shards[name] = Records(np.full_like(shard.x, CANARY), shard.y)
    return shards


@pytest.mark.parametrize("regime", list(Regime))
def test_user_code_that_tries_every_way_out_leaves_no_trace(by_value, attempt, tmp_path, canaries, regime, capfd):
    mechanism = gradient_mechanism(4)
    with Cohort(RowSum(says), canaries, actors=2, state_dir=tmp_path / "state", timeout=60.0) as cohort:
        cohort.sum(attempt(QUERY, mechanism, regime=regime), QUERY, mechanism, regime)
        assert cohort.evaluate(SEARCH, 0, {"target": 0.0}) == 4
    time.sleep(1.0)  # the log monitor's turn
    assert found_in(logs(by_value), written_forms(CANARY)) == []
    said = capfd.readouterr()
    assert not any(form.decode() in said.out + said.err for form in (repr(CANARY).encode(), repr(CANARY)[:10].encode()))


def test_the_search_for_canaries_finds_an_actor_that_leaks(by_value):
    """Negative control: the same code in a plain actor."""
    leak = CANARY + 0.1

    @by_value.remote(num_cpus=0)
    class Plain:
        def clipped_sum(self):
            try:
                return says(1, Records(np.full((1, DIMENSION), leak), np.ones(1)))
            except ValueError:
                return None

    actor = Plain.remote()
    by_value.get(actor.clipped_sum.remote())
    deadline = time.monotonic() + 60
    while not (found := found_in(logs(by_value), written_forms(leak))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found != []
    by_value.kill(actor)
