"""Log-probabilities are equal in engines, batches and resumes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftbatch.jobs.logprobs import NO_TOKEN, TokenLogprobs
from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import ENGINES, create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.batch_sampler import TorchBatchSampler
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends
from tests.worker.test_exactness import PROMPTS

NUM_TOKENS, NUM_TOP = 40, 3
RAW: LogprobsMode = "raw_logprobs"
PROCESSED: LogprobsMode = "processed_logprobs"
FILTERED = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.4,
    "bad_words": ["the"],
}

Outcome = tuple[list[int], TokenLogprobs]


def params_of(**changes: Any) -> SamplingParams:
    fields = {"max_tokens": NUM_TOKENS, "seed": 17, "ignore_eos": True, "logprobs": NUM_TOP, **FILTERED}
    return SamplingParams.model_validate(fields | changes)


def decode(
    target: TargetModel, engine_name: str, sequences: list[Sequence], mode: LogprobsMode = PROCESSED
) -> list[Outcome]:
    engine = Engine(target, create_drafter(engine_name, target, free_rows), logprobs_mode=mode)
    run_to_ends(engine, *sequences)
    return [outcome(sequence) for sequence in sequences]


def outcome(sequence: Sequence) -> Outcome:
    kept = sequence.kept_logprobs
    assert kept is not None
    return sequence.output_ids.tolist(), kept


def digest(found: Outcome) -> str:
    tokens, kept = found
    arrays = (np.array(tokens, np.uint32), kept.logprobs, kept.top_ids, kept.top_logprobs)
    assert {len(array) for array in arrays} == {len(tokens)}
    return hashlib.sha256(b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)).hexdigest()


class Plain:
    def __init__(self, target: TargetModel, codec: TextCodec) -> None:
        self.target, self._codec = target, codec
        self._outcomes: dict[LogprobsMode, list[Outcome]] = {}

    def sequences(self, **changes: Any) -> list[Sequence]:
        params, size = params_of(**changes), self.target.vocab_size
        words = self._codec.bad_word_ids(params.bad_words)
        prompts = [self._codec.encode(prompt) for prompt in PROMPTS]
        return [Sequence(f"s{i}", prompt, params, size, bad_word_ids=words) for i, prompt in enumerate(prompts)]

    def outcomes(self, mode: LogprobsMode) -> list[Outcome]:
        if mode not in self._outcomes:
            alone = [decode(self.target, "autoregressive", [each], mode)[0] for each in self.sequences()]
            self._outcomes[mode] = alone
        return self._outcomes[mode]

    def interrupted(self, mode: LogprobsMode, nums_tokens: tuple[int, ...]) -> list[Sequence]:
        sequences = self.sequences()
        for sequence, (tokens, kept), num_tokens in zip(sequences, self.outcomes(mode), nums_tokens, strict=True):
            sequence.extend(tokens[:num_tokens])
            assert sequence.logprobs is not None
            sequence.logprobs.extend(kept.part(0, num_tokens))
        return sequences


@pytest.fixture(scope="module")
def plain(target: TargetModel, embedded_files: ModelFiles) -> Plain:
    return Plain(target, TextCodec(embedded_files))


@pytest.mark.parametrize("engine_name", ENGINES)
def test_every_engine_gives_plain_decoding_s_in_a_batch_of_new_and_resumed_sequences(
    plain: Plain, engine_name: str
) -> None:
    expected = [digest(each) for each in plain.outcomes(PROCESSED)]
    found = decode(plain.target, engine_name, plain.interrupted(PROCESSED, (0, 17, NUM_TOKENS - 1)))
    assert [digest(each) for each in found] == expected


@pytest.mark.parametrize("engine_name", ["suffix", "auto"])
def test_raw_ones_are_as_exact(plain: Plain, engine_name: str) -> None:
    expected = [digest(each) for each in plain.outcomes(RAW)]
    found = decode(plain.target, engine_name, plain.interrupted(RAW, (5, 0, 30)), RAW)
    assert [digest(each) for each in found] == expected
    assert expected != [digest(each) for each in plain.outcomes(PROCESSED)]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in plain.outcomes(PROCESSED)]


def of_a_grammar(codec: TextCodec, target: TargetModel) -> list[Sequence]:
    params = params_of(structured_outputs={"regex": "([a-z]{1,7} ){60}"}, ignore_eos=False, bad_words=[])
    prompts = [codec.encode(prompt) for prompt in PROMPTS]
    rules = codec.rules(params)
    return [Sequence(f"s{i}", ids, params, target.vocab_size, rules=rules) for i, ids in enumerate(prompts)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", ["native", "torch"])
def test_processed_ones_are_those_of_what_a_grammar_lets_come(
    plain: Plain, embedded_files: ModelFiles, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, target = TextCodec(embedded_files), plain.target
    if backend == "torch":
        monkeypatch.setattr(
            target.forwards, "new_batch_sampler", lambda: TorchBatchSampler(target.vocab_size, target.device)
        )
    alone = [decode(target, "autoregressive", [each])[0] for each in of_a_grammar(codec, target)]
    for tokens, kept in alone:
        likeliest = {int(each) for each in kept.top_ids.ravel() if each != NO_TOKEN}
        assert all(set(codec.decode([each])) <= set("abcdefghijklmnopqrstuvwxyz ") for each in likeliest), likeliest
        assert (kept.logprobs <= 0).all()
        assert (np.exp(kept.top_logprobs.astype(np.float64)).sum(axis=1) <= 1 + 1e-5).all()
        assert len(tokens) == NUM_TOKENS
    for engine_name in ("suffix", "auto"):
        found = decode(target, engine_name, of_a_grammar(codec, target))
        assert [digest(each) for each in found] == [digest(each) for each in alone]


def test_a_sequence_that_asks_for_none_has_none_and_the_same_tokens(plain: Plain) -> None:
    [first, *_] = plain.sequences(logprobs=None)
    run_to_ends(Engine(plain.target, create_drafter("suffix", plain.target, free_rows)), first)
    assert (first.kept_logprobs, first.output_ids.tolist()) == (None, plain.outcomes(RAW)[0][0])


def test_a_rewound_sequence_keeps_those_of_the_tokens_that_stay(plain: Plain) -> None:
    [first, *_] = plain.interrupted(RAW, (30, 0, 0))
    again = first.rewound(12)
    kept = again.kept_logprobs
    assert kept is not None
    assert digest((again.output_ids.tolist(), kept)) == digest(
        (plain.outcomes(RAW)[0][0][:12], plain.outcomes(RAW)[0][1].part(0, 12))
    )
    assert len(outcome(first)[1]) == 30


@pytest.fixture(scope="module")
def their_model(embedded_files: ModelFiles) -> Any:
    return AutoModelForCausalLM.from_pretrained(embedded_files.path, dtype=torch.float64, use_safetensors=True)


def their_law(logits: torch.Tensor, tokens: list[int], mode: LogprobsMode) -> torch.Tensor:
    """Return log-probabilities `[vocab]` by definition."""
    if mode == RAW:
        return torch.log_softmax(logits, dim=-1)
    scores = logits.clone()
    scores[13] += 2.5
    for token_id in set(tokens):
        scores[token_id] -= 0.5 * tokens.count(token_id)
    scores = scores / 0.8
    scores[scores < torch.topk(scores, 50).values[-1]] = -torch.inf
    return torch.log_softmax(scores, dim=-1)


@pytest.mark.parametrize("mode", [RAW, PROCESSED])
def test_they_are_those_of_transformers_in_float64(
    embedded_targets: dict[str, TargetModel], embedded_files: ModelFiles, their_model: Any, mode: LogprobsMode
) -> None:
    target, prompt = embedded_targets["float32"], TextCodec(embedded_files).encode(PROMPTS[0])
    drawn = {"temperature": 0.8, "top_k": 50, "frequency_penalty": 0.5, "logit_bias": {"13": 2.5}}
    fields = {"max_tokens": NUM_TOKENS, "seed": 5, "ignore_eos": True, "logprobs": 20, **drawn}
    sequence = Sequence("s", prompt, SamplingParams.model_validate(fields), target.vocab_size)
    [(tokens, kept)] = decode(target, "token-recycling", [sequence], mode)
    with torch.inference_mode():
        logits = their_model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    for place, (row, token_id) in enumerate(zip(logits, tokens, strict=True)):
        law = their_law(row, tokens[:place], mode)
        assert float(kept.logprobs[place]) == pytest.approx(float(law[token_id]), abs=3e-3)
        ids = kept.top_ids[place]
        assert NO_TOKEN not in ids
        np.testing.assert_allclose(kept.top_logprobs[place], torch.topk(law, 20).values.numpy(), atol=3e-3)
        np.testing.assert_allclose(kept.top_logprobs[place], law[ids.tolist()].numpy(), atol=3e-3)
