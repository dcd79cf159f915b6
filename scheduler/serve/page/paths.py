"""The page's own paths: sessions say who comes in there, and everywhere else keys do."""

from __future__ import annotations

UPLOAD_PATH = "/"
ASSETS = {"/page.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml"}
PATHS = frozenset({UPLOAD_PATH, "/login", "/logout", *ASSETS})
BATCH_PATHS = "/batches/"


def is_of_page(path: str) -> bool:
    return path in PATHS or path.startswith(BATCH_PATHS)
