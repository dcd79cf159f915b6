"""Log-probabilities of given tokens, with the same bits as in their generation."""

from __future__ import annotations

from swiftbatch.jobs.logprobs import TokenLogprobs
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.forward.target_model import TargetModel


class Scorer:
    """Scores texts on one model, by its logits before any penalty or filter."""

    def __init__(self, target: TargetModel) -> None:
        self._target = target

    def logprobs(
        self, prompt_ids: list[int], token_ids: list[int], num_top: int, lora: str | None = None
    ) -> TokenLogprobs:
        """Return the log-probabilities of `token_ids` behind a prompt, each with the `num_top` likeliest tokens."""
        return self.scores(prompt_ids, token_ids, num_top, lora).logprobs

    def scores(self, prompt_ids: list[int], token_ids: list[int], num_top: int, lora: str | None = None) -> KnownScores:
        """Return the scores of `token_ids` behind a prompt, with the adapter `lora`."""
        scores = KnownScores([*prompt_ids, *token_ids], len(prompt_ids), num_top, self._target)
        scores.read(self._target.new_cache(len(prompt_ids) + len(token_ids), lora=lora))
        return scores
