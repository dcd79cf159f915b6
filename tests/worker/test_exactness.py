"""Engines, batches and resumes have plain decoding's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.variants import BENCH_ENGINES, COMPARED, create_bench_drafter
from swiftbatch.jobs.sampling_params import RepetitionDetection, SamplingParams
from swiftbatch.worker.constraints.thinking import Thinking, ThinkingRule
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.engine.test_repetition import ends_in_a_loop

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "places": {
            "type": "array",
            "items": {"enum": ["the sea", "the mill", "the road"]},
            "minItems": 2,
            "maxItems": 4,
        },
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "letter": {"type": "string", "maxLength": 90},
    },
    "required": ["name", "places", "age", "letter"],
    "additionalProperties": False,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalised": {"temperature": 0.0, "repetition_penalty": 1.2},
    "sampled": {"temperature": 1.0},
    "sampled, penalised": {"temperature": 1.0, "repetition_penalty": 1.2, "penalty_window": 1024},
    "adjusted": {
        "temperature": 1.0,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.2,
        "logit_bias": {"13": 2.5, "300": -3.0, "18": -100.0},
        "stop_token_ids": [13, 261],
        "bad_words": ["the old", "said", "room", ", and"],
    },
    "structured": {
        "temperature": 1.0,
        "min_p": 0.02,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "bad_words": ["said"],
        "ignore_eos": False,
        "structured_outputs": {"json": SCHEMA},
    },
    "thinking": {"temperature": 1.0, "repetition_penalty": 1.1, "thinking_token_budget": 20},
    "thinking, structured": {
        "temperature": 1.0,
        "ignore_eos": False,
        "thinking_token_budget": 38,
        "structured_outputs": {"regex": "(the (sea|mill|[a-z]{2,6})( |, )){12,20}[.]"},
    },
    "greedy, up to a loop": {"temperature": 0.0, "repetition_detection": {"max_pattern_size": 32, "min_count": 2}},
    "sampled, filtered": {"temperature": 1.0, "min_p": 0.1, "top_p": 0.9, "repetition_penalty": 1.2},
}
PROMPTS = (
    "The lighthouse keeper counted the ships each evening, and on the ninth of November there was one too many. ",
    "Chapter I. In which the narrator arrives at the house of his uncle\n\nIt had rained since noon, and the road",
    '"Tell me again," said the old woman, "what the river did to the mill, and leave nothing out this time."\n\n',
)
NUM_TOKENS = 64
NUM_FREE = 14  # last tokens among which a stop token may end a text
OTHER_ENGINES = [name for name in BENCH_ENGINES if name != "autoregressive"]
HARDEST = "sampled, filtered"
LOOPING = "greedy, up to a loop"
DIFFERING = ("greedy", "adjusted", "thinking, structured", HARDEST)  # these include the others' rules
MANIFOLD = "auto"  # it drafts in several ways
RESUMED = ("thinking, structured", HARDEST)
ALSO_RESUMED = ("greedy", "adjusted", "structured", LOOPING)  # their rules are included, or only end a text
MARKERS = ("<think>", " So this is what I say: ")  # of several tokens each
ALL = [(name, setting) for name in BENCH_ENGINES for setting in SETTINGS if name not in COMPARED or setting == HARDEST]


def marks_of(engine_name: str, setting: str) -> list[pytest.MarkDecorator]:
    """Easier settings only run distinct engines."""
    if setting == HARDEST:
        return []
    return [pytest.mark.long if setting in DIFFERING and engine_name == MANIFOLD else pytest.mark.slow]


def decode(
    target: TargetModel, engine_name: str, sequences: list[Sequence], drafter_state: dict[str, np.ndarray] | None = None
) -> list[list[int]]:
    """Return the output ids of one batch."""
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows))
    for sequence in sequences:
        engine.start(sequence)
        if drafter_state is not None:
            engine.drafter.restore(sequence, drafter_state)
    while engine.sequences:
        engine.step()
        for sequence in [s for s in engine.sequences if s.finish_reason is not None]:
            engine.stop(sequence)
    return [sequence.output_ids.tolist() for sequence in sequences]


@pytest.fixture(scope="module")
def codec(embedded_files: object) -> TextCodec:
    return TextCodec(embedded_files, MARKERS)  # type: ignore[arg-type]


class Plain:
    def __init__(self, target: TargetModel, codec: TextCodec, num_tokens: int) -> None:
        self.target, self._codec, self._num_tokens = target, codec, num_tokens
        self._outputs: dict[str, list[list[int]]] = {}

    def sequences(self, setting: str) -> list[Sequence]:
        fields, num_tokens = SETTINGS[setting], self._num_tokens
        min_tokens = num_tokens - NUM_FREE if "stop_token_ids" in fields else 0
        common = {"max_tokens": num_tokens, "min_tokens": min_tokens, "seed": 17, "ignore_eos": True}
        params = SamplingParams(**common | fields)
        words, rules = self._codec.bad_word_ids(params.bad_words), self._codec.rules(params, self._thinking(params))
        return [
            Sequence(
                f"s{i}", self._codec.encode(prompt), params, self.target.vocab_size, bad_word_ids=words, rules=rules
            )
            for i, prompt in enumerate(PROMPTS)
        ]

    def _thinking(self, params: SamplingParams) -> Thinking | None:
        """Open a thought in prompts with a budget."""
        assert self._codec.markers is not None
        return None if params.thinking_token_budget is None else Thinking(self._codec.markers, True, "never")

    def outputs(self, setting: str) -> list[list[int]]:
        if setting not in self._outputs:
            alone = [decode(self.target, "autoregressive", [sequence])[0] for sequence in self.sequences(setting)]
            self._outputs[setting] = alone
        return self._outputs[setting]


@pytest.fixture(scope="module")
def plain(target: TargetModel, codec: TextCodec) -> Plain:
    return Plain(target, codec, num_tokens=NUM_TOKENS)


@pytest.mark.parametrize(("engine_name", "setting"), [pytest.param(*entry, marks=marks_of(*entry)) for entry in ALL])
def test_every_engine_gives_plain_decoding_s_tokens_in_a_batch(plain: Plain, engine_name: str, setting: str) -> None:
    assert decode(plain.target, engine_name, plain.sequences(setting)) == plain.outputs(setting)


@pytest.mark.long
@pytest.mark.parametrize(
    "engine_name", [pytest.param(n, marks=pytest.mark.slow if n in COMPARED else ()) for n in OTHER_ENGINES]
)
def test_every_engine_gives_plain_decoding_s_tokens_alone(plain: Plain, engine_name: str) -> None:
    assert decode(plain.target, engine_name, plain.sequences(HARDEST)[:1]) == plain.outputs(HARDEST)[:1]


def interrupted(plain: Plain, setting: str, nums_tokens: tuple[int, ...]) -> list[Sequence]:
    """Make sequences that recovered so many undisturbed tokens."""
    sequences = plain.sequences(setting)
    for sequence, output, num_tokens in zip(sequences, plain.outputs(setting), nums_tokens, strict=True):
        sequence.extend(output[:num_tokens])
    return sequences


@pytest.mark.sample(2)
@pytest.mark.long
@pytest.mark.parametrize(
    ("engine_name", "setting"),
    [
        pytest.param(*entry, marks=pytest.mark.slow if entry[1] in ALSO_RESUMED or entry[0] in COMPARED else ())
        for entry in ALL
        if entry[1] in RESUMED + ALSO_RESUMED
    ],
)
def test_a_resumed_sequence_goes_on_with_the_same_tokens(plain: Plain, engine_name: str, setting: str) -> None:
    sequences = interrupted(plain, setting, (1, 41, NUM_TOKENS - 1))
    assert decode(plain.target, engine_name, sequences) == plain.outputs(setting)


def test_a_resumed_drafter_state_changes_no_token(plain: Plain) -> None:
    engine = Engine(plain.target, create_bench_drafter("token-recycling", plain.target, free_rows))
    [first, *_] = plain.sequences("sampled")
    engine.start(first)
    while first.num_generated_tokens < 50:
        engine.step()
    state = engine.drafter.state(first)
    assert state
    sequences = interrupted(plain, "sampled", (50, 50, 50))
    assert decode(plain.target, "token-recycling", sequences, state) == plain.outputs("sampled")


def test_a_sequence_that_lost_only_its_result_is_finished_at_once(plain: Plain) -> None:
    [sequence, *_] = interrupted(plain, "greedy", (NUM_TOKENS,) * 3)
    assert decode(plain.target, "suffix", [sequence]) == plain.outputs("greedy")[:1]
    assert sequence.finish_reason == "length"


def test_a_loop_ends_a_text_with_the_token_that_makes_it_one(plain: Plain) -> None:
    endless = plain.outputs("greedy")
    ended = plain.outputs(LOOPING)
    detection = RepetitionDetection.model_validate(SETTINGS[LOOPING]["repetition_detection"])
    for whole, output in zip(endless, ended, strict=True):
        ends = (end for end in range(1, NUM_TOKENS) if ends_in_a_loop(whole[:end], detection))
        assert output == whole[: next(ends, NUM_TOKENS)]
    looping = [number for number, output in enumerate(ended) if len(output) < NUM_TOKENS]
    assert looping  # else nothing was asked
    sequences = interrupted(plain, LOOPING, (NUM_TOKENS,) * 3)
    for number in looping:
        assert decode(plain.target, "suffix", [sequences[number]]) == [ended[number]]
        assert sequences[number].finish_reason == "repetition"


def test_a_thought_s_marker_comes_where_its_budget_ends_and_a_resume_may_fall_into_it(plain: Plain) -> None:
    for setting, budget in (("thinking", 20), ("thinking, structured", 38)):
        [rule] = plain.sequences(setting)[0].rules
        assert isinstance(rule, ThinkingRule)
        end = rule.thinking.markers.end
        assert len(end) > 4  # a resume is in the middle of the latter
        for output in plain.outputs(setting):
            assert tuple(output[budget : budget + len(end)]) == end


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("engine_name", BENCH_ENGINES)
def test_every_engine_gives_plain_decoding_s_2000_tokens_killed_and_resumed(
    long_plain: Plain, engine_name: str, setting: str
) -> None:
    assert decode(long_plain.target, engine_name, long_plain.sequences(setting)) == long_plain.outputs(setting)
    resumed = interrupted(long_plain, setting, (1234, 1234, 1234))
    assert decode(long_plain.target, engine_name, resumed) == long_plain.outputs(setting)


@pytest.fixture(scope="module")
def long_plain(target: TargetModel, codec: TextCodec) -> Plain:
    return Plain(target, codec, num_tokens=2000)
