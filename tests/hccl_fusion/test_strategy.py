"""Strategies and the registry: every row of the table in docs/segmentation.md, the API."""

from __future__ import annotations

import itertools
import threading
import warnings
from enum import IntEnum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hccl_fusion.split
from hccl_fusion.errors import HcclFusionError, StrategyError, StrategyWarning
from hccl_fusion.registry import (
    RecordedCall,
    check_recorded_groups,
    hccl_accepts_sizes,
    nearest_accepted_sizes,
    recorded_calls,
    registered_idx,
    registered_strategy,
    reset_split_strategy,
    set_membership_check,
    set_split_strategy_by_idx,
    set_split_strategy_by_size,
    size_list_advice,
    stale_index_warning,
)
from hccl_fusion.strategy import Strategy, StrategyKind, check_index_list, left_to_right_sum

WORLD = "hccl_world_group"
DEFAULT = Strategy(StrategyKind.DEFAULT)
SETTERS = [(set_split_strategy_by_idx, [0, 4]), (set_split_strategy_by_size, [60, 40])]
each_setter = pytest.mark.parametrize("setter", [setter for setter, _ in SETTERS], ids=["idx", "size"])
both_setters = pytest.mark.parametrize(("setter", "values"), SETTERS, ids=["idx", "size"])


@pytest.fixture(autouse=True)
def empty_registry():
    reset_split_strategy()
    yield
    set_membership_check(None)
    reset_split_strategy()


def message_of(call, *args, **kwargs) -> str:
    with pytest.raises(StrategyError) as caught:
        call(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, HcclFusionError)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- the group ---


@both_setters
@pytest.mark.parametrize("group", [WORLD, "g", "x" * 127, "群" * 42, "é" * 63])
def test_legal_groups(setter, values, group):
    assert setter(values, group) is None
    assert registered_strategy(group).values == tuple(values)


@both_setters
@pytest.mark.parametrize(
    ("group", "found"),
    [
        ("", "found 0 bytes"),
        ("x" * 128, "found 128 bytes"),
        ("群" * 43, "found 129 bytes"),
        ("é" * 64, "found 128 bytes"),
        (None, "found None (NoneType)"),
        (7, "found 7 (int)"),
        (b"hccl_world_group", "(bytes)"),
        ("\ud800", "'\\ud800' (str)"),
    ],
)
def test_illegal_groups(setter, values, group, found):
    text = message_of(setter, values, group)
    assert found in text
    assert "expected a str of 1 to 127 bytes in UTF-8" in text
    assert recorded_calls() == ()


@both_setters
def test_parameters_are_named_as_in_hccl(setter, values):
    name = "idxList" if setter is set_split_strategy_by_idx else "dataSizeList"
    assert setter(**{name: values, "group": "g"}) is None
    assert setter(**{name: values}) is None
    assert registered_strategy("g") == registered_strategy() == registered_strategy(WORLD)
    assert getattr(hccl_fusion.split, setter.__name__) is setter
    assert hccl_fusion.split.reset_split_strategy is reset_split_strategy


# --- the argument's type ---


@pytest.mark.parametrize(
    "values",
    [
        [20, 100, 159],
        (20, 100, 159),
        np.array([20, 100, 159]),
        np.array([20, 100, 159], dtype=np.uint8),
        [np.int32(20), np.uint64(100), 159],
    ],
)
def test_index_lists_of_any_type(values):
    set_split_strategy_by_idx(values)
    kept = registered_strategy().values
    assert kept == (20, 100, 159)
    assert {type(value) for value in kept} == {int}
    assert registered_idx() == (20, 100, 159)


@pytest.mark.parametrize(
    "values",
    [
        [60, 20.5, 19.5],
        (60, 20.5, 19.5),
        np.array([60, 20.5, 19.5]),
        np.array([60, 20.5, 19.5], dtype=np.float16),
        [np.int8(60), np.float32(20.5), 19.5],
    ],
)
def test_size_lists_of_any_type(values):
    set_split_strategy_by_size(values)
    kept = registered_strategy().values
    assert kept == (60, 20.5, 19.5)
    assert {type(value) for value in kept} <= {int, float}


