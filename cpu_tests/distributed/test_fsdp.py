"""What is particular to sharded parameters; their numbers are those of every layout."""

import pytest
import torch

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts.training import ARCHITECTURES, make_data, make_trainer, train
from cpu_tests.world import run_world
from scalerun.dataclass.errors import ConfigError


def test_blocks_are_gathered_in_the_type_of_products_and_weights_stay_in_float32(tmp_path):
    data = make_data(tmp_path / "data")

    def work(rank):
        found = {}
        for name, words in ARCHITECTURES.items():
            runs, seen = [], set()
            for flags in ([], ["--gather-in-half"]):
                argv = [*words, "--no-save", "--bf16", *flags]
                trainer = make_trainer(data, tmp_path / name, argv, updates=4, data_size=2)
                trainer.model.shard_units()[0].register_forward_pre_hook(
                    lambda block, args, seen=seen: seen.update(p.dtype for p in block.parameters())
                )
                runs.append(train(trainer).losses)
                assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
            found[name] = runs, seen
        return found

    for found in run_world(2, work):
        for name, ((whole, half), seen) in found.items():
            assert seen == {torch.float32, torch.bfloat16}, name
            assert half == pytest.approx(whole, rel=5e-3), name
            assert half != whole, name


def test_half_without_a_half_type_is_refused(tmp_path):
    data = make_corpus(tmp_path / "data")
    with pytest.raises(ConfigError, match="--gather-in-half has no effect without --bf16"):
        make_trainer(
            data, tmp_path / "run", [*ARCHITECTURES["dense"], "--gather-in-half"], updates=1
        )
