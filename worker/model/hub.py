"""Models on the hub: their local snapshots, and why a model is not available."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from swiftbatch.jobs.errors import ModelError
from swiftbatch.worker.model.file_checks import SINGLE_FILE
from swiftbatch.worker.model.user_cache import cache_folder, made_whole

PATIENCE_SECONDS = 300.0  # longest wait for a busy hub
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0  # used if the hub does not say how long to wait
BUSY = {429: "too many requests", 500: "an error of its own", 502: "busy", 503: "busy", 504: "busy"}
PART = re.compile(r"-\d{5}-of-")  # in the names of a GGUF model in several files
SNAPSHOTS = "snapshots"  # subfolder of a model in the cache, with a folder per commit
BLOBS = "blobs"  # folder of the files that snapshots link to, which their SHA-256 names
HEADERS = "headers"  # folder in our cache
TOKEN = "set HF_TOKEN to a token of https://huggingface.co/settings/tokens that may read it"


T = TypeVar("T")


class HubName(NamedTuple):
    """The parts of `hf:ORG/NAME@REVISION:FILE.gguf`, None where absent; `hf:` is optional."""

    name: str
    revision: str | None
    file: str | None

    @classmethod
    def of(cls, model: str) -> HubName:
        repository, _, file = model.removeprefix("hf:").partition(":")
        name, _, revision = repository.partition("@")
        return cls(name, revision or None, file or None)


def commit_of(path: Path) -> str | None:
    """Return the commit of a folder or file in the hub's cache."""
    for folder in (path, *path.parents):
        if folder.parent.name == SNAPSHOTS and folder.parent.parent.name.startswith("models--"):
            return folder.name
    return None


def hub_snapshot(model: str, wanted: Sequence[str]) -> Path:
    """Download a model's files that match the patterns, unless they are in the cache. Raises ModelError."""
    name, revision, _ = HubName.of(model)
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise ModelError(
            f"model {model}: neither `embedded`, nor a folder or a .gguf file here, nor one in a bucket (s3://, gs://, "
            "az://), nor a name on the hub, as ORG/NAME or ORG/NAME@REVISION; correct --model"
        )
    from huggingface_hub import snapshot_download

    with alone_on_this_machine(name):
        download = partial(snapshot_download, name, revision=revision, allow_patterns=list(wanted))
        return Path(_patiently(model, download))


def hub_file(model: str, wanted: str) -> Path:
    """Download one file of a model, with the other parts of a model in several files. Raises ModelError."""
    parts = PART.sub("-*-of-", wanted)
    folder = hub_snapshot(model, [parts])
    if not (folder / wanted).is_file():
        there = gguf_names(model, folder)
        raise ModelError(f"model {model}: it has no file {wanted}; its GGUF files: {', '.join(there) or 'none'}")
    return folder / wanted


def hub_headers(model: str, snapshot: Path, names: Collection[str]) -> Path | None:
    """Return a folder like a snapshot, whose weights are only their headers, with holes for the tensors.

    Their names are `names`, or that of a single file. As in the hub's cache, they link to blobs that are named by the
    SHA-256 of whole files. Returns None if the hub has no such safetensors files. Raises ModelError.
    """
    folder = cache_folder(HEADERS) / snapshot.parent.parent.name / SNAPSHOTS / snapshot.name
    weights = names or (SINGLE_FILE,)
    are_there = folder.is_dir() and all(each.exists() for each in folder.iterdir())
    if are_there and all(_has_header(folder / name) for name in weights):
        _link_others(snapshot, folder, weights)  # an earlier version may have wanted fewer
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # the hub's cache was moved or cleared
    digests = _patiently(model, partial(_digests_on_hub, model, snapshot.name))
    refuse_absent(model, names, digests)
    wanted = {name: digests.get(name) for name in weights}
    if not all(digest and name.endswith(".safetensors") for name, digest in wanted.items()):
        return None
    with made_whole(folder) as aside:
        _link_others(snapshot, aside, weights)
        (aside / BLOBS).mkdir()
        for name, digest in wanted.items():
            (aside / name).symlink_to(f"{BLOBS}/{digest}")
            _patiently(model, partial(_write_header, model, snapshot.name, name, aside / name))
    return folder


def refuse_absent(model: str, names: Collection[str], there: Collection[str]) -> None:
    """Raise ModelError if a weight file of the index is not among the files that are there."""
    if absent := sorted(set(names) - set(there)):
        raise ModelError(
            f"model {model}: its index names {absent[0]!a:.80}, and no such file is there; "
            "complete the upload or the download, or name another revision or model"
        )


def _link_others(snapshot: Path, folder: Path, weights: Collection[str]) -> None:
    """Link the snapshot's files into a folder, except weights and links that are there."""
    for file in snapshot.iterdir():
        if file.name not in weights:
            with suppress(FileExistsError):
                (folder / file.name).symlink_to(os.path.abspath(file))


def _has_header(file: Path) -> bool:
    return file.is_file() and file.stat().st_size > 8  # a power cut may leave an empty file


def are_headers(path: Path) -> bool:
    """Return whether a model's folder has only the headers of its weights."""
    return path.is_relative_to(cache_folder(HEADERS))


def _digests_on_hub(model: str, commit: str) -> dict[str, str | None]:
    """Return the SHA-256 of each file, or None for a small one."""
    from huggingface_hub import HfApi

    files = HfApi().model_info(HubName.of(model).name, revision=commit, files_metadata=True).siblings or ()
    return {file.rfilename: None if file.lfs is None else file.lfs.sha256 for file in files}


