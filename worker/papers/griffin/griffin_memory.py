"""The memory that GRIFFIN takes of a GPU, from the head of its file: known before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import safe_open

from swiftbatch.worker.caches.memory.memory_plan import CAPACITY_BLOCK, NO_DRAFTS, DraftMemory, slot_capacity
from swiftbatch.worker.caches.memory.model_sizes import ModelSizes, num_parameters
from swiftbatch.worker.drawing.cuda.buffers import BLOCK
from swiftbatch.worker.drawing.cuda.row_words import NUM_MASKED
from swiftbatch.worker.kernels.sizes import NUM_ROWS
from swiftbatch.worker.papers.griffin.draft_input import NUM_PLACES
from swiftbatch.worker.papers.griffin.griffin_weights import CONFIG
from swiftbatch.worker.papers.griffin.model import SECOND_FUSIONS, GriffinConfig
from swiftbatch.worker.papers.griffin.window import NUM_ENTRIES

MOST_CANDIDATES = 16  # candidates kept of a row, each with a rank of 8 bytes in every block of tokens
SLOT_LOGIT_BYTES = 12  # bytes a token: its counts in the penalty's window and in the output, and its bias
CAPACITY = slot_capacity(NUM_ENTRIES)


def griffin_memory(part: Path, sizes: ModelSizes) -> DraftMemory:
    """Count the memory of the draft model in a file, for a target of these sizes."""
    try:
        with safe_open(part, framework="numpy") as file:
            config = GriffinConfig(**json.loads(file.metadata()[CONFIG]))
    except (ValueError, TypeError, KeyError):
        return NO_DRAFTS  # whoever loads it says what is wrong
    numbers = num_parameters([part]) + _stacked_numbers(config) + NUM_ROWS * _row_numbers(config)
    numbers += CAPACITY * config.head_dim  # angles
    logits = NUM_ROWS * sizes.vocab * 4 + _ranking_bytes(sizes.vocab) + _scratch_bytes(config)
    return DraftMemory(part_bytes=numbers * sizes.item_size + logits, slot_bytes=_slot_bytes(config, sizes))


def _stacked_numbers(config: GriffinConfig) -> int:
    """Count the numbers of matrices that are there twice while they are stacked."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (heads + 2 * config.intermediate_size) * config.hidden_size


def _row_numbers(config: GriffinConfig) -> int:
    """Count a row's activations: pairs, parts, expanded; state, normed, change, predicted, regressed; heads; gates."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fusion = (2 + len(SECOND_FUSIONS[config.fusion])) * config.hidden_size + config.expansion_size
    return fusion + 5 * config.hidden_size + 3 * query + 2 * key + 3 * config.intermediate_size


def _ranking_bytes(vocab: int) -> int:
    """Ranks of the best tokens of every block, three numbers of it, and what is told and said of each row."""
    told = 1024 + 4 * NUM_MASKED + vocab // 8 + 4
    return NUM_ROWS * (-(-vocab // BLOCK) * (MOST_CANDIDATES * 8 + 16) + MOST_CANDIDATES * 8 + told)


def _scratch_bytes(config: GriffinConfig) -> int:
    """Partial sums of attention, a split for each block of a window."""
    return CAPACITY // CAPACITY_BLOCK * NUM_ROWS * config.num_heads * (config.head_dim + 1) * 4


def _slot_bytes(config: GriffinConfig, sizes: ModelSizes) -> int:
    """Keys and values of the window, features, counts of tokens with the tables that move them, and their bias."""
    numbers = 2 * CAPACITY * config.num_kv_heads * config.head_dim + NUM_PLACES * config.hidden_size
    return numbers * sizes.item_size + sizes.vocab * SLOT_LOGIT_BYTES + 1024
