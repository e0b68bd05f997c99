"""Starting and ending ranks: real processes over real collectives."""

from __future__ import annotations

import importlib
import json
import socket
import time

import pytest
from scripts.rank_runner import consecutive_ports, launcher_variables, run_ranks

import hccl_fusion.groups as groups
from hccl_fusion.errors import StrategyError
from hccl_fusion.registry import (
    recorded_calls,
    registered_strategy,
    reset_split_strategy,
    set_membership_check,
    set_split_strategy_by_idx,
)
from hccl_fusion.runtime import group_registry, lifecycle, tf_server
from hccl_fusion.runtime.group_registry import LifecycleError, NotInitialisedError
from hccl_fusion.runtime.handshake import Statement, differences
from hccl_fusion.runtime.launcher import free_ports
from hccl_fusion.runtime.world import World, WorldError
from hccl_fusion.strategy import StrategyKind

TWO = {"HCCL_FUSION_RANK": "0", "HCCL_FUSION_ADDRESSES": "127.0.0.1:29600,127.0.0.1:29601"}


@pytest.fixture(autouse=True)
def _clean():
    yield
    lifecycle.shutdown()
    group_registry.close_world()
    set_membership_check(None)
    reset_split_strategy()


def lines_of(results):
    assert [result.code for result in results] == [0] * len(results), results
    return [result.out.splitlines() for result in results]


class TestWorldOfOne:
    def test_everything_works(self):
        world = lifecycle.init(environ={})
        assert (lifecycle.rank(), lifecycle.size(), lifecycle.local_rank(), lifecycle.local_size()) == (0, 1, 0, 1)
        assert lifecycle.session_target() == ""
        assert lifecycle.collective_device() == "/device:CPU:0"
        assert lifecycle.is_initialised()
        assert lifecycle.init(environ={}) is world

    def test_session_config_keeps_the_user_s(self):
        import tensorflow as tf

        lifecycle.init(environ={})
        user = tf.compat.v1.ConfigProto(allow_soft_placement=True)
        assert lifecycle.session_config(user) == user
        assert lifecycle.session_config(user) is not user
        assert lifecycle.session_config() == tf.compat.v1.ConfigProto()

    def test_a_reduction_over_one_rank(self):
        import tensorflow as tf

        module = importlib.import_module("scripts.sum_of_ranks")
        lifecycle.init(environ={})
        assert module.in_session(3.0) == [3.0, 3.0]
        assert float(tf.function(module.reduce_sum)(tf.constant([2.0]), instance_key=77)[0]) == 2

    def test_shutdown_clears_and_init_works_again(self):
        groups.create_group("alone", 1, [0])
        set_split_strategy_by_idx([3, 5], group="alone")
        assert recorded_calls()
        lifecycle.init(environ={})
        assert recorded_calls() == ()
        lifecycle.shutdown()
        lifecycle.shutdown()
        assert registered_strategy("alone").kind is StrategyKind.DEFAULT
        lifecycle.init(environ={})
        with pytest.raises(StrategyError, match="no such group"):
            groups.get_rank_size("alone")


class TestCallsBeforeInit:
    @pytest.mark.parametrize(
        "function",
        ["rank", "size", "local_rank", "local_size", "session_target", "session_config", "collective_device",
         "timeout_seconds"],
    )  # fmt: skip
    def test_the_error_names_init(self, function):
        with pytest.raises(NotInitialisedError, match=rf"{function}\(\) was called before.*init\(\) first"):
            getattr(lifecycle, function)()

    def test_it_is_a_value_error(self):
        assert issubclass(NotInitialisedError, ValueError)


class TestMembership:
    def test_the_setters_ask_the_groups(self):
        lifecycle.init(environ={})
        set_split_strategy_by_idx([3])
        with pytest.raises(StrategyError, match=r"no such group.*'other'"):
            set_split_strategy_by_idx([3], group="other")

    def test_calls_before_init_are_checked(self):
        set_split_strategy_by_idx([3], group="other")
        with pytest.raises(StrategyError, match=r"group that this rank is not in.*'other'"):
            lifecycle.init(environ={})
        assert not lifecycle.is_initialised()

    def test_a_group_without_this_rank_is_refused(self):
        groups.create_group("others", 2, [1, 2])
        with pytest.raises(StrategyError, match=r"not in the world, create_group.*found 1; 2, expected 0 to 0"):
            lifecycle.init(environ={})


