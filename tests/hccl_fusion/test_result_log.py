"""The `segment result` line: written to the last blank, and read back from logs of any make."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hccl_fusion.errors import HcclFusionError, StrategyError
from hccl_fusion.result_log import (
    SegmentResult,
    format_segment_result,
    log_segment_result,
    parse_segment_results,
)

SAMPLE = "gradient segment result: segment num: 2, segment index list: [0,107] [108,159]  "
HOST_LOG = f"""\
[INFO] HCCP(4711,python):2026-08-21-10:00:00.000.001 [adapter.cc:12][4711]something else, [0,107] [108,159]
[EVENT] HCCL(4711,python):2026-08-21-10:00:01.000.002 [hcom.cc:1234][4711]{SAMPLE}
the recipe says: search for segment result
\t{SAMPLE.rstrip()}\r
2026-08-21 host7 rank 3 | gradient segment result: segment num: 1, segment index list: [0,4]  \r
"""


def test_line_is_exact_to_the_last_blank():
    assert format_segment_result([107, 159]) == SAMPLE
    assert format_segment_result((4,)) == "gradient segment result: segment num: 1, segment index list: [0,4]  "


def test_line_goes_to_the_logger_at_info(caplog):
    with caplog.at_level(logging.INFO, logger="hccl_fusion"):
        log_segment_result([107, 159])
    assert caplog.record_tuples == [("hccl_fusion", logging.INFO, SAMPLE)]


@pytest.mark.parametrize("boundaries", [[5, 5], [5, 4], [-1]])
def test_line_of_bad_boundaries(boundaries):
    with pytest.raises(StrategyError):
        format_segment_result(boundaries)


def test_reads_a_host_log_with_any_prefix():
    expected = (SegmentResult((107, 159), 2), SegmentResult((107, 159), 4), SegmentResult((4,), 5))
    assert parse_segment_results(HOST_LOG) == expected
    assert parse_segment_results(HOST_LOG.splitlines()) == expected
    assert parse_segment_results(iter(HOST_LOG.splitlines(keepends=True))) == expected


@pytest.mark.parametrize("log", ["", "\n\n", [], "no such line\n", "segment result"])
def test_log_without_results(log):
    assert parse_segment_results(log) == ()


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sets(st.integers(0, 2**32 - 1), min_size=1, max_size=8).map(sorted), max_size=5))
def test_what_is_written_is_read_back(lists):
    log = "".join(f"[{number}] {format_segment_result(values)}\nnoise\n" for number, values in enumerate(lists))
    results = parse_segment_results(log)
    assert [list(result.boundaries) for result in results] == lists
    assert [result.line_number for result in results] == [2 * number + 1 for number in range(len(lists))]


@pytest.mark.parametrize(
    ("tail", "message"),
    [
        ("segment num: 2, segment index list: [0,5] [7,9]  ", "found [7,9], expected a segment that starts at 6"),
        ("segment num: 2, segment index list: [0,5] [5,9]  ", "found [5,9], expected a segment that starts at 6"),
        ("segment num: 1, segment index list: [1,5]  ", "found [1,5], expected a segment that starts at 0"),
        ("segment num: 2, segment index list: [0,5] [6,5]  ", "found [6,5]"),
        ("segment num: 3, segment index list: [0,5] [6,9]  ", "found segment num: 3, expected 2 as listed"),
        ("segment num: 1, segment index list: [0,5] [6,9]  ", "found segment num: 1, expected 2 as listed"),
        ("segment num: x, segment index list: [0,5]  ", "malformed segment result"),
        ("segment num: 1, segment index list: [0,x]  ", "found [0,x]"),
        ("segment num: 1, segment index list: [-0,5]  ", "found [-0,5]"),
        ("segment num: 1, segment index list: [0,٥]  ", "malformed segment"),
        ("segment num: 1, segment index list: [0;5]  ", "found [0;5]"),
        ("segment num: 1, segment index list: [0,5,6]  ", "found [0,5,6]"),
        (f"segment num: 1, segment index list: [0,{'9' * 5000}]  ", "malformed segment"),
        ("segment num: 0, segment index list:  ", "malformed segment result"),
        ("segment num: 2, segment index list: [0,5] [6,", "malformed segment result"),
        ("segment num: 1, segment index list: [0,5] and so on", "malformed segment result"),
        (f"segment num: 1, segment index list: [0,5]  {SAMPLE}", "malformed segment result"),
        ("", "malformed segment result"),
    ],
)
def test_a_bad_line_is_named(tail, message):
    log = f"first\n{SAMPLE}\n[INFO] gradient segment result: {tail}\n"
    with pytest.raises(HcclFusionError) as caught:
        parse_segment_results(log)
    text = str(caught.value)
    assert message in text
    assert ", line 3, found" in text
    assert "\n" not in text
    assert len(text) < 6000
