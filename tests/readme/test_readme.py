"""The map has every folder, and links, paths and pictures exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from swiftbatch.metrics.exporter import DISCOVERY_PATH
from tests.readme.command_lines import FENCE, PAGES, ROOT, page, section, spans, table

README = page("README.md")
STRUCTURE = page("docs/structure.md")
ROOMS = ("jobs", "worker", "scheduler", "metrics")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#:]*)(?:#([^):]+))?\)")  # path and heading, either of which may be missing
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
IN_THE_TREE = re.compile(rf"(?:{'|'.join(ROOMS)}|docs|k8s|tests)/[\w./*-]*")


def test_the_map_has_every_folder_and_no_file_that_is_not_there() -> None:
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    folders = {str(Path(name).parent) for name in tracked.split() if name.endswith(".py")}
    named = {name.strip("/") for cells in table(STRUCTURE, "folder") for name in re.findall(r"`([^`]+)`", cells[0])}
    assert folders - named == set()
    assert all((ROOT / folder).is_dir() for folder in named)


def missing_files(text: str) -> list[str]:
    """Return missing files; one without a folder is in the folder named last."""
    folder, missing = ROOT, []
    for name in spans(text):
        path = ROOT / name if "/" in name else folder / name
        if re.fullmatch(r"[\w/]+\.(?:py|yml)", name) and not path.is_file():
            missing.append(name)
        if "/" in name:
            folder = path if name.endswith("/") else path.parent
    return missing


def test_the_files_of_the_map_are_where_it_says() -> None:
    assert missing_files(STRUCTURE) == []
    assert len(re.findall(r"`[\w/]+\.py`", STRUCTURE)) > 20
    text = "`jobs/`: `job.py`, `worker/engine/engine.py`, `job.py`; `jobs/reader.py`; `jobs/run/` has `run.py`"
    assert missing_files(text) == ["job.py", "jobs/reader.py"]


def test_the_first_pages_are_short() -> None:
    assert len(README.splitlines()) <= 250
    assert len(STRUCTURE.splitlines()) <= 80
    steps = [
        re.findall(r"^(\d+)\. ", section(STRUCTURE, f"The way of a {what}"), re.MULTILINE) for what in ("job", "token")
    ]
    assert [len(each) for each in steps] == [8, 6]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}


@pytest.mark.parametrize("path", PAGES)
def test_the_pages_files_and_pictures_that_are_named_exist(path: str) -> None:
    text = page(path)
    for name, anchor in LINK.findall(text):
        target = (ROOT / path).parent / name if name else ROOT / path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), anchor
    for name in filter(IN_THE_TREE.fullmatch, spans(text)):
        assert list(ROOT.glob(name)), name
    for words, picture in PICTURE.findall(text):
        assert len(words) >= 10
        assert ((ROOT / path).parent / picture).read_bytes().startswith(b"\x89PNG")


def test_the_readme_leads_to_every_page_and_shows_two_pictures() -> None:
    assert {name for name, _ in LINK.findall(README) if name} == set(PAGES) - {"README.md"}
    assert len(PICTURE.findall(README)) == 2


def test_how_to_watch_a_run_names_the_address_and_the_lists() -> None:
    watching = page("docs/watching.md")
    assert f"http://DRIVER:9400{DISCOVERY_PATH}" in watching
    assert {"../scheduler/display/EVENTS.md", "../metrics/REFERENCE.md"} <= {name for name, _ in LINK.findall(watching)}


def test_no_large_file_but_the_weights_is_tracked() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    sizes = {name: (ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file()}
    large = {name for name, size in sizes.items() if size > 2**20}
    weights = {"model.safetensors", "parts/draft/model.safetensors", "parts/griffin.safetensors"}
    assert large <= {f"worker/embedded/{name}" for name in weights}
    embedded = sum(size for name, size in sizes.items() if name.startswith("worker/embedded/"))
    assert embedded <= 32 * 2**20
