"""The objectives a recipe can name, with their options. Code and data are loaded when one is made.

| name | loss of a user | d | users |
|---|---|---|---|
| `group_lasso` | ½ residual² of a linear model, a penalty for each group | groups | synthetic |
| `gp_regression` | ½ residual² of a Gaussian process, a lengthscale for each input | inputs | synthetic |
| `kernel_svr` | ½ residual² of a support vector regression | features + 3 | real records |
| `paraboloid` | ½ squared distance to a point of the user's own | dimension | synthetic, for tests |

An objective is a `UserLosses` that also knows its space (`space()`, Tune's domains) and, if it has one, where searches
start (`start(seed)`). To register one: a section here, and its name in `Objective`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from dpray.experiments.sections import Section, Seed, Whole

if TYPE_CHECKING:
    from dpray.platform.user_losses import UserLosses


class Searchable(Protocol):
    """What an objective offers besides `fit` and `losses`."""

    users: int

    def space(self) -> Mapping[str, Any]:
        """Tune search space."""
        ...


class ObjectiveSection(Section):
    """What all objectives take.

    Attributes:
        public: the users' data are declared public, so that exact losses may be shown. The population's name is bound
            to it: it cannot be said later of people who were protected before.
    """

    public: bool = False
    of_the_people: ClassVar[tuple[str, ...]] = ()
    """Options that decide whose losses they are: the population's name is bound to them."""

    @abstractmethod
    def make(self, workspace: Path) -> UserLosses:
        """The task. Errors: ValueError for options that do not fit the data, DatasetError where there is no data."""

    def people(self) -> dict[str, Any]:
        """Public facts about whose losses they are, by the recipe's names."""
        own = ("name", "public", *self.of_the_people)
        return {f"objective.{key}": getattr(self, key) for key in own}


class GroupLasso(ObjectiveSection):
    """Synthetic regression; see `papers.dp_gibo.objectives.GroupLasso`."""

    name: Literal["group_lasso"]
    dimension: Whole = 10
    seed: Seed = 0
    train: Whole = 50
    users: Whole = 150
    of_the_people = ("dimension", "seed", "train", "users")

    def make(self, workspace: Path) -> UserLosses:
        """See `ObjectiveSection.make`."""
        from dpray.experiments.papers.dp_gibo.objectives import GroupLasso

        return GroupLasso(self.dimension, self.seed, train=self.train, users=self.users)


class GPRegression(ObjectiveSection):
    """Synthetic regression; see `papers.dp_gibo.objectives.GPRegression`."""

    name: Literal["gp_regression"]
    dimension: Whole = 5
    seed: Seed = 0
    train: Whole = 100
    users: Whole = 200
    of_the_people = ("dimension", "seed", "train", "users")

    def make(self, workspace: Path) -> UserLosses:
        """See `ObjectiveSection.make`."""
        from dpray.experiments.papers.dp_gibo.objectives import GPRegression

        return GPRegression(self.dimension, self.seed, train=self.train, users=self.users)


class KernelSVR(ObjectiveSection):
    """Regression on real data; see `papers.dp_gibo.objectives.KernelSVR`. `folder`: where the data is."""

    name: Literal["kernel_svr"]
    dataset: str = "gas"
    features: Whole = 100
    train: Whole = 1_000
    users: Whole = 9_000
    seed: Seed = 0
    folder: str | None = None
    of_the_people = ("dataset", "train", "users", "seed")

    def make(self, workspace: Path) -> UserLosses:
        """See `ObjectiveSection.make`."""
        from dpray.experiments.papers.dp_gibo.objectives import KernelSVR

        folder = None if self.folder is None else workspace / Path(self.folder).expanduser()
        return KernelSVR.of(
            self.dataset, features=self.features, train=self.train, users=self.users, seed=self.seed, folder=folder
        )


class Paraboloid(ObjectiveSection):
    """A bowl for each user; see `central.paraboloid`."""

    name: Literal["paraboloid"]
    dimension: Whole = 2
    users: Whole = 400
    seed: Seed = 0
    of_the_people = ("dimension", "users", "seed")

    def make(self, workspace: Path) -> UserLosses:
        """See `ObjectiveSection.make`."""
        from dpray.experiments.central.paraboloid import Paraboloid

        return Paraboloid(self.dimension, self.users, self.seed)


Objective = Annotated[GroupLasso | GPRegression | KernelSVR | Paraboloid, Field(discriminator="name")]
"""Any of them, told apart by its name."""
