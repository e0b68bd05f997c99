"""Distributed Keras optimizers: on two real ranks, and what stays of an optimizer in one process."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from test_agreement import run_ranks
from test_reduce import world_of_one  # noqa: F401  # a fixture

from hccl_fusion.errors import UsageError
from hccl_fusion.runtime.keras_optimizer import is_distributed
from hccl_fusion.runtime.optimizer import DistributedOptimizer
from hccl_fusion.runtime.reduce import GradientReducer

WAYS = (
    "fit",
    "fit, two steps at once",
    "fit, accumulated",
    "loop",
    "eager",
    "embedding, allgather",
    "embedding, densify",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("keras"), "wrap_keras.py")


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_like_one_process_with_the_whole_batch(trained, way):
    (alone, here), (_, there) = (found["pairs"][way] for found in trained)
    assert here == there
    assert max(float(np.max(np.abs(np.subtract(a, b)))) for a, b in zip(here, alone)) < 1e-6


def test_the_registered_segments_run(trained):
    lines = {"gradient segment result: segment num: 2, segment index list: [0,2] [3,7]  "}
    assert set(trained[0]["lines"]) == lines


def test_all_ranks_skip_a_step_that_one_has_spoilt(trained):
    outside, inside = trained[0]["scaled"]
    assert trained[1]["scaled"] == [outside, inside]
    assert outside["iterations"] == 1
    assert inside == outside


OPTIMIZERS = [
    keras.optimizers.SGD(0.1, momentum=0.9),
    keras.optimizers.Adam(0.01, clipnorm=1.0, use_ema=True),
    keras.optimizers.AdamW(0.01),
    keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
    keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
]


@pytest.mark.parametrize("plain", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_configuration_and_class_stay(plain):
    kind, config = type(plain), plain.get_config()
    wrapped = DistributedOptimizer(kind.from_config(plain.get_config()))
    assert is_distributed(wrapped)
    assert isinstance(wrapped, kind)
    assert type(wrapped).__name__ == kind.__name__
    assert wrapped.get_config() == config
    loaded = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(loaded) is kind
    assert not is_distributed(loaded)
    assert not is_distributed(type(wrapped).from_config(wrapped.get_config()))


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with numpy 2
@pytest.mark.usefixtures("world_of_one")
def test_a_model_with_one_is_saved_and_loaded(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(DistributedOptimizer(keras.optimizers.Adam(0.01)), "mse")
    model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert int(loaded.optimizer.iterations.numpy()) == 1
    again = DistributedOptimizer(loaded.optimizer)
    assert again is loaded.optimizer
    loaded.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)
    assert int(again.iterations.numpy()) == 2


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("automatic", [False, True])
def test_loss_scaling_around_it_reduces_once_and_first(monkeypatch, automatic):
    seen = []
    plain = GradientReducer.reduce
    monkeypatch.setattr(
        GradientReducer, "reduce", lambda self, grads, **more: seen.append(0) or plain(self, grads, **more)
    )
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1))
    if automatic:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.dtype_policy = keras.DTypePolicy("mixed_float16")
        model.compile(optimizer, "mse")
        scaling = model.optimizer
    else:
        scaling = keras.optimizers.LossScaleOptimizer(optimizer)
    assert isinstance(scaling, keras.optimizers.LossScaleOptimizer)
    variable = keras.Variable([1.0])
    scaling.apply([np.array([2.0**15], np.float32)], [variable])
    assert len(seen) == 1
    assert float(variable.numpy()[0]) == pytest.approx(0.9)
    optimizer.apply([np.array([1.0], np.float32)])
    assert len(seen) == 2


def test_distributing_twice_is_an_error():
    wrapped = DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(UsageError, match="distributed already"):
        DistributedOptimizer(wrapped)
    with pytest.raises(UsageError, match="inner optimizer is distributed already"):
        DistributedOptimizer(keras.optimizers.LossScaleOptimizer(wrapped))
