"""Each layer alone, against torch's own, in float64."""

import torch
import torch.nn.functional as F
from torch import nn

from cpu_tests.world import run_world
from scalerun.distributed.mesh import ParallelDims, build_meshes
from scalerun.modules.block_context import BlockContext
from scalerun.modules.init import LinearInit, initialize, normal
from scalerun.modules.megatron.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from scalerun.modules.norm import LayerNorm, RMSNorm, normed

INIT = LinearInit(normal(0.4), normal(0.3))
VOCAB, DIM = 12, 4


def pair(make, mesh):
    """A layer on the axis and the plain one, with the same drawn weights."""
    layers = [make(mesh), make(None)]
    for layer in layers:
        initialize(layer, 3)
        layer.double()
    for (name, spread), plain in zip(
        layers[0].named_parameters(), layers[1].parameters(), strict=True
    ):
        assert torch.equal(whole(spread), plain.detach()), name
    return layers


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def same_gradients(spread, plain):
    for (name, a), b in zip(spread.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            whole(a.grad), b.grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


def inputs(*shape):
    x = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x.clone().requires_grad_(), x.clone().requires_grad_()


def linear_layers(mesh, rank):
    def columns(tp_mesh):
        return ColumnParallelLinear(6, 8, init=INIT, tp_mesh=tp_mesh, gather_output=True)

    def rows(tp_mesh):
        return RowParallelLinear(6, 8, init=INIT, tp_mesh=tp_mesh, input_is_parallel=False)

    for make in (columns, rows):
        spread, plain = pair(make, mesh)
        x, expected_x = inputs(2, 4, 6)
        y, expected = spread(x), plain(expected_x)
        close(expected, F.linear(expected_x, plain.weight, plain.bias))
        close(y, expected)
        weights = torch.arange(8.0, dtype=torch.float64)
        ((y * weights).sin()).sum().backward()
        ((expected * weights).sin()).sum().backward()
        close(x.grad, expected_x.grad)
        same_gradients(spread, plain)
    column = ColumnParallelLinear(6, 8, init=INIT, tp_mesh=mesh)
    assert column(torch.zeros(2, 6)).shape == (2, 4)
    assert column.weight.shape == (8, 6)
    assert column.weight.to_local().shape == (4, 6)


def spread_tokens(mesh, rank):
    """A row-parallel layer that hands each rank its own tokens."""

    def rows(tp_mesh):
        return RowParallelLinear(6, 8, init=INIT, tp_mesh=tp_mesh, input_is_parallel=False)

    spread, plain = pair(rows, mesh)
    x, expected_x = inputs(2, 4, 6)
    y, expected = spread(x, mesh), plain(expected_x)
    own = slice(2 * rank, 2 * rank + 2)
    close(y, expected[:, own])
    y.sin().sum().backward()
    expected.sin().sum().backward()
    close(x.grad, expected_x.grad)
    same_gradients(spread, plain)


def embedding(mesh, rank):
    def table(padding_idx):
        return lambda tp_mesh: VocabParallelEmbedding(
            VOCAB, DIM, padding_idx=padding_idx, init=normal(0.5), tp_mesh=tp_mesh
        )

    tokens = torch.tensor([[0, 1, 7, 5], [11, 6, 7, 1]])
    # The second rank's own row of that number (6 + 1) is an ordinary token.
    for padding_idx in (1, 6, 7, None):
        spread, plain = pair(table(padding_idx), mesh)
        torchs = nn.Embedding(VOCAB, DIM, padding_idx=padding_idx, _weight=plain.weight.detach())
        y = spread(tokens)
        close(y, torchs(tokens))
        y.sin().sum().backward()
        torchs(tokens).sin().sum().backward()
        close(whole(spread.weight.grad), torchs.weight.grad)
        rows = spread.weight.grad.full_tensor().abs().sum(1) > 0
        assert rows.tolist() == [i in tokens and i != padding_idx for i in range(VOCAB)]
        close(spread(tokens, mesh), torchs(tokens)[:, 2 * rank : 2 * rank + 2])


def norms(mesh, rank):
    """Features that are spread, and tokens that are."""
    for kind in (LayerNorm, RMSNorm):

        def make(tp_mesh, kind=kind):
            norm = kind(6, 1e-3)
            if tp_mesh is not None:
                norm.spread_over(tp_mesh)
            return norm

        spread, plain = pair(make, mesh)
        x, expected_x = inputs(2, 4, 6)
        own = slice(3 * rank, 3 * rank + 3)
        y, expected = spread(x[..., own]), plain(expected_x)
        close(y, expected[..., own])
        ((y + 1) ** 3).sum().backward()
        ((expected + 1) ** 3).sum().backward()
        close(x.grad[..., own], expected_x.grad[..., own])
        same_gradients(spread, plain)

        shared, plain = pair(make, None)
        x, expected_x = inputs(2, 4, 6)
        own = slice(2 * rank, 2 * rank + 2)
        y = normed(shared, x[:, own], BlockContext(time_mesh=mesh))
        expected = plain(expected_x)
        close(y, expected[:, own])
        ((y + 1) ** 3).sum().backward()
        ((expected + 1) ** 3).sum().backward()
        same_gradients(shared, plain)


def work(rank):
    mesh = build_meshes(ParallelDims(tensor=2), "cpu").model.tensor
    for check in (linear_layers, spread_tokens, embedding, norms):
        check(mesh, rank)


def test_layers_on_an_axis_are_torchs_own():
    run_world(2, work)


def test_without_an_axis_they_are_the_plain_layers():
    x, _ = inputs(2, 6)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(6, 8, init=INIT)
        initialize(layer, 1)
        layer.double()
        assert type(layer.weight) is nn.Parameter
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
