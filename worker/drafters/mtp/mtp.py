"""The engine with a layer that predicts further tokens (MTP), from the checkpoint or trained.

A row joins the target's final hidden state at a position with the next position's token. These states come from the
target's own prefill and verifications, so the rows of a shared or resumed prefix are missing. That changes drafts
alone. A draft is a chain of up to four tokens with alternatives beside each.
"""

from __future__ import annotations

import functools
import statistics
from pathlib import Path

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drafters.engine_options import GriffinOptions
from swiftbatch.worker.drafters.griffin.draft_forwards import PROBE_PARAMS, PROBE_REPEATS, GriffinRows, Level
from swiftbatch.worker.drafters.griffin.draft_input import (
    Candidates,
    DraftRows,
    Room,
    TorchRoom,
    features_of,
    keep_and_rank,
    wanted_rows,
)
from swiftbatch.worker.drafters.griffin.griffin import GriffinDrafter, PricePlanner
from swiftbatch.worker.drafters.mtp.predictor import (
    MOST_AT_ONCE,
    NUM_ENTRIES,
    NUM_PLACES,
    NUM_SINKS,
    WINDOW,
    MTPSequence,
    PredictorWeights,
    load_predictor,
)
from swiftbatch.worker.forward.forward_interface import Forwards
from swiftbatch.worker.forward.step_costs import Costs, seconds_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.native_decoder import NativeLayers
from swiftbatch.worker.kernels.native_library import Team
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


class MTPForwards:
    """The layer's rows and a track per sequence, in place of `GriffinForwards`."""

    feature_layers: tuple[int, ...] = ()

    def __init__(self, rows: GriffinRows, target: TargetModel) -> None:
        self._rows, self._target = rows, target
        self._tracks: dict[str, MTPSequence] = {}

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        self._tracks[sequence.sequence_id] = MTPSequence(self._rows.new_room(sequence))

    def stop(self, sequence_id: str) -> None:
        del self._tracks[sequence_id]

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Take the target's hidden states `[num_rows, hidden]` from a position on."""
        track = self._tracks[sequence_id]
        for part in hidden.split(WINDOW):  # more may exceed the places
            track.take(position, part)
            position += len(part)
            while track.num_known < NUM_SINKS < track.num_waiting:  # the last row waits: a draft begins behind it
                self._run([track], NUM_SINKS)

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        tracks = [self._tracks[sequence.sequence_id] for sequence in sequences]
        while waiting := [track for track in tracks if track.num_waiting]:
            self._run(waiting)
        return [track.draft_anew() for track in tracks]

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        """Return the candidates to follow each tree's new node; a chain has one new node."""
        tracks = [self._tracks[level.sequence.sequence_id] for level in levels]
        parts = [
            track.draft_row(level.tree.token_ids[: level.first + 1])
            for track, level in zip(tracks, levels, strict=True)
        ]
        found = self._rows.run(parts)
        for track in tracks:
            track.room.cache.advance(1)
        return found

    def level_seconds(self) -> float:
        sequence = Sequence("probe", [0], PROBE_PARAMS, self._target.vocab_size, self._target.device)
        track = MTPSequence(self._rows.new_room(sequence))
        track.room.cache.clear()
        track.room.cache.advance(NUM_SINKS)
        level = Level(sequence, DraftTree.chain([0]), 0)
        self._tracks[sequence.sequence_id] = track
        forward = functools.partial(self.expand, [level])
        seconds = statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))
        self.stop(sequence.sequence_id)
        return seconds

    def _run(self, tracks: list[MTPSequence], most: int = MOST_AT_ONCE) -> None:
        """Run some waiting rows of each track; store the candidates to follow the newest tokens."""
        parts = [(track, part) for track in tracks for part in track.next_rows(most)]
        for (track, part), found in zip(parts, self._rows.run([part for _, part in parts]), strict=True):
            track.know(len(part))
            if found:
                track.root = found[0]


NUM_CANDIDATES = 4  # alternatives at each depth; the chain goes on from the best one
OPTIONS = GriffinOptions(max_depth=4, max_nodes=4 * NUM_CANDIDATES, breadth=1)


def mtp(target: TargetModel, costs: Costs, parts_folder: Path | None) -> MTPDrafter:
    """Make the MTP drafter. Raises ModelError without such a layer for this target or kernels to run it."""
    rows = rows_of(load_predictor(parts_folder, target), target, NUM_CANDIDATES)
    forwards = MTPForwards(rows, target)
    return MTPDrafter(forwards, PricePlanner(costs(), forwards.level_seconds()), OPTIONS)


def rows_of(weights: PredictorWeights, target: TargetModel, num_candidates: int) -> GriffinRows:
    """Raise ModelError if the layer is damaged or the target does not run in our kernels."""
    forwards = target.forwards
    try:
        if forwards.team is not None:
            return NativePredictorRows(weights, forwards, forwards.team, num_candidates)
        if forwards.arena is not None:
            from swiftbatch.worker.drafters.mtp.cuda_predictor import cuda_predictor_rows

            return cuda_predictor_rows(weights, forwards, num_candidates)
    except (ValueError, IndexError) as error:
        raise ModelError(f"engine mtp: the layer of {target.files.name} is damaged: {error}") from None
    raise ModelError("engine mtp: its layer runs in our kernels, and the model does not run there")


class NativePredictorRows:
    """All rows in one forward through the compiled kernels."""

    def __init__(self, weights: PredictorWeights, forwards: Forwards, team: Team, num_candidates: int) -> None:
        """Raise ValueError or IndexError for weights that do not fit together."""
        self._weights, self._forwards, self._num_candidates = weights, forwards, num_candidates
        self._layer = NativeLayers(weights.sizes, [weights.layer], weights.rotary, team)
        self._cache_shape = weights.cache_shape(forwards.device)

    def new_room(self, sequence: Sequence, num_entries: int = NUM_ENTRIES) -> Room:
        hidden = torch.empty(self._forwards.hidden_size, dtype=self._forwards.dtype)
        return TorchRoom.of(sequence, FullKVCache(self._cache_shape, num_entries), hidden, NUM_PLACES)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        weights = self._weights
        token_ids = torch.tensor([token_id for part in parts for token_id in part.rows.token_ids])
        state = weights.joined(self._forwards.embed(token_ids), features_of(parts)).contiguous()
        self._layer.run([part.rows for part in parts], range(1), state)
        wanted = wanted_rows(parts)
        if not wanted:
            return [[] for _ in parts]
        normed = weights.normed(state[wanted])
        features = normed if weights.feeds_normed else state[wanted].to(normed.dtype)
        return keep_and_rank(parts, features, self._forwards.logits(normed), self._num_candidates)


class MTPDrafter(GriffinDrafter):
    """GRIFFIN's drafter, except that it also takes hidden states of prefilled tokens and replays nothing."""

    reads_caches = False

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self._forwards.take(sequence.sequence_id, position, hidden)
