"""The world from each source of the environment."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hccl_fusion.errors import HcclFusionError
from hccl_fusion.runtime.world import World, WorldError, base_port, find_timeout_seconds, find_world, split_address

LAUNCHER = {"HCCL_FUSION_RANK": "2", "HCCL_FUSION_ADDRESSES": "a:1,a:2,b:1,b:2"}
WORKERS = {"worker": ["a:1", "b:1"]}


def tf_config(cluster, job="worker", index=0):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})}


@pytest.fixture
def table(tmp_path):
    """Two servers; rank 1 is listed before rank 0."""
    servers = [
        {"server_id": "10.0.0.1", "device": [{"device_id": "4", "rank_id": "1"}, {"device_id": "3", "rank_id": "0"}]},
        {"server_id": "fd00::2", "device": [{"device_id": "3", "rank_id": "2"}]},
    ]
    path = tmp_path / "hccl.json"
    path.write_text(json.dumps({"version": "1.0", "status": "completed", "server_count": "2", "server_list": servers}))
    return {"RANK_TABLE_FILE": str(path), "RANK_ID": "1"}


class TestLauncher:
    def test_found(self):
        world = find_world(LAUNCHER)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (2, 4, 0, 2)
        assert world.addresses == ("a:1", "a:2", "b:1", "b:2")
        assert world.servers == ("a", "a", "b", "b")

    def test_it_comes_first(self, table):
        assert find_world({**LAUNCHER, **table, **tf_config(WORKERS)}).size == 4

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"HCCL_FUSION_RANK": ""}, "HCCL_FUSION_ADDRESSES is set without HCCL_FUSION_RANK"),
            ({"HCCL_FUSION_ADDRESSES": ""}, "HCCL_FUSION_RANK is set without HCCL_FUSION_ADDRESSES"),
            ({"HCCL_FUSION_RANK": "4"}, "outside the addresses .*found 4, expected 0 to 3"),
            ({"HCCL_FUSION_RANK": "-1"}, "a number is illegal, variable HCCL_FUSION_RANK, found '-1'"),
            ({"HCCL_FUSION_ADDRESSES": "a:1,a"}, "address is illegal, variable HCCL_FUSION_ADDRESSES, found 'a'"),
            ({"HCCL_FUSION_ADDRESSES": "a:1,b:1,a:1"}, "two ranks have one address.*found a:1"),
        ],
    )
    def test_contradictions(self, changes, message):
        with pytest.raises(WorldError, match=message):
            find_world({**LAUNCHER, **changes})


class TestRankTable:
    def test_found(self, table):
        world = find_world(table)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (1, 3, 1, 2)
        assert world.addresses == ("10.0.0.1:29600", "10.0.0.1:29601", "[fd00::2]:29600")

    def test_it_comes_before_tf_config(self, table):
        assert find_world({**table, **tf_config(WORKERS)}).size == 3

    def test_port_and_what_fits(self, table):
        world = find_world({**table, "HCCL_FUSION_PORT": "500", "RANK_SIZE": "3", "DEVICE_ID": "4"})
        assert world.addresses == ("10.0.0.1:500", "10.0.0.1:501", "[fd00::2]:500")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"RANK_ID": ""}, "RANK_TABLE_FILE is set without RANK_ID.*expected RANK_ID of 0 to 2"),
            ({"RANK_ID": "3"}, "RANK_ID is not in the rank table, .*hccl.json, found 3, expected 0 to 2"),
            ({"RANK_ID": "x"}, "variable RANK_ID, found 'x'"),
            ({"RANK_SIZE": "8"}, "RANK_SIZE contradicts the rank table for rank 1.*found 8, expected 3"),
            ({"DEVICE_ID": "0"}, "DEVICE_ID contradicts .*found 0, expected 4; try unsetting DEVICE_ID"),
            ({"RANK_TABLE_FILE": "none.json"}, "cannot read the rank table, none.json"),
            ({"HCCL_FUSION_PORT": "0"}, "port is illegal, variable HCCL_FUSION_PORT, found 0, expected 1 to 65535"),
            ({"HCCL_FUSION_PORT": "65535"}, "address is illegal, rank 1 of the rank table, HCCL_FUSION_PORT 65535"),
        ],
    )
    def test_contradictions(self, table, changes, message):
        with pytest.raises(HcclFusionError, match=message):
            find_world({**table, **changes})

    @pytest.mark.parametrize("alone", [{"RANK_SIZE": "8"}, {"RANK_ID": "1"}])
    def test_a_rank_without_a_table_is_no_world_of_one(self, alone):
        with pytest.raises(WorldError, match=r"nothing says where the other ranks are.*try setting RANK_TABLE_FILE"):
            find_world(alone)


class TestTfConfig:
    def test_workers(self):
        world = find_world(tf_config(WORKERS, index=1))
        assert (world.rank, world.size, world.addresses) == (1, 2, ("a:1", "b:1"))

    def test_the_chief_is_rank_0(self):
        cluster = {"worker": ["b:1", "a:2"], "chief": ["a:1"], "evaluator": ["c:1"]}
        assert find_world(tf_config(cluster, "chief")).rank == 0
        world = find_world(tf_config(cluster, index="1"))
        assert (world.rank, world.addresses) == (2, ("a:1", "b:1", "a:2"))
        assert (world.local_rank, world.local_size) == (1, 2)

    @pytest.mark.parametrize("text", ["{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
    def test_no_cluster_is_a_world_of_one(self, text):
        assert find_world({"TF_CONFIG": text}).size == 1

    @pytest.mark.parametrize(
        ("environ", "message"),
        [
            ({"TF_CONFIG": "{"}, "TF_CONFIG is no JSON"),
            ({"TF_CONFIG": "[]"}, "wrong type, variable TF_CONFIG, cluster"),
            ({"TF_CONFIG": '{"cluster": 3}'}, "wrong type, variable TF_CONFIG, cluster, found 3"),
            (tf_config({"ps": ["a:1"], **WORKERS}), "cannot be a rank, variable TF_CONFIG, cluster.ps"),
            (tf_config({"worker": {"0": "a:1"}}), "no list of addresses, variable TF_CONFIG, cluster.worker"),
            (tf_config({"worker": ["a"]}), "address is illegal, variable TF_CONFIG, cluster, found 'a'"),
            (tf_config({"worker": [3]}), "address is illegal, variable TF_CONFIG, cluster, found 3"),
            (tf_config({"worker": ["a:1", "a:1"]}), "two ranks have one address"),
            (tf_config(WORKERS, "chief"), "no rank, variable TF_CONFIG, task.type, found 'chief', expected worker"),
            (tf_config({**WORKERS, "evaluator": ["c:1"]}, "evaluator"), "no rank.*found 'evaluator'"),
            (tf_config({"evaluator": ["c:1"]}), "no rank.*expected a cluster with workers"),
            (tf_config(WORKERS, index=2), "not in its cluster, .*found 2, expected 0 to 1"),
            (tf_config(WORKERS, index=True), "not in its cluster, .*found True"),
            (tf_config(WORKERS, index=None), "not in its cluster, .*found None"),
            ({"TF_CONFIG": json.dumps({"cluster": WORKERS})}, "no rank, .*found None"),
        ],
    )
    def test_contradictions(self, environ, message):
        with pytest.raises(WorldError, match=message) as info:
            find_world(environ)
        assert "\n" not in str(info.value)


class TestWorld:
    def test_nothing_is_a_world_of_one(self):
        world = find_world({"RANK_ID": "0", "RANK_SIZE": "1", "TF_CONFIG": " "})
        assert world == World()
        assert (world.rank, world.size, world.local_rank, world.local_size, world.addresses) == (0, 1, 0, 1, ())

    def test_it_is_frozen(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            World().rank = 1

    def test_it_checks_itself(self):
        with pytest.raises(WorldError, match=r"rank is not in the world.*found 1, expected 0 to 0"):
            World(1)
        with pytest.raises(WorldError, match=r"every rank needs an address.*found 0, expected 2"):
            World(0, ("a", "b"))

    def test_addresses(self):
        assert split_address("a.b:1", "x") == ("a.b", 1)
        assert split_address("[::1]:65535", "x") == ("::1", 65535)
        for text in ("", "a", "a:", ":1", "a:0", "a:65536", "a:x", "a b:1", "[]:1", "a/b:1", None):
            with pytest.raises(WorldError, match=r"address is illegal, x"):
                split_address(text, "x")

    def test_numbers_of_the_environment(self):
        assert (base_port({}), base_port({"HCCL_FUSION_PORT": " 7 "})) == (29600, 7)
        assert (find_timeout_seconds({}), find_timeout_seconds({"HCCL_FUSION_TIMEOUT": "2.5"})) == (120.0, 2.5)
        for text in ("0", "-1", "inf", "nan", "soon"):
            with pytest.raises(WorldError, match=r"timeout is illegal"):
                find_timeout_seconds({"HCCL_FUSION_TIMEOUT": text})
