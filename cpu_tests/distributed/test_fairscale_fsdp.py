"""fairscale's own code, over gloo, on CPUs that stand in for GPUs: CUDA streams do nothing.

What fairscale does with parameters and gradients really happens; that passes overlap does not.
"""

import contextlib
import importlib.util

import pytest
import torch

from cpu_tests.conftest import make_corpus
from cpu_tests.layouts import layouts
from cpu_tests.layouts.layouts import Layout, agree, train_at
from cpu_tests.layouts.restoring import check_after, save_at
from cpu_tests.layouts.training import ARCHITECTURES, make_trainer, train
from cpu_tests.world import run_world
from scalerun.dataclass.configs import DistributedConfig
from scalerun.dataclass.errors import ConfigError
from scalerun.distributed import fairscale_fsdp
from scalerun.distributed.fairscale_fsdp import check_fairscale
from scalerun.distributed.parallelize import check_backend

FAIRSCALE = ("--ddp-backend", "fairscale")
TESTED = ("dense", "longnet", "moe", "retnet")
UPDATES = 4


class NoStream:
    """The only stream of a CPU."""

    def wait_stream(self, other):
        pass


class NoCuda:
    """``torch.cuda`` as fairscale calls it."""

    one = NoStream()

    def __getattr__(self, name):
        return getattr(torch.cuda, name)

    def is_available(self):
        return True

    def Stream(self):
        return self.one

    current_stream = Stream

    def stream(self, stream):
        assert stream is self.one
        return contextlib.nullcontext()

    def synchronize(self):
        pass


class OnCpu:
    """``torch`` as fairscale imported it."""

    cuda = NoCuda()

    def __getattr__(self, name):
        return getattr(torch, name)


class AnyShape:
    """``torch.distributed``: with gloo too, the parts to scatter then have any shape."""

    def __getattr__(self, name):
        return getattr(torch.distributed, name)

    def _reduce_scatter_base(self, output, parts, group):
        torch.distributed._reduce_scatter_base(output.view(-1), parts.flatten(), group=group)


@pytest.fixture
def on_cpus(monkeypatch):
    """Ranks that are forked from here run fairscale without a GPU."""
    pytest.importorskip("fairscale.nn.data_parallel", reason="fairscale is not installed")
    from fairscale.internal import reduce_scatter_bucketer
    from fairscale.nn.data_parallel import fully_sharded_data_parallel

    monkeypatch.setattr(fully_sharded_data_parallel, "torch", OnCpu())
    monkeypatch.setattr(reduce_scatter_bucketer, "dist", AnyShape())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(fairscale_fsdp, "check_fairscale", lambda device: None)
    layout = Layout(2, 2, FAIRSCALE, TESTED)
    monkeypatch.setitem(layouts.EVERY_LAYOUT, "fairscale 2", layout)
    return layout


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus") / "data")


def run_both(layout, data, home, *, words=(), own=(), architectures=TESTED):
    """Train alone and at a layout; all has to agree."""
    alone = Layout(1, 1, (), architectures)
    there = Layout(layout.size, layout.data_size, (*layout.flags, *own), architectures)
    expected = train_at(alone, data, home / "alone", updates=UPDATES, words=words)
    results = run_world(
        layout.size, lambda rank: train_at(there, data, home, updates=UPDATES, words=words)
    )
    for found in results:
        for name in architectures:
            agree(expected[name], found[name], name)


def test_gradients_and_losses_are_those_of_one_process(on_cpus, data, tmp_path):
    run_both(on_cpus, data, tmp_path)


@pytest.mark.parametrize(
    ("words", "own"),
    [
        (("--freeze-params", "layers.0.*"), ()),
        (("--cross-entropy-chunk-tokens", "8"), ("--no-reshard-after-forward",)),
    ],
)
def test_they_are_with_other_flags_too(words, own, on_cpus, data, tmp_path):
    run_both(on_cpus, data, tmp_path, words=words, own=own, architectures=("dense",))


@pytest.mark.long
def test_checkpoints_go_on_at_other_backends_and_theirs_here(on_cpus, data, tmp_path):
    states = save_at(["one", "fairscale 2", "shard 2"], "moe", data, tmp_path)
    for after in ("fairscale 2", "one", "shard 2"):
        check_after(after, "moe", data, states, tmp_path / after.replace(" ", "_"))


