"""Prompts of a batch are measured."""

from __future__ import annotations

from pathlib import Path

from bench import prompts


def test_prompts_are_read_beside_decoding_and_engines_draw_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the lazy fox jumps over the dog. " * 80)
    sizes = {"prompt": 70, "num_tokens": 6, "slots": 2, "num_jobs": 5}
    found = list(prompts.run(prompts.Options(model=str(tiny_model), text=text, num_threads=1, **sizes)))
    assert [(each["engine"], each["prompt"]) for each in found] == [
        (engine, length) for engine in ("autoregressive", "auto") for length in (prompts.SHORT, 70)
    ]
    assert found[0]["tokens_sha256"] == found[2]["tokens_sha256"]
    assert found[1]["tokens_sha256"] == found[3]["tokens_sha256"]
    assert all(0 < each["share_of_steps"] < 1 for each in found)
