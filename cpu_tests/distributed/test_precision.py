"""Flags become one number format."""

import pytest
import torch

from scalerun.distributed.precision import choose_precision

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("fp16", "bf16", "dtype"),
    [(False, False, torch.float32), (False, True, torch.bfloat16), (True, False, torch.bfloat16)],
)
def test_products_on_a_cpu_are_never_in_float16(fp16, bf16, dtype):
    precision = choose_precision(fp16=fp16, bf16=bf16, device=CPU)
    with precision.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert not precision.needs_loss_scale


def test_float16_on_a_gpu_scales_the_loss():
    precision = choose_precision(fp16=True, bf16=False, device=torch.device("cuda"))
    assert precision.dtype == torch.float16
    assert precision.needs_loss_scale
