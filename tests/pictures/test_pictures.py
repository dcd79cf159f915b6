from __future__ import annotations

from pathlib import Path

import numpy as np
import pyte
import pytest
from matplotlib.image import imread

from tests.pictures import __main__ as pictures
from tests.pictures.screen_picture import draw


def test_a_screen_is_drawn_line_by_line_in_its_colours(tmp_path: Path) -> None:
    heights, reds = [], []
    for number, text in enumerate((b"one", b"one\r\n\x1b[31mtwo $x$\x1b[0m")):
        screen = pyte.Screen(40, 10)
        pyte.ByteStream(screen).feed(text)
        path = tmp_path / f"{number}.png"
        draw(screen, "$ command", path)
        pixels = imread(path)[..., :3]
        heights.append(pixels.shape[0])
        reds.append(int(np.sum((pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.5))))
    assert heights[0] < heights[1]
    assert reds[0] == 0 < reds[1]


def test_without_a_browser_a_line_says_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "IS_INSTALLED", False)
    monkeypatch.setattr(pictures.os, "environ", dict(pictures.os.environ))
    pictures.main(["report", "serve"])
    reason = "left out: it needs chromium and chromedriver, which are not installed"
    assert capsys.readouterr().out.splitlines() == [f"report: {reason}", f"serve: {reason}"]
