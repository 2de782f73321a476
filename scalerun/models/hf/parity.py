"""Whether a model and its conversion compute the same.

The library is asked itself where it is installed; else a second writing of the formulas is.
B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.base_model import BaseModel
from scalerun.models.hf.custom import MODELLING_FILE
from scalerun.models.hf.family import ACTIVATIONS, Family
from scalerun.models.hf.reference import REFERENCES

TOLERANCE = 1e-5
"""Largest difference of two logits, where they are below 1, else as a share of the largest."""
NUM_ROWS, NUM_TOKENS = 2, 48


def random_tokens(vocab_size: int, max_positions: int | None) -> Tensor:
    """(B, T) tokens, always the same, that tell models apart."""
    generator = torch.Generator().manual_seed(1)
    length = min(NUM_TOKENS, max_positions or NUM_TOKENS)
    return torch.randint(vocab_size, (NUM_ROWS, length), generator=generator)


def check_logits(found_BTV: Tensor, expected_BTV: Tensor, what: str) -> float:
    """The largest difference of logits.

    Args:
        what: was compared, for the message.

    Raises:
        UserError: it is too large.
    """
    if found_BTV.shape != expected_BTV.shape:
        raise UserError(f"{what} has logits of another shape than its source; nothing is written")
    difference = float((found_BTV.double() - expected_BTV.double()).abs().max())
    limit = TOLERANCE * max(1.0, float(expected_BTV.abs().max()))
    if not difference <= limit:
        raise UserError(
            f"{what} computes something else than its source: logits differ by up to "
            f"{difference:.2g}, more than {limit:.2g}; nothing is written"
        )
    return difference


def same_logits(
    vocab_size: int, expected: Callable[[Tensor], Tensor], what: str
) -> Callable[[BaseModel], None]:
    """A check that a model read back has its source's logits; raises as :func:`check_logits`.

    Args:
        expected: the source's logits (B, T, V) for tokens (B, T).
        what: was converted, for the message.
    """

    @torch.no_grad()
    def check(model: BaseModel) -> None:
        tokens_BT = random_tokens(vocab_size, model.max_positions())
        check_logits(model(tokens_BT).logits, expected(tokens_BT), f"the conversion of {what}")

    return check


def transformers_library() -> ModuleType | None:
    """The library, or None where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


@torch.no_grad()
def logits_by_library(model: Any, tokens_BT: Tensor) -> Tensor:
    """(B, T, V) of a model of the library, in float32."""
    logits: Tensor = model.float().eval()(tokens_BT).logits
    return logits


@torch.no_grad()
def source_logits(
    folder: Path,
    family: Family,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    tokens_BT: Tensor,
) -> Tensor:
    """(B, T, V) of a folder's model, by the library or by the formula.

    Args:
        folder: has configuration and weights.
        family: of the model.
        config: its complete settings.
        state: its weights.
    """
    library = transformers_library()
    if library is None:
        act = ACTIVATIONS[config["activation_function"]]
        return REFERENCES[family.model_type](config, state, tokens_BT, act)
    return logits_by_library(
        library.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), tokens_BT
    )


def custom_logits(folder: Path, tokens_BT: Tensor) -> Tensor:
    """(B, T, V) of a folder with a modelling file of its own.

    Raises:
        UserError: the library, which that file needs, is not installed.
    """
    library = transformers_library()
    if library is None:
        raise UserError(
            "this architecture is no OPT, and what is written for it is compared by the package "
            "transformers; install it: pip install transformers"
        )
    # Not by the library's own import of foreign code, which would copy the file to a cache.
    path = folder / MODELLING_FILE.name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return logits_by_library(module.ScalerunForCausalLM.from_pretrained(folder), tokens_BT)
