from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from swiftbatch.worker.training.training_plot import loss_curves, plot_training, share_curves

HEADS = [
    {"model": "m", "recipe": {"num_heads": 2}},
    {"when": "before", "texts": "test books", "top": [[0.1, 0.2, 0.3], [0.0, 0.1, 0.2]]},
    {"when": "before", "texts": "own texts", "top": [[0.9, 0.9, 0.9], [0.9, 0.9, 0.9]]},
    *({"step": step, "losses": [5.0 / step, 6.0 / step], "seconds": 1.0} for step in range(1, 9)),
    {"when": "after", "texts": "test books", "top": [[0.6, 0.7, 0.8], [0.5, 0.6, 0.7]]},
]
GRIFFIN = [
    {"model": "m", "recipe": {"feature_weight": 0.1}},
    {"when": "before", "step": 0, "texts": "test books", "same": {"T 0": [0.0, 0.0], "T 1": [0.2, 0.1]}},
    {"step": 1, "losses": [4.0], "aligned": [1.0]},
    {"step": 2, "losses": [3.0, 5.0], "aligned": [1.0, 0.5]},
    {"when": "during", "step": 2, "texts": "test books", "same": {"T 0": [0.0, 0.0], "T 1": [0.4, 0.3]}},
]
DRAFT = [
    {"when": "before", "texts": "test books", "same": {"T 0": 0.1, "T 1": 0.2}},
    {"step": 1, "kind": "draft", "loss": 3.0},
    {"step": 2, "kind": "draft", "loss": 2.0},
    {"when": "after", "texts": "test books", "same": {"T 0": 0.3, "T 1": 0.4}},
]
MTP = [{"step": 1, "kind": "mtp", "loss": 3.0}, {"when": "after", "step": 1, "texts": "t", "same": [0.5, 0.4]}]


def test_curves_are_the_losses_by_head_pass_or_kind_and_the_shares_of_one_kind_of_texts() -> None:
    assert loss_curves(HEADS)["head 2"][:2] == [(1, 6.0), (2, 3.0)]
    assert share_curves(HEADS) == {"head 1": [(0, 0.1), (8, 0.6)], "head 2": [(0, 0.0), (8, 0.5)]}
    assert loss_curves(GRIFFIN) == {"pass 1": [(1, 4.0), (2, 3.0)], "pass 2": [(2, 5.0)]}
    assert share_curves(GRIFFIN) == {
        "forward 1, T 1": [(0, 0.2), (2, 0.4)],
        "forward 2, T 1": [(0, 0.1), (2, 0.3)],
    }
    assert loss_curves(DRAFT) == {"draft": [(1, 3.0), (2, 2.0)]}
    assert share_curves(DRAFT) == {"T 0": [(0, 0.1), (2, 0.3)], "T 1": [(0, 0.2), (2, 0.4)]}
    assert (loss_curves(MTP), share_curves(MTP)) == ({"mtp": [(1, 3.0)]}, {})  # one point is no curve


@pytest.mark.parametrize(("records", "width"), [(HEADS, 1650), (GRIFFIN, 1650), (DRAFT, 1650), (MTP, 825)])
def test_the_picture_has_a_panel_of_losses_and_one_of_shares(
    tmp_path: Path, records: list[dict[str, object]], width: int
) -> None:
    plot_training(records, tmp_path / "plot.png")
    picture = imread(tmp_path / "plot.png")
    assert picture.shape[:2] == (630, width)
    assert picture[..., :3].min() < 0.5  # something dark is drawn
