"""The map has every folder; the README's links lead somewhere, and its pictures are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from metrics.discovery import PATH
from tests.readme.command_lines import ROOT, page, section, table

README = page("README.md")
STRUCTURE = page("docs/structure.md")
ROOMS = ("jobs", "worker", "scheduler", "metrics")


def test_the_map_has_every_folder_and_no_file_that_is_not_there() -> None:
    tracked = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    folders = {str(Path(name).parent) for name in tracked.split() if name.endswith(".py")}
    named = {name.strip("/") for cells in table(STRUCTURE, "folder") for name in re.findall(r"`([^`]+)`", cells[0])}
    assert folders - named == set()
    assert all((ROOT / folder).is_dir() for folder in named)


def test_the_pages_and_addresses_that_are_named_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
    watching = section(README, "Watching a run")
    assert f"http://DRIVER:9400{PATH}" in watching
    assert {"scheduler/display/EVENTS.md", "metrics/REFERENCE.md"} <= set(re.findall(r"\]\(([^)]+)\)", watching))


def test_the_two_pictures_are_shown() -> None:
    pictures = re.findall(r"!\[[^\]]{10,}\]\((\S+\.png)\)", README)
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).read_bytes().startswith(b"\x89PNG")


def test_no_large_file_but_the_weights_is_tracked() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    sizes = {name: (ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file()}
    large = {name for name, size in sizes.items() if size > 2**20}
    weights = {"model.safetensors", "draft/model.safetensors", "griffin.safetensors"}
    assert large <= {f"worker/embedded/{name}" for name in weights}
    embedded = sum(size for name, size in sizes.items() if name.startswith("worker/embedded/"))
    assert embedded <= 32 * 2**20