def test_numpy_float32_keeps_its_decimals():
    set_split_strategy_by_size(np.array([33.3, 33.3, 33.4], dtype=np.float32))
    assert registered_strategy().values == (33.3, 33.3, 33.4)


@each_setter
@pytest.mark.parametrize(
    "values",
    [
        None,
        100,
        "60,40",
        {60, 40},
        {0: 100},
        range(3),
        iter([0, 4]),
        np.array(100),
        np.array([[60, 40]]),
        np.array([True, False]),
        np.array(["60", "40"]),
        np.array([60, 40], dtype=object),
    ],
    ids=["None", "int", "str", "set", "dict", "range", "iterator", "0-d", "2-d", "bools", "strs", "objects"],
)
def test_not_a_list(setter, values):
    text = message_of(setter, values)
    assert "list is no list" in text
    assert "expected a list, a tuple or a 1-d numpy array of integers or floats" in text


@each_setter
@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=int)], ids=["list", "tuple", "array"])
def test_empty_list(setter, empty):
    assert "list is empty" in message_of(setter, empty)


@pytest.mark.parametrize(
    ("setter", "most", "too_many"),
    [
        (set_split_strategy_by_idx, list(range(8)), list(range(9))),
        (set_split_strategy_by_size, [12.5] * 8, [12.5] * 7 + [6.25, 6.25]),
    ],
)
def test_at_most_eight_segments(setter, most, too_many):
    setter(most)
    assert registered_strategy().values == tuple(most)
    assert "too many segments, found 9, expected at most 8" in message_of(setter, too_many)


# --- elements ---


class Index(IntEnum):
    LAST = 4


@pytest.mark.parametrize(
    "value", [True, np.True_, 1.0, np.float64(1), "1", None, -1, 2**32, pytest.param(10**6000, id="huge"), [1]]
)
def test_illegal_index(value):
    text = message_of(set_split_strategy_by_idx, [0, value])
    assert "position 1" in text
    assert "expected an integer from 0 to 4294967295" in text


def test_illegal_index_array():
    assert "position 0" in message_of(set_split_strategy_by_idx, np.array([0.0, 4.0]))


@pytest.mark.parametrize("values", [[0], [2**32 - 1], [0, 1, 2**32 - 1], [0, Index.LAST]])
def test_legal_indices(values):
    set_split_strategy_by_idx(values)
    assert registered_idx() == tuple(values)


@pytest.mark.parametrize(
    ("values", "pair", "remedy"),
    [
        ([1, 4, 3], "positions 1 and 2, found 4 before 3 in [1,4,3]", "try [1,3,4]"),
        ([159, 20, 100], "positions 0 and 1, found 159 before 20", "try [20,100,159]"),
        ([20, 20, 159], "positions 0 and 1, found 20 before 20", "try the list without repeats"),
        ([5, 7, 5], "positions 1 and 2, found 7 before 5", "try the list without repeats"),
    ],
)
def test_indices_not_ascending(values, pair, remedy):
    text = message_of(set_split_strategy_by_idx, values)
    assert pair in text
    assert text.endswith(remedy)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        np.True_,
        "20",
        None,
        -1,
        -0.001,
        float("nan"),
        float("inf"),
        -float("inf"),
        100.5,
        pytest.param(10**6000, id="huge"),
        1j,
    ],
)
def test_illegal_percentage(value):
    text = message_of(set_split_strategy_by_size, [80, value])
    assert "position 1" in text
    assert "expected a number from 0 to 100" in text


# --- sizes add to 100 ---

ACCEPTED = [
    [96.54, 3.46],
    [33.3, 33.3, 33.4],
    [33.33, 33.33, 33.34],
    [12.5] * 8,
    [16.6] * 5 + [17],
    [20.3] * 3 + [39.1],
    [10.1, 20.2, 69.7],
    [14.28] * 6 + [14.32],
    [100],
    [100, 0],
    [0, 100],
    [50, 0, 50],
    [100.0],
]
REFUSED_BY_HCCL = [
    [70.1, 29.8, 0.1],
    [14.29] * 6 + [14.26],
    [32.6, 59.8, 7.6],
    [37.4, 11.9, 9.1, 30.7, 10.9],
    [5e-10, 100],
    [100 / 7] * 7,
]


