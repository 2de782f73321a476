import pytest
import torch

from scalerun.optim.sgd import SGDConfig

LR, DECAY = 0.05, 0.2


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_steps_equal_the_formula_in_float64(build, model, set_grads, momentum, nesterov):
    cfg = SGDConfig(momentum=momentum, nesterov=nesterov, weight_decay=DECAY)
    own, optimizer = build(cfg, lr=LR)
    expected = {name: p.detach().double() for name, p in model.named_parameters()}
    buffers = {}
    for step in range(4):
        set_grads(own, step)
        for name, param in own.named_parameters():
            g = param.grad.double()
            buffers[name] = momentum * buffers[name] + g if name in buffers else g.clone()
            direction = g + momentum * buffers[name] if nesterov else buffers[name]
            decay = DECAY if param.ndim >= 2 else 0.0
            expected[name] = expected[name] * (1 - LR * decay) - LR * direction
        optimizer.step()
    for name, param in own.named_parameters():
        torch.testing.assert_close(param.double(), expected[name], rtol=1e-6, atol=1e-6)


def test_the_first_buffer_is_a_copy_of_the_gradient(build, set_grads):
    own, optimizer = build(SGDConfig(momentum=0.9, weight_decay=DECAY))
    set_grads(own, 0)
    optimizer.step()
    for name, param in own.named_parameters():
        assert torch.equal(optimizer.state_dict()[f"{name}.momentum_buffer"], param.grad)


def test_without_decay_it_is_torchs_sgd_to_the_bit(build, model, set_grads, assert_same_params):
    own, optimizer = build(SGDConfig(momentum=0.9, nesterov=True), lr=LR)
    reference = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, fused=True)
    for step in range(4):
        set_grads(own, step)
        set_grads(model, step)
        optimizer.step()
        reference.step()
    assert_same_params(own, model, rtol=0, atol=0)


def test_a_parameter_without_gradient_neither_moves_nor_decays(build, model, set_grads):
    own, optimizer = build(SGDConfig(momentum=0.9, weight_decay=DECAY), lr=LR)
    set_grads(own, 0)
    own.embed.weight.grad = None
    optimizer.step()
    assert torch.equal(own.embed.weight, model.embed.weight)
    assert not torch.equal(own.out.weight, model.out.weight)
