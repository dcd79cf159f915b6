"""The engine that drafts with a layer that predicts further tokens (MTP), of the checkpoint or trained.

A row joins the target's final hidden state at a position with the token behind it. Its keys and values lie in a cache
of one layer: of a text's first tokens, and of the newest ones. Entries are moved where it is full, and keep the angles
of their positions. Hidden states come from what the target reads and verifies anyway; where it read nothing, behind a
shared prefix or a resume, rows are missing. That changes what is drafted, never what is drawn.

A chain of up to four tokens, and beside each what else may well come: as much of it as pays. Drafts grow, and their
prices are planned, as GRIFFIN's.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.caches.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.drafters.ranking import CandidateRanker
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.sampling import TokenSampler
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.kernels.packed_layers import NativeLayers
from swiftbatch.worker.papers.griffin.draft_forwards import Level
from swiftbatch.worker.papers.griffin.draft_input import Candidates
from swiftbatch.worker.papers.griffin.griffin import GriffinDrafter, GriffinOptions
from swiftbatch.worker.papers.griffin.griffin_tree import PricePlanner
from swiftbatch.worker.papers.griffin.torch_ranking import SPREAD
from swiftbatch.worker.papers.mtp.predictor import PredictorWeights, load_predictor
from swiftbatch.worker.target.step_costs import Costs, seconds_of
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import SequenceRows, known_rows

NUM_SINKS = BLOCK  # first rows that stay
WINDOW = 16 * BLOCK  # newest rows that are always seen; before entries are moved, up to twice as many
NUM_ENTRIES = NUM_SINKS + 2 * WINDOW
MOST_AT_ONCE = 4 * BLOCK  # rows of a sequence in one call
PROBE_REPEATS = 5
PROBE_PARAMS = SamplingParams(max_tokens=1, temperature=1.0, seed=0)


@dataclass
class _Track:
    """One sequence as the layer knows it."""

    sequence: Sequence
    cache: FullKVCache
    sampler: TokenSampler  # knows some first tokens of the sequence
    position: int = 0  # of the hidden state behind the newest waiting one
    waiting: list[torch.Tensor] = field(default_factory=list)  # hidden states up to there, whose rows are to come
    num_known: int = 0  # entries of the text; drafts stand behind them
    feature: torch.Tensor | None = None  # in front of the next row of a draft, `[hidden]`
    root: tuple[Candidates, torch.Tensor | None] | None = None  # what follows the newest token, and its row's feature

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting))

    @property
    def is_at_the_end(self) -> bool:
        """True if the newest token's row was the last one that was run."""
        return not self.waiting and self.position == len(self.sequence) - 1

    def take(self, position: int, hidden: torch.Tensor) -> None:
        """Let hidden states `[num_rows, hidden]` from a position on wait; behind a gap those in front are left out."""
        self.root = None
        if position != self.position:
            self.waiting.clear()
        self.waiting.append(hidden)
        self.position = position + len(hidden)
        if self.num_known >= NUM_SINKS:
            while self.num_waiting - len(self.waiting[0]) >= WINDOW:
                self.waiting.pop(0)

    def next_rows(self, most: int) -> tuple[list[SequenceRows], torch.Tensor]:
        """The next waiting rows, and their hidden states `[num_rows, hidden]`; their entries count as known then."""
        hidden = torch.cat(self.waiting)
        first = self.position - len(hidden)
        self.cache.roll_back(self.num_known)
        self._make_room()
        num_rows = min(len(hidden), most)
        self.waiting = [hidden[num_rows:]] if num_rows < len(hidden) else []
        self.cache.first_angle = first - self.num_known
        rows = known_rows(self.cache, self.sequence.token_ids[first + 1 : first + 1 + num_rows].tolist())
        self.num_known += num_rows
        return rows, hidden[:num_rows]

    def draft_anew(self) -> Candidates:
        """Begin a draft behind the newest token; returns what may follow that, nothing where it is not known."""
        if self.root is None:
            return []
        candidates, self.feature = self.root
        self.cache.roll_back(self.num_known)
        return candidates

    def draft_row(self, token_id: int) -> list[SequenceRows]:
        """The row of a draft's next token."""
        return known_rows(self.cache, [token_id])

    def _make_room(self) -> None:
        """Keep the first rows and the newest ones where the cache may get too small for more."""
        if self.num_known + MOST_AT_ONCE <= NUM_ENTRIES:
            return
        for rows in self.cache.layer(0):
            rows[:, NUM_SINKS : NUM_SINKS + WINDOW] = rows[:, self.num_known - WINDOW : self.num_known].clone()
        self.num_known = NUM_SINKS + WINDOW
        self.cache.roll_back(self.num_known)

    def rank(self, logits: torch.Tensor, path: list[int], width: int) -> Candidates:
        """The best `width` tokens behind a path from the newest token, by guessed logits `[1, vocab] float32`."""
        for token_id in self.sequence.token_ids[self.sampler.position :].tolist():
            self.sampler.push(token_id)
        ranker = CandidateRanker(self.sequence, spread=SPREAD)
        return ranker.rank_logits(self.sampler.penalised(logits), [1 + len(path)], width)[0]


