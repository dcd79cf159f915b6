"""Log-probabilities of known tokens, from the logits of the forwards that read them."""

from __future__ import annotations

import numpy as np
import torch

from swiftbatch.jobs.logprobs import PromptLogprobs, TokenLogprobs
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.forward_interface import MOST_READ
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, tree_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.draft_tree import DraftTree, Walk
from swiftbatch.worker.sampling.sequence import Sequence


class KnownScores:
    """Scores of the tokens behind the first `num_given`, before any penalty or filter, each with `num_top` others."""

    def __init__(self, token_ids: list[int], num_given: int, num_top: int, target: TargetModel) -> None:
        self._token_ids, self._num_top, self._target = token_ids, num_top, target
        params = SamplingParams(max_tokens=max(1, len(token_ids) - num_given), logprobs=num_top)
        self._sequence = Sequence("scored", token_ids[:num_given], params, target.vocab_size, target.device)
        self._batch_sampler = target.forwards.new_batch_sampler()
        self._sampler = self._batch_sampler.sampler(self._sequence)
        self._parts, self._ranks = list[TokenLogprobs](), [np.empty(0, np.int64)]

    @property
    def are_complete(self) -> bool:
        return len(self._sequence) == len(self._token_ids)

    @property
    def logprobs(self) -> TokenLogprobs:
        return TokenLogprobs.joined(self._parts, self._num_top)

    def of_prompt(self) -> PromptLogprobs:
        return PromptLogprobs(self._token_ids, self.logprobs, np.concatenate(self._ranks))

    def read(self, cache: FullKVCache) -> None:
        """Score all tokens by forwards that fill an empty cache."""
        known, num_given = self._token_ids, len(self._sequence)
        while cache.length < num_given - 1:
            self._target.read(cache, known[cache.length : min(cache.length + MOST_READ, num_given - 1)])
        while not self.are_complete:
            self.read_tile(cache, known[cache.length : -1])

    def read_tile(self, cache: FullKVCache, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read known tokens up to a boundary, and score those behind them; return final hidden states and logits."""
        num_rows = min(len(token_ids), 1 + max_tree_depth(cache.length))
        outputs = self._target.verify([tree_rows(cache, token_ids[0], DraftTree.chain(token_ids[1:num_rows]))])
        self.take(cache.length, outputs.logits.together)
        cache.commit(list(range(num_rows - 1)))  # last, so that a tile without memory for its scores is read again
        return outputs.hidden.together, outputs.logits.together

    def take(self, first: int, logits: torch.Tensor) -> None:
        """Score the tokens that follow rows of `logits [num_rows, vocab]`, the first one at position `first`."""
        num_left = len(self._token_ids) - len(self._sequence)
        for rows in logits[len(self._sequence) - 1 - first :][:num_left].split(1 + MAX_TREE_NODES):
            start = len(self._sequence)
            taken = self._token_ids[start : start + len(rows)]
            tree, walk = DraftTree.chain(taken[:-1]), Walk(list(range(len(taken) - 1)), taken)
            own = rows.gather(1, torch.tensor(taken, device=rows.device)[:, None])
            ranks = (rows >= own).sum(1).cpu().numpy()  # as vLLM counts them: 1 for the likeliest
            self._parts.append(self._batch_sampler.logprobs(self._sampler, tree, rows, walk, "raw_logprobs"))
            self._ranks.append(ranks)
            self._sequence.extend(taken)
