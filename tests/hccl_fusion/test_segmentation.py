"""The segmentation arithmetic against measured vectors, golden values and a slow second implementation."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hccl_fusion.errors import StrategyError
from hccl_fusion.segmentation import (
    boundaries_to_segments,
    cap_boundaries,
    collapse_boundaries,
    equal_boundaries,
    padded_bytes,
    segment_boundaries,
    segments_to_boundaries,
)

VECTORS = Path(__file__).parent.parent / "data" / "segmentation_vectors.jsonl.gz"
F32 = np.float32
K = 1024

U30 = [
    4096,
    8257536,
    8704,
    8704,
    4194304,
    2560,
    2560,
    9437184,
    2560,
    2560,
    4194304,
    8704,
    8704,
    4194304,
    2560,
]
U30 += [
    2560,
    9437184,
    2560,
    2560,
    4194304,
    8704,
    8704,
    8388608,
    4194304,
    2560,
    2560,
    9437184,
    2560,
    2560,
    2097152,
]


def resnet50_bytes() -> list[int]:
    """float32 gradient bytes of ResNet-50 v1.5, 1001 classes, last layer first: 161 gradients."""
    sizes = [4004, 8200192]
    for width, blocks, channels in ((512, 3, 1024), (256, 6, 512), (128, 4, 256), (64, 3, 64)):
        out = 4 * width
        for block in reversed(range(blocks)):
            first = block == 0
            sizes += [4 * out] * (4 if first else 2) + [4 * width * out]
            sizes += [4 * channels * out] if first and width == 64 else []
            sizes += [4 * width, 4 * width, 36 * width * width, 4 * width, 4 * width]
            sizes += [4 * channels * width] if first else [4 * out * width]
            sizes += [4 * channels * out] if first and width != 64 else []
    return [*sizes, 256, 256, 37632]


RESNET50 = resnet50_bytes()
RESNET50_PADDED = [padded_bytes(size) for size in RESNET50]


def slow_search(sums: list[F32], target: F32, lower: bool) -> int:
    low, high, probe = 0, len(sums) - 1, 0
    while low <= high:
        probe = (low + high) // 2
        if abs(sums[probe] - target) < F32(1e-6):
            return probe
        if sums[probe] > target:
            high = probe - 1
        else:
            low = probe + 1
    if probe == 0:
        return 0
    if lower:
        return probe if sums[probe] < target else probe - 1
    return probe - 1 if target - sums[probe - 1] <= sums[probe] - target else probe


def slow_by_size(sizes: list[int], percentages: list[F32], shape: str, buffer_mib: int) -> list[int]:
    """The rules of docs/segmentation.md word by word, one float32 scalar at a time."""
    sums: list[F32] = []
    for size in sizes:
        sums.append(F32(size) if not sums else sums[-1] + F32(size))
    n = len(sizes)
    buffer = F32((buffer_mib - 1) * 1024 * 1024)
    boundaries: list[int] = []
    used, left = F32(0), F32(0)
    for percentage in percentages:
        wanted = percentage / F32(100) * sums[n - 1] + left
        before, left, at_start = used, wanted, len(boundaries)
        while True:
            taken = min(left, buffer) if shape == "unknown" else left
            index = slow_search(sums, taken + used, shape == "unknown")
            if boundaries and index <= boundaries[-1]:
                index = index + 1
            assert index < n
            boundaries.append(index)
            used = sums[index]
            left = wanted + before - used
            if index == n - 1 or (sums[index + 1] - sums[index]) - left > F32(1e-6):
                break
            if len(boundaries) - at_start > n:
                del boundaries[at_start + 1 :]
                used = sums[boundaries[-1]]
                left = wanted + before - used
                break
        if boundaries[-1] == n - 1:
            break
    return boundaries


def slow_default(sizes: list[int], shape: str, buffer_mib: int) -> list[int]:
    last = len(sizes) - 1
    if shape == "known":
        first = slow_by_size(sizes, [F32(96.54)], shape, buffer_mib)[0]
        return [first, last] if len(sizes) >= first + 2 else [first]
    boundaries = slow_by_size(sizes, [F32(96.54), F32(100) - F32(96.54)], shape, buffer_mib)
    return boundaries if boundaries[-1] == last else [*boundaries, last]


any_size = st.one_of(
    st.integers(0, 3),
    st.integers(1, 2000),
    st.integers(1, 2**28),
    st.sampled_from([0, 1024, 2**20, 10**9, 2**40]),
)
any_sizes = st.lists(any_size, min_size=1, max_size=70)
any_shape = st.sampled_from(["known", "unknown"])
any_buffer = st.sampled_from([1, 2, 8, 64, 200])


@st.composite
def percentages(draw: st.DrawFn) -> list[float]:
    """Up to 8 percentages of at most two decimals that add to 100 on paper; zeros are common."""
    cuts = sorted(draw(st.lists(st.one_of(st.integers(0, 10000), st.just(5000)), max_size=7)))
    return [(stop - start) / 100 for start, stop in zip([0, *cuts], [*cuts, 10000])]


def test_all_measured_vectors_agree():
    rows = [json.loads(line) for line in gzip.decompress(VECTORS.read_bytes()).splitlines()]
    differing = []
    for number, row in enumerate(rows, 1):
        try:
            got: object = segment_boundaries(
                row["sizes"],
                row["strategy"],
                row["list"],
                shape_mode=row["shape"],
                buffer_mib=row["buffer_mib"],
            )
        except StrategyError:
            got = "error"
        if got != row["expect"]:
            differing.append((number, row["strategy"], row["shape"], row["expect"], got))
    assert differing == []
    kinds = Counter((row["strategy"], row["shape"]) for row in rows)
    assert len(rows) == 3000
    assert set(kinds) == {(name, shape) for name in ("default", "size", "idx") for shape in ("known", "unknown")}


def test_resnet50_sizes_are_the_published_ones():
    assert (len(RESNET50), sum(RESNET50)) == (161, 102_236_324)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (RESNET50, [106, 160]),
        (RESNET50_PADDED, [108, 160]),
        (RESNET50_PADDED[1:], [107, 159]),
        (U30, [25, 29]),
        ([K, 1], [0, 1]),
        ([K, 98 * K, K], [0, 2]),
        ([98 * K, K, K], [0, 2]),
        ([K, K, 98 * K], [2]),
        *(
            ([K] * count, boundaries)
            for count, boundaries in [
                (1, [0]),
                (2, [1]),
                (3, [2]),
                (5, [4]),
                (10, [9]),
                (15, [13, 14]),
                (16, [14, 15]),
                (20, [18, 19]),
                (28, [26, 27]),
                (29, [26, 28]),
                (30, [27, 29]),
                (50, [47, 49]),
                (100, [95, 99]),
            ]
        ),
    ],
)
def test_default(sizes, expected):
    assert segment_boundaries(sizes, "default") == expected


RESNET50_BY_SIZE = [
    ([60, 20, 20], [30, 60, 160]),
    ([80, 20], [60, 160]),
    ([90, 10], [83, 160]),
    ([85, 15], [70, 160]),
    ([50, 50], [26, 160]),
    ([20] * 5, [7, 18, 30, 60, 160]),
    ([10, 10, 10, 10, 15, 15, 15, 15], [3, 7, 15, 18, 27, 39, 70, 160]),
    ([12.5] * 8, [6, 10, 15, 26, 30, 48, 75, 160]),
    ([25] * 4, [10, 26, 48, 160]),
    ([60, 19, 21], [30, 57, 160]),
    ([70, 29, 1], [39, 126, 160]),
    ([60, 30, 10], [30, 83, 160]),
    ([50, 25, 25], [26, 48, 160]),
    ([75, 20, 5], [48, 94, 160]),
    ([70, 20, 10], [39, 83, 160]),
    ([100], [160]),
]


@pytest.mark.parametrize(("values", "expected"), RESNET50_BY_SIZE)
@pytest.mark.parametrize("sizes", [RESNET50, RESNET50_PADDED], ids=["raw", "padded"])
def test_resnet50_by_size(sizes, values, expected):
    assert segment_boundaries(sizes, "size", values) == expected


@pytest.mark.parametrize(
    ("sizes", "values", "expected"),
    [
        (U30, [20, 40, 40], [6, 18, 29]),
        (U30, [96, 2, 2], [25, 28, 29]),
        (U30, [80, 20], [23, 29]),
        (U30, [90, 10], [25, 29]),
        (U30, [50, 50], [15, 29]),
        (U30, [25] * 4, [6, 15, 21, 29]),
        (U30, [60, 20, 20], [18, 23, 29]),
        (U30, [12.5] * 8, [3, 6, 9, 15, 19, 21, 25, 29]),
        ([4096], [50, 50], [0]),
        ([K] * 10, [50, 50], [4, 9]),
        ([K] * 10, [20, 30, 50], [1, 4, 9]),
        ([K] * 10, [33.3, 33.3, 33.4], [2, 6, 9]),
        ([K] * 10, [5, 5, 90], [0, 1, 9]),
        ([K] * 10, [1, 1, 98], [0, 1, 9]),
        ([K] * 10, [100, 0], [9]),
        ([K] * 10, [0, 100], [0, 9]),
        ([K] * 10, [50, 0, 50], [4, 5, 9]),
        ([K] * 10, [25] * 4, [1, 4, 6, 9]),
        ([K] * 10, [15, 35, 50], [0, 4, 9]),
        ([K] * 10, [12.5] * 8, [0, 1, 3, 4, 5, 6, 8, 9]),
        ([K] * 10, [10] * 10, list(range(10))),
        ([K] * 10, [20] * 5, [1, 3, 5, 7, 9]),
        ([K] * 10, [60, 40], [5, 9]),
        ([K] * 10, [40, 60], [3, 9]),
        ([K] * 100, [30, 70], [29, 99]),
        ([K] * 100, [20] * 5, [19, 39, 59, 79, 99]),
        ([K] * 100, [60, 20, 20], [59, 79, 99]),
        ([K] * 100, [1, 99], [0, 99]),
        ([K] * 100, [2, 98], [1, 99]),
        ([K, 98 * K, K], [10, 10, 10, 70], [0, 1, 1, 2]),
        ([98 * K, K, K], [10, 20, 70], [0, 1, 2]),
        ([K, K, 98 * K], [10, 20, 70], [1, 2]),
        ([K, K, 98 * K], [60, 20, 20], [2]),
        ([K] * 3, [25] * 4, [0, 1, 2]),
        ([K] * 3, [10] * 10, [0, 1, 1, 1, 1, 1, 2]),
        ([K, K, 94 * K, K, K, K, K], [12.5] * 8, [1, 2, 2, 3, 3, 3, 3, 6]),
    ],
)
def test_by_size(sizes, values, expected):
    assert segment_boundaries(sizes, "size", values) == expected


@pytest.mark.parametrize(
    ("count", "values", "segments"),
    [
        (161, [86, 160], ((0, 87), (87, 161))),
        (160, [20, 100, 159], ((0, 21), (21, 101), (101, 160))),
        (5, [1, 4], ((0, 2), (2, 5))),
        (1, [0], ((0, 1),)),
    ],
)
def test_by_idx_is_the_list_itself(count, values, segments):
    boundaries = segment_boundaries([K] * count, "idx", values)
    assert boundaries == values
    assert boundaries_to_segments(boundaries) == segments
    assert segment_boundaries([K] * count, "idx", values, shape_mode="unknown") == values


@pytest.mark.parametrize(
    ("sizes", "strategy", "values", "options", "message"),
    [
        ([], "default", (), {}, "no gradients"),
        ([4, -1], "default", (), {}, "gradient 1, found -1"),
        ([4, float("nan")], "default", (), {}, "gradient 1, found nan"),
        ([4, float("inf")], "size", [100], {}, "gradient 1, found inf"),
        ([4, 1.5], "size", [100], {}, "gradient 1, found 1.5"),
        ([4, True], "size", [100], {}, "gradient 1, found True"),
        ([4, "4"], "size", [100], {}, "gradient 1, found '4'"),
        ([2**63], "size", [100], {}, "gradient 0"),
        (np.array([4, 2**63], dtype=np.uint64), "size", [100], {}, "gradient 1"),
        (np.array([np.nan]), "default", (), {}, "gradient 0, found nan"),
        (np.array([[4, 4]]), "default", (), {}, "gradient 0"),
        ([4], "bytes", (), {}, "no such strategy"),
        ([4], "default", [100], {}, "takes no values"),
        ([4], "size", (), {}, "is empty"),
        ([4], "size", [20, 20, 20], {}, "must add to 100, found 60"),
        ([4], "size", [120, -20], {}, "position 0"),
        ([4], "idx", (), {}, "is empty"),
        ([4] * 5, "idx", [1, 4, 3], {}, "strictly ascending"),
        ([4] * 5, "idx", [1, 3], {}, "try [1,4]"),
        ([4] * 5, "idx", [1, 5], {}, "try [1,4]"),
        ([4], "default", (), {"shape_mode": "dynamic"}, "no such shape mode"),
        ([4], "default", (), {"buffer_mib": 0}, "communication buffer"),
        ([4], "default", (), {"buffer_mib": 1.5}, "communication buffer"),
        ([4], "default", (), {"buffer_mib": True}, "communication buffer"),
        ([4], "default", (), {"buffer_mib": 2**40}, "communication buffer"),
    ],
)
def test_bad_input_is_a_strategy_error(sizes, strategy, values, options, message):
    with pytest.raises(StrategyError) as caught:
        segment_boundaries(sizes, strategy, values, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "sizes",
    [
        tuple(U30),
        np.array(U30),
        np.array(U30, dtype=np.uint32),
        np.array(U30, dtype=np.float64),
        [np.int64(size) for size in U30],
        [float(size) for size in U30],
    ],
    ids=["tuple", "int64", "uint32", "float64", "numpy scalars", "whole floats"],
)
def test_whole_sizes_of_any_type(sizes):
    assert segment_boundaries(sizes, "size", [20, 40, 40]) == [6, 18, 29]


@pytest.mark.parametrize("values", [(20, 40, 40), np.array([20, 40, 40]), np.array([20.0, 40, 40], dtype=np.float32)])
def test_values_of_any_type(values):
    assert segment_boundaries(U30, "size", values) == [6, 18, 29]
    assert segment_boundaries(U30, "size", iter(values)) == [6, 18, 29]


@pytest.mark.parametrize(
    ("sizes", "values", "options", "expected"),
    [
        # In float32 the last sums are all equal: HCCL's step walks in circles behind the big gradient.
        ([2, 10**9, 2, 12], [100], {}, [1]),
        ([31, 10**8, 1, 1], [100], {}, [1]),
        ([3, 10**9, 6, 5], [11.3, 14.4, 30.4, 17.4, 26.5], {}, [0, 1, 1, 1, 2]),
        ([0, 5, 0, 0], [46.5, 42.2, 0.0, 11.3], {"shape_mode": "unknown"}, [0, 1, 1, 2]),
        # What the next step inherits is counted from the boundary that was kept.
        ([5, 1000, 0, 0, 1000], [100, 0], {"shape_mode": "unknown", "buffer_mib": 1}, [0, 1]),
    ],
)
def test_a_step_that_would_never_end_keeps_its_first_boundary(sizes, values, options, expected):
    assert segment_boundaries(sizes, "size", values, **options) == expected


def test_default_of_unknown_shapes_takes_the_rest_and_not_three_point_four_six():
    # With float32(3.46) the second step would reach the last index at once: [0, 2].
    sizes = [224132928, 10912, 6208]
    assert segment_boundaries(sizes, "default", shape_mode="unknown", buffer_mib=8) == [0, 1, 2]


def test_a_small_buffer_adds_boundaries():
    boundaries = segment_boundaries([2**20] * 12, "size", [100], shape_mode="unknown", buffer_mib=4)
    assert boundaries == [2, 5, 8, 11]


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(any_sizes, percentages(), any_shape, any_buffer)
@example([2, 10**9, 2, 12], [100], "known", 200)
@example([0, 0, 0, 0], [100], "unknown", 1)
@example([0], [0, 100], "known", 200)
@example([5, 1000, 0, 0, 1000], [100, 0], "unknown", 1)
def test_by_size_equals_the_slow_implementation(sizes, values, shape, buffer_mib):
    raw = segment_boundaries(sizes, "size", values, shape_mode=shape, buffer_mib=buffer_mib)
    assert raw == slow_by_size(sizes, [F32(value) for value in values], shape, buffer_mib)
    check_collapsed(raw, len(sizes))


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(any_sizes, any_shape, any_buffer)
@example([2, 10**9, 2, 12], "unknown", 200)
@example([0, 0, 0, 0], "known", 1)
def test_default_equals_the_slow_implementation(sizes, shape, buffer_mib):
    raw = segment_boundaries(sizes, "default", shape_mode=shape, buffer_mib=buffer_mib)
    assert raw == slow_default(sizes, shape, buffer_mib)
    assert raw[-1] == len(sizes) - 1
    check_collapsed(raw, len(sizes))


@pytest.mark.parametrize("shape", ["known", "unknown"])
def test_a_hundred_thousand_gradients(shape):
    sizes = np.random.default_rng(7).integers(1, 2**22, 100_000).tolist()
    values = [10, 15.5, 24.5, 50]
    raw = segment_boundaries(sizes, "size", values, shape_mode=shape, buffer_mib=64)
    assert raw == slow_by_size(sizes, [F32(value) for value in values], shape, 64)


def test_a_hundred_thousand_gradients_that_float32_cannot_add():
    raw = segment_boundaries([10**12] + [1] * 99_999, "size", [12.5] * 8)
    assert raw[0] == 0
    assert collapse_boundaries(raw, 100_000)[0][-1] == 99_999
    assert cap_boundaries([1] * 100_000, 10) == list(range(9, 100_000, 10))
    assert len(equal_boundaries([1] * 100_000, 1000)) == 1000


def check_collapsed(raw: list[int], count: int) -> None:
    boundaries, notes = collapse_boundaries(raw, count)
    assert list(boundaries) == sorted(set(boundaries))
    assert boundaries[0] >= 0
    assert boundaries[-1] == count - 1
    appended = int(max(raw) < count - 1)
    assert len(notes) == len(raw) + appended - len(boundaries)
    assert set(boundaries) - {count - 1} <= set(raw)


@given(st.integers(1, 200), st.data())
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_by_idx_round_trip(count, data):
    inner = data.draw(st.sets(st.integers(0, count - 1)))
    values = sorted(inner | {count - 1})
    boundaries = segment_boundaries([K] * count, "idx", values)
    segments = boundaries_to_segments(boundaries)
    assert [segment[0] for segment in segments[1:]] == [segment[1] for segment in segments[:-1]]
    assert sum(stop - start for start, stop in segments) == count
    assert list(segments_to_boundaries(segments)) == values
    assert collapse_boundaries(boundaries, count) == (tuple(values), ())


@given(any_sizes, st.integers(1, 2**30))
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_cap_is_never_exceeded_and_no_cut_is_needless(sizes, max_bytes):
    segments = boundaries_to_segments(cap_boundaries(sizes, max_bytes))
    assert segments[-1][1] == len(sizes)
    for start, stop in segments:
        assert stop - start == 1 or sum(sizes[start:stop]) <= max_bytes
    for (start, stop), (_, following) in zip(segments, segments[1:]):
        assert stop < following
        assert sum(sizes[start : stop + 1]) > max_bytes


@pytest.mark.parametrize(
    ("sizes", "max_bytes", "expected"),
    [
        ([5], 1, [0]),
        ([5, 5, 5, 5], 10, [1, 3]),
        ([5, 5, 5, 5], 9, [0, 1, 2, 3]),
        ([1, 50, 1, 1], 10, [0, 1, 3]),
        ([50, 1, 1], 10, [0, 2]),
        ([1, 1, 50], 10, [1, 2]),
        ([0, 0, 0], 1, [2]),
        ([10, 0, 0, 1], 10, [2, 3]),
        (np.array([5, 5, 5, 5]), np.int32(10), [1, 3]),
    ],
)
def test_cap(sizes, max_bytes, expected):
    assert cap_boundaries(sizes, max_bytes) == expected


@pytest.mark.parametrize("max_bytes", [0, -1, 1.5, float("nan"), "10", True, None])
def test_cap_needs_a_positive_integer(max_bytes):
    with pytest.raises(StrategyError, match="segment limit in bytes"):
        cap_boundaries([5, 5], max_bytes)


@given(any_sizes, st.integers(1, 8))
@settings(max_examples=200, deadline=None, derandomize=True, database=None)
def test_equal_parts_are_by_size_with_equal_percentages(sizes, segments):
    raw = equal_boundaries(sizes, segments)
    assert raw == segment_boundaries(sizes, "size", [100 / segments] * segments)
    check_collapsed(raw, len(sizes))


def test_equal_parts():
    assert equal_boundaries(RESNET50, 8) == [6, 10, 15, 26, 30, 48, 75, 160]
    assert equal_boundaries([K] * 3, 10) == segment_boundaries([K] * 3, "size", [12.5] * 8)
    assert equal_boundaries([K] * 20, 20) == list(range(20))
    assert equal_boundaries([K] * 20, 10**18) == list(range(20))
    with pytest.raises(StrategyError, match="number of segments"):
        equal_boundaries([K], 0)


@pytest.mark.parametrize(
    ("raw", "count", "boundaries", "notes"),
    [
        ([0, 1, 2], 3, (0, 1, 2), ()),
        ([0, 1, 1, 2], 3, (0, 1, 2), ("boundary 1 at position 2 repeats 1: dropped as empty",)),
        ([1], 4, (1, 3), ()),
        ([], 4, (3,), ()),
        (
            [4, 2, 4, 4],
            6,
            (4, 5),
            (
                "boundary 2 at position 1 lies before 4: dropped as empty",
                "boundary 4 at position 2 repeats 4: dropped as empty",
                "boundary 4 at position 3 repeats 4: dropped as empty",
            ),
        ),
    ],
)
def test_collapse(raw, count, boundaries, notes):
    assert collapse_boundaries(raw, count) == (boundaries, notes)


@pytest.mark.parametrize(("raw", "count"), [([0, 3], 3), ([-1], 3), ([0], 0)])
def test_collapse_refuses_what_no_section_has(raw, count):
    with pytest.raises(StrategyError):
        collapse_boundaries(raw, count)


@pytest.mark.parametrize("boundaries", [[1, 1], [2, 1], [-1], [-2, 3]])
def test_segments_of_bad_boundaries(boundaries):
    with pytest.raises(StrategyError, match="ascend strictly"):
        boundaries_to_segments(boundaries)


@pytest.mark.parametrize("segments", [[(1, 2)], [(0, 2), (3, 4)], [(0, 2), (1, 4)], [(0, 0)], [(0, 2), (2, 1)]])
def test_boundaries_of_bad_segments(segments):
    with pytest.raises(StrategyError, match="follow each other"):
        segments_to_boundaries(segments)


def test_no_segments():
    assert boundaries_to_segments([]) == ()
    assert segments_to_boundaries([]) == ()


@pytest.mark.parametrize(
    ("size", "padded"), [(0, 32), (1, 64), (32, 64), (33, 96), (4004, 4064), (4096, 4128), (8200192, 8200224)]
)
def test_padded_bytes(size, padded):
    assert padded_bytes(size) == padded


@pytest.mark.parametrize("size", [-1, 1.5, True, "32"])
def test_padded_bytes_of_no_size(size):
    with pytest.raises(StrategyError):
        padded_bytes(size)


def test_import_does_not_load_tensorflow():
    code = "import sys, hccl_fusion.segmentation, hccl_fusion.split; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
