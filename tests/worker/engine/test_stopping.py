from __future__ import annotations

import pytest

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.engine.stopping import StopRule, text_of
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.output_text import LibraryText
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.worker.drafters.drafter_parts import free_rows, run_to_ends


def spell(token_ids: list[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


SPELLED = LibraryText(spell)


def rule(params: SamplingParams, output: str = "", eos: frozenset[int] = frozenset({0})) -> StopRule:
    sequence = Sequence("s", [5], params, 200)
    sequence.eos_token_ids = eos
    sequence.extend([ord(c) for c in output])
    return StopRule(sequence, SPELLED)


def text_after(params: SamplingParams, output: str, eos: frozenset[int] = frozenset()) -> str:
    sequence = Sequence("s", [5], params, 200)
    sequence.eos_token_ids = eos
    sequence.extend([ord(c) for c in output])
    sequence.finish_reason = "stop"
    return text_of(sequence, SPELLED)


def test_the_last_token_ends_with_reason_length() -> None:
    after = rule(SamplingParams(max_tokens=2)).after
    assert [after(ord("a")), after(ord("b"))] == [None, "length"]


def test_eos_ends_unless_ignored() -> None:
    assert rule(SamplingParams(max_tokens=9)).after(0) == "stop"
    assert rule(SamplingParams(max_tokens=9, ignore_eos=True)).after(0) is None


def test_a_stop_string_is_found_across_tokens_and_across_a_resume() -> None:
    params = SamplingParams(max_tokens=99, stop=("END",))
    assert [rule(params, "xxE").after(ord("N")), rule(params, "xxEN").after(ord("D"))] == [None, "stop"]
    assert rule(params, "xxEND").now() == "stop"
    assert rule(params).now() is None


def test_text_is_cut_before_the_first_stop_string() -> None:
    params = SamplingParams(max_tokens=99, stop=("STOP", "END"))
    assert text_after(params, "one END two STOP") == "one "
    assert text_after(params, "nothing here") == "nothing here"


def test_a_stop_string_stays_in_the_text_where_that_is_asked_for() -> None:
    params = SamplingParams(max_tokens=99, stop=("STOP", "END"), include_stop_str_in_output=True)
    assert text_after(params, "one END two STOP") == "one END"


@pytest.mark.parametrize(("included", "text"), [(False, "one "), (True, "one #")])
def test_a_stop_token_ends_and_is_in_the_text_where_that_is_asked_for(included: bool, text: str) -> None:
    params = SamplingParams(max_tokens=99, stop_token_ids=(ord("#"),), include_stop_str_in_output=included)
    assert rule(params, "one ").after(ord("#")) == "stop"
    assert rule(params, "one #").now() == "stop"
    assert text_after(params, "one #") == text
    assert rule(params.model_copy(update={"ignore_eos": True}), "one ").after(ord("#")) == "stop"


@pytest.mark.parametrize(
    ("fields", "text"),
    [({}, "one "), ({"include_stop_str_in_output": True}, "one #"), ({"ignore_eos": True}, "one #")],
)
def test_an_end_of_sequence_token_that_has_a_text_is_none_of_it_as_a_stop_token(
    fields: dict[str, bool], text: str
) -> None:
    """Some tokenizers do not mark it as special."""
    params = SamplingParams(max_tokens=99, **fields)
    assert text_after(params, "one #", eos=frozenset({ord("#")})) == text


def test_nothing_ends_a_text_before_its_least_number_of_tokens_but_the_last_token() -> None:
    params = SamplingParams(max_tokens=5, min_tokens=3, stop=("b",), stop_token_ids=(ord("#"),))
    assert [rule(params, "aa").after(ord(letter)) for letter in "#b"] == [None, None]
    assert [rule(params, "aab").now(), rule(params, "aa#").now()] == [None, None]
    assert [rule(params, "aaa").after(ord(letter)) for letter in "#bc"] == ["stop", "stop", None]
    assert rule(params, "aab").after(ord("c")) is None  # the stop string ended too early to count
    assert rule(params, "aaac").after(ord("c")) == "length"
    assert rule(params.model_copy(update={"min_tokens": 5}), "aaab").after(ord("b")) == "length"


@pytest.mark.parametrize("num_kept", [0, 4, 40])
def test_text_is_cut_where_the_sequence_was_stopped_and_not_before(num_kept: int) -> None:
    """A stop string counts if it ends after the first tokens, wherever it began."""
    output = "x" * num_kept + "END" + "x" * num_kept + "END"
    for min_tokens in (num_kept + 3, 2 * num_kept + 4, 2 * num_kept + 5):
        params = SamplingParams(max_tokens=99, min_tokens=min_tokens, stop=("END",))
        reasons = [rule(params, output[: i + 1]).now() for i in range(len(output))]
        assert reasons == [None] * (len(output) - 1) + ["stop"]
        assert text_after(params, output) == output[:-3]
        stepwise = rule(params)
        assert [stepwise.after(ord(letter)) for letter in output] == reasons


def test_a_loop_ends_the_text_from_its_least_number_of_tokens_on_and_after_all_other_reasons() -> None:
    loop = {"max_pattern_size": 3, "min_count": 3}
    params = SamplingParams.model_validate(
        {"max_tokens": 9, "stop_token_ids": (ord("c"),), "repetition_detection": loop}
    )
    assert [rule(params, "xabab").after(ord(letter)) for letter in "abc"] == [None, None, "stop"]
    assert rule(params, "xababa").after(ord("b")) == "repetition"
    assert rule(params, "xababab").now() == "repetition"
    assert rule(params, "xababab").after(ord("x")) is None
    assert [rule(params, "cc").after(ord("c")), rule(params, "xxxababa").after(ord("b"))] == ["stop", "length"]
    later = params.model_copy(update={"min_tokens": 8})
    assert [rule(later, "xababa").after(ord("b")), rule(later, "xababab").after(ord("a"))] == [None, "repetition"]
    assert text_after(params, "xababab") == "xababab"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    sequence = Sequence("s", [5], SamplingParams(max_tokens=2, stop=("x",)), 200)
    with pytest.raises(ValueError, match="tokenizer"):
        StopRule(sequence, None)


@pytest.mark.parametrize("engine_name", ["suffix", "token-recycling"])
def test_engines_stop_at_the_same_token(target: TargetModel, embedded_files: object, engine_name: str) -> None:
    codec = TextCodec(embedded_files)  # type: ignore[arg-type]
    outputs = []
    for name in ("autoregressive", engine_name):
        params = SamplingParams(max_tokens=300, temperature=0.0, stop=(" the",), seed=0)
        sequence = Sequence("s", codec.encode("In the morning, when the boats came in,"), params, target.vocab_size)
        engine = Engine(target, create_drafter(name, target, free_rows), codec.output_text)
        run_to_ends(engine, sequence)
        outputs.append((sequence.finish_reason, sequence.output_ids.tolist()))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == "stop"
