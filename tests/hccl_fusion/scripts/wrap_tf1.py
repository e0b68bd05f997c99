"""Trains TensorFlow 1 graphs with wrapped optimizers; every rank writes what it found to a JSON file."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

from hccl_fusion import Strategy, StrategyKind, reset_split_strategy, set_split_strategy_by_idx
from hccl_fusion.runtime import lifecycle
from hccl_fusion.runtime.optimizer import DistributedOptimizer

v1 = tf.compat.v1
RANDOM = np.random.RandomState(7)
X = RANDOM.rand(8, 6).astype(np.float32)
Y = RANDOM.rand(8, 3).astype(np.float32)
UNFUSED = Strategy(StrategyKind.NONE)


def mine(batch):
    share = len(batch) // lifecycle.size()
    return batch[lifecycle.rank() * share : (lifecycle.rank() + 1) * share]


def mlp(optimizer, wrap, **options):
    x, y = v1.placeholder(tf.float32, [None, 6], "x"), v1.placeholder(tf.float32, [None, 3], "y")
    hidden = x
    for number in range(4):
        kernel = v1.get_variable(f"w{number}", [6, 6], initializer=v1.glorot_uniform_initializer(seed=number))
        bias = v1.get_variable(f"b{number}", [6], initializer=v1.zeros_initializer())
        hidden = tf.tanh(tf.matmul(hidden, kernel) + bias)
    out = tf.matmul(hidden, v1.get_variable("out", [6, 3], initializer=v1.glorot_uniform_initializer(seed=9)))
    v1.get_variable("frozen", [2], trainable=False)
    v1.get_variable("unused", [2])
    loss = tf.reduce_mean(tf.square(out - y))
    wrapped = DistributedOptimizer(optimizer, **options) if wrap else optimizer
    pairs = wrapped.compute_gradients(loss)
    assert [g is None for g, _ in pairs] == [v.name == "unused:0" for _, v in pairs]
    gradients, norm = tf.clip_by_global_norm([g for g, _ in pairs], 0.5)
    train = wrapped.apply_gradients(zip(gradients, [v for _, v in pairs]))
    return x, y, train, norm


def embedding(optimizer, wrap, **options):
    x, y = v1.placeholder(tf.int32, [None], "ids"), v1.placeholder(tf.float32, [None, 3], "y")
    table = v1.get_variable("table", [10, 3], initializer=v1.glorot_uniform_initializer(seed=1))
    scale = v1.get_variable("scale", [3], initializer=v1.ones_initializer())
    # a sum, so that ranks with different numbers of rows add to the whole
    loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, x) * scale - y))
    wrapped = DistributedOptimizer(optimizer, average=False, **options) if wrap else optimizer
    return x, y, wrapped.minimize(loss), loss


def train(build, optimizer, feed, distributed, steps=3, seed=11, **options):
    graph = tf.Graph()
    with graph.as_default():
        v1.set_random_seed(seed)
        x, y, step, watched = build(optimizer(), distributed, **options)
        variables = v1.trainable_variables()
        init = v1.global_variables_initializer()
        target, config = (lifecycle.session_target(), lifecycle.session_config()) if distributed else ("", None)
        with v1.Session(target, config=config) as session:
            session.run(init)
            for number in range(steps):
                session.run([step, watched], dict(zip((x, y), feed(number))))
            weights = session.run(variables)
    return [w.tolist() for w in weights], graph


def ops(graph):
    return [op.name for op in graph.get_operations() if op.type.startswith("Collective")]


def rows(step):
    """Rank 1 has more rows than rank 0, and none in the last step."""
    all_ids = np.array([1, 1, 2, 5, 7, 9, 9, 3][step:], np.int32)
    targets = Y[: len(all_ids)]
    return all_ids, targets


def my_rows(step):
    ids, targets = rows(step)
    if lifecycle.size() == 1:
        return ids, targets
    cut = 2 if step < 2 else len(ids)
    return (ids[:cut], targets[:cut]) if lifecycle.rank() == 0 else (ids[cut:], targets[cut:])


def gan():
    """Two optimizers in one graph, each with its own variables."""
    a = v1.get_variable("a", [4, 2], initializer=v1.glorot_uniform_initializer(seed=1))
    b = v1.get_variable("b", [2, 4], initializer=v1.glorot_uniform_initializer(seed=2))
    x = v1.placeholder(tf.float32, [None, 4])
    loss = tf.reduce_mean(tf.square(x @ a @ b - x))
    first, second = (DistributedOptimizer(v1.train.AdamOptimizer(0.01)) for _ in range(2))
    both = tf.group(first.minimize(loss, var_list=[a]), second.minimize(-loss, var_list=[b]))
    return x, both, [a, b]


def main(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hccl_fusion").addHandler(handler)
    logging.getLogger("hccl_fusion").setLevel(logging.INFO)
    lifecycle.init()
    result = {"rank": lifecycle.rank(), "training": {}}
    batch = lambda _: (X, Y)  # noqa: E731
    share = lambda _: (mine(X), mine(Y))  # noqa: E731
    for name, optimizer in (
        ("momentum", lambda: v1.train.MomentumOptimizer(0.1, 0.9)),
        ("adam", lambda: v1.train.AdamOptimizer(0.01)),
    ):
        alone, _ = train(mlp, optimizer, batch, False)
        unfused, many = train(mlp, optimizer, share, True, plan=UNFUSED)
        fused, few = train(mlp, optimizer, share, True)
        result["training"][name] = {"alone": alone, "unfused": unfused, "fused": fused, "ops": [ops(many), ops(few)]}
    lines.clear()
    set_split_strategy_by_idx([2, 5, 8])
    by_idx, graph = train(mlp, lambda: v1.train.MomentumOptimizer(0.1, 0.9), share, True)
    result["by_idx"] = {"weights": by_idx, "ops": ops(graph), "lines": list(lines)}
    pieces, graph = train(mlp, lambda: v1.train.MomentumOptimizer(0.1, 0.9), share, True, piece_mib=2**-14)
    result["pieces"] = {"weights": pieces, "ops": ops(graph)}
    half, _ = train(mlp, lambda: v1.train.MomentumOptimizer(0.1, 0.9), share, True, compression="fp16")
    result["fp16"] = half
    reset_split_strategy()
    sgd = lambda: v1.train.GradientDescentOptimizer(0.05)  # noqa: E731
    result["embedding"] = {
        "alone": train(embedding, sgd, rows, False)[0],
        "allgather": train(embedding, sgd, my_rows, True)[0],
        "densify": train(embedding, sgd, my_rows, True, sparse="densify")[0],
    }
    with tf.Graph().as_default() as graph:
        x, step, variables = gan()
        init = v1.global_variables_initializer()
        with v1.Session(lifecycle.session_target(), config=lifecycle.session_config()) as session:
            session.run(init)
            for _ in range(3):
                session.run(step, {x: mine(X)[:, :4]})
            result["gan"] = {"weights": [w.tolist() for w in session.run(variables)], "ops": ops(graph)}
    Path(folder, f"rank_{lifecycle.rank()}.json").write_text(json.dumps(result))
    lifecycle.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
