"""Kernels of single rows: embedding, norms, rotary positions, activations, gates and the soft cap of logits.

They round where `transformers` rounds, as in `tests/worker/kernels/reference.py`. Padding rows are unchanged.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from swiftbatch.worker.kernels.cuda.kv_kernels import store_halves, store_kept, store_stripe
from swiftbatch.worker.kernels.cuda.peers import Peers
from swiftbatch.worker.kernels.cuda.tree_attention import LOG2_E
from swiftbatch.worker.kernels.cuda.triton_primitives import rounded
from swiftbatch.worker.kernels.layer_specs import Activation, NormForm

TWICE, ONE_MORE = tl.constexpr(int(NormForm.TWICE)), tl.constexpr(int(NormForm.ONE_MORE))
CENTRED, SHIFTED = tl.constexpr(int(NormForm.CENTRED)), tl.constexpr(int(NormForm.SHIFTED))


@triton.jit
def is_padding(rows_ptr, row):
    return tl.load(rows_ptr + row * 5 + 2) == 0


@triton.jit
def embed_row(
    rows_ptr, token_ids_ptr, embedding_ptr, state_ptr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """Program (row): writes the embedding of the row's token."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    token_id = tl.load(token_ids_ptr + row).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    embedded = tl.load(embedding_ptr + token_id * HIDDEN + columns, mask=is_real)
    if SCALE != 1.0:
        embedded = (embedded.to(tl.float32) * SCALE).to(state_ptr.dtype.element_ty)
    tl.store(state_ptr + row * HIDDEN + columns, embedded, mask=is_real)


@triton.jit
def weighted(scaled, weight, FORM: tl.constexpr, dtype: tl.constexpr):
    """Finish an RMS norm of float32, rounding to the model's dtype as the form says."""
    weight = weight.to(tl.float32)
    if FORM == TWICE:
        scaled = rounded(scaled, dtype)
    if FORM == ONE_MORE:
        weight += 1.0
    return rounded(scaled * weight, dtype)


@triton.jit
def centred(row, is_real, count, FORM: tl.constexpr):
    """Subtract the mean of the numbers without padding, if the norm's form does."""
    if FORM >= CENTRED:  # SHIFTED is also centred
        row = tl.where(is_real, row - tl.sum(row, 0) / count, 0.0)
    return row


@triton.jit
def root_mean(row, count, epsilon):
    """Return the factor of an RMS norm for `count` numbers followed by zeros."""
    return tl.rsqrt(tl.sum(row * row, 0) / count + epsilon)


@triton.jit
def normed_row(row, is_real, weight_ptr, columns, count, epsilon, FORM: tl.constexpr, dtype: tl.constexpr):
    """Return a normed row, with biases, which follow the weights, added if the form has biases."""
    row = centred(row, is_real, count, FORM)
    scaled = row * root_mean(row, count, epsilon)
    weight = tl.load(weight_ptr + columns, mask=is_real, other=0.0)
    if FORM == SHIFTED:
        shift = tl.load(weight_ptr + count + columns, mask=is_real, other=0.0).to(tl.float32)
        return rounded(scaled * weight.to(tl.float32) + shift, dtype)
    return weighted(scaled, weight, FORM, dtype)


@triton.jit
def add_norm_row(
    rows_ptr, state_ptr, delta_ptr, behind_ptr, weight_ptr, normed_ptr, peer_states_ptr, peer_normed_ptr, epsilon,
    state_scale,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, HAS_DELTA: tl.constexpr, HAS_BEHIND: tl.constexpr,
    HAS_FRONT: tl.constexpr, DELTA_SCALE: tl.constexpr, FORM: tl.constexpr, NUM_PARTS: tl.constexpr,
    RANK: tl.constexpr, NUM_RANKS: tl.constexpr,
):  # fmt: skip
    """Program (row): adds the delta, which is summed from its parts in order, to the state; writes the state's norm.

    One of several GPUs does so for its own rows, on all of them.
    """
    if is_padding(rows_ptr, tl.program_id(0)) or tl.program_id(0) % NUM_RANKS != RANK:
        return
    columns = tl.arange(0, WIDTH)
    is_real = columns < HIDDEN
    places = tl.program_id(0) * HIDDEN + columns
    dtype: tl.constexpr = state_ptr.dtype.element_ty
    state = tl.load(state_ptr + places, mask=is_real, other=0.0).to(tl.float32)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + places, mask=is_real, other=0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            delta += tl.load(delta_ptr + part * tl.num_programs(0) * HIDDEN + places, mask=is_real, other=0.0)
        delta = rounded(delta, dtype)
        if HAS_BEHIND:
            delta = normed_row(delta, is_real, behind_ptr, columns, HIDDEN, epsilon, FORM, dtype)
        if DELTA_SCALE != 1.0:
            delta = rounded(delta * DELTA_SCALE, dtype)
        state = rounded(state + delta, dtype)
        if state_scale is not None:
            state = rounded(state * state_scale, dtype)
        store_on_all(state_ptr, peer_states_ptr, places, state, is_real, NUM_RANKS)
    if HAS_FRONT:
        front = normed_row(state, is_real, weight_ptr, columns, HIDDEN, epsilon, FORM, dtype)
        store_on_all(normed_ptr, peer_normed_ptr, places, front, is_real, NUM_RANKS)


