"""A recipe as a job of a Ray cluster: checked here, driven from the head, its log followed here.

    recipe ─▶ refuse what a run would refuse ─▶ package + recipe.yaml ─▶ Ray's job server ─▶ `dpray run` on the head

Nothing secret travels: Ray logs a job's whole environment. The token is read from ~/.ray/auth_token here and there, a
database's password from a file on the head (`?passfile=`). Records do not travel either: a job is code and a recipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpray.experiments import package, places
from dpray.experiments.engine import prepare
from dpray.experiments.kinds import AnyRecipe

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "COLUMNS": "100", "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1"}
_ENDED = {"SUCCEEDED": 0, "FAILED": 1, "STOPPED": 130}
_SIGNALLED = 128
_RECIPE = "recipe.yaml"
_SILENCE = 60.0
"""Seconds without a word of the job after which its log is asked for anew: a head without power says nothing at all."""


class SubmitError(Exception):
    """The job server cannot be asked, or knows no such job; the message says what to do."""


class JobLost(Exception):  # noqa: N818 - an outcome that callers handle
    """A job ended, or cannot be asked any more, before its run could say how it ends; the message says what to do."""


@dataclass(frozen=True)
class Where:
    """What a job is told besides its recipe.

    Attributes:
        workspace: folder on the head for the run's files; `~` is the home there.
        name: of the run.
    """

    workspace: str
    name: str

    @property
    def entrypoint(self) -> str:
        """The command that the head runs."""
        run = ["run", _RECIPE, "--name", self.name, "--workspace", self.workspace]
        return shlex.join(["python", "-m", "dpray.experiments", *run])


def submit(recipe: AnyRecipe, where: Where, address: str) -> str:
    """Ship the recipe and this package, and have the head run it; returns the job's name.

    Args:
        recipe: with the places of its ledger and MLflow store as the head sees them.
        where: of the run.
        address: of the job server, such as http://HEAD:8265.

    Raises:
        RecipeError: what a run on a cluster would refuse, or a package too large; nothing was sent.
        SubmitError: the server does not answer, or refuses the token.
    """
    places.check(recipe, cluster=False)  # the head knows the cluster's own places, and refuses what is left
    job = f"{where.name}-{secrets.token_hex(3)}"
    with tempfile.TemporaryDirectory(prefix="dpray-job-") as folder:
        shipped = package.assemble(Path(folder) / "package")
        files = Path(folder) / "files"
        files.mkdir()
        (files / _RECIPE).write_text(recipe.write(), encoding="utf-8")
        with _asking(address) as client:
            client.submit_job(
                entrypoint=where.entrypoint,
                submission_id=job,
                runtime_env={"py_modules": [str(shipped)], "working_dir": str(files), "env_vars": _ENVIRONMENT},
            )
    return job


def follow(job: str, address: str, write: Callable[[str], object]) -> int:
    """Write the job's log as it grows, until the job has ended; returns the exit code of its process.

    Raises:
        SubmitError: the server does not answer, or knows no such job.
        JobLost: the run's process was ended from outside, or the server does not answer any more.
    """
    heard = False

    def hear(text: str) -> None:
        nonlocal heard
        heard = True
        write(text)

    try:
        with _asking(address) as client:
            asyncio.run(_tail(client, job, hear))
            details = client.get_job_info(job)
    except SubmitError as error:
        if not heard:
            raise
        what = f"Whether job {job} goes on cannot be seen from here."
        raise JobLost(f"{error}\n{_AGAIN.format(what=what)}") from None
    if str(details.status.value) == "FAILED" and not _ended_itself(details):
        why = str(details.message or "it gives no reason").splitlines()[0]
        raise JobLost(_AGAIN.format(what=f"The run's process was ended from outside, in job {job}. Ray says: {why}"))
    return exit_code(details)


def exit_code(details: Any) -> int:
    """Exit code of a job that has ended: of its process, as `dpray run` has it, where Ray knows it."""
    return int(details.driver_exit_code) if _ended_itself(details) else _ENDED.get(str(details.status.value), 1)


def _ended_itself(details: Any) -> bool:
    """Whether the process chose its code: a signal's is negative, or, where a shell tells it, 128 and more."""
    code = details.driver_exit_code
    return code is not None and (0 <= code < _SIGNALLED or code == _ENDED["STOPPED"])


async def _tail(client: JobSubmissionClient, job: str, write: Callable[[str], object]) -> None:
    """The whole log once, even if the connection breaks in between: each new one begins at its start."""
    import aiohttp

    written = 0
    while True:
        seen = 0
        with contextlib.suppress(RuntimeError, TimeoutError, aiohttp.ClientError):
            log = aiter(client.tail_job_logs(job))
            while (text := await asyncio.wait_for(anext(log, None), _SILENCE)) is not None:
                new = text[max(written - seen, 0) :]
                seen += len(text)
                if new:
                    write(new)
                    written = seen
        if client.get_job_status(job).is_terminal():
            return
        await asyncio.sleep(0.5)


def logs(job: str, address: str) -> str:
    """The job's log so far."""
    with _asking(address) as client:
        return str(client.get_job_logs(job))


def status(job: str, address: str) -> tuple[str, str]:
    """The job's state in Ray's words, and Ray's message."""
    with _asking(address) as client:
        found = client.get_job_info(job)
        return str(found.status.value), str(found.message or "")


def stop(job: str, address: str) -> bool:
    """End the job; returns whether it was running. What was charged stands, and the run can be resumed."""
    with _asking(address) as client:
        return bool(client.stop_job(job))


@contextlib.contextmanager
def _asking(address: str) -> Iterator[JobSubmissionClient]:
    """A client of the job server; what goes wrong becomes a sentence."""
    prepare(address)
    import ray.exceptions
    import requests
    from ray.job_submission import JobSubmissionClient

    logging.disable(logging.INFO)  # Ray tells of every file it packs
    try:
        yield JobSubmissionClient(address)
    except (ConnectionError, requests.exceptions.ConnectionError):
        raise SubmitError(
            f"No job server answers at {address}. It is the head's dashboard, port 8265; on loopback there, reach it "
            "with `ray dashboard cluster.yaml` and give http://127.0.0.1:8265."
        ) from None
    except ray.exceptions.AuthenticationError as error:
        raise SubmitError(_REFUSED.format(address=address, why=error)) from None
    except RuntimeError as error:
        text = str(error)
        if "401" in text or "403" in text or "uthenticat" in text:
            raise SubmitError(_REFUSED.format(address=address, why=text.splitlines()[0])) from None
        if "404" in text:
            raise SubmitError(f"The job server at {address} knows no such job.") from None
        raise SubmitError(f"The job server at {address} refuses: {text}") from None
    finally:
        logging.disable(logging.NOTSET)


_AGAIN = (
    "{what}\nWhat was charged stands, and nothing is charged twice: the same recipe submitted under the same name goes "
    "on."
)
_REFUSED = (
    "The job server at {address} wants the cluster's token: copy ~/.ray/auth_token from the head to this machine "
    "(mode 0600), and leave RAY_AUTH_MODE unset or at `token`. ({why})"
)