@pytest.mark.parametrize("values", ACCEPTED)
def test_sizes_that_hccl_takes_are_silent(values):
    set_split_strategy_by_size(values)
    assert registered_strategy() == Strategy(StrategyKind.SIZE, tuple(values))
    assert size_list_advice(values) is None


@pytest.mark.parametrize("values", REFUSED_BY_HCCL)
def test_sizes_that_only_hccl_refuses_are_kept_with_a_warning(values):
    with pytest.warns(StrategyWarning) as caught:
        set_split_strategy_by_size(values)
    assert registered_strategy().values == tuple(values)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "HCCL would refuse the size list" in text
    offered = Strategy.parse_size(text.rpartition("[")[2].rstrip("]"))
    assert hccl_accepts_sizes(offered.values)
    assert len(offered.values) == len(values)
    set_split_strategy_by_size(offered.values, "of the offered list")


@pytest.mark.parametrize(
    ("values", "accepted"),
    [([32.6, 59.8, 7.6], False), ([70.1, 29.8, 0.1], False), ([8.3] * 11 + [8.7], False), ([1e-9, 100], False)]
    + [([11.1] * 9 + [0.1], False), ([0.1] * 10 + [99], True)]
    + [(values, True) for values in ACCEPTED],
)
def test_hccl_sum_check(values, accepted):
    assert hccl_accepts_sizes(values) is accepted


def test_the_sum_is_not_compensated():
    # sum() of CPython 3.12 and later gives 100.0 here
    assert left_to_right_sum([70.1, 29.8, 0.1]) == 99.99999999999999


@pytest.mark.parametrize(
    ("values", "nearest"),
    [
        ([32.6, 59.8, 7.6], (32.5, 59.9, 7.6)),
        ([70.1, 29.8, 0.1], (70, 29.9, 0.1)),
        ([5e-10, 100], (0, 100)),
        ([60, 40], (60, 40)),
        ([12.5] * 8, (12.5,) * 8),
        # three moves of 0.001; nothing within three moves, so two decimals
        ([7.356, 3.842, 66.819, 4.115, 5.906, 11.962], (7.355, 3.842, 66.817, 4.115, 5.906, 11.965)),
        ([62.556, 5.296, 20.6, 7.932, 1.974, 1.462, 0.18], (62.56, 5.3, 20.59, 7.94, 1.97, 1.46, 0.18)),
    ],
)
def test_nearest_accepted_sizes(values, nearest):
    assert nearest_accepted_sizes(values) == nearest


@st.composite
def decimal_lists(draw: st.DrawFn) -> list[float]:
    unit = 10 ** draw(st.integers(0, 4))
    cuts = sorted(draw(st.lists(st.integers(0, 100 * unit), max_size=7)))
    return [(stop - start) / unit for start, stop in zip([0, *cuts], [*cuts, 100 * unit])]


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(decimal_lists())
def test_any_list_that_adds_to_100_on_paper(values):
    unit = 10 ** max(len(f"{value:.4f}".rstrip("0").partition(".")[2]) for value in values)
    assert Strategy(StrategyKind.SIZE, values).values == tuple(values)
    nearest = nearest_accepted_sizes(values)
    assert hccl_accepts_sizes(nearest)
    assert Strategy(StrategyKind.SIZE, nearest).values == nearest
    moved = sum(abs(after - before) for before, after in zip(values, nearest)) * unit
    assert (moved < 0.5) is hccl_accepts_sizes(values)
    if moved > 2.5:  # then no single move of one unit will do
        for source, target in itertools.permutations(range(len(values)), 2):
            units = [round(value * unit) for value in values]
            units[source] -= 1
            units[target] += 1
            assert min(units) < 0 or not hccl_accepts_sizes([number / unit for number in units])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ([20, 20, 20], "found 60 from [20,20,20]"),
        ([60, 20.1, 20], "found 100.1 from [60,20.1,20]"),
        ([1e-9, 100], "found 100.000000001"),
        ([99.999999998], "found 99.999999998"),
        ([0], "found 0 from [0]"),
    ],
)
def test_sizes_that_do_not_add_to_100(values, found):
    text = message_of(set_split_strategy_by_size, values)
    assert "must add to 100" in text
    assert found in text


