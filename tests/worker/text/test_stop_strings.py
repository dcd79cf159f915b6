"""A stop string matches at the token that completes it, as in the text's definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.constraints.thinking import Markers, Thinking
from swiftbatch.worker.engine.stopping import StopRule, text_of
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.output_text import LibraryText, OutputText, first_stop
from swiftbatch.worker.text.token_bytes import steps_of
from tests.worker.text.text_parts import CHARACTERS, KINDS, Kind

pytestmark = pytest.mark.long

NAMES = st.sampled_from(sorted(KINDS))
LLAMA, GEMMA = KINDS["byte fallback, a space in front"], KINDS["byte fallback"]
MANY = 1000  # token numbers that may be special


def stopped(
    output_text: OutputText,
    params: SamplingParams,
    token_ids: list[int],
    num_before: int = 0,
    thinking: Thinking | None = None,
) -> Sequence:
    """The first tokens were there before the sequence's rule."""
    sequence = Sequence("s", [5], params, 10**6)
    sequence.extend(token_ids[:num_before])
    rule = StopRule(sequence, output_text, thinking)
    sequence.finish_reason = rule.now()
    for token_id in token_ids[num_before:]:
        if sequence.finish_reason is not None:
            break
        sequence.finish_reason = rule.after(token_id)
        sequence.extend([token_id])
    return sequence


def params_of(stop: tuple[str, ...], min_tokens: int = 0, is_kept: bool = False) -> SamplingParams:
    return SamplingParams(
        max_tokens=10**4, stop=stop, min_tokens=min_tokens, include_stop_str_in_output=is_kept, ignore_eos=True
    )


def num_up_to_stop(kind: Kind, params: SamplingParams, token_ids: list[int]) -> int | None:
    """Return when a stop string ends after `min_tokens`."""
    num_before = len(kind.settled(token_ids[: params.min_tokens]))
    for end in range(params.min_tokens + 1, len(token_ids) + 1):
        text = kind.settled(token_ids[:end])
        for stop in params.stop:
            if any(text.startswith(stop, i) and i + len(stop) > num_before for i in range(len(text))):
                return end
    return None


def stops(text: str) -> st.SearchStrategy[str]:
    """Draw parts of a text, and other strings."""
    strings = st.text(st.sampled_from(CHARACTERS), min_size=1, max_size=3)
    if not text:
        return strings
    part = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 4)).map(lambda cut: text[cut[0] :][: cut[1]])
    return part | strings


@settings(max_examples=75)
@given(data=st.data(), name=NAMES, min_tokens=st.integers(0, 8), is_kept=st.booleans())
def test_a_stop_string_ends_the_text_where_a_search_over_the_definition_finds_it(
    data: st.DataObject, name: str, min_tokens: int, is_kept: bool
) -> None:
    kind = KINDS[name]
    token_ids = data.draw(kind.tokens)
    params = params_of(
        tuple(data.draw(st.lists(stops(kind.text(token_ids)), min_size=1, max_size=3))), min_tokens, is_kept
    )
    expected = num_up_to_stop(kind, params, token_ids)
    sequence = stopped(kind.output_text, params, token_ids)
    if expected is None:
        assert (sequence.finish_reason, sequence.num_generated_tokens) == (None, len(token_ids))
        assert text_of(sequence, kind.output_text) == kind.text(token_ids)
        return
    assert (sequence.finish_reason, sequence.num_generated_tokens) == ("stop", expected)
    whole = kind.settled(token_ids[:expected])
    found = first_stop(whole, params.stop, len(kind.settled(token_ids[:min_tokens])))
    assert text_of(sequence, kind.output_text) == whole[: found[is_kept]]


@settings(max_examples=60)
@given(data=st.data(), name=NAMES, min_tokens=st.integers(0, 6))
def test_a_rule_that_begins_behind_any_tokens_goes_on_as_the_one_that_saw_them(
    data: st.DataObject, name: str, min_tokens: int
) -> None:
    kind = KINDS[name]
    token_ids = data.draw(kind.tokens)
    params = params_of((data.draw(stops(kind.text(token_ids))),), min_tokens)
    whole = stopped(kind.output_text, params, token_ids)
    num_before = data.draw(st.integers(0, whole.num_generated_tokens))
    resumed = stopped(kind.output_text, params, token_ids, num_before)
    assert resumed.output_ids.tolist() == whole.output_ids.tolist()
    assert resumed.finish_reason == whole.finish_reason


