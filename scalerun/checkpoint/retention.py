"""Which checkpoints are kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from scalerun.checkpoint.manifest import Manifest


@dataclass(frozen=True)
class Retention:
    """The rules of a run; -1 stands for "all" in the first two."""

    keep_last_updates: int
    keep_last_epochs: int
    keep_best: int
    """Best checkpoints to keep beside those; -1 or 0 for none but the very best."""
    maximize: bool
    metric_name: str

    def best(self, manifests: Sequence[Manifest]) -> list[Manifest]:
        """Checkpoints that have the metric, best first; of equals, the older first."""
        scored = [
            (-manifest.metric if self.maximize else manifest.metric, manifest.num_updates, manifest)
            for manifest in manifests
            if manifest.metric is not None
            and not math.isnan(manifest.metric)
            and manifest.metric_name == self.metric_name
        ]
        return [manifest for _, _, manifest in sorted(scored, key=lambda entry: entry[:2])]

    def expired(self, manifests: Sequence[Manifest], protected: Collection[int]) -> list[int]:
        """Update counts of the checkpoints to delete, oldest first.

        Args:
            manifests: the whole checkpoints of the run, in any order.
            protected: update counts never to delete: what the pointer files name.
        """
        newest = sorted(manifests, key=lambda manifest: manifest.num_updates, reverse=True)
        kept = set(protected)
        for kind, limit in (("update", self.keep_last_updates), ("epoch", self.keep_last_epochs)):
            of_kind = [m.num_updates for m in newest if kind in m.kinds]
            kept.update(of_kind if limit < 0 else of_kind[:limit])
        kept.update(m.num_updates for m in self.best(newest)[: max(self.keep_best, 0)])
        return [m.num_updates for m in reversed(newest) if m.num_updates not in kept]