class TestBadStarts:
    @pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
    def test_an_illegal_timeout(self, seconds):
        with pytest.raises(LifecycleError, match="timeout is illegal"):
            lifecycle.init(timeout_seconds=seconds, environ={})

    def test_an_illegal_timeout_in_the_environment(self):
        with pytest.raises(WorldError, match="HCCL_FUSION_TIMEOUT, found 'soon'"):
            lifecycle.init(environ={"HCCL_FUSION_TIMEOUT": "soon"})

    def test_the_port_is_taken(self):
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            environ = {**TWO, "HCCL_FUSION_ADDRESSES": f"{address},127.0.0.1:1"}
            with pytest.raises(
                LifecycleError, match=rf"port of rank 0 cannot be used, {address}, found Address already"
            ):
                lifecycle.init(environ=environ)
        assert not lifecycle.is_initialised()

    def test_ranks_that_do_not_listen_are_named(self):
        with free_ports([0, 0, 0]) as ports, socket.socket() as third:
            third.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            third.bind(("127.0.0.1", ports[2]))
            third.listen()
            addresses = tuple(f"127.0.0.1:{port}" for port in ports)
            world = World(0, ("a",) * 3, addresses)
            with pytest.raises(LifecycleError, match=rf"waited 0.2 s .*no answer from rank 1 \({addresses[1]}\), exp"):
                tf_server.wait_for_ranks(world, time.monotonic() + 0.2, 0.2)
            assert tf_server.unreachable_ranks(world) == f"rank 1 ({addresses[1]})"

    def test_tensorflow_was_used_before(self):
        import tensorflow as tf

        tf.constant(1.0)
        with launcher_variables(2) as (environ, _), pytest.raises(LifecycleError, match="after TensorFlow was") as info:
            lifecycle.init(environ=environ)
        assert str(info.value).endswith("try moving hccl_fusion.init() to the top of the script")
        assert not lifecycle.is_initialised()

    def test_a_host_without_a_name(self):
        world = World(0, ("a", "b"), ("127.0.0.1:1", "no-such-host.invalid:1"))
        with pytest.raises(LifecycleError, match="no-such-host"):
            tf_server.wait_for_ranks(world, time.monotonic(), 0.2)


class TestDifferences:
    BASE = Statement("1", ("a:1", "b:1"), {})

    def test_agreement(self):
        assert differences([self.BASE, self.BASE]) == []

    def test_json_and_back(self):
        statement = Statement("1", ("a:1",), {"gruppe ä": (0,)})
        assert Statement.from_json(statement.to_json()) == statement

    @pytest.mark.parametrize(
        ("other", "finding"),
        [
            (Statement("2", BASE.addresses, {}), "hccl_fusion is 1 on rank 0 and 2 on rank 1"),
            (Statement("1", ("a:1",), {}), "the world has 2 ranks on rank 0 and 1 on rank 1"),
            (Statement("1", ("a:1", "c:1"), {}), "rank 1 is at b:1 on rank 0 and at c:1 on rank 1"),
            (Statement("1", BASE.addresses, {"g": (0, 1)}), "group 'g' was not created on rank 0 and has ranks [0, 1]"),
            (Statement("1", BASE.addresses, {"g": (1,)}), None),
        ],
    )
    def test_each(self, other, finding):
        found = differences([self.BASE, other])
        assert (not found) if finding is None else (len(found) == 1 and found[0].startswith(finding))


