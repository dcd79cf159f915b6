"""Two processes with gloo train as one does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swiftbatch.worker.model.model_files import GRIFFIN_FILE, HEADS_FILE, MTP_FILE
from tests import ROOT

pytestmark = pytest.mark.long

PROGRAM = """
import functools
import sys
from pathlib import Path

import torch

from swiftbatch.worker.training import train_draft, train_griffin, train_mtp, train_tokenswift
from swiftbatch.worker.training.data_parallel import is_first, joined
from swiftbatch.worker.training.recipes import DraftRecipe, GriffinRecipe, HeadRecipe, MTPRecipe, TextRecipe

def first_gradients(module):
    sum_gradients = module.sum_gradients

    def remembered(trained):
        sum_gradients(trained)
        path = Path(output) / f"{module.FILES.plot}.pt"
        if is_first() and not path.exists():
            torch.save({name: each.grad for name, each in trained.named_parameters()}, path)

    module.sum_gradients = remembered


# Steps in proportion to the gradients, because a gradient near 0 has any sign.
torch.optim.AdamW = functools.partial(torch.optim.AdamW, eps=1.0)
for module in (train_draft, train_griffin, train_mtp, train_tokenswift):
    first_gradients(module)
torch.set_num_threads(1)
model, data, output, *kinds = sys.argv[1:]
texts = TextRecipe(num_book_tokens=150, num_own_texts=2, num_prompt_tokens=16, num_own_tokens=60)
books = TextRecipe(num_book_tokens=150)
trainings = {
    "tokenswift": (train_tokenswift.train_heads, HeadRecipe(
        num_steps=3, num_step_rows=65, num_warmup_steps=1, num_book_tokens=150)),
    "draft": (train_draft.train_draft, DraftRecipe(
        3, num_step_windows=5, window_length=48, texts=books)),
    "griffin": (train_griffin.train_griffin, GriffinRecipe(
        3, num_step_windows=5, window_length=48, texts=texts, single_pass_share=0.0, align_top_k=100,
        num_warmup_steps=1, labels="hard")),
    "mtp": (train_mtp.train_mtp, MTPRecipe(
        3, num_step_windows=5, window_length=48, num_passes=2, texts=books)),
}
with joined(print) as report:
    for kind in kinds:
        train, recipe = trainings[kind]
        train(model, Path(data), Path(output) / kind, recipe, report, Path(output).parent / f"features-{kind}")
"""
FILES = {
    "tokenswift": HEADS_FILE,
    "draft": "model.safetensors",
    "griffin": GRIFFIN_FILE,
    "mtp": MTP_FILE,
}


def train(model: Path, data: Path, output: Path, num_processes: int, *kinds: str) -> list[str]:
    """Run as `torchrun` does; return what each process printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(model), str(data), str(output), *kinds],
            cwd=ROOT,
            env=os.environ | world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_processes)
    ]
    printed = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * num_processes, printed
    return printed


def losses(folder: Path) -> list[float]:
    [log] = folder.glob("*_log.jsonl")
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    steps = [record for record in records if "loss" in record or "losses" in record]
    assert [step["step"] for step in steps] == [1, 2, 3]
    return [loss for step in steps for loss in step.get("losses", [step.get("loss")])]


def check_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    assert one.keys() == two.keys()
    for name, expected in one.items():
        assert (two[name].float() - expected.float()).norm() <= 0.03 * expected.float().norm() + 1e-6, name


@pytest.mark.slow
def test_two_processes_give_the_weights_of_one(tiny_model: Path, books: Path, tmp_path: Path) -> None:
    (books / "test.jsonl").unlink()
    first, second = train(tiny_model, books, tmp_path / "two", 2, *FILES)
    [alone] = train(tiny_model, books, tmp_path / "one", 1, *FILES)
    assert "steps behind it" in alone
    assert "steps behind it" in first
    assert "steps behind it" not in second
    for kind, name in FILES.items():
        check_close(*(load_file(tmp_path / folder / kind / name) for folder in ("one", "two")))
        check_close(*(torch.load(tmp_path / folder / f"{kind}_training.png.pt") for folder in ("one", "two")))
        assert losses(tmp_path / "two" / kind) == pytest.approx(losses(tmp_path / "one" / kind), rel=0.01)


@pytest.fixture
def another_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    def pretend(rank: int, size: int) -> None:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)

    return pretend


def test_each_sample_of_a_step_has_one_process(another_rank: Callable[[int, int], None]) -> None:
    from swiftbatch.jobs.errors import ModelError
    from swiftbatch.worker.training.data_parallel import share_of

    assert share_of([1, 2, 3]) == [1, 2, 3]
    shares = []
    for rank in range(3):
        another_rank(rank, 3)
        shares.append(share_of(torch.arange(7)).tolist())
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    with pytest.raises(ModelError, match="a step has 2 samples for 3 processes; expected one or more for each"):
        share_of([1, 2])
