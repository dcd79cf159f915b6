"""Compares our forward's logits with those of transformers on the same rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache, new_cache_of

NUM_COMPARED_ROWS = 300
# relative to the logits' spread; a wrong mask shifts by about 1
MOST_SHIFTED = {torch.float32: 1e-3, torch.bfloat16: 0.25}
MOST_SHIFTED_BY_EXPERTS = 0.25  # if two experts weigh nearly the same, the last bit chooses
MEDIAN_SHIFTED = {
    torch.float32: 1e-2,
    torch.bfloat16: 0.25,
}  # limits of models with experts, where such rows are few


@dataclass(frozen=True)
class KeptRows:
    """Effect of 8-bit caches on our logits."""

    shift: float
    num_same_choices: int

    def summary(self, num_rows: int) -> str:
        return (
            f"its 8-bit keys and values shift logits by {self.shift:.2g} of their spread, {self.num_same_choices} of "
            f"{num_rows} rows have the same best token as without them"
        )


@dataclass(frozen=True)
class Agreement:
    """Distance between our logits and those of transformers."""

    num_rows: int
    greatest_difference: float
    shift: float  # root mean square of the differences, relative to the logits' spread
    num_same_choices: int  # rows with the same best token
    agrees: bool
    kept: KeptRows | None = None  # effect of 8-bit keys and values; None without 8-bit caches

    def summary(self) -> str:
        found = (
            f"the greatest difference between two logits is {self.greatest_difference:.2g}, {self.num_same_choices} of "
            f"{self.num_rows} rows have the same best token"
        )
        if self.agrees:
            kept = "" if self.kept is None else f"\n{self.kept.summary(self.num_rows)}"
            return f"the forward agrees with that of transformers: {found}{kept}"
        return f"THE FORWARD IS NOT THAT OF TRANSFORMERS: {found}; do not use this model here, and please report it"


@torch.inference_mode()
def compare(target: TargetModel, num_rows: int = NUM_COMPARED_ROWS, seed: int = 0) -> Agreement:
    """Run `num_rows` random tokens through the target's tiles and through transformers' eager forward."""
    num_rows = min(num_rows, target.files.max_positions)
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(target.vocab_size, (num_rows,), generator=generator)
    ours = _our_logits(target, token_ids.tolist(), _plain_cache(target, num_rows))
    with _eager(target.model):
        theirs = target.model(input_ids=token_ids[None].to(target.device), use_cache=False).logits[0].float()
    difference = ours - theirs
    spread = max(float(theirs.std()), torch.finfo(torch.float32).tiny)  # one token has no spread
    shift = float(difference.square().mean().sqrt()) / spread
    kept = _kept_rows(target, token_ids.tolist(), ours) if target.cache_shape.kv_dtype is not None else None
    median = float(difference.square().mean(-1).sqrt().median()) / spread
    return Agreement(
        num_rows=num_rows,
        greatest_difference=float(difference.abs().max()),
        shift=shift,
        num_same_choices=int((ours.argmax(-1) == theirs.argmax(-1)).sum()),
        agrees=_is_near(target, shift, median),
        kept=kept,
    )


def _kept_rows(target: TargetModel, token_ids: list[int], plain: torch.Tensor) -> KeptRows:
    found = _our_logits(target, token_ids, target.new_cache(len(token_ids) + TILE_ROWS))
    spread = max(float(plain.std()), torch.finfo(torch.float32).tiny)
    shift = float((found - plain).square().mean().sqrt()) / spread
    return KeptRows(shift, int((found.argmax(-1) == plain.argmax(-1)).sum()))


def _plain_cache(target: TargetModel, num_rows: int) -> FullKVCache:
    if target.cache_shape.kv_dtype is None or target.forwards.arena is not None:
        return target.new_cache(num_rows + TILE_ROWS)
    return new_cache_of(replace(target.cache_shape, kv_dtype=None), num_rows + TILE_ROWS)


def _is_near(target: TargetModel, shift: float, median: float) -> bool:
    """Return whether the shifts of all rows and of single ones are within rounding."""
    if any("Experts" in type(module).__name__ for module in target.model.modules()):
        return shift <= MOST_SHIFTED_BY_EXPERTS and median <= MEDIAN_SHIFTED[target.dtype]
    return shift <= MOST_SHIFTED[target.dtype]


def _our_logits(target: TargetModel, token_ids: list[int], cache: FullKVCache | None = None) -> torch.Tensor:
    cache = target.new_cache(len(token_ids) + TILE_ROWS) if cache is None else cache
    logits = []
    while cache.length < len(token_ids):
        logits.append(target.logits(target.read(cache, token_ids[cache.length :])))
    return torch.cat(logits)


@contextlib.contextmanager
def _eager(model: Any) -> Iterator[None]:
    attention, experts = model.config._attn_implementation, model.config._experts_implementation
    try:
        model.set_attn_implementation("eager")
        model.config._experts_implementation = "eager"
        yield
    finally:
        model.set_attn_implementation(attention)
        model.config._experts_implementation = experts
