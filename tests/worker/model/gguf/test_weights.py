"""Blocks of GGUF's types equal the format's library in float32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from swiftbatch.worker.model.gguf.gguf_weights import MOST_AT_ONCE, UNPACKED, packed_from
from swiftbatch.worker.model.gguf.header import READABLE
from tests.worker.model.gguf.block_bytes import HALVES, random_blocks


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
    monkeypatch.setattr("swiftbatch.worker.model.gguf.gguf_weights.MOST_AT_ONCE", 1)
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