@triton.jit
def store_on_all(own_ptr, peers_ptr, places, numbers, mask, NUM_RANKS: tl.constexpr):
    if NUM_RANKS == 1:
        tl.store(own_ptr + places, numbers, mask=mask)
    else:
        for rank in tl.static_range(NUM_RANKS):
            tl.store(own_ptr + tl.load(peers_ptr + rank) + places, numbers, mask=mask)


@triton.jit
def norm_heads_row(
    rows_ptr, qkv_ptr, weight_ptr, epsilon,
    ALL: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Program (row, queries or keys): norms them in place."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    is_key = tl.program_id(1)
    first = is_key * QUERIES
    count = QUERIES + is_key * (KEYS - QUERIES)
    columns = tl.arange(0, WIDTH)
    is_real = columns < count
    qkv_ptr += row * ALL + first + columns
    heads = tl.load(qkv_ptr, mask=is_real, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + first + columns, mask=is_real, other=0.0)
    scaled = heads * root_mean(heads, count, epsilon)
    tl.store(qkv_ptr, weighted(scaled, weight, FORM, qkv_ptr.dtype.element_ty), mask=is_real)


def embed(rows: Tensor, token_ids: Tensor, embedding: Tensor, state: Tensor, scale: float = 1.0) -> None:
    """Write scaled rows of `embedding [vocab, hidden]` to `state [num_rows, hidden]`."""
    hidden = state.shape[1]
    embed_row[(len(rows),)](
        rows, token_ids, embedding, state, HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), SCALE=scale
    )


def add_norm(
    rows: Tensor,
    state: Tensor,
    delta: Tensor | None,
    front: Tensor | None,
    epsilon: float,
    normed: Tensor,
    delta_scale: float = 1.0,
    behind: Tensor | None = None,
    form: NormForm = NormForm.TWICE,
    state_scale: float | None = None,
    peers: Peers | None = None,
) -> None:
    """Add scaled `delta [num_rows, hidden]` to `state`, and write the state's RMS norm times `front [hidden]`.

    With `behind [hidden]`, the RMS norm of `delta` is added instead of `delta` itself. A delta in parts, `[num_parts,
    num_rows, hidden] float32`, is summed in their order and rounded to the state's dtype. `state_scale` multiplies the
    sum. With `peers`, only the GPU's own rows are added, and written on all GPUs.
    """
    hidden = state.shape[1]
    distances = (None, None) if peers is None else (peers.of(state), peers.of(normed))
    add_norm_row[(len(rows),)](
        rows, state, delta, behind, front, normed, *distances, epsilon, state_scale,
        HIDDEN=hidden, WIDTH=triton.next_power_of_2(hidden), HAS_DELTA=delta is not None,
        HAS_BEHIND=behind is not None, HAS_FRONT=front is not None, DELTA_SCALE=delta_scale, FORM=int(form),
        NUM_PARTS=len(delta) if delta is not None and delta.dim() == 3 else 1,
        RANK=0 if peers is None else peers.rank.number, NUM_RANKS=1 if peers is None else peers.rank.num_ranks,
    )  # fmt: skip


