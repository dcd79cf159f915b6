from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.run.run import Run
from swiftbatch.scheduler.serve.records.batch_status import partial_texts
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.jobs.checkpoints.checkpoint_parts import claim
from tests.jobs.run.run_parts import MANIFEST
from tests.metrics.report_parts import record

FACES = "\U0001f642\U0001f643"


def test_the_last_tokens_of_a_text_show_no_half_characters(tmp_path: Path) -> None:
    run = Run.planned(str(tmp_path / "run"), MANIFEST.model_copy(update={"created": time.time()})).made()
    run.add_jobs([job := record("going")])
    checkpoints, codec = CheckpointStore.of(run), TextCodec(locate_model("embedded"))
    token_ids = codec.encode(f"the {FACES}", add_special_tokens=False)
    attempt, num_bytes = claim(checkpoints, job.job_id, "w1"), len(FACES.encode())
    assert len(token_ids) > num_bytes  # each of their bytes is a token
    for num_last, num_cut, text in ((5, 0, FACES), (4, 0, FACES[1:]), (4, 3, FACES[:1]), (100, 2, f"the {FACES[0]}")):
        checkpoints.write_tokens(job.job_id, attempt, np.array(token_ids[: len(token_ids) - num_cut], dtype=np.uint32))
        [found] = partial_texts(run, ["going"], num_last)
        assert (found["text"], found["num_tokens"]) == (text, len(token_ids) - num_cut)
