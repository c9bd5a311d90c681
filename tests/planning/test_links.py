"""Who sends how much to whom."""

import pytest

from flextrain.plan.ledger import Network, check_nodes


def test_axes_along_which_processes_differ():
    network = Network(16, 2, {"pp": 2, "dp_shard": 4, "tp": 2})
    assert network.axis_of([0, 1], "all_reduce") == "tp"
    assert network.axis_of([1, 3, 5, 7], "all_gather") == "dp_shard"
    assert network.axis_of([0, 8], "send") == "pp"
    assert network.axis_of([*range(8)], "all_reduce") == "dp_shard x tp"
    assert Network(4).axis_of([0, 1, 2, 3], "all_reduce") == "data"


def test_an_overlay_is_told_from_the_axis_with_the_same_processes():
    network = Network(8, 1, {"dp_shard": 8}, {"ep": 2})
    assert network.axis_of([2, 3], "all_to_all") == "ep"
    assert network.axis_of([2, 3], "all_gather") == "dp_shard"


@pytest.mark.parametrize(
    ("collective", "ranks", "inside", "between"),
    [
        ("all_gather", range(4), 75, 0),
        ("reduce_scatter", range(8), 87.5 * 6 / 8, 87.5 * 2 / 8),  # two of eight hops are between the nodes
        ("all_reduce", range(8), 175 * 6 / 8, 175 * 2 / 8),
        ("all_gather", (0, 4), 0, 50),
        ("all_to_all", range(8), 87.5 * 3 / 7, 87.5 * 4 / 7),  # to three of seven others inside
        ("all_reduce", (3,), 0, 0),
    ],
)
def test_bytes_by_link(collective, ranks, inside, between):
    assert Network(8, 2).sent(collective, list(ranks), 100) == pytest.approx((inside, between))


def test_a_message_goes_over_one_link():
    network = Network(8, 2)
    assert network.sent_to(0, 3, 100) == (100, 0)
    assert network.sent_to(3, 4, 100) == (0, 100)


def test_nodes_that_do_not_divide():
    assert check_nodes(12, 4) is None
    assert check_nodes(12, 8) == "8 nodes do not share 12 processes evenly; 4 do"
    assert check_nodes(0, 1) == check_nodes(4, 0) == "give 1 or more"
