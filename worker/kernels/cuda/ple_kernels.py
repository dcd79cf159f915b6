"""Per-layer embeddings on a GPU: each layer adds an embedding of its own for a row's token, through a gate.

It is the sum of a line of a table and a projection of the model's own embedding, both of which have a part per layer.
One product makes the projections of all layers when a forward begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.row_kernels import activated, is_padding, normed_row
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes
from swiftbatch.worker.kernels.quantized_weights import AnyLinear

HALF_ROOT = tl.constexpr(0.7071067690849304)  # the root of 1/2 in float32


@dataclass(frozen=True)
class StackedPLE:
    """Parts of per-layer embeddings that all layers share."""

    projection: AnyLinear  # [num_layers * ple_dim, hidden]
    table: Tensor  # [vocab, num_layers * ple_dim]


@dataclass(frozen=True)
class LayerPLE:
    """A layer's products and norms around its own embedding."""

    gate: AnyLinear  # [ple_dim, hidden]
    output: AnyLinear  # [hidden, ple_dim]
    norm: Tensor  # of the layer's part of the projection
    output_norm: Tensor

    @property
    def products(self) -> Sequence[AnyLinear]:
        return self.gate, self.output


@triton.jit
def gate_embedding_row(
    rows_ptr, token_ids_ptr, projected_ptr, norm_ptr, table_ptr, gates_ptr, curve_ptr, out_ptr, epsilon, first,
    ALL: tl.constexpr, COUNT: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr, SCALE: tl.constexpr,
    FORM: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Program (row): multiplies the layer's embedding, which begins at column `first`, by its activated gate."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < COUNT
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    projected = tl.load(projected_ptr + row * ALL + first + columns, mask=is_real, other=0.0).to(tl.float32)
    projected = rounded(projected * SHARE, dtype)
    projected = normed_row(projected, is_real, norm_ptr, columns, COUNT, epsilon, FORM, dtype)
    place = tl.load(token_ids_ptr + row).to(tl.int64) * ALL + first
    of_token = tl.load(table_ptr + place + columns, mask=is_real, other=0.0).to(tl.float32)
    own = rounded(projected + rounded(of_token * SCALE, dtype), dtype)
    gates = tl.load(gates_ptr + row * COUNT + columns, mask=is_real, other=0.0).to(tl.float32)
    gates = rounded(activated(gates, curve_ptr, ACTIVATION), dtype)
    tl.store(out_ptr + row * COUNT + columns, rounded(gates * rounded(own * HALF_ROOT, dtype), dtype), mask=is_real)


def gate_embeddings(
    rows: Tensor,  # from a row table, as `token_ids`
    token_ids: Tensor,
    projected: Tensor,  # [num_rows, num_layers * ple_dim], by `StackedPLE.projection`
    table: Tensor,  # of all layers
    norm: Tensor,
    layer: int,
    sizes: DecoderSizes,
    gates: Tensor,  # [num_rows, ple_dim]
    curve: Tensor | None,
    out: Tensor,  # as `gates`
) -> None:
    """Write what a layer's own embedding gives behind its gate."""
    gate_embedding_row[(len(out),)](
        rows, token_ids, projected, norm, table, gates, curve, out, sizes.epsilon,
        layer * sizes.ple_dim,
        **embedding_constants(table.shape[1], sizes.ple_dim, sizes.hidden),
        SCALE=sizes.ple_scale, FORM=int(sizes.norm_form), ACTIVATION=int(sizes.activation),
    )  # fmt: skip


def embedding_constants(num_all: int, ple_dim: int, hidden: int) -> dict[str, int | float]:
    """Return constants and warps of `gate_embedding_row`."""
    return {
        "ALL": num_all,
        "COUNT": ple_dim,
        "WIDTH": triton.next_power_of_2(ple_dim),
        "SHARE": hidden**-0.5,
        "num_warps": 1,
    }
