"""What goes wrong among ranks, one case at a time, and what works beside a training step: wrap_agree.py FOLDER CASE.

Every rank writes what it saw to a JSON file.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import tensorflow as tf

from hccl_fusion import HcclFusionError, Strategy, StrategyKind, groups
from hccl_fusion.runtime import lifecycle
from hccl_fusion.runtime.broadcast import BroadcastCallback, BroadcastHook, broadcast_variables
from hccl_fusion.runtime.optimizer import DistributedOptimizer
from hccl_fusion.runtime.reduce import GradientReducer, reduce_tensors
from hccl_fusion.runtime.reduce_options import ReduceOptions

v1 = tf.compat.v1


def error_of(action):
    try:
        action()
    except HcclFusionError as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def graph_of(width, plan=None):
    with tf.Graph().as_default():
        a, b = v1.get_variable("a", [3, 4]), v1.get_variable("b", [4, width])
        loss = tf.reduce_sum(tf.ones([1, 3]) @ a @ b)
        DistributedOptimizer(v1.train.AdamOptimizer(), plan=plan).minimize(loss)


def function_of(count):
    reducer = GradientReducer(ReduceOptions())

    @tf.function
    def run():
        return reducer.reduce([tf.ones([2]) * number for number in range(count)])

    return run()


def disagree(rank):
    """Errors on both ranks; afterwards the ranks still work together."""
    return {
        "shape": error_of(lambda: graph_of(5 + rank)),
        "strategy": error_of(lambda: graph_of(5, Strategy(StrategyKind.NONE) if rank else None)),
        "count": error_of(lambda: function_of(2 + rank)),
        "options": error_of(lambda: reduce_tensors([tf.ones([2])], compression="fp16" if rank else None)),
        "variables": error_of(lambda: broadcast_variables([tf.Variable([1.0] * (rank + 1), name="v")])),
        "same": error_of(lambda: graph_of(5)),
    }


def values(rank):
    """Kinds of tensors that training steps rarely have."""
    number = rank + 1
    twice = tf.constant([1.0, 2.0]) * number
    wide = lambda *args, **kwargs: [None if t is None else t.numpy().tolist() for t in reduce_tensors(*args, **kwargs)]  # noqa: E731
    result = {
        "twice": wide([twice, None, twice, tf.constant(3.0 * number)]),
        "empty": wide([tf.zeros([0, 3]), tf.constant([1.0]) * number, tf.zeros([0])]),
        "only empty": wide([tf.zeros([0]), tf.zeros([2, 0])]),
        "int8": wide([tf.constant([100, 1], tf.int8)], average=False),
        "int8 average": error_of(lambda: reduce_tensors([tf.constant([1], tf.int8)])),
        "complex": error_of(lambda: reduce_tensors([tf.constant([1j])], average=False)),
        "mixed": wide([tf.constant([1.0]), tf.constant([2.0], tf.float64), tf.constant([3.0], tf.bfloat16)]),
        "bf16": wide([tf.constant([1.0, 3.0]) * number], compression="bf16"),
    }
    groups.create_group("pair", 2, [1, 0])
    result["group"] = wide([tf.constant([1.0]) * number], group="pair")
    reducer = GradientReducer(ReduceOptions())

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([3])])
    def any_length(x, y):
        return reducer.reduce([x, y])

    result["any length"] = [
        [t.numpy().tolist() for t in any_length(np.full([rows, 2], number, np.float32), np.ones(3, np.float32))]
        for rows in (2, 0, 40, 2)
    ]

    @tf.function
    def retraced(x):
        return reducer.reduce([tf.reduce_sum(x) * tf.ones([2])])[0]

    # Rank 1 traces once more than rank 0, without harm.
    result["retraced"] = [float(retraced(tf.ones([1 + rank * step]))[0]) for step in range(2)]
    return result


def broadcast(rank):
    import keras

    variables = [
        tf.Variable(tf.cast([rank, rank + 1], dtype))
        for dtype in (tf.float32, tf.bfloat16, tf.int8, tf.int64, tf.float64)
    ]
    variables.append(tf.Variable([bool(rank)]))
    variables.append(tf.Variable(tf.zeros([0])))
    broadcast_variables(variables, root_rank=1)
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(np.ones([2, 2]), np.ones([2, 2]), verbose=0, callbacks=[BroadcastCallback()])
    late = keras.Sequential([keras.layers.Dense(2)])
    late.compile(DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    late.fit(np.ones([2, 2]), np.ones([2, 2]), verbose=0, callbacks=[BroadcastCallback()])
    with tf.Graph().as_default():
        v1.get_variable("v", initializer=tf.constant([rank + 5.0]))
        v1.get_variable("w", initializer=tf.constant([rank + 7.0]), use_resource=True)
        both = v1.global_variables()
        hook = BroadcastHook()
        hook.begin()
        init = v1.global_variables_initializer()
        with v1.Session(lifecycle.session_target(), config=lifecycle.session_config()) as session:
            session.run(init)
            hook.after_create_session(session, None)
            graph = [float(value[0]) for value in session.run(both)]
    return {
        "eager": [tf.cast(v, tf.float64).numpy().tolist() for v in variables],
        "keras": [w.tolist() for w in model.get_weights()],
        "late": [w.tolist() for w in late.get_weights()],
        "graph": graph,
    }


def stall(rank):
    """Rank 1 dies before the second step; rank 0 gets an error that names the segment."""
    lifecycle._process.timeout_seconds = 3.0  # starting may take longer, on a busy machine
    with tf.Graph().as_default():
        v = v1.get_variable("v", [4])
        w = v1.get_variable("w", [4])
        train = DistributedOptimizer(v1.train.AdamOptimizer()).minimize(tf.reduce_sum(v * w))
        init = v1.global_variables_initializer()
        with v1.Session(lifecycle.session_target(), config=lifecycle.session_config()) as session:
            session.run(init)
            start = time.monotonic()
            try:
                session.run(train)
                if rank == 1:
                    os._exit(0)
                session.run(train)
            except tf.errors.OpError as error:  # rank 0 may still be busy with the first step
                return {"message": error.message, "seconds": time.monotonic() - start}
    return {}


def main(folder, case):
    world = lifecycle.init()
    result = {"disagree": disagree, "values": values, "broadcast": broadcast, "stall": stall}[case](world.rank)
    Path(folder, f"rank_{world.rank}.json").write_text(json.dumps(result))
    if case == "stall":
        os._exit(0)  # the world is broken: there is nobody to say goodbye to
    lifecycle.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
