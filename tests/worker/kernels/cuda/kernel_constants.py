"""The constants of every kernel for published models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from swiftbatch.worker.drafters.griffin import draft_layer_kernels as griffin
from swiftbatch.worker.exactness.gpu_doctor import machine_checks
from swiftbatch.worker.kernels.cuda import (
    block_kernels,
    cuda_recurrence,
    cuda_recurrent_layers,
    gemm,
    indexer_kernels,
    mla_kernels,
    moe_router,
    tree_attention,
    triton_primitives,
)
from swiftbatch.worker.kernels.cuda import lora_kernels as lora
from swiftbatch.worker.kernels.cuda import mla_kernels as latent_products
from swiftbatch.worker.kernels.cuda import row_kernels as layers
from swiftbatch.worker.kernels.cuda import tree_attention as tail_attention
from swiftbatch.worker.kernels.cuda.attention_backends import packed_constants, tail_merge_packed
from swiftbatch.worker.kernels.cuda.cuda_recurrence import MOVE_WARPS, MOVED_WORDS, move_step_words
from swiftbatch.worker.kernels.cuda.cuda_recurrent_layers import finish_constants, finish_group
from swiftbatch.worker.kernels.cuda.ple_kernels import embedding_constants, gate_embedding_row
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape
from swiftbatch.worker.kernels.cuda.wide_attention import WideShape, wide_prefix_split, wide_tail_merge
from swiftbatch.worker.kernels.kernel_sizes import BLOCK, ROW_CHOICES, BlockChoice, IndexerSizes, MLASizes
from swiftbatch.worker.kernels.layer_specs import (
    Activation,
    AttentionView,
    NormForm,
    RecurrentForm,
    RecurrentSizes,
    StepLayout,
)
from swiftbatch.worker.kernels.rank_shares import Rank
from swiftbatch.worker.kv.kv_capacity import GPU_PAGE
from tests.worker.kernels.cuda.product_constants import (
    DTYPES,
    HIDDEN,
    QWEN3,
    Made,
    expert_kernels,
    linear_kernels,
    packed_kernels,
    plain_zeros,
    product,
    without,
)

MOST_ROWS = ROW_CHOICES[-1]
HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 8, 128, 14336  # Llama 3.1 8B
KEPT = {"int8": "*i8", "e4m3": "*u8"}  # by the end of a kernel's name: 8-bit keys and values
OTHER_WIDTHS = (96, 256)
JOINED = (1024, 4096, 7168)  # of Qwen3.5 0.8B, GLM 4.5 Air, DeepSeek V3
NO_PAGES: dict[str, Any] = {"PAGE": 0, "pages_ptr": None}
PAGES: dict[str, Any] = {"PAGE": GPU_PAGE}


def kernels(dtype: str) -> dict[str, Made]:
    """Return every kernel by report name."""
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, DTYPES[dtype])
    found: dict[str, Made] = {}
    for width in (HEAD_DIM, *OTHER_WIDTHS):
        constants = dataclasses.replace(attention, head_dim=width)
        name = "" if width == HEAD_DIM else f" of heads of {width}"
        plain = without(constants.prefix_constants(), "HAS_BIAS", "bias_ptr") | NO_PAGES
        found[f"prefix{name}"] = tree_attention.prefix_split, plain
        found[f"tail{name}"] = tail_attention.tail_merge, without(constants.tail_constants(), "HAS_SINKS", "sinks_ptr")
        found[f"packed tail{name}"] = tail_merge_packed, packed_constants(constants)
    paged = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | PAGES
    found["prefix in pages"] = tree_attention.prefix_split, paged
    found["prefix with biases"] = (
        tree_attention.prefix_split,
        attention.prefix_constants() | {"HAS_BIAS": True} | NO_PAGES,
    )
    view = AttentionView(4096, 50.0)
    windowed = without(attention.prefix_constants(view), "HAS_BIAS", "bias_ptr") | PAGES
    found["prefix with a window"] = tree_attention.prefix_split, windowed
    found["tail with a window"] = tail_attention.tail_merge, attention.tail_constants(view) | {"HAS_SINKS": True}
    return (
        found
        | kernels_besides_attention()
        | linear_kernels(dtype)
        | packed_kernels()
        | coded_kernels(dtype)
        | expert_kernels(dtype)
        | state_kernels(dtype)
        | latent_kernels(dtype)
        | wide_kernels(dtype)
        | block_choice_kernels(dtype)
        | striped_kernels(dtype)
        | narrow_kernels(dtype)
    )


RECURRENT_LAYERS = {  # of published models
    "Qwen3.5 27B": RecurrentSizes(RecurrentForm.DELTA_NET, 48, 16, 128, 128, 10240, 4, norm_width=128, epsilon=1e-6),
    "Nemotron-H 8B": RecurrentSizes(
        RecurrentForm.STATE_SPACE, 128, 8, 128, 64, 10240, 4, norm_width=1024, epsilon=1e-5
    ),
    "LFM2 1.2B": RecurrentSizes(RecurrentForm.CONVOLUTION, 0, 0, 0, 0, 2048, 3),
}


def state_kernels(dtype: str) -> dict[str, Made]:
    found: dict[str, Made] = {}
    for model, sizes in RECURRENT_LAYERS.items():
        layout, has_bias = StepLayout.of(sizes, DTYPES[dtype].itemsize, 128), sizes.form == RecurrentForm.STATE_SPACE
        absent = {} if has_bias else {"tap_bias_ptr": None}
        if not sizes.num_heads:
            found[f"states: convolution of {model}"] = (
                cuda_recurrent_layers.gate_convolution,
                cuda_recurrent_layers.gate_constants(sizes, layout, has_bias) | absent,
            )
            continue
        unused = ("own_ptr", "skip_ptr") if sizes.form == RecurrentForm.DELTA_NET else ()
        found[f"states: heads of {model}"] = (
            cuda_recurrent_layers.ready_head,
            cuda_recurrent_layers.ready_constants(sizes, layout, has_bias) | absent,
        )
        found[f"states: weights of {model}"] = (
            cuda_recurrence.weigh_path,
            cuda_recurrence.weight_constants(sizes, layout),
        )
        found[f"states: walk of {model}"] = cuda_recurrence.walk_rows, cuda_recurrence.walk_constants(sizes, layout)
        finished = finish_constants(sizes) | dict.fromkeys(unused)
        found[f"states: norm of {model}"] = finish_group, finished
        moved = {"RING": layout.ring, "WORDS": layout.words, "WIDTH": MOVED_WORDS, "num_warps": MOVE_WARPS}
        found[f"states: moves of {model}"] = move_step_words, moved
    return found | {"states: gates of heads": (layers.gate_row, gates_of_heads())}


def gates_of_heads() -> dict[str, Any]:
    return {"ALL": 3 * HIDDEN, "NUMBERS": HIDDEN, "COLUMNS": layers.ACTIVE_COLUMNS}


def latent_kernels(dtype: str) -> dict[str, Made]:
    """Heads of GLM 4.7 Flash and DeepSeek V3 fill several tiles."""
    sizes, num_heads, paged = MLASizes(512, 768, 192, 64, 256), 20, PAGES
    attention = mla_kernels.MLAShape(num_heads, sizes, DTYPES[dtype])
    many = dataclasses.replace(attention, num_heads=128, num_rows=MOST_ROWS)
    plain = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | paged
    keep = latent_products.keep_constants(sizes, sizes.query_rank + sizes.key_dim, NormForm.TWICE)
    ups = {
        "absorbed queries": (sizes.rank, sizes.nope_dim, sizes.query_dim, sizes.rope_dim),
        "values of heads": (sizes.value_dim, sizes.rank, sizes.rank, 0),
    }
    found: dict[str, Made] = {
        "latent prefix": (mla_kernels.latent_prefix_split, plain),
        "latent prefix of many heads": (
            mla_kernels.latent_prefix_split,
            without(many.prefix_constants(), "HAS_BIAS", "bias_ptr") | paged,
        ),
        "latent prefix with biases": (
            mla_kernels.latent_prefix_split,
            attention.prefix_constants() | {"HAS_BIAS": True} | NO_PAGES,
        ),
        "latent tail": (mla_kernels.latent_tail_merge, attention.tail_constants()),
        "kept latents": (latent_products.keep_latent_row, keep),
    }
    for name, (columns, depth, width, num_rotary_dims) in ups.items():
        weight = torch.empty(num_heads * columns, depth, dtype=DTYPES[dtype], device="meta")
        constants: dict[str, Any] = latent_products.head_constants(
            num_heads, weight, num_heads * width, num_rotary_dims
        )
        found[name] = latent_products.multiply_heads, constants | ({} if num_rotary_dims else {"angles_ptr": None})
    chosen = without(many.prefix_constants(), "HAS_BIAS", "bias_ptr") | {"PAGE": 1}
    found["latent prefix of chosen keys"] = mla_kernels.latent_prefix_split, chosen
    return found | index_kernels(dtype)


def index_kernels(dtype: str) -> dict[str, Made]:
    """Indexers of DeepSeek V3.2; GLM 5 has half as many heads."""
    indexer = IndexerSizes(64, 128, 2048)
    sizes = MLASizes(512, 1536, 128, 64, 128, indexer)
    keep = latent_products.keep_constants(sizes, sizes.query_rank + sizes.key_dim, NormForm.TWICE)
    scores = indexer_kernels.score_constants(sizes, indexer, DTYPES[dtype])
    fewer = indexer_kernels.score_constants(sizes, dataclasses.replace(indexer, num_heads=32), DTYPES[dtype])
    return {
        "kept latents beside index keys": (latent_products.keep_latent_row, keep),
        "index heads": (indexer_kernels.ready_index_row, indexer_kernels.ready_constants(sizes, indexer)),
        "index scores": (indexer_kernels.score_span, scores | PAGES),
        "index scores of GLM 5": (indexer_kernels.score_span, fewer | PAGES),
        "chosen keys": (indexer_kernels.list_chosen, indexer_kernels.list_constants(indexer) | PAGES),
    }


def block_choice_kernels(dtype: str) -> dict[str, Made]:
    """Return kernels of MiniMax M3's layers with indexers, whose rows attend with each head of keys alone."""
    heads, choice = AttentionShape(4, 16, 128, DTYPES[dtype], MOST_ROWS), BlockChoice(128, 16)
    alone = dataclasses.replace(heads, num_kv_heads=1, num_rows=heads.num_kv_heads * heads.num_rows)
    prefix = without(alone.prefix_constants(), "HAS_BIAS", "bias_ptr") | {"PAGE": BLOCK}
    rope = rope_of(1, heads.num_kv_heads, heads.head_dim) | {"FORM": int(NormForm.ONE_MORE), "HAS_NORM": True}
    rope |= {"OTHER_HEADS": 72, "NUM_STORED": 1}
    active = {"INTERMEDIATE": 12288, "COLUMNS": layers.ACTIVE_COLUMNS, "HAS_GATES": True, "ACTIVATION": 0}
    return {
        "block scores": (block_kernels.score_blocks, block_kernels.score_constants(heads, choice) | PAGES),
        "chosen blocks": (block_kernels.list_blocks, block_kernels.list_constants(heads.num_kv_heads, choice) | PAGES),
        "prefix of chosen blocks": (tree_attention.prefix_split, prefix),
        "tail behind chosen blocks": (
            tail_attention.tail_merge,
            without(alone.tail_constants(), "HAS_SINKS", "sinks_ptr"),
        ),
        "rope of index heads": (layers.rope_store_heads, rope),
        "limited silu": (layers.activate_row, active | {"LIMIT": 7.0, "SLOPE": 1.702, "curve_ptr": None}),
    }


