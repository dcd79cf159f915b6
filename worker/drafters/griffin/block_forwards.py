"""Drafts of a block drafter for `GriffinDrafter`: one forward a step, and all levels of a tree come from it."""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass

import torch

from swiftbatch.worker.drafters.griffin.block_model import BlockModel
from swiftbatch.worker.drafters.griffin.draft_forwards import (
    PROBE_NODES,
    PROBE_PARAMS,
    PROBE_REPEATS,
    Level,
    paths_of,
    replayed,
)
from swiftbatch.worker.drafters.griffin.draft_input import NUM_ENTRIES, NUM_SINKS, Candidates, TorchRoom, window_start
from swiftbatch.worker.forward.step_costs import seconds_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


@dataclass
class BlockTrack:
    """Context of a sequence's blocks: sinks, and the newest positions, as `BlockModel.context` returns them."""

    room: TorchRoom
    nothing: torch.Tensor  # of no positions
    sinks: torch.Tensor
    newest: torch.Tensor
    first: int = 0  # position of the first of `newest`
    logits: torch.Tensor | None = None  # [num_levels, vocab] of the newest block

    @property
    def end(self) -> int:
        return self.first + self.newest.shape[-2]

    def put(self, position: int, seen: torch.Tensor) -> None:
        """Keep positions from `position` on; forget those before a gap."""
        if position != self.end:
            self.first, self.newest = position, self.nothing
        self.newest = torch.cat([self.newest, seen], dim=-2)

    def cut(self, start: int) -> None:
        if start > self.first:
            self.first, self.newest = start, self.newest[..., start - self.first :, :].clone()


class BlockForwards:
    """Blocks in torch over the target's features, in place of `GriffinForwards`."""

    def __init__(self, model: BlockModel, target: TargetModel, num_candidates: int, sees_all: bool = False) -> None:
        self._model, self._target, self._num_candidates, self._sees_all = model, target, num_candidates, sees_all
        self.feature_layers = model.projection.layers
        self._tracks: dict[str, BlockTrack] = {}

    @torch.inference_mode()
    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        device = self._target.device
        wide = torch.zeros(0, self._model.projection.in_features, dtype=self._target.dtype, device=device)
        nothing = self._model.context(wide, 0)
        room = TorchRoom.of(sequence, target_cache, torch.empty(0, device=device))
        self._tracks[sequence.sequence_id] = BlockTrack(room, nothing, nothing, nothing)

    def stop(self, sequence_id: str) -> None:
        del self._tracks[sequence_id]

    @torch.inference_mode()
    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        self._tracks[sequence_id].put(position, self._model.context(hidden, position))

    @torch.inference_mode()
    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        config, contexts = self._model.config, [self._context(sequence) for sequence in sequences]
        masks = [config.mask_token_id] * (config.block_size - 1)
        token_ids = torch.tensor([[sequence.last_token_id, *masks] for sequence in sequences])
        embeddings = self._target.forwards.embed(token_ids.flatten().to(self._target.device))
        starts = [len(sequence) - 1 for sequence in sequences]
        rows = self._model(embeddings.view(*token_ids.shape, -1), starts, contexts)[:, config.num_silent :]
        logits = self._target.logits(rows.flatten(0, 1).contiguous()).view(len(sequences), rows.shape[1], -1)
        found = []
        for sequence, own in zip(sequences, logits, strict=True):
            track = self._tracks[sequence.sequence_id]
            track.logits = own
            found += self._ranked(track, [[]], [sequence.last_token_id])
        return found

    @torch.inference_mode()
    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        return [
            self._ranked(
                self._tracks[level.sequence.sequence_id],
                paths_of(level.tree)[level.first :],
                level.tree.token_ids[level.first :],
            )
            for level in levels
        ]

    def level_seconds(self) -> float:
        """Return the seconds of a level behind the first one, which needs no forward."""
        probe = Sequence("probe", [0], PROBE_PARAMS, self._target.vocab_size, self._target.device)
        self.start(probe, self._target.new_cache(1))
        logits = torch.zeros(self._model.config.block_size, self._target.vocab_size, device=self._target.device)
        self._tracks[probe.sequence_id].logits = logits
        level = Level(probe, DraftTree([0] * PROBE_NODES, [ROOT] * PROBE_NODES), 0)
        forward = functools.partial(self.expand, [level])
        seconds = statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))
        self.stop(probe.sequence_id)
        return seconds

    def _context(self, sequence: Sequence) -> torch.Tensor:
        """Return what a block behind the newest token sees, after reading what is not known of it."""
        track, end = self._tracks[sequence.sequence_id], len(sequence) - 1
        start = 0 if self._sees_all or window_start(end) <= NUM_SINKS else window_start(end)
        if start and not track.sinks.shape[-2]:
            has_them = track.first == 0 and track.end >= NUM_SINKS
            track.sinks = track.newest[..., :NUM_SINKS, :].clone() if has_them else self._read(track, 0, NUM_SINKS)
        begin = start if track.first > start or track.end < start else track.end
        for position in range(begin, end, NUM_ENTRIES):
            track.put(position, self._read(track, position, min(end, position + NUM_ENTRIES)))
        track.cut(start)
        return torch.cat([track.sinks, track.newest], dim=-2) if start else track.newest

    def _read(self, track: BlockTrack, start: int, end: int) -> torch.Tensor:
        room = track.room
        hidden = replayed(self._target, room.sequence, room.cache, start, end, self.feature_layers)
        return self._model.context(hidden, start)

    def _ranked(self, track: BlockTrack, paths: list[list[int]], token_ids: list[int]) -> list[Candidates]:
        """Rank what follows nodes of one depth, of which these are the tokens; nothing follows the last level."""
        assert track.logits is not None
        depth = len(paths[0])
        if depth >= len(track.logits):
            return [[] for _ in paths]
        logits = track.logits[depth].expand(len(paths), -1)
        if self._model.markov_head is not None:
            logits = logits + self._model.markov_head(torch.tensor(token_ids, device=logits.device)).float()
        return track.room.rank(logits, paths, self._num_candidates)
