"""A worker whose GPU fails on a real Ray."""

from __future__ import annotations

from pathlib import Path

from swiftbatch.jobs.run.run import Run
from swiftbatch.metrics.counters import DriverCounters
from swiftbatch.scheduler.cluster.ray_actors import GPU_FAILED
from swiftbatch.scheduler.cluster.ray_cluster import Cluster
from swiftbatch.worker.config import EngineConfig
from tests.scheduler.driver.driver_parts import RecordingDisplay, make_driver, token_hash
from tests.scheduler.runs.verification_parts import finished
from tests.worker.session.session_parts import record

NAMES = ("fox", "dog", "cat")
BROKEN = "tests.worker.session.broken_gpu_session:BrokenGPUSession"


def test_another_worker_ends_the_jobs_of_a_failed_gpu_with_the_same_tokens(
    tmp_path: Path, tiny_model: Path, cluster: Cluster
) -> None:
    undisturbed = finished(tmp_path / "undisturbed", tiny_model, *(record(name, 300) for name in NAMES))
    run = Run.planned(str(tmp_path / "run"), undisturbed.manifest).made()
    run.add_jobs(list(undisturbed.jobs()))
    run.write_rejects([])
    config = EngineConfig(model=str(tiny_model), dtype="float32", device="cpu", checkpoint_seconds=0.01)
    display, counters = RecordingDisplay(), DriverCounters()
    driver = make_driver(run, cluster, display, workers=1, slots=3, session=BROKEN, config=config, counters=counters)
    assert driver.run() == "finished"
    assert {name: token_hash(run, name) for name in NAMES} == {name: token_hash(undisturbed, name) for name in NAMES}
    assert counters.num_preemptions[GPU_FAILED] > 0
    assert set(counters.num_preemptions) == {GPU_FAILED}
    [lost] = [note for note in display.notes if "is lost" in note]
    assert "the GPU failed: CUDA error: uncorrectable ECC error encountered" in lost