# --- membership ---


@both_setters
def test_calls_before_initialisation_are_recorded_and_checked_then(setter, values):
    setter(values, "mine")
    setter(values, "theirs")
    setter(values, "theirs")
    expected = [RecordedCall(setter.__name__, group) for group in ("mine", "theirs")]
    assert list(recorded_calls()) == expected
    text = message_of(check_recorded_groups, lambda group: group == "mine")
    assert f"{setter.__name__}(..., group='theirs')" in text
    assert "'mine'" not in text
    assert list(recorded_calls()) == expected[1:]
    check_recorded_groups(lambda group: group == "theirs")
    assert recorded_calls() == ()


@both_setters
def test_calls_after_initialisation_are_checked_at_once(setter, values):
    asked = []

    def check(group: str) -> None:
        asked.append(group)
        if group != "mine":
            raise StrategyError("this rank is not in the group", found=group)

    set_membership_check(check)
    setter(values, "mine")
    assert "not in the group, found theirs" in message_of(setter, values, "theirs")
    assert asked == ["mine", "theirs"]
    assert recorded_calls() == ()
    assert registered_strategy("theirs") == DEFAULT
    set_membership_check(None)
    setter(values, "theirs")
    assert [call.group for call in recorded_calls()] == ["theirs"]


def test_a_reset_forgets_recorded_calls():
    set_split_strategy_by_size([60, 40], "a")
    set_split_strategy_by_size([60, 40], "b")
    reset_split_strategy("a")
    assert [call.group for call in recorded_calls()] == ["b"]
    reset_split_strategy()
    check_recorded_groups(lambda _: False)


# --- second call, reset, precedence ---


@both_setters
def test_second_equal_call_is_silent(setter, values):
    setter(values)
    setter(tuple(float(value) for value in values) if setter is set_split_strategy_by_size else tuple(values))
    assert registered_strategy().values == tuple(values)


@pytest.mark.parametrize(
    ("setter", "first", "second"),
    [
        (set_split_strategy_by_idx, [86, 160], [20, 160]),
        (set_split_strategy_by_size, [60, 40], [32.5, 67.5]),
    ],
)
def test_second_different_call_warns_and_the_first_stays(setter, first, second):
    setter(first)
    with pytest.warns(StrategyWarning) as caught:
        setter(second)
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert str(first).replace(" ", "") in text
    assert str(second).replace(" ", "") in text
    assert WORLD in text
    assert setter.__name__ in text
    assert registered_strategy().values == tuple(first)
    setter(second, "another group")
    reset_split_strategy(WORLD)
    assert registered_strategy() == DEFAULT


def test_a_dropped_list_is_not_judged_by_hccl_sum_check():
    set_split_strategy_by_size([60, 40])
    with pytest.warns(StrategyWarning) as caught:
        set_split_strategy_by_size([32.6, 59.8, 7.6])
    assert len(caught) == 1


def test_an_illegal_second_list_is_an_error():
    set_split_strategy_by_idx([86, 160])
    message_of(set_split_strategy_by_idx, [160, 86])
    assert registered_idx() == (86, 160)


def test_reset_of_one_group_and_of_all():
    for group in ("a", "b"):
        set_split_strategy_by_idx([1, 2], group)
        set_split_strategy_by_size([100], group)
    reset_split_strategy(group="a")
    assert (registered_strategy("a"), registered_idx("a")) == (DEFAULT, None)
    assert registered_idx("b") == (1, 2)
    reset_split_strategy()
    assert (registered_strategy("b"), registered_idx("b")) == (DEFAULT, None)
    reset_split_strategy("never set")
    assert "group's name is illegal" in message_of(reset_split_strategy, "")


