import torch

from scalerun.optim.adam import AdamConfig

BETAS, EPS, DECAY, LR = (0.8, 0.95), 1e-6, 0.1, 0.02


def config(**settings):
    return AdamConfig(adam_betas=list(BETAS), adam_eps=EPS, weight_decay=DECAY, **settings)


def by_hand(param, grads, decay):
    """The formula of the papers, in float64."""
    p, m, v = param.detach().double(), 0.0, 0.0
    for t, grad in enumerate(grads, start=1):
        g = grad.double()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        p = p - LR * decay * p
        p = p - LR * (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPS)
    return p


def test_five_steps_equal_the_formula_in_float64(build, model, set_grads):
    own, optimizer = build(config(), lr=LR)
    grads = {name: [] for name, _ in own.named_parameters()}
    for step in range(5):
        set_grads(own, step)
        for name, param in own.named_parameters():
            grads[name].append(param.grad.clone())
        optimizer.step()
    for (name, start), param in zip(model.named_parameters(), own.parameters(), strict=True):
        expected = by_hand(start, grads[name], DECAY if start.ndim >= 2 else 0.0)
        torch.testing.assert_close(param.double(), expected, rtol=1e-6, atol=1e-7)


def test_without_exclusions_it_is_torchs_adamw_to_the_bit(
    build, model, set_grads, assert_same_params
):
    own, optimizer = build(config(weight_decay_all=True), lr=LR)
    reference = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    for step in range(4):
        set_grads(own, step)
        set_grads(model, step)
        optimizer.step()
        reference.step()
    assert_same_params(own, model, rtol=0, atol=0)


def test_the_kernel_is_fused_also_on_the_cpu(build):
    _, optimizer = build(AdamConfig())
    assert all(group["fused"] for group in optimizer.param_groups)
