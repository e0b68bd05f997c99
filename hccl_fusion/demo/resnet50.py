"""A ResNet-50 v1.5 training graph, written as TensorFlow 1 scripts for the NPU are.

Version 1.5 means that a block that shrinks its input does so in its 3x3 convolution. The gradients go through
`compute_gradients`, then one all-reduce per variable and a division by the number of ranks, then
`apply_gradients`: what an NPU optimizer wrapper leaves in a graph.

    python -m hccl_fusion.demo.resnet50 -o resnet50.pb
"""

from __future__ import annotations

__all__ = ["ResNet50Options", "TrainingGraph", "build_training_graph", "main", "write_training_graph"]

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graph_passes.atomic import replace_file
from graph_passes.errors import GraphFileError, HcclFusionError
from graph_passes.messages import GraphDef
from hccl_fusion.runtime.hcom_ops import all_reduce, export_graph_def
from hccl_fusion.runtime.quiet_import import load_tensorflow_quietly

# (width of the block's inner convolutions, number of blocks, stride of the first block)
_STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
_EXPANSION = 4
_MOVING_AVERAGE_DECAY = 0.997
_EPSILON = 1e-5


@dataclass(frozen=True)
class ResNet50Options:
    """What may differ between two ResNet-50 training graphs.

    Attributes:
        fc_bias: the last layer has a bias: 161 gradients instead of 160.
        resource_variables: VarHandleOp variables instead of reference variables (VariableV2).
        l2_loss: adds `weight_decay` times the L2 norm of all kernels to the loss.
        weight_decay: factor of the L2 loss.
        image_size: height and width of the images in pixels.
        batch_size: images per rank and step; None leaves it unknown in the graph.
        ranks: number of ranks, by which the summed gradients are divided.
        classes: number of classes; 1001 are ImageNet's 1000 and a background class.
        learning_rate: of the momentum optimizer.
        momentum: of the momentum optimizer.
    """

    fc_bias: bool = True
    resource_variables: bool = False
    l2_loss: bool = False
    weight_decay: float = 1e-4
    image_size: int = 224
    batch_size: int | None = 32
    ranks: int = 8
    classes: int = 1001
    learning_rate: float = 0.1
    momentum: float = 0.9


@dataclass(frozen=True)
class TrainingGraph:
    """A training graph and the names that a caller needs; tensors as `name:0`, ops by their bare names.

    Attributes:
        graph_def: the graph, with HcomAllReduce nodes.
        images: float32 placeholder [batch, height, width, 3].
        labels: int32 placeholder [batch].
        loss: float32 scalar.
        train_op: one training step.
        init_op: initialises all variables.
        reductions: the all-reduce nodes, in the order of compute_gradients.
        variables: the variable that belongs to each of them.
    """

    graph_def: GraphDef
    images: str
    labels: str
    loss: str
    train_op: str
    init_op: str
    reductions: tuple[str, ...]
    variables: tuple[str, ...]


class _Builder:
    """Adds the layers of one network to the default graph."""

    def __init__(self, options: ResNet50Options) -> None:
        import tensorflow as tf

        self.tf = tf.compat.v1
        self.options = options
        self.kernels: list[Any] = []
        self.updates: list[Any] = []

    def variable(self, name: str, shape: Sequence[int], initializer: Any, trainable: bool = True) -> Any:
        return self.tf.get_variable(
            name, shape, self.tf.float32, initializer, trainable=trainable,
            use_resource=self.options.resource_variables,
        )  # fmt: skip

    def kernel(self, shape: Sequence[int]) -> Any:
        kernel = self.variable("kernel", shape, self.tf.initializers.variance_scaling())
        self.kernels.append(kernel)
        return kernel

    def convolution(self, x: Any, width: int, size: int, stride: int = 1) -> Any:
        kernel = self.kernel((size, size, x.shape[-1], width))
        return self.tf.nn.conv2d(x, kernel, strides=[1, stride, stride, 1], padding="SAME", name="Conv2D")

    def normalise(self, x: Any) -> Any:
        """Batch normalisation in training mode, with the updates of its moving averages."""
        tf, width = self.tf, [x.shape[-1]]
        with tf.variable_scope("bn"):
            gamma = self.variable("gamma", width, tf.ones_initializer())
            beta = self.variable("beta", width, tf.zeros_initializer())
            mean = self.variable("moving_mean", width, tf.zeros_initializer(), trainable=False)
            variance = self.variable("moving_variance", width, tf.ones_initializer(), trainable=False)
            y, batch_mean, batch_variance = tf.nn.fused_batch_norm(x, gamma, beta, epsilon=_EPSILON)
            for average, value in ((mean, batch_mean), (variance, batch_variance)):
                step = (average - value) * (1 - _MOVING_AVERAGE_DECAY)
                self.updates.append(tf.assign_sub(average, step, name="AssignMovingAvg"))
        return y

    def layer(self, name: str, x: Any, width: int, size: int, stride: int = 1) -> Any:
        """Convolution and batch normalisation, without activation."""
        with self.tf.variable_scope(name):
            return self.normalise(self.convolution(x, width, size, stride))

    def block(self, x: Any, width: int, stride: int, project: bool) -> Any:
        """Bottleneck block: 1x1, 3x3 (which has the stride), 1x1, and the shortcut around them."""
        relu = self.tf.nn.relu
        shortcut = self.layer("shortcut", x, _EXPANSION * width, 1, stride) if project else x
        y = relu(self.layer("conv1", x, width, 1))
        y = relu(self.layer("conv2", y, width, 3, stride))
        y = self.layer("conv3", y, _EXPANSION * width, 1)
        return relu(y + shortcut)

    def logits(self, images: Any) -> Any:
        tf = self.tf
        x = tf.nn.relu(self.layer("conv1", images, 64, 7, 2))
        x = tf.nn.max_pool2d(x, ksize=3, strides=2, padding="SAME")
        for number, (width, blocks, stride) in enumerate(_STAGES, start=2):
            for index in range(blocks):
                with tf.variable_scope(f"stage{number}_block{index + 1}"):
                    x = self.block(x, width, stride if index == 0 else 1, project=index == 0)
        x = tf.reduce_mean(x, axis=[1, 2], name="global_pool")
        with tf.variable_scope("fc"):
            logits = tf.matmul(x, self.kernel((x.shape[-1], self.options.classes)))
            if self.options.fc_bias:
                bias = self.variable("bias", (self.options.classes,), tf.zeros_initializer())
                logits = tf.nn.bias_add(logits, bias)
        return logits

    def loss(self, logits: Any, labels: Any) -> Any:
        tf = self.tf
        entropy = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        loss = tf.reduce_mean(entropy, name="cross_entropy")
        if self.options.l2_loss:
            norms = tf.add_n([tf.nn.l2_loss(kernel) for kernel in self.kernels])
            loss = tf.add(loss, self.options.weight_decay * norms)
        return tf.identity(loss, name="loss")


