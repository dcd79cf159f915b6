"""Structured output fits, ends by itself, and reports a dead end."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import jsonschema
import pytest

from bench.variants import create_bench_drafter
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.constrained_tree import NOTHING_LEFT
from swiftbatch.worker.drafters.drafter_interface import DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows

PROMPT = "The parish register says of the miller, in JSON: "
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 20},
        "alive": {"type": "boolean"},
        "born": {"type": "integer", "minimum": 1700, "maximum": 1799},
        "trades": {"type": "array", "items": {"enum": ["mill", "smithy"]}, "minItems": 1, "maxItems": 2},
        "letter": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z][a-z]{2,5}$"}]},
    },
    "required": ["name", "alive", "born", "trades", "letter"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def codec(embedded_files: ModelFiles) -> TextCodec:
    return TextCodec(embedded_files)


def generated(
    target: TargetModel, codec: TextCodec, engine_name: str, jobs: Iterable[dict[str, Any]]
) -> list[tuple[Sequence, str]]:
    """Return sequences and texts of one batch."""
    engine = Engine(target, create_bench_drafter(engine_name, target, free_rows), codec.output_text)
    sequences = []
    for number, fields in enumerate(jobs):
        params = SamplingParams(**{"max_tokens": 300, "seed": number} | fields)
        words, rules = codec.bad_word_ids(params.bad_words), codec.rules(params)
        prompt_ids = codec.encode(PROMPT)
        sequences.append(Sequence(str(number), prompt_ids, params, target.vocab_size, "cpu", words, rules))
        engine.start(sequences[-1])
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return [(sequence, codec.decode(sequence.output_ids)) for sequence in sequences]


def test_every_text_fits_its_schema_and_ends_by_itself(target: TargetModel, codec: TextCodec) -> None:
    temperatures = [{"temperature": temperature} for temperature in (0.0, 0.7, 1.0, 1.0, 1.0, 1.5, 100.0, 100.0)]
    found = generated(
        target, codec, "suffix", [{"structured_outputs": {"json": SCHEMA}} | each for each in temperatures]
    )
    assert [sequence.finish_reason for sequence, _ in found] == ["stop"] * len(found)
    for _, text in found:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert list(json.loads(text)) == list(SCHEMA["properties"])
    assert len({text for _, text in found}) == len(found)


def test_compact_json_has_no_white_space_between_its_parts_whatever_the_drafter(
    target: TargetModel, codec: TextCodec
) -> None:
    temperatures = [{"temperature": temperature} for temperature in (0.0, 1.0, 100.0, 100.0)]
    schema: dict[str, Any] = {"json": SCHEMA, "disable_any_whitespace": True}
    asked = [{"structured_outputs": schema} | each for each in temperatures]
    [texts] = {
        tuple(text for _, text in generated(target, codec, engine_name, asked))
        for engine_name in ("autoregressive", "suffix", "token-recycling")
    }
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)


def test_other_structures_are_kept_to_as_well(target: TargetModel, codec: TextCodec) -> None:
    asked: list[dict[str, Any]] = [
        {"regex": "(yes|no), [a-z ]{5,40}[.]"},
        {"choice": ["red (dark)", "blue\nsky"]},
        {"grammar": 'root ::= "day " [0-9] [0-9]? ("," [a-z]){1,5} "."'},
        {"grammar": 'start: "day " NUMBER\nNUMBER: /[0-9]{2}/'},
    ]
    found = generated(target, codec, "token-recycling", [{"structured_outputs": each, "seed": 3} for each in asked])
    expected = (r"(yes|no), [a-z ]{5,40}[.]", r"red \(dark\)|blue\nsky", r"day \d\d?(,[a-z]){1,5}[.]", r"day \d\d")
    for (sequence, text), pattern in zip(found, expected, strict=True):
        assert re_matches(pattern, text)
        assert sequence.finish_reason == "stop"


def re_matches(pattern: str, text: str) -> bool:
    import re

    return re.fullmatch(pattern, text) is not None


def test_a_limit_cuts_a_structure_off_as_any_text(target: TargetModel, codec: TextCodec) -> None:
    [(sequence, text)] = generated(
        target, codec, "suffix", [{"structured_outputs": {"json_object": True}, "max_tokens": 2}]
    )
    assert (sequence.finish_reason, sequence.num_generated_tokens, text[0]) == ("length", 2, "{")


def test_a_job_that_nothing_is_left_for_says_so_and_its_neighbour_goes_on(
    target: TargetModel, codec: TextCodec
) -> None:
    stuck = {"structured_outputs": {"regex": "the (old|new) 7"}, "bad_words": ["7"]}
    errors = set()
    for engine_name in ("autoregressive", "suffix", "token-recycling"):
        (first, _), (second, text) = generated(
            target, codec, engine_name, [stuck, {"structured_outputs": {"choice": ["mill"]}}]
        )
        assert (first.finish_reason, first.error_code) == ("error", NOTHING_LEFT)
        errors.add((first.error, codec.decode(first.output_ids)))
        assert (second.finish_reason, text) == ("stop", "mill")
    [(error, before)] = errors
    assert "no token is left that may come beside bad words" in str(error)
    assert before.strip() in ("the old", "the new")


def test_a_batch_learns_its_schema_s_structure_once(target: TargetModel, codec: TextCodec) -> None:
    engine = Engine(target, create_bench_drafter("prompt-lookup", target, free_rows), codec.output_text)
    num_steps = []
    for number in range(2):
        params = SamplingParams(max_tokens=300, seed=1, structured_outputs={"json": SCHEMA})
        rules, prompt_ids = codec.rules(params), codec.encode(PROMPT)
        sequence = Sequence(str(number), prompt_ids, params, target.vocab_size, "cpu", rules=rules)
        engine.start(sequence)
        while sequence.finish_reason is None:
            engine.step()
        num_steps.append(engine.counters.num_steps - sum(num_steps))
    assert num_steps[1] < num_steps[0]


def test_no_row_is_spent_on_what_can_t_come(target: TargetModel, codec: TextCodec) -> None:
    """The drafter only proposes its own words; fitting ones are checked and accepted."""

    class Stubborn(type(create_bench_drafter("autoregressive", target, free_rows))):  # type: ignore[misc]
        def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
            token_ids = codec.encode("mill and mill", add_special_tokens=False)
            return [DraftTree.chain(token_ids[: request.max_depth]) for request in requests]

    engine = Engine(target, Stubborn(), codec.output_text)
    params = SamplingParams(max_tokens=50, seed=1, structured_outputs={"choice": ["mill"]})  # type: ignore[arg-type]
    sequence = Sequence("s", codec.encode(PROMPT), params, target.vocab_size, rules=codec.rules(params))
    engine.start(sequence)
    while sequence.finish_reason is None:
        for _, verification in engine.step():
            assert codec.decode(verification.tree.token_ids) in "mill"
            assert verification.num_proposed_tokens >= len(verification.tree)
    assert codec.decode(sequence.output_ids) == "mill"
