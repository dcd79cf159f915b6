from __future__ import annotations

import gguf
import numpy as np

from swiftbatch.worker.model.gguf.header import READABLE

HALVES = {  # where blocks have two-byte numbers
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
SPREAD = 0.05  # of the numbers of a matrix


def random_blocks(name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Make random bits with finite scales."""
    rng = np.random.default_rng(seed)
    blocks = _bytes(name, num_blocks, rng)
    for place in HALVES[name]:
        halves = rng.normal(0, 1, num_blocks).astype(np.float16)
        halves[: len(EXTREMES)] = rng.permutation(EXTREMES).astype(np.float16)
        blocks[:, place : place + 2] = halves.view(np.uint8).reshape(-1, 2)
    return blocks


def random_matrix(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a file's rows of bytes, and a model's numbers."""
    if name in ("F32", "F16", "BF16"):
        numbers = rng.normal(0, SPREAD, shape).astype(np.float32)
        data = gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[name])
        return data, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    kind = next(each for each in READABLE.values() if each.name == name)
    blocks = _bytes(name, int(np.prod(shape)) // kind.block, rng)
    for scale in (1.0, None):
        size = scale or SPREAD / gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name]).std()
        halves = (rng.uniform(-1, 1, (len(blocks), len(HALVES[name]))) * size).astype(np.float16)
        for number, place in enumerate(HALVES[name]):
            blocks[:, place : place + 2] = halves[:, number : number + 1].copy().view(np.uint8)
    data = blocks.reshape(*shape[:-1], -1)
    return data, gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(shape)


def _bytes(name: str, num_blocks: int, rng: np.random.Generator) -> np.ndarray:
    kind = next(each for each in READABLE.values() if each.name == name)
    return rng.integers(0, 256, (num_blocks, kind.num_bytes), dtype=np.uint8)
