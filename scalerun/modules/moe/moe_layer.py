"""A per-token layer in which each token is seen by one or two of many experts.

B batch, T time, S = B * T tokens in the order in which they find places, D model width.
"""

from __future__ import annotations

from torch import Tensor

from scalerun.modules.auxiliary import Auxiliary
from scalerun.modules.block_context import BlockContext
from scalerun.modules.moe.dispatch import Dispatch, make_dispatch
from scalerun.modules.moe.expert_parallel import make_exchange
from scalerun.modules.moe.experts import Experts
from scalerun.modules.moe.router import Choices, Router
from scalerun.modules.per_token import PerToken


class MoELayer(PerToken):
    """Mixture of experts with a limited number of places for each (arXiv:2006.16668, 2204.09179).

    A token that finds no place at any of its experts gets 0: the residual stream alone passes it
    on. Which tokens those are depends on all tokens of the batch, later ones included: where a
    place is refused, an output may depend on tokens behind it.

    Args:
        router: chooses experts.
        experts: compute.
        mask_padding: padding is not routed and counts nowhere; its output is 0. Without it padding
            takes places as in TorchScale.
        time_major: tokens find places in the order of time, for all samples at once, as in
            TorchScale's encoder; else sample by sample, as in its decoder.
    """

    has_auxiliary_loss = True

    def __init__(
        self, router: Router, experts: Experts, *, mask_padding: bool = True, time_major: bool
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.mask_padding = mask_padding
        self.time_major = time_major

    def forward(self, x_BTD: Tensor, context: BlockContext) -> tuple[Tensor, Auxiliary | None]:
        num_samples, num_tokens, dim = x_BTD.shape
        padding = context.padding_of_new(num_tokens) if self.mask_padding else None
        if self.time_major:
            x_SD = x_BTD.transpose(0, 1).reshape(-1, dim)
            padding_S = None if padding is None else padding.t().reshape(-1)
        else:
            x_SD = x_BTD.reshape(-1, dim)
            padding_S = None if padding is None else padding.reshape(-1)
        routing = self.router(x_SD, padding_S)
        dispatch = self.dispatch(routing, grouped=self.experts.has_grouped_products(x_SD))
        rows_RD = self.experts(dispatch.out(x_SD), dispatch)
        mask_KSD = self.experts.output_mask(routing.weights_KS, dim, rows_RD.dtype)
        y_SD = dispatch.back(rows_RD, routing.weights_KS, mask_KSD)
        if self.time_major:
            y_BTD = y_SD.view(num_tokens, num_samples, dim).transpose(0, 1)
        else:
            y_BTD = y_SD.view(num_samples, num_tokens, dim)
        return y_BTD, Auxiliary(routing.loss, routing.stats)

    def dispatch(self, choices: Choices, *, grouped: bool) -> Dispatch:
        """The tokens' ways to their experts, here or on the ranks that hold them."""
        mesh = self.experts.placement.mesh
        if mesh is None:
            return make_dispatch(choices, grouped=grouped)
        return make_exchange(choices, mesh, grouped=grouped)

    def num_active_weights(self) -> int:
        choices = self.router.gating.top_k * self.experts.weights_per_expert()
        return choices + self.router.gate.num_active_weights()
