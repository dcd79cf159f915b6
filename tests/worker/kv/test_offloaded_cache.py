"""An offloaded cache gives equal tokens in little memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.peak_memory import peak_bytes, reset_peak
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.step_costs import measure_step_costs
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv import file_offload
from swiftbatch.worker.kv.file_offload import FileHost, offloaded_cache
from swiftbatch.worker.kv.kv_capacity import KVRoomError
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.simulated_clock import SimulatedClock
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from tests.worker.kv.cache_parts import MAX_LENGTH, held, shape, use_small_blocks, write
from tests.worker.session.session_parts import (
    body,
    digest,
    have_caches_loaded,
    make_run,
    preempted,
    record,
    run_to_end,
    undisturbed_digest,
)

SETTINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.1}}
ENGINES = ["autoregressive", "token-recycling", "tokenswift"]
PROMPT = "The lighthouse keeper counted the ships each evening, and on the ninth of November there was one too many. "


@pytest.fixture(autouse=True, scope="module")
def _fixed_threads() -> None:
    torch.set_num_threads(1)  # the other one reads


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_blocks(monkeypatch)


def generate(target: TargetModel, engine_name: str, setting: str) -> list[list[int]]:
    """Run two jobs at a time over several blocks."""
    engine, codec = Engine(target, create_drafter(engine_name, target, free_rows)), TextCodec(target.files)
    sequences = []
    for i in range(2):
        sampling = SamplingParams(max_tokens=25, seed=i, ignore_eos=True, **SETTINGS[setting])
        sequences.append(Sequence(f"s{i}", codec.encode(PROMPT * (1 + 2 * i)), sampling, target.vocab_size))
    run_to_ends(engine, *sequences)
    return [sequence.output_ids.tolist() for sequence in sequences]


@pytest.fixture(scope="module")
def offloading(target: TargetModel, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
    return TargetModel(target.forwards, target.files, str(tmp_path_factory.mktemp("kv")))


@pytest.fixture(scope="module")
def plain(target: TargetModel) -> dict[str, list[list[int]]]:
    return {setting: generate(target, "autoregressive", setting) for setting in SETTINGS}


@pytest.mark.sample(3)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine_name", ENGINES)
def test_every_engine_gives_the_same_tokens(
    offloading: TargetModel, plain: dict[str, list[list[int]]], engine_name: str, setting: str
) -> None:
    assert generate(offloading, engine_name, setting) == plain[setting]


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", ["autoregressive", "token-recycling"])
def test_a_lost_worker_s_job_goes_on_with_the_same_tokens(
    tmp_path: Path, tiny_model: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_caches_loaded(monkeypatch)
    job, kv = record("fox"), tmp_path / "kv"
    kv.mkdir()
    undisturbed = undisturbed_digest(tmp_path / "undisturbed", tiny_model, job)
    run = make_run(tmp_path / "run")
    preempted(run, tiny_model, job, 150, engine=engine, kv_offload=str(kv))
    run_to_end(run, tiny_model, job, engine=engine, kv_offload=str(kv))
    assert digest(run, job) == undisturbed
    assert body(run, job)["metrics"]["attempts"][1]["resume"]["kind"] == "kv"


@pytest.mark.long
def test_measured_costs_tell_of_a_slow_disk(
    target: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimulatedClock()
    clock.rule(monkeypatch)
    monkeypatch.setattr(os, "preadv", clock.taking(lambda *_: 1.0, os.preadv))
    costs = measure_step_costs(TargetModel(target.forwards, target.files, str(tmp_path)))
    num_reads = 2 * target.cache_shape.num_kv_heads * (target.cache_shape.num_layers - 1)  # one layer came before
    assert costs.at(1, 8192) >= num_reads


def resident_bytes(rows: torch.Tensor) -> int:
    num_bytes = rows.numel() * rows.element_size()
    pages = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(rows.data_ptr()), ctypes.c_size_t(num_bytes), pages)
    assert not failed
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_memory_holds_two_layers_however_long_the_text(
    offloading: TargetModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_offload, "BLOCK_POSITIONS", 1024)
    sizes, length = offloading.cache_shape, 60_000
    before = reset_peak()
    cache = offloaded_cache(sizes, length + 100, str(tmp_path))
    num_file_bytes = length * sizes.bytes_per_position()
    cache.advance(length)
    for _ in range(3):
        write(cache, sizes, 1)
        cache.commit([])
    assert peak_bytes() - before < 0.4 * num_file_bytes  # two of eight layers, and the newest rows
    assert resident_bytes(cache.rows.host.rows) < 0.1 * num_file_bytes


def test_a_loaded_cache_does_not_stay_in_memory(offloading: TargetModel, tmp_path: Path) -> None:
    sizes = offloading.cache_shape
    cache = offloaded_cache(sizes, 20_000, str(tmp_path))
    kv = np.ones((2 * sizes.num_layers * sizes.num_kv_heads, 2000, sizes.head_dim), np.uint16)
    for _ in range(10):
        cache.load(kv)
    assert resident_bytes(cache.rows.host.rows) < 0.1 * 20_000 * sizes.bytes_per_position()
    assert (cache.kv(0, 20_000) == 1).all()


def test_what_draft_caches_and_checkpoints_read_does_not_stay_in_memory(tmp_path: Path) -> None:
    sizes = shape(3)
    cache = offloaded_cache(sizes, MAX_LENGTH, str(tmp_path))
    write(cache, sizes, 900)
    cache.advance(900)
    write(cache, sizes, 1)
    num_before = resident_bytes(cache.rows.host.rows)
    cache.kv(0, 900).sum()
    assert resident_bytes(cache.rows.host.rows) > num_before
    for _ in range(2):
        write(cache, sizes, 1)
    held(cache, sizes)
    assert resident_bytes(cache.rows.host.rows) <= num_before


def test_whoever_reads_layer_by_layer_holds_one_layer_in_memory(tmp_path: Path) -> None:
    sizes = shape(6)
    cache = offloaded_cache(sizes, 20_000, str(tmp_path))
    write(cache, sizes, 20_000)
    cache.advance(20_000)
    write(cache, sizes, 1)
    for layer in range(6):
        assert sum(float(part.float().sum()) for part in cache.stored(layer))
    assert resident_bytes(cache.rows.host.rows) < 1.5 / 6 * 20_000 * sizes.bytes_per_position()


def test_a_killed_process_leaves_nothing_and_the_space_is_taken_at_once(tmp_path: Path) -> None:
    before = os.statvfs(tmp_path)
    cache = offloaded_cache(shape(3), 100_000, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    after = os.statvfs(tmp_path)
    num_bytes = cache.rows.host.rows.numel() * 2
    assert (before.f_bavail - after.f_bavail) * before.f_frsize > 0.5 * num_bytes  # other programs write, too


def test_a_cache_that_ended_leaves_no_open_file(tmp_path: Path) -> None:
    sizes = shape(3)
    cache = offloaded_cache(sizes, MAX_LENGTH, str(tmp_path))
    write(cache, sizes, 1)
    held(cache, sizes)
    assert _num_open_files(tmp_path)
    brings = cache.rows._thread
    del cache
    brings.shutdown()  # it may still fetch the last request
    gc.collect()
    assert not _num_open_files(tmp_path)


def _num_open_files(folder: Path) -> int:
    return sum(os.path.realpath(file).startswith(f"{folder}/") for file in Path("/proc/self/fd").iterdir())


def test_blocks_are_on_the_disk_before_they_are_read_and_once_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, calls = shape(3), []
    cache = offloaded_cache(sizes, MAX_LENGTH, str(tmp_path))
    write(cache, sizes, 300)
    cache.advance(300)
    for name in ("fdatasync", "preadv"):
        original = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=original: calls.append(name) or call(*args))
    for _ in range(2):
        write(cache, sizes, 1)
        cache.commit([])
    held(cache, sizes)
    assert calls[0] == "fdatasync"
    assert calls.count("fdatasync") == 1
    assert calls.count("preadv") > 2 * 4 * sizes.num_layers


def test_a_folder_without_room_is_named(tmp_path: Path) -> None:
    with pytest.raises(KVRoomError, match=rf"no room for a cache of .* GB in {tmp_path}: "):
        FileHost(shape(3), 2**40, str(tmp_path))


def test_a_disk_that_fails_is_no_silent_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    sizes = shape(3)
    cache = offloaded_cache(sizes, MAX_LENGTH, str(tmp_path))
    write(cache, sizes, 300)
    cache.advance(300)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output"):
        write(cache, sizes, 1)
