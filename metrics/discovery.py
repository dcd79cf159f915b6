"""The answer that Prometheus reads to find the driver and the workers of a run (HTTP service discovery)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from urllib.parse import urlsplit

PATH = "/sd"


def document(addresses: Iterable[str], run: str) -> str:
    """The targets at `addresses`, each `http://HOST:PORT/metrics`, with a label that says whose run it is.

    The format is that of `http_sd_configs` in Prometheus' reference of its configuration: one group of targets.
    """
    targets = [urlsplit(address).netloc for address in addresses]
    return json.dumps([{"targets": targets, "labels": {"run": run}}])
