"""GPTQ: integers of 2, 3, 4 or 8 bits, also with columns in the order of their activations. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftbatch.worker.model.formats.contract import Format, Scheme, StoredTensor, one_of, positive, refuse_unknown
from swiftbatch.worker.model.formats.word_rows import SUFFIXES, GPTQScheme

WHERE = "its quantization_config"
ZERO_IS_LESS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 0}  # what the stored zeros lack, by the form of the checkpoint
KNOWN = (
    *("quant_method", "bits", "group_size", "desc_act", "static_groups", "sym", "true_sequential", "damp_percent"),
    *("damp_auto_increment", "model_name_or_path", "model_file_base_name", "checkpoint_format", "format", "meta"),
    *("tokenizer", "dataset", "batch_size", "exllama_config", "use_exllama", "disable_exllama", "max_input_length"),
    *("block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize", "inside_layer_modules"),
    *("module_name_preceding_first_block", "model_seqlen", "pad_token_id", "use_cuda_fp16", "mse", "pack_dtype"),
    *("act_group_aware", "backend", "lm_head", "modules_to_not_convert", "quantizer", "mock_quantization", "method"),
)


def read_gptq(said: Mapping[str, Any]) -> Format:
    """Raises FormatError."""
    refuse_unknown(said, KNOWN, WHERE)
    bits = one_of(said, "bits", (2, 3, 4, 8), WHERE)
    one_of(said, "pack_dtype", (None, "int32"), WHERE)
    form = one_of(said, "checkpoint_format", tuple(ZERO_IS_LESS), WHERE) or one_of(
        said, "format", tuple(ZERO_IS_LESS), WHERE
    )
    scheme = GPTQScheme(bits, group_size(said), ZERO_IS_LESS[form], bool(said.get("desc_act")))

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        return scheme if "qweight" in heads else None

    return Format("gptq", f"GPTQ (int{bits})", SUFFIXES, scheme_of, ".weight")


def group_size(said: Mapping[str, Any]) -> int | None:
    """The size of groups, None for all of the depth. Raises FormatError."""
    return None if said.get("group_size") == -1 else positive(said, "group_size", WHERE)
