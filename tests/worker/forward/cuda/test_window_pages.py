"""Window layers reuse their GPU pages once no row sees them.

Free pages are full of NaN here.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.kv.cache_rows import NO_PAGE
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import HeldPositions, WindowPages, pages_of
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.session import session as worker_session
from swiftbatch.worker.session.session import WorkerSession
from swiftbatch.worker.session.work_messages import Orders
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.forward.cuda.cuda_parts import PAGE, cuda_target
from tests.worker.model.kind_parts import save_tiny, tiny_config
from tests.worker.model.kind_sizes import VOCAB_SIZE
from tests.worker.session.recurrent_parts import save_recurrent_model
from tests.worker.session.session_parts import claimed, digest, make_run, record, run_to_end, session, to_the_end

pytestmark = pytest.mark.long

WINDOW = 40
LENGTH = 232
WINDOWS = WindowPages(14, HeldPositions(240, 0.0))
TOKEN_IDS = torch.randint(3, VOCAB_SIZE, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
TREE = DraftTree([9, 8, 7, 6, 5, 4, 3], [-1, 0, 0, 1, 3, 4, 4])


def windowed_model(folder: Path, kind: str) -> ModelFiles:
    config = tiny_config(kind, WINDOW, has_wide_heads=True)
    config.num_hidden_layers, config.layer_types = 2, ["sliding_attention", "full_attention"]
    save_tiny(config, folder)
    return locate_model(str(folder))


def read_to(target: TargetModel, cache: FullKVCache, end: int, shift: int = 0) -> None:
    while cache.length < end:
        target.read(cache, [(each + shift) % VOCAB_SIZE for each in TOKEN_IDS[cache.length : end]])


@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        ("gemma3_text", None),
        pytest.param("gpt_oss", None, marks=pytest.mark.slow),
        pytest.param("olmo3", "int8", marks=pytest.mark.slow),
        pytest.param("exaone4", None, marks=pytest.mark.slow),
    ],
)
def test_rows_have_the_bits_of_caches_that_forget_nothing(tmp_path: Path, kind: str, kv_dtype: KVDtype | None) -> None:
    """Trees over edges of windows and pages, beside a job in the first one's old pages."""
    files = windowed_model(tmp_path, kind)
    kept = {"longest_job": 300, "linear": "cublas", "kv_dtype": kv_dtype}
    plain = cuda_target(files, torch.float32, **kept)  # type: ignore[arg-type]
    target = cuda_target(files, torch.float32, windows=WINDOWS, **kept)  # type: ignore[arg-type]
    theirs, ours, other = plain.new_cache(300), target.new_cache(300), target.new_cache(300)
    for end in (170, LENGTH, LENGTH - 60):
        for each, cache in ((plain, theirs), (target, ours)):
            cache.roll_back(min(end, cache.length))
            read_to(each, cache, end)
        read_to(target, other, 70, shift=5)
        beside = [tree_rows(ours, 7, TREE), tree_rows(other, 7, DraftTree())]
        expected, [found, _] = plain.verify([tree_rows(theirs, 7, TREE)])[0], target.verify(beside)
        assert found.logits.isfinite().all()
        assert found.logits.equal(expected.logits)
        for cache in (ours, theirs):
            cache.commit([0, 2])
            cache.roll_back(end)
    assert ours.window_pages.count(NO_PAGE) == 1
    assert (ours.kv(PAGE, ours.length) == theirs.kv(PAGE, ours.length)).all()


PROMPT = "the quick brown fox jumps over the lazy dog. " * 24
JOBS = [record("cat", 5, prompt=f"{PROMPT}cat"), record("dog", 7, prompt=f"{PROMPT}dog")]
LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
HELD = HeldPositions(240, 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_recurrent_model(tmp_path_factory.mktemp("windowed-model"), "gemma3_text", **LAYERS)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[str]:
    run = make_run(tmp_path_factory.mktemp("plain") / "run")
    run_to_end(run, model, *JOBS, engine="autoregressive")
    return [digest(run, job) for job in JOBS]


def windowed_session(
    run: Run, model: Path, num_window_pages: int, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[WorkerSession, KVArena]:
    """Make a GPU worker with few window pages."""

    def load(files: ModelFiles, *_: Any) -> TargetModel:
        windows = WindowPages(num_window_pages, HELD)
        return cuda_target(files, torch.float32, len(JOBS), 300, linear="cublas", windows=windows)

    with monkeypatch.context() as patches:
        patches.setattr(TargetModel, "load", load)
        patches.setattr(worker_session, "step_costs_of", lambda target: free_rows)
        worker = session(run, model, engine="autoregressive", **changes)
    arena = worker.engine.target.forwards.arena
    return worker, arena


@pytest.mark.slow
def test_jobs_that_outgrow_the_pages_of_windows_have_the_tokens_of_plain_decoding(
    tmp_path: Path, model: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "paged")
    worker, arena = windowed_session(run, model, pages_of(HELD.num_whole, PAGE) + 2, monkeypatch)
    assert worker.held_positions is None
    waiting, evicted, given = list(JOBS), list[str](), list(JOBS)
    while waiting:
        assigned = (replace(claimed(run, job), seniority=JOBS.index(job)) for job in given)
        report = worker.work(Orders(tuple(assigned)), 1e-3)
        assert report.of("failed", "refused") == []
        evicted += [left.job_id for left in report.of("evicted")]
        ended = {job.job_id for job in report.of("finished")}
        waiting = [job for job in waiting if job.job_id not in ended]
        given = [job for job in waiting if job.job_id not in worker._running] if ended else []
    assert [digest(run, job) for job in JOBS] == plain
    assert evicted == [JOBS[1].job_id]
    gc.collect()
    assert (arena.num_free_pages, arena.windowed.num_free_pages) == (arena.num_pages, arena.windowed.num_pages)


@pytest.mark.slow
def test_a_job_alone_waits_for_its_checkpoint_where_that_holds_more_than_there_are_pages(
    tmp_path: Path, model: Path, plain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is due before the end, so the cache would hold all positions for it."""
    run = make_run(tmp_path / "paged")
    worker, _ = windowed_session(run, model, 5, monkeypatch, checkpoint_tokens=10**6, checkpoint_seconds=1e6)
    assert to_the_end(worker, claimed(run, JOBS[0])).of("finished")
    assert digest(run, JOBS[0]) == plain[0]
    assert worker.engine.counters.checkpoint_bytes["state"] > 0
