"""The memory of a GPU that an MTP layer takes: its weights, activations and logits once, and a track for each slot."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError

from swiftbatch.worker.caches.cache_room import ITEM_SIZES
from swiftbatch.worker.caches.memory.memory_plan import NO_DRAFTS, DraftMemory, GPUMemory, decoder_memory
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes, sizes_of_stored
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.model.formats.contract import FormatError
from swiftbatch.worker.model.formats.layout import heads_in
from swiftbatch.worker.model.model_files import ModelFiles, read_config
from swiftbatch.worker.model.mtp_layers import (
    OWN,
    NoPredictorError,
    Predictor,
    one_layer_config,
    predictor_in,
    predictor_of,
)
from swiftbatch.worker.papers.griffin.griffin_weights import SLOT_LOGIT_BYTES, ranking_bytes
from swiftbatch.worker.papers.mtp.track import NUM_ENTRIES, NUM_PLACES, NUM_SPLITS

DTYPES = {size: name for name, size in ITEM_SIZES.items()}


def predictor_memory(part: Path, files: ModelFiles, sizes: ModelSizes) -> DraftMemory:
    """Count the memory of the layer in a file, or among the weights in a folder, for a target of these sizes."""
    config = read_config(files.name, files.path)
    try:
        if part.is_file():
            predictor = predictor_of(heads_in(part).items(), config, files.path)
        else:
            predictor = predictor_in(part, config)
    except (NoPredictorError, FormatError, OSError, SafetensorError):
        return NO_DRAFTS  # whoever loads it says what is wrong
    layer = sizes_of_stored(one_layer_config(config), predictor.layout.heads, DTYPES[sizes.item_size])
    if layer is None:
        return NO_DRAFTS
    decoder = decoder_memory(layer, GPUMemory(0, NUM_SPLITS), NUM_ENTRIES)
    numbers = NUM_ROWS * 2 * layer.hidden + _stacked_numbers(layer)  # joined rows
    part_bytes = decoder.part_bytes + numbers * layer.item_size + _join_bytes(predictor, layer)
    features = NUM_PLACES * layer.hidden * layer.item_size
    slot_bytes = decoder.slot_bytes + features + sizes.vocab * SLOT_LOGIT_BYTES + 1024
    return DraftMemory(part_bytes + ranking_bytes(sizes.vocab), slot_bytes)


def _stacked_numbers(layer: ModelSizes) -> int:
    """Count the numbers of matrices that are there twice while they are stacked: in front of attention, or gates."""
    heads = (2 * layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    return max(heads, 2 * layer.intermediate) * layer.hidden


def _join_bytes(predictor: Predictor, layer: ModelSizes) -> int:
    """Count the bytes that the layer's own parts take as plain numbers, beyond their packed form."""
    own = [head.num_numbers for name, head in predictor.layout.heads.items() if name.startswith(OWN)]
    return sum(own) * layer.item_size if layer.packed else 0
