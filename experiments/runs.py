"""Where a run keeps its files: `dpray-runs/<run>/` in the workspace.

| file | what | who may see it |
|---|---|---|
| `recipe.yaml` | the recipe as it was checked, defaults spelled out | public |
| `search/` | the state of a vote's searcher: candidates and bookkeeping, no score, no vote | public |
| `tune/` | Ray Tune's own files | public |
| `training/` | round checkpoints: parameters and server state, made of releases | released |
| `model/` | the trained model with its privacy statement, which `dpray export` copies | released |
| `spool/` | metrics on their way to MLflow | public and released |
| `outcome.json` | the result and the statement of the account | released |

The ledger is elsewhere on purpose: deleting a run's directory does not give its budget back.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from dpray.experiments import kinds
from dpray.experiments.kinds import AnyOutcome, AnyRecipe
from dpray.experiments.reading import RecipeError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run.

    Args:
        workspace: folder that holds `dpray-runs/`, `dpray-sites/` and, by default, the ledger and MLflow's store.
        name: of the run.
    """

    workspace: Path
    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise RecipeError(
                f"A run's name is 1 to 100 letters, digits, dots, dashes and underscores, and {self.name!r} was given."
            )

    @property
    def path(self) -> Path:
        """`<workspace>/dpray-runs/<run>`."""
        return self.workspace / "dpray-runs" / self.name

    @property
    def exists(self) -> bool:
        """Whether this run was begun here."""
        return (self.path / "recipe.yaml").is_file()

    def begin(self, recipe: AnyRecipe) -> None:
        """Write the recipe; a second time it must be the same.

        Raises:
            RecipeError: the run was begun with another recipe.
        """
        if self.exists:
            self.require_same(recipe)
            return
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(self.path / "recipe.yaml", recipe.write())

    def require_same(self, recipe: AnyRecipe) -> None:
        """Refuse another recipe than the one this run was begun with."""
        mine = self.recipe()
        if type(mine) is not type(recipe):
            raise RecipeError(
                f"The run `{self.name}` was begun with a recipe of another kind; choose another `--name`, or `dpray "
                f"resume {self.name}` to go on with its own."
            )
        differing = [key for key in type(mine).model_fields if getattr(mine, key) != getattr(recipe, key)]
        if differing:
            raise RecipeError(
                f"The run `{self.name}` was begun with another recipe (it differs in {', '.join(differing)}); "
                f"choose another `--name`, or `dpray resume {self.name}` to go on with its own."
            )

    def discard(self) -> None:
        """Remove the files of a run that was refused before it began."""
        shutil.rmtree(self.path, ignore_errors=True)

    def recipe(self) -> AnyRecipe:
        """The recipe this run was begun with.

        Raises:
            RecipeError: there is no such run here, or its recipe was damaged.
        """
        if not self.exists:
            raise RecipeError(f"There is no run `{self.name}` in {self.path.parent}.{self._known()}")
        place = self.path / "recipe.yaml"
        return kinds.read(place.read_text(encoding="utf-8"), str(place))

    def save(self, outcome: AnyOutcome) -> None:
        """Keep the result of a finished run."""
        write_durably(self.path / "outcome.json", json.dumps(asdict(outcome), indent=2, ensure_ascii=False))

    def outcome(self) -> AnyOutcome | None:
        """The result of a finished run; None while it is unfinished."""
        place = self.path / "outcome.json"
        if not place.is_file():
            return None
        return kinds.outcome_of(self.recipe(), json.loads(place.read_text(encoding="utf-8")))

    def finished(self) -> AnyOutcome:
        """The result.

        Raises:
            RecipeError: there is no such run here, or it has not finished.
        """
        self.recipe()
        outcome = self.outcome()
        if outcome is None:
            raise RecipeError(f"The run `{self.name}` has not finished; `dpray resume {self.name}` goes on with it.")
        return outcome

    def _known(self) -> str:
        names = sorted(place.parent.name for place in self.path.parent.glob("*/recipe.yaml"))
        return f" Runs here: {', '.join(names)}." if names else " No run was begun here yet."


def write_durably(place: Path, text: str) -> None:
    """Replace a file as a whole: after a crash it holds the old text or the new one, never a part."""
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(place)


def shipped() -> dict[str, str]:
    """Text of every recipe that ships with the package, by name."""
    folder = resources.files("dpray.experiments.recipes")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda file: file.name)
    return {file.name.removesuffix(".yaml"): file.read_text(encoding="utf-8") for file in files}


def find_recipe(given: str) -> AnyRecipe:
    """A recipe by path, or by the name of a shipped one.

    Raises:
        RecipeError: no such file or name, or a recipe that cannot be run.
    """
    place = Path(given)
    if place.is_file():
        try:
            return kinds.read(place.read_text(encoding="utf-8"), str(place))
        except UnicodeDecodeError:
            raise RecipeError(f"{place} is not text in UTF-8; a recipe is a YAML file.") from None
    known = shipped()
    if given in known:
        return kinds.read(known[given], given)
    raise RecipeError(
        f"There is no recipe at {given!r}, and none of that name ships with dpray. Shipped: {', '.join(known)}."
    )