def _reduce_gradients(gradients: Sequence[tuple[Any, Any]], ranks: int) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """All-reduce and division of every gradient; returns the all-reduces and the new pairs."""
    import tensorflow as tf

    reductions, averaged = [], []
    with tf.compat.v1.name_scope("DistributedMomentumOptimizer_Allreduce"):
        for gradient, variable in gradients:
            reduced = all_reduce(gradient)
            reductions.append(reduced)
            divisor = tf.constant(ranks, reduced.dtype)
            averaged.append((tf.realdiv(reduced, divisor, name="div"), variable))
    return reductions, averaged


def build_training_graph(options: ResNet50Options | None = None) -> TrainingGraph:
    """Builds the training graph of one rank. Takes some seconds; touches no default graph."""
    import tensorflow as tf

    options = options or ResNet50Options()
    v1, size = tf.compat.v1, options.image_size
    with tf.Graph().as_default() as graph:
        v1.set_random_seed(1)
        images = v1.placeholder(v1.float32, (options.batch_size, size, size, 3), "images")
        labels = v1.placeholder(v1.int32, (options.batch_size,), "labels")
        builder = _Builder(options)
        with v1.variable_scope("resnet50"):
            logits = builder.logits(images)
        loss = builder.loss(logits, labels)
        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.MomentumOptimizer(options.learning_rate, options.momentum)
        gradients = optimizer.compute_gradients(loss)
        reductions, averaged = _reduce_gradients(gradients, options.ranks)
        with v1.control_dependencies(builder.updates):
            train_op = optimizer.apply_gradients(averaged, global_step=step, name="train")
        v1.summary.scalar("summaries/loss", loss)
        v1.train.Saver()
        init_op = v1.global_variables_initializer()
        return TrainingGraph(
            graph_def=export_graph_def(graph),
            images=images.name,
            labels=labels.name,
            loss=loss.name,
            train_op=train_op.name,
            init_op=init_op.name,
            reductions=tuple(tensor.op.name for tensor in reductions),
            variables=tuple(variable.op.name for _, variable in gradients),
        )


def write_training_graph(path: str, options: ResNet50Options | None = None) -> TrainingGraph:
    """Builds the training graph and writes it to `path` as a binary GraphDef, whole or not at all.

    Raises:
        GraphFileError: the file cannot be written.
    """
    training = build_training_graph(options)
    try:
        replace_file(path, training.graph_def.SerializeToString(deterministic=True))
    except OSError as error:
        raise GraphFileError(
            "the graph cannot be written", where=path, found=error.strerror, remedy="another path"
        ) from error
    return training


def _parser() -> argparse.ArgumentParser:
    defaults = ResNet50Options()
    parser = argparse.ArgumentParser(
        prog="python -m hccl_fusion.demo.resnet50",
        description="Write a ResNet-50 v1.5 training graph with one HcomAllReduce per gradient.",
    )
    add = parser.add_argument
    add("-o", "--output", metavar="FILE", required=True, help="the binary GraphDef to write")
    add("--no-fc-bias", action="store_true", help="last layer without bias: 160 gradients instead of 161")
    add("--resource-variables", action="store_true", help="VarHandleOp instead of VariableV2")
    add("--l2-loss", action="store_true", help="weight decay on all kernels")
    add("--image-size", type=_positive, default=defaults.image_size, metavar="PIXELS", help="default %(default)s")
    add("--batch-size", type=_positive, metavar="N", help="images per rank; unknown in the graph if not given")
    add("--ranks", type=_positive, default=defaults.ranks, metavar="N", help="divisor of the sums, default %(default)s")
    add("--classes", type=_positive, default=defaults.classes, metavar="N", help="default %(default)s")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the graph as the command line says; the exit code is 0, or 2 where that is impossible."""
    arguments = _parser().parse_args(argv)
    load_tensorflow_quietly()
    options = ResNet50Options(
        fc_bias=not arguments.no_fc_bias,
        resource_variables=arguments.resource_variables,
        l2_loss=arguments.l2_loss,
        image_size=arguments.image_size,
        batch_size=arguments.batch_size,
        ranks=arguments.ranks,
        classes=arguments.classes,
    )
    try:
        training = write_training_graph(arguments.output, options)
    except HcclFusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    count = len(training.graph_def.node)
    print(f"{arguments.output}: {count} nodes, {len(training.reductions)} gradients, each with its own HcomAllReduce")
    return 0


if __name__ == "__main__":
    sys.exit(main())
