"""Other programs stand beside swiftbatch in one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from bench import peers
from bench.__main__ import main
from bench.tables import Record
from tests.worker.model.gguf.tiny_gguf import write_tiny

SAID = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
"""
FAILS = "import sys\nprint('no such model', file=sys.stderr)\nsys.exit(3)"
ROW = "|{0} |      4 |    {1} |   576 |    2.000 |   {2}.00 |    8.000 |     {3}.00 |   10.000 |    57.60 |\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(peers, "SHORT", 16)
    monkeypatch.setattr(peers, "LONG", 32)
    return write_tiny("llama", tmp_path, torch.float32)[0]


def program(path: Path, code: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    path.chmod(0o755)
    return path


def llama(tmp_path: Path, name: str, speed: int) -> Path:
    """Print the table of `llama-batched-bench` for the prompts and numbers that were asked for."""
    rows = f"""
import sys
words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "--version" in sys.argv:
    print("version: 7 (abc)")
else:
    print({SAID!r})
    for number in words["-npl"].split(","):
        print({ROW!r}.format(words["-npp"], number, {speed} * 100, {speed} * int(number)), end="")
"""
    return program(tmp_path / name, rows)


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, ["peers", *map(str, args)])


def test_programs_take_turns_and_stand_in_one_table(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the lazy fox jumps over the dog. " * 40)
    given = ["--llama-cpp", llama(tmp_path, "one", 3), "--ik-llama-cpp", llama(tmp_path, "other", 5)]
    found = tmp_path / "peers.jsonl"
    sizes = ["--rounds", 2, "--tokens", 4, "--threads", 1, "--text", text, "--json", found]
    result = invoke("--model", model, *given, *sizes)
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in found.read_text().splitlines()]
    names = ["swiftbatch autoregressive", "swiftbatch auto", "llama-cpp", "ik-llama-cpp"]
    assert [each["program"] for each in records] == [*names, *names[1:], names[0]]
    assert [records[2][figure] for figure in peers.FIGURES] == [3, 3, 300, 24]
    assert records[2]["version"] == "7 (abc)"
    assert [line.split("  ")[0] for line in result.stdout.splitlines()[1:]] == names


def record(name: str, number: int, speed: float) -> Record:
    about = {"program": name, "round": number, "version": "1", "instructions": "avx2"}
    return about | dict.fromkeys(peers.FIGURES, speed)


def test_medians_of_rounds_are_compared() -> None:
    records = [record(peers.OURS, number, speed) for number, speed in enumerate((2.0, 90.0, 4.0))]
    records += [record("vllm", number, speed) for number, speed in enumerate((2.0, 1.0, 50.0))]
    ours, vllm = peers.shown(records, peers.Options(model="model.gguf"))
    assert (ours[peers.FIGURES[0]], vllm[peers.FIGURES[0]]) == (4.0, 2.0)
    assert (ours[f"ratio {peers.FIGURES[0]}"], vllm[f"ratio {peers.FIGURES[0]}"]) == (1.0, 0.5)


@pytest.mark.parametrize("option", ["--llama-cpp", "--ik-llama-cpp", "--vllm", "--openvino"])
def test_a_wrong_path_is_one_line(option: str, tmp_path: Path) -> None:
    result = invoke("--model", tmp_path / "model.gguf", option, tmp_path / "absent")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert f"{option} {tmp_path / 'absent'}: there is no such program" in result.stderr


def test_a_program_that_fails_or_is_another_one_is_one_line(tmp_path: Path) -> None:
    options = peers.Options(model="model.gguf")
    with pytest.raises(peers.BenchError, match="exit code 3: no such model"):
        peers._in_llama_cpp("--llama-cpp", program(tmp_path / "fails", FAILS), options)
    with pytest.raises(peers.BenchError, match="expected llama-batched-bench"):
        peers._in_llama_cpp("--llama-cpp", program(tmp_path / "other", "print('hello')"), options)
    strange = "import sys; sys.stdout.buffer.write(b'|1.2.3|' * 9 + bytes([255, 10]))"
    with pytest.raises(peers.BenchError, match="expected llama-batched-bench"):
        peers._in_llama_cpp("--llama-cpp", program(tmp_path / "strange", strange), options)


@pytest.mark.parametrize("written", [None, "{", "{}", "[]", '{"batches": []}', '{"batches": [{}]}'])
def test_a_library_that_writes_no_figures_is_one_line(written: str | None, tmp_path: Path) -> None:
    code = f"import json, sys\nfound = json.load(open(sys.argv[-1]))['found']\ntext = {written!r}\n"
    python = program(tmp_path / "python", code + "text is None or open(found, 'w').write(text)")
    with pytest.raises(peers.BenchError, match=f"--vllm {python}: expected a Python with this library"):
        peers.in_library("vllm", python, "model.gguf", {}, [[]], 1)


def test_a_program_that_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_SECONDS", 0.5)
    hangs = program(tmp_path / "hangs", "import time; time.sleep(600)")
    with pytest.raises(peers.BenchError, match=f"--llama-cpp {hangs}: it did not end within 0.5 s"):
        peers._in_llama_cpp("--llama-cpp", hangs, peers.Options(model="model.gguf"))


@pytest.mark.parametrize(
    ("bench", "given", "words"),
    [
        ("prompts", ("--slots", "0"), "greater than 0"),
        ("prompts", ("--engines", "foo"), "there is no engine 'foo'; known: "),
        ("auto", ("--engines", "foo"), "there is no engine 'foo'; known: "),
        ("peers", ("--rounds", "0"), "greater than 0"),
    ],
)
def test_options_that_no_bench_can_take_are_one_line(
    bench: str, given: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    result = CliRunner().invoke(main, [bench, "--text", str(tmp_path / "text"), *given])
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
