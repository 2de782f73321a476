"""Draws the losses of runs as one SVG file.

    python projects/deepnorm_1000/curve.py OUT.svg NAME=RUN [NAME=RUN ...]

RUN is a run folder; the losses are those of its ``metrics.jsonl``, in bits per byte.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 50, 40, 20, 120
COLOURS = ("#1f6fb2", "#c2410c", "#2f7d32", "#7b3fa0")


def losses(run: Path) -> list[tuple[int, float]]:
    """Update and loss of each training record; what is not finite ends the curve."""
    found = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] == "train" and math.isfinite(record["loss"]):
            found.append((record["num_updates"], record["bits_per_byte"]))
    return found


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """The SVG text."""
    last = max(update for points in curves.values() for update, _ in points)
    top = max(loss for points in curves.values() for _, loss in points)

    def x(update: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * update / last

    def y(loss: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * loss / top

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in range(math.ceil(top) + 1):
        if loss <= top:
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" '
                f'stroke="#ddd"/><text x="{LEFT - 20}" y="{y(loss) + 4:.1f}">{loss}</text>'
            )
    for update in range(0, last + 1, max(last // 5, 1)):
        parts.append(f'<text x="{x(update) - 6:.1f}" y="{HEIGHT - BOTTOM + 18}">{update}</text>')
    parts.append(
        f'<text x="{LEFT}" y="{HEIGHT - 6}">updates; bits per byte of the training text</text>'
    )
    for colour, (name, points) in zip(COLOURS, curves.items(), strict=False):
        path = " ".join(f"{x(update):.1f},{y(loss):.1f}" for update, loss in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        end, height = points[-1]
        parts.append(
            f'<text x="{x(end) + 6:.1f}" y="{y(height) + 4:.1f}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Write the file."""
    out, *pairs = sys.argv[1:]
    runs = dict(pair.split("=", 1) for pair in pairs)
    curves = {name: losses(Path(run)) for name, run in runs.items()}
    Path(out).write_text(draw(curves), encoding="utf-8")


if __name__ == "__main__":
    main()
