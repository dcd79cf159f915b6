from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

import pyte
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

BACKGROUND, TEXT = "#20232b", "#d7dae0"
COLOURS = {"default": TEXT, "red": "#e06c75", "green": "#98c379", "brown": "#e5c07b", "blue": "#61afef"}
FONT, POINTS, DPI = "DejaVu Sans Mono", 11.0, 150  # matplotlib includes the font
CHARACTER_WIDTH, LINE_HEIGHT = 0.60205 * POINTS, 1.4 * POINTS
MARGIN = 1.2 * POINTS
POINTS_PER_INCH = 72
WORD = re.compile(r"\S+")


def draw(screen: pyte.Screen, first: str, path: Path) -> None:
    """Draw a line and the screen below it into a PNG file."""
    used = max(number for number, line in enumerate(screen.display) if line.strip()) + 1
    width = screen.columns * CHARACTER_WIDTH + 2 * MARGIN
    height = (used + 1) * LINE_HEIGHT + 2 * MARGIN
    figure = Figure(figsize=(width / POINTS_PER_INCH, height / POINTS_PER_INCH), facecolor=BACKGROUND)
    FigureCanvasAgg(figure)  # draws without a display

    def write(text: str, line: int, column: int, colour: str) -> None:
        x, y = MARGIN + column * CHARACTER_WIDTH, height - MARGIN - line * LINE_HEIGHT
        figure.text(x / width, y / height, text, family=FONT, size=POINTS, color=colour, va="top", parse_math=False)

    def write_words(text: str, line: int, column: int, colour: str) -> None:
        for word in WORD.finditer(text):  # each at its own column, because long texts' widths are rounded
            write(word[0], line, column + word.start(), colour)

    write_words(first, 0, 0, TEXT)
    for line in range(used):
        cells = [screen.buffer[line][column] for column in range(screen.columns)]
        column = 0
        for colour, run in groupby(cells, key=lambda cell: cell.fg):
            text = "".join(cell.data for cell in run)
            write_words(text, line + 1, column, COLOURS.get(colour) or f"#{colour}")
            column += len(text)
    figure.savefig(path, dpi=DPI, format="png", facecolor=BACKGROUND)
