"""Criterions: from a model and a batch to a loss sum."""

from scalerun.criterions import cross_entropy, label_smoothed, moe
from scalerun.criterions.base_criterion import (
    CRITERION_REGISTRY,
    BaseCriterion,
    CriterionOutput,
    build_criterion,
    register_criterion,
)

__all__ = [
    "CRITERION_REGISTRY",
    "BaseCriterion",
    "CriterionOutput",
    "build_criterion",
    "cross_entropy",
    "label_smoothed",
    "moe",
    "register_criterion",
]