def coded_kernels(dtype: str) -> dict[str, Made]:
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, DTYPES[dtype])
    plain = {
        "prefix": (
            tree_attention.prefix_split,
            without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | PAGES,
        ),
        "tail": (tail_attention.tail_merge, without(attention.tail_constants(), "HAS_SINKS", "sinks_ptr")),
        "rope": rope_kernels()["rope"],
    }
    return {f"{name} in {code}": made for name, made in plain.items() for code in KEPT}


def striped_kernels(dtype: str) -> dict[str, Made]:
    """Return kernels of Gemma 4 31B's layers without a window, and of the embeddings and shared keys of E2B."""
    shape = WideShape(4, 8, 512, DTYPES[dtype])
    rope = rope_of(4, 8, 512) | {"FORM": int(NormForm.ONCE), "HAS_NORM": True, "NORMS_VALUES": True}
    rope |= {"ALL": (32 + 4) * 512, "NUM_STORED": 1, "STRIPES": 2}
    queries, own = {"NUM_STORED": 0, "ALL": 8 * 512}, dict[str, Any](embedding_constants(35 * 256, 256, 1536))
    own |= {"SCALE": 16.0, "FORM": int(NormForm.ONCE), "ACTIVATION": int(Activation.GELU_TANH), "curve_ptr": None}
    found: dict[str, Made] = {
        "striped prefix": (wide_prefix_split, shape.prefix_constants(shape.dtype) | PAGES),
        "striped tail": (wide_tail_merge, shape.tail_constants()),
        "striped tail in e4m3": (wide_tail_merge, shape.tail_constants()),
        "rope of striped heads": (layers.rope_store_heads, rope),
        "rope of striped heads in int8": (layers.rope_store_heads, rope),
        "rope of queries alone": (layers.rope_store_heads, rope | layers.rope_constants(1, 8, 512) | queries),
        "embedding of a layer": (gate_embedding_row, own),
    }
    if dtype == "bf16":  # in float32, decoded keys do not fit into registers
        coded = shape.prefix_constants(torch.int8) | PAGES
        found |= {f"striped prefix in {code}": (wide_prefix_split, coded) for code in KEPT}
    return found


