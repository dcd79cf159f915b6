"""GRIFFIN's weight file and its memory on a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from swiftbatch.worker.drafters.catalogue import FINGERPRINT, GRIFFIN
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, NUM_PLACES
from swiftbatch.worker.drafters.griffin.griffin_model import SECOND_FUSIONS, GriffinConfig, GriffinModel
from swiftbatch.worker.drafters.griffin.native_griffin import GriffinWeights
from swiftbatch.worker.drafters.trained_part import read_part
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, layer_weights, linear_of
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.rope_scaling import Rotary, default_frequencies
from swiftbatch.worker.kv.gpu_memory_plan import CAPACITY_BLOCK, NO_DRAFTS, DraftMemory, slot_capacity
from swiftbatch.worker.kv.model_sizes import ModelSizes, num_parameters
from swiftbatch.worker.model.model_files import ModelFiles, let_others_read
from swiftbatch.worker.sampling.cuda.sampling_rows import BLOCK, NUM_MASKED

CONFIG = "griffin_config"  # a JSON object in the file's header


def save_griffin(folder: Path, model: GriffinModel, model_fingerprint: str) -> None:
    """Write a draft model in bf16, with its config and the target's fingerprint."""
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in model.state_dict().items()}
    header = {FINGERPRINT: model_fingerprint, CONFIG: json.dumps(asdict(model.config))}
    save_file(tensors, folder / GRIFFIN.name, metadata=header)
    let_others_read(folder / GRIFFIN.name)


def load_griffin(parts_folder: Path | None, target: TargetModel) -> GriffinModel:
    """Read the draft model in `parts_folder`, or in the target's own folder if it is None.

    Raises ModelError if there is no draft model, or if it belongs to another target.
    """
    part = read_part(GRIFFIN, target, parts_folder)
    try:
        model = GriffinModel(GriffinConfig(**json.loads(part.header.get(CONFIG, ""))))
    except (ValueError, TypeError, KeyError) as error:
        raise part.fault(f"header `{CONFIG}`: {error}") from error
    found, expected = model.config.hidden_size, target.hidden_size
    if found != expected:
        raise part.fault(f"features of {found} numbers, but {target.files.name} has {expected}")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(part.checked(shapes))
    return model.to(target.device, target.dtype).eval().requires_grad_(False)


def packed_weights(model: GriffinModel, vocab_size: int) -> GriffinWeights:
    """Pack a draft model for the kernels. Raises ValueError for sizes that they do not take."""
    config, fusion, head = model.config, model.fusion, model.head
    layer_config = config.layer_config()
    sizes = DecoderSizes(
        num_layers=1,
        hidden=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=vocab_size,
        epsilon=layer_config.rms_norm_eps,
        scale=config.head_dim**-0.5,
        dtype=fusion.fuse.weight.dtype,
    )
    return GriffinWeights(
        sizes,
        layer_weights(model.layer),
        Rotary(default_frequencies(layer_config.rope_parameters["rope_theta"], config.head_dim)),
        fuse=linear_of(fusion.fuse),
        parts=list(zip(SECOND_FUSIONS[config.fusion], [linear_of(norm) for norm in fusion.norms], strict=True)),
        expand=None if fusion.up is None else linear_of(fusion.up),
        contract=None if fusion.down is None else linear_of(fusion.down),
        predict=None if head is None else linear_of(head.predict),
        regress=None if head is None else linear_of(head.regress),
    )


MOST_CANDIDATES = 16  # candidates kept per row, 8 bytes each in every block of tokens
SLOT_LOGIT_BYTES = 12  # bytes per token: its counts in the penalty's window and in the output, and its bias
CAPACITY = slot_capacity(NUM_ENTRIES)


def griffin_memory(part: Path, _files: ModelFiles, sizes: ModelSizes) -> DraftMemory:
    try:
        with safe_open(part, framework="numpy") as file:
            config = GriffinConfig(**json.loads(file.metadata()[CONFIG]))
    except (ValueError, TypeError, KeyError):
        return NO_DRAFTS  # the loader reports the fault
    numbers = num_parameters([part]) + _stacked_numbers(config) + NUM_ROWS * _row_numbers(config)
    numbers += CAPACITY * config.head_dim  # angles
    logits = NUM_ROWS * sizes.vocab * 4 + ranking_bytes(sizes.vocab) + _scratch_bytes(config)
    return DraftMemory(part_bytes=numbers * sizes.item_size + logits, slot_bytes=_slot_bytes(config, sizes))


def _stacked_numbers(config: GriffinConfig) -> int:
    """Count the elements of the matrices that exist twice while they are stacked."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    return (heads + 2 * config.intermediate_size) * config.hidden_size


def _row_numbers(config: GriffinConfig) -> int:
    """Count a row's activations: pairs, parts, expanded; state, normed, change, predicted, regressed; heads; gates."""
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    fusion = (2 + len(SECOND_FUSIONS[config.fusion])) * config.hidden_size + config.expansion_size
    return fusion + 5 * config.hidden_size + 3 * query + 2 * key + 3 * config.intermediate_size


def ranking_bytes(vocab: int) -> int:
    """Count the ranking's bytes: each block's logits and token ids, and each row's input and output."""
    told = 1024 + 4 * NUM_MASKED + vocab // 8 + 4
    return NUM_ROWS * (-(-vocab // BLOCK) * (MOST_CANDIDATES * 8 + 16) + MOST_CANDIDATES * 8 + told)


def _scratch_bytes(config: GriffinConfig) -> int:
    return CAPACITY // CAPACITY_BLOCK * NUM_ROWS * config.num_heads * (config.head_dim + 1) * 4


def _slot_bytes(config: GriffinConfig, sizes: ModelSizes) -> int:
    """Count a slot's bytes: keys and values, features, token counts with their tables, bias."""
    numbers = 2 * CAPACITY * config.num_kv_heads * config.head_dim + NUM_PLACES * config.hidden_size
    return numbers * sizes.item_size + sizes.vocab * SLOT_LOGIT_BYTES + 1024