class MTPForwards:
    """The layer, the target, and a track for each sequence: the part of `GriffinForwards` that its drafter uses."""

    def __init__(self, weights: PredictorWeights, target: TargetModel, num_candidates: int) -> None:
        """Raises ModelError where the target runs elsewhere than in the compiled kernels, which have the layer."""
        team = target.forwards.team
        if team is None:
            raise ModelError("engine mtp: its layer runs in the kernels for CPUs, and the model does not run there")
        self._weights, self._target, self._num_candidates = weights, target, num_candidates
        try:
            self._layer = NativeLayers(weights.sizes, [weights.layer], weights.rotary, team)
        except (ValueError, IndexError) as error:
            raise ModelError(f"engine mtp: the layer of {target.files.name} is damaged: {error}") from None
        self._tracks: dict[str, _Track] = {}

    def start(self, sequence: Sequence, target_cache: FullKVCache) -> None:
        """Make room for a sequence."""
        self._tracks[sequence.sequence_id] = self._track(sequence)

    def stop(self, sequence_id: str) -> None:
        del self._tracks[sequence_id]

    def take(self, sequence_id: str, position: int, hidden: torch.Tensor) -> None:
        """Take the target's hidden states `[num_rows, hidden]` at a position and those behind it."""
        track = self._tracks[sequence_id]
        track.take(position, hidden)
        while track.num_known < NUM_SINKS < track.num_waiting:  # the last row waits: a draft begins behind it
            self._run([track], NUM_SINKS)

    def follow(self, sequences: list[Sequence]) -> list[Candidates]:
        """Take in what was committed; returns what may follow each sequence's newest token, nothing where not known."""
        tracks = [self._tracks[sequence.sequence_id] for sequence in sequences]
        while waiting := [track for track in tracks if track.waiting]:
            run = zip(waiting, self._run(waiting), strict=True)
            ends = [(track, hidden) for track, hidden in run if track.is_at_the_end]
            if ends:
                logits = self._target.logits(torch.cat([hidden for _, hidden in ends]))
                for (track, _), row in zip(ends, logits.split(1), strict=True):
                    track.root = track.rank(row, [], self._num_candidates), track.feature
        return [track.draft_anew() for track in tracks]

    def expand(self, levels: list[Level]) -> list[list[Candidates]]:
        """Return the candidates behind the one new node of each tree: a chain has no other."""
        tracks = [self._tracks[level.sequence.sequence_id] for level in levels]
        rows = [track.draft_row(level.tree.token_ids[level.first]) for track, level in zip(tracks, levels, strict=True)]
        features = torch.stack([track.feature for track in tracks if track.feature is not None])
        hidden = self._outputs(tracks, rows, features)
        logits = self._target.logits(hidden)
        return [
            [track.rank(logits[number : number + 1], level.tree.token_ids[: level.first + 1], self._num_candidates)]
            for number, (track, level) in enumerate(zip(tracks, levels, strict=True))
        ]

    def level_seconds(self) -> float:
        """The seconds of one node of a draft, measured."""
        sequence = Sequence("probe", [0], PROBE_PARAMS, self._target.vocab_size, self._target.device)
        track = self._track(sequence)
        track.cache.clear()
        track.cache.advance(NUM_SINKS)
        track.feature = torch.zeros(self._target.hidden_size, dtype=self._target.dtype)
        level = Level(sequence, DraftTree.chain([0]), 0)
        self._tracks[sequence.sequence_id] = track
        forward = functools.partial(self.expand, [level])
        seconds = statistics.median(seconds_of(self._target, forward) for _ in range(PROBE_REPEATS))
        self.stop(sequence.sequence_id)
        return seconds

    def _track(self, sequence: Sequence) -> _Track:
        sizes, device = self._weights.sizes, self._target.device
        num_parts = 2 if sizes.latent is None else 1
        shape = CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device, num_parts=num_parts)
        sampler = TokenSampler(sequence, sequence.vocab_size, device)
        return _Track(sequence, FullKVCache(shape, NUM_ENTRIES), sampler)

    def _run(self, tracks: list[_Track], most: int = MOST_AT_ONCE) -> list[torch.Tensor]:
        """Run some waiting rows of each track; what the head takes behind the last of them, `[1, hidden]` each."""
        parts = [track.next_rows(most) for track in tracks]
        rows, hidden = [rows for rows, _ in parts], torch.cat([hidden for _, hidden in parts])
        return list(self._outputs(tracks, rows, hidden).split(1))

    @torch.inference_mode()
    def _outputs(self, tracks: list[_Track], rows: list[list[SequenceRows]], hidden: torch.Tensor) -> torch.Tensor:
        """Run rows of each track behind hidden states; what the head takes behind the last one of each."""
        token_ids = [token_id for parts in rows for part in parts for token_id in part.token_ids]
        state = self._weights.joined(self._target.forwards.embed(torch.tensor(token_ids)), hidden).contiguous()
        self._layer.run([part for parts in rows for part in parts], range(1), state)
        sizes = [sum(len(part) for part in parts) for parts in rows]
        last = state[torch.tensor(sizes).cumsum(0) - 1]
        normed = self._weights.normed(last)
        features = normed if self._weights.feeds_normed else last.to(normed.dtype)
        for track, size, feature in zip(tracks, sizes, features, strict=True):
            track.cache.advance(size)
            track.feature = feature
        return normed


NUM_CANDIDATES = 4  # beside each other, of which the best one is gone on from
OPTIONS = GriffinOptions(max_depth=4, max_nodes=4 * NUM_CANDIDATES, num_expanded=1)


def mtp(target: TargetModel, costs: Costs, parts_folder: Path | None) -> MTPDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no such layer for this target, or nothing to run it."""
    forwards = MTPForwards(load_predictor(parts_folder, target), target, NUM_CANDIDATES)
    return MTPDrafter(forwards, PricePlanner(costs(), forwards.level_seconds()), OPTIONS)


class MTPDrafter(GriffinDrafter):
    """GRIFFIN's drafter with another model: it takes in what is read, too, and asks for nothing of it again."""

    reads_caches = False

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self._forwards.take(sequence.sequence_id, position, hidden)
