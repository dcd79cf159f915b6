"""Few long jobs among many short ones, with little cache memory.

Compared with slots of the longest job's length, and with vLLM.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from bench.batch_run import ROOM_FOR_PROMPT, BatchError, BatchOptions, StartedRun, jobs_file_of
from bench.peers import in_library
from bench.tables import Record, only
from swiftbatch.worker.kv.kv_capacity import GB, bytes_per_position
from swiftbatch.worker.model.model_files import CONFIG_FILES, locate_model, model_folder, read_config

NUM_LONG, LONG = 10, 40_000
NUM_SHORT, SHORT = 90, (1000, 4000)
COLUMNS = ("way", "num_tokens", "seconds", "tokens_per_second")


class Options(BatchOptions):
    """Options; `scale` divides the memory like the lengths."""

    kv_memory: float = 2.0  # GB at full lengths
    vllm: Path | None = None  # a Python with vLLM


def mixed_lengths(options: Options) -> list[int]:
    draw = random.Random(3)
    lengths = [LONG] * NUM_LONG + [draw.randint(*SHORT) for _ in range(NUM_SHORT)]
    draw.shuffle(lengths)
    return [options.scaled(length) for length in lengths]


def run(options: Options) -> Iterator[Record]:
    """Run 10 jobs of 40,000 tokens among 90 of 1,000 to 4,000 on one worker on CPUs with 2 GB for caches.

    Then the same jobs in slots of the longest one's length, and in vLLM. The start of a worker, or of vLLM, does not
    count. All lengths, and the memory, are divided by --scale.

    \b
    Example:
      python -m bench mixed --scale 10 --vllm vllm/bin/python --json mixed.jsonl
    """
    lengths, memory = mixed_lengths(options), options.kv_memory / options.scale
    sizes = {"pages": ("--kv-memory", str(memory)), "slots": ("--slots", str(_slots_of(options, memory, max(lengths))))}
    with jobs_file_of(lengths) as jobs:
        digests = []
        for way, size in sizes.items():
            record = {"way": way} | StartedRun.of(jobs, way, options, 1, *size).figures()
            yield record
            digests.append(record["digests"])
        if digests[0] != digests[1]:
            raise BatchError(
                "the two runs have other tokens: they were to be the same, `swiftbatch doctor` may tell why"
            )
        if options.vllm is not None:
            yield {"way": "vllm"} | _in_vllm(options.vllm, jobs, options, memory, max(lengths))


def _slots_of(options: Options, memory: float, longest: int) -> int:
    """Raises BatchError."""
    config = read_config(options.model, model_folder(options.model, CONFIG_FILES))
    num_bytes = bytes_per_position(config, options.dtype)
    if num_bytes is None:
        raise BatchError(f"--model {options.model}: its config does not say what a position of its caches takes")
    return max(1, int(memory * GB / num_bytes) // (longest + ROOM_FOR_PROMPT))


def _in_vllm(python: Path, jobs: Path, options: Options, memory: float, longest: int) -> Record:
    """Leave out vLLM's start.

    Raises BatchError.
    """
    asked = {
        "dtype": options.dtype,
        "max_model_len": longest + ROOM_FOR_PROMPT,
        "kv_cache_memory_bytes": int(memory * GB),
        "enable_prefix_caching": True,
    }
    lines = [json.loads(line) for line in jobs.read_text(encoding="utf-8").splitlines()]
    model = str(locate_model(options.model).path)
    [batch] = in_library("vllm", python, model, asked, [lines], options.num_threads)["batches"]
    figures: Record = batch | {"tokens_per_second": batch["num_tokens"] / batch["seconds"]}
    return figures


def shown(records: list[Record], options: Options) -> list[Record]:
    return only(records, COLUMNS)
