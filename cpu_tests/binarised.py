"""Small folders of binarised text, written without the command that makes them."""

import numpy as np

from scalerun.data.binarised.indexed_dataset import IndexedWriter, stored_dtype

WORDS = "the cat dog owl fox sleeps sits runs on mat in box".split()
VERSE = [
    f"the {animal} {verb} on the {place}".split() if animal else []
    for verb in ("sleeps", "sits", "runs")
    for place in ("mat", "box")
    for animal in ("cat", "dog", "owl", "")
]


def write_set(prefix, items, num_symbols=16):
    """Items of token ids, written as they are."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, stored_dtype(num_symbols)) as writer:
        flat = [token for item in items for token in item]
        sizes = np.array([len(item) for item in items], dtype=np.int64)
        writer.add(np.array(flat, dtype=np.int64), sizes)
        writer.commit()


def write_dictionary(folder, words=WORDS):
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{word} {9999 - i}\n" for i, word in enumerate(words))
    (folder / "dict.txt").write_text(lines, encoding="utf-8")


def write_folder(folder, sets, words=WORDS):
    """Lines of words, each followed by the end symbol: ``{"train": [["the", "cat"], ...]}``."""
    write_dictionary(folder, words)
    for name, lines in sets.items():
        write_set(folder / name, [[*(4 + words.index(word) for word in line), 2] for line in lines])
    return folder


def verse_folder(folder):
    """Two files to train on and two sets to validate on."""
    sets = {
        "train": VERSE[:12] * 3,
        "train1": VERSE[12:] * 3,
        "valid": VERSE,
        "valid1": VERSE[::-1],
    }
    return write_folder(folder, sets)


ENGLISH = "the cat dog sees a big red house".split()
SPANISH = "el gato perro ve un grande rojo casa".split()


def translated(line):
    return [SPANISH[ENGLISH.index(word)] for word in line]


def english_lines(count):
    return [ENGLISH[i % 8 :: 1 + i % 3][: 1 + i % 5] * (1 + i % 2) for i in range(count)]


def write_pairs(folder, sets, *, joint=False):
    """Pairs of English and Spanish words: ``{"train": [["the", "cat"], ...]}``, translated."""
    words = {"en": ENGLISH, "es": SPANISH}
    for language, own in words.items():
        listed = [*ENGLISH, *SPANISH] if joint else own
        write_dictionary(folder, listed)
        (folder / "dict.txt").rename(folder / f"dict.{language}.txt")
        for name, lines in sets.items():
            texts = lines if language == "en" else map(translated, lines)
            items = [[*(4 + listed.index(word) for word in line), 2] for line in texts]
            write_set(folder / f"{name}.en-es.{language}", items)
    return folder


def pairs_folder(folder, **how):
    """Two files of pairs to train on, a set to validate on and one to translate."""
    lines = english_lines(46)
    sets = {"train": lines[:30], "train1": lines[30:], "valid": lines[3:9], "test": lines[:12]}
    return write_pairs(folder, sets, **how)
