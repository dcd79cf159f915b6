"""The benchmark of a GPU once there is one: stage after stage, each with the memory to itself.

It says which lengths have room in the memory, and how much was taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.gpu_figures import GPUBenchOptions, GPUBenchResult
from bench.gpu.gpu_steps import read_records, resume_record, step_records
from bench.peak_memory import peak_bytes, reset_peak
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.bench_texts import BenchError
from swiftbatch.worker.decode_bench import NUM_WARMUP_TOKENS, DecodeBenchOptions, DecodeRecord, decode_records, machine
from swiftbatch.worker.drafters.catalogue import check_parts
from swiftbatch.worker.exactness.gpu_doctor.machine_checks import device_facts, read_bandwidth
from swiftbatch.worker.exactness.gpu_doctor.model_under_test import Parts
from swiftbatch.worker.kv.free_memory import MEMORY, KVRoom
from swiftbatch.worker.kv.gpu_memory_plan import GPUMemory, one_slot
from swiftbatch.worker.kv.kv_capacity import GB, GPU_PAGE
from swiftbatch.worker.kv.model_sizes import ModelSizes, read_sizes

NUM_CACHES = 2  # an engine has a job's and the warm-up text's; a resume has as many
TEMPERATURE, MIN_P = 1.0, 0.1  # of the engines


def measured(parts: Parts, options: GPUBenchOptions, report: Callable[[str], None]) -> GPUBenchResult:
    """All figures of a model on a device, in the file as they come. Raises BenchError where there is no room."""
    meter = MemoryMeter(parts.device)
    report("loading the model")
    if parts.loaded is None:
        raise BenchError(f"model {options.model}: the kernels do not know this kind, expected one of docs/kernels.md")
    meter.note("weights")
    figures = GPUFigures(options, parts, meter)
    bandwidth = read_bandwidth(parts)
    figures.add(machine=device_facts(parts.device), bytes_per_second=bandwidth)
    parts.forget_unused()
    fitting = _fitting(parts, options)
    report(f"steps behind up to {max(fitting[1]):,} positions")
    wanted = {num_slots: fitting[num_slots] for num_slots in options.slot_counts}
    figures.add(steps=list(step_records(parts, wanted, options.row_counts, bandwidth)))
    meter.note("steps")
    report("prompts, and a cache on its way from slot to slot")
    figures.add(reads=list(read_records(parts, [0, *fitting[1][1:]], options.num_read)))
    figures.add(resume=resume_record(parts, fitting[NUM_CACHES][-1]))
    names, left_out = _engines(parts, options)
    engines: list[DecodeRecord] = []
    for record in _engine_records(parts, options, names, fitting[NUM_CACHES], report):
        engines.append(record)
        figures.add(engines=engines)
    meter.note("engines")
    figures.add(left_out=left_out)
    return GPUBenchResult.model_validate(figures.so_far)


class GPUFigures:
    """The figures measured so far. The file has them at any moment, so that a run that is cut off leaves them."""

    def __init__(self, options: GPUBenchOptions, parts: Parts, meter: MemoryMeter) -> None:
        self.so_far: dict[str, Any] = {"memory": meter.noted}
        self._options = options
        self._machine = machine(parts.target(1, 1))

    def add(self, **figures: Any) -> None:
        """Add fields of a `GPUBenchResult`."""
        self.so_far |= figures
        document = GPUBenchResult.model_construct(**self.so_far).model_dump()
        self._options.write(document, document["machine"] | self._machine)


def _fitting(parts: Parts, options: GPUBenchOptions) -> dict[int, list[int]]:
    """Return, for each number of slots, the lengths that have room. Raises BenchError where two caches have none."""
    sizes = read_sizes(parts.files, options.dtype)
    assert sizes is not None
    kernels = parts.kernels
    free = free_bytes(parts.device) + sizes.weight_bytes
    gpu = GPUMemory(free, parts.num_splits, kernels.attention, kernels.num_rows)
    behind = max(options.num_tokens, options.num_read, max(options.row_counts))
    lengths = [length for length in options.lengths if length + behind <= parts.files.max_positions]
    counts = sorted({1, NUM_CACHES, *options.slot_counts})
    fitting = {num_slots: fitting_lengths(sizes, gpu, lengths, behind, num_slots) for num_slots in counts}
    if not fitting[NUM_CACHES]:
        raise BenchError(
            f"{NUM_CACHES} caches of {options.lengths[0]:,} + {behind:,} positions: the model has "
            f"{parts.files.max_positions:,} positions, {gpu.free_bytes / GB:,.1f} GB are free without its weights"
        )
    return fitting


def _engines(parts: Parts, options: GPUBenchOptions) -> tuple[list[str], list[str]]:
    """Every engine whose trained parts are there, and a line about each of the others."""
    engines, left_out = [], []
    for name in options.engines:
        try:
            check_parts(name, str(parts.files.path), parts.files.fingerprint, options.draft_model)
            engines.append(name)
        except ModelError as error:
            left_out.append(str(error))
    return engines, left_out


def _engine_records(
    parts: Parts, options: GPUBenchOptions, engines: list[str], lengths: list[int], report: Callable[[str], None]
) -> Iterator[DecodeRecord]:
    decode = DecodeBenchOptions(
        draft_model=options.draft_model,
        engines=tuple(engines),
        positions=tuple(lengths),
        num_tokens=options.num_tokens,
        temperature=TEMPERATURE,
        min_p=MIN_P,
        repetition_penalty=1.0,
        seed=0,
        text=options.text,
    )
    warm_up = min(NUM_WARMUP_TOKENS, parts.files.max_positions // 2)
    target = parts.target(NUM_CACHES, max(lengths[-1] + options.num_tokens, warm_up))
    return decode_records(target, decode, report)


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(KVRoom(MEMORY, 1).free_bytes())


def fitting_lengths(
    sizes: ModelSizes, gpu: GPUMemory, lengths: list[int], num_behind: int, num_slots: int
) -> list[int]:
    """Lengths of which so many slots have room, each with `num_behind` positions more."""
    behind = num_behind + GPU_PAGE  # of whose last page a part stays empty
    return [length for length in lengths if one_slot(sizes, gpu, length + behind).num_fitting >= num_slots]


class MemoryMeter:
    """The most bytes that were held, stage by stage."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.noted: dict[str, int] = {}
        self._reset()

    def note(self, stage: str) -> None:
        """Note the most that was held since the last stage; on a GPU with what it has for itself."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            reserved = torch.cuda.memory_reserved(self._device)
            outside = total - free - reserved  # the context, other libraries' buffers, other processes
            self.noted[f"{stage}, at most"] = outside + torch.cuda.max_memory_reserved(self._device)
        else:
            self.noted[f"{stage}, at most"] = peak_bytes()
        self._reset()

    def _reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak()
