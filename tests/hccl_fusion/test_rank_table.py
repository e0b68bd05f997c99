"""Both formats of rank tables, and every way to be malformed."""

from __future__ import annotations

import copy
import json

import pytest

from hccl_fusion.runtime.rank_table import RankEntry, RankTableError, parse_rank_table, read_rank_table


def device(rank, device_id=None):
    return {
        "device_id": str(rank if device_id is None else device_id),
        "device_ip": "192.168.1.8",
        "rank_id": str(rank),
    }


NEW = {
    "version": "1.0",
    "status": "completed",
    "server_count": "2",
    "server_list": [
        {"server_id": "10.0.0.2", "device": [device(2, 0), device(3, 1)], "host_nic_ip": "reserve"},
        {"server_id": "10.0.0.1", "device": [device(1), device(0)]},
    ],
}
OLD = {
    "status": "completed",
    "group_count": "2",
    "group_list": [
        {"group_name": "other", "instance_list": []},
        {
            "group_name": "hccl_world_group",
            "device_num": "2",
            "server_num": "2",
            "instance_count": "2",
            "instance_list": [
                {
                    "pod_name": "b",
                    "rank_id": "1",
                    "server_id": "10.0.0.2",
                    "devices": [{"device_id": "5", "device_ip": ""}],
                },
                {
                    "pod_name": "a",
                    "rank_id": "0",
                    "server_id": "10.0.0.1",
                    "devices": [{"device_id": "5", "device_ip": ""}],
                },
            ],
        },
    ],
}


def changed(table, place, value):
    """A copy with another value at `a.0.b`; None takes the key away."""
    table = copy.deepcopy(table)
    *path, last = [int(part) if part.isdigit() else part for part in place.split(".")]
    owner = table
    for part in path:
        owner = owner[part]
    if value is None:
        del owner[last]
    else:
        owner[last] = value
    return table


def test_version_1():
    assert parse_rank_table(json.dumps(NEW), "t.json").entries == (
        RankEntry(0, "10.0.0.1", 0),
        RankEntry(1, "10.0.0.1", 1),
        RankEntry(2, "10.0.0.2", 0),
        RankEntry(3, "10.0.0.2", 1),
    )


def test_the_old_format():
    assert parse_rank_table(json.dumps(OLD), "t.json").entries == (
        RankEntry(0, "10.0.0.1", 5),
        RankEntry(1, "10.0.0.2", 5),
    )


def test_a_file_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(NEW), encoding="utf-8-sig")
    table = read_rank_table(str(path))
    assert (table.path, len(table.entries)) == (str(path), 4)


@pytest.mark.parametrize(
    ("table", "place", "value", "message"),
    [
        (NEW, "status", None, "a key is missing in the rank table, t.json, status; try adding"),
        (NEW, "status", "initializing", "t.json, status, found 'initializing', expected 'completed'; try waiting"),
        (NEW, "status", 1, "t.json, status, found a number, expected a non-empty string"),
        (NEW, "version", None, "key is missing in the rank table, t.json, version"),
        (NEW, "version", "1.2", "version is not supported, t.json, version, found '1.2', expected 1.0"),
        (NEW, "server_list", None, "no ranks, t.json, expected the key server_list"),
        (NEW, "server_list", [], "empty, t.json, server_list, expected at least one"),
        (NEW, "server_list", {}, "wrong type, t.json, server_list, found an object, expected a list"),
        (NEW, "server_list.0", "x", r"wrong type, t.json, server_list\[0\], found a string, expected an object"),
        (NEW, "server_count", None, "missing in the rank table, t.json, server_count"),
        (NEW, "server_count", "3", "t.json, server_count, found 3 where 2 servers are listed, expected 2"),
        (NEW, "server_count", "two", 'server_count, found "two", expected a number from 0 in a string'),
        (NEW, "server_list.0.server_id", None, r"missing in the rank table, t.json, server_list\[0\].server_id"),
        (NEW, "server_list.0.server_id", "", r'server_list\[0\].server_id, found ""'),
        (NEW, "server_list.1.server_id", "10.0.0.2", r"twice, t.json, server_list\[1\].server_id, found 10.0.0.2"),
        (NEW, "server_list.1.device", [], r"empty, t.json, server_list\[1\].device"),
        (NEW, "server_list.1.device.1.rank_id", None, r"t.json, server_list\[1\].device\[1\].rank_id; try adding"),
        (NEW, "server_list.1.device.1.rank_id", 0, r"device\[1\].rank_id, found 0, expected .* such as \"0\""),
        (NEW, "server_list.1.device.1.rank_id", "-1", r"device\[1\].rank_id, found \"-1\""),
        (NEW, "server_list.1.device.1.rank_id", [], r"device\[1\].rank_id, found a list"),
        (NEW, "server_list.1.device.1.rank_id", "3", r"twice, t.json, server_list\[1\].device\[1\].rank_id, found 3"),
        (NEW, "server_list.1.device.1.rank_id", "9", "hole, t.json, found 4 ranks without rank_id 0, expected 0 to 3"),
        (NEW, "server_list.1.device.1.device_id", "1", "device 1 of server 10.0.0.1 has two ranks, t.json"),
        (OLD, "group_count", "1", "group_count, found 1 where 2 groups are listed, expected 2"),
        (OLD, "group_list.1.group_name", "x", "needs one group hccl_world_group, t.json, group_list, found other; x"),
        (OLD, "group_list.0.group_name", "hccl_world_group", "needs one group hccl_world_group"),
        (OLD, "group_list.1.device_num", "8", r"group_list\[1\].device_num, found 8 where 2 devices are listed"),
        (OLD, "group_list.1.server_num", "1", r"group_list\[1\].server_num, found 1 where 2 servers are listed"),
        (OLD, "group_list.1.instance_count", "1", "instance_count, found 1 where 2 instances"),
        (OLD, "group_list.1.instance_list.0.devices", [{}, {}], "several devices but one rank_id, .*found 2 devices"),
        (OLD, "group_list.1.instance_list.0.rank_id", "0", r"twice, .*group_list\[1\].instance_list\[1\].rank_id"),
        (OLD, "group_list.1.instance_list", None, r"missing in the rank table, t.json, group_list\[1\].instance_list"),
    ],
)  # fmt: skip
def test_malformed_tables(table, place, value, message):
    with pytest.raises(RankTableError, match=message) as info:
        parse_rank_table(json.dumps(changed(table, place, value)), "t.json")
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the rank table is empty, t.json"),
        (" \n", "the rank table is empty, t.json"),
        ("{", "the rank table is no JSON, t.json"),
        ("[]", "wrong type, t.json, found a list, expected an object"),
        ("null", "wrong type, t.json, found null, expected an object"),
        ("[" * 100_000, "the rank table is no JSON, t.json"),
    ],
)
def test_no_tables(text, message):
    with pytest.raises(RankTableError, match=message):
        parse_rank_table(text, "t.json")


def test_unreadable_files(tmp_path):
    with pytest.raises(RankTableError, match=r"cannot read the rank table, .*none.json, found No such file"):
        read_rank_table(str(tmp_path / "none.json"))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RankTableError, match=r"is no text, .*binary.json, expected JSON in UTF-8"):
        read_rank_table(str(tmp_path / "binary.json"))
