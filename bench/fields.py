"""The cost of each field of a job line on one stream."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any

from bench.options import TextOptions
from bench.tables import Record
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.thinking import Markers, Thinking, ThinkingRule
from swiftbatch.worker.decode_bench import (
    BY_NAME,
    BenchEngine,
    BenchError,
    Contestant,
    bench_slots,
    check_length,
    own_tokens,
    read_tokens,
    text_tokens,
)
from swiftbatch.worker.forward.step_costs import step_costs_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.sampling.sequence import Rule, Sequence
from swiftbatch.worker.text.tokenizer import TextCodec

NOTHING = "nothing set"
SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "born": {"type": "integer"}},
        "required": ["name", "born"],
        "additionalProperties": False,
    },
}
GRAMMAR = 'start: line+ "§"\nline: NAME ": " NUMBER "\\n"\nNAME: /[A-Z][a-z]+( [A-Z][a-z]+)?/\nNUMBER: /[0-9]{1,4}/'
STRUCTURES: dict[str, dict[str, Any]] = {
    "structured_outputs: json": {"json": SCHEMA},
    "structured_outputs: regex": {"regex": "([A-Z]?[a-z]+[,.;]? )+§"},
    "structured_outputs: grammar": {"grammar": GRAMMAR},
}
NEVER = Markers((0, 0, 0), (1, 1, 1))  # markers for a model without any: unlikely token sequences
TOKENS_PER_ROUND = 16  # at least, because the clock and other programs disturb every round


def fields(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Name fields; the first has none."""
    endless: dict[str, dict[str, Any]] = {
        NOTHING: {},
        "repetition_penalty": {"repetition_penalty": 1.2},
        "frequency_penalty": {"frequency_penalty": 0.3},
        "presence_penalty": {"presence_penalty": 0.3},
        "logit_bias: 200 tokens": {"logit_bias": {str(token_id): -0.1 for token_id in range(100, 300)}},
        "min_tokens": {"min_tokens": num_tokens},
        "stop: 4 texts": {"stop": ["§1", "§2", "§3", "§4"]},
        "bad_words: 6": {"bad_words": ["the miller", "the river", "the mill", "of the", "in the", "said he"]},
        "repetition_detection": {"repetition_detection": {"max_pattern_size": 32, "min_count": 64}},
        "logprobs": {"logprobs": 0},
        "top_logprobs: 20": {"logprobs": 20},
        "thinking_token_budget": {"thinking_token_budget": num_tokens},
    }
    structured = {name: {"structured_outputs": structure} for name, structure in STRUCTURES.items()}
    return {name: said | {"ignore_eos": True} for name, said in endless.items()} | structured


class Options(TextOptions):
    """Options; `num_tokens` after `position` tokens per field, in `num_rounds` turns."""

    engine: str = "autoregressive"  # without drafts a field's cost shows best
    position: int = 2048
    num_tokens: int = 2000
    num_rounds: int = 50


def run(options: Options) -> Iterator[Record]:
    """Time each field of a job line on one stream: penalties, biases, guards, log-probabilities, structures.

    All generate in turn, each its own text, and are compared with a line without any such field.

    \b
    Example:
      python -m bench fields --tokens 4000 --json fields.jsonl
    """
    if options.num_tokens < TOKENS_PER_ROUND * options.num_rounds:
        least = TOKENS_PER_ROUND * options.num_rounds
        raise BenchError(f"{options.num_tokens} tokens in {options.num_rounds} rounds: expected {least} or more")
    files, position, text = locate_model(options.model), options.position, options.text
    check_length(files, position, 2 * options.num_tokens)
    target = options.load(files, bench_slots((options.engine,), position + 2 * options.num_tokens))
    token_ids = text_tokens(text, files, position) if text else own_tokens(target, position)
    contestants = list(_contestants(options, target, files, token_ids))
    seconds = _compete(contestants, options)
    for contestant, own in zip(contestants, seconds, strict=True):
        yield {
            "field": contestant.name,
            "ms_per_token": 1000 * statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, seconds[0], strict=True)),
            "tokens_per_step": len(contestant.token_ids()) / contestant.engine.counters.num_steps,
        }


def _contestants(
    options: Options, target: TargetModel, files: ModelFiles, token_ids: list[int]
) -> Iterator[Contestant]:
    codec, costs = TextCodec(files), step_costs_of(target)
    cache = target.new_cache(len(token_ids) + 2 * options.num_tokens)
    read_tokens(target, cache, token_ids, [])
    for name, said in fields(2 * options.num_tokens).items():
        sampling = options.model_dump(include={"temperature", "min_p", "seed"}) | said
        params = SamplingParams(max_tokens=2 * options.num_tokens, **sampling)
        words = codec.bad_word_ids(params.bad_words)
        sequence = Sequence(name, token_ids, params, target.vocab_size, target.device, words, _rules(codec, params))
        drafter = BY_NAME[options.engine](target, costs, None)
        yield Contestant(name, BenchEngine(target, drafter, codec.output_text), [sequence], [cache])


def _rules(codec: TextCodec, params: SamplingParams) -> tuple[Rule, ...]:
    """Return a worker's rules; a thinking budget works even without markers."""
    if params.thinking_token_budget is None:
        return codec.rules(params)
    return (ThinkingRule(Thinking(NEVER, is_open=True), params.thinking_token_budget),)


def _compete(contestants: list[Contestant], options: Options) -> list[list[float]]:
    """Return seconds per token [num_contestants][num_rounds]. Raises BenchError if a text ends early."""
    seconds: list[list[float]] = [[] for _ in contestants]
    for number in range(options.num_rounds):
        num_tokens = options.num_tokens * (number + 1) // options.num_rounds
        for i in random.Random(number).sample(range(len(contestants)), len(contestants)):
            num_before, num_rounds = len(contestants[i].token_ids()), len(contestants[i].rounds)
            contestants[i].generate_to(num_tokens)
            if len(contestants[i].rounds) > num_rounds:
                num_new = len(contestants[i].token_ids()) - num_before
                seconds[i].append(contestants[i].rounds[-1][0] / num_new)
            else:  # its drafts ran ahead, so the previous round includes these tokens
                seconds[i].append(seconds[i][-1])
    return seconds
