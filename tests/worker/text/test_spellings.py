from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.token_recycling import TokenRecyclingDrafter
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text import spellings
from swiftbatch.worker.text.spellings import spellings_in
from swiftbatch.worker.text.tokenizer import TextCodec

TEXT = "At noon the miller Jeremias Okonkwo-Tarn (of Saxby) owed 4,017 sacks, and naïve clerks wrote naïve notes."
WORDS = "At noon the miller Jeremias Okonkwo-Tarn of Saxby owed 4,017 sacks and naïve clerks wrote naïve"


@pytest.fixture(scope="module")
def codec(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


def test_words_are_spelled_without_the_space_before_them(codec: TextCodec) -> None:
    found = spellings_in(codec, codec.encode(TEXT))
    assert " ".join(codec.decode(each[:-1]) for each in found) == WORDS
    behind_a_quote = codec.encode('"Okonkwo-Tarn')
    [own] = [each[:-1].tolist() for each in found if codec.decode(each[:-1]) == "Okonkwo-Tarn"]
    assert behind_a_quote[-len(own) :] == own
    assert own[0] not in codec.encode(TEXT)


def test_the_next_word_comes_behind_a_space(codec: TextCodec) -> None:
    last = [codec.decode(each[-1:]) for each in spellings_in(codec, codec.encode("a cat sat"))]
    assert [text[:1] for text in last] == [" ", " "]


def test_of_a_long_prompt_the_end_is_spelled(codec: TextCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    token_ids = codec.encode(TEXT)
    whole = spellings_in(codec, token_ids)
    monkeypatch.setattr(spellings, "MOST_READ", len(codec.encode(" and naïve clerks wrote naïve notes.")))
    end = spellings_in(codec, token_ids)
    assert [codec.decode(each[:-1]) for each in end[-3:]] == ["clerks", "wrote", "naïve"]
    assert len(end) < len(whole)


def test_a_word_s_other_spelling_is_drafted(codec: TextCodec) -> None:
    prompt_ids = codec.encode(TEXT)
    own = next(each for each in spellings_in(codec, prompt_ids) if each[0] not in prompt_ids and len(each) > 2)
    vocab_size, trees = 1 + max(*prompt_ids, *own.tolist()), list[list[int]]()
    for spelled in ([], [own]):
        drafter = TokenRecyclingDrafter(SimpleNamespace(vocab_size=vocab_size), with_noise=False)  # type: ignore[arg-type]
        sequence = Sequence("s", prompt_ids, SamplingParams(max_tokens=50, temperature=0), vocab_size)
        sequence.spellings = spelled
        drafter.start(sequence, None)  # type: ignore[arg-type]
        sequence.extend(own[:1].tolist())
        trees.append(drafter.tree(sequence, 1, 1).token_ids)
    assert trees[1] == own[1:2].tolist() != trees[0]


def test_spellings_beyond_the_model_s_vocabulary_are_left_out() -> None:
    drafter = TokenRecyclingDrafter(SimpleNamespace(vocab_size=10), with_noise=False)  # type: ignore[arg-type]
    sequence = Sequence("s", [1, 2, 3], SamplingParams(max_tokens=9, temperature=0), 10)
    sequence.spellings = [np.array([4, 12, 5]), np.array([6, 7, 8])]
    drafter.start(sequence, None)  # type: ignore[arg-type]
    sequence.extend([6])
    assert drafter.tree(sequence, 2, 2).token_ids == [7, 8]
