"""The sampling filters in order, with the parameters that kernels read.

A new filter needs a field in jobs/sampling_params.py, an entry here, Triton code in filter_kernels.py, and C code in
worker/kernels/source/filters.h. Definitions here take one row of scores `[vocab] float32`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.logits_processors import MASKED

SUM_UNITS = 2.0**60  # 1 plus the rounding error of a running sum stays below 2^63


def keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    smallest = torch.topk(scores, min(top_k, len(scores))).values[-1]
    return scores.masked_fill(scores < smallest, MASKED)


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches `top_p` (Holtzman et al. 2020)."""
    ascending, order = torch.sort(scores, stable=True)
    removed = running_sum(torch.softmax(ascending, dim=-1)) <= 1.0 - top_p
    removed[-1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), MASKED)


def running_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums `[n] float32`."""
    if probabilities.device.type == "cpu":
        return probabilities.cumsum(dim=-1)  # adds in order
    return running_sum_in_any_order(probabilities)


def running_sum_in_any_order(probabilities: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums of integers, which do not depend on the order of additions."""
    units = (probabilities.double() * SUM_UNITS).long()
    return (units.cumsum(dim=-1).double() / SUM_UNITS).float()


def keep_min_p(scores: torch.Tensor, min_p: float) -> torch.Tensor:
    """Mask tokens less probable than `min_p` times the most probable one (Nguyen et al. 2024)."""
    return scores.masked_fill(scores < scores.max() + math.log(min_p), MASKED)


def keep_eta(scores: torch.Tensor, eta: float) -> torch.Tensor:
    """Mask tokens below min(eta, sqrt(eta) * exp(-entropy)) (Hewitt et al. 2022); the best one stays."""
    probabilities = torch.softmax(scores, dim=-1)
    entropy = torch.special.entr(probabilities).sum()
    removed = probabilities < torch.clamp(math.sqrt(eta) * torch.exp(-entropy), max=eta)
    removed[torch.argmax(scores)] = False
    return scores.masked_fill(removed, MASKED)


@dataclass(frozen=True)
class FilterNumber:
    """Parameter that kernels read: int32 if `is_whole`, otherwise float32."""

    name: str
    of: Callable[[Any], float]  # computes it from the field's value, even if the filter is off
    is_whole: bool = False


@dataclass(frozen=True)
class Filter:
    """One filter, and the field of `SamplingParams` that it reads."""

    field: str
    off: float  # this value keeps all tokens
    keep: Callable[[torch.Tensor, Any], torch.Tensor]
    numbers: tuple[FilterNumber, ...]
    is_searched: bool = True  # a GPU must search for the cut

    def is_on(self, params: SamplingParams) -> bool:
        return bool(getattr(params, self.field) != self.off)


def _as_it_is(value: float) -> float:
    return value


def _rest(top_p: float) -> float:
    """Return the probability mass to remove; negative means off."""
    return 1.0 - top_p if top_p < 1.0 else -1.0


def _log(min_p: float) -> float:
    """Return the logarithm of `min_p`; -inf means off."""
    return math.log(min_p) if min_p > 0.0 else -math.inf


FILTERS = (
    Filter("top_k", 0, keep_top_k, (FilterNumber("top_k", _as_it_is, is_whole=True),)),
    Filter("top_p", 1.0, keep_top_p, (FilterNumber("rest", _rest),)),
    # min-p needs only the row's best score
    Filter("min_p", 0.0, keep_min_p, (FilterNumber("log_min_p", _log),), is_searched=False),
    Filter("eta", 0.0, keep_eta, (FilterNumber("eta", _as_it_is), FilterNumber("root_eta", math.sqrt))),
)
NUMBERS = tuple(number for each in FILTERS for number in each.numbers)


def filtered(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    for each in FILTERS:
        if each.is_on(params):
            scores = each.keep(scores, getattr(params, each.field))
    return scores


def filter_numbers(params: SamplingParams) -> tuple[float, ...]:
    return tuple([number.of(getattr(params, each.field)) for each in FILTERS for number in each.numbers])


def needs_filters(params: SamplingParams) -> bool:
    """Return whether a GPU must search for a cut."""
    return any(each.is_searched and each.is_on(params) for each in FILTERS)
