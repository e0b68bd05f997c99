"""Finds out which ranks there are, where they run, and which one this process is.

The environment says so. The first source that is present counts, in this order:

| source | variables |
|---|---|
| launcher | `HCCL_FUSION_RANK`; `HCCL_FUSION_ADDRESSES`: `host:port` of each rank, by comma, in the order of ranks |
| rank table | `RANK_TABLE_FILE` and `RANK_ID`; `RANK_SIZE` and `DEVICE_ID` are compared where they are set |
| TensorFlow | `TF_CONFIG` with chief and worker tasks; the chief, where there is one, is rank 0 |
| none | a world of one |

A rank table names no ports: rank r listens on its server at `HCCL_FUSION_PORT` (29600 where unset) plus its position
among the ranks of that server.
"""

from __future__ import annotations

__all__ = [
    "ADDRESSES_VARIABLE",
    "DEFAULT_PORT",
    "DEFAULT_TIMEOUT_SECONDS",
    "PORT_VARIABLE",
    "RANK_VARIABLE",
    "TIMEOUT_VARIABLE",
    "World",
    "WorldError",
    "base_port",
    "find_timeout_seconds",
    "find_world",
    "split_address",
]

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from hccl_fusion.errors import summarise
from hccl_fusion.runtime.rank_table import RankEntry, read_rank_table
from hccl_fusion.runtime.tf_config import WorldError, parse_tf_config

RANK_VARIABLE = "HCCL_FUSION_RANK"
ADDRESSES_VARIABLE = "HCCL_FUSION_ADDRESSES"
PORT_VARIABLE = "HCCL_FUSION_PORT"
TIMEOUT_VARIABLE = "HCCL_FUSION_TIMEOUT"
DEFAULT_PORT = 29600
DEFAULT_TIMEOUT_SECONDS = 120.0

_MAX_PORT = 65535


