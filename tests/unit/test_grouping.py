"""Cuts of lists of entries into groups."""

from __future__ import annotations

import pytest

from gradred import grouping
from gradred.errors import InvalidArgument
from gradred.grouping import Entry, Plan, by_bytes, by_layer, by_lists, into, make_plan


def entries(*sizes: int, labels: str = "") -> list[Entry]:
    names = labels.split() or [f"v{i}" for i in range(len(sizes))]
    return [Entry(i, name, size) for i, (name, size) in enumerate(zip(names, sizes, strict=True))]


@pytest.mark.parametrize(
    ("sizes", "limit", "ends"),
    [
        ((), 10, []),
        ((5,), 10, [1]),
        ((5, 5, 5), 10, [2, 3]),
        ((5, 5, 5), 15, [3]),
        ((100, 1, 1), 10, [1, 3]),
        ((1, 100, 1), 10, [1, 2, 3]),
        ((0, 0, 100, 0), 10, [3, 4]),
        ((1, 1, 1), 1, [1, 2, 3]),
    ],
)
def test_cuts_by_bytes(sizes, limit, ends):
    assert by_bytes(entries(*sizes), limit) == ends


@pytest.mark.parametrize("count", [0, 1, 2, 7, 10])
@pytest.mark.parametrize("groups", [1, 2, 3, 10, 100])
def test_cuts_into_nearly_equal_groups(count, groups):
    ends = into(count, groups)
    lengths = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert sum(lengths) == count
    assert len(lengths) == min(count, groups)
    assert all(n >= 1 for n in lengths)
    assert lengths == sorted(lengths, reverse=True)
    assert not lengths or lengths[0] - lengths[-1] <= 1


def test_a_layer_is_one_group_at_the_place_of_its_last_entry():
    es = entries(1, 1, 1, 1, 1, labels="a/kernel a/bias b/kernel b/bias c")
    order, ends = by_layer(es, [4, 3, 1, 2, 0])
    assert [es[i].label for i in order] == ["c", "b/bias", "b/kernel", "a/bias", "a/kernel"]
    assert ends == [1, 3, 5]


def test_lists_are_groups_and_others_stay_single():
    es = entries(1, 1, 1, 1, 1)
    order, ends = by_lists(es, [4, 3, 2, 1, 0], [[0, 3], [], [99]])
    assert order == [4, 2, 1, 3, 0]
    assert ends == [1, 2, 3, 5]


def test_equal_labels_are_told_apart():
    es = [Entry("a", "kernel", 1), Entry("b", "kernel", 1)]
    assert by_lists(es, [0, 1], [["b"]]) == ([0, 1], [1, 2])


def test_an_entry_in_two_lists_is_refused_by_name():
    with pytest.raises(InvalidArgument, match="v1 is in the groups 0 and 1"):
        by_lists(entries(1, 1), [0, 1], [[0, 1], [1]])


def test_make_plan_reads_what_users_write():
    es = entries(4, 4, 4, 4)
    backwards = [3, 2, 1, 0]
    for nothing in (None, 0):
        assert make_plan(es, backwards, nothing, 8) == Plan((3, 2, 1, 0), (2, 4))
    assert make_plan(es, backwards, 3, 8).ends == (2, 3, 4)
    assert make_plan(es, backwards, 9, 8).ends == (1, 2, 3, 4)
    assert make_plan(es, backwards, "12B", 8).ends == (3, 4)
    assert make_plan(es, backwards, "layer", 8).ends == (1, 2, 3, 4)


def test_make_plan_tells_variables_apart_by_identity():
    first, second = object(), object()
    es = [Entry(id(first), "w", 1), Entry(id(second), "w", 1)]
    assert make_plan(es, [1, 0], [[second, first]], 8) == Plan((1, 0), (2,))


@pytest.mark.parametrize("groups", [-1, True, "many", "0", "0MiB", "4 parsecs", ["w"], [1]])
def test_make_plan_refuses_what_means_nothing(groups):
    with pytest.raises(InvalidArgument, match="groups"):
        make_plan(entries(1, 1), [1, 0], groups, 8)


@pytest.mark.parametrize(
    ("text", "value"), [("4", 4), ("0", 0), ("16MiB", "16MiB"), ("1kB", "1kB"), ("layer", "layer")]
)
def test_parse(text, value):
    assert grouping.parse(text) == value


def test_parse_refuses_rubbish():
    for text in ("", "-1", "abc", "1.5MiB", "MiB"):
        with pytest.raises(InvalidArgument, match="groups="):
            grouping.parse(text)


def test_describe_names_groups_and_entries():
    es = entries(1, 2, 3)
    text = grouping.describe(es, Plan((2, 1, 0), (1, 3)))
    assert text == "group 0: 1 entries, 3 bytes: v2\ngroup 1: 2 entries, 3 bytes: v1, v0"
