"""The digits in bfloat16, with float32 master weights.

    allfold run --nodes 2 --nproc-per-node 2 examples/train_mixed_precision.py
    allfold run --nodes 2 --nproc-per-node 2 examples/train_mixed_precision.py --wire int8

The network computes in bfloat16, half the memory and on much hardware twice the speed. Its
gradients are averaged as they are: Allfold reduces half types in float32 and rounds the sum once,
so no small gradient is lost among many ranks. The optimizer's weights stay in float32, because a
step is often smaller than the distance between two bfloat16 numbers: with --no-master it would be
lost. ``--wire`` shortens what travels between nodes, with error feedback: what rounding costs one
step is added to the next.
"""

from __future__ import annotations

import argparse
import sys
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from train_digits import BATCH, MIN_ACCURACY, is_identical_on_all_ranks, load_data

import allfold

EPOCHS = 10
LEARNING_RATE = 0.2


def main() -> None:
    """Train, and say how it went; status 1 if it did not."""
    options = arguments()
    allfold.init()
    torch.set_num_threads(1)  # more would only wait for each other: the network is too small
    torch.manual_seed(0)
    images, test_images, labels, test_labels = load_data()
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    master = train(network, images, labels, options)
    identical = is_identical_on_all_ranks(parameters_to_vector(master.parameters()).detach())
    accuracy = (master(test_images).argmax(1) == test_labels).float().mean().item()
    failures = [] if identical else ["the ranks hold different weights"]
    if accuracy < MIN_ACCURACY:
        failures.append(f"accuracy {accuracy:.4f} is below {MIN_ACCURACY}")
    if allfold.rank() == 0 and not failures:
        print(f"mixed precision: ok accuracy={accuracy:.4f} wire={options.wire}")
    allfold.shutdown()
    sys.exit("; ".join(failures) or 0)


def train(
    network: nn.Module, images: Tensor, labels: Tensor, options: argparse.Namespace
) -> nn.Module:
    """Train a bfloat16 copy of a network; returns the master weights, in a network of float32."""
    rank, world_size = allfold.rank(), allfold.world_size()
    master = network if options.master else network.bfloat16()
    working = deepcopy(network).bfloat16()
    optimizer = torch.optim.SGD(master.parameters(), LEARNING_RATE, momentum=0.9)
    for epoch in range(EPOCHS):
        # The generator has the same seed on every rank, and so the batches are the same.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            share = batch[rank::world_size]
            output = working(images[share].bfloat16()).float()
            loss = cross_entropy(output, labels[share], reduction="sum")
            working.zero_grad()
            (loss * world_size / len(batch)).backward()
            average(list(working.parameters()), options.wire)
            for weight, copy in zip(master.parameters(), working.parameters(), strict=True):
                assert copy.grad is not None
                weight.grad = copy.grad.to(weight.dtype)
            optimizer.step()
            with torch.no_grad():
                vector = parameters_to_vector(master.parameters()).bfloat16()
                vector_to_parameters(vector, working.parameters())
    return master.float()


def average(parameters: list[nn.Parameter], wire: str) -> None:
    """The mean of every gradient over the ranks, all of them in one op."""
    gradients = [parameter.grad for parameter in parameters]
    feedback = None if wire == "native" else "gradients"
    allfold.all_reduce(gradients, "mean", wire=wire, feedback=feedback)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wire", default="native", help="bfloat16, float16, int8, int4, ...")
    parser.add_argument(
        "--no-master", dest="master", action="store_false", help="keep the weights in bfloat16"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
