"""Reads rank tables: the file that says which rank runs on which server.

Both formats of HCCL: version 1.0 with `server_list`, and the older one with `group_list`. Numbers are strings in both.
"""

from __future__ import annotations

__all__ = ["RankEntry", "RankTable", "RankTableError", "parse_rank_table", "read_rank_table"]

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hccl_fusion.errors import HcclFusionError, summarise

_WORLD_GROUP = "hccl_world_group"
_COMPLETED = "completed"
_VERSION = "1.0"


class RankTableError(HcclFusionError):
    """A rank table is malformed, not finished, or does not fit the rank that reads it."""


@dataclass(frozen=True)
class RankEntry:
    """One rank: the server that it runs on and its device there."""

    rank: int
    server_id: str
    device_id: int


@dataclass(frozen=True)
class RankTable:
    """A rank table.

    Attributes:
        path: the file.
        entries: one a rank, in the order of the ranks, which are 0 to N - 1.
    """

    path: str
    entries: tuple[RankEntry, ...]


@dataclass(frozen=True)
class _Value:
    """A JSON value that knows its file and its place there."""

    value: Any
    place: str
    path: str

    def error(self, what: str, **parts: Any) -> RankTableError:
        where = f"{self.path}, {self.place}" if self.place else self.path
        return RankTableError(what, where=where, **parts)

    def __contains__(self, key: str) -> bool:
        return isinstance(self.value, dict) and key in self.value

    def at(self, key: str) -> _Value:
        place = f"{self.place}.{key}" if self.place else key
        if not isinstance(self.value, dict):
            raise self.error(
                "a part of the rank table has the wrong type", found=_kind(self.value), expected="an object"
            )
        if key not in self.value:
            raise _Value(None, place, self.path).error("a key is missing in the rank table", remedy=f'adding "{key}"')
        return _Value(self.value[key], place, self.path)

    def elements(self) -> list[_Value]:
        if not isinstance(self.value, list):
            raise self.error("a part of the rank table has the wrong type", found=_kind(self.value), expected="a list")
        if not self.value:
            raise self.error("a list of the rank table is empty", expected="at least one element")
        return [_Value(value, f"{self.place}[{index}]", self.path) for index, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str) or not self.value:
            found = '""' if self.value == "" else _kind(self.value)
            raise self.error("a part of the rank table has the wrong type", found=found, expected="a non-empty string")
        return self.value

    def number(self) -> int:
        if isinstance(self.value, str) and self.value.isascii() and self.value.isdigit():
            return int(self.value)
        raise self.error(
            "a part of the rank table has the wrong type",
            found=json.dumps(self.value) if isinstance(self.value, (str, int, float)) else _kind(self.value),
            expected='a number from 0 in a string, such as "0"',
        )


def read_rank_table(path: str) -> RankTable:
    """Reads a rank table of either format.

    Raises:
        RankTableError: the file cannot be read or is no valid, completed rank table.
    """
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
    except OSError as error:
        raise RankTableError(
            "cannot read the rank table", where=path, found=error.strerror, remedy="another RANK_TABLE_FILE"
        ) from error
    except UnicodeDecodeError as error:
        raise RankTableError("the rank table is no text", where=path, expected="JSON in UTF-8") from error
    return parse_rank_table(text, path)


def parse_rank_table(text: str, path: str) -> RankTable:
    """Parses the text of a rank table; `path` is what errors call the file.

    Raises:
        RankTableError: no valid, completed rank table.
    """
    try:
        root = _Value(json.loads(text), "", path)
    except (ValueError, RecursionError) as error:
        what = "the rank table is empty" if not text.strip() else "the rank table is no JSON"
        raise RankTableError(what, where=path, found=str(error), remedy="generating it anew") from error
    _check_status(root)
    if "server_list" in root:
        placed = _server_list(root)
    elif "group_list" in root:
        placed = _group_list(root)
    else:
        raise root.error("the rank table has no ranks", expected="the key server_list (version 1.0) or group_list")
    return RankTable(path, _checked_entries(placed, root))


