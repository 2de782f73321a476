import math
import threading

import pytest
import torch
import torch.nn.functional as F

from scalerun.modules.activations import FEW_NUMBERS, gelu, gelu_tanh


@pytest.mark.parametrize("numbers", [1, 1000, FEW_NUMBERS, FEW_NUMBERS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gelu_weighs_by_the_normal_distribution(numbers, dtype):
    x = (4 * torch.randn(numbers, dtype=torch.float64)).to(dtype)
    wide = x.double()
    expected = wide * torch.distributions.Normal(0.0, 1.0).cdf(wide)
    with torch.no_grad():
        error = (gelu(x).double() - expected).abs().max()
    assert error <= 4 * torch.finfo(dtype).eps * (1 + float(wide.abs().max()))


def test_gelu_tanh_is_the_formula_of_gpt2():
    x = 4 * torch.randn(1000, dtype=torch.float64)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    assert torch.allclose(gelu_tanh(x), x / 2 * (1 + torch.tanh(inner)), rtol=0, atol=1e-13)
    assert (gelu_tanh(x) - gelu(x)).abs().max() > 1e-4


def test_gelu_has_its_gradient():
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gelu, x)


def test_threads_leave_onednn_on():
    x = torch.randn(1000)

    def work():
        with torch.inference_mode():
            for _ in range(2000):
                gelu(x)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.backends.mkldnn.enabled


def test_onednn_stays_off_where_it_was_off(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    with torch.no_grad():
        assert torch.equal(gelu(torch.ones(3)), F.gelu(torch.ones(3)))
    assert not torch.backends.mkldnn.enabled
