"""Kernels that nothing is computed with: they show what a GPU is. How fast it reads, and which noise it draws."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.drawing.cuda.cuda_noise import gumbel, noise_words

READ_BLOCK = 4096  # numbers that a program reads at a time
READS_PER_PROGRAM = 16
SPAN = READ_BLOCK * READS_PER_PROGRAM
NOISE_BLOCK = 1024
WORD = 0xFFFFFFFF
READ_CONSTANTS = {"BLOCK": READ_BLOCK, "NUM_READS": READS_PER_PROGRAM, "num_warps": 8}


@triton.jit
def read_numbers(numbers_ptr, sums_ptr, BLOCK: tl.constexpr, NUM_READS: tl.constexpr):
    """Program (span): reads its span, and writes one number so that no read can be left out."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * NUM_READS)
    acc = tl.zeros([BLOCK], tl.int32)
    for number in range(NUM_READS):
        acc += tl.load(numbers_ptr + start + number * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def store_noise(words_ptr, noise_ptr, places_ptr, BLOCK: tl.constexpr):
    """Program (tokens): words and noise of one place, whose seed and position come as four words, low ones first."""
    first = tl.program_id(0) * BLOCK
    seed_low, seed_high = tl.load(places_ptr), tl.load(places_ptr + 1)
    position_low, position_high = tl.load(places_ptr + 2), tl.load(places_ptr + 3)
    seed = (seed_high.to(tl.uint64) << 32) | seed_low.to(tl.uint64)
    words = noise_words(seed, position_low, position_high, first, BLOCK)
    tl.store(words_ptr + first + tl.arange(0, BLOCK), words.to(tl.int64))
    tl.store(noise_ptr + first + tl.arange(0, BLOCK), gumbel(words))


def num_read(num_bytes: int) -> int:
    """Numbers of int32 in about so many bytes that `read_all` reads: whole programs."""
    return max(1, num_bytes // (4 * SPAN)) * SPAN


def read_all(numbers: Tensor, sums: Tensor) -> None:
    """Read `numbers [num_read(...)] int32` once, into their `sums [num_read(...) / SPAN] int32`."""
    read_numbers[(len(sums),)](numbers, sums, **READ_CONSTANTS)


def noise_of(seed: int, position: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Words `[vocab] int64` and Gumbel noise `[vocab] float32` of one position, as the draws on this device have it."""
    num_blocks = triton.cdiv(vocab_size, NOISE_BLOCK)
    words = torch.zeros(num_blocks * NOISE_BLOCK, dtype=torch.int64, device=device)
    noise = torch.zeros(num_blocks * NOISE_BLOCK, device=device)
    place = [seed & WORD, seed >> 32, position & WORD, position >> 32]
    store_noise[(num_blocks,)](words, noise, torch.tensor(place, device=device), BLOCK=NOISE_BLOCK)
    return words[:vocab_size], noise[:vocab_size]
