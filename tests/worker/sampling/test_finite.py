"""Logits that are not finite fail only the job that meets them."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import long
from bench.variants import BENCH_ENGINES, create_bench_drafter
from swiftbatch.jobs.errors import ModelError
from swiftbatch.jobs.sampling_params import SamplingParams
from swiftbatch.worker.decode_bench import BenchError, DecodeBenchOptions, run_decode_bench, text_tokens
from swiftbatch.worker.drafters.drafter_interface import AutoregressiveDrafter, Drafter, DraftRequest
from swiftbatch.worker.engine.engine import Engine
from swiftbatch.worker.forward.native_forwards import NativeForwards
from swiftbatch.worker.forward.target_model import TargetModel, check_model
from swiftbatch.worker.model import weight_files
from swiftbatch.worker.model.model_files import locate_model
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree
from swiftbatch.worker.sampling.sampler import NotFiniteError, check_finite
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.text.tokenizer import TextCodec
from tests.tiny_targets import target as target
from tests.worker.drafters.drafter_parts import free_rows
from tests.worker.session.session_parts import claimed, digest, make_run, record, run_to_end, to_the_end

NAN, INF = float("nan"), float("inf")
PROMPTS = {"a": [5, 6, 7, 8, 9], "b": [40, 41, 42, 43]}
NUM_TOKENS = 40


@contextlib.contextmanager
def spoilt(target: TargetModel, token_id: int | slice) -> Iterator[None]:
    """Make everything after some tokens NaN."""
    forwards = target.forwards
    is_native = isinstance(forwards, NativeForwards)
    table = forwards._decoder.embedding if is_native else target.model.get_input_embeddings().weight
    embedding = table[token_id]
    whole = embedding.clone()
    embedding.fill_(NAN)
    yield
    embedding.copy_(whole)


def decode(target: TargetModel, drafter: Drafter, temperature: float) -> dict[str, Sequence]:
    """Run `PROMPTS` in one batch to their ends."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=temperature, seed=3, ignore_eos=True)
    sequences = {name: Sequence(name, ids, params, target.vocab_size) for name, ids in PROMPTS.items()}
    engine = Engine(target, drafter)
    for sequence in sequences.values():
        engine.start(sequence)
    while engine.sequences:
        engine.step()
        for sequence in [s for s in engine.sequences if s.finish_reason is not None]:
            engine.stop(sequence)
    return sequences


@pytest.mark.parametrize(
    ("row", "found"),
    [([0.0, NAN, -1.0], "NaN"), ([0.0, INF, -1.0], "+inf"), ([INF, -INF, NAN], "NaN"), ([-INF, -INF], "-inf")],
)
def test_logits_that_nothing_can_be_drawn_from_are_named(row: list[float], found: str) -> None:
    with pytest.raises(NotFiniteError, match=rf"position 17 are not finite \({found.replace('+', '.')}"):
        check_finite(torch.tensor(row), 17)


def test_tokens_that_a_model_masks_itself_are_no_fault() -> None:
    check_finite(torch.tensor([-INF, 3.0, -INF]), 0)


