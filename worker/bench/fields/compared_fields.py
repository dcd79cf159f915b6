"""The fields of a job line whose cost is measured, each with a value that has something to do at every token."""

from __future__ import annotations

from typing import Any

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


def fields(num_tokens: int) -> dict[str, dict[str, Any]]:
    """Return what lines of so many tokens say beside their prompt, by a name for people; the first says nothing."""
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
