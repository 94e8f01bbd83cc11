"""What a job ships: this package as a folder of source, and nothing else, small enough for Ray to carry.

Ray would pip-install a wheel file together with all of its dependencies, on every node; a folder it only unpacks. The
folder is what a wheel of this package unpacks to: modules, stubs (read when names load lazily), recipes, type markers.
Data, ledgers, journals, version control and virtual environments that lie about in a checkout are none of these, so
they stay. A module or recipe that lies in the package's folders goes along, whether or not version control knows it;
one that is a link to somewhere else is refused, since what is read through it was never a part of the package.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from dpray.experiments.nodes import portions
from dpray.experiments.reading import RecipeError

LIMIT = 100 * 2**20
"""Bytes that Ray accepts of one upload."""
_SHIPPED = (".py", ".pyi", ".yaml", ".typed")
_NAMED = 5


def assemble(folder: Path) -> Path:
    """Write the package into `folder/dpray`, ready for `py_modules`; returns it.

    Raises:
        RecipeError: it is larger than Ray carries, with its biggest files; a link leads out of it.
    """
    package = folder / "dpray"
    for name, source in portions().items():
        for path in source.rglob("*"):
            relative = path.relative_to(source)
            if path.suffix in _SHIPPED and not any(part.startswith((".", "__pycache__")) for part in relative.parts):
                _refuse_link(path, source)
                place = package / name / relative
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, place)
    check_size(package)
    return package


def _refuse_link(path: Path, source: Path) -> None:
    target = path.resolve()
    if not target.is_relative_to(source.resolve()):
        raise RecipeError(
            f"{path} is a link to {target}, outside the package, and a job ships what is inside: put a copy of the "
            "file in its place, or remove the link."
        )


def check_size(folder: Path, limit: int = LIMIT) -> int:
    """Bytes of all files in a folder.

    Raises:
        RecipeError: more than `limit`, with the biggest files.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(sizes.values())
    if total > limit:
        biggest = sorted(sizes, key=lambda path: -sizes[path])[:_NAMED]
        named = ", ".join(f"{path.relative_to(folder)} ({_megabytes(sizes[path])})" for path in biggest)
        raise RecipeError(
            f"The job would ship {_megabytes(total)}, and Ray carries at most {_megabytes(limit)}. The biggest files: "
            f"{named}. Data stay where they are: name their place in the recipe (`data.path`, `data.folder`)."
        )
    return total


def _megabytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
