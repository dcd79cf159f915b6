"""A program that compiles kernels for GPUs which need not be there, and says what became of them, as JSON.

`python -m tests.worker.kernels.cuda.compiling DTYPE KERNEL ...`, without Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swiftbatch.worker.caches.memory.page_counts import GPU_PAGE
from swiftbatch.worker.exactness.gpu_doctor import machine_checks
from swiftbatch.worker.kernels.cuda import (
    activations,
    expert_products,
    flash_attention,
    latent_attention,
    latent_products,
    linear,
    packed_linear,
    prefix_attention,
    router,
    tail_attention,
)
from swiftbatch.worker.kernels.cuda import layer_kernels as layers
from swiftbatch.worker.kernels.cuda.scan import clouds, scan
from swiftbatch.worker.kernels.cuda.scan import scan_choice as choice
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import TextSizes, scan_constants
from swiftbatch.worker.kernels.cuda.stacked_experts import StackedExperts
from swiftbatch.worker.kernels.cuda.states import state_inputs, state_walk
from swiftbatch.worker.kernels.cuda.states.state_buffers import MOVE_WARPS, MOVED_WORDS, move_step_words
from swiftbatch.worker.kernels.cuda.states.state_layers import finish_constants, finish_group
from swiftbatch.worker.kernels.cuda.states.step_layout import StepLayout
from swiftbatch.worker.kernels.cuda.tree_attention import AttentionShape
from swiftbatch.worker.kernels.decoder_weights import linear_from
from swiftbatch.worker.kernels.kernel_sizes import ROW_CHOICES, LatentSizes
from swiftbatch.worker.kernels.layer_forms import Activation, AttentionView, NormForm, Routing, Score
from swiftbatch.worker.kernels.mixer_sizes import MixerForm, MixerSizes
from swiftbatch.worker.kernels.packed_weights import CODE_BITS, TABLES, Code, PackedMatrix, Weight
from swiftbatch.worker.papers.griffin import draft_layer_kernels as griffin
from tests.worker.drawing.cuda.compile_parts import compiled as compile_launch
from tests.worker.drawing.cuda.compile_parts import drawing_launches

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
MOST_ROWS = ROW_CHOICES[-1]
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, NUM_SPLITS = 4096, 32, 8, 128, 14336, 54  # Llama 3.1 8B
KEPT = {"int8": "*i8", "e4m3": "*u8"}  # by what a kernel's name ends with: its keys and values in 8 bits
NUMBERS = {"scale_log2": "fp32", "epsilon": "fp32", "scale": "fp32"}
INTEGERS = ("groups_ptr", "rows_ptr", "tail_slots_ptr", "token_ids_ptr", "packed_ptr", "feature_places_ptr")
INTEGERS += (
    "pages_ptr",
    "full_slots_ptr",
    "num_chunks_ptr",
    "entries_ptr",
    "counts_ptr",
    "marks_ptr",
    "tile_experts_ptr",
    "tile_pairs_ptr",
)
INTEGERS += ("sequences_ptr", "paths_ptr", "moves_ptr")
READ = ("numbers_ptr", "sums_ptr")  # by the kernel that does nothing else
LONG_INTEGERS = ("met_ptr", "words_ptr", "places_ptr", "addresses_ptr")
SUMS = (
    "lse_ptr",
    "curve_ptr",
    "query_scales_ptr",
    "logits_ptr",
    "sinks_ptr",
    "noise_ptr",
    "means_ptr",
    "spreads_ptr",
    "moments_ptr",
    "stats_ptr",
    "gains_ptr",
    "limits_ptr",
    "token_norm_ptr",
    "hidden_norm_ptr",
    "scales_ptr",
    "offsets_ptr",
)
SUMS += ("router_ptr", "parts_ptr", "router_bias_ptr", "choice_bias_ptr", "choice_weights_ptr", "shares_ptr")
SUMS += ("samples_ptr", "flat_deviations_ptr", "best_output_ptr", "best_lse_ptr")  # float32 whatever the model's dtype


OF_ROWS = ("wide_ptr", "narrow_ptr", "inputs_ptr", "mixed_ptr", "qkv_ptr")  # of a state's kernels: else float32
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


OTHER_WIDTHS = (96, 256)
JOINED = (1024, 4096, 7168)  # of Qwen3.5 0.8B, GLM 4.5 Air, DeepSeek V3
NO_PAGES: dict[str, Any] = {"PAGE": 0, "pages_ptr": None}
Made = tuple[Any, dict[str, Any]]  # a kernel and its constants, options among them


def without(constants: dict[str, int], has: str, *pointers: str) -> dict[str, Any]:
    """A kernel that does without an operand."""
    return constants | {has: False} | dict.fromkeys(pointers)


def kernels(dtype: str) -> dict[str, Made]:
    """Every kernel by what it is called in a report."""
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, NUM_SPLITS, DTYPES[dtype])
    found: dict[str, Made] = {}
    for width in (HEAD_DIM, *OTHER_WIDTHS):
        constants = dataclasses.replace(attention, head_dim=width)
        name = "" if width == HEAD_DIM else f" of heads of {width}"
        plain = without(constants.prefix_constants(), "HAS_BIAS", "bias_ptr") | NO_PAGES
        found[f"prefix{name}"] = prefix_attention.prefix_split, plain
        found[f"tail{name}"] = tail_attention.tail_merge, without(constants.tail_constants(), "HAS_SINKS", "sinks_ptr")
        found[f"packed tail{name}"] = flash_attention.tail_merge_packed, flash_attention.packed_constants(constants)
    paged = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | {"PAGE": GPU_PAGE}
    found["prefix in pages"] = prefix_attention.prefix_split, paged
    found["prefix with biases"] = (
        prefix_attention.prefix_split,
        attention.prefix_constants() | {"HAS_BIAS": True} | NO_PAGES,
    )
    view = AttentionView(4096, 50.0)
    windowed = without(attention.prefix_constants(view), "HAS_BIAS", "bias_ptr") | {"PAGE": GPU_PAGE}
    found["prefix with a window"] = prefix_attention.prefix_split, windowed
    found["tail with a window"] = tail_attention.tail_merge, attention.tail_constants(view) | {"HAS_SINKS": True}
    return (
        found
        | scan_kernels(dtype)
        | kernels_besides_attention()
        | packed_kernels()
        | coded_kernels(dtype)
        | expert_kernels(dtype)
        | state_kernels(dtype)
        | latent_kernels(dtype)
        | wide_kernels(dtype)
    )


MIXERS = {  # of models that are published
    "Qwen3.5 27B": MixerSizes(MixerForm.DELTA_NET, 48, 16, 128, 128, 10240, 4, norm_width=128, epsilon=1e-6),
    "Nemotron-H 8B": MixerSizes(MixerForm.STATE_SPACE, 128, 8, 128, 64, 10240, 4, norm_width=1024, epsilon=1e-5),
    "LFM2 1.2B": MixerSizes(MixerForm.CONVOLUTION, 0, 0, 0, 0, 2048, 3),
}


def state_kernels(dtype: str) -> dict[str, Made]:
    """The kernels of layers that have a state or a convolution."""
    found: dict[str, Made] = {}
    for model, sizes in MIXERS.items():
        layout, has_bias = StepLayout.of(sizes, DTYPES[dtype].itemsize, 128), sizes.form == MixerForm.STATE_SPACE
        absent = {} if has_bias else {"tap_bias_ptr": None}
        if not sizes.num_heads:
            found[f"states: convolution of {model}"] = (
                state_inputs.gate_convolution,
                state_inputs.gate_constants(sizes, layout, has_bias) | absent,
            )
            continue
        unused = ("own_ptr", "skip_ptr") if sizes.form == MixerForm.DELTA_NET else ()
        found[f"states: heads of {model}"] = (
            state_inputs.ready_head,
            state_inputs.ready_constants(sizes, layout, has_bias) | absent,
        )
        found[f"states: weights of {model}"] = state_walk.weigh_path, state_walk.weight_constants(sizes, layout)
        found[f"states: walk of {model}"] = state_walk.walk_rows, state_walk.walk_constants(sizes, layout)
        finished = finish_constants(sizes) | dict.fromkeys(unused)
        found[f"states: norm of {model}"] = finish_group, finished
        moved = {"RING": layout.ring, "WORDS": layout.words, "WIDTH": MOVED_WORDS, "num_warps": MOVE_WARPS}
        found[f"states: moves of {model}"] = move_step_words, moved
    return found | {"states: gates of heads": (activations.gate_row, gates_of_heads())}


def gates_of_heads() -> dict[str, Any]:
    return {"ALL": 3 * HIDDEN, "NUMBERS": HIDDEN, "COLUMNS": activations.ACTIVE_COLUMNS}


def latent_kernels(dtype: str) -> dict[str, Made]:
    """The sizes of GLM 4.7 Flash; DeepSeek V3 has more heads, which fill several tiles."""
    sizes, num_heads, paged = LatentSizes(512, 768, 192, 64, 256), 20, {"PAGE": GPU_PAGE}
    attention = latent_attention.LatentShape(num_heads, sizes, 132, DTYPES[dtype])
    many = dataclasses.replace(attention, num_heads=128, num_splits=16, num_rows=MOST_ROWS)
    plain = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | paged
    keep = latent_products.keep_constants(sizes, sizes.query_rank + sizes.entry_dim, NormForm.TWICE)
    ups = {
        "absorbed queries": (sizes.rank, sizes.still_dim, sizes.query_dim, sizes.turned_dim),
        "values of heads": (sizes.value_dim, sizes.rank, sizes.rank, 0),
    }
    found: dict[str, Made] = {
        "latent prefix": (latent_attention.latent_prefix_split, plain),
        "latent prefix of many heads": (
            latent_attention.latent_prefix_split,
            without(many.prefix_constants(), "HAS_BIAS", "bias_ptr") | paged,
        ),
        "latent prefix with biases": (
            latent_attention.latent_prefix_split,
            attention.prefix_constants() | {"HAS_BIAS": True} | NO_PAGES,
        ),
        "latent tail": (latent_attention.latent_tail_merge, attention.tail_constants()),
        "kept latents": (latent_products.keep_latent_row, keep),
    }
    for name, (columns, depth, width, num_turned) in ups.items():
        weight = torch.empty(num_heads * columns, depth, dtype=DTYPES[dtype], device="meta")
        constants: dict[str, Any] = latent_products.head_constants(num_heads, weight, num_heads * width, num_turned)
        found[name] = latent_products.multiply_heads, constants | ({} if num_turned else {"angles_ptr": None})
    return found


def coded_kernels(dtype: str) -> dict[str, Made]:
    """The kernels that read or write keys and values in 8 bits."""
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, NUM_SPLITS, DTYPES[dtype])
    paged = {"PAGE": GPU_PAGE}
    plain = {
        "prefix": (
            prefix_attention.prefix_split,
            without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | paged,
        ),
        "tail": (tail_attention.tail_merge, without(attention.tail_constants(), "HAS_SINKS", "sinks_ptr")),
        "attend to the best": scan_kernels(dtype)["attend to the best in pages"],
        "rope": kernels_besides_attention()["rope"],
    }
    return {f"{name} in {code}": made for name, made in plain.items() for code in KEPT}


def wide_kernels(dtype: str) -> dict[str, Made]:
    """The kernels whose code follows from the number of rows, for the most of them."""
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM, 16, DTYPES[dtype], MOST_ROWS)
    paged = without(attention.prefix_constants(), "HAS_BIAS", "bias_ptr") | {"PAGE": GPU_PAGE}
    packed = packed_zeros("uint4", HIDDEN, 128, has_offsets=True)
    tile = linear.tile_rows(torch.zeros(MOST_ROWS, 1, dtype=DTYPES[dtype]))
    product = linear.multiply_constants(HIDDEN, False, tile)
    choice_of = router.choice_constants(QWEN3, 2048, DTYPES[dtype], False, False, False, MOST_ROWS)
    found: dict[str, Made] = {
        "prefix in pages": (prefix_attention.prefix_split, paged),
        "tail": (tail_attention.tail_merge, without(attention.tail_constants(), "HAS_SINKS", "sinks_ptr")),
        "linear": (linear.multiply_columns, without(product, "HAS_BIAS", "bias_ptr")),
        "experts' router": (router.multiply_router, router.router_constants(2880, 128, MOST_ROWS)),
        "choice of Qwen3": (router.choose_row, choice_of | dict.fromkeys(("router_bias_ptr", "choice_bias_ptr"))),
        "sort of choices": (router.sort_choices, router.sort_constants(QWEN3, MOST_ROWS)),
    }
    constants = scan_constants(attention, TextSizes(32, 4, KV_HEADS, HEAD_DIM, 97, 256, 16))
    found["look at clouds"] = clouds.look_at_clouds, constants["look_at_clouds"]
    if dtype == "bf16":
        constants = without(packed_linear.packed_constants(packed, False, tile), "HAS_BIAS", "bias_ptr")
        found["packed uint4 with offsets"] = packed_linear.multiply_packed_columns, constants
    return {f"{name} of {MOST_ROWS} rows": made for name, made in found.items()}


def scan_kernels(dtype: str, head_dim: int = HEAD_DIM) -> dict[str, Made]:
    """For texts of 100,000 positions."""
    attention = AttentionShape(KV_HEADS, HEADS // KV_HEADS, head_dim, NUM_SPLITS, DTYPES[dtype])
    constants = scan_constants(attention, TextSizes(32, 4, KV_HEADS, head_dim, 97, 256, 16))
    made = {
        "look at clouds": clouds.look_at_clouds,
        "sample": choice.sample_scores,
        "threshold": choice.find_threshold,
        "choose": choice.choose_keys,
        "attend to the best": scan.attend_best,
        "merge all": clouds.scan_merge,
    }
    found: dict[str, Made] = {name: (kernel, dict(constants[kernel.__name__])) for name, kernel in made.items()}
    reads = found["attend to the best"][1]
    found["attend to the best in pages"] = scan.attend_best, reads | {"PAGE": GPU_PAGE}
    reads |= {"PAGE": 0, "full_slots_ptr": None, "pages_ptr": None}
    return found


def kernels_besides_attention() -> dict[str, Made]:
    rope = layers.rope_constants(KV_HEADS, HEADS // KV_HEADS, HEAD_DIM) | {
        "FORM": 0,
        "NORMS_TURNED": False,
        "NORMS_DIFFER": False,
        "OTHER_HEADS": 0,
    }
    grown = rope | without({}, "IS_PACKED", "packed_ptr") | {"HAS_SCALES": True}
    rope |= without({}, "HAS_SCALES", "query_scales_ptr")
    in_order = without({}, "IS_PACKED", "packed_ptr")
    differing = {"HAS_NORM": True, "NORMS_DIFFER": True, "FORM": int(NormForm.CENTRED)}
    norm = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN, "HAS_DELTA": True, "HAS_FRONT": True, "DELTA_SCALE": 1.0, "FORM": 0}
    front = without(norm, "HAS_BEHIND", "behind_ptr")
    behind = norm | {"HAS_BEHIND": True, "FORM": int(NormForm.ONCE)}
    heads = {"ALL": 3 * HIDDEN, "QUERIES": HIDDEN, "KEYS": HIDDEN, "WIDTH": HIDDEN, "FORM": int(NormForm.ONCE)}
    active = {"INTERMEDIATE": INTERMEDIATE, "COLUMNS": activations.ACTIVE_COLUMNS, "HAS_GATES": True, "ACTIVATION": 0}
    bent = active | {"HAS_GATES": False, "ACTIVATION": int(Activation.XIELU)}
    active |= {"curve_ptr": None}
    embed = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN, "SCALE": 1.0}
    plain_linear = without(linear.multiply_constants(HIDDEN, False), "HAS_BIAS", "bias_ptr")
    return {
        "rope": (layers.rope_store_heads, without(rope | in_order, "HAS_NORM", "query_norm_ptr", "key_norm_ptr")),
        "rope with norms": (layers.rope_store_heads, rope | in_order | {"HAS_NORM": True}),
        "rope, then norms": (layers.rope_store_heads, rope | in_order | {"HAS_NORM": True, "NORMS_TURNED": True}),
        "rope, packed": (layers.rope_store_heads, rope | {"HAS_NORM": True, "IS_PACKED": True}),
        "rope with norms of its own for each head": (layers.rope_store_heads, rope | in_order | differing),
        "rope with scales": (layers.rope_store_heads, without(grown, "HAS_NORM", "query_norm_ptr", "key_norm_ptr")),
        "embed": (layers.embed_row, embed),
        "embed, scaled": (layers.embed_row, embed | {"SCALE": 12.0}),
        "norm": (layers.add_norm_row, without(front, "HAS_DELTA", "delta_ptr")),
        "add and norm": (layers.add_norm_row, front),
        "add, scaled, and norm": (layers.add_norm_row, front | {"DELTA_SCALE": 0.22}),
        "norm, add and norm": (layers.add_norm_row, behind),
        "norm and add": (layers.add_norm_row, without(behind, "HAS_FRONT", "weight_ptr", "normed_ptr")),
        "norm of one more": (layers.add_norm_row, front | {"FORM": int(NormForm.ONE_MORE)}),
        "norm of distances from the mean": (layers.add_norm_row, front | {"FORM": int(NormForm.CENTRED)}),
        "norm with biases": (layers.add_norm_row, front | {"FORM": int(NormForm.SHIFTED)}),
        "norms of all heads": (layers.norm_heads_row, heads),
        "silu": (activations.activate_row, active),
        "gelu": (activations.activate_row, active | {"ACTIVATION": int(Activation.GELU_TANH)}),
        "relu2": (activations.activate_row, active | {"HAS_GATES": False, "ACTIVATION": int(Activation.RELU2)}),
        "xielu": (activations.activate_row, bent),
        "soft cap of logits": (
            activations.cap_row,
            {"VOCAB": 32000, "COLUMNS": activations.CAPPED_COLUMNS, "CAP": 30.0},
        ),
        "linear": (linear.multiply_columns, plain_linear),
        "linear with bias": (linear.multiply_columns, linear.multiply_constants(HIDDEN, True)),
        "head": (linear.multiply_columns, plain_linear),
        **griffin_kernels(),
        "read": (machine_checks.read_numbers, machine_checks.READ_CONSTANTS),
        "noise": (machine_checks.store_noise, {"BLOCK": machine_checks.NOISE_BLOCK}),
    }


def packed_kernels() -> dict[str, Made]:
    """Products with every code; groups of 16, 32, 128 and all of a depth, of which one is not whole blocks; offsets."""
    found = {f"packed {code}": packed_product(code, 128) for code in TABLES}
    return found | {
        "packed e2m1 in blocks of 16": packed_product("e2m1", 16),
        "packed int8 over the depth": packed_product("int8", HIDDEN),
        "packed uint4 with offsets": packed_product("uint4", 32, has_offsets=True),
        "packed e4m3 of another depth": packed_product("e4m3", 32, depth=HIDDEN + 32),
    }


QWEN3 = Routing(128, 8, Score.SOFTMAX)  # 30B A3B
GPT_OSS = Routing(128, 4, Score.SOFTMAX_OF_CHOSEN, is_normalised=False)  # 120B
MIXED = Routing(16, 2, Score.SPARSE_MIXER, is_normalised=False, jitter=0.01)
DEEPSEEK = Routing(256, 8, Score.SIGMOID, True, 1e-20, 2.5, 8, 4, rounds_logits=False, rounds_weights=False)


def expert_kernels(dtype: str) -> dict[str, Made]:
    """In the sizes of models that are published, their experts packed and in the dtype."""
    plain, number = torch.zeros(1, 2048, dtype=DTYPES[dtype]), DTYPES[dtype]
    found: dict[str, Made] = {
        "experts' router": (router.multiply_router, router.router_constants(2880, 128)),
        "choice of Qwen3": chosen_by(QWEN3, 2048, number, False, False, False),
        "choice of Qwen2, with a share": chosen_by(Routing(60, 4, Score.SOFTMAX), 2048, number, False, False, True),
        "choice of gpt-oss": chosen_by(GPT_OSS, 2880, number, True, False, False),
        "choice of Phi-3.5": chosen_by(MIXED, 4096, number, False, False, False),
        "choice of DeepSeek": chosen_by(DEEPSEEK, 7168, number, False, True, False),
        "sort of choices": (router.sort_choices, router.sort_constants(QWEN3)),
        "sort of choices among 512 experts": (
            router.sort_choices,
            router.sort_constants(Routing(512, 10, Score.SOFTMAX)),
        ),
        "experts' gates and ups": expert_product(QWEN3, plain, is_gated=True),
        "experts' ups alone": expert_product(QWEN3, plain, is_gated=True, has_gates=False),
        "experts' downs": expert_product(QWEN3, plain, is_gated=False),
        "sum of choices": (expert_products.sum_choices, summed(False)),
        "sum of choices with a share": (expert_products.sum_choices, summed(True)),
    }
    return found | (packed_experts() if number == torch.bfloat16 else {})


def packed_experts() -> dict[str, Made]:
    """FP8 in blocks of 128, MXFP4 of gpt-oss with its limit, NVFP4, and int4 with offsets."""
    return {
        "FP8 experts": expert_product(QWEN3, packed_zeros("e4m3", 2048, 128), is_gated=True),
        "MXFP4 experts": expert_product(GPT_OSS, packed_zeros("e2m1", 2880, 32), is_gated=True, limit=7.0),
        "NVFP4 experts": expert_product(QWEN3, packed_zeros("e2m1", 2048, 16), is_gated=False),
        "int4 experts": expert_product(QWEN3, packed_zeros("uint4", 2048, 128, has_offsets=True), is_gated=False),
    }


def chosen_by(
    routing: Routing, hidden: int, dtype: torch.dtype, has_bias: bool, has_choice_bias: bool, has_share: bool
) -> Made:
    constants = router.choice_constants(routing, hidden, dtype, has_bias, has_choice_bias, has_share)
    constants |= {} if has_bias else {"router_bias_ptr": None}
    return router.choose_row, constants | ({} if has_choice_bias else {"choice_bias_ptr": None})


def expert_product(
    routing: Routing, weight: Weight, *, is_gated: bool, limit: float = 0.0, has_gates: bool = True
) -> Made:
    linear_of_all = linear_from(weight, torch.zeros(1) if limit else None)
    gates = StackedExperts(
        routing, torch.zeros(1, 1), linear_of_all, linear_of_all, None, None, limit, 1.702, has_gates
    )
    constants = expert_products.tile_constants(routing, linear_of_all, gates if is_gated else None, Activation.SILU)
    unused = ["bias_ptr"] * (not limit)
    if isinstance(weight, PackedMatrix):
        unused += ["weight_ptr", *["offsets_ptr"] * (weight.offsets is None)]
    else:
        unused += ["codes_ptr", "scales_ptr", "offsets_ptr"]
    return expert_products.multiply_tile, constants | dict.fromkeys(unused)


def summed(has_share: bool) -> dict[str, Any]:
    constants = {"HIDDEN": 2048, "NUM_CHOSEN": 8, "COLUMNS": expert_products.SUMMED_COLUMNS}
    return constants | {"HAS_SHARED": has_share, "HAS_SHARE": has_share}


def packed_zeros(code: Code, depth: int, group: int, *, has_offsets: bool = False) -> PackedMatrix:
    codes = torch.zeros(1, depth * CODE_BITS[code] // 8, dtype=torch.uint8)
    scales = torch.zeros(1, depth // group)
    return PackedMatrix(code, codes, scales, torch.bfloat16, scales if has_offsets else None)


def packed_product(code: Code, group: int, *, has_offsets: bool = False, depth: int = HIDDEN) -> Made:
    matrix = packed_zeros(code, depth, group, has_offsets=has_offsets)
    constants = without(packed_linear.packed_constants(matrix, False), "HAS_BIAS", "bias_ptr")
    if not has_offsets:
        constants = without(constants, "HAS_OFFSETS", "offsets_ptr")
    return packed_linear.multiply_packed_columns, constants


def griffin_kernels() -> dict[str, Made]:
    sizes = {"HIDDEN": HIDDEN, "WIDTH": HIDDEN}
    return {
        "griffin's pairs": (griffin.pair_row, sizes),
        "griffin's norm": (griffin.layer_norm_row, sizes | {"num_warps": griffin.NORM_WARPS}),
        "griffin's silu": (griffin.silu_row, {"EXPANSION": INTERMEDIATE, "COLUMNS": activations.ACTIVE_COLUMNS}),
        "griffin's sum": (griffin.add_row, sizes),
        "griffin's kept rows": (griffin.keep_row, sizes),
        **{f"joined rows, {width:,} wide": (griffin.join_row, griffin.join_constants(width)) for width in JOINED},
    }


def type_of(name: str, argument: str, dtype: str) -> str:
    if not argument.endswith("_ptr"):
        return NUMBERS.get(argument, "i32")
    if argument in INTEGERS + READ:
        return "*i32"
    if argument in LONG_INTEGERS:
        return "*i64"
    if argument == "codes_ptr":
        return "*u8"
    if name.startswith("states: "):
        return f"*{dtype}" if argument in OF_ROWS else "*fp32"
    if name.split()[-1] in KEPT and argument in ("key_ptr", "value_ptr", "keys_ptr", "values_ptr", "kept_ptr"):
        return KEPT[name.split()[-1]]
    is_sum = argument in SUMS or (argument == "bias_ptr" and name.startswith(("prefix", "latent prefix")))
    is_sum |= argument == "output_ptr" and not name.startswith("packed")  # which flash-attn wrote
    return "*fp32" if is_sum or (name, argument) == ("head", "out_ptr") else f"*{dtype}"


def compiled(name: str, dtype: str, capability: int) -> Any:
    kernel, given = kernels(dtype)[name]
    options = {option: given[option] for option in ("num_warps", "num_stages") if option in given}
    constants = {constant: value for constant, value in given.items() if constant not in options}
    arguments = kernel.arg_names
    signature = {each: "constexpr" if each in constants else type_of(name, each, dtype) for each in arguments}
    aligned = [each for each in arguments if signature[each].startswith("*") or each.startswith("stride")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(arguments.index(each),): value for each, value in constants.items()},
        attrs={(arguments.index(each),): [["tt.divisibility", 16]] for each in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def described(name: str, dtype: str, capability: int) -> dict[str, Any]:
    """Registers and bytes on the stack (0: nothing was spilled) of a thread, shared memory, and instructions."""
    drawing = drawing_launches()
    made = compile_launch(drawing[name], capability) if name in drawing else compiled(name, dtype, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    layouts = re.findall(r"#ttg.nvidia_mma<\{[^}]*warpsPerCTA = \[([^\]]*)\]", made.asm["ttgir"])
    ops = ("wgmma.mma_async", "mma.sync", "cp.async", "bar.sync", "cvt.rn.bf16x2.f32")
    return {
        "kernel": name,
        "dtype": dtype,
        "capability": capability,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),  # type: ignore[index]
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "layouts": [[int(number) for number in layout.split(",")] for layout in layouts],
        "ops": {op: made.asm["ptx"].count(op) for op in ops},
        "products": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]*", made.asm["ptx"]))),
        "copied": Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x\w+)", made.asm["ptx"])),
    }


if __name__ == "__main__":
    of_dtype, asked, *names = sys.argv[1:]
    for chosen in names:
        for capability in map(int, asked.split(",")):
            print(json.dumps(described(chosen, of_dtype, capability)), flush=True)
