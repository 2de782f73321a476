"""Which kind of TorchScale's models a state dict belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.beit3 import PREFIX as BEIT3
from scalerun.models.torchscale.beit3 import TEXT
from scalerun.models.torchscale.facts import (
    EMBEDDING,
    SIDES,
    expert_facts,
    stack_facts,
    unsaid,
    unsaid_of_experts,
)
from scalerun.models.torchscale.keys import without_prefix

RETENTION = r"layers\.\d+\.retention\."


@dataclass(frozen=True)
class Recognized:
    """A state dict of a known kind."""

    kind: str
    """encoder, mlm, decoder, retnet, encoder_decoder or beit3."""
    state: Mapping[str, Tensor]
    """Keys as the function that loads this kind takes them."""
    sides: Mapping[str, Mapping[str, Tensor]]
    """The keys of each stack, without prefix."""
    left_out: tuple[str, ...] = ()
    """Keys that belong to parts around the model."""

    @property
    def num_rows(self) -> int:
        """Symbols of the vocabulary.

        Raises:
            UserError: there is no table of them.
        """
        tables = [self.state.get(TEXT), *(state.get(EMBEDDING) for state in self.sides.values())]
        for table in tables:
            if table is not None:
                return table.shape[0]
        raise UserError(f"the state dict has no table of tokens ({EMBEDDING})")


def recognize(state: Mapping[str, Tensor], names: Iterable[str] = ()) -> Recognized:
    """Say whose keys these are.

    Args:
        names: fields of a configuration, which tell an encoder from a decoder where keys do not.

    Raises:
        UserError: the keys are not those of a model that can be converted.
    """
    if any(key.startswith((BEIT3, "vision_embed.")) for key in state):
        return _beit3(state)
    firsts = {key.split(".")[0] for key in state}
    if firsts == set(SIDES):
        sides = {side: without_prefix(state, f"{side}.") for side in SIDES}
        return Recognized("encoder_decoder", state, sides)
    if len(firsts) == 1 and firsts < set(SIDES):
        [side] = firsts
        return _one_stack(side, without_prefix(state, f"{side}."))
    if "layers" in firsts and not firsts & set(SIDES):
        return _one_stack(_side_of(state, names), state)
    strange = sorted(firsts - {"layers", *SIDES})[0]
    raise UserError(
        f"the state dict has keys that begin with {strange}, which no TorchScale model has; give "
        "one whose keys begin with encoder., decoder., beit3. or layers."
    )


def _beit3(state: Mapping[str, Tensor]) -> Recognized:
    own = without_prefix(state, BEIT3) or dict(state)
    left_out = tuple(key for key in state if key.removeprefix(BEIT3) not in own)
    return Recognized("beit3", own, {"encoder": without_prefix(own, "encoder.")}, left_out)


def _one_stack(side: str, state: Mapping[str, Tensor]) -> Recognized:
    kind = side
    if side == "encoder" and "output_projection.dense.weight" in state:
        kind = "mlm"
    if any(re.match(RETENTION, key) for key in state):
        kind = "retnet"
    return Recognized(kind, state, {side: state})


def _side_of(state: Mapping[str, Tensor], names: Iterable[str]) -> str:
    """Encoder or decoder, for keys without prefix."""
    if any(re.match(rf"self_attn_relative_position\.|{RETENTION}", key) for key in state):
        return "decoder"
    only_encoders = r"relative_position\..*|.*\.ffn\.A\..*|output_projection\.dense\..*"
    if any(re.fullmatch(only_encoders, key) for key in state):
        return "encoder"
    named = {side for side in SIDES for name in names if name.startswith(f"{side}_")}
    if len(named) == 1:
        return named.pop()
    raise UserError(
        "the keys do not tell an encoder from a decoder; name encoder_attention_heads or "
        "decoder_attention_heads in a file for --torchscale-config, and what they do not say "
        f"either: {', '.join(_unsaid_of_both(state, names))}"
    )


def _unsaid_of_both(state: Mapping[str, Tensor], given: Iterable[str]) -> list[str]:
    """Fields that have to be named for an encoder or for a decoder, besides the heads."""
    names = [name for side in SIDES for name in unsaid(side, state, stack_facts(side, state))]
    experts = expert_facts(state)
    names += unsaid_of_experts(experts, {}) if experts else []
    known = {*given, *(f"{side}_attention_heads" for side in SIDES)}
    return [name for name in dict.fromkeys(names) if name not in known]
