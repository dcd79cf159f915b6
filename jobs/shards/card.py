"""`shards/README.md`, which says to `datasets.load_dataset` where the shards are, and of which types their columns."""

from __future__ import annotations

from swiftbatch.jobs.shards.rows import COLUMNS, MESSAGE
from swiftbatch.jobs.shards.settings import ShardFormat

TEXT = """\
# Texts of a swiftbatch run

Each file in `data` is whole and final: the run adds files and never changes one. A row is one choice of one line. Of
rows with the same `custom_id`, those with the highest `revision` are the newest.
"""


def card(kind: ShardFormat) -> str:
    """The card for shards of a format."""
    features = "".join(_feature(name, column) for name, column in COLUMNS.items())
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: data/*.{kind}\ndataset_info:\n  features:\n{features}---\n\n{TEXT}"
    )


def _feature(name: str, kind: str) -> str:
    if kind == "list of messages":
        fields = "".join(f"    - name: {field}\n      dtype: string\n" for field in MESSAGE)
        return f"  - name: {name}\n    list:\n{fields}"
    if kind.startswith("list of "):
        return f"  - name: {name}\n    list: {kind.removeprefix('list of ')}\n"
    return f"  - name: {name}\n    dtype: {kind}\n"
