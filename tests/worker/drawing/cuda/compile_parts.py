"""Kernels compiled for A100 and H100 on a machine without a GPU: what they take of it. Run without TRITON_INTERPRET."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

MULTIPLES = ("vocab", "logits_stride", "stride_")  # numbers that are multiples of 16 in large models
MOST_SHARED = 48 * 1024  # bytes, of which every GPU gives a program as much
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Launch:
    """A kernel as it is launched: types of its pointers (all else is int32), constants, and warps."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4


@dataclass(frozen=True)
class Resources:
    """The resources that a program takes: registers of a thread, and bytes."""

    registers: int
    stack: int  # what is spilled lies there
    local: int
    shared: int


def compiled(launch: Launch, capability: int) -> Any:
    """The kernel in machine code, for addresses that are multiples of 16, as torch's allocator gives them."""
    names = launch.kernel.arg_names
    signature = {name: "constexpr" if name in launch.constants else launch.types.get(name, "i32") for name in names}
    aligned = {i: signature[name].startswith("*") or name.startswith(MULTIPLES) for i, name in enumerate(names)}
    source = ASTSource(
        fn=launch.kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in launch.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, is_multiple in aligned.items() if is_multiple},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.num_warps})


def resources(launch: Launch, capability: int) -> Resources:
    """Return the resources that a compiled kernel takes, read from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write((binary := compiled(launch, capability)).asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Resources(numbers["REG"], numbers["STACK"], numbers["LOCAL"], binary.metadata.shared)
