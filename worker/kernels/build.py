"""Compiles the C source for each instruction set; `setup.py` runs it with the standard library alone."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
LIBRARIES = Path(__file__).parent / "lib"
X86_MACHINES = ("x86_64", "AMD64")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")
X86_FLAGS = {
    "amx-bf16": (*AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "avx512-bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
}
# debug information would take a quarter of ziglang's time
FLAGS = ("-O3", "-g0", "-std=gnu11", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall")
SAME_BITS = ("-ffp-contract=off", "-fno-math-errno")  # square roots are instructions, and nothing else is rearranged


class BuildError(Exception):
    """No library was compiled. The text is the compiler's error in one line."""


def variants() -> dict[str, tuple[str, ...]]:
    return (X86_FLAGS if platform.machine() in X86_MACHINES else {}) | {"portable": ()}


def find_compiler() -> list[str] | None:
    """Return `$CC`, `ziglang`'s compiler, or the machine's own compiler, or None if there is no compiler."""
    if command := os.environ.get("CC"):
        return shlex.split(command)
    if (package := importlib.util.find_spec("ziglang")) and package.submodule_search_locations:
        return [str(Path(package.submodule_search_locations[0]) / "zig"), "cc", *_zig_target()]
    return [command] if (command := shutil.which("cc")) else None


def compile_library(
    variant: str, path: Path, compiler: list[str], extra_flags: Sequence[str] = (), cache: str | None = None
) -> None:
    """Compile one variant into the file `path`, replacing an existing file atomically. Raises BuildError."""
    digest = source_digest()
    environment = os.environ | ({"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache} if cache else {})
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        everything = Path(folder) / "kernels.c"  # one unit, because reading the processor's headers takes longest
        everything.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCE.glob("*.c"))))
        flags = (*FLAGS, *SAME_BITS, *variants()[variant], *extra_flags)
        try:
            _run([*compiler, *flags, "-c", everything.name, "-o", "kernels.o"], folder, environment)
            # ziglang would build its runtime again for each variant's flags, and a second one for debugging without -O3
            link = [*compiler, "-shared", "-O3", "-pthread", *extra_flags, "-o", path.name, "kernels.o", "-lm"]
            _run(link, folder, environment)
        except BuildError:
            path.unlink(missing_ok=True)  # a library of an older source must not stay
            raise
        _put(Path(folder) / path.name, path, digest)


def _put(made: Path, path: Path, digest_of_source: str) -> None:
    """Rename a new library to its final path.

    Meanwhile the mark holds the digests of both the old and the new library.
    """
    digest = _digest(made)
    if path.exists():
        _write_mark(made, path, f"{digest_of_source} {_digest(path)} {digest}")
    made.replace(path)
    _write_mark(made, path, f"{digest_of_source} {digest}")


def _write_mark(made: Path, path: Path, text: str) -> None:
    """Write the mark of the library `path` atomically."""
    aside = _mark(made)
    aside.write_text(text, encoding="ascii")
    aside.replace(_mark(path))


def _run(command: list[str], folder: str, environment: dict[str, str]) -> None:
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error.strerror}") from error
    if run.returncode:
        raise BuildError(f"{command[0]}: {_first_error(run.stderr)}")


def library_path(variant: str) -> Path:
    return LIBRARIES / f"kernels-{variant}.so"


def source_digest() -> str:
    """Return a SHA-256 of what determines the libraries, except the compiler: sources, this file, machine type."""
    kind = f"{sys.platform} {platform.machine()}".encode()
    files = [path.name.encode() + path.read_bytes() for path in (*sorted(SOURCE.glob("*.[ch]")), Path(__file__))]
    return hashlib.sha256(b"\0".join([kind, *files])).hexdigest()


def stale_variants() -> list[str]:
    """Return the variants whose library is missing or was compiled from another source."""
    digest = source_digest()
    paths = {name: library_path(name) for name in variants()}
    return [
        name
        for name, path in paths.items()
        if not (
            path.is_file()
            and _mark(path).is_file()
            and _mark(path).read_text(encoding="ascii") == _mark_of(path, digest)
        )
    ]


def compile_all(names: Iterable[str] | None = None) -> list[str]:
    """Compile the variants in parallel; return one line per failure."""
    names = variants() if names is None else names
    if (compiler := find_compiler()) is None:
        return ["no C compiler was found (the package ziglang brings one; $CC names another)"]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        builds = {
            name: pool.submit(compile_library, name, library_path(name), compiler, cache=folder) for name in names
        }
    return [f"{name}: {error}" for name, build in builds.items() if (error := build.exception())]


def is_whole(library: Path) -> bool:
    """Return whether a library's file is unchanged since its compilation."""
    # checked twice, because another library may replace the file between the two reads
    return any(_fits_mark(library) for _ in range(2))


def is_of_this_source(library: Path) -> bool:
    """Return whether a library was compiled from this source; functions of other libraries may take other arguments."""
    try:
        return _mark(library).read_text(encoding="ascii").partition(" ")[0] == source_digest()
    except (OSError, UnicodeDecodeError):
        return False


def _fits_mark(library: Path) -> bool:
    try:
        return _digest(library) in _mark(library).read_text(encoding="ascii").split()[1:]
    except (OSError, UnicodeDecodeError):
        return False


def _mark(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _mark_of(library: Path, digest_of_source: str) -> str:
    return f"{digest_of_source} {_digest(library)}"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _zig_target() -> list[str]:
    """Return flags that compile for any processor of this architecture, not only for the machine's own."""
    system = {"linux": "linux-gnu.2.28", "darwin": "macos"}.get(sys.platform)
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return ["-target", f"{machine}-{system}"] if system else []


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line] or text.splitlines()
    return lines[0].strip() if lines else "it failed and said nothing"


if __name__ == "__main__":
    sys.exit("\n".join(compile_all()) or 0)
