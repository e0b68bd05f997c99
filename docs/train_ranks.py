"""Trains one layer on several ranks, each with data of its own: `hccl-fusion run -n 2 docs/train_ranks.py`."""

import hccl_fusion

hccl_fusion.init()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

random = np.random.default_rng(hccl_fusion.rank())
inputs = random.normal(size=(64, 3)).astype("float32")
targets = inputs @ np.array([[1.0], [-2.0], [0.5]], "float32")

tf.keras.utils.set_random_seed(hccl_fusion.rank())  # the ranks start differently; rank 0's weights are sent to all
model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False)])
model.build((None, 3))
hccl_fusion.broadcast_variables(model.trainable_variables)
model.compile(hccl_fusion.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
loss = model.fit(inputs, targets, batch_size=16, epochs=8, shuffle=False, verbose=0).history["loss"][-1]

weights = tf.reshape(model.trainable_variables[0], [-1])
total = hccl_fusion.reduce_tensors([weights], average=True)[0]
is_equal = bool(np.allclose(total, weights, atol=1e-6))
print(f"rank {hccl_fusion.rank()} of {hccl_fusion.size()}, loss {loss:.4f}, weights equal on all ranks: {is_equal}")
hccl_fusion.shutdown()
