"""Gumbel noise from (seed, prompt, position, token) alone, with which every drafter draws the same tokens.

The generator is Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
"""

from __future__ import annotations

import functools
import hashlib
from ctypes import c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import torch

from swiftbatch.worker.kernels.native_library import chosen_variant, load_library
from swiftbatch.worker.kernels.row_tables import address_of

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF

NOISE_LAW = "noise 2"  # part of the numerics' name; version 1 ignored the prompt
NUM_BLOCKS_KEPT = 5  # drafts read several blocks ahead, then return to earlier ones
BLOCK = 16  # a fixed shape gives vectorised logarithms the same bits every time


def noise_key(seed: int, prompt_ids: np.ndarray, num_rewinds: int = 0) -> int:
    """Return the generator's 64-bit key of a job, from seed, prompt and number of rewinds."""
    named = f"seed {seed}, rewind {num_rewinds}, {len(prompt_ids)} tokens: "
    digest = hashlib.sha256(named.encode() + prompt_ids.astype("<u4").tobytes()).digest()
    return int.from_bytes(digest[:8], "little")


def philox4x32(counter: tuple[torch.Tensor, ...], key: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Run ten rounds of Philox4x32 on int64 tensors of 32-bit values; return four such tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # int64 products wrap, which keeps all 64 bits; the mask after the shift removes sign bits.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def gumbel_block(key: int, first_position: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return standard Gumbel noise G(key, t, v) for `BLOCK` positions from `first_position`: `[BLOCK, vocab]
    float32`.
    """
    quads = torch.arange((vocab_size + 3) // 4, device=device).expand(BLOCK, -1)  # four tokens share a counter
    positions = torch.arange(first_position, first_position + BLOCK, device=device)[:, None].expand_as(quads)
    zeros = torch.zeros_like(quads)
    words = philox4x32((quads, positions & _MASK, positions >> 32, zeros), (key & _MASK, key >> 32))
    bits = torch.stack(words, dim=-1).flatten(1)[:, :vocab_size]  # [BLOCK, vocab]
    uniform = (bits.double() + 0.5) * 2.0**-32  # never 0 or 1
    return (-torch.log(-torch.log(uniform))).float()


def noise_row(noise_key: int, position: int, vocab_size: int) -> np.ndarray:
    """Return noise `[vocab] float32`, from the C kernel."""
    values = np.empty(vocab_size, dtype=np.float32)
    _native_row(str(chosen_variant()))(noise_key, position, vocab_size, address_of(values))
    return values


@functools.cache
def _native_row(variant: str) -> Any:
    function = load_library(variant).sampling_noise_row
    function.restype, function.argtypes = None, (c_uint64, c_int64, c_int64, c_void_p)
    return function


class GumbelNoise:
    """Noise of one sequence. It is computed in blocks of positions, and the last few blocks are kept."""

    def __init__(self, key: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self._key = key
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._is_native = self._device.type == "cpu" and chosen_variant() is not None
        self._blocks: dict[int, torch.Tensor] = {}

    def row(self, position: int) -> torch.Tensor:
        """Return the noise of all tokens at a position, `[vocab] float32`."""
        block = position // BLOCK
        if block not in self._blocks:
            self._blocks = {b: noise for b, noise in self._blocks.items() if b > block - NUM_BLOCKS_KEPT}
            self._blocks[block] = self._block(block * BLOCK)
        return self._blocks[block][position % BLOCK]

    def _block(self, first_position: int) -> torch.Tensor:
        if not self._is_native:
            return gumbel_block(self._key, first_position, self._vocab_size, self._device)
        rows = [noise_row(self._key, first_position + offset, self._vocab_size) for offset in range(BLOCK)]
        return torch.from_numpy(np.stack(rows))
