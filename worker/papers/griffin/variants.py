"""Variants of GRIFFIN that comparisons run: the paper's tree, in full."""

from __future__ import annotations

import functools

from swiftbatch.worker.drafters.catalogue import DrafterFactory
from swiftbatch.worker.papers.griffin.griffin import GriffinOptions, griffin

PAPER = GriffinOptions(is_full=True)
VARIANTS: dict[str, DrafterFactory] = {"griffin-paper": functools.partial(griffin, options=PAPER)}
