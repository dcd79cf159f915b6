"""Batch-invariant attention for `transformers` models: torch's kernels, masks, or our C kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface

from swiftbatch.worker.forward.tile_packing import SequenceRows, tail_mask
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, HEAD_DIMS, TILE_ROWS
from swiftbatch.worker.kernels.layer_specs import AttentionView
from swiftbatch.worker.kernels.native_decoder import native_attention
from swiftbatch.worker.kernels.native_library import Team, kernel_numerics, load_library, shared_team
from swiftbatch.worker.kernels.native_weights import ELEMENTS
from swiftbatch.worker.model.attention_needs import FULL, LayerNeeds, Span


@dataclass(frozen=True)
class Seen:
    """Keys that rows see: the prefix from `start` to the group's boundary, and tails gathered per row."""

    start: int
    tail_mask: torch.Tensor  # [num_rows, 1, 1, BLOCK]
    prefix_mask: torch.Tensor | None = None  # [num_rows, boundary - start], if some row of the block sees less
    is_blind: torch.Tensor | None = None  # [num_rows, 1, 1], true for rows that see nothing of the prefix
    _laid_out: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def prefix_rows(self, group: int, padding: int) -> torch.Tensor | None:
        """Return the prefix mask with query heads as rows, `[1, 1, num_rows * group + padding, -]`."""
        if self.prefix_mask is None:
            return None
        if (group, padding) not in self._laid_out:
            rows = self.prefix_mask.repeat_interleave(group, dim=0)
            self._laid_out[group, padding] = pad(rows, (0, 0, 0, padding))[None, None]
        return self._laid_out[group, padding]

    def prefix_of_each(self) -> Iterable[torch.Tensor | None]:
        """Yield each row's prefix mask, `[boundary - start]`."""
        return [None] * len(self.tail_mask) if self.prefix_mask is None else self.prefix_mask

    def without_blind(self, output: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix's output and lse, with weight 0 for rows that see nothing of it."""
        if self.is_blind is None:
            return output, lse
        return output.masked_fill(self.is_blind[..., None], 0.0), lse.masked_fill(self.is_blind, float("-inf"))


def see(rows: SequenceRows, span: Span, dtype: torch.dtype, device: torch.device) -> Seen:
    """Return what rows see in layers of this span."""
    boundary = rows.boundary
    firsts = torch.tensor([span.first(boundary + length - 1) for length in rows.tail_lengths])  # [num_rows]
    tail = tail_mask(rows.tail_lengths, (firsts - boundary).tolist(), dtype, device)
    start = min(boundary, span.first(boundary) // BLOCK * BLOCK)
    if start == boundary or span.first(boundary + BLOCK - 1) <= start:
        return Seen(start, tail)
    is_hidden = torch.arange(start, boundary) < firsts[:, None]
    mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
    return Seen(start, tail, mask.to(device), (firsts >= boundary)[:, None, None].to(device))


KernelName = Literal["flash attention", "attention by definition"]

PROBED_SIZES = ((1, 128, 64), (1, 128, 512), (1, 128, 4096), (TILE_ROWS, 4, 64))  # batch, query rows, keys
PROBED_HEADS, PROBED_HEAD_DIM = 4, 64


def flash_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's CPU kernel, `[batch, heads, rows, head_dim]`; return output and lse `[batch, heads, rows]`.

    Torch splits a single head among threads, which changes bits, so a single head is computed twice.
    """
    batch, heads, *_ = query.shape
    if batch * heads == 1 and torch.get_num_threads() > 1:
        query, keys, values = (each.expand(2, -1, -1, -1) for each in (query, keys, values))
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, 0.0, False, attn_mask=mask, scale=scaling
    )
    return output[:batch], lse[:batch]


@functools.cache
def attention_kernel(device_type: str, dtype: torch.dtype) -> KernelName:
    """Return the kernel that works for tensors of this dtype, found by trying it once."""
    if device_type != "cpu":
        return "attention by definition"
    try:
        for batch, num_rows, num_keys in PROBED_SIZES:
            query = torch.zeros(batch, PROBED_HEADS, num_rows, PROBED_HEAD_DIM, dtype=dtype)
            keys = torch.zeros(batch, PROBED_HEADS, num_keys, PROBED_HEAD_DIM, dtype=dtype)
            flash_attention(query, keys, keys, 1.0, None)
    except RuntimeError:  # torch packs bf16 keys with AMX, which fails if AVX-512 is off
        torch.backends.cuda.enable_flash_sdp(False)  # on CPUs too, because drafts leave the choice to torch
        return "attention by definition"
    return "flash attention"


def query_row_quantum(device_type: str, dtype: torch.dtype, group: int) -> int:
    """Return a number; if query rows are a multiple of it, the kernel computes all rows alike."""
    has_amx = device_type == "cpu" and torch.cpu._is_amx_tile_supported()
    packs_keys = has_amx and dtype == torch.bfloat16  # with many rows, logarithms have other bits
    if packs_keys or attention_kernel(device_type, dtype) == "attention by definition":
        return TILE_ROWS * group  # matrix products choose their order by the number of rows
    return 16 if has_amx else 4  # torch's path with AMX needs a larger multiple than that with AVX-512


def tail_row_quantum(group: int) -> int:
    """Return a number; if query rows are a multiple of it, rows have equal bits on all threads (measured).

    Otherwise, the bits of a matrix product of few rows depend on the alignment of its buffer.
    """
    if torch.get_num_threads() == 1:
        return 1
    return 2 if group <= 2 else 4


# Row-exact attention for `transformers` models: shared prefix and gathered tail, merged by log-sum-exp.


ATTENTION_NAME = "swiftbatch_row_groups"


@dataclass(frozen=True)
class Asked:
    """The attention parameters that a layer asks for."""

    scaling: float
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    sinks: torch.Tensor | None = None  # [num_kv_heads, group] scores without values (GPT-OSS)


class RowGroup(Protocol):
    """Rows of one sequence in a forward, with their cache."""

    def __len__(self) -> int: ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        """Store `key` and `value` `[num_kv_heads, num_rows, head_dim]` and attend to all visible positions.

        `query` and result are `[num_rows, num_kv_heads, group, head_dim]`.
        """


@dataclass(frozen=True)
class BatchInvariantRows:
    """Rows over a full cache, with the tensors shared by all layers."""

    rows: SequenceRows
    tail_entries: torch.Tensor  # [num_rows, BLOCK] int64
    spans: Sequence[Span]
    attends: Sequence[Attend]
    seen: dict[Span, Seen]  # for the spans of all layers that attend in torch

    @classmethod
    def prepare(
        cls,
        rows: SequenceRows,
        dtype: torch.dtype,
        device: torch.device,
        spans: Sequence[Span] = (FULL,),
        attends: Sequence[Attend] | None = None,
    ) -> BatchInvariantRows:
        attends = [attend_in_torch] * len(spans) if attends is None else attends
        needed = {span for span, attend in zip(spans, attends, strict=True) if attend is attend_in_torch}
        seen = {span: see(rows, span, dtype, device) for span in needed}
        return cls(rows, torch.from_numpy(rows.tail_entries).to(device), spans, attends, seen)

    def __len__(self) -> int:
        return len(self.rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        return self.attends[layer](self, layer, query, key, value, asked)


Attend = Callable[[BatchInvariantRows, int, torch.Tensor, torch.Tensor, torch.Tensor, Asked], torch.Tensor]
"""`BatchInvariantRows.attend` of one layer."""


def attend_in_torch(
    rows: BatchInvariantRows, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
) -> torch.Tensor:
    """Attend with torch, once over the prefix and once over the tails."""
    cache = rows.rows.cache
    kept = cache.write(layer, rows.rows.first_entry, key, value)
    keys, values = (cache.shape.numbers(each) for each in kept)
    return _attend(query, keys, values, rows, rows.seen[rows.spans[layer]], asked)


class QueryTap:
    """Group of one row that records the queries of every layer."""

    def __init__(self, rows: RowGroup) -> None:
        self._rows = rows
        self._queries: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        self._queries.append(query[0].clone())
        return self._rows.attend(layer, query, key, value, asked)

    def queries(self) -> torch.Tensor:
        """Return `[num_layers, num_kv_heads, group, head_dim]`."""
        return torch.stack(self._queries)


def attend_in_groups(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_rows, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_rows, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    row_groups: list[RowGroup],
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,  # `layer_needs` refused models with other relevant arguments
) -> tuple[torch.Tensor, None]:
    """Let every group of rows attend to its own cache; return `[1, num_rows, num_heads, value_dim]`."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    num_kv_heads, value_dim = key.shape[1], value.shape[3]
    head_dim = max(key.shape[3], value_dim)
    if key.shape[3] != value_dim:  # the cache stores keys and values of equal width
        query, key, value = (pad(each, (0, head_dim - each.shape[3])) for each in (query, key, value))
    sinks = None if s_aux is None else s_aux.float().view(num_kv_heads, -1)
    asked = Asked(scaling, softcap, sinks)
    grouped = query[0].unflatten(0, (num_kv_heads, -1)).permute(2, 0, 1, 3)  # [num_rows, kv_heads, group, head_dim]
    output = query.new_zeros(1, query.shape[2], query.shape[1], head_dim)  # padding rows stay zero
    start = 0
    for group in row_groups:
        rows = slice(start, start + len(group))
        output[0, rows] = group.attend(layer, grouped[rows], key[0, :, rows], value[0, :, rows], asked).flatten(1, 2)
        start = rows.stop
    return output[..., :value_dim], None


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: BatchInvariantRows, seen: Seen, asked: Asked
) -> torch.Tensor:
    """Attend `query [num_rows, kv_heads, group, head_dim]` to prefix and tail; same shape out."""
    output, lse = _tail(query, keys, values, part.tail_entries, seen, asked)
    if seen.start < part.rows.boundary:
        shared = slice(seen.start, part.rows.boundary)
        prefix, prefix_lse = seen.without_blind(*_prefix(query, keys[:, shared], values[:, shared], seen, asked))
        share = in_whole_tiles(_share, prefix_lse, lse)[..., None]
        output = (prefix.float() * share + output.float() * (1.0 - share)).to(output.dtype)
        lse = lse if asked.sinks is None else in_whole_tiles(torch.logaddexp, prefix_lse, lse)
    if asked.sinks is not None:
        share = in_whole_tiles(_share, lse, asked.sinks.expand_as(lse))[..., None]
        output = (output.float() * share).to(output.dtype)
    return output


def _tail(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, entries: torch.Tensor, seen: Seen, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend each row to its gathered keys; return output like `query` and lse `[num_rows, kv_heads, group]`."""
    tail_keys = keys[:, entries].transpose(0, 1)  # [num_rows, kv_heads, BLOCK, head_dim]
    tail_values = values[:, entries].transpose(0, 1)
    if asked.softcap is None:
        return _each_row(query, tail_keys, tail_values, asked.scaling, seen.tail_mask)
    return _row_by_row(query, tail_keys, tail_values, asked, seen.tail_mask)


def _prefix(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: Seen, asked: Asked
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the shared prefix, with query heads as rows; return as `_tail`."""
    num_rows, _, group, _ = query.shape
    if asked.softcap is not None:
        keys, values = (each.expand(num_rows, *each.shape) for each in (keys, values))
        return _row_by_row(query, keys, values, asked, seen.prefix_of_each())
    rows = query.transpose(0, 1).flatten(1, 2)[None]  # [1, kv_heads, num_rows * group, head_dim]
    padding = -rows.shape[2] % query_row_quantum(query.device.type, query.dtype, group)
    rows = pad(rows, (0, 0, 0, padding))
    output, lse = _flash(rows, keys[None], values[None], asked.scaling, seen.prefix_rows(group, padding))
    output = output[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)
    return output, lse[0, :, : num_rows * group].unflatten(1, (num_rows, group)).transpose(0, 1)


def _row_by_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    asked: Asked,
    masks: Iterable[torch.Tensor | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend row by row, for cases that no kernel supports."""
    parts = [
        attention_by_definition(row, its_keys, its_values, asked.scaling, mask, asked.softcap)
        for row, its_keys, its_values, mask in zip(query, keys, values, masks, strict=True)
    ]
    output, lse = (torch.stack(part) for part in zip(*parts, strict=True))
    return output, lse


def _each_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend every row to its own keys, in a batch of fixed size if needed."""
    if attention_kernel(query.device.type, query.dtype) == "flash attention":
        group = query.shape[2]
        query = pad(query, (0, 0, 0, -group % tail_row_quantum(group)))
        output, lse = flash_attention(query, keys, values, scaling, mask)
        return output[:, :, :group], lse[:, :, :group]
    num_rows, short = len(query), TILE_ROWS - len(query)
    query, keys, values, mask = (pad(each, (0, 0, 0, 0, 0, 0, 0, short)) for each in (query, keys, values, mask))
    output, lse = attention_by_definition(query, keys, values, scaling, mask)
    return output[:num_rows], lse[:num_rows]


def _flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention's output like `query`, and lse `[batch, heads, rows] float32`."""
    if attention_kernel(query.device.type, query.dtype) == "flash attention":
        return flash_attention(query, keys, values, scaling, mask)
    return attention_by_definition(query, keys, values, scaling, mask)


def attention_by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention as matrix products, for soft caps and devices without a kernel."""
    scores = (query @ keys.transpose(-1, -2)).float() * scaling
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    scores = scores if mask is None else scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    return torch.exp(scores - lse[..., None]).to(values.dtype) @ values, lse


def _share(first_lse: torch.Tensor, second_lse: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(first_lse - second_lse)


def in_whole_tiles(function: Callable[..., Any], *rows: torch.Tensor) -> Any:
    """Apply elementwise functions to `TILE_ROWS` rows: exponentials have other bits in a loop's scalar remainder.

    Returns a tensor of as many rows as given, or several, as the function does.
    """
    num_rows = len(rows[0])
    padded = [pad(each, (0, 0) * (each.ndim - 1) + (0, TILE_ROWS - num_rows)).contiguous() for each in rows]
    found = function(*padded)
    return found[:num_rows] if isinstance(found, torch.Tensor) else tuple(each[:num_rows] for each in found)


AttentionInterface.register(ATTENTION_NAME, attend_in_groups)


# Layers of `transformers` models that attend in our kernels: on a CPU, all except those with chunked attention.


def attends_of(layers: Sequence[LayerNeeds], dtype: torch.dtype, variant: str | None) -> list[Attend]:
    """Return each layer's attention, in torch if `variant` is None."""
    if variant is None or not any(_is_known(needs, dtype) for needs in layers):
        return [attend_in_torch] * len(layers)
    in_kernels = attend_in_kernels(shared_team(load_library(variant), torch.get_num_threads()))
    return [in_kernels if _is_known(needs, dtype) else attend_in_torch for needs in layers]


def attention_numerics(attends: Sequence[Attend], device_type: str, dtype: torch.dtype, variant: str | None) -> str:
    names: list[str] = [attention_kernel(device_type, dtype)] if attend_in_torch in attends else []
    if variant is not None and set(attends) != {attend_in_torch}:
        names.append(f"{kernel_numerics(variant, str(dtype).removeprefix('torch.'))} attention")
    return ", ".join(names)


def attend_in_kernels(team: Team) -> Attend:
    """Return attention for layers with full or windowed attention, row-exact by construction."""

    def attend(
        rows: BatchInvariantRows, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: Asked
    ) -> torch.Tensor:
        group, new = rows.rows, (key.transpose(0, 1), value.transpose(0, 1))
        group.cache.write(layer, group.first_entry, key, value)  # loads rows of earlier tiles, wherever the cache lies
        view = _view(rows.spans[layer], asked)
        output = native_attention(team, [group], layer, query.flatten(1, 2), *new, asked.scaling, view)
        return output.view(query.shape)

    return attend


def _view(span: Span, asked: Asked) -> AttentionView:
    window = span.size if span.kind == "window" else None
    return AttentionView(window, asked.softcap, None if asked.sinks is None else asked.sinks.flatten())


def _is_known(needs: LayerNeeds, dtype: torch.dtype) -> bool:
    """Return whether the kernels support a layer."""
    sees_no_chunks = needs.span.kind in ("full", "window")
    fits = dtype in ELEMENTS and max(needs.key_dim, needs.value_dim) in HEAD_DIMS
    return sees_no_chunks and needs.has_model_dtype and fits
