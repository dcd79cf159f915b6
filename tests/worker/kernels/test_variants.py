from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swiftbatch.worker.kernels import build
from swiftbatch.worker.kernels import native_library as variants
from swiftbatch.worker.kernels.native_library import (
    OVERRIDE,
    KernelError,
    chosen_variant,
    load_library,
    open_library,
    runnable_variants,
)
from tests.worker.kernels.kernel_parts import VARIANTS, needs_kernels


@needs_kernels
def test_the_fastest_is_chosen_and_the_environment_overrides_downwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    assert chosen_variant() == VARIANTS[0]
    monkeypatch.setenv(OVERRIDE, "portable")
    assert chosen_variant() == "portable"
    for unknown in ("avx1024", "amx"):
        monkeypatch.setenv(OVERRIDE, unknown)
        with pytest.raises(KernelError, match=f"{OVERRIDE}={unknown}: this machine runs .*portable"):
            chosen_variant()


@needs_kernels
def test_a_processor_runs_what_it_has_and_all_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        variants, "cpu_flags", lambda: frozenset({"avx2", "fma", "f16c", "avx512f", "amx_bf16", "amx_tile"})
    )
    assert [name for name in runnable_variants() if name != "portable"] in ([], ["avx2"])
    monkeypatch.setenv(OVERRIDE, "avx512")
    with pytest.raises(KernelError, match="avx512: this machine runs"):
        chosen_variant()


@needs_kernels
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_library_says_what_it_is(variant: str) -> None:
    assert load_library(variant).kernels_variant().decode() == variant


def test_where_nothing_was_compiled_nothing_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(build, "LIBRARIES", tmp_path)
    assert chosen_variant() is None
    monkeypatch.setenv(OVERRIDE, "avx2")
    with pytest.raises(KernelError, match="no kernels were compiled here"):
        chosen_variant()


def test_the_libraries_are_those_of_the_source() -> None:
    stale = set(build.stale_variants()) & set(VARIANTS)
    assert not stale, "worker/kernels/source has changed: run make, or python -m swiftbatch.worker.kernels.build"


def test_a_library_is_stale_once_the_source_changes_and_gone_where_that_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor word; do [ "$last" = -o ] && echo made > "$word"; last=$word; done; exit 0')
    compiler.chmod(0o755)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "one.c").write_text("int one(void);")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("CC", str(compiler))
    assert build.stale_variants() == list(build.variants())
    assert build.compile_all(["portable"]) == []
    assert build.stale_variants() == [name for name in build.variants() if name != "portable"]
    (tmp_path / "source" / "two.h").write_text("int two(void);")
    assert build.stale_variants() == list(build.variants())
    monkeypatch.setenv("CC", "false")
    assert build.compile_all(["portable"]) == ["portable: false: it failed and said nothing"]
    assert not list(tmp_path.glob("lib/*.so"))


def test_a_library_that_is_in_use_is_whole_and_the_same_while_it_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler checks the library's place, as another process would."""
    path, seen = tmp_path / "lib" / "kernels-portable.so", tmp_path / "seen"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\ncat {path} >> {seen}\nfor word; do [ "$last" = -o ] && date +%N > "$word"; last=$word; done'
    )
    compiler.chmod(0o755)
    build.compile_library("portable", path, [str(compiler)])
    with path.open("rb") as mapped:
        before, seen_before = path.read_bytes(), seen.read_bytes()
        digests = list[bool]()
        replace = Path.replace

        def looked_at(made: Path, place: Path) -> Path:
            digests.append(build.is_whole(path))
            done = replace(made, place)
            digests.append(build.is_whole(path))
            return done

        monkeypatch.setattr(Path, "replace", looked_at)
        build.compile_library("portable", path, [str(compiler)])
        assert mapped.read() == before != path.read_bytes()
    assert seen_before == b""
    assert seen.read_bytes() == 2 * before
    assert digests == [True] * 6


@needs_kernels
def test_a_process_keeps_its_kernels_whatever_is_compiled_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training looked for kernels at every step and took others during a compile."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    monkeypatch.setattr(build, "LIBRARIES", shutil.copytree(build.LIBRARIES, tmp_path / "lib"))
    assert chosen_variant() == VARIANTS[0]
    build.library_path(VARIANTS[0]).unlink()
    assert chosen_variant() == VARIANTS[0]
    assert runnable_variants() == VARIANTS


def test_a_library_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.so").write_bytes(b"not a library")
    with pytest.raises(KernelError, match="install swiftbatch anew"):
        open_library(tmp_path / "other.so")


@needs_kernels
@pytest.mark.parametrize("size", [0, 4096, -1])
def test_a_library_that_is_not_as_it_was_compiled_is_refused(size: int, tmp_path: Path) -> None:
    """The system's loader would end the process at a missing part."""
    path = build.library_path(VARIANTS[0])
    for file in (path, path.with_suffix(".sha256")):
        shutil.copy(file, tmp_path)
    open_library(tmp_path / path.name)
    damaged = tmp_path / "damaged"  # the loaded file itself must stay whole, because its code still runs at exit
    damaged.write_bytes(path.read_bytes()[:size])
    damaged.replace(tmp_path / path.name)
    with pytest.raises(KernelError, match="is not as it was compiled; install swiftbatch anew"):
        open_library(tmp_path / path.name)


@needs_kernels
def test_a_library_of_another_source_is_refused(tmp_path: Path) -> None:
    """A checkout updated without `make` ended every worker."""
    path = build.library_path(VARIANTS[0])
    shutil.copy(path, tmp_path)
    older = f"{'0' * 64} {path.with_suffix('.sha256').read_text().split()[1]}"
    (tmp_path / path.name).with_suffix(".sha256").write_text(older)
    with pytest.raises(KernelError, match="was compiled of another source; install swiftbatch anew"):
        open_library(tmp_path / path.name)


def test_a_compiler_that_fails_is_one_line_for_each_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setenv("CC", "false")
    problems = build.compile_all()
    assert problems == [f"{name}: false: it failed and said nothing" for name in build.variants()]
    monkeypatch.setenv("CC", str(tmp_path / "nowhere"))
    assert all("No such file" in problem for problem in build.compile_all())
    assert not list(tmp_path.glob("lib/*"))


def test_without_a_compiler_the_build_says_where_one_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", "")
    assert build.compile_all() == ["no C compiler was found (the package ziglang brings one; $CC names another)"]


def test_instructions_that_the_system_denies_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox may deny AMX; then the next set is used."""
    monkeypatch.delenv(OVERRIDE, raising=False)
    [fastest, *others] = runnable_variants()
    monkeypatch.setattr("swiftbatch.worker.kernels.native_library.ASKING", (fastest,))
    monkeypatch.setattr("swiftbatch.worker.kernels.native_library._is_allowed", lambda _variant: False)
    assert runnable_variants() == others
    assert chosen_variant() == (others[0] if others else None)
