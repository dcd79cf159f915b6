from __future__ import annotations

import json
from pathlib import Path

from swiftbatch.scheduler.commands import quantize
from swiftbatch.worker.quantizing import FORMATS
from tests.scheduler.commands.command_parts import invoke, refusal


def test_a_model_is_quantized_scored_and_shown_by_inspect(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    output = str(tmp_path / "made" / "int4")
    words = ("--format", "int4", "--output", output, "--text", str(tmp_path / "text.txt"))
    ran = invoke("quantize", str(tiny_model), *words)
    assert ran.exit_code == 0, ran.output
    lines = ran.stdout.splitlines()
    assert lines[0].startswith("14 matrices in int4; weights: ")
    assert lines[1] == f"wrote {output}; use it with --model {output}"
    assert lines[2].startswith("nats per token: ")
    shown = invoke("inspect", output)
    assert shown.exit_code == 0
    assert "int4, " in shown.output
    assert " bytes; runs dequantized, in bfloat16 or float32" in shown.output
    assert json.loads(invoke("inspect", output, "--json").stdout)["quantization"] == "int4"
    assert "found something there already" in refusal("quantize", str(tiny_model), *words)


def test_a_text_that_is_none_is_refused_before_anything_is_written(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\x00")
    words = ("--format", "fp8", "--output", str(tmp_path / "made"), "--text", str(tmp_path / "text.txt"))
    assert "text.txt: expected UTF-8" in refusal("quantize", str(tiny_model), *words)
    (tmp_path / "text.txt").write_text("")
    assert "tokens; expected two or more" in refusal("quantize", str(tiny_model), *words)
    assert not (tmp_path / "made").exists()


def test_the_command_offers_the_formats_that_there_are() -> None:
    assert quantize.FORMATS == FORMATS
