"""Records that stay where they are: each site's client reads its own file on its own machine, when it is first asked.

| where | file | arrays |
|---|---|---|
| a site | `data.path`, `{site}` replaced by the site's name | `x` (n, f) numbers, `y` (n,) classes 0 … K−1 |
| the driver | `data.evaluation.path`, declared public | the same |

The driver knows what is declared: numbers of records, features and classes. It opens no file of a site, so that no
record is in its process, nor in Ray's object store. Without a cluster all sites are simulated on this machine.

*Guarantee.* What a loader says about a site's file stays at the site: a failure is one sentence that tells nothing of
the records (`CohortError`). A label that is no class, or a feature that is not finite, makes a record contribute zero;
it is no failure, or its presence could be seen.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dpray.experiments.reading import RecipeError

if TYPE_CHECKING:
    from dpray.experiments.spec import Recipe
    from dpray.platform.cohort import Records, Site

LABEL = "site:"
"""A site's node has the Ray resource `site:NAME`."""


@dataclass(frozen=True)
class RecordsFile:
    """Loads records from an `.npz` file, without pickles.

    Args:
        path: of the file, on the machine where this is called; `~` is its user's home.
        features: f, as declared.
    """

    path: str
    features: int

    def __call__(self) -> Records:
        """The records.

        Raises:
            OSError, ValueError, KeyError: no such file, not an archive of `x` and `y`, another number of features.
        """
        from dpray.platform.cohort import Records

        with np.load(Path(self.path).expanduser(), allow_pickle=False) as arrays:
            x, y = np.asarray(arrays["x"], dtype=np.float64), arrays["y"]
        if x.ndim != 2 or x.shape[1] != self.features or y.shape != (len(x),):
            raise ValueError(f"{self.path} holds x of shape {x.shape} and y of shape {y.shape}.")
        return Records(x, y)


def sites(recipe: Recipe) -> dict[str, Site]:
    """The recipe's sites by name, each with its loader, its declared number of records, and where its actor belongs."""
    from dpray.platform.cohort import Site

    path, features = str(recipe.data.path), int(recipe.data.features or 0)
    return {
        site: Site(RecordsFile(path.replace("{site}", site), features), records, {LABEL + site: 1})
        for site, records in (recipe.cohort.sites or {}).items()
    }


def labels(recipe: Recipe) -> dict[str, float]:
    """The resources this machine offers where it simulates all sites."""
    return {LABEL + site: 1.0 for site in recipe.cohort.sites or {}}


def evaluation(recipe: Recipe, workspace: Path) -> Records:
    """The records declared public, a relative path taken from the workspace.

    Raises:
        RecipeError: no such file, or not what is declared.
    """
    given = recipe.data.evaluation.path or ""
    place = workspace / Path(given).expanduser()
    wanted = f"an .npz file of x (n, {recipe.data.features}) and y (n,)"
    try:
        found = RecordsFile(str(place), int(recipe.data.features or 0))()
    except FileNotFoundError:
        raise RecipeError(
            f"`data.evaluation.path` names {place}, which is not on this machine: it is {wanted}, records that are "
            "declared public, beside the process that drives the run."
        ) from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise RecipeError(f"`data.evaluation.path`: {place} is not {wanted} ({type(error).__name__}).") from None
    classes = int(recipe.data.classes or 0)
    labels = found.y.astype(np.int64)
    if not len(found) or not (labels == found.y).all() or labels.min() < 0 or labels.max() >= classes:
        raise RecipeError(f"`data.evaluation.path`: the labels in {place} must be classes 0 … {classes - 1}.")
    return type(found)(found.x, labels)
