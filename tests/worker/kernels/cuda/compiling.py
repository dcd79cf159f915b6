"""Compiles kernels for absent GPUs and prints reports as JSON.

`python -m tests.worker.kernels.cuda.compiling DTYPE KERNEL ...`, without Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from swiftbatch.worker.forward.cuda.compile_ahead import AbsentGPU
from swiftbatch.worker.kernels.kernel_sizes import BLOCK_DEPTH
from tests.worker.kernels.cuda.kernel_constants import KEPT, kernels
from tests.worker.sampling.cuda.compile_parts import compiled as compile_launch
from tests.worker.sampling.cuda.compile_parts import drawing_launches

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
NUMBERS = {"scale_log2": "fp32", "epsilon": "fp32", "scale": "fp32", "state_scale": "fp32"}
INTEGERS = ("groups_ptr", "rows_ptr", "tail_slots_ptr", "token_ids_ptr", "packed_ptr", "feature_places_ptr")
INTEGERS += (
    "flags_ptr",
    "pages_ptr",
    "full_slots_ptr",
    "num_chunks_ptr",
    "entries_ptr",
    "counts_ptr",
    "marks_ptr",
    "tile_experts_ptr",
    "tile_pairs_ptr",
)
INTEGERS += ("adapters_ptr", "roles_ptr", "own_columns_ptr")
INTEGERS += ("sequences_ptr", "paths_ptr", "moves_ptr", "list_ptr", "listed_ptr", "ends_ptr")
READ = ("numbers_ptr", "sums_ptr")  # by the kernel that only reads them
LONG_INTEGERS = (
    "met_ptr",
    "words_ptr",
    "places_ptr",
    "addresses_ptr",
    "peers_ptr",
    "peer_states_ptr",
    "peer_normed_ptr",
)
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
SUMS += ("choice_scales_ptr",)
SUMS += ("lora_down_ptr", "lora_up_ptr", "lowered_ptr")
SUMS += ("samples_ptr", "flat_deviations_ptr", "best_output_ptr", "best_lse_ptr")  # float32 with any model dtype
SUMS += ("scores_ptr",)
OF_ROWS = ("wide_ptr", "narrow_ptr", "inputs_ptr", "mixed_ptr", "qkv_ptr")  # of a state's kernels: else float32


def type_of(name: str, argument: str, dtype: str) -> str:
    if not argument.endswith("_ptr"):
        return NUMBERS.get(argument, "i32")
    if argument in INTEGERS + READ:
        return "*i32"
    if argument in LONG_INTEGERS:
        return "*i64"
    if argument == "codes_ptr":
        return "*i16"
    if argument == "table_ptr":
        return "*bf16"
    if "parts" in name and argument in ("out_ptr", "delta_ptr"):
        return "*fp32"
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
    if given.get("IS_NARROW") and given["GROUP"] < BLOCK_DEPTH:
        signature["scales_ptr"] = "*bf16"
    multiples = ("stride", "num_columns")
    aligned = [each for each in arguments if signature[each].startswith("*") or each.startswith(multiples)]
    triton.runtime.driver.set_active(AbsentGPU(f"sm_{capability}"))
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(arguments.index(each),): value for each, value in constants.items()},
        attrs={(arguments.index(each),): [["tt.divisibility", 16]] for each in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def num_spilled(sass: str) -> int:
    """Count accesses of the stack in innermost loops, or anywhere if there is no loop."""
    places = [(int(place, 16), what) for place, what in re.findall(r"/\*([0-9a-f]{4,5})\*/ +([^;]*);", sass)]
    ends = [(place, re.search(r"BRA .*?0x([0-9a-f]+)", what)) for place, what in places]
    loops = [(int(found[1], 16), end) for end, found in ends if found and int(found[1], 16) < end]
    inner = [loop for loop in loops if not any(loop[0] <= o[0] and o[1] <= loop[1] for o in loops if o != loop)]
    stacked = [place for place, what in places if re.match(r"(@\S+ )?(STL|LDL)", what)]
    return sum(any(start <= place <= end for start, end in inner) for place in stacked) if inner else len(stacked)


def described(name: str, dtype: str, capability: int) -> dict[str, Any]:
    """Return registers and stack bytes (0: no spills) per thread, and shared memory."""
    drawing = drawing_launches()
    made = compile_launch(drawing[name], capability) if name in drawing else compiled(name, dtype, capability)
    usage, sass = (dumped(made, what) for what in ("-res-usage", "-sass"))
    loop = loop_of(sass)
    layouts = re.findall(r"#ttg.nvidia_mma<\{[^}]*warpsPerCTA = \[([^\]]*)\]", made.asm["ttgir"])
    ops = ("wgmma.mma_async", "mma.sync", "cp.async", "bar.sync", "cvt.rn.bf16x2.f32", "fma.rn.bf16x2")
    return {
        "kernel": name,
        "dtype": dtype,
        "capability": capability,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "spilled": num_spilled(sass),
        "local": int(re.search(r"LOCAL:(\d+)", usage)[1]),  # type: ignore[index]
        "shared": made.metadata.shared,
        "warps": made.metadata.num_warps,
        "layouts": [[int(number) for number in layout.split(",")] for layout in layouts],
        "ops": {op: made.asm["ptx"].count(op) for op in ops},
        "products": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w]*", made.asm["ptx"]))),
        "loop": len(loop),
        "loop ops": Counter(re.sub(r"^@\S+ ", "", each).split(".")[0].split()[0] for each in loop),
        "k widths": sorted(set(re.findall(r"kWidth = (\d)", made.asm["ttgir"]))),
        "copied": Counter(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*\], (0x\w+)", made.asm["ptx"])),
    }


def dumped(made: Any, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        return subprocess.run([CUOBJDUMP, what, file.name], capture_output=True, text=True, check=True).stdout


def loop_of(sass: str) -> list[str]:
    """Return the instructions of the longest loop: from a target to the branch back to it."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass, re.MULTILINE)
    places = {int(address, 16): number for number, (address, _) in enumerate(lines)}
    loops = [range(0)]
    for number, (_, words) in enumerate(lines):
        if branch := re.search(r"BRA 0x([0-9a-f]+)", words):
            loops.append(range(places.get(int(branch[1], 16), number), number + 1))
    longest = max(loops, key=len)
    return [words for _, words in lines[longest.start : longest.stop]]


if __name__ == "__main__":
    of_dtype, asked, *names = sys.argv[1:]
    for chosen in names:
        for capability in map(int, asked.split(",")):
            print(json.dumps(described(chosen, of_dtype, capability)), flush=True)