def narrow_kernels(dtype: str) -> dict[str, Made]:
    """Return kernels of MiMo-V2-Flash, whose layers with windows have twice the key heads of others."""
    of_all, of_windows = (AttentionShape(count, 64 // count, 192, DTYPES[dtype], narrow_values=128) for count in (4, 8))
    view = AttentionView(128, sinks=torch.empty(64))
    rope = rope_of(4, 16, 192, 128) | {"ALL": 64 * 192 + 4 * (192 + 128)}
    of_prefixes = {
        "narrow prefix": of_all.prefix_constants(),
        "narrow prefix with a window": of_windows.prefix_constants(view),
    }
    found: dict[str, Made] = {
        name: (tree_attention.prefix_split, without(each, "HAS_BIAS", "bias_ptr") | PAGES)
        for name, each in of_prefixes.items()
    }
    found["narrow tail"] = tail_attention.tail_merge, without(of_all.tail_constants(), "HAS_SINKS", "sinks_ptr")
    found["narrow tail with a window"] = tail_attention.tail_merge, of_windows.tail_constants(view)
    rope = without(rope, "HAS_NORM", "query_norm_ptr", "key_norm_ptr")
    found["rope of narrow values"] = layers.rope_store_heads, rope
    coded = ["narrow tail", "rope of narrow values"]
    coded += ["narrow prefix"] if dtype == "bf16" else []  # in float32, decoded keys do not fit into registers
    return found | {f"{name} in {code}": found[name] for name in coded for code in KEPT}


def wide_kernels(dtype: str) -> dict[str, Made]:
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, DTYPES[dtype], MOST_ROWS)
    paged = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | PAGES
    tile = gemm.tile_rows(torch.zeros(MOST_ROWS, 1, dtype=DTYPES[dtype]))
    choice_of = moe_router.choice_constants(QWEN3, 2048, DTYPES[dtype], False, False, False, MOST_ROWS)
    found: dict[str, Made] = {
        "prefix in pages": (tree_attention.prefix_split, paged),
        "tail": (tail_attention.tail_merge, without(attention.tail_constants(), "HAS_SINKS", "sinks_ptr")),
        "linear": product(plain_zeros(dtype), num_tile_rows=tile),
        "experts' router": (moe_router.multiply_router, moe_router.router_constants(2880, 128, MOST_ROWS)),
        "choice of Qwen3": (
            moe_router.choose_row,
            choice_of | dict.fromkeys(("router_bias_ptr", "choice_bias_ptr", "choice_scales_ptr")),
        ),
        "sort of choices": (moe_router.sort_choices, moe_router.sort_constants(QWEN3, MOST_ROWS)),
    }
    return {f"{name} of {MOST_ROWS} rows": made for name, made in found.items()}


def kernels_besides_attention() -> dict[str, Made]:
    embed = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN, "SCALE": 1.0}
    return (
        rope_kernels()
        | norm_kernels()
        | activation_kernels()
        | griffin_kernels()
        | lora_kernels()
        | {
            "embed": (layers.embed_row, embed),
            "embed, scaled": (layers.embed_row, embed | {"SCALE": 12.0}),
            "meeting of 8 GPUs": (triton_primitives.meet, triton_primitives.meeting_constants(Rank(1, 8))),
            "read": (machine_checks.read_numbers, machine_checks.READ_CONSTANTS),
            "noise": (machine_checks.store_noise, {"BLOCK": machine_checks.NOISE_BLOCK}),
        }
    )


