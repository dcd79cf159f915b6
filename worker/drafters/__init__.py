"""The drafters and their catalogue. Each is imported when it is made, so that the names cost no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from worker.drafters.names import DEFAULT_ENGINE, ENGINE_NAMES

if TYPE_CHECKING:
    from worker.drafters.base import Drafter
    from worker.target.step_costs import Costs
    from worker.target.target import TargetModel

__all__ = ["DEFAULT_ENGINE", "DRAFTERS", "ENGINE_NAMES", "DrafterFactory", "create_drafter"]


def _autoregressive(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.autoregressive import AutoregressiveDrafter

    return AutoregressiveDrafter()


def _prompt_lookup(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.lookup.prompt_lookup import PromptLookupDrafter

    return PromptLookupDrafter(target.vocab_size, costs)


def _suffix(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.lookup.suffix import SuffixDrafter

    return SuffixDrafter(costs)


def _token_recycling(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.recycling.token_recycling import TokenRecyclingDrafter

    return TokenRecyclingDrafter(target.vocab_size, costs)


def _token_recycling_static(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.recycling.static_recycling import StaticTokenRecyclingDrafter

    return StaticTokenRecyclingDrafter(target.vocab_size, costs)


def _token_recycling_static_80(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.recycling.static_recycling import StaticTokenRecyclingDrafter

    return StaticTokenRecyclingDrafter(target.vocab_size, None)


def _token_recycling_no_noise(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.recycling.token_recycling import TokenRecyclingDrafter

    return TokenRecyclingDrafter(target.vocab_size, costs, with_noise=False)


def _tokenswift(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.tokenswift.tokenswift import TokenSwiftOptions, tokenswift

    return tokenswift(target, costs, draft_model or target.files.path, TokenSwiftOptions())


def _tokenswift_paper(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.tokenswift.tokenswift import PAPER_OPTIONS, tokenswift

    return tokenswift(target, costs, draft_model or target.files.path, PAPER_OPTIONS)


def _triforce(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.triforce.triforce import TriForceOptions, triforce

    return triforce(target, costs, draft_model, TriForceOptions())


def _griffin(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.griffin.griffin import GriffinOptions, griffin

    return griffin(target, costs, draft_model or target.files.path, GriffinOptions())


def _griffin_paper(target: TargetModel, costs: Costs, draft_model: Path | None) -> Drafter:
    from worker.drafters.griffin.griffin import GRIFFIN_PAPER_OPTIONS, griffin

    return griffin(target, costs, draft_model or target.files.path, GRIFFIN_PAPER_OPTIONS)


DrafterFactory = Callable[["TargetModel", "Costs", "Path | None"], "Drafter"]
"""Makes a drafter for a target with its costs, and a folder of trained parts, or None for those beside its weights."""

DRAFTERS: dict[str, DrafterFactory] = {
    "autoregressive": _autoregressive,
    "prompt-lookup": _prompt_lookup,
    "suffix": _suffix,
    "token-recycling": _token_recycling,
    "token-recycling-static": _token_recycling_static,
    "token-recycling-static-80": _token_recycling_static_80,
    "token-recycling-no-noise": _token_recycling_no_noise,
    "tokenswift": _tokenswift,
    "tokenswift-paper": _tokenswift_paper,
    "triforce": _triforce,
    "griffin": _griffin,
    "griffin-paper": _griffin_paper,
}


def create_drafter(name: str, target: TargetModel, costs: Costs, draft_model: str | Path | None = None) -> Drafter:
    """Make the drafter of an engine; `draft_model` is the folder of its trained parts, None the target's own folder.

    Raises ValueError for an unknown name, ModelError where trained parts are missing or belong to another model.
    """
    if name not in DRAFTERS:
        raise ValueError(f"unknown engine {name!r}; expected one of: {', '.join(DRAFTERS)}")
    return DRAFTERS[name](target, costs, None if draft_model is None else Path(draft_model))
