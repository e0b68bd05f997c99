"""Trains Keras models with distributed optimizers; every rank writes what it found to a JSON file."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from hccl_fusion import reset_split_strategy, set_split_strategy_by_idx
from hccl_fusion.runtime import lifecycle
from hccl_fusion.runtime.optimizer import DistributedOptimizer

RANDOM = np.random.RandomState(5)
X = RANDOM.rand(16, 6).astype(np.float32)
Y = RANDOM.rand(16, 2).astype(np.float32)
IDS = RANDOM.randint(0, 9, (16, 3))


def mine(batch):
    share = len(batch) // lifecycle.size()
    return batch[lifecycle.rank() * share : (lifecycle.rank() + 1) * share]


def dense_model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([
        keras.Input((6,)),
        *(keras.layers.Dense(6, "tanh", name=f"d{i}") for i in range(3)),
        keras.layers.Dense(2, name="out"),
    ])  # fmt: skip


def embedding_model():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(2)]
    return keras.Sequential(layers)


def weights(model):
    return [weight.tolist() for weight in model.get_weights()]


def in_order():
    """Two batches of eight rows; rank r of two has four rows of each."""
    return np.concatenate([mine(X[:8]), mine(X[8:])]), np.concatenate([mine(Y[:8]), mine(Y[8:])])


def fit_dense(optimizer, distributed, steps_per_execution=1):
    model = dense_model()
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    x, y = in_order() if distributed else (X, Y)
    model.fit(x, y, batch_size=len(x) // 2, epochs=2, shuffle=False, verbose=0)
    return weights(model)


def loop(build, optimizer, x, y, compiled, steps=3):
    model = build()

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    run = tf.function(step) if compiled else step
    for _ in range(steps):
        run(tf.constant(x), tf.constant(y))
    return weights(model)


def scaled(optimizer):
    """A step in which rank 1 alone has an infinity, then a good one: all ranks skip the first."""
    model = dense_model()
    variables = model.trainable_variables
    for number in range(2):
        grads = [tf.ones_like(v) * (np.inf if number == 0 and lifecycle.rank() == 1 else 2.0**15) for v in variables]
        tf.function(lambda grads: optimizer.apply(grads, variables))(grads)
    return {"weights": weights(model), "iterations": int(optimizer.iterations.numpy())}


def main(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hccl_fusion").addHandler(handler)
    logging.getLogger("hccl_fusion").setLevel(logging.INFO)
    lifecycle.init()
    sgd = lambda **more: keras.optimizers.SGD(0.1, momentum=0.9, **more)  # noqa: E731
    adam = lambda **more: keras.optimizers.Adam(0.01, **more)  # noqa: E731
    wide = DistributedOptimizer
    result = {"rank": lifecycle.rank(), "pairs": {}}
    pairs = result["pairs"]
    set_split_strategy_by_idx([2, 7])
    pairs["fit"] = [fit_dense(sgd(), False), fit_dense(wide(sgd()), True)]
    result["lines"] = list(lines)
    pairs["fit, two steps at once"] = [fit_dense(adam(), False), fit_dense(wide(adam()), True, 2)]
    pairs["fit, accumulated"] = [
        fit_dense(adam(gradient_accumulation_steps=2), False),
        fit_dense(wide(adam(gradient_accumulation_steps=2)), True),
    ]
    pairs["loop"] = [loop(dense_model, adam(), X, Y, True), loop(dense_model, wide(adam()), mine(X), mine(Y), True)]
    pairs["eager"] = [loop(dense_model, sgd(), X, Y, False), loop(dense_model, wide(sgd()), mine(X), mine(Y), False)]
    reset_split_strategy()
    for policy in ("allgather", "densify"):
        pairs[f"embedding, {policy}"] = [
            loop(embedding_model, sgd(), IDS, Y, True),
            loop(embedding_model, wide(sgd(), sparse=policy), mine(IDS), mine(Y), True),
        ]
    scaling = keras.optimizers.LossScaleOptimizer
    result["scaled"] = [scaled(wide(scaling(adam()))), scaled(scaling(wide(adam())))]
    Path(folder, f"rank_{lifecycle.rank()}.json").write_text(json.dumps(result))
    lifecycle.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
