"""The tables of docs/gpu.md: slots that fit a GPU, with weights in bfloat16 and with packed ones.

`python -m swiftbatch.worker.bench.gpu.sizing` prints them; no GPU is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from swiftbatch.worker.bench.gpu.packed_models import packed_models
from swiftbatch.worker.caches.memory.memory_plan import DraftMemory, GPUMemory, MemoryPlan, one_slot
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes
from swiftbatch.worker.caches.room import GB
from swiftbatch.worker.caches.summary import summary_positions
from swiftbatch.worker.drafters.catalogue import ENGINES
from swiftbatch.worker.inspection.inspection import CONTEXT_BYTES, GPU_BYTES, SLOT_LENGTHS
from swiftbatch.worker.kernels.sizes import MOST_SLOTS

GPUS = {"A100 80 GB": 108, "H100 80 GB": 132}  # multiprocessors
MODELS = {
    "Llama 3.1 8B": ModelSizes(8_030_261_248, 131_072, 32, 8, 128, 4096, 14336, 128_256, 2),
    "Qwen2.5 32B": ModelSizes(32_763_876_352, 262_144, 40, 8, 128, 5120, 27648, 152_064, 2),
}
LENGTHS = (32_768, 100_000)
HEADERS = ("model", "GPU", "positions", "weights", "a slot", "work space", "slots", "with drafts a slot", "slots then")


def gpu_memory(num_multiprocessors: int, free_bytes: int) -> GPUMemory:
    """A GPU with half as many splits as multiprocessors: two rounds of two programs on each, with 8 KV heads."""
    return GPUMemory(free_bytes, num_splits=num_multiprocessors // 2)


def sizing_table() -> str:
    """Markdown: what each model takes of each GPU in bfloat16, in GB, and how many slots of each length fit."""
    lines = [HEADERS, ["---"] * len(HEADERS), *_rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rows() -> Iterator[list[str]]:
    for (model, sizes), (name, num_multiprocessors), length in product(MODELS.items(), GPUS.items(), LENGTHS):
        gpu = gpu_memory(num_multiprocessors, GPU_BYTES - CONTEXT_BYTES)
        draft_bytes = summary_positions(ENGINES["tokenswift"].partial_budget, length) * sizes.bytes_per_position
        plain = one_slot(sizes, gpu, length)
        drafting = one_slot(sizes, gpu, length, DraftMemory(slot_bytes=draft_bytes))
        figures = [plain.weight_bytes, plain.slot_bytes, plain.work_bytes]
        slots = [_slots(plain), f"{(plain.slot_bytes + draft_bytes) / GB:.1f}", _slots(drafting)]
        yield [model, name, f"{length:,}", *(f"{each / GB:.1f}" for each in figures), *slots]


def packed_table() -> str:
    """Markdown: what the weights of a model take in each form, in GB, and how many slots of each length fit then."""
    headers = ("weights of", "form", "GB", "GPU", *(f"slots of {length:,}" for length in SLOT_LENGTHS))
    lines = [headers, ["---"] * len(headers), *_packed_rows()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _packed_rows() -> Iterator[list[str]]:
    for (model, form, sizes), (name, number) in product(packed_models(), GPUS.items()):
        gpu = gpu_memory(number, GPU_BYTES - CONTEXT_BYTES)
        slots = [_slots(one_slot(sizes, gpu, length)) for length in SLOT_LENGTHS]
        yield [model, form, f"{sizes.weight_bytes / GB:.1f}", name, *slots]


def _slots(plan: MemoryPlan) -> str:
    return str(min(MOST_SLOTS, plan.num_fitting)) if plan.num_fitting else "none"


if __name__ == "__main__":
    print(sizing_table(), packed_table(), sep="\n\n")
