from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

COMMIT = "0" * 39 + "1"


@dataclass
class Hub:
    """Models by id, a folder each; `sent` has each sent file's bytes."""

    models: dict[str, Path]
    url: str = ""
    commit: str = COMMIT  # its only, newest commit
    faults: list[tuple[int, dict[str, str]]] = field(default_factory=list)  # the next answers: status and headers
    refusals: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)  # by model
    lost: set[str] = field(default_factory=set)  # files that are listed and not there
    sent: dict[str, int] = field(default_factory=dict)


class _Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        parts = unquote(self.path.partition("?")[0]).strip("/").split("/")
        is_list = parts[:2] == ["api", "models"]
        model = "/".join(parts[2:4] if is_list else parts[:2])
        places = [parts.index(word) for word in ("revision", "tree", "resolve") if word in parts]
        revision = parts[places[0] + 1] if places else "main"
        is_harmed = self.hub.faults and model in self.hub.models  # the client also asks for other things
        fault = self.hub.faults.pop(0) if is_harmed else self.hub.refusals.get(model)
        if fault is not None:
            self._send(b"", fault[1], fault[0])
        elif model not in self.hub.models:
            self._send(b"", {"X-Error-Code": "RepoNotFound"}, 404)
        elif revision not in ("main", self.hub.commit):
            self._send(b"", {"X-Error-Code": "RevisionNotFound"}, 404)
        elif is_list:
            self._list("/".join(parts[2:4]), is_tree="tree" in parts)
        else:
            folder = self.hub.models.get("/".join(parts[:2]), Path("nowhere"))
            file = folder / "/".join(parts[4:])
            is_there = file.is_file() and file.name not in self.hub.lost
            self._file(file, with_body) if is_there else self._send(b"", {"X-Error-Code": "EntryNotFound"}, 404)

    def _list(self, model: str, is_tree: bool) -> None:
        files = sorted(file for file in self.hub.models[model].iterdir() if file.is_file())
        tree = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _digest(f)[:40]} for f in files]
        whole = {"id": model, "sha": self.hub.commit, "siblings": list(map(_sibling, files))}
        self._send(json.dumps(tree if is_tree else whole).encode(), {"Content-Type": "application/json"})

    def _file(self, file: Path, with_body: bool) -> None:
        body, status, headers = file.read_bytes(), 200, {"X-Repo-Commit": self.hub.commit, "ETag": f'"{_digest(file)}"'}
        if asked := self.headers.get("Range"):
            first, last = (int(number) for number in asked.removeprefix("bytes=").split("-"))
            last = min(last, len(body) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
            body, status = body[first : last + 1], 206
        if with_body:
            self.hub.sent[file.name] = self.hub.sent.get(file.name, 0) + len(body)
        self._send(body, headers, status, with_body)

    def _send(self, body: bytes, headers: dict[str, str], status: int = 200, with_body: bool = True) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _sibling(file: Path) -> dict[str, object]:
    large = {"lfs": {"size": file.stat().st_size, "sha256": _digest(file), "pointerSize": 135}}
    return {"rfilename": file.name, **(large if file.suffix == ".safetensors" else {})}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def hub_of(models: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(models)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("_AnswersOfOne", (_Answers,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
