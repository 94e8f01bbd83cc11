"""The plain sections of a recipe: population, budget, shares, data, cohort, space, tracking, noise.

Each is a frozen mapping that refuses unknown keys and converts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    field_validator,
    model_validator,
)

from dpray.experiments import domains, objections
from dpray.experiments.domains import Domain, Setting
from dpray.experiments.reading import RecipeError, describe, read_yaml, write_yaml
from dpray.platform.privacy.noise import counted_noisers

Unit = Literal["record", "client"]
Regime = Literal["distributed", "local", "central"]
Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Whole = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A mapping in a recipe: unknown keys refused, nothing converted, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


class Document(Section):
    """A whole recipe."""

    @classmethod
    def read(cls, text: str, name: str = "The recipe") -> Self:
        """Parse and check a recipe's YAML text.

        Raises:
            RecipeError: with one sentence for each problem found.
        """
        try:
            return cls.model_validate(read_yaml(text, name))
        except ValidationError as error:
            raise RecipeError(*objections.sentences(error, cls)) from None

    def write(self) -> str:
        """YAML that reads back as this recipe, every default spelled out."""
        return write_yaml(_named_first(self.model_dump(mode="python")))


def _named_first(value: Any) -> Any:
    """The same sections, each with the key first that says what the rest is about; a space keeps its order."""
    if not isinstance(value, dict):
        return value
    order = sorted(value, key=lambda key: key not in ("name", "algorithm"))
    return {key: value[key] if key == "space" else _named_first(value[key]) for key in order}


class Population(Section):
    """Whose data is protected: a name that lives on across experiments, and the unit its account protects."""

    name: Name
    unit: Literal["record", "user", "client"] = "record"
    records_per_client: Whole | None = None


class Budget(Section):
    """The account's lifetime (ε, δ). No noise at all (ε = ∞) has to be asked for in words: `non_private: true`."""

    epsilon: float | None = None
    delta: float
    non_private: bool = False

    @model_validator(mode="after")
    def _is_a_promise(self) -> Self:
        if not 0 < self.delta < 1:
            raise ValueError(
                f"`budget.delta` must lie strictly between 0 and 1 (well below 1/records), and {self.delta} was given."
            )
        unbounded = self.epsilon is None or self.epsilon == math.inf
        if self.non_private:
            if not unbounded:
                raise ValueError(
                    f"`budget.non_private: true` switches all noise off, so `budget.epsilon: {self.epsilon:g}` would "
                    "promise something untrue; delete one of the two."
                )
        elif self.epsilon is None:
            raise ValueError(
                "`budget.epsilon` is missing; give the total ε, or `non_private: true` for a run without any privacy."
            )
        elif not (0 < self.epsilon < math.inf):
            raise ValueError(
                f"`budget.epsilon` must be a finite number above 0, and {self.epsilon} was given; a run without noise "
                "has to say `non_private: true`."
            )
        return self


class Shares(Section):
    """Fractions of the account's μ² (μ² adds up over releases, ε does not)."""

    search: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    training: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _fit_in_one_budget(self) -> Self:
        total = Fraction(repr(self.search)) + Fraction(repr(self.training))
        if total > 1:
            raise ValueError(
                f"`shares` add up to {float(total):g} of the budget ({self.search:g} search + {self.training:g} "
                "training); at most 1 fits."
            )
        return self


class Evaluation(Section):
    """A part of the data set declared public, taken out before anything private happens: it is scored without noise.

    Without a fraction it is the data set's own test part; with one, that part of all records, drawn by a public seed.
    Where the protected records are at sites, it is a file of its own (`path`), beside the driver.
    """

    public: Literal[True]
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: Seed = 0
    path: str | None = None


class Data(Section):
    """A data set by name (and folder), dealt to simulated clients; or a path that each site reads on its own machine.

    `{site}` in a path stands for the site's name. The number of features and of classes are public by declaration.
    """

    dataset: Name | None = None
    folder: str | None = None
    path: str | None = None
    features: Whole | None = None
    classes: Annotated[int, Field(ge=2)] | None = None
    evaluation: Evaluation

    @model_validator(mode="after")
    def _comes_from_one_place(self) -> Self:
        if self.path is None:
            self._is_a_data_set()
        else:
            self._is_at_sites(self.path)
        return self

    def _is_a_data_set(self) -> None:
        if self.dataset is None:
            raise ValueError(
                "`data.dataset` is missing: name a data set, or give `data.path`, which each site of `cohort.sites` "
                "reads on its own machine."
            )
        for key, given in (("features", self.features), ("classes", self.classes)):
            if given is not None:
                raise ValueError(f"`data.{key}` is declared of files at sites (`data.path`); a data set has its own.")
        if self.evaluation.path is not None:
            raise ValueError(
                "`data.evaluation.path` belongs to records at sites (`data.path`); the public part of a data set is "
                "its own test part, or a `fraction`."
            )

    def _is_at_sites(self, path: str) -> None:
        for key, given in (("dataset", self.dataset), ("folder", self.folder)):
            if given is not None:
                raise ValueError(f"`data.{key}` cannot stand beside `data.path`: records come from one place.")
        for key, missing in (("features", self.features), ("classes", self.classes)):
            if missing is None:
                raise ValueError(f"`data.{key}` is missing: nobody looks into the sites' files to find out.")
        if self.evaluation.path is None or self.evaluation.fraction is not None:
            raise ValueError(
                "`data.evaluation` of records at sites is a file of its own, declared public: give its `path`, and no "
                "`fraction`."
            )
        if not path.startswith(("/", "~/")):
            raise ValueError(
                f"`data.path` is read on every site's machine, where {path!r} is relative to nothing; let it start "
                "with / or ~/."
            )


