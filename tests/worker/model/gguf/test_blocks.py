"""Blocks of GGUF's types against the library of the format, bit for bit in float32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from swiftbatch.worker.model.gguf.blocks import MOST_AT_ONCE, UNPACKED, packed_from
from swiftbatch.worker.model.gguf.tensor_types import READABLE

HALVES = {  # where blocks have numbers of two bytes
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
EXTREMES = (65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 0.0, -0.0, 1.0)


def random_blocks(name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Blocks with any bits at all, but for scales that are no finite numbers."""
    kind = next(each for each in READABLE.values() if each.name == name)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, kind.num_bytes), dtype=np.uint8)
    for place in HALVES[name]:
        halves = rng.normal(0, 1, num_blocks).astype(np.float16)
        halves[: len(EXTREMES)] = rng.permutation(EXTREMES).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


@pytest.mark.parametrize("name", UNPACKED)
def test_packed_numbers_are_those_of_the_library(name: str) -> None:
    blocks = random_blocks(name, 24 * 40)
    theirs = gguf.quants.dequantize(blocks.reshape(40, -1), gguf.GGMLQuantizationType[name])
    ours = packed_from(name, torch.from_numpy(blocks), 40, torch.float32).dequantized()
    numbers = torch.from_numpy(theirs) + (0.0 if name == "Q4_0" else -0.0)  # zeros of Q4_0 have no sign here
    assert torch.equal(ours.view(torch.int32), numbers.view(torch.int32))


@pytest.mark.parametrize("name", UNPACKED)
def test_sizes_of_types_are_those_of_the_library(name: str) -> None:
    kind = next(each for each in READABLE.values() if each.name == name)
    assert gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block, kind.num_bytes)


def test_rows_that_are_unpacked_one_after_the_other_are_those_of_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.from_numpy(random_blocks("Q4_K", 24))
    at_once = packed_from("Q4_K", blocks, 12, torch.bfloat16)
    monkeypatch.setattr("swiftbatch.worker.model.gguf.blocks.MOST_AT_ONCE", 1)
    by_rows = packed_from("Q4_K", blocks, 12, torch.bfloat16)
    assert torch.equal(at_once.dequantized(), by_rows.dequantized())
    assert MOST_AT_ONCE > 1


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", UNPACKED)
def test_scales_that_are_no_finite_numbers_are_refused(name: str, scale: float) -> None:
    for place in HALVES[name]:
        blocks = random_blocks(name, 12)
        blocks[5, place : place + 2] = np.array([scale], dtype=np.float16).view(np.uint8)
        with pytest.raises(ValueError, match="no finite numbers"):
            packed_from(name, torch.from_numpy(blocks), 4, torch.float32)