def test_size_before_idx_before_default():
    assert registered_strategy() == DEFAULT
    set_split_strategy_by_idx([86, 160])
    assert registered_strategy() == Strategy(StrategyKind.IDX, (86, 160))
    set_split_strategy_by_size([60, 40])
    assert registered_strategy() == Strategy(StrategyKind.SIZE, (60, 40))
    assert registered_idx() == (86, 160)
    assert registered_strategy("another") == DEFAULT


def test_stale_index_list_is_a_warning():
    set_split_strategy_by_idx([86, 160], "g")
    set_split_strategy_by_size([60, 40], "g")
    with pytest.warns(StrategyWarning) as caught:
        stale_index_warning("g", [160, 12, 160])
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert "group g: the index list [86,160] fits no section" in text
    assert "expected 11 or 159 at its end" in text


@pytest.mark.parametrize(
    ("indices", "sizes", "counts"),
    [
        ([86, 160], [60, 40], [161]),
        ([86, 160], [60, 40], [12, 161]),
        ([86, 160], [60, 40], []),
        ([86, 160], None, [12]),
        (None, [60, 40], [12]),
        (None, None, [12]),
    ],
)
def test_no_stale_index_list(indices, sizes, counts):
    if indices:
        set_split_strategy_by_idx(indices)
    if sizes:
        set_split_strategy_by_size(sizes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        stale_index_warning(WORLD, counts)
    assert caught == []


def test_threads_agree_on_the_first_list():
    barrier = threading.Barrier(8)
    kept = []

    def call(last: int) -> None:
        barrier.wait()
        set_split_strategy_by_idx([last])
        kept.append(registered_idx())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=call, args=(last,)) for last in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(kept) == 8
    assert set(kept) == {registered_idx()}
    assert len(caught) == 7
    assert len(recorded_calls()) == 1


# --- the last element against a section ---


@pytest.mark.parametrize(
    ("values", "count", "corrected"),
    [
        ([20, 100, 158], 160, [20, 100, 159]),
        ([20, 100, 170], 160, [20, 100, 159]),
        ([20, 159, 170], 160, [20, 159]),
        ([170, 180], 160, [159]),
        ([86, 160], 160, [86, 159]),
        ([0], 2, [1]),
        ([1, 2], 2, [1]),
    ],
)
def test_index_list_that_ends_elsewhere(values, count, corrected):
    text = message_of(check_index_list, values, count, "hccl_world_group/float32/sum")
    shown, expected = (str(numbers).replace(" ", "") for numbers in (values, corrected))
    assert f"section hccl_world_group/float32/sum with {count} gradients" in text
    assert f"found {shown}, expected the last index to be {count - 1}; try {expected}" in text
    check_index_list(corrected, count, "corrected")


def test_index_list_that_fits():
    check_index_list([20, 100, 159], 160, "fits")
    check_index_list((0,), 1, "fits")


# --- Strategy as a value ---


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        (StrategyKind.DEFAULT, (), "default"),
        (StrategyKind.IDX, (20, 159), "idx 20,159"),
        (StrategyKind.SIZE, (96.54, 3.46), "size 96.54,3.46"),
        (StrategyKind.MAX_BYTES, (26214400,), "max-bytes 26214400"),
        (StrategyKind.SEGMENTS, (4,), "segments 4"),
        (StrategyKind.SINGLE, (), "single"),
        (StrategyKind.NONE, (), "none"),
    ],
)
def test_strategies(kind, values, text):
    strategy = Strategy(kind, list(values))
    assert strategy.values == values
    assert str(strategy) == text
    assert strategy == Strategy(kind, values)
    assert len({strategy, Strategy(kind, values)}) == 1


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("idx", (1,), "kind is unknown"),
        (StrategyKind.DEFAULT, (1,), "default takes no values"),
        (StrategyKind.SINGLE, [1], "single takes no values"),
        (StrategyKind.NONE, (0,), "none takes no values"),
        (StrategyKind.MAX_BYTES, (), "max-bytes takes one number"),
        (StrategyKind.MAX_BYTES, (0,), "max-bytes takes one number"),
        (StrategyKind.MAX_BYTES, (1.5,), "max-bytes takes one number"),
        (StrategyKind.SEGMENTS, (True,), "segments takes one number"),
        (StrategyKind.SEGMENTS, (1, 2), "segments takes one number"),
        (StrategyKind.SEGMENTS, 4, "is no list"),
        (StrategyKind.IDX, (), "index list is empty"),
        (StrategyKind.IDX, (2, 1), "strictly ascending"),
        (StrategyKind.SIZE, (50, 40), "must add to 100"),
    ],
)
def test_illegal_strategies(kind, values, message):
    assert message in message_of(Strategy, kind, values)


