"""swiftbatch: a batch runner for long-form text generation.

In a checkout the rooms `jobs`, `metrics`, `scheduler` and `worker` lie beside this folder; installed they lie in it.
This file imports nothing of them: a worker asks it where they are before any of them runs.
"""

from pathlib import Path

__version__ = "0.1.0"

_HERE = Path(__file__).parent
if not (_HERE / "jobs").is_dir():
    __path__.append(str(_HERE.parent))
