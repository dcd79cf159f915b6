"""Compiled kernels: those that this processor can run, the one in use, and its compute threads."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swiftbatch.jobs.errors import UserError
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.kernels import build
from swiftbatch.worker.kernels.build import is_of_this_source, is_whole, library_path, variants
from swiftbatch.worker.kernels.gpu_kernel_choice import with_kv

if TYPE_CHECKING:
    from swiftbatch.worker.kernels.gpu_kernel_choice import CudaKernels


CPU_FLAGS = {  # required flags of /proc/cpuinfo
    "amx-bf16": {"amx_tile", "amx_bf16", "avx512_bf16"},
    "avx512-bf16": {"avx512_bf16", "avx512_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx2": {"avx2", "fma", "f16c"},
    "portable": set(),
}
NEEDED_BY = {"amx-bf16": "avx512", "avx512-bf16": "avx512", "avx512": "avx2"}
ASKING = ("amx-bf16",)  # a process must ask the system for permission to use these
OVERRIDE = "SWIFTBATCH_ISA"
NO_KERNELS = "torch"  # means running without kernels
NUMERICS_VERSION = 1  # must rise with every change of bits
POINTER, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # the result's and the arguments' types
    "kernels_variant": (ctypes.c_char_p, []),
    "kernels_usable": (INT, []),
    "team_new": (POINTER, [INT]),
    "team_free": (None, [POINTER]),
    "team_is_busy": (INT, [POINTER]),
    "rows_fit": (INT, [POINTER, INT, POINTER, POINTER, INT, INT]),
    "attend": (None, [POINTER, POINTER, POINTER, POINTER, INT, POINTER, POINTER, POINTER, POINTER]),
    "recurrence_rows": (None, [POINTER, POINTER]),
    "recurrence_fold": (None, [POINTER, POINTER, POINTER, INT]),
    "rows_keep": (None, [POINTER, INT, INT, POINTER, INT]),
    "decoder_new": (POINTER, [POINTER]),
    "decoder_load": (None, [POINTER, INT, INT, POINTER]),
    "decoder_experts": (None, [POINTER, INT, POINTER]),
    "decoder_load_expert": (None, [POINTER, INT, INT, INT, POINTER]),
    "decoder_mixer": (None, [POINTER, INT, POINTER]),
    "decoder_load_mixer": (None, [POINTER, INT, INT, POINTER]),
    "decoder_adapter": (INT, [POINTER]),
    "decoder_load_adapter": (None, [POINTER, INT, INT, INT, INT, POINTER, POINTER]),
    "decoder_free": (None, [POINTER]),
    "decoder_forward": (None, [POINTER, POINTER, POINTER]),
    "decoder_experts_met": (LONG, [POINTER]),
    "draw_chains": (INT, [POINTER, POINTER, POINTER, POINTER]),
    "decoder_head": (None, [POINTER, POINTER, INT, POINTER, POINTER]),
    "scan_take_in": (None, [POINTER, POINTER, POINTER, INT, INT]),
    "griffin_new": (POINTER, [POINTER]),
    "griffin_load": (None, [POINTER, INT, POINTER]),
    "griffin_free": (None, [POINTER]),
    "griffin_fuse": (None, [POINTER, POINTER, INT, POINTER, POINTER, POINTER]),
    "griffin_head": (None, [POINTER, POINTER, INT, POINTER, POINTER, POINTER]),
    "recycling_grow": (None, [POINTER, POINTER, LONG, POINTER, POINTER, POINTER]),
    "recycling_write": (LONG, [*[POINTER] * 7, LONG, POINTER]),
    "tree_tails": (INT, [*[POINTER] * 4, LONG, POINTER, POINTER]),
    "table_fill": (INT, [POINTER, POINTER, LONG, *[POINTER] * 7]),
}


class KernelError(UserError):
    """The kernels cannot be used as requested."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return this processor's flags, or an empty set if the system does not list them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return frozenset()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def _flags_of(variant: str) -> set[str]:
    below = NEEDED_BY.get(variant)
    return CPU_FLAGS[variant] | (_flags_of(below) if below else set())


def runnable_variants() -> list[str]:
    """Return the compiled instruction sets that this processor and system can run, fastest first."""
    compiled = _compiled_variants(build.LIBRARIES)
    found = [name for name in compiled if _flags_of(name) <= cpu_flags()]
    return [name for name in found if name not in ASKING or _is_allowed(name)]


@functools.cache
def _compiled_variants(folder: Path) -> tuple[str, ...]:
    """Return the variants that had a library at this process's first call."""
    return tuple(name for name in variants() if (folder / library_path(name).name).exists())


