from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bench import griffin_ablation
from bench.__main__ import main
from bench.griffin_ablation import OPTIONS, Options, run, shown
from bench.griffin_tables import GRIFFIN_TABLES, TEMPERATURES
from bench.tasks import OWN_TASKS, read_tasks
from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.decode_bench import BenchError, encode, read_text
from swiftbatch.worker.drafters.engine_options import GRIFFIN_PAPER, GriffinOptions
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.training.recipes import GriffinRecipe, HeadRecipe
from tests.bench.test_prompt_arms import Vandal

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]

PREFILL, NUM_TOKENS = 70, 12
SENTENCE = "the quick brown fox jumps over the lazy dog. "
TEXTS = HeadRecipe(num_book_tokens=120, num_prompt_tokens=16, num_own_tokens=60)
FAST = GriffinRecipe(num_step_windows=2, window_length=64, num_warmup_steps=1, texts=TEXTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("griffin")
    (path / "books").mkdir()
    for name in ("train.jsonl", "test.jsonl"):
        (path / "books" / name).write_text(json.dumps({"text": SENTENCE * 20}) + "\n", encoding="utf-8")
    (path / "text.txt").write_text("".join(f"the lazy fox number {n} jumps over the dog. " for n in range(40)))
    return path


@pytest.fixture
def make_options(folder: Path, tiny_model: Path) -> Callable[..., Options]:
    def make(**fields: Any) -> Options:
        shared = {
            "model": str(tiny_model),
            "data": folder / "books",
            "work": folder / "work",
            "text": folder / "text.txt",
            "prefill": PREFILL,
            "num_tokens": NUM_TOKENS,
            "num_steps": 2,
            "num_own_texts": 2,
            "num_prompts": 2,
            "seed": 0,
        }
        return Options.model_validate(shared | fields)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "table", [pytest.param(table, marks=[] if table == "5" else [pytest.mark.slow]) for table in "2345678"]
)
def test_a_table_has_a_record_of_every_arm_and_all_say_the_same(
    table: str, make_options: Callable[..., Options]
) -> None:
    arms = [record for record in run(make_options(table=table, num_prompts=1), FAST) if "tree" in record]
    found = {(arm["row"], arm["temperature"], arm["tree"]) for arm in arms}
    assert found == {
        (row, t, plan) for row in GRIFFIN_TABLES[table].rows for t in TEMPERATURES for plan in ("own", "paper")
    }
    for t in TEMPERATURES:
        assert len({arm["tokens_sha256"] for arm in arms if arm["temperature"] == t}) == 1


def test_plans_are_what_pays_and_the_paper_s_trees() -> None:
    assert OPTIONS["own"] == GriffinOptions() != GRIFFIN_PAPER == OPTIONS["paper"]
    chain = OPTIONS["chain"]
    assert (chain.max_depth, chain.max_nodes, chain.breadth, chain.at_every_step) == (2, 2, 1, True)


