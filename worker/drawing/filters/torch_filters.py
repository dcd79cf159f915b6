"""The filters in torch, over one row of scores `[vocab] float32`: the definition that C and Triton meet."""

from __future__ import annotations

import math

import torch

from swiftbatch.worker.drawing.adjustments import MASKED

SUM_UNITS = 2.0**60  # units of a running sum: 1 + its rounding stays below 2^63


def keep_top_k(scores: torch.Tensor, top_k: int) -> torch.Tensor:
    """Mask all but the `top_k` highest scores, and their ties."""
    smallest = torch.topk(scores, min(top_k, len(scores))).values[-1]
    return scores.masked_fill(scores < smallest, MASKED)


def keep_top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of most probable tokens whose mass reaches `top_p` (Holtzman et al. 2020)."""
    ascending, order = torch.sort(scores, stable=True)
    removed = running_sum(torch.softmax(ascending, dim=-1)) <= 1.0 - top_p
    removed[-1] = False
    return scores.masked_fill(torch.zeros_like(removed).scatter(0, order, removed), MASKED)


def running_sum(probabilities: torch.Tensor) -> torch.Tensor:
    """Sums of the first i + 1 of some probabilities `[n] float32`."""
    if probabilities.device.type == "cpu":
        return probabilities.cumsum(dim=-1)  # one after the other
    return running_sum_in_any_order(probabilities)


def running_sum_in_any_order(probabilities: torch.Tensor) -> torch.Tensor:
    """Running sums over whole numbers, where no order of summation changes a bit: GPUs choose theirs as they run."""
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
