"""Every node of a cluster runs what the driver runs: Python, Ray, torch, NumPy, and this package's own code.

The same code on other versions of them may round differently, pickle differently, or draw other noise: a run on mixed
nodes is refused before anything is spent. The package is told by a digest of its source, since a copy that a job ships
has no version of its own.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PORTIONS = ("platform", "searchers", "trainers", "experiments")
"""Folders of the package, all below `dpray`."""
PACKAGES = ("ray", "torch", "numpy")
_SECONDS = 60.0


class NodesDiffer(Exception):  # noqa: N818 - an outcome that callers handle
    """Nodes of a cluster run other versions than the driver; the message names them."""


def portions() -> dict[str, Path]:
    """Folder of each portion of this package, wherever it is installed."""
    found = {}
    for name in PORTIONS:
        module = import_module(f"dpray.{name}")
        found[name] = Path(next(iter(module.__path__)))
    return found


def versions() -> dict[str, str]:
    """Versions of what this process runs, by name; `dpray` is a digest of its source."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return {**found, "dpray": source_digest()}


def source_digest() -> str:
    """Twelve hexadecimal digits of the SHA-256 over every module and recipe of the package."""
    digest = hashlib.sha256()
    for name, folder in portions().items():
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".pyi", ".yaml")):
            digest.update(f"{name}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def check(say: Callable[[str], object]) -> None:
    """Ask every node of the cluster for its versions, tell them, and refuse what differs from this process.

    Raises:
        NodesDiffer: with the nodes and both versions, or a node that does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    mine = versions()
    ask = ray.remote(num_cpus=0, max_retries=0)(versions)
    alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    asked = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(): address
        for node, address in alive.items()
    }
    answers = dict[str, Mapping[str, str] | None]()
    ready, late = ray.wait(list(asked), num_returns=len(asked), timeout=_SECONDS)
    answers.update({asked[reference]: None for reference in late})
    for reference in ready:
        try:
            answers[asked[reference]] = ray.get(reference)
        except ray.exceptions.RayError:
            answers[asked[reference]] = None
    for line in told(answers, mine):
        say(line)
    problems = differences(answers, mine)
    if problems:
        raise NodesDiffer("\n".join(problems))


def told(answers: Mapping[str, Mapping[str, str] | None], mine: Mapping[str, str]) -> list[str]:
    """A line for each set of versions, with the nodes that have it."""
    lines = dict[str, list[str]]()
    for address, found in sorted(answers.items()):
        words = "no answer" if found is None else ", ".join(f"{name} {found.get(name)}" for name in mine)
        lines.setdefault(words, []).append(address)
    return [f"Nodes {', '.join(addresses)}: {words}" for words, addresses in lines.items()]


def differences(answers: Mapping[str, Mapping[str, str] | None], mine: Mapping[str, str]) -> list[str]:
    """A sentence for each node that cannot take part."""
    found = []
    for address, theirs in sorted(answers.items()):
        if theirs is None:
            found.append(
                f"The node {address} did not say within {_SECONDS:g} s what it runs: the package cannot be imported "
                "there. Look at its Ray logs, or take it out of the cluster."
            )
            continue
        differing = [
            f"{name} {theirs.get(name, 'missing')} and not {mine[name]}"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
        if differing:
            found.append(
                f"The node {address} has {', '.join(differing)}, which the driver has. Install the same versions on "
                "every node (the repository's constraints.txt names them), then start Ray there again."
            )
    return found
