"""Resumes a preempted job: tokens from its log, its cache from segments (`kv`) or by running the tokens again.

Both ways give the same bits. The faster one is chosen by the load rate of the first segment and measured forwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

import numpy as np

from swiftbatch.jobs.checkpoints.checkpoint_files import SegmentEntry, StateManifest
from swiftbatch.jobs.checkpoints.checkpoint_store import CheckpointStore
from swiftbatch.jobs.checkpoints.kv_segments import State
from swiftbatch.worker.forward.step_costs import Costs
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recovery:
    """State at the start of an attempt; its manifests continue the loaded `segments`."""

    kind: Literal["kv", "replay"]
    num_tokens: int  # counts generated tokens
    num_loaded_positions: int
    segments: tuple[SegmentEntry, ...]
    drafter_state: State | None


class Resumer:
    """Resumes sequences of one run from its checkpoints."""

    def __init__(self, checkpoints: CheckpointStore, costs: Costs, numerics: str) -> None:
        """Load only caches computed with these `numerics`, because other numerics give other bits."""
        self._checkpoints = checkpoints
        self._costs = costs
        self._numerics = numerics

    def recover(self, sequence: Sequence, cache: FullKVCache, engine: str) -> Recovery:
        """Restore a fresh sequence's output and its cache, without the newest token. Raises StoreError."""
        job_id = sequence.sequence_id
        self._take_log(sequence)
        manifests = self._computed_alike(job_id, _still_valid(self._checkpoints.read_manifests(job_id), sequence))
        segments = self._load(sequence, cache, manifests)
        if sequence.sampling.num_top_of_prompt is not None:
            cache.roll_back(0)  # the prompt's logits are needed
        elif not cache.is_by_position:
            self._load_states(sequence, cache, manifests)
        cache.roll_back(min(cache.length, len(sequence) - 1))
        return Recovery(
            kind="kv" if cache.length else "replay",
            num_tokens=sequence.num_generated_tokens,
            num_loaded_positions=cache.length,
            segments=segments,
            drafter_state=self._drafter_state(job_id, engine, manifests),
        )

    def _take_log(self, sequence: Sequence) -> None:
        """Append the log's tokens up to the first one without requested log-probabilities; the rest is drawn again."""
        if sequence.logprobs is None:
            log, logprobs = self._checkpoints.read_log(sequence.sequence_id), None
        else:
            num_top = sequence.logprobs.num_top
            log, logprobs = self._checkpoints.read_log_with_logprobs(sequence.sequence_id, num_top)
        try:
            _refuse_strangers(sequence, log.token_ids)
        except ValueError as error:
            logger.warning("skipped the token log of job %s: %s", sequence.sequence_id, error)
            return
        sequence.set_rewinds(log.rewinds)
        num_begun = sequence.num_generated_tokens  # the log has these tokens, too
        sequence.extend(log.token_ids[num_begun : num_begun + sequence.num_remaining_tokens])
        if sequence.logprobs is not None and logprobs is not None:
            sequence.logprobs.extend(logprobs.part(0, sequence.num_generated_tokens))

    def _computed_alike(self, job_id: str, manifests: Items[StateManifest]) -> list[StateManifest]:
        """Return the manifests up to their first segment with other numerics."""
        attempts = {entry.attempt for manifest in manifests for entry in (*manifest.segments, manifest.states) if entry}
        found = {attempt: self._checkpoints.numerics(job_id, attempt) for attempt in sorted(attempts)}
        others = {attempt for attempt, numerics in found.items() if numerics not in ("", self._numerics)}
        if others:
            known = found[min(others)] or "numerics that nobody knows"
            logger.info("job %s: its cache was computed with %s; it is computed again", job_id, known)
        return sorted((_without(manifest, others) for manifest in manifests), key=_num_positions, reverse=True)

    def _drafter_state(self, job_id: str, engine: str, manifests: Items[StateManifest]) -> State | None:
        """Return the newest intact drafter state of this engine."""
        entries = (manifest.drafter for manifest in manifests if manifest.drafter is not None)
        states = (self._checkpoints.read_drafter(job_id, entry) for entry in entries if entry.engine == engine)
        return next((state for state in states if state is not None), None)

    def _load(
        self, sequence: Sequence, cache: FullKVCache, manifests: Items[StateManifest]
    ) -> tuple[SegmentEntry, ...]:
        """Load the segments before the first damaged one; return the segments that the job's next state continues."""
        entries = {entry.file: entry for manifest in manifests for entry in manifest.segments}
        loaded: list[SegmentEntry] = []
        started = time.perf_counter()
        while entry := self._load_next(entries.values(), sequence, cache):
            loaded.append(entry)
            if len(loaded) == 1:
                bytes_per_second = entry.size / (time.perf_counter() - started)
                if self._replay_is_faster(manifests[0], len(sequence), bytes_per_second):
                    cache.roll_back(0)
                    return tuple(entry for entry in manifests[0].segments if entry.end < len(sequence))
        return tuple(loaded)

    def _load_states(self, sequence: Sequence, cache: FullKVCache, manifests: Items[StateManifest]) -> None:
        """Load the newest intact recurrent states within the loaded positions; if there are none, empty the cache."""
        end = min(cache.length, len(sequence) - 1)
        entries = {each.file: each for manifest in manifests if (each := manifest.states) and each.num_positions <= end}
        for entry in sorted(entries.values(), key=lambda entry: entry.num_positions, reverse=True):
            states = self._checkpoints.read_states(sequence.sequence_id, entry)
            try:
                if states is not None:
                    cache.set_states(states)
                    return
            except ValueError as error:
                logger.warning("skipped %s of job %s: %s", entry.file, sequence.sequence_id, error)
        cache.roll_back(0)

    def _load_next(
        self, entries: Collection[SegmentEntry], sequence: Sequence, cache: FullKVCache
    ) -> SegmentEntry | None:
        """Load and return the longest intact segment that starts at the cache's end, or None if there is none."""
        candidates = [entry for entry in entries if entry.start == cache.length]
        for entry in sorted(candidates, key=lambda entry: entry.end, reverse=True):
            segment = self._checkpoints.read_segment(sequence.sequence_id, entry)
            if segment is None:
                continue
            try:
                _refuse_strangers(sequence, segment.token_ids)
                num_known = _num_agreeing(sequence, entry.start, segment.token_ids)
                cache.load(segment.kv)
            except ValueError as error:
                logger.warning("skipped %s of job %s: %s", entry.file, sequence.sequence_id, error)
                continue
            sequence.extend(segment.token_ids[num_known:])  # the log was lost, or is older than the state
            return entry
        return None

    def _replay_is_faster(self, manifest: StateManifest, length: int, bytes_per_second: float) -> bool:
        """Return whether replaying is faster than loading; tokens that the log lacks must be loaded."""
        if manifest.num_positions > length:
            return False
        num_bytes = sum(entry.size for entry in (*manifest.segments, manifest.states) if entry)
        load_seconds = num_bytes / bytes_per_second
        return self._costs().replay_seconds(0, manifest.num_positions) < load_seconds


