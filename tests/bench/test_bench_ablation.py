"""The ablations run and differ, and have the paper's rows and columns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.compared_caches import PARTIAL_CACHES
from bench.large_trees import LargeTrees, repeat_below
from bench.tables import Record
from bench.text_samples import loop_start, sampled_tokens
from bench.tokenswift_ablation import ABLATIONS, SETTINGS, Options, run, shown
from swiftbatch.worker.decode_bench import BenchError, encode
from swiftbatch.worker.drafters.tokenswift.decoding_heads import save_heads
from swiftbatch.worker.model.model_files import PARTS_FOLDER, locate_model
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

LENGTHS = [4000, 8000, 12_000, 16_000, 20_000]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16_384}))
    heads = torch.zeros(3, config["hidden_size"], config["hidden_size"])
    save_heads(folder / PARTS_FOLDER, heads, locate_model(str(folder)).fingerprint)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(800)))
    return path


def made_up(table: str) -> list[Record]:
    """Made-up records whose figures name their arm and length."""
    return [
        {"arm": arm.label or "m", "tokens": length, "speedup": number + index / 10, "alpha": number + index / 10 + 0.01}
        | {"beta": number + index / 10 + 0.02, "average": number, "prefill": arm.prefill}
        | {"minutes": index, "plain_minutes": 3 * index, "saved_minutes": 2 * index, "loop_start": None, "loop": None}
        | {f"distinct_{n}": number + n / 100 for n in range(1, 5)}
        for number, arm in enumerate(ABLATIONS[table].arms)
        for index, length in enumerate(LENGTHS)
    ]


def table_of(table: str) -> list[Record]:
    return list(shown(made_up(table), Options(table=table)))


@pytest.mark.parametrize("table", ABLATIONS)
def test_every_arm_is_a_generation_that_can_run(table: str) -> None:
    options = Options(table=table)
    for arm in ABLATIONS[table].arms:
        long = options.arm_options(arm)
        assert long.record_stops() == LENGTHS
        assert long.sampling.ignore_eos
        assert long.engine == ("triforce-paper" if arm.method == "triforce" else "tokenswift-paper")
        drafting, new_cache = options.drafting(arm)
        assert (drafting.rounds, drafting.cache) == (1, "importance")
        assert new_cache is (PARTIAL_CACHES[arm.options["cache"]] if table == "5" else None)
        assert options.model_copy(update={"engine": "tokenswift"}).drafting(arm)[0].rounds == 0
    labels = [(arm.label, arm.prefill) for arm in ABLATIONS[table].arms]
    assert len(set(labels)) == len(labels) > (0 if table == "4" else 1)


@pytest.mark.parametrize("table", ABLATIONS)
def test_arms_differ_in_what_the_table_is_about_and_in_nothing_else(table: str) -> None:
    options = Options(table=table)
    arms = ABLATIONS[table].arms
    about = {
        "3": {"prefill", "num_ngrams", "repetition_penalty", "engine"},
        "4": set(),
        "5": {"cache"},
        "6": {"min_p", "top_p", "eta", "repetition_penalty"},
        "7": {"tree", "num_first"},
        "8": {"repetition_penalty"},
        "12": {"min_p", "top_p", "eta"},
        "13": {"temperature"},
        "14": {"prefill", "budget"},
        "15": {"penalty_window"},
        "fig3": {"num_ngrams"},
        "fig4": {"num_ngrams"},
        "fig5": {"repetition_penalty"},
    }
    everything = [
        dict(options.drafting(arm)[0])
        | {"cache": arm.options.get("cache")}
        | options.arm_options(arm).sampling.model_dump()
        | {"prefill": options.arm_options(arm).prefill, "engine": options.engine_of(arm), "num_first": arm.num_first}
        for arm in arms
    ]
    assert {name for name in everything[0] if len({str(arm[name]) for arm in everything}) > 1} == about[table]
    without_reuse = {arm["num_ngrams"] == 0 for arm in everything}
    if "num_ngrams" not in about[table]:
        assert without_reuse == {table in ("5", "7", "12", "14")}


def test_rows_are_lengths_and_columns_arms() -> None:
    [title, first, *_, last] = table_of("5")
    assert title["words"].startswith("Table 5")
    assert first | {"tokens": 4000, "full cache alpha": 0.01, "dynamic partial alpha": 2.01} == first
    assert last | {"tokens": 20_000, "full cache speedup": 0.4, "summary (ours) alpha": pytest.approx(3.41)} == last


def test_table_3_has_a_row_of_every_length_and_method_and_columns_of_prefills() -> None:
    [title, first, *_, last] = table_of("3")
    assert title["words"].startswith("Table 3")
    assert (first["tokens"], first["arm"], last["tokens"], last["arm"]) == (4000, "Medusa*", 20_000, "TokenSwift")
    assert last | {"2048 speedup": 2.4, "4096 speedup": 5.4, "8192 speedup": 8.4} == last
    without = [arm.label for arm in Options(table="3").arms()]
    assert without == ["TriForce*", "TokenSwift"] * 3
    assert [arm.label for arm in Options(table="3", medusa=Path("heads")).arms()][:1] == ["Medusa*"]


def test_table_4_has_the_minutes_of_every_model() -> None:
    last = table_of("4")[-1]
    assert last | {"tokens": 20_000, "m plain_minutes": 12, "m minutes": 4, "m saved_minutes": 8} == last


def test_every_first_token_has_the_whole_tree_below_it() -> None:
    tree = DraftTree([7, 1, 2, 3], [ROOT, 0, 0, 1])
    repeat_below(tree, [8, 9])
    assert tree.token_ids == [7, 1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3]
    assert tree.parents == [ROOT, 0, 0, 1, ROOT, 4, 4, 5, ROOT, 8, 8, 9]


def test_settings_are_those_of_table_10() -> None:
    [arm] = ABLATIONS["4"].arms
    found = {name: Options(table="4", setting=name).arm_options(arm).sampling for name in SETTINGS}
    assert {name: (each.min_p, each.top_p, each.repetition_penalty) for name, each in found.items()} == {
        "llama3.1-8b": (0.1, 1.0, 1.2),
        "yarn-llama2-7b": (0.0, 0.9, 1.15),
        "qwen2.5-1.5b": (0.0, 0.9, 1.15),
        "qwen2.5-7b": (0.05, 1.0, 1.15),
        "qwen2.5-14b": (0.05, 1.0, 1.13),
    }
    assert {(each.temperature, each.penalty_window) for each in found.values()} == {(1.0, 1024)}
    with pytest.raises(BenchError, match=r"got gpt; expected one of: llama3.1-8b"):
        Options(table="4", setting="gpt").arm_options(arm)


def test_a_loop_begins_where_its_passage_first_stands() -> None:
    random = np.random.default_rng(0)
    before, passage = random.integers(0, 1000, 300), random.integers(0, 1000, 40)
    assert loop_start(before) is None
    assert loop_start(np.concatenate([before, passage, passage])) is None
    assert loop_start(np.concatenate([before, passage, passage, passage, before])) == 300
    assert loop_start(np.concatenate([before, [7] * 63])) is None
    assert loop_start(np.concatenate([before, [7] * 64])) == 300


def test_prompts_begin_anywhere_in_a_text(tiny_model: Path, text: Path) -> None:
    files = locate_model(str(tiny_model))
    ids = encode(files, text.read_text())
    found = [sampled_tokens(text, files, 50, seed) for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
    places = [next(i for i in range(len(ids)) if ids[i : i + 50] == each) for each in found]
    assert min(places) > 0
    with pytest.raises(BenchError, match="the highest position needs"):
        sampled_tokens(text, files, len(ids) + 1, 0)


def test_rows_are_arms_and_columns_lengths() -> None:
    rows = {row["arm"]: row for row in table_of("15") if "4000 alpha" in row}
    assert rows["W 50"] | {"4000 alpha": 1.01, "20000 speedup": 1.4} == rows["W 50"]
    assert len(rows) == 7
    assert {row["words"] for row in table_of("15") if "words" in row} == {
        *("Table 15: penalty window", "Table 16: penalty window and diversity")
    }


def test_diversity_is_shown_at_the_end_with_its_average() -> None:
    rows = {row["arm"]: row for row in table_of("6") if "arm" in row}
    expected = {"tokens": 20_000, "distinct_1": 1.01, "average": 1, "speedup": 1.4}
    assert rows["top-p 0.9 w/o penalty"] | expected == rows["top-p 0.9 w/o penalty"]


@pytest.mark.slow
@pytest.mark.long
def test_an_ablation_runs_all_arms_on_the_same_text(model: Path, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    options = ["--table", "fig3", "--model", str(model), "--tokens", "320", "--text", str(text), "--json", str(path)]
    result = CliRunner().invoke(main, ["papers", "tokenswift", *options])
    assert result.exit_code == 0, result.output
    assert "Figure 3" in result.output
    about, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert about["paper"] == "tokenswift"
    assert [record["arm"] for record in records] == ["k = 20"] * 5 + ["k = 0"] * 5
    assert len({record["tokens_sha256"] for record in (records[4], records[9])}) == 1
    assert all(record["same_tokens"] for record in records)
    assert records[9]["beta"] == 0.0


@pytest.mark.slow
@pytest.mark.long
def test_table_3_runs_every_method_after_every_prefill(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = [replace(arm, prefill=arm.prefill // 8) for arm in ABLATIONS["3"].arms]
    monkeypatch.setitem(ABLATIONS, "3", replace(ABLATIONS["3"], arms=tuple(arms)))
    size = json.loads((model / "config.json").read_text())["hidden_size"]
    save_heads(tmp_path, torch.zeros(3, size, size), locate_model(str(model)).fingerprint, kind="medusa")
    options = Options(table="3", model=str(model), num_tokens=320, text=text, medusa=tmp_path)
    records = list(run(options))
    assert [(each["arm"], each["prefill"], each["engine"]) for each in records[::5]] == [
        (arm.label, arm.prefill, "triforce-paper" if arm.label == "TriForce*" else "tokenswift-paper") for arm in arms
    ]
    assert len(list(shown(records, options))) == 1 + 5 * 3


@pytest.mark.slow
@pytest.mark.long
def test_table_4_has_a_column_of_every_model(model: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "other")
    models = f"{model},{tmp_path / 'other'}"
    records = list(run(Options(table="4", model=models, num_tokens=320, text=text)))
    assert [record["arm"] for record in records] == ["model"] * 5 + ["other"] * 5
    for record in records:
        assert record["plain_minutes"] - record["minutes"] == pytest.approx(record["saved_minutes"])


@pytest.mark.slow
@pytest.mark.long
def test_trees_of_table_7_are_verified_whole(model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    update = LargeTrees.update

    def counted(self: LargeTrees, sequence: Sequence, verification: Verification) -> None:
        sizes.append(len(verification.tree))
        update(self, sequence, verification)

    monkeypatch.setattr(LargeTrees, "update", counted)
    records = list(run(Options(table="7", model=str(model), num_tokens=320, text=text)))
    assert {120, 820} <= set(sizes)  # the engine itself drafts the third tree
    assert len({records[last]["tokens_sha256"] for last in (4, 9, 14)}) == 1
    assert all(record["same_tokens"] for record in records)


@pytest.mark.slow
@pytest.mark.long
def test_a_case_study_has_the_text_and_where_it_begins_to_repeat_itself(model: Path, text: Path) -> None:
    records = list(run(Options(table="fig5", model=str(model), num_tokens=320, text=text)))
    assert [record["arm"] for record in records if "text" in record] == ["w/o penalty", "with penalty"]
    for record in (each for each in records if "text" in each):
        assert record["text"]
        assert (record["loop"] is None) == (record["loop_start"] is None)
    rows = [row for row in shown(records, Options(table="fig5")) if "arm" in row]
    assert [row["loop_start"] for row in rows] == [records[4]["loop_start"], records[9]["loop_start"]]


def test_an_ablation_beyond_the_model_is_refused_before_any_arm_runs(model: Path, text: Path) -> None:
    with pytest.raises(BenchError, match=r"17192 \+ 0 tokens"):
        next(run(Options(table="14", model=str(model), num_tokens=9000, text=text)))


def test_an_unknown_table_names_the_known_ones() -> None:
    result = CliRunner().invoke(main, ["papers", "tokenswift", "--table", "9"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "fig3" in result.stderr