def rope_of(*sizes: int) -> dict[str, Any]:
    """Return what most layers say beside the sizes of `rope_constants`; heads are in order and have no scales."""
    plain = {"FORM": 0, "NORMS_TURNED": False, "NORMS_DIFFER": False, "NORMS_VALUES": False}
    plain |= {"NUM_STORED": 2, "STRIPES": 1}
    in_order = without({}, "IS_PACKED", "packed_ptr") | without({}, "HAS_SCALES", "query_scales_ptr")
    return layers.rope_constants(*sizes) | plain | in_order


def rope_kernels() -> dict[str, Made]:
    rope = rope_of(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) | {"ALL": (HEADS + 2 * KV_HEADS) * HEAD_DIM}
    normed = rope | {"HAS_NORM": True}
    bare = without(rope, "HAS_NORM", "query_norm_ptr", "key_norm_ptr")
    said = {
        "rope": bare,
        "rope with norms": normed,
        "rope, then norms": normed | {"NORMS_TURNED": True},
        "rope, packed": {key: normed[key] for key in normed if key != "packed_ptr"} | {"IS_PACKED": True},
        "rope with norms of its own for each head": normed | {"NORMS_DIFFER": True, "FORM": int(NormForm.CENTRED)},
        "rope with scales": {key: bare[key] for key in bare if key != "query_scales_ptr"} | {"HAS_SCALES": True},
    }
    return {name: (layers.rope_store_heads, each) for name, each in said.items()}


