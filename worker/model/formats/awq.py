"""AWQ: integers of 4 bits with zeros, in the order of its matrix kernels (`gemm`). Without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftbatch.worker.model.formats.contract import Format, Scheme, StoredTensor, one_of, refuse_unknown
from swiftbatch.worker.model.formats.gptq import WHERE, group_size
from swiftbatch.worker.model.formats.word_rows import SUFFIXES, AWQScheme

KNOWN = (
    *("quant_method", "bits", "group_size", "q_group_size", "w_bit", "version", "format", "zero_point", "backend"),
    *("modules_to_not_convert", "modules_to_fuse", "do_fuse", "fuse_max_seq_len", "exllama_config", "lm_head"),
)


def read_awq(said: Mapping[str, Any]) -> Format:
    """Raises FormatError."""
    refuse_unknown(said, KNOWN, WHERE)
    one_of(said, "bits", (4,), WHERE)
    one_of(said, "zero_point", (None, True), WHERE)
    for key in ("version", "format"):
        one_of(said, key, (None, "gemm", "GEMM"), WHERE)
    scheme = AWQScheme(group_size(said))

    def scheme_of(_: str, heads: Mapping[str, StoredTensor]) -> Scheme | None:
        return scheme if "qweight" in heads else None

    return Format("awq", "AWQ (int4)", SUFFIXES, scheme_of, ".weight")