def _still_valid(manifests: Items[StateManifest], sequence: Sequence) -> list[StateManifest]:
    """Return the parts of manifests that are valid after the sequence's rewinds, longest first.

    A manifest with more rewinds than the log is dropped, because its tokens may differ from the log's.
    """
    valid = []
    for manifest in manifests:
        later = sequence.rewinds[manifest.num_rewinds :]
        if manifest.num_rewinds > len(sequence.rewinds):
            continue
        ends = [sequence.num_prompt_tokens + rewind.num_kept for rewind in later]
        if sequence.logprobs is not None and manifest.num_positions > len(sequence):
            ends.append(len(sequence))
        valid.append(_up_to(manifest, min(ends)) if ends else manifest)
    return sorted(valid, key=_num_positions, reverse=True)


def _num_positions(manifest: StateManifest) -> int:
    return manifest.num_positions


def _without(manifest: StateManifest, attempts: Collection[int]) -> StateManifest:
    """Return a manifest up to the first segment of one of these attempts, with its drafter."""
    start = next((entry.start for entry in manifest.segments if entry.attempt in attempts), manifest.num_positions)
    kept = tuple(entry for entry in manifest.segments if entry.end <= start)
    states = None if manifest.states is None or manifest.states.attempt in attempts else manifest.states
    return manifest.model_copy(update={"segments": kept, "states": states})


def _up_to(manifest: StateManifest, end: int) -> StateManifest:
    """Return a manifest up to position `end`, without the drafter's state, which includes later tokens."""
    kept = tuple(entry for entry in manifest.segments if entry.end <= end)
    states = manifest.states if manifest.states is None or manifest.states.num_positions <= end else None
    return manifest.model_copy(update={"segments": kept, "drafter": None, "states": states})


def _refuse_strangers(sequence: Sequence, token_ids: np.ndarray) -> None:
    if np.any(token_ids >= sequence.vocab_size):
        raise ValueError(f"found tokens outside of the vocabulary of {sequence.vocab_size:,}")


def _num_agreeing(sequence: Sequence, start: int, token_ids: np.ndarray) -> int:
    """Return how many of a segment's tokens the sequence has already. Raises ValueError if a token differs."""
    known = sequence.token_ids[start : start + len(token_ids)]
    differs = known != token_ids[: len(known)]
    if differs[: max(0, sequence.num_prompt_tokens - start)].any():
        raise ValueError(
            "found the tokens of another prompt; if somebody has moved checkpoints, give this job a new custom_id"
        )
    if differs.any():
        raise ValueError("found other tokens than the job's; it was written on other hardware, where candidates tied")
    return len(known)
