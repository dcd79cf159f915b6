from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.serve.server_parts import DEADLINE_SECONDS, OFTEN, OVER, bodies, request, serving

NUM_TOKENS = 2500
JOBS = [request("short", 5), request("drawn", NUM_TOKENS, min_p=0.02), request("greedy", NUM_TOKENS, temperature=0)]
LONGEST_LIFE_SECONDS = 25.0
MAX_KILLS = 6


def undisturbed(model: Path, folder: Path) -> dict[str, Any]:
    jobs = folder / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    command = [sys.executable, "-m", "scheduler", "submit", str(jobs), "--run", str(folder / "run")]
    command += ["--model", str(model), "--dtype", "float32", "--threads", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_SECONDS)
    return bodies([json.loads(line) for line in (folder / "run" / "output.jsonl").read_text().splitlines()])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_servers_that_are_killed_at_any_moment_end_with_the_bytes_of_submit(
    seed: int, tiny_model: Path, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    runs = tmp_path / "runs"
    with serving(runs, tiny_model, *OFTEN) as server:
        batch_id = server.create(*JOBS)
        server.kill()
    for _ in range(MAX_KILLS):
        with serving(runs, tiny_model, *OFTEN) as server:
            time.sleep(draw.uniform(0, LONGEST_LIFE_SECONDS))
            is_over = server.client.batches.retrieve(batch_id).status in OVER
            server.kill()
        if is_over:
            break
    with serving(runs, tiny_model, *OFTEN) as server:
        ended = server.ended(batch_id)
        assert (ended.id, ended.status, ended.error_file_id) == (batch_id, "completed", None)
        assert bodies(server.lines(ended.output_file_id)) == undisturbed(tiny_model, tmp_path)
