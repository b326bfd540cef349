"""Orders of several sources: shares, epochs and equality with a single source."""

import pytest

from megadapo.data.order import EpochOrder, Share, WeightedOrder
from megadapo.data.prompts import Prompt, PromptStream

PROMPTS = [Prompt(f"{i:02d}", (("user", f"question {i}"),), str(i), "test") for i in range(9)]
SHARES = (Share("a", 6, 0.3), Share("b", 3, 0.1))


def order_of(*shares: Share, seed: int = 0, shuffle: bool = True) -> WeightedOrder:
    return WeightedOrder(shares, seed, name="prompts", shuffle=shuffle)


@pytest.mark.parametrize(
    "weights", [(1, 1), (3, 1), (0.7, 0.2, 0.1), (5, 1, 1, 1, 1), (1e-3, 1), (0.31, 0.47, 0.123)]
)
def test_every_prefix_has_the_shares(weights):
    """Drawing whole blocks, or at random, would be off by more than one prompt."""
    order = order_of(*(Share(str(n), 1, weight) for n, weight in enumerate(weights)))
    counts = [0] * len(weights)
    for index in range(3000):
        counts[order.at(index)] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (index + 1) * weight / sum(weights)) < 1 + 1e-9


def test_one_source_has_the_order_without_weights():
    """Another order would change every run with a single source."""
    plain = EpochOrder(7, 3, name="prompts")
    single = order_of(Share("math", 7, 0.25), seed=3)
    assert [single.at(n) for n in range(50)] == [plain.at(n) for n in range(50)]
    assert single.epoch_size == 7


def test_sources_repeat_in_their_own_epochs():
    order = order_of(*SHARES)
    items = [order.at(n) for n in range(48)]
    own = {
        name: [n for n, item in enumerate(items) if (item < 6) is name] for name in (True, False)
    }
    for size, places in ((6, own[True]), (3, own[False])):
        for epoch in (places[n : n + size] for n in range(0, len(places), size)):
            assert len({items[place] for place in epoch}) == size
    assert len(own[True]) == 36 and order.epoch_size == 12


def test_item_depends_on_the_position_alone():
    """A resumed run starts in the middle, and goes back to requeued prompts."""
    whole = [order_of(*SHARES, seed=5).at(n) for n in range(70)]
    later = order_of(*SHARES, seed=5)
    assert [later.at(n) for n in (69, 3, 40, 0, 12, 11)] == [
        whole[n] for n in (69, 3, 40, 0, 12, 11)
    ]


def test_another_source_keeps_the_order_within_a_source():
    """Equal sources with one generator would be in the same order."""
    two = order_of(Share("a", 30, 1), Share("b", 30, 1))
    first = [item for n in range(60) if (item := two.at(n)) < 30]
    second = [item - 30 for n in range(60) if (item := two.at(n)) >= 30]
    three = order_of(Share("a", 30, 1), Share("b", 30, 1), Share("c", 5, 2))
    assert [item for n in range(120) if (item := three.at(n)) < 30] == first != second


def test_state_with_other_weights_is_rejected():
    """Positions of other weights are other prompts."""
    stream = PromptStream(PROMPTS, 0, shares=SHARES)
    assert stream.difference(PromptStream(PROMPTS, 0, shares=SHARES).state_dict()) is None
    assert "shares" not in PromptStream(PROMPTS, 0).state_dict()
    for other in ((Share("a", 6, 0.3), Share("b", 3, 0.2)), ()):
        state = PromptStream(PROMPTS, 0, shares=other).state_dict()
        assert "other sources or weights in data.train" in str(stream.difference(state))
