from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.sampling.sampler import TokenSampler
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec

VOCAB = 6
LOGITS = torch.tensor([1.0, -1.0, 2.0, 0.5, -3.0, 4.0])


def changed(output: list[int], words: tuple[tuple[int, ...], ...] = (), **fields: Any) -> list[float]:
    """The prompt is 2, 2; the end token is 0."""
    params = SamplingParams(max_tokens=50, bad_words=("any",) * bool(words), **fields)
    sequence = Sequence("s", [2, 2], params, VOCAB, bad_word_ids=words)
    sequence.eos_token_ids = frozenset({0})
    sequence.extend(output)
    return TokenSampler(sequence, VOCAB).penalised(LOGITS).tolist()


def test_penalties_by_counts_look_at_the_output_alone() -> None:
    found = changed([1, 5, 1, 1], frequency_penalty=0.5, presence_penalty=0.25)
    assert found == [1.0, -1.0 - 3 * 0.5 - 0.25, 2.0, 0.5, -3.0, 4.0 - 0.5 - 0.25]
    assert changed([], frequency_penalty=2.0, presence_penalty=2.0) == LOGITS.tolist()
    assert changed([4], presence_penalty=-2.0)[4] == -1.0


def test_the_bias_comes_first_then_the_repetition_penalty_then_the_counts() -> None:
    found = changed([1, 1], logit_bias={"1": 3.0, "5": -9.0}, repetition_penalty=2.0, frequency_penalty=0.25)
    assert found == [1.0, (-1.0 + 3.0) / 2 - 0.5, 1.0, 0.5, -3.0, -5.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_what_ends_a_text_is_masked_up_to_its_least_number_of_tokens(ignore_eos: bool) -> None:
    for num_output, is_masked in ((0, True), (2, True), (3, False)):
        found = changed([1] * num_output, min_tokens=3, stop_token_ids=(5,), ignore_eos=ignore_eos)
        assert [token_id for token_id in range(VOCAB) if math.isinf(found[token_id])] == [0, 5] * is_masked


def test_a_bad_word_s_last_token_is_masked_behind_the_others_in_the_output() -> None:
    words = ((2, 3), (1, 1, 4), (5,))
    for output, masked in (([], [5]), ([2], [3, 5]), ([1], [5]), ([1, 1], [4, 5]), ([1, 1, 2], [3, 5])):
        found = changed(output, words)
        assert [token_id for token_id in range(VOCAB) if math.isinf(found[token_id])] == masked


def test_a_bias_of_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="found token 6, the model's are 0 to 5"):
        changed([], logit_bias={"6": 1.0})


def test_bad_words_without_their_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="bad words"):
        Sequence("s", [1], SamplingParams(max_tokens=1, bad_words=("any",)), VOCAB)


def test_a_word_comes_with_and_without_a_space_in_front(embedded_files: object) -> None:
    codec = TextCodec(embedded_files)  # type: ignore[arg-type]
    for token_ids in codec.bad_word_ids(("room", " room")):
        assert codec.decode(token_ids).strip() == "room"
    assert codec.bad_word_ids(("room",)) == codec.bad_word_ids((" room", "room"))
    assert {codec.decode(token_ids) for token_ids in codec.bad_word_ids(("room",))} == {"room", " room"}
    assert codec.bad_word_ids(()) == ()
