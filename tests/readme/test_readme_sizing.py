"""The pages' sizes and request counts match the code."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import CheckpointWriter
from swiftbatch.jobs.checkpoints.kv_segments import HEADERS_SIZE, Segment, encode_segment, encode_state
from swiftbatch.jobs.checkpoints.token_log import TokenLog, encode_log
from swiftbatch.jobs.file_owner import Identity
from swiftbatch.jobs.job import MAX_SLUG
from swiftbatch.jobs.run.result_files import ResultSegment
from swiftbatch.jobs.run.run import Run
from swiftbatch.jobs.storage.store import Store
from swiftbatch.scheduler.driver.run_lease import BEAT_SECONDS_OBJECT_STORE, LeaseEpoch
from swiftbatch.worker.config import CheckpointSettings
from swiftbatch.worker.drafters.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.exactness.doctor import NUM_PROBED_ROWS
from swiftbatch.worker.kv.kv_capacity import bytes_per_position
from swiftbatch.worker.model.model_files import EMBEDDED
from swiftbatch.worker.session.checkpointing import MAX_SEGMENT_BYTES, state_interval
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, IDENTITY, JOB, Cache, claim, output_ids, tokens_at
from tests.jobs.run.run_parts import FINISHED, MANIFEST, PROGRESS
from tests.jobs.storage.fault_proxy import FaultProxy
from tests.metrics.report_parts import timeline
from tests.readme.command_lines import page, section, table

SIZING = page("docs/sizing.md")
PROSE = " ".join(SIZING.split())
LENGTH = 100_000


def number(text: str) -> float:
    found = re.match(r"[\d,.]+", text)
    assert found is not None, text
    return float(found[0].replace(",", ""))


def model_config(layers: str, kv_heads: str, head_dim: str) -> dict[str, int]:
    return {"num_hidden_layers": int(layers), "num_key_value_heads": int(kv_heads), "head_dim": int(head_dim)}


@pytest.mark.parametrize("row", table(SIZING, "model"), ids=lambda row: row[0])
def test_the_caches_take_what_the_table_says(row: list[str]) -> None:
    name, layers, kv_heads, head_dim, position, all_positions = row
    config = model_config(layers, kv_heads, head_dim)
    expected = bytes_per_position(config, "bfloat16")
    assert expected == number(position)
    assert f"{expected * LENGTH / 1e9:.{1 if expected > 10_000 else 2}f}" == f"{number(all_positions):g}"
    if name == "embedded":
        assert config.items() <= json.loads((EMBEDDED / "config.json").read_text()).items()


def test_checkpoints_take_what_the_text_says() -> None:
    found = re.search(r"up to (\d+) bytes and (\d+) a token", PROSE)
    identity = Identity(job_id=f"{'s' * MAX_SLUG}-127-{'0' * 16}", fingerprint=FINGERPRINT)
    for num_tokens in (0, 1000):
        log = TokenLog(np.zeros(num_tokens, dtype=np.uint32))
        most = int(found[1]) + int(found[2]) * num_tokens
        assert most - 10 < len(encode_log(log, identity)) <= most
    found = re.search(r"(\d+) bytes for every entry of the vocabulary and ([\d.]+) MB", PROSE)
    for vocab_size in (300, 4096):
        state = TokenRecyclingDrafter(SimpleNamespace(vocab_size=vocab_size)).state(None)
        expected = int(found[1]) * vocab_size + float(found[2]) * 1e6
        assert len(encode_state(state, IDENTITY)) == pytest.approx(expected, abs=50_000)


def test_a_position_of_a_segment_takes_its_keys_and_values_and_four_bytes() -> None:
    assert "4 bytes more" in PROSE
    tokens, kv = np.zeros(1024, dtype=np.uint32), np.zeros((32, 1024, 64), dtype=np.uint16)
    assert 0 < len(encode_segment(Segment(0, tokens, kv), IDENTITY)) - kv.nbytes - 4 * 1024 < HEADERS_SIZE


def requests_of(proxy: FaultProxy, action: Callable[[], object]) -> tuple[int, int]:
    """Count both price classes; DELETE is free."""
    proxy.requests.clear()
    action()
    kinds: Counter[str] = Counter()
    for method, path in (request.split(" ", 1) for request in proxy.requests):
        is_free = method == "DELETE" or (method == "POST" and path.endswith("?delete"))
        is_dear = method in ("PUT", "POST") or "list-type=" in path
        kinds["free" if is_free else "dear" if is_dear else "cheap"] += 1
    return kinds["dear"], kinds["cheap"]


def told_requests(what: str) -> tuple[int, int]:
    (row,) = [row for row in table(SIZING, "what") if row[0].startswith(what)]
    return int(number(row[2])), int(number(row[3]))


def test_a_heartbeat_makes_the_requests_that_the_table_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    run = Run.planned(s3_uri, MANIFEST).made()
    epoch = LeaseEpoch.begin(run)

    def beat() -> None:  # as in `Driver`
        epoch.check()
        run.write_progress(PROGRESS)
        run.cancel_requests()

    assert requests_of(s3_proxy, beat) == told_requests("heartbeat")
    assert f"every {BEAT_SECONDS_OBJECT_STORE:g} s" in SIZING


def test_checkpoints_make_the_requests_that_the_table_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    checkpoints = CheckpointStore(Store(s3_uri), FINGERPRINT)
    attempt = claim(checkpoints, JOB, "w1")
    writer = CheckpointWriter(checkpoints, 1024, lambda *_: None)
    writer.open(JOB, attempt, "suffix", Cache())

    def log() -> None:
        writer.put_tokens(JOB, output_ids(10))
        assert writer.flush(60)

    def time_line() -> None:
        writer.put_timeline(JOB, timeline(0.0, 1.0, 0, 10))
        assert writer.flush(60)

    def state(end: int) -> None:
        writer.put_state(JOB, tokens_at(0, end), {"table": np.arange(end)})
        assert writer.flush(60)

    state(1000)
    assert requests_of(s3_proxy, log) == told_requests("token log")
    assert requests_of(s3_proxy, time_line) == told_requests("timeline")
    assert requests_of(s3_proxy, lambda: state(2000)) == told_requests("state")
    writer.stop()


def test_a_segment_of_results_makes_the_requests_that_the_table_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    run, results = Run.planned(s3_uri, MANIFEST).made(), ResultSegment((name, FINISHED) for name in "abc")
    assert requests_of(s3_proxy, lambda: run.write_segment("w1", results)) == told_requests("segment")


def test_a_large_file_makes_the_requests_that_the_text_says(s3_uri: str, s3_proxy: FaultProxy) -> None:
    store, num_parts = Store(s3_uri), 2
    assert "in parts of 10 MiB, with two requests more than it has parts" in PROSE
    large = bytes(num_parts * 10 * 2**20)
    assert requests_of(s3_proxy, lambda: store.write("large", large)) == (num_parts + 2, 0)
    assert f"at most {MAX_SEGMENT_BYTES // 2**20} MiB" in PROSE


def states_until(num_positions: int) -> int:
    """Write a job's states with the default settings."""
    job = SimpleNamespace(cache=SimpleNamespace(shape=SimpleNamespace(windows=()), length=0))
    num_written = num_states = 0
    for job.cache.length in range(num_positions):
        if job.cache.length - num_written >= state_interval(job, CheckpointSettings.checkpoint_tokens):
            num_written, num_states = job.cache.length, num_states + 1
    return num_states


