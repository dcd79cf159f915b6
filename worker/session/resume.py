"""Brings a preempted job back: tokens from its log, its cache from segments (`kv`) or by running the tokens again.

Both give the same bits, so the faster one is taken: the rate at which the first segment was loaded against the target's
measured forwards (`replay`). A damaged file is named by the checkpoint store, and the next best source is used.
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
    """The state that an attempt starts with; `segments` are whole, and its own manifests go on from them."""

    kind: Literal["kv", "replay"]
    num_tokens: int  # generated ones
    num_loaded_positions: int
    segments: tuple[SegmentEntry, ...]
    drafter_state: State | None


class Resumer:
    """Brings the sequences of one run back from its checkpoints."""

    def __init__(self, checkpoints: CheckpointStore, costs: Costs, numerics: str) -> None:
        """Load caches of attempts with these numerics alone: others have other bits, or another order of a head."""
        self._checkpoints = checkpoints
        self._costs = costs
        self._numerics = numerics

    def recover(self, sequence: Sequence, cache: FullKVCache, engine: str) -> Recovery:
        """Give a fresh sequence its output back, and its empty cache what is sooner loaded than replayed.

        The newest token's position stays out of the cache: the next step's root row adds it. Raises StoreError.
        """
        job_id = sequence.sequence_id
        self._take_log(sequence)
        manifests = self._computed_alike(job_id, _still_valid(self._checkpoints.read_manifests(job_id), sequence))
        segments = self._load(sequence, cache, manifests)
        if not cache.is_by_position:
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
        """Give the sequence what the job's log has, nothing of a log that no model with this vocabulary has written.

        Tokens without the log-probabilities that the job asks for are drawn again.
        """
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
        sequence.extend(log.token_ids[: sequence.num_remaining_tokens])
        if sequence.logprobs is not None and logprobs is not None:
            sequence.logprobs.extend(logprobs.part(0, sequence.num_generated_tokens))

    def _computed_alike(self, job_id: str, manifests: Items[StateManifest]) -> list[StateManifest]:
        """The parts of manifests in front of the first segment that was computed with other numerics."""
        attempts = {entry.attempt for manifest in manifests for entry in (*manifest.segments, manifest.states) if entry}
        found = {attempt: self._checkpoints.numerics(job_id, attempt) for attempt in sorted(attempts)}
        others = {attempt for attempt, numerics in found.items() if numerics not in ("", self._numerics)}
        if others:
            known = found[min(others)] or "numerics that nobody knows"
            logger.info("job %s: its cache was computed with %s; it is computed again", job_id, known)
        return sorted((_without(manifest, others) for manifest in manifests), key=_num_positions, reverse=True)

    def _drafter_state(self, job_id: str, engine: str, manifests: Items[StateManifest]) -> State | None:
        """The newest whole state of a drafter of this engine; another engine's is of no use."""
        entries = (manifest.drafter for manifest in manifests if manifest.drafter is not None)
        states = (self._checkpoints.read_drafter(job_id, entry) for entry in entries if entry.engine == engine)
        return next((state for state in states if state is not None), None)

    def _load(
        self, sequence: Sequence, cache: FullKVCache, manifests: Items[StateManifest]
    ) -> tuple[SegmentEntry, ...]:
        """Load segment after segment, as far as they are whole; returns those that the job goes on from."""
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
        """Load the newest whole states of layers that the loaded keys and values reach, else empty the cache.

        The positions behind them are read again: their keys and values are there, but not what they did to the states.
        """
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
        """Load the longest whole segment that starts where the cache ends; None if there is none."""
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
            sequence.extend(segment.token_ids[num_known:])  # a log that was lost, or is older than its state
            return entry
        return None

    def _replay_is_faster(self, manifest: StateManifest, length: int, bytes_per_second: float) -> bool:
        """Return whether to run tokens again rather than load. Tokens that stand in segments alone must be loaded."""
        if manifest.num_positions > length:
            return False
        num_bytes = sum(entry.size for entry in (*manifest.segments, manifest.states) if entry)
        load_seconds = num_bytes / bytes_per_second
        return self._costs().replay_seconds(0, manifest.num_positions) < load_seconds


def _still_valid(manifests: Items[StateManifest], sequence: Sequence) -> list[StateManifest]:
    """The parts of manifests whose tokens still stand after the sequence's rewinds, most positions first.

    What later rewinds have taken back is cut off. Where log-probabilities are asked for, so is what lies behind the
    tokens that have them. A manifest that knows of more rewinds than the log is left out: its tokens may be others.
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
    """The part of a manifest in front of the first segment that one of these attempts wrote; its drafter stays."""
    start = next((entry.start for entry in manifest.segments if entry.attempt in attempts), manifest.num_positions)
    kept = tuple(entry for entry in manifest.segments if entry.end <= start)
    states = None if manifest.states is None or manifest.states.attempt in attempts else manifest.states
    return manifest.model_copy(update={"segments": kept, "states": states})


def _up_to(manifest: StateManifest, end: int) -> StateManifest:
    """The part of a manifest below position `end`, without the state of a drafter that has seen more."""
    kept = tuple(entry for entry in manifest.segments if entry.end <= end)
    states = manifest.states if manifest.states is None or manifest.states.num_positions <= end else None
    return manifest.model_copy(update={"segments": kept, "drafter": None, "states": states})


def _refuse_strangers(sequence: Sequence, token_ids: np.ndarray) -> None:
    """Raise ValueError for tokens outside of the vocabulary."""
    if np.any(token_ids >= sequence.vocab_size):
        raise ValueError(f"found tokens outside of the vocabulary of {sequence.vocab_size:,}")


def _num_agreeing(sequence: Sequence, start: int, token_ids: np.ndarray) -> int:
    """Count the tokens of a segment that the sequence has already. Raises ValueError where one differs."""
    known = sequence.token_ids[start : start + len(token_ids)]
    differs = known != token_ids[: len(known)]
    if differs[: max(0, sequence.num_prompt_tokens - start)].any():
        raise ValueError(
            "found the tokens of another prompt; if somebody has moved checkpoints, give this job a new custom_id"
        )
    if differs.any():
        raise ValueError("found other tokens than the job's; it was written on other hardware, where candidates tied")
    return len(known)
