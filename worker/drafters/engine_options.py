"""Options of engines: what the papers leave to choose. They change drafts and never a token. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.json_records import Frozen, reasons, shown
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES

AS_PROMPT = 0  # a budget as large as a job's prompt
LEAST_BUDGET, MOST_PROMPT_BUDGET = 256, 8192  # bounds of such a budget; TokenSwift's longest prompts have 8,192 tokens
CacheName = Literal["summary", "importance", "retrieval"]
LONGEST = 1 << 20  # tokens; longer than any model's text
Count = Annotated[int, Field(ge=1, le=MAX_TREE_NODES)]


def _numbers(value: Any) -> Any:
    return tuple(value.split(",")) if isinstance(value, str) else value


def _budget(value: Any) -> Any:
    return AS_PROMPT if value == "prompt" else value


Numbers = Annotated[tuple[Count, ...], BeforeValidator(_numbers), Field(min_length=1, max_length=16)]
Budget = Annotated[int, BeforeValidator(_budget), Field(ge=0, le=LONGEST)]


class EngineOptions(Frozen):
    """Base of the options of an engine, with the values that are fastest here as defaults."""


class PartialCacheOptions(EngineOptions):
    """Options of the target's partial cache, which checks drafts before the full cache does."""

    cache: CacheName = "summary"
    budget: Budget = 2048  # entries; `prompt`, or 0: as many as the prompt has tokens
    chunk_size: int = Field(default=8, ge=1, le=4096)  # of the retrieval cache (TriForce 4.1)
    stride: int = Field(default=256, ge=1, le=LONGEST)  # positions between two builds of the retrieval cache
    rebuild_below: float = Field(default=0.0, ge=0.0, lt=1.0)  # lower rolling acceptance rates ask for a build

    @property
    def partial_budget(self) -> int:
        """Return the most entries of a job's partial cache."""
        return MOST_PROMPT_BUDGET if self.budget == AS_PROMPT else self.budget

    @property
    def partial_chunk(self) -> int | None:
        """Return the positions of a chunk with a mean key: 0 if there are none, None for those of the summary cache."""
        return {"summary": None, "importance": 0, "retrieval": self.chunk_size}[self.cache]

    def budget_of(self, num_prompt_tokens: int) -> int:
        if self.budget != AS_PROMPT:
            return self.budget
        return min(max(num_prompt_tokens, LEAST_BUDGET), MOST_PROMPT_BUDGET)

    @model_validator(mode="after")
    def _of_one_cache(self) -> PartialCacheOptions:
        own = {"chunk_size", "stride", "rebuild_below"} & self.model_fields_set
        if own and self.cache != "retrieval":
            raise ValueError(f"{', '.join(sorted(own))}: an option of cache=retrieval, found cache={self.cache}")
        return self


class TokenSwiftOptions(PartialCacheOptions):
    """Options of TokenSwift."""

    tree: Numbers | None = None  # candidates of each head that is used; None: 3 of each
    num_ngrams: int = Field(default=20, ge=0)  # k; 0: no n-grams
    ngram_size: int = Field(default=4, ge=2, le=16)
    rounds: int = Field(default=0, ge=0, le=16)  # whole trees that the partial cache checks; 0: chains where they pay
    recycles: bool = True  # also draft what the model ranked high before


NUM_SINKS, WINDOW = 16, 256  # first and newest tokens that TriForce's draft model sees
CHAIN_ROOM = 64  # positions of its cache for the tokens of a chain


class TriForceOptions(PartialCacheOptions):
    """Options of TriForce."""

    budget: Budget = 1024
    gamma_1: int = Field(default=2, ge=0, le=32)  # draft tokens of a check; 0: the partial cache drafts alone
    gamma_2: int = Field(default=6, ge=1, le=64)  # tokens of the chain that the full cache verifies
    at_every_step: bool = False  # False: in steps where chains pay
    width: int = Field(default=1, ge=1, le=8)  # candidates of each draft token (5.2.3)
    window: int = Field(default=WINDOW, ge=16, le=8192)  # grows to twice as many before it is cut back

    @property
    def draft_length(self) -> int:
        """Return the positions of the draft model's cache."""
        return NUM_SINKS + 2 * self.window + CHAIN_ROOM

    @model_validator(mode="after")
    def _with_room(self) -> TriForceOptions:
        if self.gamma_1 + self.gamma_2 > CHAIN_ROOM:
            found = f"{self.gamma_1} + {self.gamma_2}"
            raise ValueError(f"gamma_1 + gamma_2: found {found}, expected at most {CHAIN_ROOM}")
        if self.gamma_1 * self.width > MAX_TREE_NODES:
            raise ValueError(f"gamma_1 * width: found {self.gamma_1 * self.width}, expected at most {MAX_TREE_NODES}")
        return self


class GriffinOptions(EngineOptions):
    """Options of GRIFFIN (appendix C.2)."""

    max_depth: int = Field(default=6, ge=1, le=32)
    max_nodes: int = Field(default=60, ge=1, le=MAX_TREE_NODES)
    breadth: int = Field(default=10, ge=1, le=32)  # nodes of a level, and candidates below each
    at_every_step: bool = False  # False: as many nodes and levels as pay, in steps where drafts pay
    context: Literal["window", "whole"] = "window"  # what the draft layer sees

    @model_validator(mode="after")
    def _with_room(self) -> GriffinOptions:
        if (expanded := self.breadth * (self.max_depth - 1)) > MAX_TREE_NODES:
            raise ValueError(f"breadth * (max_depth - 1): found {expanded}, expected at most {MAX_TREE_NODES}")
        return self


class RecyclingOptions(EngineOptions):
    """Options of Token Recycling as published."""

    candidates: int = Field(default=8, ge=1, le=8)  # k: kept candidates of each token
    tree: Literal["published", "measured"] = "published"  # figure 5, or by acceptance rates of the embedded model
    max_nodes: int = Field(default=80, ge=1, le=MAX_TREE_NODES)  # without the root
    max_depth: int = Field(default=6, ge=1, le=32)
    update: Literal["first", "last", "merged"] = "last"  # the row that counts if a token is in several rows
    with_noise: bool = True  # rank candidates with the noise of the coming positions


TOKENSWIFT_PAPER = TokenSwiftOptions(cache="importance", budget=AS_PROMPT, rounds=1, recycles=False)
TRIFORCE_PAPER = TriForceOptions(cache="retrieval", budget=4096, at_every_step=True)
GRIFFIN_PAPER = GriffinOptions(at_every_step=True)
Options = TypeVar("Options", bound=EngineOptions)


def changed(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return checked options with some values changed. Raises `pydantic.ValidationError`."""
    return type(options)(**{name: getattr(options, name) for name in options.model_fields_set} | dict(changes))


def with_given(options: Options, engine: str, given: tuple[str, ...]) -> Options:
    """Change options by texts NAME=VALUE. Raises ModelError for an unknown name or a value out of its range."""
    values: dict[str, str] = {}
    for text in given:
        name, is_one, value = text.partition("=")
        if not is_one or name in values:
            problem = "given twice" if is_one else "expected NAME=VALUE"
            raise ModelError(f"--engine-option {text if text.isprintable() else shown(text)}: {problem}")
        values[name] = value
    try:
        return changed(options, values)
    except ValidationError as error:
        raise ModelError(f"--engine-option of engine {engine}: {reasons(error, type(options))}") from None
