"""Mistral models with only `tekken.json` work with mistral-common."""

from __future__ import annotations

import base64
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.job import Job, Message, TemplateOptions
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.inspection import inspect_model
from swiftbatch.worker.model.digests import TEKKEN_FILE, digests_of
from swiftbatch.worker.model.model_files import ModelFiles, locate_model
from swiftbatch.worker.text.tokenizer import Chat, TextCodec

MERGES = ("th", "the", " q", " qu", " qui", " quic", " quick")
NUM_SPECIAL = 22
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
USER = Message(role="user", content="the quick fox [/INST] </s>")
THINKING = ("[THINK]", "[/THINK]")
CONTROLS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", *THINKING),
)


def tekken(controls: Sequence[str] = CONTROLS) -> dict[str, Any]:
    tokens = [bytes([byte]) for byte in range(256)] + [merge.encode() for merge in MERGES]
    pieces = [
        {"rank": i, "token_bytes": base64.b64encode(each).decode(), "token_str": None} for i, each in enumerate(tokens)
    ]
    return {
        "config": {
            "pattern": r" ?\w+|[^\w]",
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) + NUM_SPECIAL,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v7",
        },
        "vocab": pieces,
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(controls)],
    }


@pytest.fixture
def folder(tmp_path: Path, tiny_model: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)
    (folder / TEKKEN_FILE).write_text(json.dumps(tekken()))
    return folder


@pytest.fixture
def codec(folder: Path) -> TextCodec:
    pytest.importorskip("mistral_common")
    return TextCodec(locate_model(str(folder)))


def test_the_file_is_in_the_fingerprint_where_it_is_the_only_tokenizer(folder: Path, tiny_model: Path) -> None:
    before = digests_of(folder)
    assert TEKKEN_FILE in before.model
    said = json.loads((folder / TEKKEN_FILE).read_text())
    said["vocab"][-1]["token_bytes"] = base64.b64encode(b" brown").decode()
    (folder / TEKKEN_FILE).write_text(json.dumps(said))
    assert digests_of(folder).fingerprint != before.fingerprint
    beside = folder.with_name("beside")
    shutil.copytree(tiny_model, beside)
    (beside / TEKKEN_FILE).write_text(json.dumps(said))
    assert digests_of(beside) == digests_of(tiny_model), "what nobody reads changes no run"


