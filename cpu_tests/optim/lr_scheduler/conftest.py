"""Build a schedule over the smallest optimizer."""

import pytest
import torch
from torch import nn

from scalerun.optim.base_optimizer import build_optimizer
from scalerun.optim.lr_scheduler.base_lr_scheduler import LR_SCHEDULER_REGISTRY, build_lr_scheduler
from scalerun.optim.sgd import SGDConfig


@pytest.fixture
def schedule():
    def schedule(name, *, max_update=0, **settings):
        cfg = LR_SCHEDULER_REGISTRY.config_for(name).replace(**settings)
        cfg.validate()
        param = nn.Parameter(torch.zeros(1))
        optimizer = build_optimizer(SGDConfig(), [("w", param)])
        return build_lr_scheduler(cfg, optimizer, max_update=max_update)

    return schedule
