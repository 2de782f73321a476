import pytest

import scalerun.criterions  # noqa: F401
from scalerun.criterions.base_criterion import CRITERION_REGISTRY, BaseCriterion, build_criterion
from scalerun.criterions.cross_entropy import CrossEntropy


def test_a_criterion_is_built_from_its_settings():
    assert isinstance(build_criterion(CRITERION_REGISTRY.config_for("cross_entropy")), CrossEntropy)


def test_a_criterion_has_to_say_what_it_computes():
    with pytest.raises(TypeError, match="forward"):
        BaseCriterion(CRITERION_REGISTRY.config_for("cross_entropy"))
