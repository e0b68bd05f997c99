"""Write a ResNet-50 v1.5 training graph with one HcomAllReduce per gradient, then look at how HCCL would fuse it.

python examples/resnet50.py resnet50.pb
hccl-fusion plan resnet50.pb
hccl-fusion fuse resnet50.pb -o fused.pb --idx 86,160
"""

import sys

from hccl_fusion.demo.resnet50 import ResNet50Options, write_training_graph

path = sys.argv[1] if len(sys.argv) > 1 else "resnet50.pb"
training = write_training_graph(path, ResNet50Options(batch_size=None, l2_loss=True))
print(f"{path}: {len(training.reductions)} gradients, from {training.variables[0]} to {training.variables[-1]}")
