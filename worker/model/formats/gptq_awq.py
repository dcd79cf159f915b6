"""GPTQ and AWQ: integers with zero points and scales, packed in 32-bit words. Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.model.formats.contract import (
    WHERE,
    Format,
    FormatError,
    StoredTensor,
    fits,
    form_of_integers,
    matrix_shape,
    one_of,
    only,
    part,
    positive,
    refuse_unknown,
)

SUFFIXES = {".qweight": "qweight", ".qzeros": "qzeros", ".scales": "scales", ".g_idx": "g_idx"}
SCALES = ("F16", "BF16", "F32")
WORD = 32  # bits


@dataclass(frozen=True)
class GPTQScheme:
    """`qweight [depth * bits / 32, num_columns]`; zero points are packed along columns, each `zero_is_less` smaller."""

    bits: int
    group: int | None  # None if one group spans the whole depth
    zero_is_less: int
    is_shuffled: bool  # groups may be in the order of activations (`desc_act`)

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, "qweight", "qzeros", "scales", "g_idx")
        words, num_columns = matrix_shape(part(heads, "qweight", "I32"))
        depth = _whole(words * WORD, self.bits)
        num_groups = -(-depth // (self.group or depth))
        fits("scales", part(heads, "scales", *SCALES).shape, (num_groups, num_columns))
        fits("qzeros", part(heads, "qzeros", "I32").shape, (num_groups, -(-num_columns * self.bits // WORD)))
        if "g_idx" in heads:
            fits("g_idx", part(heads, "g_idx", "I32").shape, (depth,))
        form = form_of_integers(self.bits, depth, self.group, heads["scales"].dtype, is_centred=False)
        return StoredTensor(
            f"int{self.bits}", (num_columns, depth), None if "g_idx" in heads and self.is_shuffled else form
        )


@dataclass(frozen=True)
class AWQScheme:
    """`qweight [depth, num_columns / 8]`: 4 bits per code, with the columns of a word in AWQ's order."""

    group: int | None

    def head(self, heads: Mapping[str, StoredTensor]) -> StoredTensor:
        only(heads, "qweight", "qzeros", "scales")
        depth, words = matrix_shape(part(heads, "qweight", "I32"))
        num_groups = -(-depth // (self.group or depth))
        fits("scales", part(heads, "scales", *SCALES).shape, (num_groups, words * 8))
        fits("qzeros", part(heads, "qzeros", "I32").shape, (num_groups, words))
        form = form_of_integers(4, depth, self.group, heads["scales"].dtype, is_centred=False)
        return StoredTensor("int4", (words * 8, depth), form)


def _whole(num_bits: int, bits: int) -> int:
    if num_bits % bits:
        raise FormatError(f"its part 'qweight' holds no whole number of codes of {bits} bits")
    return num_bits // bits


# GPTQ: integers of 2, 3, 4 or 8 bits, also with groups in the order of activations (`desc_act`).

ZERO_IS_LESS = {None: 1, "": 1, "gptq": 1, "gptq_v2": 0}  # the checkpoint's form -> number to add to stored zero points
GPTQ_KEYS = (
    *("quant_method", "bits", "group_size", "desc_act", "static_groups", "sym", "true_sequential", "damp_percent"),
    *("damp_auto_increment", "model_name_or_path", "model_file_base_name", "checkpoint_format", "format", "meta"),
    *("tokenizer", "dataset", "batch_size", "exllama_config", "use_exllama", "disable_exllama", "max_input_length"),
    *("block_name_to_quantize", "cache_block_outputs", "modules_in_block_to_quantize", "inside_layer_modules"),
    *("module_name_preceding_first_block", "model_seqlen", "pad_token_id", "use_cuda_fp16", "mse", "pack_dtype"),
    *("act_group_aware", "backend", "lm_head", "modules_to_not_convert", "quantizer", "mock_quantization", "method"),
)


def read_gptq(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, GPTQ_KEYS, WHERE)
    bits = one_of(said, "bits", (2, 3, 4, 8), WHERE)
    one_of(said, "pack_dtype", (None, "int32"), WHERE)
    form = one_of(said, "checkpoint_format", tuple(ZERO_IS_LESS), WHERE) or one_of(
        said, "format", tuple(ZERO_IS_LESS), WHERE
    )
    scheme = GPTQScheme(bits, group_size(said), ZERO_IS_LESS[form], bool(said.get("desc_act")))
    return Format(
        "gptq", f"GPTQ (int{bits})", SUFFIXES, lambda _, heads: scheme if "qweight" in heads else None, ".weight"
    )


def group_size(said: Mapping[str, Any]) -> int | None:
    return None if said.get("group_size") == -1 else positive(said, "group_size", WHERE)


# AWQ: integers of 4 bits with zero points, in the order of AWQ's matrix kernels (`gemm`).

AWQ_KEYS = (
    *("quant_method", "bits", "group_size", "q_group_size", "w_bit", "version", "format", "zero_point", "backend"),
    *("modules_to_not_convert", "modules_to_fuse", "do_fuse", "fuse_max_seq_len", "exllama_config", "lm_head"),
)


def read_awq(said: Mapping[str, Any]) -> Format:
    refuse_unknown(said, AWQ_KEYS, WHERE)
    one_of(said, "bits", (4,), WHERE)
    one_of(said, "zero_point", (None, True), WHERE)
    for key in ("version", "format"):
        one_of(said, key, (None, "gemm", "GEMM"), WHERE)
    scheme = AWQScheme(group_size(said))
    return Format("awq", "AWQ (int4)", SUFFIXES, lambda _, heads: scheme if "qweight" in heads else None, ".weight")
