"""A corruption sweep over a job's checkpoints: damage is reported by path, and nothing wrong is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftbatch.jobs.checkpoints.checkpoint_files import ResumeRecord
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, JOB, check_checkpoints, claim, output_ids, write_state

pytestmark = pytest.mark.long

RESUME = ResumeRecord(
    kind="kv", num_recovered_tokens=9, num_recomputed_tokens=1, num_loaded_positions=5, seconds=0.5, resumed=3e9
)

FILES = [
    *(f"000{attempt}/{name}" for attempt in (1, 2) for name in ("claim.json", "tokens.bin", "manifest.json")),
    "0001/kv-0-5.arrow",
    "0001/kv-5-8.arrow",
    "0001/drafter-8.arrow",
    "0002/kv-5-12.arrow",
    "0002/drafter-12.arrow",
    "0002/resume.json",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two dead attempts of one job, the second resumed from the first, and a third begun."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoints = CheckpointStore(Store(str(folder)), FINGERPRINT)
    claim(checkpoints, JOB, "w1", "cpu")
    checkpoints.write_tokens(JOB, 1, output_ids(5))
    first = write_state(checkpoints, 1, [5, 8])
    claim(checkpoints, JOB, "w2", "cpu")
    checkpoints.write_resume(JOB, 2, RESUME)
    checkpoints.write_tokens(JOB, 2, output_ids(9))
    write_state(checkpoints, 2, [12], first.segments[:1])
    claim(checkpoints, JOB, "w3", "cpu")
    return folder


def test_the_sweep_covers_every_file(whole: Path) -> None:
    root = whole / "checkpoints" / JOB
    names = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert names == {*FILES, "0003/claim.json"}


def damage(path: Path, data: st.DataObject) -> None:
    whole = path.read_bytes()
    position = data.draw(st.integers(0, len(whole) - 1))
    match data.draw(st.sampled_from(["flip", "truncate", "delete", "append", "unsealed"])):
        case "flip":
            flip = data.draw(st.integers(1, 255))
            path.write_bytes(whole[:position] + bytes([whole[position] ^ flip]) + whole[position + 1 :])
        case "truncate":
            path.write_bytes(whole[:position])
        case "delete":
            path.unlink()
        case "append":
            path.write_bytes(whole + b"\n")
        case "unsealed" if path.suffix == ".json":
            path.write_bytes(json.dumps(json.loads(whole)).encode() + b"\n")
        case _:
            path.write_bytes(whole.translate(bytes(range(1, 256)) + b"\0"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES)
@settings(max_examples=30)
@given(data=st.data())
def test_a_damaged_file_is_named_and_costs_only_what_it_held(
    file: str, data: st.DataObject, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(whole, folder)
    damage(folder / "checkpoints" / JOB / file, data)
    checkpoints = CheckpointStore(Store(str(folder)), FINGERPRINT)
    num_tokens, num_positions = check_checkpoints(checkpoints)
    history = checkpoints.history(JOB)
    assert num_tokens == (5 if file == "0002/tokens.bin" else 9)
    assert num_positions == {"0001/kv-0-5.arrow": 0, "0002/kv-5-12.arrow": 8, "0002/manifest.json": 8}.get(file, 12)
    assert [record.attempt for record in history] == [1, 2, 3]
    assert (history[1].resume == RESUME) == (file != "0002/resume.json")
    problems = {record.getMessage() for record in caplog.records}
    assert len(problems) == len(caplog.records)
    assert all(f"checkpoints/{JOB}/{file} in " in problem for problem in problems)
    assert len(problems) == 1
    assert "\n" not in problems.pop()