def _check_status(root: _Value) -> None:
    status = root.at("status")
    if status.text() != _COMPLETED:
        raise status.error(
            "the rank table is not finished",
            found=repr(status.value),
            expected=repr(_COMPLETED),
            remedy="waiting until the scheduler has completed it, or generating it anew",
        )


def _check_count(owner: _Value, key: str, found: int, unit: str, required: bool = False) -> None:
    """A count that the table states must be what it lists."""
    if not required and key not in owner:
        return
    count = owner.at(key)
    if count.number() != found:
        raise count.error(
            "a count of the rank table does not fit its list",
            found=f"{count.value} where {found} {unit} are listed",
            expected=found,
            remedy="generating the table anew",
        )


_Placed = list[tuple[_Value, RankEntry]]


def _server_list(root: _Value) -> _Placed:
    version = root.at("version")
    if version.text() != _VERSION:
        raise version.error("the rank table's version is not supported", found=repr(version.value), expected=_VERSION)
    servers = root.at("server_list").elements()
    _check_count(root, "server_count", len(servers), "servers", required=True)
    seen: dict[str, str] = {}
    placed = []
    for server in servers:
        server_id = server.at("server_id").text()
        if server_id in seen:
            raise server.at("server_id").error(
                "a server is listed twice", found=server_id, expected=f"all its devices in {seen[server_id]}"
            )
        seen[server_id] = server.place
        placed += [_entry(device, device, server_id) for device in server.at("device").elements()]
    return placed


def _group_list(root: _Value) -> _Placed:
    groups = root.at("group_list").elements()
    _check_count(root, "group_count", len(groups), "groups")
    worlds = [group for group in groups if group.at("group_name").text() == _WORLD_GROUP]
    if len(worlds) != 1:
        raise root.at("group_list").error(
            f"the rank table needs one group {_WORLD_GROUP}",
            found=summarise([group.value["group_name"] for group in groups]),
            expected=f"{_WORLD_GROUP} once",
        )
    world = worlds[0]
    instances = world.at("instance_list").elements()
    placed = []
    for instance in instances:
        devices = instance.at("devices").elements()
        if len(devices) != 1:
            raise instance.at("devices").error(
                "an instance of the rank table has several devices but one rank_id",
                found=f"{len(devices)} devices",
                expected="one device an instance",
                remedy="a table of version 1.0, where each device has its rank_id",
            )
        placed.append(_entry(instance, devices[0], instance.at("server_id").text()))
    _check_count(world, "instance_count", len(instances), "instances")
    _check_count(world, "device_num", len(instances), "devices")
    _check_count(world, "server_num", len({entry.server_id for _, entry in placed}), "servers")
    return placed


def _entry(ranked: _Value, device: _Value, server_id: str) -> tuple[_Value, RankEntry]:
    rank_id, device_id = ranked.at("rank_id"), device.at("device_id")
    return rank_id, RankEntry(rank_id.number(), server_id, device_id.number())


def _checked_entries(placed: _Placed, root: _Value) -> tuple[RankEntry, ...]:
    """Every rank of 0 to N - 1 once, every device once."""
    ranks: dict[int, _Value] = {}
    devices: dict[tuple[str, int], _Value] = {}
    for place, entry in placed:
        if entry.rank in ranks:
            raise place.error(
                "a rank_id is used twice", found=f"{entry.rank}, as in {ranks[entry.rank].place}", expected="each once"
            )
        device = (entry.server_id, entry.device_id)
        if device in devices:
            raise place.error(
                f"device {entry.device_id} of server {entry.server_id} has two ranks",
                found=f"rank {entry.rank}, and the one at {devices[device].place}",
                expected="one rank a device",
            )
        ranks[entry.rank] = devices[device] = place
    missing = [rank for rank in range(len(placed)) if rank not in ranks]
    if missing:
        raise root.error(
            "the rank_ids of the rank table have a hole",
            found=f"{len(placed)} ranks without rank_id {_listed(missing)}",
            expected=f"0 to {len(placed) - 1}",
            remedy="generating the table anew",
        )
    return tuple(sorted((entry for _, entry in placed), key=lambda entry: entry.rank))


def _listed(numbers: Iterable[int], limit: int = 5) -> str:
    texts = [str(number) for number in numbers]
    rest = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
