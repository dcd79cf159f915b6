from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.jobs.run.run_records import KVDtype
from swiftbatch.worker.drafters.catalogue import ENGINES, create_drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.drafters.test_drafter_contract import PARAMS, PROMPT, Generation
from tests.worker.session.session_parts import (
    NUM_TOKENS,
    body,
    claimed,
    digest,
    have_caches_loaded,
    make_run,
    preempted,
    record,
    session,
    to_the_end,
    undisturbed_digest,
)

pytestmark = pytest.mark.long

NUM_DRAWN = 40


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kv_dtype", "kind"), [("int8", "kv"), ("fp8", "replay"), ("fp8", "offloaded")])
def test_a_preempted_job_goes_on_with_the_tokens_of_an_undisturbed_one(
    tiny_model: Path, tmp_path: Path, kv_dtype: KVDtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_caches_loaded(monkeypatch)
    job, run = record("fox"), make_run(tmp_path / "run")
    undisturbed = undisturbed_digest(tmp_path / "undisturbed", tiny_model, job, kv_dtype=kv_dtype)
    changes = {"kv_dtype": kv_dtype, "checkpoint": "tokens" if kind == "replay" else "state"}
    if kind == "offloaded":
        changes["kv_offload"] = str(tmp_path)
    preempted(run, tiny_model, job, 100, **changes)
    successor = session(run, tiny_model, engine="auto", **changes)
    to_the_end(successor, claimed(run, job, num_reported_tokens=NUM_TOKENS))
    assert digest(run, job) == undisturbed
    assert body(run, job)["metrics"]["attempts"][1]["resume"]["kind"] == ("replay" if kind == "replay" else "kv")
    assert f", {kv_dtype} keys and values, " in successor.numerics


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_every_engine_draws_the_same_tokens(kv_dtype: KVDtype) -> None:
    target = TargetModel.load(locate_model("embedded"), "bfloat16", "cpu", kv_dtype=kv_dtype)
    drawn = []
    for engine in ENGINES:
        drafter = create_drafter(engine, target, free_rows)
        generation = Generation(target, drafter, PROMPT, PARAMS)
        while len(generation.sequence.output_ids) < NUM_DRAWN:
            generation.step(drafter)
        drawn.append(generation.sequence.output_ids[:NUM_DRAWN].tolist())
    assert all(each == drawn[0] for each in drawn)


def test_a_position_takes_a_byte_for_each_dimension_and_four_for_each_scale() -> None:
    files = locate_model("embedded")
    plain, coded = (TargetModel.load(files, "bfloat16", "cpu", kv_dtype=each) for each in (None, "int8"))
    sizes = plain.cache_shape
    assert plain.cache_shape.bytes_per_position() == 4 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim
    expected = 2 * sizes.num_layers * sizes.num_kv_heads * (sizes.head_dim + 4)
    assert coded.cache_shape.bytes_per_position() == expected
    cache = coded.new_cache(10)
    coded.read(cache, [1, 2, 3])
    assert cache.kv(0, 3).nbytes == 3 * expected
    assert torch.isfinite(coded.cache_shape.numbers(cache.layer(0)[0][:, :3]).float()).all()
