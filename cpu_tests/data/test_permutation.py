import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scalerun.data.permutation import permutation, uniform


@given(st.integers(0, 200), st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_a_permutation_holds_every_number_once_and_depends_on_its_key_alone(size, key):
    order = permutation(size, *key)
    assert sorted(order.tolist()) == list(range(size))
    assert (order == permutation(size, *key)).all()


def test_the_bits_are_those_of_every_version():
    assert permutation(8, 1, 2, 3).tolist() == [1, 3, 7, 5, 2, 0, 4, 6]


def test_other_keys_give_other_orders():
    orders = {tuple(permutation(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_place_is_equally_likely():
    first = np.array([permutation(10, seed)[0] for seed in range(5000)])
    counts = np.bincount(first, minlength=10)
    assert abs(counts - 500).max() < 5 * np.sqrt(500)


def test_uniform_numbers_spread_evenly():
    numbers = np.array([uniform(seed) for seed in range(2000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.03