def test_the_example_follows_from_the_table() -> None:
    """An hour's requests and cost: run, worker, and a job at 30 tokens/s."""
    rates = {
        "heartbeat": 3600 / BEAT_SECONDS_OBJECT_STORE,
        "token log": 3600 / CheckpointSettings.checkpoint_seconds,
        "state": states_until(3600 * 30),
    }
    for name, rate in rates.items():
        (row,) = [row for row in table(SIZING, "what") if row[0].startswith(name)]
        assert number(row[4]) == round(rate)
    dear_price, cheap_price = (float(price) for price in re.findall(r"\$([\d.]+) per 1,000", PROSE))
    told = re.search(r"\$([\d.]+) an hour for the run, \$([\d.]+) for each worker and \$([\d.]+) for each job", PROSE)
    assert (
        f"{states_until(3600 * 30)} in the first hour, {states_until(7200 * 30) - rates['state']} in the second"
        in PROSE
    )
    of_worker, of_job = float(told[2]), float(told[3])
    assert f"${of_worker / 8 + of_job:.4f} a job, with 8 jobs a worker" in PROSE
    for name, dollars in zip(rates, map(float, (told[1], told[2], told[3])), strict=True):
        dear, cheap = told_requests(name)
        assert dollars == pytest.approx(rates[name] * (dear * dear_price + cheap * cheap_price) / 1000, rel=0.05)


def test_doctor_probes_the_rows_that_the_text_says() -> None:
    promise = " ".join(section(page("README.md"), "How the tokens stay the same").split())
    assert f"no bit of {NUM_PROBED_ROWS:,} random rows" in promise