@pytest.fixture(scope="module")
def clean(target: TargetModel) -> dict[float, dict[str, list[int]]]:
    """The undamaged outputs, by temperature and name."""
    return {
        temperature: {
            name: sequence.output_ids.tolist()
            for name, sequence in decode(target, AutoregressiveDrafter(), temperature).items()
        }
        for temperature in (0.0, 1.0)
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize(("engine_name", "temperature"), [("suffix", 0.0), *((name, 1.0) for name in BENCH_ENGINES)])
def test_every_engine_fails_the_same_job_at_the_same_position_and_no_other(
    target: TargetModel, clean: dict[float, dict[str, list[int]]], engine_name: str, temperature: float
) -> None:
    mine, other = clean[temperature]["a"], clean[temperature]["b"]
    index = next(i for i in range(10, NUM_TOKENS) if mine[i] not in {*other, *mine[:i], *PROMPTS["a"], *PROMPTS["b"]})
    with spoilt(target, mine[index]):
        sequences = decode(target, create_bench_drafter(engine_name, target, free_rows), temperature)
    position = len(PROMPTS["a"]) + index + 1
    assert f"logits for position {position} are not finite (NaN)" in (sequences["a"].error or "")
    assert sequences["a"].output_ids.tolist() == mine[: sequences["a"].num_generated_tokens]
    assert (sequences["b"].error, sequences["b"].output_ids.tolist()) == (None, other)


class Always(Drafter):
    needs_top_k = True

    def __init__(self, token_id: int, inner: Drafter) -> None:
        self._token_id, self._inner = token_id, inner
        self.start, self.stop, self.update, self.learn = inner.start, inner.stop, inner.update, inner.learn  # type: ignore[method-assign]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        inner = self._inner.propose([r._replace(max_nodes=max(0, r.max_nodes - 2)) for r in requests])
        return [self._extended(tree, r.max_depth) for tree, r in zip(inner, requests, strict=True)]

    def _extended(self, tree: DraftTree, max_depth: int) -> DraftTree:
        if max_depth < 1 or self._token_id in tree.token_ids:
            return tree
        return DraftTree([*tree.token_ids, self._token_id], [*tree.parents, ROOT])


def test_nan_in_rows_that_are_verified_and_not_walked_harms_no_job(
    target: TargetModel, clean: dict[float, dict[str, list[int]]]
) -> None:
    unused = next(iter(set(range(target.vocab_size)) - set(np.concatenate([*PROMPTS.values(), *clean[0.0].values()]))))
    with spoilt(target, unused):
        sequences = decode(target, Always(unused, create_bench_drafter("token-recycling", target, free_rows)), 0.0)
    assert {name: sequence.output_ids.tolist() for name, sequence in sequences.items()} == clean[0.0]


def test_a_worker_refuses_the_job_and_finishes_its_neighbour(tmp_path: Path, tiny_model: Path) -> None:
    run, fox, dog, again = make_run(tmp_path), record("fox", 30), record("dog", 30), record("again", 30, prompt="the")
    worker = run_to_end(run, tiny_model, dog, engine="autoregressive")
    undisturbed = digest(run, dog)
    codec = TextCodec(locate_model(str(tiny_model)))
    [first, *_] = set(codec.prompt_of(fox.job).token_ids) - set(codec.prompt_of(dog.job).token_ids)
    with spoilt(worker.engine.target, first):
        report = to_the_end(worker, claimed(run, fox), claimed(run, dog))
    [(job_id, code, message)] = [(each.job_id, each.error_code, each.reason) for each in report.of("refused")]
    assert (job_id, code) == (fox.job_id, "logits_not_finite")
    assert "are not finite (NaN)" in message
    assert (report.of("failed"), [outcome.job_id for outcome in report.of("finished")]) == ([], [dog.job_id])
    assert digest(run, dog) == undisturbed
    assert to_the_end(worker, claimed(run, again)).of("finished")  # the worker goes on


def test_a_model_that_gives_nan_behind_every_token_is_refused_in_one_line(target: TargetModel) -> None:
    check_model(target)
    with spoilt(target, 0):
        check_model(target)  # most jobs may run
    with (
        spoilt(target, slice(None)),
        pytest.raises(ModelError, match=r"^model .*: its logits are not finite, whichever token they follow"),
    ):
        check_model(target)


def damaged(model: Path, folder: Path, name: str, row: int | None = None) -> Path:
    """Put NaN in a tensor or a row of it."""
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][slice(None) if row is None else row] = NAN
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_whoever_loads_such_a_model_refuses_it(tiny_model: Path, tmp_path: Path) -> None:
    """Workers, `doctor`, benchmarks and trainings load it here."""
    files = locate_model(str(damaged(tiny_model, tmp_path / "damaged", "model.norm.weight")))
    with pytest.raises(ModelError, match=r"numbers in model.norm.weight that are not finite: it is damaged; [^\n]*$"):
        TargetModel.load(files, "bfloat16", "cpu")


def decode_bench(**shared: Any) -> None:
    run_decode_bench(
        DecodeBenchOptions(
            engines=("suffix",),
            positions=(40,),
            num_tokens=20,
            temperature=0.0,
            min_p=0.1,
            repetition_penalty=1.0,
            seed=0,
            **shared,
        )
    )


def long_bench(**shared: Any) -> None:
    asked = {"engine": "token-recycling", "num_tokens": 20, "prefill": 40, "every": 20, "plain_every": 20}
    list(long.run(long.Options(**asked, **shared)))


@pytest.mark.parametrize("benchmark", [decode_bench, long_bench])
def test_a_benchmark_that_meets_them_ends_in_one_line(
    tiny_model: Path, tmp_path: Path, benchmark: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "_refuse_endless", lambda *_: None)  # in place of weights that overflow later
    (tmp_path / "text.txt").write_text("the lazy fox jumps over the dog. " * 20)
    prompt_ids = text_tokens(tmp_path / "text.txt", locate_model(str(tiny_model)), 40)
    model = damaged(tiny_model, tmp_path / "damaged", "model.embed_tokens.weight", prompt_ids[-1])
    with pytest.raises(BenchError, match=r"^the model's logits for position 40 are not finite \(NaN\): [^\n]*$"):
        benchmark(model=str(model), text=tmp_path / "text.txt", num_threads=1)