@pytest.mark.parametrize(
    ("parse", "text", "values"),
    [
        (Strategy.parse_idx, "20,100,159", (20, 100, 159)),
        (Strategy.parse_idx, " 20 , 159 ", (20, 159)),
        (Strategy.parse_idx, "0", (0,)),
        (Strategy.parse_size, "60,20,20", (60, 20, 20)),
        (Strategy.parse_size, "32.6, 59.8, 7.6", (32.6, 59.8, 7.6)),
        (Strategy.parse_size, "99.50,.5", (99.5, 0.5)),
        (Strategy.parse_size, "33.333333333333333333,33.333333333333333333,33.333333333333333334", (100 / 3,) * 3),
        (Strategy.parse_max_bytes, "25MiB", (25 * 2**20,)),
        (Strategy.parse_max_bytes, "25 mib", (25 * 2**20,)),
        (Strategy.parse_max_bytes, "1.5KiB", (1536,)),
        (Strategy.parse_max_bytes, "1.5KB", (1500,)),
        (Strategy.parse_max_bytes, "2MB", (2_000_000,)),
        (Strategy.parse_max_bytes, "1GB", (10**9,)),
        (Strategy.parse_max_bytes, "1GiB", (2**30,)),
        (Strategy.parse_max_bytes, "64B", (64,)),
        (Strategy.parse_max_bytes, "1024", (1024,)),
    ],
)
def test_parsing(parse, text, values):
    assert parse(text).values == values


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (Strategy.parse_idx, "", "position 0, found ''"),
        (Strategy.parse_idx, "20,,159", "position 1, found ''; try 20,100,159"),
        (Strategy.parse_idx, "20,x", "position 1, found 'x'"),
        (Strategy.parse_idx, "20,-1", "position 1, found '-1'"),
        (Strategy.parse_idx, "20,1.0", "position 1, found '1.0'"),
        (Strategy.parse_idx, "[20,159]", "position 0, found '[20'"),
        (Strategy.parse_idx, "٣", "position 0"),
        (Strategy.parse_idx, "1" * 5000, "position 0"),
        (Strategy.parse_idx, "159,20", "try [20,159]"),
        (Strategy.parse_size, "60;40", "position 0, found '60;40'; try 60,20,20"),
        (Strategy.parse_size, "60,nan", "position 1, found 'nan'"),
        (Strategy.parse_size, "1e2", "position 0, found '1e2'"),
        (Strategy.parse_size, "60%,40%", "position 0, found '60%'"),
        (Strategy.parse_size, ".", "position 0, found '.'"),
        (Strategy.parse_size, "60,39.9", "must add to 100, found 99.9"),
        (Strategy.parse_max_bytes, "", "no byte count, found ''"),
        (Strategy.parse_max_bytes, "MiB", "no byte count"),
        (Strategy.parse_max_bytes, "25TiB", "no byte count, found '25TiB'"),
        (Strategy.parse_max_bytes, "-1MiB", "no byte count"),
        (Strategy.parse_max_bytes, "1.0001KB", "expected a whole number of bytes such as 25MiB"),
        (Strategy.parse_max_bytes, "0MiB", "max-bytes takes one number"),
    ],
)
def test_parsing_bad_text(parse, text, message):
    assert message in message_of(parse, text)
