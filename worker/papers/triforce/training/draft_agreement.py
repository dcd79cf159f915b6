"""The share of tokens along texts that a draft model and its target agree on: greedily, and with the same noise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import LlamaForCausalLM

from swiftbatch.jobs.sampling import SamplingParams
from swiftbatch.worker.drawing.noise import GumbelNoise
from swiftbatch.worker.drawing.sampling import draw
from swiftbatch.worker.papers.triforce.draft_model import WINDOW, window_of
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.training.own_texts import Text, hidden_states

SAMPLING = {
    "T 0": SamplingParams(max_tokens=1, temperature=0.0),
    "T 1": SamplingParams(max_tokens=1, temperature=1.0),
    "T 1, min-p 0.1": SamplingParams(max_tokens=1, temperature=1.0, min_p=0.1),
}
"""How both models draw, by name."""


@dataclass(frozen=True)
class DraftAgreementRecord:
    """Agreement along held-out texts, as the log keeps it."""

    when: str  # before or after training
    texts: str
    num_rows: int
    same: dict[str, float]  # share of rows where both draw the same token, by the way of drawing

    def in_words(self) -> str:
        shares = ", ".join(f"{share:.1%} at {name}" for name, share in self.same.items())
        return f"{self.when} training, {self.texts}: the same token as the target for {shares}"


def measure_agreement(
    when: str, target: TargetModel, draft: LlamaForCausalLM, held_out: dict[str, list[Text]]
) -> Iterator[DraftAgreementRecord]:
    for name, texts in held_out.items():
        yield DraftAgreementRecord(when, name, *agreement(target, draft, texts))


@torch.inference_mode()
def agreement(target: TargetModel, draft: LlamaForCausalLM, texts: list[Text]) -> tuple[int, dict[str, float]]:
    """Rows compared, and the share of them where both models draw the same token for each `SAMPLING`."""
    num_rows = 0
    num_same = dict.fromkeys(SAMPLING, 0)
    for seed, text in enumerate(texts):
        noise = GumbelNoise(seed, target.vocab_size, target.device)
        hidden = hidden_states(target, text.token_ids)  # [num_tokens, hidden]
        for first_row, drafted in windowed_logits(draft, text.token_ids):
            said = target.logits(hidden[first_row : first_row + len(drafted)])
            for row in range(max(0, text.first_row - first_row), len(drafted)):
                num_rows += 1
                for name, params in SAMPLING.items():
                    position = first_row + row + 1  # of the token that the row predicts
                    num_same[name] += draw(said[row], position, params, noise) == draw(
                        drafted[row], position, params, noise
                    )
    return num_rows, {name: round(count / num_rows, 4) for name, count in num_same.items()}


def windowed_logits(draft: LlamaForCausalLM, token_ids: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the logits `[num_rows, vocab] float32` of stretches that together are the whole text.

    Each row is computed from what a draft model reads there in use, see `window_of`.
    """
    ids = np.asarray(token_ids)
    begins = [1, *range(2 * WINDOW, len(ids) + 1, WINDOW), len(ids) + 1]  # lengths at which the window begins anew
    for first, behind in pairwise(begins):
        read = torch.from_numpy(window_of(ids[: behind - 1], first)).to(draft.device)
        with torch.autocast(draft.device.type, dtype=torch.bfloat16):
            logits = draft(input_ids=read[None], use_cache=False).logits[0, first - behind :]
        yield first - 1, logits.float()