def test_without_the_library_a_line_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    for name in [name for name in sys.modules if name.startswith("mistral_common.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ModelError) as caught:
        TextCodec(locate_model(str(folder)))
    assert str(caught.value) == (
        f"model {folder}: its only tokenizer is tekken.json, which the library mistral-common reads, and "
        "mistral_common is not installed here; install swiftbatch with its extra `mistral`"
    )


def test_beside_a_tokenizer_json_the_file_is_not_read(tiny_model: Path, tmp_path: Path) -> None:
    """The same prompt has the same tokens, with or without the library."""
    beside = Path(shutil.copytree(tiny_model, tmp_path / "beside"))
    (beside / TEKKEN_FILE).write_text("no JSON")
    config = json.loads((beside / "config.json").read_text()) | {"model_type": "mistral", "sliding_window": None}
    (beside / "config.json").write_text(json.dumps(config))
    files = ModelFiles("beside", beside, digests_of(beside), 100, 300)
    assert TextCodec(files).encode("the quick fox") == TextCodec(locate_model(str(tiny_model))).encode("the quick fox")


def test_a_text_is_its_bytes_and_merges_behind_the_first_token(codec: TextCodec) -> None:
    token_ids = codec.encode_one("the quick\u00e9 \U0001f642</s>").token_ids
    assert token_ids[:3] == [1, NUM_SPECIAL + 257, NUM_SPECIAL + 262]
    assert 2 not in token_ids, "what a user writes ends no text"
    assert codec.decode(token_ids) == "the quick\u00e9 \U0001f642</s>"
    assert b"".join(map(codec.token_bytes, token_ids[1:])) == "the quick\u00e9 \U0001f642</s>".encode()
    assert codec.token_bytes(1) == b"<s>"
    assert codec.token_bytes(10_000) == b""


def test_a_character_whose_bytes_are_yet_to_come_is_not_settled(codec: TextCodec) -> None:
    token_ids = codec.encode("the \u00e9", add_special_tokens=False)
    assert codec.output_text.settled(token_ids[:-1]) == "the "
    assert codec.output_text.settled(token_ids) == "the \u00e9"


def test_a_chat_has_the_tokens_of_the_library(codec: TextCodec, folder: Path) -> None:
    from mistral_common.protocol.instruct.messages import SystemMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    expected = MistralTokenizer.from_file(folder / TEKKEN_FILE).encode_chat_completion(
        ChatCompletionRequest(messages=[SystemMessage(content="be brief"), UserMessage(content=USER.content)])
    )
    found = codec.encode_one(Chat([Message(role="system", content="be brief"), USER], None)).token_ids
    assert found == expected.tokens
    assert [token_id for token_id in found if token_id < NUM_SPECIAL] == [1, 17, 18, 3, 4]


def test_an_answer_that_is_begun_goes_on(codec: TextCodec) -> None:
    begun, options = Message(role="assistant", content="the quick"), TemplateOptions(continue_final_message=True)
    found = codec.encode_one(Chat([USER, begun], options)).token_ids
    assert found[-2:] == codec.encode("the quick", add_special_tokens=False)
    assert found[:-2] == codec.encode_one(Chat([USER], None)).token_ids
    with pytest.raises(ValueError, match=r"\Amessages: mistral-common refuses them: .*\Z"):
        codec.encode_one(Chat([USER, begun], None))


def test_parts_of_a_message_and_what_has_no_effect(codec: TextCodec) -> None:
    whole = Message.model_validate({"role": "user", "content": [{"type": "text", "text": text} for text in ("a", "b")]})
    assert codec.encode_one(Chat([whole], None)).token_ids[-1] == 4
    named = Message(role="user", content="a", name="x")
    assert codec.chat.unread([named], TemplateOptions(kwargs={"enable_thinking": True})) == [
        "enable_thinking",
        "messages[].name",
    ]
    assert codec.chat.unread([USER], None) == []


def test_a_model_that_thinks_does_so_between_its_own_tokens(codec: TextCodec, folder: Path) -> None:
    assert codec.markers is not None
    assert (codec.markers.start, codec.markers.end) == ((20,), (21,))
    job = Job(
        custom_id="a", sampling=SamplingParams(max_tokens=5, seed=1), url="/v1/chat/completions", messages=(USER,)
    )
    thinking = codec.thinking(job, codec.prompt_of(job).last_marker)
    assert thinking is not None
    assert not thinking.is_open
    plain = tekken([*CONTROLS[:-2], "<SPECIAL_20>", "<SPECIAL_21>"])
    (folder / TEKKEN_FILE).write_text(json.dumps(plain))
    assert TextCodec(locate_model(str(folder))).markers is None


def test_inspect_says_that_there_are_chats(folder: Path) -> None:
    assert inspect_model(str(folder)).has_chat_template


TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}},)
CALLED = Message.model_validate(
    {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "function": {"name": "f", "arguments": {"b": 1, "a": 2}}}]}
)


def test_tools_and_calls_are_written_by_the_library_and_its_calls_are_read(codec: TextCodec) -> None:
    answer = Message(role="tool", content="42", tool_call_id="abcdefghi")
    options = TemplateOptions(tools=TOOLS)
    found = codec.chat._tokenizer.decode(codec.encode_one(Chat([USER, CALLED, answer], options)).token_ids)
    assert '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "f"' in found
    assert '{"b": 1, "a": 2}' in found
    assert "42" in found
    assert codec.call_form is not None
    assert codec.call_form.family == "Mistral, until 2024"
    [mark] = codec.encode("[TOOL_CALLS]", add_special_tokens=False)
    tokens = [mark, *codec.encode("[the", add_special_tokens=False)]
    assert codec.marked_text.decode(tokens) == "[TOOL_CALLS][the"
    assert codec.decode(tokens) == "[the"
    with pytest.raises(ValueError, match="tokenizer is not supported"):
        codec.rules(SamplingParams(max_tokens=5, seed=1), None, options.model_copy(update={"must_call": True}))
