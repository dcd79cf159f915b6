"""The real `openai` client gets calls of tools, and gives them back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.serve.server_parts import serving

pytestmark = pytest.mark.ray

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "pattern": "^[a-z]{3,9}$"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA | {"additionalProperties": False}}}
ASKED = {"role": "user", "content": "the quick brown fox"}


def test_calls_come_in_the_client_s_form_and_are_taken_in_the_next_turn(tmp_path: Path, tiny_model: Path) -> None:
    from openai.types.chat import ChatCompletion

    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    named = {"type": "function", "function": {"name": "weather"}}
    with serving(tmp_path / "runs", model) as server:

        def answers(*messages: Any, **fields: Any) -> ChatCompletion:
            body = {"model": "m", "messages": [ASKED, *messages], "max_tokens": 200, "tools": [WEATHER]} | fields
            line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
            client = server.client
            batch = client.batches.create(
                input_file_id=server.upload(line), endpoint="/v1/chat/completions", completion_window="24h"
            )
            [result] = server.lines(server.ended(batch.id).output_file_id)
            return ChatCompletion.model_validate(result["response"]["body"], strict=True)

        [choice] = answers(tool_choice=named).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert call.type == "function"
        assert call.function.name == "weather"
        assert 3 <= len(json.loads(call.function.arguments)["city"]) <= 9
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        [after] = answers(choice.message.to_dict(), result, max_tokens=20, ignore_eos=True).choices
        assert after.finish_reason == "length"
        assert after.message.tool_calls is None
        assert after.message.content
