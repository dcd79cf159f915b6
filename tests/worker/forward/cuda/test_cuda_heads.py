"""On a GPU all decoding heads run in one graph and equal the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftbatch.worker.drafters.tokenswift.decoding_heads import DecodingHeads
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.model.model_files import locate_model
from tests.worker.forward.cuda.checked_graph import CheckedGraph
from tests.worker.forward.cuda.cuda_parts import cuda_target


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_all_heads_are_one_replay(one_layer_model: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    files = locate_model(str(one_layer_model))
    on_cpu = DecodingHeads.load(None, TargetModel.load(files, dtype, "cpu"))
    on_gpu = DecodingHeads.load(None, cuda_target(files, getattr(torch, dtype)))
    replays: list[CheckedGraph] = []
    replay = CheckedGraph.replay
    monkeypatch.setattr(CheckedGraph, "replay", lambda graph: (replays.append(graph), replay(graph)))
    bound = 1e-4 if dtype == "float32" else 0.1
    for seed in range(2):
        hidden = torch.randn(64, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, dtype))
        torch.testing.assert_close(on_gpu.logits(hidden), on_cpu.logits(hidden), rtol=bound, atol=bound)
    assert len(replays) == 2