def norm_kernels() -> dict[str, Made]:
    norm = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN, "HAS_DELTA": True, "HAS_FRONT": True, "DELTA_SCALE": 1.0, "FORM": 0}
    norm |= {"NUM_PARTS": 1, "RANK": 0, "NUM_RANKS": 1, "state_scale": None}
    of_ranks = norm | {"NUM_PARTS": 8, "RANK": 1, "NUM_RANKS": 8}
    norm |= {"peer_states_ptr": None, "peer_normed_ptr": None}
    front = without(norm, "HAS_BEHIND", "behind_ptr")
    behind = norm | {"HAS_BEHIND": True, "FORM": int(NormForm.ONCE)}
    said = {
        "norm": without(front, "HAS_DELTA", "delta_ptr"),
        "add and norm": front,
        "add parts and norm": front | {"NUM_PARTS": 8},
        "add parts and norm on 8 GPUs": without(of_ranks, "HAS_BEHIND", "behind_ptr"),
        "add, scaled, and norm": front | {"DELTA_SCALE": 0.22},
        "norm, add and norm": behind,
        "norm, add, scale and norm": {key: behind[key] for key in behind if key != "state_scale"},
        "norm and add": without(behind, "HAS_FRONT", "weight_ptr", "normed_ptr"),
        "norm of one more": front | {"FORM": int(NormForm.ONE_MORE)},
        "norm of distances from the mean": front | {"FORM": int(NormForm.CENTRED)},
        "norm with biases": front | {"FORM": int(NormForm.SHIFTED)},
    }
    heads = {"ALL": 3 * HIDDEN, "QUERIES": HIDDEN, "KEYS": HIDDEN, "WIDTH": HIDDEN, "FORM": int(NormForm.ONCE)}
    found: dict[str, Made] = {"norms of all heads": (layers.norm_heads_row, heads)}
    return found | {name: (layers.add_norm_row, each) for name, each in said.items()}


