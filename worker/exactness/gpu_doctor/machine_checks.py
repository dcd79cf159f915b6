"""First checks: the device, its read speed, and equal noise in all draws."""

from __future__ import annotations

import importlib.metadata
import platform
import random

import torch
import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.exactness.gpu_doctor.findings import Finding, Row
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.forward.hardware import cpu_capability, cublas_version, driver_version
from swiftbatch.worker.sampling.cuda.logits_kernels import gumbel, gumbel_bound, noise_words
from swiftbatch.worker.sampling.noise import BLOCK, gumbel_block, philox4x32

LEAST_CAPABILITY = (8, 0)  # older tensor cores lack bf16


def check_machine(parts: Parts) -> Finding:
    """Check versions, GPU and memory bandwidth."""
    facts = device_facts(parts.device)
    rows: list[Row] = [{"what": what, "found": found} for what, found in facts.items()]
    gigabytes = read_bandwidth(parts) / 1e9
    rows.append({"what": "read bandwidth", "found": f"{gigabytes:,.1f} GB/s"})
    capability = capability_of(parts.device)
    if capability < LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return Finding(passed=False, words=f"compute capability {found}, expected 8.0 or higher", rows=rows)
    return Finding(passed=True, words=f"memory is read at {gigabytes:,.1f} GB/s", rows=rows)


def capability_of(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else LEAST_CAPABILITY


def device_facts(device: torch.device) -> dict[str, str]:
    """Return everything that bits and speed may depend on."""
    facts = {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}
    facts = {"python": platform.python_version(), **facts}
    if device.type != "cuda":
        return facts | {"device": f"{device.type} {cpu_capability()}, Triton's interpreter"}
    properties = torch.cuda.get_device_properties(device)
    return facts | {
        "CUDA": str(torch.version.cuda),
        "cuBLAS": cublas_version(),
        "driver": driver_version(),
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory / 1e9:.1f} GB",
        "L2 cache": f"{properties.L2_cache_size / 1e6:.0f} MB",
    }