def chosen_variant() -> str | None:
    """Return the instruction set in use: `$SWIFTBATCH_ISA` or the fastest, or None to run without kernels.

    Raises KernelError for a name that cannot run here.
    """
    runnable = runnable_variants()
    if not (name := os.environ.get(OVERRIDE)):
        return runnable[0] if runnable else None
    if name == NO_KERNELS:
        return None
    if name not in runnable:
        here = (
            f"this machine runs {', '.join([*runnable, NO_KERNELS])}" if runnable else "no kernels were compiled here"
        )
        raise KernelError(f"{OVERRIDE}={name}: {here}")
    return name


def why_none() -> str:
    if os.environ.get(OVERRIDE) == NO_KERNELS:
        return f"{OVERRIDE}={NO_KERNELS} leaves them out"
    return "none were compiled; install swiftbatch anew, with a network for the package ziglang, or with $CC"


def numerics_of(variant: str, dtype: str, as_integers: bool = False) -> str:
    """Return a name of everything that determines the bits of a variant's forwards.

    Processor, threads and rows do not.
    """
    return f"{kernel_numerics(variant, dtype)}, {dtype}{', int8 products 1' if as_integers else ''}"


def kernel_numerics(variant: str, dtype: str) -> str:
    """Return the name of a variant's numerics.

    In float32 all variants have the same name, since their bits are equal.
    """
    is_bf16 = dtype == "bfloat16" and variant.endswith("bf16")
    return f"native {variant if is_bf16 else 'f32'} {NUMERICS_VERSION}"


def chosen_numerics(device_type: str, dtype: str, kernels: CudaKernels, kv_dtype: KVDtype | None = None) -> str:
    """Return the name of the numerics for models that the kernels support, or "" without kernels.

    Raises KernelError as `chosen_variant` does.
    """
    if device_type == "cuda":
        return with_kv(kernels.words, kv_dtype)
    variant = chosen_variant() if device_type == "cpu" else None
    return with_kv(numerics_of(variant, dtype, kernels.has_integer_rows) if variant else "", kv_dtype)


@functools.cache
def _is_allowed(variant: str) -> bool:
    return bool(open_library(library_path(variant)).kernels_usable())


@functools.cache
def load_library(variant: str) -> ctypes.CDLL:
    """Load a variant's library. Raises KernelError if it does not load or the system refuses its instructions."""
    library = open_library(library_path(variant))
    if not library.kernels_usable():
        raise KernelError(f"kernels for {variant}: this system does not let a process use them")
    return library


@functools.cache
def chosen_library() -> ctypes.CDLL | None:
    """Return the library in use, or None to run without kernels."""
    variant = chosen_variant()
    return None if variant is None else load_library(variant)


def open_library(path: Path) -> ctypes.CDLL:
    """Open a library with the types of its functions. Raises KernelError."""
    if not is_whole(path):  # loading a damaged library would crash the process
        raise KernelError(f"kernels do not load: {path} is not as it was compiled; install swiftbatch anew")
    if not is_of_this_source(path):  # other arguments would crash the process
        raise KernelError(f"kernels do not load: {path} was compiled of another source; install swiftbatch anew")
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise KernelError(f"kernels do not load: {error}; install swiftbatch anew") from error
    return library


# Compute threads, and the memory that they may still read.


Free = Callable[[int], None]


class Team:
    """The calling thread, and helpers that start when there is work."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"found {num_threads} threads, expected 1 or more")
        self.library = library
        self.lock = threading.Lock()  # allows one call at a time
        self.handle: int = library.team_new(num_threads)
        self._held: list[Any] = []
        self._retired: list[tuple[Free, int]] = []
        weakref.finalize(self, _close, library, self.handle, self._retired)

    def hold(self, read: Any) -> None:
        """Keep a call's inputs alive while a late helper may read them."""
        is_busy = self.library.team_is_busy(self.handle)
        self._held = [*self._held, read] if is_busy else []
        if not is_busy:
            _free(self._retired)

    def retire(self, free: Free, handle: int) -> None:
        """Free weights once no helper may read them."""
        self._retired.append((free, handle))


_teams: weakref.WeakValueDictionary[tuple[str, int], Team] = weakref.WeakValueDictionary()
_teams_lock = threading.Lock()


def shared_team(library: ctypes.CDLL, num_threads: int) -> Team:
    """Return the library's only team of this size; two teams would compete for cores."""
    with _teams_lock:
        team = _teams.get((library._name, num_threads))
        if team is None:
            team = _teams[library._name, num_threads] = Team(library, num_threads)
        return team


def _close(library: ctypes.CDLL, handle: int, retired: list[tuple[Free, int]]) -> None:
    library.team_free(handle)
    _free(retired)


def _free(retired: list[tuple[Free, int]]) -> None:
    while retired:
        free, handle = retired.pop()
        free(handle)
