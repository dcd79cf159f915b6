"""`python -m bench fields`: what every field of a job line costs on one stream, beside a line that says nothing.

Each field has a value that has something to do at every token."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import Field
from rich.table import Table

from bench.tables import new_table
from bench.variants import EngineName, create_bench_drafter
from swiftbatch.jobs.json_records import Frozen
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.bench_texts import BenchError, own_tokens, text_tokens
from swiftbatch.worker.constraints.thinking import Markers, Thinking, ThinkingRule
from swiftbatch.worker.decode_bench import BenchOptions, EngineContestant, bench_slots, check_length, read_tokens
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
NEVER = Markers((0, 0, 0), (1, 1, 1))  # markers for a model without any: tokens that no text has in a row
TOKENS_PER_ROUND = 16  # at least, since the clock and busy moments of other programs are in every round


def fields(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return the fields of lines with so many tokens, beside their prompt, by a name for people; the first has none."""
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


class FieldBenchOptions(BenchOptions):
    """The measurement: `num_tokens` behind `position` tokens with each field, in turn, in `num_rounds` parts."""

    engine: EngineName
    position: int = Field(ge=2)
    num_tokens: int = Field(ge=1)
    num_rounds: int = Field(ge=1)
    temperature: float = Field(ge=0.0, le=100.0)
    min_p: float = Field(ge=0.0, le=1.0)
    seed: int = Field(ge=0)
    text: Path | None = None


class FieldRecord(Frozen):
    """The cost of one field: medians over the rounds of a run."""

    field: str
    ms_per_token: float
    ratio: float  # of its time to that of nothing set, round by round
    tokens_per_step: float


def run_field_bench(options: FieldBenchOptions, report: Callable[[str], None] = lambda line: None) -> list[FieldRecord]:
    """Measure all fields; `report` gets a line about each stage. Raises BenchError, ModelError."""
    if options.num_tokens < TOKENS_PER_ROUND * options.num_rounds:
        least = TOKENS_PER_ROUND * options.num_rounds
        raise BenchError(f"{options.num_tokens} tokens in {options.num_rounds} rounds: expected {least} or more")
    files = locate_model(options.model)
    check_length(files, options.position, 2 * options.num_tokens)
    target = options.load(files, bench_slots((options.engine,), options.position + 2 * options.num_tokens))
    report(f"text of {options.position} tokens: {options.text or 'the model goes on from a built-in prompt'}")
    position, text = options.position, options.text
    token_ids = text_tokens(text, files, position) if text else own_tokens(target, position)
    contestants = dict(_contestants(options, target, files, token_ids))
    seconds = _compete(list(contestants.values()), options, report)
    records = [
        FieldRecord(
            field=name,
            ms_per_token=1000 * statistics.median(own),
            ratio=statistics.median(a / b for a, b in zip(own, seconds[0], strict=True)),
            tokens_per_step=len(contestant.token_ids()) / contestant.timing.num_steps,
        )
        for (name, contestant), own in zip(contestants.items(), seconds, strict=True)
    ]
    options.write({"results": [record.model_dump() for record in records]}, target)
    return records


def _contestants(
    options: FieldBenchOptions, target: TargetModel, files: ModelFiles, token_ids: list[int]
) -> Iterator[tuple[str, EngineContestant]]:
    codec, costs = TextCodec(files), step_costs_of(target)
    cache = target.new_cache(len(token_ids) + 2 * options.num_tokens)
    read_tokens(target, cache, token_ids, [])
    for name, said in fields(2 * options.num_tokens).items():
        sampling = {"temperature": options.temperature, "min_p": options.min_p, "seed": options.seed} | said
        params = SamplingParams(max_tokens=2 * options.num_tokens, **sampling)
        words = codec.bad_word_ids(params.bad_words)
        sequence = Sequence(name, token_ids, params, target.vocab_size, target.device, words, _rules(codec, params))
        drafter = create_bench_drafter(options.engine, target, costs)
        yield name, EngineContestant(name, target, drafter, [sequence], [cache], codec.output_text)


def _rules(codec: TextCodec, params: SamplingParams) -> tuple[Rule, ...]:
    """Return a worker's rules; a thought is open from the first token on, also where the model has no markers."""
    if params.thinking_token_budget is None:
        return codec.rules(params)
    return (ThinkingRule(Thinking(NEVER, is_open=True), params.thinking_token_budget),)


def _compete(
    contestants: list[EngineContestant], options: FieldBenchOptions, report: Callable[[str], None]
) -> list[list[float]]:
    """Seconds per token of every contestant, `[num_contestants][num_rounds]`. They take turns in a new order each time.

    Raises BenchError where a text ends early: nothing could be said of its cost.
    """
    seconds: list[list[float]] = [[] for _ in contestants]
    for number in range(options.num_rounds):
        report(f"round {number + 1} of {options.num_rounds}")
        num_tokens = options.num_tokens * (number + 1) // options.num_rounds
        for i in random.Random(number).sample(range(len(contestants)), len(contestants)):
            before = len(contestants[i].token_ids()), contestants[i].timing.seconds
            contestants[i].generate_to(num_tokens)
            num_new = len(contestants[i].token_ids()) - before[0]
            if num_new:
                seconds[i].append((contestants[i].timing.seconds - before[1]) / num_new)
            else:  # its drafts had run ahead: the round before counts these tokens too
                seconds[i].append(seconds[i][-1])
    return seconds


def render(records: list[FieldRecord]) -> Table:
    """A table for people: a row for each field."""
    table = new_table("", ("field",), ("ms\nper token", f"/ {NOTHING}", "tokens\nper step"))
    for record in records:
        figures = f"{record.ms_per_token:.3f}", f"{record.ratio:.3f}x", f"{record.tokens_per_step:.2f}"
        table.add_row(record.field, *figures)
    return table
