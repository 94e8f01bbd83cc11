"""A job ships this package's source and a recipe, is followed without losing a line, and ends as its run."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpray.experiments import package, submit
from dpray.experiments.nodes import PORTIONS, differences, source_digest, told, versions
from dpray.experiments.reading import RecipeError
from dpray.experiments.submit import Where, exit_code

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_shipped_is_the_source_of_every_portion_and_nothing_else(tmp_path):
    shipped = package.assemble(tmp_path)
    found = {path.relative_to(shipped).as_posix() for path in shipped.rglob("*") if path.is_file()}
    tree = {
        f"{portion}/{path.relative_to(ROOT / portion).as_posix()}"
        for portion in PORTIONS
        for path in (ROOT / portion).rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml", ".typed"} and "__pycache__" not in path.parts
    }
    assert found == tree
    assert not (shipped / "platform" / "__init__.py").exists()
    assert package.check_size(shipped) < 10 * 2**20


def test_a_link_that_leads_out_of_the_package_is_not_followed(tmp_path, monkeypatch):
    source, outside = tmp_path / "platform", tmp_path / "outside"
    for folder in (source / "inner", outside):
        folder.mkdir(parents=True)
    (source / "inner" / "module.py").write_text("pass\n")
    (source / "alias.py").symlink_to(source / "inner" / "module.py")
    monkeypatch.setattr(package, "portions", lambda: {"platform": source})
    assert (package.assemble(tmp_path / "first") / "platform" / "alias.py").read_text() == "pass\n"
    (outside / "secrets.yaml").write_text("token: hunter2\n")
    (source / "recipe.yaml").symlink_to(outside / "secrets.yaml")
    with pytest.raises(RecipeError, match=r"recipe\.yaml is a link to .*secrets\.yaml, outside the package"):
        package.assemble(tmp_path / "second")
    assert not any("hunter2" in path.read_text() for path in (tmp_path / "second").rglob("*.yaml"))


def test_a_package_too_large_is_refused_with_its_biggest_files(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "images.npz").write_bytes(b"x" * 3 * 2**20)
    (tmp_path / "small.py").write_text("pass\n")
    with pytest.raises(RecipeError, match=r"3\.0 MiB, and Ray carries at most 2\.0 MiB.*data/images\.npz \(3\.0 MiB\)"):
        package.check_size(tmp_path, limit=2 * 2**20)
    assert package.check_size(tmp_path) == 3 * 2**20 + 5


def test_the_command_on_the_head_quotes_what_a_shell_would_read():
    assert Where("~/my runs; rm x", "first").entrypoint == (
        "python -m dpray.experiments run recipe.yaml --name first --workspace '~/my runs; rm x'"
    )


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 3, 3),
        ("FAILED", 130, 130),
        ("FAILED", None, 1),
        ("STOPPED", -9, 130),
    ],
)
def test_a_job_ends_with_the_code_of_its_run(status, code, expected):
    assert exit_code(SimpleNamespace(driver_exit_code=code, status=SimpleNamespace(value=status))) == expected


class Breaking:
    """A job server whose connection breaks once, in the middle of a word."""

    def __init__(self):
        self.asked = 0

    async def tail_job_logs(self, job):
        self.asked += 1
        for text in ["round 1\nrou", "nd"] if self.asked == 1 else ["round 1\n", "round 2\n"]:
            yield text
        if self.asked == 1:
            raise RuntimeError("WebSocket connection closed unexpectedly")

    def get_job_status(self, job):
        return SimpleNamespace(is_terminal=lambda: self.asked > 1)


def test_a_log_is_followed_over_a_broken_connection_without_losing_or_repeating_anything():
    written = []
    asyncio.run(submit._tail(Breaking(), "job", written.append))
    assert "".join(written) == "round 1\nround 2\n"


@pytest.mark.parametrize("code", [-9, 137, None])
def test_a_run_that_was_killed_is_told_with_what_to_do(monkeypatch, code):
    """By a signal, or with the actor that looks after it: then Ray does not know its code."""
    ended = SimpleNamespace(status=SimpleNamespace(value="FAILED"), driver_exit_code=code, message="killed\nby 9")
    served(monkeypatch, get_job_info=lambda job: ended)
    with pytest.raises(submit.JobLost, match=r"ended from outside, in job j\. Ray says: killed\nWhat was"):
        submit.follow("j", "http://head", lambda text: None)


def test_a_head_that_does_not_answer_any_more_is_told_as_such_only_if_it_ever_did(monkeypatch):
    def gone(job):
        raise ConnectionError

    for said, error in (("round 1\n", submit.JobLost), ("", submit.SubmitError)):
        served(monkeypatch, get_job_info=gone, said=said)
        with pytest.raises(error, match="No job server answers"):
            submit.follow("j", "http://head", lambda text: None)


def test_a_log_is_asked_for_anew_after_a_silence(monkeypatch):
    """A head without power closes no connection."""
    monkeypatch.setattr(submit, "_SILENCE", 0.01)
    asked = []

    class Silent(Breaking):
        async def tail_job_logs(self, job):
            asked.append(job)
            yield "round 1\n"
            await asyncio.sleep(60 if len(asked) == 1 else 0)

        def get_job_status(self, job):
            return SimpleNamespace(is_terminal=lambda: len(asked) > 1)

    written = []
    asyncio.run(submit._tail(Silent(), "job", written.append))
    assert written == ["round 1\n"]
    assert len(asked) == 2


def served(monkeypatch, *, said="", **answers):
    """A job server that has said something and gives these answers."""

    async def tail(client, job, write):
        if said:
            write(said)

    monkeypatch.setattr(submit, "_tail", tail)
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda address: SimpleNamespace(**answers))


def test_no_job_server_is_a_sentence():
    with pytest.raises(submit.SubmitError, match=r"No job server answers at http://127.0.0.1:1.*ray dashboard"):
        submit.status("job", "http://127.0.0.1:1")


def test_nodes_of_other_versions_are_named_with_both():
    mine = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "numpy": "2.4.6", "dpray": "0a"}
    answers = {"10.0.0.1": mine, "10.0.0.2": {**mine, "torch": "2.12.0", "dpray": "0b"}, "10.0.0.3": None}
    found = differences(answers, mine)
    assert [text.split(" has ")[0].split(" did ")[0] for text in found] == ["The node 10.0.0.2", "The node 10.0.0.3"]
    assert "torch 2.12.0 and not 2.13.0, dpray 0b and not 0a" in found[0]
    assert differences({"10.0.0.1": mine}, mine) == []
    assert told({"a": mine, "b": mine}, mine) == [
        "Nodes a, b: python 3.11.7, ray 2.60.0, torch 2.13.0, numpy 2.4.6, dpray 0a"
    ]


def test_a_shipped_copy_can_be_used_without_the_one_it_was_made_of(tmp_path):
    """What loads lazily, too: a job finds nothing but what it ships."""
    shipped = package.assemble(tmp_path)
    use = "import dpray.searchers as s, dpray.trainers as t; print(s.__file__, s.DPHypeSearch, t.DPFedSOFIMTrainer)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", use], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.startswith(str(shipped)), done.stderr


def test_the_digest_of_the_source_is_that_of_a_shipped_copy_and_of_no_other(tmp_path, monkeypatch):
    mine = source_digest()
    assert versions()["dpray"] == mine
    copied = package.assemble(tmp_path)
    monkeypatch.setattr("dpray.experiments.nodes.portions", lambda: {name: copied / name for name in PORTIONS})
    assert source_digest() == mine
    with (copied / "trainers" / "sofim.py").open("a") as file:
        file.write("\n")
    assert source_digest() != mine
