"""Books and chats as training data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.text.tokenizer import TextCodec
from swiftbatch.worker.training.corpus import CorpusError, encoded_records, read_books
from swiftbatch.worker.training.feature_files import TextSource
from swiftbatch.worker.training.recipes import TextRecipe
from swiftbatch.worker.training.training_texts import hidden_states, load_target

TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message['role'] not in ('user', 'assistant') %}
{{ raise_exception('no ' + message['role']) }}{% endif %}
[{{ message['role'] }}] {{ message['content'] }}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"""
SAID = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]
SHARE_GPT = [{"from": "human", "value": "the quick"}, {"from": "gpt", "value": "brown fox"}]
REFUSED = [{"role": "tool", "content": "lazy dog"}]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return folder


def written(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    return folder


def encoded(model: Path, data: Path, said: list[str], num_tokens: int = 1000) -> list[list[int]]:
    codec = TextCodec(locate_model(str(model)))
    return list(encoded_records(data, "*train*.jsonl", codec, num_tokens, said.append))


def decoded(codec: TextCodec, token_ids: list[int]) -> str:
    return codec.output_text.decode(token_ids)


def test_chats_of_both_forms_are_rendered_whole_and_stand_among_books(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = written(tmp_path / "data", {"messages": SAID}, {"text": "over the lazy dog"}, {"conversations": SHARE_GPT})
    codec = TextCodec(locate_model(str(model)))
    first, book, second = encoded(model, data, said)
    assert decoded(codec, first).split("\n") == ["[user] the quick", "[assistant] brown fox", ""]
    assert book == codec.encode("over the lazy dog")
    assert decoded(codec, second).split("\n") == ["[user] the quick", "[assistant] brown fox", ""]
    assert encoded(model, data, said, 5) == [first[:5], book[:5], second[:5]]
    assert said == []


def test_chats_that_the_template_refuses_are_left_out_and_counted(model: Path, tmp_path: Path) -> None:
    said: list[str] = []
    data = written(tmp_path / "data", {"messages": REFUSED}, {"messages": SAID}, {"messages": REFUSED})
    assert len(encoded(model, data, said)) == 1
    [line] = said
    assert line.startswith(f"2 of 3 records are left out, first {data / 'train.jsonl'}, line 1: messages: ")
    assert "no tool" in line
    with pytest.raises(CorpusError, match=r"line 1: messages: .*no tool.*; no other chat in .* is better"):
        encoded(model, written(data, {"messages": REFUSED}), said)


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({"prompt": "x"}, "expected a JSON object with `text`, or a chat's `messages` or `conversations`"),
        ({"messages": "x"}, "field 'messages': found \"x\", expected a list of messages"),
        ({"messages": []}, "field 'messages': found .*, expected at least 1 item"),
        ({"conversations": [{"from": "gpt"}]}, r"field 'messages\[0\].content': found nothing, expected a value"),
        ({"messages": [{"role": "user", "content": 3}]}, r"field 'messages\[0\].content': found 3, expected"),
        ({"text": 3}, "text: found int, expected a string"),
    ],
)
def test_what_is_no_text_and_no_chat_is_named(
    model: Path, tmp_path: Path, record: dict[str, Any], problem: str
) -> None:
    data = written(tmp_path / "data", {"text": "the quick"}, record)
    with pytest.raises(CorpusError, match=f"train.jsonl, line 2.*{problem}") as caught:
        encoded(model, data, [])
    assert "\n" not in str(caught.value)


def test_a_target_is_trained_on_books_alone(tmp_path: Path) -> None:
    data = written(tmp_path / "data", {"text": "the quick"}, {"messages": SAID})
    with pytest.raises(CorpusError, match=r"line 2: found a chat, expected `text`"):
        list(read_books(data))


def test_all_tokens_of_a_chat_have_features_and_count(model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "data", {"messages": SAID * 3})
    target = load_target(locate_model(str(model)))
    [text] = TextSource(target, data, tmp_path / "features", TextRecipe(), 5, lambda line: None).books()
    assert text.first_row == 0
    assert text.features.equal(hidden_states(target, text.token_ids.tolist()))
