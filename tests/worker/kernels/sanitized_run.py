"""Runs random row tables through a sanitized library.

Its arguments are the library's path and the rounds of each kind. Right tables must give finite logits, spoiled ones
ValueError; otherwise the sanitizer ends the process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import random
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import MAX_TOP_LOGPROBS
from swiftbatch.worker.drafters import token_recycling
from swiftbatch.worker.drafters.griffin.draft_forwards import NativeGriffin
from swiftbatch.worker.drafters.token_recycling import MOST_NODES, NativeRecycler, RecyclingTables, TextCandidates
from swiftbatch.worker.forward import tile_packing
from swiftbatch.worker.forward.forward_interface import SparseRows
from swiftbatch.worker.forward.tile_packing import SequenceRows, tree_rows
from swiftbatch.worker.kernels import causal_attention, native_decoder
from swiftbatch.worker.kernels.cuda import cuda_row_table
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.decoder_weights import AdapterWeights, DecoderWeights
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.native_decoder import NativeDecoder, native_attention
from swiftbatch.worker.kernels.native_library import Team, open_library
from swiftbatch.worker.kv import scan_cache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling import native_sampler as sampling
from swiftbatch.worker.sampling import native_sampler as sampling_calls
from swiftbatch.worker.sampling.draft_tree import TOP_K
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.kernels.kernel_parts import (
    COMPRESSED,
    INDEXED,
    LATENTS,
    SHAPES,
    Shape,
    coded_cache,
    random_cache,
    random_griffin,
    random_partial_rows,
    random_tree,
    random_weights,
    scanned_noise,
)
from tests.worker.kernels.quantized_parts import packed_weights
from tests.worker.sampling.native.sampling_parts import any_params, any_row, cases, native_draw, penalised_counts

LENGTHS: tuple[int, ...] = (0, 1, 63, 64, 65, 250, 256, 300, 2047, 2049, 4100)
ADAPTED = ("query", "value", "output", "gate", "up", "down")
CAUSAL_LENGTHS = (1, 2, 63, 64, 65, 129, 300, 700)
GRIFFINS = ((0, 0), (1, 0), (2, 0), (1, 48), (2, 80))  # parts of the input, and the width of the expansion
MOST_SCANNING = 127  # rows that scan, and their chunks: each row reads all keys
MOST_CHUNKS = 3
SPOILED = (-(2**31), -1, 0, 1, 63, 64, 65, 2**20, 2**31 - 1, 2**40)


@functools.cache
def sanitized() -> ctypes.CDLL:
    """Open once, because each integrity check reads it from disk."""
    return open_library(Path(sys.argv[1]))


def random_rows(numbers: random.Random, shape: Shape) -> SequenceRows | SparseRows:
    length = numbers.choice(LENGTHS)
    if numbers.random() < 0.4:
        is_scanned = numbers.random() < 0.5 and shape.latent is None
        most = MOST_SCANNING if is_scanned else MAX_TREE_NODES
        rows = random_partial_rows(numbers, shape, length, numbers.randrange(most))
        num_best, first = numbers.choice((1, 40, 5000)), numbers.randrange(80)
        num_chunks = numbers.randint(1, MOST_CHUNKS)
        scanned = scanned_noise(shape, num_chunks, num_best, first) if is_scanned else None
        return dataclasses.replace(rows, scanned=scanned)
    tree = random_tree(numbers, numbers.randrange(40), length, shape.vocab)
    kv_dtype = numbers.choice((None, "int8", "fp8") if shape not in INDEXED else (None,))
    cache = coded_cache(shape, kv_dtype, length, MAX_TREE_NODES) if kv_dtype else random_cache(shape, length)
    return tree_rows(cache, numbers.randrange(shape.vocab), tree)


def spoil(numbers: random.Random, rows: SequenceRows | SparseRows) -> SequenceRows | SparseRows:
    value = numbers.choice(SPOILED)
    name = numbers.choice([field.name for field in dataclasses.fields(rows) if field.name not in ("cache", "scanned")])
    field = getattr(rows, name)
    if isinstance(field, int):
        return dataclasses.replace(rows, **{name: value})
    if name == "biases":
        return dataclasses.replace(rows, biases=np.zeros(abs(value) % 4096, numbers.choice((np.float32, np.float64))))
    changed = field.copy()
    changed[numbers.randrange(len(rows))] = value
    return dataclasses.replace(rows, **{name: changed})


def random_adapter(numbers: random.Random, weights: DecoderWeights) -> AdapterWeights:
    """Adapt some weights of some layers."""
    layers: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []
    for layer in weights.layers:
        found = {role: getattr(layer, role) for role in ADAPTED if numbers.random() < 0.7}
        sizes = {role: linear.weight.shape for role, linear in found.items() if linear is not None}
        rank = numbers.choice((16, 48))
        layers.append(
            {role: (torch.randn(rank, size[1]), 0.1 * torch.randn(size[0], rank)) for role, size in sizes.items()}
        )
    return AdapterWeights(layers)


def fuzz(shape: Shape, weights: DecoderWeights, numbers: random.Random, num_rounds: int) -> None:
    adapters = [] if shape.latent is not None else [random_adapter(numbers, weights) for _ in range(2)]
    decoder = NativeDecoder(weights, 2, "sanitized")
    for adapter in adapters:
        decoder.add_adapter(adapter)
    for _ in range(num_rounds):
        groups = [random_rows(numbers, shape) for _ in range(numbers.randrange(1, 4))]
        for group in groups:
            group.cache.adapter = numbers.randint(0, len(adapters))
        sizes = (2, sum(len(group) for group in groups), shape.num_kv_heads * shape.group, shape.head_dim)
        queries = torch.full(sizes, torch.nan, dtype=shape.dtype) if numbers.random() < 0.5 else None
        _, logits = decoder.forward(groups, queries=queries)
        assert logits is not None
        assert torch.isfinite(logits).all()
        assert queries is None or torch.isfinite(queries).all()
        with suppress(ValueError):
            decoder.forward([spoil(numbers, group) for group in groups])
        fill_tables(numbers, shape, groups)
    heads = [numbers.randrange(1, 9), 1, 1]
    rows = random_rows(numbers, shape)
    tensors = [torch.randn(len(rows), num * shape.num_kv_heads, shape.head_dim).to(shape.dtype) for num in heads]
    native_attention(Team(sanitized(), 2), [rows], 1, *tensors, 0.1)


def fuzz_compressed(shape: Shape, numbers: random.Random, num_rounds: int) -> None:
    decoder = NativeDecoder(random_weights(shape), 2, "sanitized")
    for _ in range(2 * num_rounds):
        lengths = [numbers.choice(LENGTHS) for _ in range(numbers.randrange(1, 4))]
        trees = [random_tree(numbers, numbers.randrange(40), length, shape.vocab) for length in lengths]
        groups = [tree_rows(random_cache(shape, length), 5, tree) for length, tree in zip(lengths, trees, strict=True)]
        _, logits = decoder.forward(groups)
        assert logits is not None
        assert torch.isfinite(logits).all()
        for _ in range(4):
            with suppress(ValueError):
                decoder.forward([spoil(numbers, group) for group in groups])


def fill_tables(numbers: random.Random, shape: Shape, groups: list[SequenceRows | SparseRows]) -> None:
    page, has_windows = numbers.choice(((None, False), (BLOCK, False), (2 * BLOCK, True)))
    groups = [dataclasses.replace(each, boundary=each.first_entry) if each.is_partial else each for each in groups]
    sizes = (len(groups), 80 * BLOCK, numbers.choice((1, 4, 16)), 2**20, shape.vocab, 1, page)
    layout = TableLayout(*sizes, num_rows=sum(map(len, groups)), has_window_pages=has_windows)
    own, windowed = ([[numbers.randrange(500) for _ in range(80)] for _ in groups] if page else () for _ in range(2))
    buffer = np.zeros(layout.size, dtype=np.int32)
    for is_wrong in (False, True):
        given = [spoil(numbers, group) if is_wrong else group for group in groups]
        with suppress(ValueError) if is_wrong else nullcontext():
            layout.fill(buffer, [*zip(given, range(len(given)), strict=True)], own, windowed)
    tree = random_tree(numbers, 70, 0, shape.vocab)
    tree.parents[numbers.randrange(len(tree))] = numbers.choice(SPOILED)
    with suppress(ValueError):
        tile_packing.tails([64], [64 + numbers.randrange(64)], [tree])


def fuzz_recycling(vocab: int, numbers: random.Random, num_rounds: int) -> None:
    tables = RecyclingTables(vocab)
    recycling = NativeRecycler(tables, True, "sanitized")
    for _ in range(5 * num_rounds):
        recycling.write([random_text(numbers, vocab, vocab) for _ in range(numbers.randrange(1, 4))])
        ends = [[numbers.randrange(vocab) for _ in range(9)] for _ in range(numbers.randrange(1, 4))]
        sequences = [Sequence("s", end, any_params(numbers), vocab) for end in ends]
        wanted = [(each, numbers.randrange(MOST_NODES + 2), numbers.randrange(20)) for each in sequences]
        for tree in recycling.trees(wanted):
            assert all(0 <= token_id < vocab for token_id in tree.token_ids)
        with suppress(ValueError):
            recycling.write([random_text(numbers, vocab, vocab + 1)])


def random_text(numbers: random.Random, vocab: int, end: int) -> TextCandidates:
    """Candidates are below `end`, tokens below `vocab`."""
    num_rows = numbers.randrange(1, 40)
    token_ids, ids = (
        [numbers.randrange(most) for _ in range(num_rows * each)] for most, each in ((vocab, 1), (end, 8))
    )
    logprobs = np.array([numbers.choice((-1e4, -9.0, -2.0, -0.1)) for _ in ids], dtype=np.float32)
    in_text = numbers.sample(range(num_rows), numbers.randrange(num_rows))
    previous_ids = [numbers.randrange(vocab) for _ in in_text]
    return TextCandidates(
        token_ids, np.array(ids).reshape(-1, TOP_K), logprobs.reshape(-1, TOP_K), in_text, previous_ids
    )


def fuzz_griffin(shape: Shape, numbers: random.Random, num_rounds: int, forms: Iterable[tuple[int, int]]) -> None:
    for num_parts, expansion in forms:
        team = Team(sanitized(), 2)
        draft = NativeGriffin(random_griffin(shape, num_parts, expansion), team)
        for _ in range((num_rounds + 1) // 2):
            groups = [random_rows(numbers, shape) for _ in range(numbers.randrange(1, 4))]
            features, embeddings = torch.randn(2, sum(map(len, groups)), shape.hidden).to(shape.dtype)
            for output in draft.forward(groups, features, embeddings):
                assert torch.isfinite(output).all()
            with suppress(ValueError):
                draft.forward([spoil(numbers, group) for group in groups], features, embeddings)


def fuzz_sampling(vocab: int, numbers: random.Random, num_rounds: int) -> None:
    for row, position, params, counts in cases(numbers, vocab, 5 * num_rounds):
        native_draw(row, position, params, 0, penalised_counts(params, counts))
    for _ in range(num_rounds):
        tree = random_tree(numbers, numbers.randrange(40), 0, vocab)
        rows = torch.stack([any_row(numbers, vocab) for _ in range(len(tree) + 1)])
        sequence = Sequence("s", [numbers.randrange(vocab) for _ in range(9)], any_params(numbers), vocab)
        sampler = sampling.NativeSampler(sequence)
        [walked] = sampling.walk([sampler], [tree], [rows])
        for mode in get_args(LogprobsMode):
            sampling.logprobs(sampler, tree, rows, walked, numbers.randrange(MAX_TOP_LOGPROBS + 1), mode)
        if vocab >= TOP_K:
            sampling.top_candidates(rows)


def fuzz_causal(numbers: random.Random, num_rounds: int) -> None:
    for _ in range(num_rounds):
        num_kv_heads, group, length = numbers.randrange(1, 4), numbers.randrange(1, 4), numbers.choice(CAUSAL_LENGTHS)
        batch_size = numbers.randrange(1, 4)
        query, key, value = (
            torch.randn(batch_size, length, count, 64).to(torch.bfloat16).transpose(1, 2).requires_grad_()
            for count in (num_kv_heads * group, num_kv_heads, num_kv_heads)
        )
        output = causal_attention.causal_attention(query, key, value, 0.125)
        output.backward(torch.randn_like(output))
        assert all(torch.isfinite(each).all() for each in (output, query.grad, key.grad, value.grad))


if __name__ == "__main__":
    rounds = int(sys.argv[2])
    if rounds == 1:  # long texts, and rows that read all keys, take most of the time
        LENGTHS, MOST_SCANNING, MOST_CHUNKS = LENGTHS[:8], 12, 2
    cuda_row_table.chosen_library = tile_packing.chosen_library = sanitized  # type: ignore[attr-defined]
    token_recycling.load_library = lambda _: sanitized()  # type: ignore[attr-defined]
    scan_cache.load_library = lambda _: sanitized()  # type: ignore[attr-defined]
    causal_attention.load_library = native_decoder.load_library = sampling_calls.load_library = lambda _: sanitized()  # type: ignore[assignment]
    sampling_calls.chosen_variant = lambda: "sanitized"
    # one round covers every second shape, plain and packed in turns, and each draft form once
    for number, each in enumerate(SHAPES if rounds > 1 else SHAPES[::2]):
        made = (random_weights, packed_weights)
        for make in made if rounds > 1 else [made[number % 2]]:
            fuzz(each, make(each), random.Random(str(each)), rounds)
        fuzz_griffin(each, random.Random(str(each)), rounds, GRIFFINS if rounds > 1 else GRIFFINS[number : number + 1])
    for each in (*LATENTS, *INDEXED):
        fuzz(each, random_weights(each), random.Random(str(each)), rounds)
    for each in COMPRESSED:
        fuzz_compressed(each, random.Random(str(each)), rounds)
    for size in (1, 7, 8, 64, 65, 1000):
        fuzz_sampling(size, random.Random(size), rounds)
    for size in (1, 30, 1000):
        fuzz_recycling(size, random.Random(size), rounds)
    if (isa := sanitized().kernels_variant().decode()) in causal_attention.FAST_VARIANTS:
        causal_attention.chosen_variant = lambda: isa
        fuzz_causal(random.Random(isa), rounds)
    print("nothing found")
