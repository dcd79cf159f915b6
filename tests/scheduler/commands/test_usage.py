"""`serve usage` says what each key used, from the records of batches alone."""

from __future__ import annotations

import time
from pathlib import Path

from swiftbatch.scheduler.serve.records.server_records import BATCH, Counts, Ended
from swiftbatch.scheduler.serve.records.stored_objects import Batch
from tests.scheduler.commands.command_parts import invoke
from tests.scheduler.serve.batch_parts import Folder, submit_two, worked

HEAD = "month,key,num_batches,num_input_tokens,num_output_tokens,num_generated_tokens,worker_hours,cost\n"
JULY, LAST_OF_JULY, AUGUST = 1_784_000_000.0, 1_785_542_399.0, 1_785_542_400.0  # 2026, in UTC


def created(folder: Folder, owner: str | None, moment: float) -> Batch:
    batch = folder.create(owner=owner)
    batch.record = batch.record.model_copy(update={"created": moment})
    batch.store.write(BATCH, batch.record.model_dump_json().encode())
    return batch


def end(folder: Folder, batch: Batch, hours: float, price: float | None, num_tokens: int = 100) -> None:
    ended = Ended(
        state="completed",
        counts=Counts(total=1, completed=1),
        in_progress=batch.created,
        finalizing=batch.created,
        ended=time.time(),
        num_total_tokens=num_tokens + 20,
        num_generated_tokens=num_tokens,
        num_input_tokens=7,
        worker_seconds=hours * 3600,
        price_per_worker_hour=price,
    )
    folder.batches.end(batch, ended)


def test_batches_count_for_their_key_in_the_month_of_their_creation(tiny_model: Path, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "runs"))
    assert invoke("serve", "usage", "--runs", folder.store.uri, "--csv").output == HEAD
    end(folder, created(folder, "alice", JULY), 0.5, 2.0)
    end(folder, created(folder, "alice", LAST_OF_JULY), 1.5, None, 5000)
    end(folder, created(folder, "bob", LAST_OF_JULY), 0.25, 0.0)
    running, damaged = created(folder, "alice", AUGUST), created(folder, "alice", AUGUST)
    worked(submit_two(running, tiny_model, tmp_path, 1), 1234, 60.0, price_per_worker_hour=0.06)
    submit_two(damaged, tiny_model, tmp_path, 1).store.write("run.json", b"{torn")
    end(folder, created(folder, None, AUGUST), 1.0, None)
    assert invoke("serve", "usage", "--runs", folder.store.uri, "--csv").output == HEAD + (
        "2026-07,alice,2,14,5100,5140,2.0,1.0\n"
        "2026-07,bob,1,7,100,120,0.25,0.0\n"
        "2026-08,,1,7,100,120,1.0,\n"
        "2026-08,alice,2,0,0,1234,0.016667,0.001\n"
    )
    table = invoke("serve", "usage", "--runs", folder.store.uri)
    assert table.output.splitlines() == [
        "month    key       batches  input tokens  output tokens  generated  worker hours   cost",
        "2026-07  alice           2            14          5,100      5,140             2   1.00",
        "2026-07  bob             1             7            100        120          0.25      0",
        "2026-07  all keys        3            21          5,200      5,260          2.25   1.00",
        "2026-08  -               1             7            100        120             1",
        "2026-08  alice           2             0              0      1,234       0.01667  0.001",
        "2026-08  all keys        3             7            100      1,354         1.017  0.001",
    ]


def test_a_usage_without_a_folder_asks_for_one() -> None:
    for words in (("serve", "usage"), ("serve",)):
        result = invoke(*words)
        assert (result.exit_code, result.stderr) == (2, "swiftbatch: Missing option '--runs'.\n")