def test_a_pass_outside_of_an_update_leaves_no_gradient(on_cpus, data, tmp_path):
    """Such as that of the search for a number that is not finite."""

    def work(rank):
        losses = []
        for searching in (False, True):
            words = [*ARCHITECTURES["dense"], *FAIRSCALE, "--no-save"]
            trainer = make_trainer(data, tmp_path / "run", words, updates=UPDATES, data_size=2)
            step = trainer.train_step

            def search_first(batches, trainer=trainer, step=step):
                assert "no module gave" in trainer.describe_nonfinite(batches)
                return step(batches)

            if searching:
                trainer.train_step = search_first
            losses.append(train(trainer).losses)
        return losses

    for plain, searched in run_world(2, work):
        assert searched == plain


def test_at_rest_the_model_has_the_rows_of_every_sharded_backend(on_cpus, data, tmp_path):
    def work(rank):
        words = [*ARCHITECTURES["dense"], *FAIRSCALE, "--no-save"]
        model = make_trainer(data, tmp_path / "run", words, updates=1, data_size=2).model
        return {
            name: (tuple(param.shape), tuple(param.to_local().shape), str(param.placements))
            for name, param in model.named_parameters()
        }

    for found in run_world(2, work):
        assert len(found) > 10
        for whole, local, placements in found.values():
            assert local == (whole[0] // 2, *whole[1:])
            assert placements == "(Shard(dim=0),)"


def test_rows_that_ranks_cannot_share_are_refused_by_name(on_cpus, data, tmp_path):
    def work(rank):
        words = [*ARCHITECTURES["dense"], "--decoder-ffn-embed-dim", "33", *FAIRSCALE]
        with pytest.raises(ConfigError) as caught:
            make_trainer(data, tmp_path / "run", words, updates=1, data_size=2)
        return str(caught.value)

    for message in run_world(2, work):
        assert message.startswith("--ddp-backend fairscale cannot spread layers.0.ffn.")
        assert "(33" in message
        assert message.endswith("give --ddp-backend fully_sharded")


def test_a_cpu_and_a_missing_installation_are_refused(monkeypatch, data, tmp_path):
    with pytest.raises(ConfigError, match="--ddp-backend fairscale needs a GPU"):
        make_trainer(data, tmp_path, [*ARCHITECTURES["dense"], *FAIRSCALE], updates=1)
    with pytest.raises(ConfigError, match="needs a GPU, as .*; give --ddp-backend fully_sharded"):
        check_fairscale(torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="is not installed; run 'pip install .*fairscale==0.4.13"):
        check_fairscale(torch.device("cuda"))


def test_nothing_else_is_asked_of_other_backends():
    for backend in ("fully_sharded", "pytorch_ddp", "none"):
        check_backend(
            DistributedConfig(ddp_backend=backend), torch.device("cpu"), others={"--compile": True}
        )


@pytest.mark.parametrize(
    "setting",
    [
        {"replicate_size": 2},
        {"model_parallel_size": 2},
        {"expert_parallel_size": 2},
        {"seq_parallel_size": 2},
        {"gather_in_half": True},
        {"cpu_offload": True},
        {"deterministic_reduce": True},
    ],
)
def test_what_fairscale_does_not_do_is_refused_by_name(setting):
    flag = "--" + next(iter(setting)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} does not go with --ddp-backend fairscale"):
        DistributedConfig(ddp_backend="fairscale", **setting).validate()


@pytest.mark.parametrize("flag", ["--compile", "--checkpoint-activations"])
def test_what_a_wrapper_cannot_hold_is_refused_by_name(flag, monkeypatch):
    monkeypatch.setattr(fairscale_fsdp, "check_fairscale", lambda device: None)
    cfg, others = DistributedConfig(ddp_backend="fairscale"), {"--other": False, flag: True}
    with pytest.raises(ConfigError, match=f"^{flag} does not go with --ddp-backend fairscale"):
        check_backend(cfg, torch.device("cuda"), others=others)