def norm_heads(
    rows: Tensor, qkv: Tensor, weight: Tensor, num_queries: int, epsilon: float, form: NormForm = NormForm.TWICE
) -> None:
    """Norm all heads' queries together, and all heads' keys. `weight` is `[num_queries + num_keys]`, queries first."""
    norm_heads_row[(len(rows), 2)](
        rows, qkv, weight, epsilon, ALL=qkv.shape[1], QUERIES=num_queries, KEYS=len(weight) - num_queries,
        WIDTH=triton.next_power_of_2(num_queries), FORM=int(form),
    )  # fmt: skip


@triton.jit
def normed(
    first, second, norm_ptr, mask, epsilon, HEAD_DIM: tl.constexpr, FORM: tl.constexpr, dtype: tl.constexpr
):  # fmt: skip
    """Return the RMS norm of halves of heads; each has its own weights at `norm_ptr`, or none."""
    if FORM == CENTRED:
        mean = ((tl.sum(first, 1) + tl.sum(second, 1)) / HEAD_DIM)[:, None]
        first = tl.where(mask, first - mean, 0.0)
        second = tl.where(mask, second - mean, 0.0)
    scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD_DIM + epsilon)[:, None]
    first *= scale
    second *= scale
    if norm_ptr is not None:
        first = weighted(first, tl.load(norm_ptr, mask=mask, other=0.0), FORM, dtype)
        second = weighted(second, tl.load(norm_ptr + HEAD_DIM // 2, mask=mask, other=0.0), FORM, dtype)
    else:
        first = rounded(first, dtype)
        second = rounded(second, dtype)
    return first, second


@triton.jit
def packed_head(packed_ptr, row, index, kv_head, NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr):
    """Return the indices of heads in flash-attn's layout."""
    return (tl.load(packed_ptr + row) * HEADS_PER_KV + index) * NUM_KV_HEADS + kv_head


@triton.jit
def rope_store_heads(
    qkv_ptr, angles_ptr, query_norm_ptr, key_norm_ptr, rows_ptr, packed_ptr, query_ptr, keys_ptr, values_ptr,
    query_scales_ptr, epsilon, stride_slot, stride_head, stride_entry,
    NUM_KV_HEADS: tl.constexpr, HEADS_PER_KV: tl.constexpr, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr,
    NORMS_TURNED: tl.constexpr, NORMS_DIFFER: tl.constexpr, FORM: tl.constexpr, IS_PACKED: tl.constexpr,
    HAS_SCALES: tl.constexpr, ALL: tl.constexpr, TILE_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_DIM: tl.constexpr, NORMS_VALUES: tl.constexpr, NUM_STORED: tl.constexpr, STRIPES: tl.constexpr,
):  # fmt: skip
    """Program (row, KV head): rotates and stores its query heads and its key, and stores its value.

    If only one of `NUM_STORED` heads is there for key and value, the value is the key before its norm and rotation;
    without any, none is stored. A head takes `STRIPES` heads of the cache.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    row_ptr = rows_ptr + row * 5
    if tl.load(row_ptr + 2) == 0:
        return
    num_heads: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    index = tl.arange(0, TILE_HEADS)
    is_query = (index < HEADS_PER_KV)[:, None]
    is_value = (index == HEADS_PER_KV + 1)[:, None]
    columns = tl.arange(0, WIDTH)[None, :]
    is_column = columns < HEAD_DIM // 2
    is_real = (index < HEADS_PER_KV + (2 if NUM_STORED > 0 else 0))[:, None] & is_column
    query_head = kv_head * HEADS_PER_KV + index
    after_queries = kv_head + (index - HEADS_PER_KV) * (NUM_STORED - 1) * NUM_KV_HEADS
    head = tl.where(index < HEADS_PER_KV, query_head, num_heads + after_queries)
    start = row * ALL + head[:, None] * HEAD_DIM
    is_first, is_second = is_real, is_real
    if VALUE_DIM < HEAD_DIM:  # zeros fill a value's row
        start -= tl.where(is_value, kv_head * (HEAD_DIM - VALUE_DIM), 0)
        is_first &= (columns < VALUE_DIM) | ~is_value
        is_second &= (HEAD_DIM // 2 + columns < VALUE_DIM) | ~is_value
    qkv_ptr += start + columns
    given_first = tl.load(qkv_ptr, mask=is_first, other=0.0).to(tl.float32)
    given_second = tl.load(qkv_ptr + HEAD_DIM // 2, mask=is_second, other=0.0).to(tl.float32)
    first = given_first
    second = given_second
    own_norm = 0
    if NORMS_DIFFER:
        own_norm = tl.where(index < HEADS_PER_KV, query_head, kv_head)[:, None] * HEAD_DIM
    if HAS_NORM and not NORMS_TURNED:
        norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr) + own_norm + columns
        first, second = normed(first, second, norm_ptr, is_real, epsilon, HEAD_DIM, FORM, dtype)
    if NORMS_VALUES:
        given_first, given_second = normed(
            given_first, given_second, None, is_real, epsilon, HEAD_DIM, FORM, dtype
        )  # fmt: skip
    angles_ptr += tl.load(row_ptr + 3).to(tl.int64) * HEAD_DIM + columns
    cosines = tl.load(angles_ptr, mask=is_column, other=0.0).to(tl.float32)
    sines = tl.load(angles_ptr + HEAD_DIM // 2, mask=is_column, other=0.0).to(tl.float32)
    rope_first = rounded(tl.where(is_value, given_first, first * cosines - second * sines), dtype)
    rope_second = rounded(tl.where(is_value, given_second, second * cosines + first * sines), dtype)
    if HAS_NORM and NORMS_TURNED:
        norm_ptr = tl.where(is_query, query_norm_ptr, key_norm_ptr) + own_norm + columns
        first, second = normed(rope_first, rope_second, norm_ptr, is_real, epsilon, HEAD_DIM, FORM, dtype)
        rope_first = tl.where(is_value, rope_first, first)
        rope_second = tl.where(is_value, rope_second, second)
    if HAS_SCALES:
        scale = tl.where(is_query, tl.load(query_scales_ptr + tl.load(row_ptr + 3)), 1.0)
        rope_first = rounded(rope_first * scale, dtype)
        rope_second = rounded(rope_second * scale, dtype)

    place = row * num_heads + query_head
    if IS_PACKED:
        place = packed_head(packed_ptr, row, index, kv_head, NUM_KV_HEADS, HEADS_PER_KV)
    query_ptr += place[:, None] * HEAD_DIM + columns
    store_halves(query_ptr, rope_first, rope_second, is_query & is_real, HEAD_DIM)
    place = tl.load(row_ptr).to(tl.int64) * stride_slot + kv_head.to(tl.int64) * STRIPES * stride_head
    place += tl.load(row_ptr + 4).to(tl.int64) * stride_entry
    places = place + index[:, None] * 0
    is_key = (index == HEADS_PER_KV)[:, None]
    if STRIPES == 1:
        store_kept(keys_ptr + places, rope_first, rope_second, columns, is_key & is_real, HEAD_DIM)
        store_kept(values_ptr + places, rope_first, rope_second, columns, is_value & is_real, HEAD_DIM)
    else:
        second_places = places + stride_head
        store_stripe(keys_ptr + places, rope_first, columns, is_key & is_real, HEAD_DIM // 2)
        store_stripe(keys_ptr + second_places, rope_second, columns, is_key & is_real, HEAD_DIM // 2)
        store_stripe(values_ptr + places, rope_first, columns, is_value & is_real, HEAD_DIM // 2)
        store_stripe(values_ptr + second_places, rope_second, columns, is_value & is_real, HEAD_DIM // 2)


WIDEST_FOR_TWO_WARPS = 256  # wider heads need more registers


def rope_store(
    qkv: Tensor,  # [num_rows, num_heads * head_dim + num_kv_heads * (head_dim + value_dim)], perhaps between more heads
    angles: Tensor,  # [num_angles, head_dim]: cosines of half a head's dimensions, then sines
    norms: tuple[Tensor, Tensor] | None,  # weights of queries and of keys, [head_dim] or per head
    epsilon: float,
    rows: Tensor,  # from a row table
    query: Tensor,  # [num_rows, num_heads, head_dim]; packed: [num_groups * rows_per_group, num_heads, head_dim]
    keys: Tensor,  # [num_slots, stripes * num_kv_heads, capacity, row_width], one layer of the arena
    values: Tensor,  # as keys, with the same strides
    packed: Tensor | None = None,  # of a row table: places of queries, heads as in `packed_head`; None: in order
    form: NormForm = NormForm.TWICE,
    norms_after_rope: bool = False,  # norms are applied after the rotation
    query_scales: Tensor | None = None,  # [num_angles] float32, of rotated queries
    norms_values: bool = False,  # values are normed, too, without weights
    num_stored: int = 2,  # 1: values are keys before their norm and rotation; 0: queries alone are written
    stripes: int = 1,  # heads of the arena that a head takes
    narrow_values: int = 0,  # width of a head's values; 0: that of its keys
) -> None:
    """Write rotated queries, and rotated keys and values to their rows' entries, except for padding rows."""
    _, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1] // stripes
    query_norm, key_norm = (None, None) if norms is None else norms
    rope_store_heads[(len(rows), num_kv_heads)](
        qkv, angles, query_norm, key_norm, rows, packed, query, keys, values, query_scales, epsilon,
        *keys.stride()[:3], HAS_NORM=norms is not None, NORMS_TURNED=norms_after_rope,
        NORMS_DIFFER=query_norm is not None and len(query_norm) > head_dim, FORM=int(form),
        IS_PACKED=packed is not None, HAS_SCALES=query_scales is not None,
        ALL=qkv.stride(0), NORMS_VALUES=norms_values, NUM_STORED=num_stored, STRIPES=stripes,
        **rope_constants(num_kv_heads, num_heads // num_kv_heads, head_dim, narrow_values),
    )  # fmt: skip


def rope_constants(num_kv_heads: int, heads_per_kv: int, head_dim: int, narrow_values: int = 0) -> dict[str, int]:
    """Return constants and warps of `rope_store_heads`."""
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "HEADS_PER_KV": heads_per_kv,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": narrow_values or head_dim,
        "TILE_HEADS": triton.next_power_of_2(heads_per_kv + 2),
        "WIDTH": triton.next_power_of_2(head_dim // 2),
        "num_warps": 2 if head_dim <= WIDEST_FOR_TWO_WARPS and not narrow_values else 8,
    }


# Activations of feed-forward layers, gates of heads, and the soft cap of logits.


ACTIVE_COLUMNS = 1024
GELU_TANH, RELU2 = tl.constexpr(int(Activation.GELU_TANH)), tl.constexpr(int(Activation.RELU2))
XIELU = tl.constexpr(int(Activation.XIELU))


@triton.jit
def exponential_less_one(x):
    """Return e^x - 1 for x up to 0, by a series near 0."""
    series = 1.0 + x * (1 / 7) * (1.0 + x * (1 / 8) * (1.0 + x * (1 / 9)))
    series = 1.0 + x * (1 / 4) * (1.0 + x * (1 / 5) * (1.0 + x * (1 / 6) * series))
    series = x * (1.0 + x * (1 / 2) * (1.0 + x * (1 / 3) * series))
    return tl.where(x > -0.5, series, tl.exp(x) - 1.0)


@triton.jit
def xielu(x, curve_ptr):
    bent = exponential_less_one(tl.minimum(x, tl.load(curve_ptr + 3))) - x
    share = tl.where(x > 0, tl.load(curve_ptr) * x * x, bent * tl.load(curve_ptr + 1))
    return share + tl.load(curve_ptr + 2) * x


@triton.jit
def activated(x, curve_ptr, ACTIVATION: tl.constexpr):
    """Return SILU or another activation of float32 numbers."""
    if ACTIVATION == XIELU:
        return xielu(x, curve_ptr)
    if ACTIVATION == RELU2:
        positive = tl.where(x < 0, 0.0, x)  # NaN stays
        return positive * positive
    if ACTIVATION == GELU_TANH:  # (1 + tanh(a)) / 2 = 1 / (1 + exp(-2 a))
        double = x * (1.5957691216057308 + 0.07135481627260025 * x * x)
        return x / (1 + tl.exp(tl.minimum(-double, 87.0)))  # float32 overflows beyond it, as in the C kernels
    return x / (1 + tl.exp(-x))


@triton.jit
def gated(gate, up, curve_ptr, dtype: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SLOPE: tl.constexpr):
    """Return the activated gate times the up projection, limited as `ExpertWeights` says. NaN stays NaN."""
    if LIMIT == 0.0:
        return rounded(activated(gate, curve_ptr, ACTIVATION), dtype) * up
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return rounded(gate / (1 + tl.exp(-(gate * SLOPE))), dtype) * rounded(up + 1.0, dtype)


@triton.jit
def activate_row(
    rows_ptr, gate_up_ptr, curve_ptr, activated_ptr,
    INTERMEDIATE: tl.constexpr, COLUMNS: tl.constexpr, HAS_GATES: tl.constexpr, ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr, SLOPE: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): activates the gate times the up projection, or the up projection alone."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < INTERMEDIATE
    dtype: tl.constexpr = gate_up_ptr.dtype.element_ty
    parts: tl.constexpr = 2 if HAS_GATES else 1
    active = tl.load(gate_up_ptr + row * parts * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
    if HAS_GATES:
        up = tl.load(gate_up_ptr + (row * 2 + 1) * INTERMEDIATE + columns, mask=is_real, other=0.0).to(tl.float32)
        active = gated(active, up, curve_ptr, dtype, ACTIVATION, LIMIT, SLOPE)
    else:
        active = activated(active, curve_ptr, ACTIVATION)
    tl.store(activated_ptr + row * INTERMEDIATE + columns, rounded(active, dtype), mask=is_real)


@triton.jit
def gate_row(rows_ptr, qkv_ptr, mixed_ptr, ALL: tl.constexpr, NUMBERS: tl.constexpr, COLUMNS: tl.constexpr):
    """Program (row, columns): applies the gates in place."""
    row = tl.program_id(0)
    if is_padding(rows_ptr, row):
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_real = columns < NUMBERS
    dtype: tl.constexpr = mixed_ptr.dtype.element_ty
    gate = tl.load(qkv_ptr + row * ALL + ALL - NUMBERS + columns, mask=is_real, other=0.0).to(tl.float32)
    mixed = tl.load(mixed_ptr + row * NUMBERS + columns, mask=is_real, other=0.0).to(tl.float32)
    mixed = rounded(mixed * rounded(1 / (1 + tl.exp(-gate)), dtype), dtype)
    tl.store(mixed_ptr + row * NUMBERS + columns, mixed, mask=is_real)


def gate_heads(rows: Tensor, qkv: Tensor, mixed: Tensor) -> None:
    """Multiply attention's results `mixed [num_rows, ...]` by the sigmoids of the last columns of `qkv`, its gates."""
    numbers = mixed[0].numel()
    grid = (len(mixed), triton.cdiv(numbers, ACTIVE_COLUMNS))
    gate_row[grid](rows, qkv, mixed, ALL=qkv.shape[1], NUMBERS=numbers, COLUMNS=ACTIVE_COLUMNS)


def activate(
    rows: Tensor,
    gate_up: Tensor,
    out: Tensor,
    activation: Activation = Activation.SILU,
    curve: Tensor | None = None,
    limit: float = 0.0,
    slope: float = 0.0,
) -> None:
    """Map `[num_rows, 2 * intermediate]` (gates first, or ups alone) to `out [num_rows, intermediate]`.

    `curve [4] float32`, on the device, has XIELU's parameters. Gates have the `limit` and the `slope` of
    `ExpertWeights`.
    """
    intermediate = out.shape[1]
    grid = (len(out), triton.cdiv(intermediate, ACTIVE_COLUMNS))
    activate_row[grid](
        rows, gate_up, curve, out, INTERMEDIATE=intermediate, COLUMNS=ACTIVE_COLUMNS,
        HAS_GATES=gate_up.shape[1] > intermediate, ACTIVATION=int(activation), LIMIT=limit, SLOPE=slope,
    )  # fmt: skip


SOFTCAP_COLUMNS = 1024


@triton.jit
def softcap_row(logits_ptr, VOCAB: tl.constexpr, COLUMNS: tl.constexpr, CAP: tl.constexpr):
    """Program (row, columns): cap * tanh(logit / cap)."""
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    logits_ptr += tl.program_id(0).to(tl.int64) * VOCAB + columns
    logits = tl.load(logits_ptr, mask=columns < VOCAB, other=0.0)
    power = tl.exp2(tl.abs(logits) * (-2 * LOG2_E / CAP))
    softcapped = CAP * (1 - power) / (1 + power)
    tl.store(logits_ptr, tl.where(logits < 0, -softcapped, softcapped), mask=columns < VOCAB)


def softcap_logits(logits: Tensor, cap: float) -> None:
    num_rows, vocab = logits.shape
    grid = (num_rows, triton.cdiv(vocab, SOFTCAP_COLUMNS))
    softcap_row[grid](logits, VOCAB=vocab, COLUMNS=SOFTCAP_COLUMNS, CAP=cap)
