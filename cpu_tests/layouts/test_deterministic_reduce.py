"""``--deterministic-reduce``: equal bits of the weights at every number of data-parallel ranks."""

import hashlib

import pytest

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train, whole
from cpu_tests.world import run_world

COPIES = ["--ddp-backend", "pytorch_ddp"]
LAYOUTS = {"shard 2": (2, []), "copies 4": (4, COPIES)}
MORE_LAYOUTS = {
    "copies 2": (2, COPIES),
    "shard 4": (4, []),
    "copies 2 x shard 2": (4, ["--replicate-size", "2"]),
}


def digest(data, home, updates, *, data_size=1, flags=()):
    words = [*ARCHITECTURES["dense"], "--deterministic-reduce", "--no-save", *flags]
    trainer = make_trainer(data, home, words, updates=updates, data_size=data_size, batches=8)
    train(trainer)
    content = hashlib.sha256()
    for name, param in sorted(trainer.model.named_parameters()):
        content.update(name.encode() + whole(param).numpy().tobytes())
    return content.hexdigest()


def check(tmp_path, updates, layouts=LAYOUTS):
    data = make_corpus(tmp_path / "data")
    expected = digest(data, tmp_path / "alone", updates)
    for name, (size, flags) in layouts.items():
        home = tmp_path / name.replace(" ", "_")
        found = run_world(
            size,
            lambda rank, home=home, size=size, flags=flags: digest(
                data, home, updates, data_size=size, flags=flags
            ),
            timeout=600,
        )
        assert set(found) == {expected}, name


def test_weights_have_equal_bits(tmp_path):
    check(tmp_path, 10)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_weights_have_equal_bits_after_100_updates(tmp_path):
    check(tmp_path, 100, LAYOUTS | MORE_LAYOUTS)
