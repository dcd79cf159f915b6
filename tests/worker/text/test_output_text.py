"""The text of output tokens equals its definition for all tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.text.text_parts import KINDS, Kind, segments

pytestmark = pytest.mark.long

NAMES = st.sampled_from(sorted(KINDS))
LOSING = ("byte fallback, a space in front", "byte fallback")


@settings(max_examples=120)
@given(data=st.data(), name=NAMES)
def test_the_text_is_that_of_the_definition_and_of_the_library_where_that_loses_nothing(
    data: st.DataObject, name: str
) -> None:
    kind = KINDS[name]
    token_ids = data.draw(kind.tokens)
    text = kind.output_text.decode(token_ids)
    assert text == kind.text(token_ids)
    if name not in LOSING or kind.has_whole_runs(token_ids):
        assert text == kind.tokenizer.decode(token_ids, skip_special_tokens=True)


def test_a_cut_run_of_byte_tokens_loses_the_last_character_alone() -> None:
    kind = KINDS["byte fallback"]
    token_ids = kind.spelled("\u4f60" * 8)[:22]
    assert kind.output_text.decode(token_ids) == "\u4f60" * 7 + "\ufffd"
    assert kind.output_text.settled(token_ids) == "\u4f60" * 7


@settings(max_examples=80)
@given(data=st.data(), name=NAMES)
def test_what_is_settled_stays_whatever_comes_and_is_all_but_the_start_of_a_character(
    data: st.DataObject, name: str
) -> None:
    kind = KINDS[name]
    token_ids, more = data.draw(kind.tokens), data.draw(kind.tokens)
    settled = kind.output_text.settled(token_ids)
    assert settled == kind.settled(token_ids)
    assert kind.output_text.decode(token_ids + more).startswith(settled)
    assert kind.output_text.decode(token_ids) in (settled, settled + "\ufffd")


def offset_of(kind: Kind, token_ids: list[int], place: int) -> int:
    """Return the character with the first byte after so many tokens."""
    num_before, parts = len(kind.raw_of(token_ids[:place])), segments(kind.raw_of(token_ids))
    ends = [sum(map(len, parts[: number + 1])) for number in range(len(parts))]
    return sum(end <= num_before for end in ends)


@settings(max_examples=120)
@given(data=st.data(), name=NAMES)
def test_offsets_lead_to_the_character_that_has_a_token_s_first_byte(data: st.DataObject, name: str) -> None:
    kind = KINDS[name]
    token_ids = data.draw(kind.tokens)
    found = kind.output_text.offsets(token_ids)
    assert found == [offset_of(kind, token_ids, place) for place in range(len(token_ids) + 1)]
    assert found == sorted(found)
