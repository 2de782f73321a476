import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalerun.data.mixture_dataset import CorpusSize, Mixture
from scalerun.dataclass.errors import ConfigError, UserError


class Lengths:
    """A token file of which only the lengths matter."""

    def __init__(self, lengths):
        self.ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.num_documents = len(lengths)
        self.num_tokens = int(self.ends[-1])


SIZES = {"books": CorpusSize(10, 1000), "web": CorpusSize(90, 3000)}


def test_weights_are_shares_of_tokens_and_keep_the_total():
    copies = Mixture({"web": 0.3, "books": 0.7}).copies(SIZES)
    assert copies == {"books": pytest.approx(2.8), "web": pytest.approx(0.4)}
    assert Mixture({"web": 3, "books": 7}).copies(SIZES) == copies


def test_alpha_gives_the_reference_shares_of_documents():
    copies = Mixture(alpha=0.5).copies(SIZES)
    shares = np.array([0.1, 0.9]) ** 0.5
    shares /= shares.sum()
    assert copies["books"] == pytest.approx(shares[0] * 100 / 10)
    assert copies["web"] == pytest.approx(shares[1] * 100 / 90)


def test_without_settings_each_document_is_read_once():
    assert Mixture().copies(SIZES) == {"books": 1, "web": 1}
    files = [Lengths([3, 4]), Lengths([5])]
    assert Mixture().choose(files, ["b", "a"], 1, 1, 0).tolist() == [0, 1, 2]


def test_a_shard_without_a_corpus_shares_its_weight_among_the_others():
    sizes = {"books": CorpusSize(0, 0), "web": CorpusSize(5, 50)}
    assert Mixture({"books": 0.9, "web": 0.1}).copies(sizes) == {"books": 0, "web": 1}
    assert Mixture({"books": 1, "web": 0}).copies(sizes) == {"books": 0, "web": 0}


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.lists(st.integers(1, 50), min_size=1, max_size=30),
    st.floats(0.01, 1), st.floats(0.01, 1), st.integers(0, 10**6),
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_whole_copies_and_a_remainder_make_up_the_shares(web, books, weight, other, seed):
    mixture = Mixture({"web": weight, "books": other})
    files = [Lengths(web), Lengths(books)]
    chosen = mixture.choose(files, ["web", "books"], seed, 1, 0)
    assert chosen.tolist() == mixture.choose(files, ["web", "books"], seed, 1, 0).tolist()
    times = np.bincount(chosen, minlength=len(web) + len(books))
    copies = mixture.copies(
        {"web": CorpusSize(len(web), sum(web)), "books": CorpusSize(len(books), sum(books))}
    )
    for name, lengths, mine in (
        ("web", web, times[: len(web)]), ("books", books, times[len(web) :]),
    ):  # fmt: skip
        assert set(mine.tolist()) <= {int(copies[name]), int(copies[name]) + 1}
        assert abs(int(mine @ np.array(lengths)) - copies[name] * sum(lengths)) <= max(lengths)


def test_a_small_share_of_one_document_is_right_on_average_over_epochs():
    files = [Lengths([100]), Lengths([100] * 9)]
    mixture = Mixture({"rare": 0.03, "web": 0.97})
    epochs = [mixture.choose(files, ["rare", "web"], 1, epoch, 0) for epoch in range(1000)]
    read = sum(int((chosen == 0).sum()) for chosen in epochs)
    assert abs(read - 300) < 5 * np.sqrt(210)


def test_weight_zero_leaves_a_corpus_out():
    files = [Lengths([3, 4]), Lengths([5, 6])]
    chosen = Mixture({"a": 0, "b": 1}).choose(files, ["a", "b"], 1, 1, 0)
    assert set(chosen.tolist()) <= {2, 3}
    assert len(chosen) >= 2


@pytest.mark.parametrize(
    ("weights", "alpha", "message"),
    [
        ({"a": -1}, 1, "--corpus-weights gives a the weight -1"),
        ({"a": float("nan")}, 1, "the weight nan"),
        ({"a": float("inf")}, 1, "the weight inf"),
        ({"a": 0.0}, 1, "all weights are 0"),
        ({}, -0.5, "--multicorpus-sampling-alpha is -0.5"),
        ({}, float("nan"), "--multicorpus-sampling-alpha is nan"),
        ({"a": 1.0}, 0.5, "exclude each other"),
    ],
)
def test_impossible_shares_are_refused(weights, alpha, message):
    with pytest.raises(ConfigError, match=message):
        Mixture(weights, alpha)


def test_names_must_be_those_of_the_data():
    with pytest.raises(UserError, match=r"names webb, which .* its corpora: books, web"):
        Mixture({"webb": 1, "books": 1}).check_names(["books", "web"])
    with pytest.raises(UserError, match="gives no weight to books"):
        Mixture({"web": 1}).check_names(["books", "web"])
    Mixture().check_names(["books"])