@dataclass(frozen=True)
class World:
    """All ranks, and which one this process is.

    Attributes:
        rank: this process's rank.
        servers: the server of each rank; ranks with equal servers share a machine.
        addresses: `host:port` where each rank listens; empty where there is one rank that needs none.
        source: what described this world, for people.
    """

    rank: int = 0
    servers: tuple[str, ...] = ("localhost",)
    addresses: tuple[str, ...] = ()
    source: str = "no environment"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise WorldError(
                "the rank is not in the world", where=self.source, found=self.rank, expected=f"0 to {self.size - 1}"
            )
        if len(self.addresses) != self.size and (self.addresses or self.size > 1):
            raise WorldError(
                "every rank needs an address", where=self.source, found=len(self.addresses), expected=self.size
            )
        twice = [address for address, count in Counter(self.addresses).items() if count > 1]
        if twice:
            raise WorldError(
                "two ranks have one address", where=self.source, found=summarise(twice), expected="one address a rank"
            )

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.servers)

    @property
    def local_rank(self) -> int:
        """This rank's position among the ranks of its server."""
        return self.servers[: self.rank].count(self.servers[self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks this rank's server has."""
        return self.servers.count(self.servers[self.rank])


def find_world(environ: Mapping[str, str]) -> World:
    """Returns the world that the environment describes.

    Args:
        environ: environment variables; a rank table that they name is read. An empty value counts as none.

    Raises:
        WorldError: the environment describes no world, or contradicts itself.
        RankTableError: the rank table is malformed.
    """
    present = {name: value.strip() for name, value in environ.items() if value.strip()}
    if RANK_VARIABLE in present or ADDRESSES_VARIABLE in present:
        return _from_launcher(present)
    if "RANK_TABLE_FILE" in present:
        return _from_rank_table(present)
    if "TF_CONFIG" in present:
        world = _from_tf_config(present["TF_CONFIG"])
        if world is not None:
            return world
    _check_no_rank_is_lost(present)
    return World()


def find_timeout_seconds(environ: Mapping[str, str]) -> float:
    """Returns `HCCL_FUSION_TIMEOUT`, or 120 seconds.

    Raises:
        WorldError: it is no positive number.
    """
    text = environ.get(TIMEOUT_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_TIMEOUT_SECONDS
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise WorldError(
            "the timeout is illegal", where=f"variable {TIMEOUT_VARIABLE}", found=repr(text), expected="seconds above 0"
        )
    return seconds


def base_port(environ: Mapping[str, str]) -> int:
    """Returns `HCCL_FUSION_PORT`, or 29600.

    Raises:
        WorldError: it is no port.
    """
    port = _number(environ, PORT_VARIABLE) if environ.get(PORT_VARIABLE, "").strip() else DEFAULT_PORT
    if not 1 <= port <= _MAX_PORT:
        raise WorldError(
            "the port is illegal", where=f"variable {PORT_VARIABLE}", found=port, expected=f"1 to {_MAX_PORT}"
        )
    return port


def split_address(address: object, where: str) -> tuple[str, int]:
    """`host:port` or `[::1]:port` -> host without brackets, port.

    Raises:
        WorldError: no address.
    """
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= _MAX_PORT
        if bare and is_port and not any(char.isspace() or char in ",/" for char in host):
            return bare, int(port)
    raise WorldError("an address is illegal", where=where, found=repr(address), expected="host:port, port 1 to 65535")


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise WorldError("a number is illegal", where=f"variable {name}", found=repr(text), expected="a number from 0")
    return int(text)


def _from_launcher(environ: Mapping[str, str]) -> World:
    for name, other in ((RANK_VARIABLE, ADDRESSES_VARIABLE), (ADDRESSES_VARIABLE, RANK_VARIABLE)):
        if name not in environ:
            raise WorldError(
                f"{other} is set without {name}",
                where="environment",
                expected="both or none",
                remedy="hccl-fusion run, which sets both",
            )
    where = f"variable {ADDRESSES_VARIABLE}"
    addresses = tuple(address.strip() for address in environ[ADDRESSES_VARIABLE].split(","))
    servers = tuple(split_address(address, where)[0] for address in addresses)
    rank = _number(environ, RANK_VARIABLE)
    if rank >= len(addresses):
        raise WorldError(
            f"{RANK_VARIABLE} is outside the addresses of {ADDRESSES_VARIABLE}",
            where="environment",
            found=rank,
            expected=f"0 to {len(addresses) - 1}",
        )
    return World(rank, servers, addresses, where)


def _from_rank_table(environ: Mapping[str, str]) -> World:
    table = read_rank_table(environ["RANK_TABLE_FILE"])
    size = len(table.entries)
    if "RANK_ID" not in environ:
        raise WorldError(
            "RANK_TABLE_FILE is set without RANK_ID", where="environment", expected=f"RANK_ID of 0 to {size - 1}"
        )
    rank = _number(environ, "RANK_ID")
    if rank >= size:
        raise WorldError("RANK_ID is not in the rank table", where=table.path, found=rank, expected=f"0 to {size - 1}")
    entry = table.entries[rank]
    for name, expected in (("RANK_SIZE", size), ("DEVICE_ID", entry.device_id)):
        if name in environ and _number(environ, name) != expected:
            raise WorldError(
                f"{name} contradicts the rank table for rank {rank}",
                where=table.path,
                found=environ[name],
                expected=expected,
                remedy=f"unsetting {name}",
            )
    return World(
        rank,
        tuple(entry.server_id for entry in table.entries),
        _table_addresses(table.entries, base_port(environ)),
        f"rank table {table.path}",
    )


def _table_addresses(entries: tuple[RankEntry, ...], port: int) -> tuple[str, ...]:
    on_server: Counter[str] = Counter()
    addresses = []
    for entry in entries:
        host = f"[{entry.server_id}]" if ":" in entry.server_id else entry.server_id
        address = f"{host}:{port + on_server[entry.server_id]}"
        split_address(address, f"rank {entry.rank} of the rank table, {PORT_VARIABLE} {port}")
        addresses.append(address)
        on_server[entry.server_id] += 1
    return tuple(addresses)


def _from_tf_config(text: str) -> World | None:
    cluster = parse_tf_config(text)
    if cluster is None:
        return None
    where = "variable TF_CONFIG"
    servers = tuple(split_address(address, f"{where}, cluster")[0] for address in cluster.addresses)
    return World(cluster.rank, servers, tuple(map(str, cluster.addresses)), where)


def _check_no_rank_is_lost(environ: Mapping[str, str]) -> None:
    """RANK_SIZE 8 without a table would become eight worlds of one, without a word."""
    for name, alone in (("RANK_SIZE", "1"), ("RANK_ID", "0")):
        if environ.get(name, alone) != alone:
            raise WorldError(
                f"{name} is set, but nothing says where the other ranks are",
                where="environment",
                found=f"{name}={environ[name]} without RANK_TABLE_FILE",
                expected="RANK_TABLE_FILE",
                remedy=f"setting RANK_TABLE_FILE, or unsetting {name} for a world of one",
            )
