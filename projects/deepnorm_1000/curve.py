"""Draw the losses of runs as one SVG file.

    python projects/deepnorm_1000/curve.py OUT.svg NAME=RUN ... NAME=NUMBER ...

RUN is a run folder, whose losses (bits per byte) are those of its ``metrics.jsonl``; a NUMBER is a
level to compare them with.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 40, 150, 20, 40
COLOURS = ("#1f6fb2", "#c2410c", "#2f7d32", "#7b3fa0")
Curve = list[tuple[int, float]]


def losses(run: Path) -> Curve:
    """Update and loss of each training record; a loss that is not finite ends the curve."""
    found: Curve = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] != "train":
            continue
        loss = record["bits_per_byte"]
        if loss is None or not math.isfinite(loss):
            break
        found.append((record["num_updates"], loss))
    return found


def draw(curves: dict[str, Curve], levels: dict[str, float]) -> str:
    """The SVG text."""
    every = [point for curve in curves.values() for point in curve]
    last = max(update for update, _ in every)
    losses = [loss for _, loss in every] + list(levels.values())
    bottom, top = math.floor(min(losses)), math.ceil(max(losses))

    def x(update: float) -> str:
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * update / last:.1f}"

    def y(loss: float) -> str:
        return f"{TOP + (HEIGHT - TOP - BOTTOM) * (top - loss) / (top - bottom):.1f}"

    def text(at: str, height: str, words: object, *, dx: int = 0, colour: str = "#333") -> str:
        return f'<text x="{at}" y="{height}" dx="{dx}" dy="4" fill="{colour}">{words}</text>'

    def line(loss: float, style: str) -> str:
        return f'<path d="M{x(0)} {y(loss)}H{x(last)}" {style}/>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(x(0), str(HEIGHT - 8), "updates; loss in bits per byte of training text"),
    ]
    for loss in range(bottom, top + 1):
        parts += [line(loss, 'stroke="#ddd"'), text(x(0), y(loss), loss, dx=-18)]
    for update in range(0, last + 1, max(last // 5, 1)):
        parts.append(text(x(update), str(HEIGHT - BOTTOM + 14), update, dx=-6))
    for name, level in levels.items():
        parts += [
            line(level, 'stroke="#777" stroke-dasharray="4 4"'),
            text(x(last), y(level), name, dx=6, colour="#777"),
        ]
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        points = " ".join(f"{x(update)},{y(loss)}" for update, loss in curve)
        parts += [
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>',
            text(x(curve[-1][0]), y(curve[-1][1]), name, dx=6, colour=colour),
        ]
    return "\n".join([*parts, "</svg>", ""])


def number(word: str) -> float | None:
    """The number that a word spells, if it spells one."""
    try:
        return float(word)
    except ValueError:
        return None


def main() -> None:
    """Write the file."""
    out, *pairs = sys.argv[1:]
    given = dict(pair.rsplit("=", 1) for pair in pairs)
    levels = {name: level for name, word in given.items() if (level := number(word)) is not None}
    curves = {name: losses(Path(word)) for name, word in given.items() if name not in levels}
    Path(out).write_text(draw(curves, levels), encoding="utf-8")


if __name__ == "__main__":
    main()
