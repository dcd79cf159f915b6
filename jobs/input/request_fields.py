"""Fields that lines of other programs have: those without a meaning here, and those that are not supported."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from swiftbatch.jobs.frozen_records import whole
from swiftbatch.jobs.input.validation_errors import shown

# they steer servers, caches, bills and streams: the text is the same with and without them
WITHOUT_EFFECT = frozenset(
    [
        *("user", "metadata", "store", "service_tier", "stream", "stream_options", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "prediction", "request_id"),
        *(
            "session_id",
            "cache_salt",
            "stream_interval",
            "kv_transfer_params",
            "ec_transfer_params",
            "return_mm_kwargs",
        ),
        *("return_tokens_as_token_ids", "return_token_offsets", "routed_experts_prompt_start", "truncation_side"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "prompt_cache_options"),
        *("return_assistant_tokens_mask", "spaces_between_special_tokens"),  # the latter: texts have no special tokens
    ]
)
NOT_SUPPORTED: dict[str, tuple[Any, ...]] = {  # with the values that ask for nothing; null always does so
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "moderation": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "prompt_logprobs": (False, 0),
    "logprob_token_ids": ([],),
    "echo": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "watermarking": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "include_reasoning": (True,),
    "return_token_ids": (False,),
    "return_prompt_text": (False,),
    "prompt_embeds": (),
    "documents": ([],),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "vllm_xargs": ({},),
}
RENAMED = {  # vLLM's older names
    f"guided_{kind}": f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")
}
PLAIN_SPECIAL_TOKENS = {"/v1/completions": True, "/v1/chat/completions": False}  # `add_special_tokens` as it is here


def taken_apart(
    values: dict[str, Any], known: Collection[str], url: str
) -> tuple[dict[str, Any], tuple[str, ...], list[tuple[str, str]]]:
    """The fields that are for the form with the names `known`, the names of those without effect, and refusals.

    A refusal is a field and what is wrong with it. Fields that nobody knows stay for the form to refuse.
    """
    left, idle, refused = {}, [], []
    for name, value in values.items():
        if name in known or not is_of_others(name):
            left[name] = value
        elif value is None or (name in WITHOUT_EFFECT and value is False):
            continue
        elif name in WITHOUT_EFFECT:
            idle.append(name)
        elif not any(type(whole(value)) is type(each) and value == each for each in _neutral(name, url)):
            refused.append((name, _refusal(name, value, url)))
    return left, tuple(idle), refused


def is_of_others(name: str) -> bool:
    """Return whether lines for other programs may have a field of this name, which has no meaning here."""
    return name in WITHOUT_EFFECT or name in NOT_SUPPORTED or name == "add_special_tokens"


def _neutral(name: str, url: str) -> tuple[Any, ...]:
    return (PLAIN_SPECIAL_TOKENS[url],) if name == "add_special_tokens" else NOT_SUPPORTED[name]


def _refusal(name: str, value: object, url: str) -> str:
    if name in RENAMED:
        return f"found {shown(value)}, an old name that is not supported; expected {RENAMED[name]}"
    neutral = " or ".join(shown(each) for each in _neutral(name, url)[:1])
    return f"found {shown(value)}, not supported; expected {f'{neutral}, or ' if neutral else ''}no such field"
