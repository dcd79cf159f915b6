from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import (
    BenchEngine,
    BenchError,
    Contestant,
    DecodeBenchOptions,
    read_text,
    read_tokens,
    render,
    run_decode_bench,
)
from swiftbatch.worker.drafters.catalogue import create_drafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.sequence import Sequence
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.session.recurrent_parts import save_recurrent_model

ENGINES = ("autoregressive", "suffix", "token-recycling")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"the lazy fox number {n} jumps"}) + "\n" for n in range(40)))
    return path


def make_options(tiny_model: Path, **changes: object) -> DecodeBenchOptions:
    fields = {"model": str(tiny_model), "engines": ENGINES, "positions": (100, 40), "num_tokens": 30}
    sampling = {"temperature": 0.0, "min_p": 0.1, "repetition_penalty": 1.0, "seed": 0}
    return DecodeBenchOptions.model_validate(fields | sampling | changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_engines_say_the_same_tokens_at_every_position(tiny_model: Path, text: Path, temperature: float) -> None:
    records = run_decode_bench(make_options(tiny_model, text=text, temperature=temperature))
    assert [(record["position"], record["engine"]) for record in records] == [
        (p, e) for p in (40, 100) for e in ENGINES
    ]
    for position in (40, 100):
        same = [record for record in records if record["position"] == position]
        assert len({record["tokens_sha256"] for record in same}) == 1
        assert all(record["num_tokens"] == 30 and record["ms_per_token"] > 0 for record in same)
        assert same[0]["speedup"] == 1.0
        assert same[0]["num_steps"] == 30
    assert len({record["tokens_sha256"] for record in records}) == 2


def test_engines_say_the_same_tokens_on_a_model_whose_layers_have_states(text: Path, tmp_path: Path) -> None:
    options = make_options(save_recurrent_model(tmp_path / "hybrid"), text=text, engines=("autoregressive", "auto"))
    records = run_decode_bench(options)
    assert [record["position"] for record in records] == [40, 40, 100, 100]
    assert len({record["tokens_sha256"] for record in records}) == 2
    for plain, drafted in zip(records[::2], records[1::2], strict=True):
        assert plain["tokens_sha256"] == drafted["tokens_sha256"]


@pytest.mark.parametrize("engine", ["tokenswift", "tokenswift-paper", "triforce", "griffin"])
def test_engines_with_trained_parts_say_the_same_tokens(engine: str, tiny_model: Path, text: Path) -> None:
    options = make_options(tiny_model, text=text, engines=("autoregressive", engine), positions=(40,), num_tokens=10)
    plain, drafted = run_decode_bench(options)
    assert plain["tokens_sha256"] == drafted["tokens_sha256"]


def test_a_contestant_goes_on_from_its_own_cache_whatever_the_others_left(tiny_model: Path) -> None:
    target = TargetModel.load(locate_model(str(tiny_model)), "bfloat16", "cpu")
    text = list(range(5, 45))
    generated = []
    for left_behind in (None, 9.0):
        cache = target.new_cache(100)
        read_tokens(target, cache, text, [])
        sampling = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
        sequence = Sequence("a", text, sampling, target.vocab_size)
        engine = BenchEngine(target, create_drafter("suffix", target, free_rows))
        contestant = Contestant("suffix", engine, [sequence], [cache])
        for num_tokens in (15, 40):
            contestant.generate_to(num_tokens)
            if left_behind is not None:
                for index in range(target.cache_shape.num_layers):
                    for part in cache.layer(index):
                        part[:, len(text) - 1 :] = left_behind
        assert engine.counters.num_steps == sum(num_steps for _, num_steps in contestant.rounds)
        generated.append(contestant.token_ids().tolist())
    assert generated[0] == generated[1]


def test_counts_agree_with_each_other(tiny_model: Path, text: Path) -> None:
    for record in run_decode_bench(make_options(tiny_model, text=text)):
        assert record["num_steps"] + record["num_accepted_tokens"] == record["num_tokens"]
        assert record["num_accepted_tokens"] <= record["num_draft_tokens"]
        expected = 1 + record["num_accepted_tokens"] / record["num_drafts"] if record["num_drafts"] else 1
        assert record["mean_acceptance_length"] == pytest.approx(expected)


def test_the_file_holds_results_and_how_they_were_measured(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = make_options(tiny_model, text=text, json_path=path, dtype="float32", against="transformers")
    records = run_decode_bench(options)
    document = json.loads(path.read_text())
    assert document["results"] == records
    assert document["settings"]["num_warmup_tokens"] > 0
    assert [record["engine"] for record in records[: len(ENGINES) + 1]] == [*ENGINES, "transformers"]
    assert records[len(ENGINES)]["tokens_sha256"] == records[0]["tokens_sha256"]  # greedy float32 has no ties here
    console = Console(width=200, record=True)
    console.print(render(records))
    assert "token-recycling" in console.export_text()


def test_without_a_text_the_model_goes_on_by_itself_and_keeps_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = run_decode_bench(make_options(tiny_model, engines=("suffix",), positions=(400,)))
    kept = list((tmp_path / "swiftbatch" / "bench").iterdir())
    assert len(kept) == 1
    before = kept[0].stat().st_mtime_ns
    again = run_decode_bench(make_options(tiny_model, engines=("suffix",), positions=(400,)))
    assert kept[0].stat().st_mtime_ns == before
    assert again[0]["tokens_sha256"] == first[0]["tokens_sha256"]
    assert first[0]["speedup"] is None


def test_a_text_that_is_too_short_is_refused(tiny_model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match=r"text\.jsonl: it has \d+ tokens, the highest position needs 3000"):
        run_decode_bench(make_options(tiny_model, text=text, positions=(3000,)))


def test_a_position_beyond_the_model_is_refused(tiny_model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match="has 4096 positions"):
        run_decode_bench(make_options(tiny_model, text=text, positions=(4090,)))


@pytest.mark.parametrize(("line", "number"), [("{", 2), ('{"body": 1}', 2), ('{"text": 5}', 2), ("[1]", 2)])
def test_a_bad_text_line_is_named(tmp_path: Path, line: str, number: int) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(BenchError, match=rf"bad\.jsonl, line {number}: expected a JSON object"):
        read_text(path)


def test_a_missing_text_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"none\.txt: cannot be read"):
        read_text(tmp_path / "none.txt")
    with pytest.raises(BenchError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engines": ("medusa",)}, "expected some of: auto, autoregressive"),
        ({"engines": ()}, "got none"),
        ({"positions": ()}, "at least one position"),
        ({"positions": (0,)}, "each 1 or more"),
        ({"against": "transformers", "temperature": 1.0}, "only greedy decoding"),
        ({"temperature": float("nan")}, "finite"),
    ],
)
def test_options_that_make_no_sense_are_refused(tiny_model: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_options(tiny_model, **changes)
