"""A long text's keys as drafts see them: codes of all, which are scanned, and moments of what is not read exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from statistics import NormalDist

import torch
from torch import Tensor

from worker.caches.huge_pages import ask_for_huge_pages
from worker.kernels.native import CAttentionSizes
from worker.kernels.rows import CachePlace, CacheShape
from worker.kernels.team import ELEMENTS
from worker.kernels.variants import chosen_variant, load_library

SCAN_CHUNK = 1024  # keys that are coded at once; this and the next as in source/api.h
CLOUD_CHUNKS = 16  # whose moments are taken together
MOMENT_STRIDE = 2  # of the keys whose changes are taken: every other one tells as much
WORTH_READING = 0.1  # share of a query's weight that its best keys must have

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of all layers, each `[num_kv_heads, capacity, head_dim]`."""


class CScannedKeys(ctypes.Structure):
    """`scanned_keys` of source/api.h."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in ("codes", "means", "spreads", "moments")),
        *((name, ctypes.c_int32) for name in ("first", "num_chunks", "most_chunks", "most_clouds", "num_best")),
        ("flat_deviation", ctypes.c_float),
    )


class ScannedKeys:
    """Of one sequence's cache, from one position on, chunk by chunk as its positions are committed.

    Every query sees its `num_best` best keys exactly, by their codes of two bits a dimension. The others weigh what
    they would in a cloud of jointly normal keys and values, of which that part is cut off.
    """

    def __init__(self, layers: Layers, first: int, length: int, num_best: int) -> None:
        """Make room for the keys of `layers` from position `first` up to `length`. Raises ValueError for others."""
        (keys, _), num_layers = layers[0], len(layers)
        num_kv_heads, _, head_dim = keys.shape
        self._library = load_library(chosen_variant() or "portable")
        self._layers, self._first = layers, first
        self._most_chunks = max(1, (length - first) // SCAN_CHUNK)
        num_clouds = -(-self._most_chunks // CLOUD_CHUNKS)
        heads = (num_layers, num_kv_heads)
        self._codes = torch.empty(*heads, self._most_chunks * SCAN_CHUNK * head_dim // 4, dtype=torch.uint8)
        ask_for_huge_pages(self._codes)
        self._means = torch.zeros(*heads, self._most_chunks, head_dim)
        self._spreads = torch.zeros(*heads, head_dim)
        self._moments = torch.zeros(*heads, num_clouds, 2 * head_dim * (head_dim + 1))
        self._sizes = CAttentionSizes(
            element=ELEMENTS[keys.dtype], num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0
        )
        place = CachePlace.of(layers, CacheShape(num_kv_heads, head_dim, keys.dtype))
        self._struct = CScannedKeys(
            cache=place.address,
            layer_stride=place.layer_stride,
            value_stride=place.value_stride,
            head_stride=place.head_stride,
            **{name: getattr(self, f"_{name}").data_ptr() for name in ("codes", "means", "spreads", "moments")},
            first=first,
            num_chunks=0,
            most_chunks=self._most_chunks,
            most_clouds=num_clouds,
            num_best=num_best,
        )

    @property
    def address(self) -> int:
        """Of what the kernels read."""
        return ctypes.addressof(self._struct)

    @property
    def end(self) -> int:
        """Position behind those that are scanned."""
        num_chunks: int = self._struct.num_chunks
        return self._first + num_chunks * SCAN_CHUNK

    def extend(self, length: int) -> None:
        """Take in all whole chunks in front of position `length`, which are in the cache."""
        while self.end + SCAN_CHUNK <= min(length, self._first + self._most_chunks * SCAN_CHUNK):
            self._add_chunk(self._struct.num_chunks)
            self._struct.num_chunks += 1
            self._struct.flat_deviation = flat_deviation(self._struct.num_best, self.end - self._first)

    def _add_chunk(self, chunk: int) -> None:
        positions = slice(self.end, self.end + SCAN_CHUNK)
        pairs = [torch.stack([part[:, positions] for part in pair]) for pair in self._layers]
        both = torch.stack(pairs).float()  # [num_layers, keys or values, num_kv_heads, SCAN_CHUNK, head_dim]
        means = both.mean(dim=-2, keepdim=True)
        keys, values = both.sub_(means).unbind(dim=1)
        mean_keys, mean_values = means.squeeze(-2).unbind(dim=1)  # [num_layers, num_kv_heads, head_dim]
        self._means[:, :, chunk] = mean_keys
        if chunk == 0:
            self._spreads.copy_(keys.abs().mean(dim=-2))
        joined = torch.cat([keys, values], dim=-1)[..., ::MOMENT_STRIDE, :]
        changes = joined[..., : keys.shape[-1]].mT @ joined / joined.shape[-2]
        self._add_moments(chunk, torch.cat([mean_keys, mean_values], dim=-1), changes)
        self._library.scan_code_chunk(ctypes.byref(self._sizes), self.address, len(self._layers), chunk)

    def _add_moments(self, chunk: int, means: Tensor, changes: Tensor) -> None:
        """Join all heads' means `[..., 2 * head_dim]` and changes `[..., head_dim, 2 * head_dim]` with the cloud's."""
        cloud, share = self._moments[:, :, chunk // CLOUD_CHUNKS], 1 / (chunk % CLOUD_CHUNKS + 1)
        head_dim = changes.shape[-2]
        own_means, own_changes = cloud[..., : 2 * head_dim], cloud[..., 2 * head_dim :].unflatten(-1, (2, head_dim, -1))
        away = means - own_means
        changes += (1 - share) * away[..., :head_dim, None] @ away[..., None, :]  # of the chunks' means
        own_changes.lerp_(changes.unflatten(-1, (2, head_dim)).transpose(-2, -3), share)
        own_means.lerp_(means, share)


def flat_deviation(num_best: int, num_keys: int) -> float:
    """Deviation of normal scores below which the `num_best` best of `num_keys` keys weigh too little to be read.

    Above the score z that so many reach there is, of the weights e^score with deviation t, the share Phi(t - z).
    """
    normal, share = NormalDist(), min(num_best / num_keys, 0.5)
    return max(0.0, normal.inv_cdf(1 - share) + normal.inv_cdf(WORTH_READING))
