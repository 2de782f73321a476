from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from scalerun.dataclass.errors import UserError
from scalerun.models.torchscale.expert_files import joined_experts, read_checkpoint

LAYER = "decoder.layers.1.moe_layer"


def shared(num_experts: int) -> dict[str, Tensor]:
    return {
        f"{LAYER}.gate.wg.weight": torch.ones(num_experts, 4),
        "decoder.layer_norm.weight": torch.ones(4),
    }


def rank_state(*numbers: int) -> dict[str, Tensor]:
    """Local experts whose weights are their numbers in the whole model."""
    return {
        f"{LAYER}.experts.{j}.fc1.bias": torch.full((3,), float(n)) for j, n in enumerate(numbers)
    }


@pytest.mark.parametrize(
    ("num_experts", "ranks"),
    [
        (4, [rank_state(0, 1), rank_state(2, 3)]),
        (2, [rank_state(0), rank_state(1)]),
        (2, [rank_state(0), rank_state(1), rank_state(0), rank_state(1)]),
        (3, [rank_state(0, 1, 2)]),
    ],
)
def test_each_expert_gets_its_number(num_experts: int, ranks: list[dict[str, Tensor]]) -> None:
    joined = joined_experts(shared(num_experts), ranks)
    assert len(joined) == num_experts
    for number in range(num_experts):
        assert joined[f"{LAYER}.experts.{number}.fc1.bias"].tolist() == [number] * 3


def test_copies_that_differ_and_experts_that_lack_are_refused() -> None:
    with pytest.raises(UserError, match=r"different copies of .*experts\.0\.fc1\.bias"):
        joined_experts(shared(1), [rank_state(0), rank_state(1)])
    with pytest.raises(UserError, match="files of 1 ranks have 2 experts, .* among 4"):
        joined_experts(shared(4), [rank_state(0, 1)])
    with pytest.raises(UserError, match="no gate"):
        joined_experts({}, [rank_state(0)])


def test_the_files_of_all_ranks_are_read_with_the_shared_one(tmp_path: Path) -> None:
    parts = {"shared": shared(4), "rank-0": rank_state(0, 1), "rank-1": rank_state(2, 3)}
    for name, state in parts.items():
        torch.save(
            {"model": state, "cfg": {"model": {"dropout": 0.1}}}, tmp_path / f"best-{name}.pt"
        )
    file = read_checkpoint(tmp_path / "best-shared.pt")
    assert file.record == {"dropout": 0.1}
    assert len(file.state) == 6
    (tmp_path / "best-rank-1.pt").unlink()
    with pytest.raises(UserError, match="files of ranks are missing"):
        read_checkpoint(tmp_path / "best-shared.pt")
    (tmp_path / "best-rank-0.pt").unlink()
    with pytest.raises(UserError, match=r"best-rank-0\.pt is not beside it"):
        read_checkpoint(tmp_path / "best-shared.pt")
    torch.save(shared(4), tmp_path / "alone.pt")
    assert len(read_checkpoint(tmp_path / "alone.pt").state) == 2
