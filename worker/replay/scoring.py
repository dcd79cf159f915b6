"""Log-probabilities of tokens that exist, with the bits that their generation gives."""

from __future__ import annotations

from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.forward.forward_interface import MOST_READ
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, rows_of_trees
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES
from swiftbatch.worker.sampling.draft_tree import DraftTree, Walk
from swiftbatch.worker.sampling.sequence import Sequence


class Scorer:
    """Scores texts on one model, by its logits before any penalty or filter."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target
        self._batch_sampler = target.forwards.new_batch_sampler()

    def logprobs(self, prompt_ids: list[int], token_ids: list[int], num_top: int) -> TokenLogprobs:
        """Return the log-probabilities of `token_ids` behind a prompt, each with the `num_top` likeliest tokens."""
        params = SamplingParams(max_tokens=len(token_ids), logprobs=num_top)
        sequence = Sequence("scored", prompt_ids, params, self._target.vocab_size, self._target.device)
        sampler, cache = self._batch_sampler.sampler(sequence), self._target.new_cache(sequence.max_length)
        while cache.length < len(prompt_ids) - 1:
            end = min(cache.length + MOST_READ, len(prompt_ids) - 1)
            self._target.read(cache, prompt_ids[cache.length : end])
        parts, start = [], 0
        while start < len(token_ids):
            num_nodes = min(MAX_TREE_NODES, max_tree_depth(cache.length), len(token_ids) - start - 1)
            taken = token_ids[start : start + num_nodes + 1]
            tree, walk = DraftTree.chain(taken[:-1]), Walk(list(range(num_nodes)), taken)
            [rows] = self._target.verify(rows_of_trees([cache], [sequence.last_token_id], [tree]))
            parts.append(self._batch_sampler.logprobs(sampler, tree, rows.logits, walk, "raw_logprobs"))
            cache.commit(walk.path)
            sequence.extend(taken)
            start += len(taken)
        return TokenLogprobs.joined(parts, num_top)
