from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kernels import native_decoder as native_module
from swiftbatch.worker.kernels.build import find_compiler
from swiftbatch.worker.kernels.native_decoder import NativeDecoder
from swiftbatch.worker.kernels.native_library import open_library
from tests.worker.kernels.compiled_once import compiled_once
from tests.worker.kernels.emulation import EMULATED, FLAGS_OF_EMULATION, OTHER
from tests.worker.kernels.kernel_parts import (
    BF16,
    LATENTS,
    SHAPES,
    VARIANTS,
    Shape,
    chain,
    decoded_alone,
    native,
    path_to,
    random_cache,
    random_tree,
    random_weights,
    whole,
)

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(OTHER not in VARIANTS, reason="the processor has no products of bf16"),
]
WIDE = Shape(hidden=512, intermediate=1504, vocab=1000, group=8)  # enough for helpers
KINDS = [*(shape for shape in (*SHAPES, *LATENTS) if shape.dtype == BF16), WIDE]


@pytest.fixture(scope="module")
def library() -> Path:
    compiler = find_compiler()
    assert compiler is not None
    return compiled_once(EMULATED, compiler, FLAGS_OF_EMULATION)


def emulated(library: Path, shape: Shape, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> NativeDecoder:
    monkeypatch.setattr(native_module, "load_library", lambda _: open_library(library))
    return NativeDecoder(random_weights(shape), num_threads, "emulated")


@pytest.mark.sample(3)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 50, 64])
def test_every_number_of_rows_adds_up(library: Path, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = list(range(num_rows))
    for shape in KINDS:
        decoder = emulated(library, shape, 2, monkeypatch)
        found = whole(decoder.forward([chain(random_cache(shape, 320), tokens)]))
        monkeypatch.undo()
        want = whole(native(shape, OTHER).forward([chain(random_cache(shape, 320), tokens)]))
        for mine, other in zip(found, want, strict=True):
            assert (mine - other).abs().max() < 0.02 * other.abs().max()


def test_a_row_among_others_has_the_bits_of_plain_decoding(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(1)
    for shape in KINDS:
        decoder = emulated(library, shape, 2, monkeypatch)
        for length, num_nodes in ((0, 1), (63, 14), (64, 40), (300, 63), (2050, 20)):
            tree = random_tree(numbers, num_nodes, length, shape.vocab)
            groups = [tree_rows(random_cache(shape, length), 1, tree), chain(random_cache(shape, 130), [5, 6, 7])]
            hidden, logits = whole(decoder.forward(groups))
            for node in {-1, len(tree) // 2 - 1, len(tree) - 1}:
                tokens = [1, *(tree.token_ids[each] for each in path_to(tree, node))]
                own_hidden, own_logits = decoded_alone(decoder, random_cache(shape, length), tokens)
                assert torch.equal(hidden[node + 1], own_hidden)
                assert torch.equal(logits[node + 1], own_logits)
