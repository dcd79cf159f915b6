from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests import ROOT

SCRIPTS = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", (ROOT / "docs" / "slurm.md").read_text(encoding="utf-8"), re.S)
STAND_INS = {
    "swiftbatch": 'trap "exit 130" TERM; echo "swiftbatch $*" >> calls; for _ in $(seq $NUM_STEPS); do sleep 0.1; done',
    "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\nn3\\n"; else echo "scontrol $*" >> calls; fi',
    "srun": 'echo "srun $*" >> calls',
    "ray": "exit 0",
}
JOB = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "3", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_NODELIST": "n[1-3]"}


def _start(folder: Path, script: str, num_steps: int) -> subprocess.Popen[bytes]:
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    environment = {**os.environ, **JOB, "NUM_STEPS": str(num_steps), "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "-c", script], cwd=folder, env=environment)


def _calls(folder: Path) -> list[str]:
    path = folder / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_hands_the_signal_on_and_puts_itself_back_into_the_queue(tmp_path: Path, script: str) -> None:
    process = _start(tmp_path, script, num_steps=600)
    while not any(call.startswith("swiftbatch") for call in _calls(tmp_path)):
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 130
    assert _calls(tmp_path)[-1] == "scontrol requeue 17"


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_ends_is_not_put_back(tmp_path: Path, script: str) -> None:
    assert _start(tmp_path, script, num_steps=0).wait(timeout=30) == 0
    assert not any("requeue" in call for call in _calls(tmp_path))


def test_ray_starts_on_all_nodes_of_a_job(tmp_path: Path) -> None:
    _start(tmp_path, SCRIPTS[1], num_steps=0).wait(timeout=30)
    assert set(_calls(tmp_path)) == {
        "srun --nodes=1 --ntasks=1 --nodelist=n1 ray start --head --port=6379 --num-cpus=8 --block",
        "srun --nodes=2 --ntasks=2 --exclude=n1 ray start --address=n1:6379 --num-cpus=8 --block",
        "swiftbatch submit jobs.jsonl --workers 4 --address n1:6379 --takeover",
    }


def test_there_are_scripts_for_one_node_and_for_several() -> None:
    assert len(SCRIPTS) == 2
