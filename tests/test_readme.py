"""The README's map has every file; its links lead somewhere, and its pictures are there."""

from __future__ import annotations

import re
import subprocess

from command_lines import ROOT, page, section

from metrics.discovery import PATH

README = page("README.md")
ROOMS = ("jobs", "worker", "scheduler", "metrics")


def test_the_map_has_a_line_for_every_file() -> None:
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py") if path.name != "__init__.py"]
    missing = [
        str(path.relative_to(ROOT))
        for path in files
        if f"`{path.relative_to(ROOT / path.relative_to(ROOT).parts[0])}`" not in README
    ]
    assert missing == []


def test_the_pages_and_addresses_that_are_named_exist() -> None:
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).exists(), link
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-").lower() for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
    watching = section(README, "Watching a run")
    assert f"http://DRIVER:9400{PATH}" in watching
    assert {"scheduler/EVENTS.md", "metrics/REFERENCE.md"} <= set(re.findall(r"\]\(([^)]+)\)", watching))


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
