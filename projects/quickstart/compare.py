"""Prints bits per byte of a model beside bzip2, xz and n-gram models.

    python projects/quickstart/compare.py DATA VALID_JSON

VALID_JSON is what ``scalerun.cli.validate --json`` wrote. The rows of xz and the n-gram models are
read from the table in DATA/README.md.
"""

from __future__ import annotations

import bz2
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def bzip2_bits_per_byte(folder: Path) -> float:
    """Bits that ``bzip2 -9`` needs per byte of a validation set's text, all documents in one."""
    texts = [
        json.loads(line)["text"]
        for file in sorted(folder.rglob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    content = "".join(texts).encode()
    return 8 * len(bz2.compress(content, 9)) / len(content)


def baselines(readme: Path) -> tuple[list[str], dict[str, list[float]]]:
    """Column names and rows of the baseline table in the corpus README."""
    lines = readme.read_text(encoding="utf-8").split("What a model should reach")[1].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    names, _, *rows = table
    return names[1:], {row[0]: [float(cell) for cell in row[1:]] for row in rows}


def row(title: str, cells: Sequence[str], mark: str = "  ") -> str:
    """One line of the table."""
    return f"{mark}{title:20}" + "".join(f"{cell:>10}" for cell in cells)


def main() -> None:
    """Print the table."""
    data, valid_json = Path(sys.argv[1]), Path(sys.argv[2])
    results = json.loads(valid_json.read_text(encoding="utf-8"))
    names, rows = baselines(data / "README.md")
    model = [results[f"valid/{name}"]["bits_per_byte"] for name in names]
    rows["bzip2 -9"] = [bzip2_bits_per_byte(data / "valid" / name) for name in names]
    print("\nBits per byte of texts that are kept out of the training text; lower is better.\n")
    print(row("", names))
    for title, values in rows.items():
        print(row(title, [f"{value:.2f}" for value in values]))
    print(row("this model", [f"{value:.2f}" for value in model], mark="> "))
    print(
        "\norder k is a byte n-gram model and xz a compressor, both with the model's training text;"
        f"\ntheir rows are those of {data / 'README.md'}. bzip2 -9 had no other text.\n"
    )


if __name__ == "__main__":
    main()
