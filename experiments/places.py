"""Where a recipe's ledger and MLflow store are: what this run names instead, and what a cluster refuses.

| address | one machine | cluster |
|---|---|---|
| `sqlite:///relative.db` | in the workspace | the cluster's own (`of_cluster`), or refused |
| `sqlite:////absolute.db` | that file | that file on the head, for runs driven from there |
| `postgresql://user@host/name?passfile=…` | the server | the server |
| with a secret in it | refused | refused: recipes are stored, shown and sent around |

What is a secret cannot be told from its name (`sslpassword`, `token`, `access_key`, a user name that is one), so what
is known to be none is listed: a database's address may have a user and the parameters of `PARAMETERS`, the http(s)
address of a server neither.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from dpray.experiments.kinds import AnyRecipe
from dpray.experiments.reading import RecipeError
from dpray.experiments.standing import SQLITE

PARAMETERS = frozenset(
    [
        "passfile",
        "service",
        "user",
        "host",
        "hostaddr",
        "port",
        "application_name",
        "connect_timeout",
        "client_encoding",
        "target_session_attrs",
        "sslmode",
        "sslrootcert",
        "sslcert",
        "sslkey",
        "sslcrl",
        "sslsni",
        "ssl_min_protocol_version",
        "channel_binding",
        "require_auth",
        "gssencmode",
        "krbsrvname",
        "keepalives",
        "keepalives_idle",
        "keepalives_interval",
        "keepalives_count",
        "tcp_user_timeout",
        "load_balance_hosts",
        "ssl_ca",
        "ssl_cert",
        "ssl_key",
        "charset",
    ]
)
"""What may follow `?` in a database's address: names of files, machines and settings, none of them a secret."""


def placed(recipe: AnyRecipe, ledger: str | None, tracking: str | None) -> AnyRecipe:
    """The recipe with its ledger and MLflow's store at these places; None leaves the recipe's own.

    A recipe that tracks nothing (`tracking.uri: null`) goes on tracking nothing.
    """
    changes = {} if ledger is None else {"ledger": ledger}
    if tracking is not None and recipe.tracking.uri is not None:
        return recipe.model_copy(update={**changes, "tracking": recipe.tracking.model_copy(update={"uri": tracking})})
    return recipe.model_copy(update=changes)


def of_cluster(recipe: AnyRecipe) -> AnyRecipe:
    """The recipe with relative files, which mean nothing on a cluster, replaced by the cluster's own places.

    Whoever starts a cluster names them in the environment in which Ray starts on the head: jobs inherit it.
    """
    ledger, tracking = os.environ.get("DPRAY_LEDGER"), os.environ.get("DPRAY_TRACKING")
    return placed(
        recipe, ledger if _relative(recipe.ledger) else None, tracking if _relative(recipe.tracking.uri or "") else None
    )


def check(recipe: AnyRecipe, *, cluster: bool) -> None:
    """Refuse addresses that hold a secret, or may, and, on a cluster, files that every machine has another one of.

    Raises:
        RecipeError: with what to write instead.
    """
    problems = []
    places = (
        ("ledger", "--ledger", "DPRAY_LEDGER", recipe.ledger),
        ("tracking.uri", "--tracking", "DPRAY_TRACKING", recipe.tracking.uri),
    )
    for key, option, variable, url in places:
        if url is None:
            continue
        if (where := _secret(url)) is not None:
            problems.append(
                f"`{key}` ({url.partition(':')[0]}://…) holds a password or may hold another secret in {where}, and "
                "recipes are stored with every run, shown in MLflow and logged by Ray: leave it out. For PostgreSQL, "
                "write the password into a password file of mode 0600 on the machine that drives the run, and name "
                "that with `?passfile=/absolute/path` at the end of the address; for a server of MLflow, set "
                f"MLFLOW_TRACKING_TOKEN there. Allowed after `?` of a database: {', '.join(sorted(PARAMETERS))}."
            )
        elif cluster and _relative(url):
            problems.append(
                f"`{key}` ({url}) is a relative path, which names another file on every machine of a cluster: give "
                f"{option}, the recipe, or {variable} where Ray starts on the head an absolute path there, "
                f"{SQLITE}/absolute/path.db, or the address of a server."
            )
    if problems:
        raise RecipeError(*problems)


def check_password_files(recipe: AnyRecipe) -> None:
    """Refuse a password file that is not there, or that others may read (PostgreSQL would quietly ignore it).

    Raises:
        RecipeError: with its mode and what it must be. Called where the run is driven.
    """
    for key, url in (("ledger", recipe.ledger), ("tracking.uri", recipe.tracking.uri)):
        for name in parse_qs(urlsplit(url or "").query).get("passfile", []):
            place = Path(name)
            if not place.is_absolute() or not place.is_file():
                raise RecipeError(f"`{key}` names the password file {name}, and there is no such file (absolute path).")
            mode = stat.S_IMODE(place.stat().st_mode)
            if mode & 0o077:
                raise RecipeError(
                    f"`{key}` names the password file {name} of mode {mode:04o}: others can read it. `chmod 0600` it."
                )


def check_driver(recipe: AnyRecipe) -> None:
    """Refuse an SQLite ledger where the run is driven from another node than the head: the file would be another one.

    Raises:
        RecipeError: with what to do. Called while Ray runs.
    """
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    here = ray.get_runtime_context().get_node_id()
    head = next((node for node in alive if "node:__internal_head__" in node["Resources"]), None)
    if recipe.ledger.startswith(SQLITE) and head is not None and head["NodeID"] != here:
        raise RecipeError(
            f"The ledger {recipe.ledger} is a file on the head, {head['NodeManagerAddress']}, and this process runs "
            "on another node: drive the run from the head (`dpray submit` does), or keep the ledger in PostgreSQL."
        )


def _relative(url: str) -> bool:
    return url.startswith(SQLITE) and not url.removeprefix(SQLITE).startswith("/")


def _secret(url: str) -> str | None:
    """Where in an address a secret is or may be, in words; None: nowhere."""
    parts = urlsplit(url)
    if parts.scheme.lower() in ("http", "https"):
        if "@" in url:
            return "what stands before `@`"
        return "what follows `?` or `#`" if parts.query or parts.fragment else None
    file = url.startswith(SQLITE)
    # Drivers take everything up to the last `@` for the password, `/` included, which urlsplit takes for the path.
    if parts.password is not None or (not file and "@" in parts.path):
        return "what stands before `@`"
    if parts.fragment and not file:
        return "what follows `#`"
    names = parse_qs(parts.query, keep_blank_values=True)
    return None if all(name.lower() in PARAMETERS for name in names) else "what follows `?`"
