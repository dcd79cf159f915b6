from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.session.work_messages import Orders
from tests.worker.forward.cuda.cuda_parts import cuda_target
from tests.worker.forward.cuda.test_pages_of_a_gpu import _no_probe as _no_probe
from tests.worker.session.session_parts import claimed, digest, make_run, record, run_to_end, session, to_the_end

pytestmark = pytest.mark.long


def test_it_is_refused_with_the_numbers_and_its_neighbour_finishes(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(files: ModelFiles, *_: Any) -> TargetModel:
        return cuda_target(files, torch.float32, num_slots=2, longest_job=40)

    run, long, short = make_run(tmp_path), record("fox", 200), record("dog", 3)
    expected = make_run(tmp_path / "undisturbed")
    run_to_end(expected, one_layer_model, short, engine="autoregressive")
    monkeypatch.setattr(TargetModel, "load", load)
    worker = session(run, one_layer_model, engine="autoregressive")
    assert worker.num_slots == 2
    report = to_the_end(worker, claimed(run, long), claimed(run, short))
    [(job_id, code, message)] = [(each.job_id, each.error_code, each.reason) for each in report.of("refused")]
    assert (job_id, code) == (long.job_id, "longer_than_slot")
    assert "positions is longer than a slot of this worker's GPU, 65 positions" in message
    assert "resume --retry-failed" in message
    assert (report.of("failed"), [outcome.job_id for outcome in report.of("finished")]) == ([], [short.job_id])
    assert digest(run, short) == digest(expected, short)
    assert worker.engine.sequences == []
    assert [worker.engine.target.new_cache(40).length for _ in range(2)] == [
        0,
        0,
    ]  # both slots are free again


def test_a_lack_of_free_slots_is_another_matter(
    tmp_path: Path, one_layer_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lack of slots is temporary: only this attempt fails."""
    monkeypatch.setattr(TargetModel, "load", lambda files, *_: cuda_target(files, torch.float32, 1, 40))
    run = make_run(tmp_path)
    first, second = record("fox", 9), record("dog", 9)
    report = session(run, one_layer_model, engine="autoregressive").work(
        Orders((claimed(run, first), claimed(run, second))), 0.0
    )
    [(job_id, reason)] = [(each.job_id, each.reason) for each in report.of("failed")]
    assert (job_id, report.of("refused")) == (second.job_id, [])
    assert "no slot for a job of" in reason