@pytest.mark.slow
def test_trainings_are_shared_by_tables_and_used_again(
    make_options: Callable[..., Options], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    list(run(make_options(table="1c"), FAST))
    weights = {path: path.stat().st_mtime_ns for path in (folder / "work").glob("*/*.safetensors")}
    list(run(make_options(table="5", num_prompts=1), FAST))
    assert "nothing to do" in capsys.readouterr().err
    after = {path: path.stat().st_mtime_ns for path in (folder / "work").glob("*/*.safetensors")}
    assert weights.items() <= after.items()
    trained = {path.parent.name for path in after}
    assert trained >= {"eagle-2-0", "hass-0", "griffin-0", "fusion-feature-0", "fusion-fused-0"}
    assert len(list((folder / "work").glob("features/*.arrow"))) == 3


def test_another_recipe_in_the_same_folder_is_refused(make_options: Callable[..., Options]) -> None:
    list(run(make_options(table="1c"), FAST))
    with pytest.raises(ModelError, match="num_steps") as caught:
        list(run(make_options(table="1c", num_steps=3), FAST))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_figure_1c_has_the_misaligned_rates_of_the_trainings_logs(
    make_options: Callable[..., Options], folder: Path
) -> None:
    records = list(run(make_options(table="1c", text=None), FAST))
    for name, row in (("eagle-2", "EAGLE-2"), ("hass", "HASS"), ("griffin", "GRIFFIN")):
        log = (folder / "work" / f"{name}-0" / "griffin_log.jsonl").read_text().splitlines()
        for logged in (record for record in map(json.loads, log) if record.get("when") == "after"):
            for way, rates in logged["misaligned"].items():
                places = (row, way, logged["texts"])
                [found] = [each for each in records if (each["row"], each["drawn_at"], each["texts"]) == places]
                assert [found[f"n={n}"] for n in range(1, 7)] == rates


@pytest.mark.slow
def test_the_order_has_arms_of_all_seeds(make_options: Callable[..., Options]) -> None:
    records = list(run(make_options(table="order", num_seeds=2, seed=3, num_prompts=1), FAST))
    arms = [record for record in records if "tree" in record]
    assert {(arm["seed"], arm["tree"]) for arm in arms} == {(3, "paper"), (4, "paper")}
    assert len(arms) == 5 * 2 * len(TEMPERATURES)


@pytest.mark.slow
def test_figure_1b_compares_methods_by_their_steps(make_options: Callable[..., Options]) -> None:
    options = make_options(table="1b", num_prompts=1)
    records = [record for record in run(options, FAST) if "tree" in record]
    assert [(each["row"], each["temperature"]) for each in records] == [
        (row, t) for row in GRIFFIN_TABLES["1b"].rows for t in TEMPERATURES
    ]
    assert len([row for row in shown(records, options) if "N" in row]) == 5


@pytest.mark.slow
def test_table_1_has_every_category_and_needs_no_training(make_options: Callable[..., Options]) -> None:
    options = make_options(table="1", num_prompts=1, data=None, work=None, text=None)
    records = list(run(options, FAST))
    assert {each["row"] for each in records} == {"PLD", "GRIFFIN"}
    assert {each["prompts"] for each in records} == {task.category for task in read_tasks(OWN_TASKS)}
    for each in records:
        alike = [other["tokens_sha256"] for other in records if other["prompts"] == each["prompts"]
                 and other["temperature"] == each["temperature"]]  # fmt: skip
        assert len(set(alike)) == 1
    trained = list(run(make_options(table="1", num_prompts=1, text=None), FAST))
    assert {each["row"] for each in trained if "tree" in each} == {"PLD", "EAGLE-2", "HASS", "GRIFFIN"}


@pytest.mark.slow
def test_table_9_drafts_chains_of_two_for_every_batch(make_options: Callable[..., Options]) -> None:
    records = list(run(make_options(table="9", batches=(1, 3), data=None, work=None), FAST))
    assert [(each["row"], each["prompts"], each["tree"]) for each in records] == [
        ("GRIFFIN", "1", "chain"), ("GRIFFIN", "3", "chain")
    ]  # fmt: skip
    assert records[1]["num_tokens"] > 2 * records[0]["num_tokens"]
    for each, size in zip(records, (1, 3), strict=True):
        assert 0 < each["nodes_per_step"] <= 2 * size
        assert each["levels_per_step"] <= 2 * size


def test_a_wrong_token_stops_the_bench_in_one_line(
    make_options: Callable[..., Options], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(griffin_ablation, "griffin", lambda *parts: Vandal())
    with pytest.raises(BenchError, match=r"token \d+ at T = 0: found \d+, expected \d+") as caught:
        list(run(make_options(table="5", num_tokens=30), FAST))
    assert "\n" not in str(caught.value)


def test_prompts_are_stretches_from_all_over_the_text(make_options: Callable[..., Options], tiny_model: Path) -> None:
    files = locate_model(str(tiny_model))
    options = make_options(table="2", num_prompts=3)
    ids = encode(files, read_text(options.text))
    prompts = griffin_ablation._prompts(options, GRIFFIN_TABLES["2"], files)
    third = len(ids) // 3
    assert [prompt.token_ids for [prompt] in prompts[""]] == [ids[i * third : i * third + PREFILL] for i in range(3)]


def test_rows_that_are_trained_need_books_and_a_folder(make_options: Callable[..., Options]) -> None:
    for fields in ({"table": "2", "data": None}, {"table": "1", "work": None}):
        with pytest.raises(BenchError, match="--data --work"):
            list(run(make_options(**fields), FAST))


def bench(folder: Path, model: Path, *args: str) -> Result:
    shared = ["--model", str(model), "--data", str(folder / "books"), "--threads", "1", "--work", str(folder / "cli")]
    return CliRunner().invoke(main, ["papers", "griffin", *shared, *args])


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--table", "2"], "--text FILE"),
        (["--table", "1", "--tasks", "EMPTY"], "cannot be read"),
        (["--table", "11"], "order"),
        (["--table", "2", "--text", "TEXT", "--prefill", "4000"], "4000 + 256 tokens"),
        (["--table", "2", "--text", "TEXT", "--prompts", "9", "--prefill", "200"], "9 prompts of 200 need 1800"),
        (["--table", "1c", "--data", "EMPTY"], "*test*.jsonl"),
        (["--table", "5", "--text", "TEXT", "--prefill", "70", "--data", "EMPTY"], "*train*.jsonl"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    args: list[str], says: str, tiny_model: Path, folder: Path, tmp_path: Path
) -> None:
    places = {"TEXT": str(folder / "text.txt"), "EMPTY": str(tmp_path)}
    result = bench(folder, tiny_model, *(places.get(arg, arg) for arg in args))
    assert result.exit_code == 2, result.output
    assert says in result.stderr.splitlines()[-1]
    assert not (folder / "cli").exists() or not list((folder / "cli").glob("*/*.safetensors"))
