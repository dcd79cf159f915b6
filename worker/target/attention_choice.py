"""The layers of a `transformers` model that attend in the compiled kernels: all but those with chunks, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swiftbatch.worker.kernels.forms import AttentionView
from swiftbatch.worker.kernels.instruction_sets import kernel_numerics, load_library
from swiftbatch.worker.kernels.native import native_attention
from swiftbatch.worker.kernels.sizes import HEAD_DIMS
from swiftbatch.worker.kernels.team import ELEMENTS, Team, shared_team
from swiftbatch.worker.model.layer_needs import LayerNeeds
from swiftbatch.worker.model.span import Span
from swiftbatch.worker.target.attention import Asked, Attend, ExactRows, attend_in_torch
from swiftbatch.worker.target.torch_attention import attention_kernel


def attends_of(layers: Sequence[LayerNeeds], dtype: torch.dtype, variant: str | None) -> list[Attend]:
    """Choose the attention of each layer. `variant` is the instruction set of the kernels, None for none."""
    if variant is None or not any(_is_known(needs, dtype) for needs in layers):
        return [attend_in_torch] * len(layers)
    in_kernels = attend_in_kernels(shared_team(load_library(variant), torch.get_num_threads()))
    return [in_kernels if _is_known(needs, dtype) else attend_in_torch for needs in layers]


def attention_numerics(attends: Sequence[Attend], device_type: str, dtype: torch.dtype, variant: str | None) -> str:
    """Names all that attends in some layer."""
    names: list[str] = [attention_kernel(device_type, dtype)] if attend_in_torch in attends else []
    if variant is not None and set(attends) != {attend_in_torch}:
        names.append(f"{kernel_numerics(variant, str(dtype).removeprefix('torch.'))} attention")
    return ", ".join(names)


def attend_in_kernels(team: Team) -> Attend:
    """An `Attend` for layers that see all or a window, whose rows are exact by construction."""

    def attend(
        rows: ExactRows, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        group, new = rows.rows, (key.transpose(0, 1), value.transpose(0, 1))
        group.cache.write(layer, group.first_entry, key, value)  # brings what earlier tiles wrote, wherever it lies
        view = _view(rows.spans[layer], asked)
        output = native_attention(team, [group], layer, query.flatten(1, 2), *new, asked.scaling, view)
        return output.view(query.shape)

    return attend


def _view(span: Span, asked: Asked) -> AttentionView:
    window = span.size if span.kind == "window" else None
    return AttentionView(window, asked.softcap, None if asked.sinks is None else asked.sinks.flatten())


def _is_known(needs: LayerNeeds, dtype: torch.dtype) -> bool:
    """Tell whether the kernels have all that a layer asks for; the smaller of its keys and values are padded."""
    sees_no_chunks = needs.span.kind in ("full", "window")
    fits = dtype in ELEMENTS and max(needs.key_dim, needs.value_dim) in HEAD_DIMS
    return sees_no_chunks and needs.has_model_dtype and fits