def activation_kernels() -> dict[str, Made]:
    bent = {"INTERMEDIATE": INTERMEDIATE, "COLUMNS": layers.ACTIVE_COLUMNS, "HAS_GATES": False}
    bent |= {"LIMIT": 0.0, "SLOPE": 0.0, "ACTIVATION": int(Activation.XIELU)}
    active = bent | {"HAS_GATES": True, "ACTIVATION": 0, "curve_ptr": None}
    return {
        "silu": (layers.activate_row, active),
        "gelu": (layers.activate_row, active | {"ACTIVATION": int(Activation.GELU_TANH)}),
        "relu2": (layers.activate_row, active | {"HAS_GATES": False, "ACTIVATION": int(Activation.RELU2)}),
        "xielu": (layers.activate_row, bent),
        "soft cap of logits": (
            layers.softcap_row,
            {"VOCAB": 32000, "COLUMNS": layers.SOFTCAP_COLUMNS, "CAP": 30.0},
        ),
    }


def lora_kernels() -> dict[str, Made]:
    """Return the LoRA kernels for queries, keys and values, with the usual rank and the largest."""
    found: dict[str, Made] = {}
    for rank in (16, 256):
        shared = {"RANK": rank, "TILE": lora.tile_of(rank), "WIDTH": 3 * rank}
        lower, columns = {"DEPTH": HIDDEN, "NUM_ROLES": 3}, (HEADS + 2 * KV_HEADS) * HEAD_DIM
        found[f"rows lowered to rank {rank}"] = (lora.lower_row, shared | lower)
        found[f"rows of rank {rank} added"] = (lora.add_row, shared | {"COLUMNS": columns, "OUT_WIDTH": columns})
    return found


def griffin_kernels() -> dict[str, Made]:
    sizes = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN}
    return {
        "griffin's pairs": (griffin.pair_row, sizes),
        "griffin's norm": (griffin.layer_norm_row, sizes | {"num_warps": griffin.NORM_WARPS}),
        "griffin's silu": (griffin.silu_row, {"EXPANSION": INTERMEDIATE, "COLUMNS": layers.ACTIVE_COLUMNS}),
        "griffin's sum": (griffin.add_row, sizes),
        "griffin's kept rows": (griffin.keep_row, sizes),
        **{f"joined rows, {width:,} wide": (griffin.join_row, griffin.join_constants(width)) for width in JOINED},
    }
