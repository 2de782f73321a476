import math

from hypothesis import given
from hypothesis import strategies as st

from scalerun.checkpoint.manifest import Manifest
from scalerun.checkpoint.retention import Retention


def manifest(number, kinds=("update",), metric=None, metric_name="/loss"):
    return Manifest(
        num_updates=number,
        files={},
        version="",
        torch_version="",
        world_size=1,
        kinds=list(kinds),
        metric=metric,
        metric_name=metric_name,
    )


def rules(updates=-1, epochs=-1, best=-1, maximize=False):
    return Retention(
        keep_last_updates=updates,
        keep_last_epochs=epochs,
        keep_best=best,
        maximize=maximize,
        metric_name="/loss",
    )


def test_without_limits_everything_is_kept():
    assert rules().expired([manifest(n) for n in range(9)], protected=[8]) == []


def test_each_kind_has_its_own_limit_and_either_may_keep():
    made = [
        manifest(1, ["epoch"]),
        manifest(2),
        manifest(3, ["epoch", "update"]),
        manifest(4),
        manifest(5),
        manifest(6, ["epoch"]),
    ]
    assert rules(updates=2, epochs=2).expired(made, protected=[6]) == [1, 2]
    assert rules(updates=0, epochs=-1).expired(made, protected=[6]) == [2, 4, 5]
    assert rules(updates=1, epochs=0).expired(made, protected=[6]) == [1, 2, 3, 4]


def test_the_best_are_kept_beside_the_newest():
    made = [manifest(n, metric=m) for n, m in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0), (5, 4.0))]
    assert rules(updates=1, best=2).expired(made, protected=[5]) == [1, 4]
    assert rules(updates=1, best=1, maximize=True).expired(made, protected=[5]) == [1, 2, 3]


def test_best_ignores_nan_and_other_metrics_and_prefers_the_older_of_equals():
    made = [
        manifest(1, metric=math.nan),
        manifest(2, metric=0.1, metric_name="other/loss"),
        manifest(3, metric=2.0),
        manifest(4, metric=2.0),
        manifest(5),
    ]
    assert [m.num_updates for m in rules().best(made)] == [3, 4]


@given(
    st.lists(st.integers(0, 30), unique=True, min_size=1),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.data(),
)
def test_what_the_pointers_name_is_never_deleted(numbers, updates, epochs, best, data):
    kinds = st.sampled_from([["update"], ["epoch"], ["update", "epoch"]])
    metric = st.none() | st.floats()
    made = [manifest(n, data.draw(kinds), data.draw(metric)) for n in numbers]
    protected = {max(numbers), data.draw(st.sampled_from(numbers))}
    expired = rules(updates, epochs, best).expired(made, protected)
    assert not protected & set(expired)
    assert expired == sorted(set(expired))
    left = [m for m in made if m.num_updates not in expired]
    assert rules(updates, epochs, best).expired(left, protected) == []
