"""The check that a model gives logits that tokens can be drawn from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.drawing.tree import DraftTree
from swiftbatch.worker.target.tiles import tree_rows

if TYPE_CHECKING:
    from swiftbatch.worker.target.target import TargetModel

NUM_PROBED_TOKENS = 16


def check_model(target: TargetModel) -> None:
    """Raise ModelError where logits are not finite behind any of some single tokens: then no job can run."""
    step = max(1, target.vocab_size // NUM_PROBED_TOKENS)
    token_ids = range(0, target.vocab_size, step)
    cache = target.new_cache(1)  # made as jobs' caches are: a GPU's rows lie in the slots of its arena
    for token_id in token_ids:
        [outputs] = target.verify([tree_rows(cache, token_id, DraftTree())])
        if math.isfinite(float(outputs.logits[0].max())):
            return
    raise ModelError(
        f"model {target.files.name}: its logits are not finite, whichever token they follow; its weights are damaged, "
        "or outgrow the dtype"
    )