@settings(max_examples=75)
@given(data=st.data(), name=NAMES, min_tokens=st.integers(0, 4), is_open=st.booleans())
def test_a_stop_string_ends_the_answer_and_no_thought_whoever_goes_on(
    data: st.DataObject, name: str, min_tokens: int, is_open: bool
) -> None:
    kind = KINDS[name]
    token_ids = data.draw(kind.tokens.filter(bool))
    start, end = (tuple(data.draw(st.lists(st.sampled_from(token_ids), min_size=1, max_size=2))) for _ in range(2))
    thinking = Thinking(Markers(start, end), is_open)
    params = params_of((data.draw(stops(kind.text(token_ids))),), min_tokens)
    num_tokens = num_up_to_stop_of_an_answer(kind, params, token_ids, thinking)
    whole = stopped(kind.output_text, params, token_ids, 0, thinking)
    reason = None if num_tokens is None else "stop"
    assert (whole.finish_reason, whole.num_generated_tokens) == (reason, num_tokens or len(token_ids))
    num_before = data.draw(st.integers(0, whole.num_generated_tokens))
    resumed = stopped(kind.output_text, params, token_ids, num_before, thinking)
    assert (resumed.finish_reason, len(resumed)) == (whole.finish_reason, len(whole))
    text = text_of(whole, kind.output_text, thinking)
    if num_tokens is None:
        assert text == kind.text(token_ids)
    else:
        assert kind.settled(token_ids[:num_tokens]).startswith(text + params.stop[0])
        everywhere = params.model_copy(update={"stop_in_reasoning": True})
        plain = stopped(kind.output_text, params, token_ids)
        assert len(stopped(kind.output_text, everywhere, token_ids, 0, thinking)) == len(plain) <= len(whole)


def num_up_to_stop_of_an_answer(
    kind: Kind, params: SamplingParams, token_ids: list[int], thinking: Thinking
) -> int | None:
    """Return when a stop string that begins in the answer is complete."""
    num_before = len(kind.settled(token_ids[: params.min_tokens]))
    for num_tokens in range(params.min_tokens + 1, len(token_ids) + 1):
        thought = thinking.in_output(token_ids[:num_tokens])
        first = 0 if thought.opened_at is None else len(kind.settled(token_ids[: thought.closed_at]))
        place = kind.settled(token_ids[:num_tokens]).find(
            params.stop[0], max(first, num_before - len(params.stop[0]) + 1)
        )
        if place >= 0 and not thought.is_open:
            return num_tokens
    return None


def test_a_character_of_byte_tokens_stops_with_its_last_byte() -> None:
    token_ids = GEMMA.spelled("".join(chr(0x4F60 + number) for number in range(28)))
    sequence = stopped(GEMMA.output_text, params_of((chr(0x4F67),)), token_ids)
    assert (sequence.finish_reason, sequence.num_generated_tokens) == ("stop", 24)
    assert text_of(sequence, GEMMA.output_text) == "".join(chr(0x4F60 + number) for number in range(7))


@pytest.mark.parametrize("kind", [GEMMA, LLAMA, KINDS["tiktoken"]])
def test_special_tokens_within_a_stop_string_hide_it_not(kind: Kind) -> None:
    [special, *_] = kind.tokenizer.all_special_ids
    token_ids = [*kind.spelled("EN"), *[special] * MANY, *kind.spelled("D and more")]
    sequence = stopped(kind.output_text, params_of(("END",)), token_ids)
    assert (sequence.finish_reason, sequence.num_generated_tokens) == ("stop", MANY + 3)


def test_what_is_missing_of_a_character_is_no_stop_before_it_is_sure() -> None:
    """U+FFFD only matches once the character can't be completed."""
    [first, *rest] = GEMMA.spelled("\u4f60")
    params = params_of(("\ufffd",))
    assert stopped(GEMMA.output_text, params, [first, *rest] * 5).finish_reason is None
    assert stopped(GEMMA.output_text, params, [first, rest[0]]).finish_reason is None
    broken = stopped(GEMMA.output_text, params, [first, rest[0], *GEMMA.spelled("ab")])
    assert (broken.finish_reason, broken.num_generated_tokens) == ("stop", 3)
    assert text_of(broken, GEMMA.output_text) == ""
    cut = Sequence("s", [5], params, 10**6)
    cut.extend([first])
    cut.finish_reason = "length"
    assert text_of(cut, GEMMA.output_text) == "\ufffd"


def test_the_least_number_of_tokens_counts_within_characters() -> None:
    token_ids = GEMMA.spelled("\u4f60\u4f61\u4f60")
    for min_tokens, num_tokens in ((2, 3), (3, 9), (8, 9)):
        sequence = stopped(GEMMA.output_text, params_of(("\u4f60",), min_tokens), token_ids)
        assert (sequence.finish_reason, sequence.num_generated_tokens) == ("stop", num_tokens)


@settings(max_examples=60)
@given(data=st.data(), min_tokens=st.integers(0, 4))
def test_where_tokens_have_no_bytes_of_their_own_the_library_s_text_is_searched(
    data: st.DataObject, min_tokens: int
) -> None:
    names = ["a", "b</w>", "the</w>", "END", "</w>", "\ufffd"]
    backend = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    backend.decoder = decoders.BPEDecoder("</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert steps_of(tokenizer) is None
    output_text = LibraryText(tokenizer.decode)
    token_ids = data.draw(st.lists(st.integers(0, len(names) - 1), max_size=10))
    params = params_of((data.draw(stops(tokenizer.decode(token_ids)) | st.just("END the ")),), min_tokens)
    texts = [tokenizer.decode(token_ids[:end]).rstrip("\ufffd") for end in range(len(token_ids) + 1)]
    num_before = len(texts[min(min_tokens, len(token_ids))])
    found = [i for i, text in enumerate(texts) if i > min_tokens and first_stop(text, params.stop, num_before)]
    sequence = stopped(output_text, params, token_ids)
    assert sequence.num_generated_tokens == (found[0] if found else len(token_ids))
    assert output_text.offsets(token_ids) == [*map(len, texts[:-1]), len(tokenizer.decode(token_ids))]
