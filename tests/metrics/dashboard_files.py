from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests import ROOT

METRICS = ROOT / "metrics"
BOARDS = sorted((METRICS / "grafana").glob("*.json"))


def read_board(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


def panel_expressions() -> dict[str, str]:
    """Return queries by board, panel and query."""
    return {
        f"{path.stem}: {panel['title']} ({panel['type']}, {target['refId']})": target["expr"]
        for path in BOARDS
        for panel in read_board(path)["panels"]
        for target in panel["targets"]
    }


def variable_queries() -> dict[str, str]:
    return {
        f"{path.stem}: {variable['name']}": variable["query"]
        for path in BOARDS
        for variable in read_board(path)["templating"]["list"]
        if variable["type"] == "query"
    }


def as_shown(expr: str, run: str) -> str:
    """Fill in what Grafana would."""
    values = {"__rate_interval": "15s", "__range": "5m", "run": re.escape(run).replace("\\", "\\\\")}
    return re.sub(r"\$(\w+)", lambda match: values.get(match.group(1), ".*"), expr)


def metric_names(expr: str) -> set[str]:
    return set(re.findall(r"swiftbatch_\w+", expr))
