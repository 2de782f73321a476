import pytest

import scalerun.criterions  # noqa: F401
from scalerun.criterions.base_criterion import (
    CRITERION_REGISTRY,
    BaseCriterion,
    Objective,
    build_criterion,
)
from scalerun.criterions.cross_entropy import CrossEntropy
from scalerun.dataclass.errors import UserError


def test_a_criterion_is_built_from_its_settings():
    assert isinstance(build_criterion(CRITERION_REGISTRY.config_for("cross_entropy")), CrossEntropy)


def test_a_criterion_has_to_say_what_it_computes():
    with pytest.raises(TypeError, match="forward"):
        BaseCriterion(CRITERION_REGISTRY.config_for("cross_entropy"))


def test_a_run_keeps_its_criterion_and_may_change_its_settings():
    saved = Objective(CRITERION_REGISTRY.config_for("cross_entropy")).state_dict()
    same = CRITERION_REGISTRY.config_for("cross_entropy")
    Objective(same).load_state_dict(saved)
    with pytest.raises(UserError, match="with --criterion cross_entropy, not other"):
        Objective(same.replace().named("other")).load_state_dict(saved)