class TestRealRanks:
    """Each source of the world is run: the launcher in test_launcher.py, one rank above, and these."""

    def test_rank_table_in_a_tf1_script(self, tmp_path):
        with consecutive_ports(2) as base:
            devices = [{"device_id": str(at), "device_ip": "192.168.1.8", "rank_id": str(at)} for at in range(2)]
            servers = [{"server_id": "127.0.0.1", "device": devices}]
            table = {"version": "1.0", "status": "completed", "server_count": "1", "server_list": servers}
            path = tmp_path / "hccl.json"
            path.write_text(json.dumps(table))
            common = {"RANK_TABLE_FILE": str(path), "HCCL_FUSION_PORT": str(base), "HCCL_FUSION_TIMEOUT": "30"}
            results = run_ranks("sum_of_ranks.py", [{**common, "RANK_ID": str(rank)} for rank in range(2)], "v1")
        for rank, lines in enumerate(lines_of(results)):
            assert lines[:3] == [f"rank {rank} of 2, local {rank} of 2", "session 3.0 3.0", "session again 3.0 3.0"]

    def test_tf_config_and_a_second_init(self):
        with free_ports([0, 0]) as ports:
            addresses = [f"localhost:{port}" for port in ports]
            cluster = {"chief": addresses[:1], "worker": addresses[1:]}
            tasks = [{"type": "chief", "index": 0}, {"type": "worker", "index": 0}]
            configs = [json.dumps({"cluster": cluster, "task": task}) for task in tasks]
            results = run_ranks(
                "sum_of_ranks.py", [{"TF_CONFIG": text, "HCCL_FUSION_TIMEOUT": "30"} for text in configs]
            )
        for rank, lines in enumerate(lines_of(results)):
            assert lines[0] == f"rank {rank} of 2, local {rank} of 2"
            assert lines[1:6] == ["session 3.0 3.0", "eager 3.0", "function 3.0", "large 3.0", "session again 3.0 3.0"]
            assert "init again: TensorFlow cannot start a second server in a process" in lines[6]
            assert lines[6].endswith("try a new process")

    def test_ranks_that_differ_all_end_with_the_same_error(self):
        with launcher_variables(2) as variables:
            results = run_ranks("disagree.py", variables)
        assert [result.code for result in results] == [1, 1]
        for result in results:
            assert result.err.splitlines()[-1] == (
                "AgreementError: the ranks do not agree, found hccl_fusion is 0.1.0 on rank 0 and 0.0.1 on rank 1; "
                "group 'mine' was not created on rank 0 and has ranks [0, 1] on rank 1; "
                "group 'pair' has ranks [0, 1] on rank 0 and has ranks [1, 0] on rank 1, "
                "expected the same on all ranks; try the same script, version and environment on all ranks"
            )

    def test_a_leader_that_never_starts(self):
        with launcher_variables(2, timeout=2) as variables:
            (result,) = run_ranks("only_init.py", variables[1:])
        assert result.code == 1
        assert (
            "LifecycleError: rank 1 waited 2 s and not all ranks have started, found no answer from rank 0 (127.0."
            in (result.err)
        )

    def test_worlds_of_different_sizes(self):
        with launcher_variables(2, timeout=60) as variables, socket.socket() as third:
            third.bind(("127.0.0.1", 0))
            third.listen()
            addresses = f"{variables[0]['HCCL_FUSION_ADDRESSES']},127.0.0.1:{third.getsockname()[1]}"
            results = run_ranks("only_init.py", [variables[0], {**variables[1], "HCCL_FUSION_ADDRESSES": addresses}])
        assert [result.code for result in results] == [1, 1]
        errors = [result.err.splitlines()[-1] for result in results]
        assert any(error.startswith("AgreementError: the ranks do not agree") for error in errors), errors
        assert all(error.startswith(("AgreementError: ", "RankLostError: ")) for error in errors), errors

    def test_a_group_that_differs_and_a_rank_that_is_killed(self):
        with launcher_variables(2) as variables:
            results = run_ranks("lose_a_rank.py", variables)
            killed = variables[0]["HCCL_FUSION_ADDRESSES"].split(",")[1]
        difference = "group 'pair' has ranks [0, 1] on rank 0 and has ranks [1, 0] on rank 1"
        for result in results:
            assert result.out.splitlines()[0].startswith(f"AgreementError: the ranks do not agree, found {difference}")
            assert result.out.splitlines()[1] == "sum 2.0"
        assert [result.code for result in results] == [1, -9]
        assert results[0].out.splitlines()[2:] == ["ended within seconds True"]
        assert (
            results[0]
            .err.splitlines()[-1]
            .startswith(
                "RankLostError: rank 0 has lost another rank, while segment 3 was reduced, "
                f"found no answer from rank 1 ({killed})"
            )
        )
