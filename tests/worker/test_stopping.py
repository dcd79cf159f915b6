"""A sequence ends at its end-of-sequence token, its stop string or its last token, whichever engine decodes it."""

from __future__ import annotations

import pytest

from jobs.sampling import SamplingParams
from tests.worker.drafters.drafter_parts import free_rows
from worker.drafters.catalogue import create_drafter
from worker.engine import Engine
from worker.model.text import TextCodec
from worker.sequence import Sequence
from worker.stopping import StopRule, cut_at_stop
from worker.target.target import TargetModel


def spell(token_ids: list[int]) -> str:
    return "".join(chr(token_id) for token_id in token_ids)


def rule(params: SamplingParams, output: str = "", eos: frozenset[int] = frozenset({0})) -> StopRule:
    sequence = Sequence("s", [5], params, 200)
    sequence.extend([ord(c) for c in output])
    return StopRule(sequence, eos, spell)


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
    assert cut_at_stop("one END two STOP", ("STOP", "END")) == "one "
    assert cut_at_stop("nothing here", ("END",)) == "nothing here"


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    sequence = Sequence("s", [5], SamplingParams(max_tokens=2, stop=("x",)), 200)
    with pytest.raises(ValueError, match="tokenizer"):
        StopRule(sequence, frozenset(), None)


@pytest.mark.parametrize("engine_name", ["suffix", "token-recycling"])
def test_engines_stop_at_the_same_token(target: TargetModel, embedded_files: object, engine_name: str) -> None:
    codec = TextCodec(embedded_files)  # type: ignore[arg-type]
    outputs = []
    for name in ("autoregressive", engine_name):
        params = SamplingParams(max_tokens=300, temperature=0.0, stop=(" the",), seed=0)
        sequence = Sequence("s", codec.encode("In the morning, when the boats came in,"), params, target.vocab_size)
        engine = Engine(target, create_drafter(name, target, free_rows), codec.decode)
        engine.start(sequence)
        while sequence.finish_reason is None:
            engine.step()
        outputs.append((sequence.finish_reason, sequence.output_ids.tolist()))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == "stop"
