"""Sums rank + 1 over the world and over a subgroup, eagerly, in a tf.function and in a session."""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

import hccl_fusion.groups as groups
from hccl_fusion.runtime import lifecycle, tf_server

v1 = tf.compat.v1


def reduce_sum(value, group="hccl_world_group", instance_key=1, timeout_seconds=None):
    with tf.device(lifecycle.collective_device()):
        return tf.raw_ops.CollectiveReduceV2(
            input=value,
            group_size=tf.constant(groups.get_rank_size(group)),
            group_key=tf.constant(groups.group_key(group)),
            instance_key=tf.constant(instance_key),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            timeout_seconds=timeout_seconds or lifecycle.timeout_seconds(),
        )


def in_session(number):
    with tf.Graph().as_default():
        total = reduce_sum(tf.constant([number]), instance_key=2)
        with v1.Session(lifecycle.session_target(), config=lifecycle.session_config()) as session:
            return [float(session.run(total)[0]) for _ in range(2)]


def main(modes):
    if "v1" in modes:
        v1.disable_v2_behavior()
    world = lifecycle.init()
    assert lifecycle.init() is world  # a second call changes nothing
    number = float(world.rank + 1)
    print(f"rank {lifecycle.rank()} of {lifecycle.size()}, local {lifecycle.local_rank()} of {lifecycle.local_size()}")
    print("session", *in_session(number))
    if "groups" in modes and world.rank in (1, 2):
        groups.create_group("middle", 2, [2, 1])
        for _ in range(3):  # the other ranks take no part
            total = float(reduce_sum(tf.constant([number]), "middle")[0])
        print("group", groups.get_rank_id("middle"), total)
    if "v1" not in modes:
        print("eager", float(reduce_sum(tf.constant([number]))[0]))
        print("function", float(tf.function(reduce_sum)(tf.constant([number], tf.float64), instance_key=3)[0]))
        large = np.full(2**20, number, np.float32)
        print("large", float(reduce_sum(tf.constant(large), instance_key=4)[-1]))
    print("session again", *in_session(number))
    for count in (1, 3000, 2, 2):  # texts of ranks, of any length at any time
        texts = [f"{other}ä" * count * (other + 1) for other in range(world.size)]
        key = tf_server.TALK_GROUP_KEY
        assert (
            tf_server.gather_text(texts[world.rank], world.rank, world.size, key, lifecycle.timeout_seconds()) == texts
        )
    lifecycle.shutdown()
    assert not lifecycle.is_initialised()
    try:
        lifecycle.init()
    except lifecycle.LifecycleError as error:
        print("init again:", error)
    else:
        lifecycle.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