def _write_header(model: str, commit: str, name: str, place: Path) -> None:
    """Write a safetensors file of a header and a hole."""
    from huggingface_hub import HfApi

    told = HfApi().parse_safetensors_file_metadata(HubName.of(model).name, name, revision=commit)
    tensors = {
        each: {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": tensor.data_offsets}
        for each, tensor in told.tensors.items()
    }
    header = json.dumps(tensors).encode()
    with place.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + max((tensor.data_offsets[1] for tensor in told.tensors.values()), default=0))


def gguf_names(model: str, folder: Path) -> list[str]:
    """Return the GGUF files of a model on the hub, or of its snapshot if the hub is away."""
    from huggingface_hub import list_repo_files

    name, revision, _ = HubName.of(model)
    try:
        names = list_repo_files(name, revision=revision)
    except Exception:  # the hub's client raises many kinds
        names = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
    return sorted(each for each in names if each.endswith(".gguf"))


@contextmanager
def alone_on_this_machine(name: str) -> Iterator[None]:
    """Wait until no other process downloads this model."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]

    folder = Path(HF_HUB_CACHE) / ".locks"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        is_writable = os.access(folder, os.W_OK)
    except OSError:
        is_writable = False
    if not is_writable:  # the cache is read-only, so nothing is downloaded
        yield
        return
    with WeakFileLock(folder / f"swiftbatch--{name.replace('/', '--')}.lock"):
        yield


def _patiently(model: str, ask: Callable[[], T]) -> T:
    """Call `ask`, and repeat it while the hub is busy. Raises ModelError."""
    last, pause = time.monotonic() + PATIENCE_SECONDS, FIRST_PAUSE
    while True:
        try:
            return ask()
        except Exception as error:  # the hub's client raises many kinds
            causes = _causes(error)
            status = next(filter(None.__ne__, map(_status, causes)), None)
            told = next(filter(None.__ne__, map(_told_pause, causes)), None)
            seconds = pause if told is None else told
            if status not in BUSY or time.monotonic() + seconds > last:
                raise ModelError(f"model {model}: {_problem(model, causes, status)}") from error
        said = f"model {model}: the hub answers {status} ({BUSY[status]}); asked again in {seconds:g} s"
        print(said, file=sys.stderr, flush=True)
        time.sleep(seconds)
        pause = min(2 * pause, LONGEST_PAUSE)


def _causes(error: BaseException) -> list[BaseException]:
    found = [error]
    while (behind := found[-1].__cause__ or found[-1].__context__) is not None and behind not in found:
        found.append(behind)
    return found


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _told_pause(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    retry_after, limit = headers.get("retry-after", ""), headers.get("ratelimit", "")
    found = re.fullmatch(r"\s*([0-9]{1,6})\s*", retry_after) or re.search(r";\s*t=([0-9]{1,6})", limit)
    return None if found is None else float(found[1])


def _not_found(causes: list[BaseException], kinds: Collection[str]) -> str:
    """Return what the hub does not have: a file that it lists, or the model."""
    if "EntryNotFoundError" not in kinds:
        return "no model has this name; correct the name"
    url = next(str(error.response.url) for error in causes if _status(error) is not None)  # type: ignore[attr-defined]
    file = unquote(url.partition("/resolve/")[2].partition("/")[2]).partition("?")[0] or url
    return f"it lists {file}, and has no such file; name another revision or model"


def _problem(model: str, causes: list[BaseException], status: int | None) -> str:
    """Return why a model is not available, and what to do."""
    from huggingface_hub import constants

    (name, revision, _), endpoint = HubName.of(model), constants.ENDPOINT
    kinds = {each.__name__ for error in causes for each in type(error).__mro__}
    if "OfflineModeIsEnabled" in kinds:
        return "HF_HUB_OFFLINE is set, and this machine's cache lacks it; unset HF_HUB_OFFLINE, or download it before"
    if "GatedRepoError" in kinds:
        return f"the hub gives it to those who agreed to its terms; agree at {endpoint}/{name}, and {TOKEN}"
    if "RevisionNotFoundError" in kinds:
        return f"the hub has no revision {revision!r} of it; expected a branch, a tag or a commit behind the @"
    if status in BUSY:
        return f"the hub answers {status} ({BUSY[status]}) for {PATIENCE_SECONDS:g} s or longer; try again later"
    if status == 401:
        return f"the hub answers 401: no model has this name, or it is private; correct the name, or {TOKEN}"
    if status == 403:
        return f"the hub answers 403: the token may not read it; {TOKEN}"
    if status == 404:
        return f"the hub answers 404: {_not_found(causes, kinds)}"
    if "HFValidationError" in kinds:
        return "no model of the hub can have this name; expected ORG/NAME or ORG/NAME@REVISION"
    if status is None and kinds & {"ConnectError", "TimeoutException", "NetworkError", "ConnectionError"}:
        return (
            f"{endpoint} can't be reached, and this machine's cache lacks it; check the network and HF_ENDPOINT, or "
            "download it elsewhere and name its folder"
        )
    words = " ".join(str(causes[0]).split())[:200]
    answer = "" if status is None else f"the hub answers {status}: "
    return f"{answer}it can't be downloaded ({type(causes[0]).__name__}: {words}); try again"
