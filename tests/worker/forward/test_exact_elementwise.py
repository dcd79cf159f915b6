from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import tree_rows
from swiftbatch.worker.forward.transformers_forwards import TransformersForwards, WholeVectors, has_rests
from swiftbatch.worker.model.digests import Digests
from swiftbatch.worker.model.model_files import ModelFiles
from swiftbatch.worker.sampling.draft_tree import DraftTree
from tests.worker.model.kind_parts import tiny_config, tiny_model

NUM_ROWS, WIDTH = 24, 14336  # three threads split two of the rows
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu, tanh": lambda rows: functional.gelu(rows, approximate="tanh"),
    "softplus": functional.softplus,
    "sigmoid": torch.sigmoid,
    "sigmoid, of a tensor": torch.Tensor.sigmoid,
    "silu, of columns": lambda rows: functional.silu(rows.t()).t(),
}


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, WIDTH), (torch.bfloat16, WIDTH), (torch.bfloat16, 100)])
def test_a_row_has_the_bits_that_it_has_alone(name: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    rows = 2 * torch.randn(NUM_ROWS, width).to(dtype)
    with WholeVectors():
        together = FUNCTIONS[name](rows)
        alone = [FUNCTIONS[name](row[None]) for row in rows]
    assert together.shape == rows.shape
    assert torch.equal(together, torch.cat(alone))
    assert torch.allclose(together.float(), FUNCTIONS[name](rows).float(), atol=1e-6, rtol=1e-2)


def test_what_happens_in_place_still_does() -> None:
    rows = torch.randn(3, 5)
    with WholeVectors():
        functional.silu(kept := rows.clone(), inplace=True)
    assert torch.equal(kept, functional.silu(rows))


@pytest.mark.parametrize(
    ("width", "num_threads", "least_rows", "expected"),
    [
        (128, 1, 1, False),
        (100, 1, 1, True),
        (96, 1, 1, True),
        (96, 1, 32, False),
        (512, 3, 1, False),
        (576, 3, 1, True),
    ],
)
def test_only_odd_widths_and_rows_that_threads_share_have_rests(
    width: int, num_threads: int, least_rows: int, expected: bool
) -> None:
    torch.set_num_threads(num_threads)
    assert has_rests(torch.nn.Linear(64, width, bias=False), least_rows) is expected


@pytest.mark.parametrize("kind", ["gemma2", "llama"])
def test_a_wide_layer_gives_a_row_its_bits_on_three_threads(kind: str) -> None:
    config = tiny_config(kind)
    config.intermediate_size, config.num_hidden_layers, config.layer_types = WIDTH, 1, ["full_attention"]
    files = ModelFiles(kind, Path(kind), Digests({}, {}), config.max_position_embeddings, config.vocab_size)
    target = TargetModel(TransformersForwards(tiny_model(config), files), files)
    seen: list[torch.Tensor] = []
    target.model.model.layers[0].mlp.act_fn.register_forward_hook(lambda _module, _given, found: seen.append(found[0]))
    groups = [tree_rows(target.new_cache(64), token_id, DraftTree()) for token_id in range(3, 3 + NUM_ROWS)]
    target.verify(groups)
    for group in groups:
        target.verify([group])
    together, *alone = seen
    assert torch.equal(together[:NUM_ROWS], torch.cat([rows[:1] for rows in alone]))