class Partition(Section):
    """How records are dealt to the clients of a simulation; given, not protected."""

    kind: Literal["iid", "dirichlet", "shards", "quantity"] = "iid"
    alpha: Positive | None = None
    per_client: Whole | None = None
    minimum: Whole = 1
    seed: Seed = 0

    @model_validator(mode="after")
    def _has_its_own_parameters(self) -> Self:
        wanted = {"iid": (), "dirichlet": ("alpha",), "shards": ("per_client",), "quantity": ("alpha",)}[self.kind]
        for key in ("alpha", "per_client"):
            given = getattr(self, key) is not None
            if given and key not in wanted:
                raise ValueError(f"`cohort.partition.{key}` means nothing to the `{self.kind}` partition; delete it.")
            if not given and key in wanted and key == "alpha":
                raise ValueError(
                    f"`cohort.partition.alpha` is missing: the `{self.kind}` partition needs it (0.5 is a strong skew)."
                )
        return self

    @property
    def parameters(self) -> dict[str, Any]:
        """What the partition takes besides labels, clients and seed."""
        given = {"alpha": self.alpha, "per_client": self.per_client, "minimum": self.minimum}
        return {key: value for key, value in given.items() if value is not None}


class Cap(Section):
    """The most a client itself agrees to, whatever the ledger says.

    Its journal keeps the smallest cap it was ever given: a later recipe does not lift it. A site's journal counts what
    it is asked for any population; a simulated client has a journal for each.
    """

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]


class Cohort(Section):
    """The clients, how many must answer, and how many may collude; with `sites`, where each one is.

    A site is a client on a machine of its own: the node with the Ray resource `site:NAME`. With it stands the number of
    records it declares, which is public.
    """

    clients: Whole
    sites: dict[Name, Whole] | None = None
    partition: Partition = Partition()
    actors: int | str = "auto"
    quorum: Whole | None = None
    colluders: Annotated[int, Field(ge=1)] = 1
    timeout: Positive | None = None
    cap: Cap | None = None
    secure_sum: Literal["trusted", "masked"] = "trusted"

    @field_validator("actors", mode="before")
    @classmethod
    def _auto_or_a_number(cls, given: Any) -> Any:
        if given != "auto" and (not isinstance(given, int) or isinstance(given, bool) or given < 1):
            raise ValueError(
                f"`cohort.actors` must be `auto` or a whole number of at least 1, and {describe(given)} was given."
            )
        return given

    @model_validator(mode="before")
    @classmethod
    def _counts_its_sites(cls, given: Any) -> Any:
        sites = given.get("sites") if isinstance(given, Mapping) else None
        return {"clients": len(sites), **given} if isinstance(sites, Mapping) and sites else given

    @model_validator(mode="after")
    def _has_its_sites(self) -> Self:
        if self.sites is None:
            return self
        if len(self.sites) != self.clients:
            raise ValueError(
                f"`cohort.clients` is {self.clients}, and `cohort.sites` names {len(self.sites)}: leave out the first."
            )
        if self.partition != Partition() or self.actors != "auto":
            raise ValueError(
                "`cohort.partition` and `cohort.actors` deal records to simulated clients; sites hold their own, on "
                "an actor each. Delete them."
            )
        return self

    @model_validator(mode="after")
    def _can_reach_its_quorum(self) -> Self:
        if self.quorum is not None and self.quorum > self.clients:
            raise ValueError(
                f"`cohort.clients` is {self.clients}, fewer than the quorum of {self.quorum}: no release could ever be "
                "made. Lower `cohort.quorum` or add clients."
            )
        if self.colluders > 1 and self.colluders >= self.clients:
            raise ValueError(
                f"`cohort.colluders` is {self.colluders} of {self.clients} clients; at least one client must be honest."
            )
        return self

    @property
    def n_min(self) -> int:
        """Clients whose noise is counted on."""
        return counted_noisers(self.quorum or self.clients, self.colluders)


def _parse_space(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    return {
        key: value if isinstance(value, Domain) else domains.parse_setting(f"search.space.{key}", value)
        for key, value in given.items()
    }


def _write_space(space: Mapping[str, Setting]) -> dict[str, Any]:
    return {key: value.written() if isinstance(value, Domain) else value for key, value in space.items()}


Space = Annotated[dict[str, Setting], BeforeValidator(_parse_space), PlainSerializer(_write_space)]
"""A search space: a domain or a fixed value for each setting, as `domains` reads them."""


def to_tune(space: Mapping[str, Setting]) -> dict[str, Any]:
    """A space as Ray Tune's domains (imports Ray)."""
    return {key: value.to_tune() if isinstance(value, Domain) else value for key, value in space.items()}


class Tracking(Section):
    """The MLflow store; `uri: null` tracks nothing."""

    uri: str | None = "sqlite:///mlflow.db"
    experiment: str = "dpray"


class Noise(Section):
    """A seed makes the noise repeatable and the run NOT PRIVATE: for tests only."""

    seed: Seed | None = None
