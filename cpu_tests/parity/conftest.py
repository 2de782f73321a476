"""Makes the package ``torchscale`` importable on its own.

It asks for fairscale and timm, whose own requirements would replace torch; of both it needs what an
evaluation on one device never calls.
"""

import sys
import types


def _stand_in(name: str, **content: object) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(content)
    sys.modules.setdefault(name, module)


def _not_for_evaluation(*args: object, **kwargs: object) -> None:
    raise AssertionError("an evaluation without checkpointing or sharding needs no wrapper")


_stand_in("fairscale")
_stand_in("fairscale.nn", checkpoint_wrapper=_not_for_evaluation, wrap=_not_for_evaluation)
_stand_in("timm")
_stand_in("timm.models")
_stand_in("timm.models.layers", drop_path=lambda x, rate, training: x)
