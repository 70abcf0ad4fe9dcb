"""How the arm that stands for an optimizer in the demo is chosen."""

from benchmarks.contest.demo_rates import choose_variants


def searched(**scores):
    return {name: {"lrs": [1, 2], "lr": 2, "accuracy": [0.0, s]} for name, s in scores.items()}


def test_the_better_of_two_weight_decays_stands_for_an_optimizer():
    found = searched(**{"a": 97.0, "a, decay": 97.1, "b": 95.0, "b, decay": 94.0, "c": 90.0})
    assert choose_variants(found) == {"a": "a, decay", "b": "b", "c": "c"}


def test_without_decay_if_both_are_equal():
    assert choose_variants(searched(**{"a": 97.0, "a, decay": 97.0})) == {"a": "a"}