def read_bandwidth(parts: Parts) -> float:
    """Return the bytes per second of a kernel that only reads, beyond all caches."""
    numbers = torch.zeros(num_read(parts.extent.read_bytes), dtype=torch.int32, device=parts.device)
    sums = torch.zeros(len(numbers) // SPAN, dtype=torch.int32, device=parts.device)
    seconds = parts.seconds(lambda: read_all(numbers, sums))
    return numbers.nbytes / seconds


MASK = 0xFFFFFFFF
MOST_DIFFERING = 1e-5  # a share; about one in 10^8 numbers differs in a logarithm's last bit
MOST_DISTANCE = 1e-6  # relative: one unit in the last place


def check_noise(parts: Parts) -> Finding:
    """Compare words of random seeds and positions with torch's generator, and numbers with the CPU's."""
    rng, vocab_size = random.Random(0), parts.sizes.vocab
    rows: list[Row] = []
    for number in range(max(1, parts.extent.num_positions // BLOCK)):
        seed, first = rng.getrandbits(64), rng.getrandbits(20 + 20 * (number % 2)) // BLOCK * BLOCK
        words, numbers, distance = _differing(parts, seed, first, vocab_size)
        row: Row = {"seed": str(seed), "position": first, "tried": BLOCK * vocab_size}
        rows.append(row | {"words differing": words, "numbers differing": numbers, "distance": distance})
    tried, words, numbers = (
        sum(int(row[name]) for row in rows) for name in ("tried", "words differing", "numbers differing")
    )
    distance = max(float(row["distance"]) for row in rows)
    passed = words == 0 and numbers <= MOST_DIFFERING * tried and distance <= MOST_DISTANCE
    said = f"{words:,} of {tried:,} words differ, {numbers:,} numbers do, by {distance:.2g} of themselves at most"
    return Finding(passed=passed, words=said, rows=rows)


def _differing(parts: Parts, seed: int, first: int, vocab_size: int) -> tuple[int, int, float]:
    """Return how many words and numbers differ at `BLOCK` positions, and the greatest relative distance."""
    expected = gumbel_block(seed, first, vocab_size, torch.device("cpu"))
    words_differing = numbers_differing = 0
    distance = 0.0
    for offset in range(BLOCK):
        words, noise = (each.cpu() for each in noise_of(seed, first + offset, vocab_size, parts.device))
        words_differing += int((words != _words(seed, first + offset, vocab_size)).sum())
        differs = noise != expected[offset]
        if differs.any():
            numbers_differing += int(differs.sum())
            apart = (noise[differs] - expected[offset][differs]).abs() / expected[offset][differs].abs()
            distance = max(distance, float(apart.nan_to_num(torch.inf).max()))
    return words_differing, numbers_differing, distance


def _words(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Return words `[vocab] int64` in the order of the tokens."""
    quads = torch.arange((vocab_size + 3) // 4)
    zeros = torch.zeros_like(quads)
    counter = (quads, zeros + (position & MASK), zeros + (position >> 32), zeros)
    return torch.stack(philox4x32(counter, (seed & MASK, seed >> 32)), dim=-1).flatten()[:vocab_size]


READ_BLOCK = 4096  # numbers that a program reads at a time
READS_PER_PROGRAM = 16
SPAN = READ_BLOCK * READS_PER_PROGRAM
NOISE_BLOCK = 1024
WORD = 0xFFFFFFFF
READ_CONSTANTS = {"BLOCK": READ_BLOCK, "NUM_READS": READS_PER_PROGRAM, "num_warps": 8}


@triton.jit
def read_numbers(numbers_ptr, sums_ptr, BLOCK: tl.constexpr, NUM_READS: tl.constexpr):
    """Program (span): reads its span, and writes their sum so that the compiler drops no read."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * NUM_READS)
    acc = tl.zeros([BLOCK], tl.int32)
    for number in range(NUM_READS):
        acc += tl.load(numbers_ptr + start + number * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(acc, 0))


@triton.jit
def store_noise(words_ptr, noise_ptr, places_ptr, BLOCK: tl.constexpr):
    """Program (tokens): words and noise of one place, with seed and position in low and high words.

    Noise above its bound becomes NaN.
    """
    first = tl.program_id(0) * BLOCK
    seed_low, seed_high = tl.load(places_ptr), tl.load(places_ptr + 1)
    position_low, position_high = tl.load(places_ptr + 2), tl.load(places_ptr + 3)
    seed = (seed_high.to(tl.uint64) << 32) | seed_low.to(tl.uint64)
    words = noise_words(seed, position_low, position_high, first, BLOCK)
    tl.store(words_ptr + first + tl.arange(0, BLOCK), words.to(tl.int64))
    noise, bound = gumbel(words), gumbel_bound(words)
    tl.store(noise_ptr + first + tl.arange(0, BLOCK), tl.where(bound >= noise, noise, float("nan")))


def num_read(num_bytes: int) -> int:
    return max(1, num_bytes // (4 * SPAN)) * SPAN


def read_all(numbers: Tensor, sums: Tensor) -> None:
    read_numbers[(len(sums),)](numbers, sums, **READ_CONSTANTS)


def noise_of(seed: int, position: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return words `[vocab] int64` and Gumbel noise `[vocab] float32` of one position on this device."""
    num_blocks = triton.cdiv(vocab_size, NOISE_BLOCK)
    words = torch.zeros(num_blocks * NOISE_BLOCK, dtype=torch.int64, device=device)
    noise = torch.zeros(num_blocks * NOISE_BLOCK, device=device)
    place = [seed & WORD, seed >> 32, position & WORD, position >> 32]
    store_noise[(num_blocks,)](words, noise, torch.tensor(place, device=device), BLOCK=NOISE_BLOCK)
    return words[:vocab_size], noise[:vocab_size]
