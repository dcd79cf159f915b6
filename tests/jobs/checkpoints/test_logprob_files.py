"""Kept log-probabilities belong to exactly their tokens, after any rewind, kill or damage."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftbatch.jobs.checkpoints.checkpoint_files import CheckedFiles
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.checkpoint_writer import PendingCheckpoint
from swiftbatch.jobs.checkpoints.kept_logs import KeptLogs
from swiftbatch.jobs.checkpoints.logprob_files import LogprobFiles, WrittenSpans, decode_span, encode_span
from swiftbatch.jobs.checkpoints.token_log import Rewind, TokenIds, TokenLog
from swiftbatch.jobs.file_owner import DamagedFileError
from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.storage.store import Store
from tests.jobs.checkpoints.checkpoint_parts import FINGERPRINT, IDENTITY, JOB, claim

NUM_TOP = 2
LENGTHS = st.integers(0, 30)


def tokens_of(seed: int, num_tokens: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 2, num_tokens).astype(np.uint32)


def logprobs_of(token_ids: TokenIds, num_top: int = NUM_TOP) -> TokenLogprobs:
    """Return log-probabilities that depend on all tokens up to each place."""
    found = TokenLogprobs.empty(len(token_ids), num_top)
    for end in range(1, len(token_ids) + 1):
        digest = hashlib.sha256(token_ids[:end].tobytes()).digest()
        numbers = np.frombuffer(digest[:8], "<u4").astype(np.int64)
        found.logprobs[end - 1] = -numbers[0] / 7
        found.top_ids[end - 1] = numbers[1] % 999 + np.arange(num_top)
        found.top_logprobs[end - 1] = -numbers[1] / 3 - np.arange(num_top)
    return found


def same(one: TokenLogprobs, other: TokenLogprobs) -> bool:
    names = ("logprobs", "top_ids", "top_logprobs")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


@given(num_tokens=LENGTHS, start=LENGTHS, num_top=st.integers(0, 20), seed=st.integers(0, 9))
def test_a_span_gives_back_its_numbers_or_says_that_it_is_damaged(
    num_tokens: int, start: int, num_top: int, seed: int
) -> None:
    token_ids, start = tokens_of(seed, num_tokens), min(start, num_tokens)
    logprobs = logprobs_of(token_ids, num_top)
    data = encode_span(token_ids, logprobs, IDENTITY, start)
    span = decode_span(data, IDENTITY)
    assert (span.start, span.token_ids.tolist()) == (start, token_ids[start:].tolist())
    assert same(span.logprobs, logprobs.part(start, num_tokens))
    assert span.num_agreeing(token_ids) == num_tokens - start
    for end in {0, 5, len(data) // 2, len(data) - 1} - {len(data)}:
        with pytest.raises(DamagedFileError, match="found"):
            decode_span(data[:end], IDENTITY)
    for place in random.Random(seed).sample(range(len(data)), 12):
        torn = bytearray(data)
        torn[place] ^= 1 << seed % 8
        with pytest.raises(DamagedFileError, match="found"):
            decode_span(bytes(torn), IDENTITY)


@given(data=st.binary(max_size=90))
def test_bytes_that_are_no_span_are_told(data: bytes) -> None:
    with pytest.raises(DamagedFileError, match="found"):
        decode_span(data, IDENTITY)


def test_what_belongs_to_other_tokens_in_front_is_not_used() -> None:
    first, other = np.array([1, 2, 3, 4], np.uint32), np.array([9, 2, 3, 4], np.uint32)
    span = decode_span(encode_span(first, logprobs_of(first), IDENTITY, 2), IDENTITY)
    assert (span.num_agreeing(first), span.num_agreeing(other), span.num_agreeing(first[:3])) == (2, 0, 1)


def test_few_files_stay_and_a_number_is_written_few_times() -> None:
    written, num_written = WrittenSpans(), 0
    names: set[str] = set()
    for num_tokens in range(7, 7001, 7):
        start = written.start_of_next(num_tokens)
        num_written += num_tokens - start
        written.add(start, num_tokens, f"{num_tokens}")
        names = (names - {*written.replaced}) | {f"{num_tokens}"}
    assert {name for *_, name in written.files} == names
    assert len(names) <= 11
    assert num_written < 11 * 7000
    ends = [0, *(end for _, end, _ in written.files)]
    assert [start for start, *_ in written.files] == ends[:-1]


class KilledError(Exception):
    """The simulated process was killed."""


class MortalStore(Store):
    num_left = 10**9

    def write(self, path: str, data: bytes) -> None:
        self._live()
        super().write(path, data)

    def delete(self, path: str) -> None:
        self._live()
        super().delete(path)

    def _live(self) -> None:
        if self.num_left == 0:
            raise KilledError
        self.num_left -= 1


class Writer:
    """A job that draws, loops and writes."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        self.checkpoints, self._chance = CheckpointStore(store, FINGERPRINT), chance
        self.log = TokenLog(np.zeros(0, np.uint32))
        self.history = {(0, 0): self.log}  # all its logs by progress
        self.acknowledged = (0, 0)

    def attempt(self, num_steps: int) -> None:
        """Continue from the store for `num_steps` checkpoints."""
        self.log, logprobs = self.checkpoints.read_log_with_logprobs(JOB, NUM_TOP)
        assert same(logprobs, logprobs_of(self.log.token_ids))
        assert self.log.progress in self.history
        known = self.history[self.log.progress]
        assert (known.token_ids.tolist(), known.rewinds) == (self.log.token_ids.tolist(), self.log.rewinds)
        assert self.log.progress >= self.acknowledged
        attempt = claim(self.checkpoints, JOB, "w")
        pending = PendingCheckpoint(JOB, attempt, "suffix", None, [])
        pending.written = WrittenSpans(len(self.log.token_ids))
        for _ in range(num_steps):
            self._advance(pending)
            pending.log, pending.logprobs = self.log, logprobs_of(self.log.token_ids)
            pending.take_tokens()(self.checkpoints)
            self.acknowledged = max(self.acknowledged, self.log.progress)

    def _advance(self, pending: PendingCheckpoint) -> None:
        for _ in range(self._chance.randrange(1, 9)):
            num_rewinds, num_tokens = self.log.progress
            chance = np.random.default_rng([num_rewinds, num_tokens])
            self.log = TokenLog(np.append(self.log.token_ids, np.uint32(chance.integers(0, 2))), self.log.rewinds)
            self.history[self.log.progress] = self.log
            if chance.random() < 0.08:
                rewind = Rewind(num_tokens + 1, int(chance.integers(0, num_tokens + 1)))
                self.log = TokenLog(self.log.token_ids[: rewind.num_kept], (*self.log.rewinds, rewind))
                self.history[self.log.progress] = self.log
                pending.rewind(self.log, 0, logprobs_of(self.log.token_ids))


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(3))
def test_killed_between_any_two_files_a_job_goes_on_from_what_it_had_and_never_from_anything_else(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # fsync would only take time here
    num_killed = 0
    for num_left in range(1, 26, 2):
        store, chance = MortalStore(str(tmp_path / f"{num_left}")), random.Random(seed)
        writer = Writer(store, chance)
        for _ in range(3):
            store.num_left = num_left
            try:
                writer.attempt(chance.randrange(4, 9))
            except KilledError:
                num_killed += 1
            store.num_left = 10**9
        writer.attempt(2)
    assert num_killed > 12


def test_tokens_without_log_probabilities_count_as_not_kept_and_take_rewinds_behind_them_along(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    checkpoints, token_ids = CheckpointStore(store, FINGERPRINT), np.arange(10, dtype=np.uint32)
    rewinds = (Rewind(20, 4), Rewind(30, 8))
    written = WrittenSpans()
    attempt = claim(checkpoints, JOB, "w")
    for end in (3, 6):
        files = LogprobFiles(store, CheckedFiles(store))
        part = TokenLog(token_ids[:end])
        files.write(f"checkpoints/{JOB}/{attempt:04d}", written, part, logprobs_of(part.token_ids), IDENTITY)
    checkpoints.write_tokens(JOB, attempt, token_ids, rewinds)
    log, logprobs = checkpoints.read_log_with_logprobs(JOB, NUM_TOP)
    assert (log.token_ids.tolist(), log.rewinds, len(logprobs)) == ([0, 1, 2, 3, 4, 5], rewinds[:1], 6)
    assert len(checkpoints.read_log(JOB).token_ids) == 10
    assert len(checkpoints.read_log_with_logprobs(JOB, NUM_TOP + 1)[1]) == 0
    assert [len(TokenLog(token_ids, rewinds).until(n).rewinds) for n in (3, 4, 7, 8, 10)] == [0, 1, 1, 2, 2]


def test_kept_logs_have_them_as_a_whole_or_say_why_not(tmp_path: Path) -> None:
    store, token_ids = Store(str(tmp_path)), tokens_of(1, 20)
    kept, log, logprobs = KeptLogs(store, FINGERPRINT), TokenLog(token_ids), logprobs_of(token_ids)
    kept.write(JOB, log, logprobs)
    assert same(kept.read_logprobs(JOB, log), logprobs)
    sizes = kept.sizes()
    assert sizes == {JOB: sum(path.stat().st_size for path in (tmp_path / "tokens").iterdir())}
    with pytest.raises(DamagedFileError, match="of other tokens"):
        kept.read_logprobs(JOB, TokenLog(np.append(token_ids, np.uint32(1))))
    kept.delete(JOB)
    assert (kept.sizes(), store.list("tokens")) == ({}, [])
    with pytest.raises(DamagedFileError, match="found no log-probabilities"):
        kept.read_logprobs(JOB, log)
