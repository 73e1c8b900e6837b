"""Data-parallel training of a small network on handwritten digits.

    allfold run --nodes 2 --nproc-per-node 2 examples/train_digits.py
    allfold run --nproc-per-node 2 examples/train_digits.py --device cuda    # on NVIDIA GPUs

Every rank computes the gradient of its share of each batch; Allfold averages them. In the end the
program proves what data-parallel training promises: all ranks hold the same weights, bit for bit,
and these are the weights that one process would have found alone. It needs torch and scikit-learn
(whose copy of the images is used: nothing is downloaded) and runs with any number of ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import allfold

EPOCHS = 10
BATCH = 64
LEARNING_RATE = 0.2
MIN_ACCURACY = 0.95

# How far a weight may be from a single process's. Both runs add up the same float32 gradients, but
# the ranks add up their shares first, so every sum is rounded in other places. That is a relative
# error of about 1e-7 per step, and the 230 steps carry it to 8e-7 (measured, up to 8 ranks; the
# weights are about 0.2). A single image that is lost, once, already moves a weight by 3e-4.
TOLERANCE = 3e-5


def main() -> None:
    """Train, check, and say how it went; a failed check ends rank 0 with status 1."""
    options = arguments()
    allfold.init()
    device = device_of_rank(options.device, allfold.rank())
    torch.set_num_threads(1)  # more would only wait for each other: the network is too small
    train_images, test_images, train_labels, test_labels = (each.to(device) for each in load_data())
    torch.manual_seed(allfold.rank())  # every rank starts elsewhere ...
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    weights = parameters_to_vector(model.parameters()).detach()
    allfold.broadcast(weights, root=0)  # ... and takes over where rank 0 is
    vector_to_parameters(weights, model.parameters())
    alone = deepcopy(model)

    train(model, train_images, train_labels, distributed=True)

    weights = parameters_to_vector(model.parameters()).detach()
    identical = is_identical_on_all_ranks(weights)
    if allfold.rank() == 0:
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        train(alone, train_images, train_labels, distributed=False)
        drift = (weights - parameters_to_vector(alone.parameters())).abs().max().item()
        report(accuracy, identical, drift)
    allfold.shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    return parser.parse_args()


def device_of_rank(kind: str, rank: int) -> torch.device:
    """Return a rank's device. The ranks of a machine take its GPUs in turn, and may share them."""
    if kind == "cpu":
        return torch.device(kind)
    if not torch.cuda.is_available():
        sys.exit("--device cuda: torch sees no GPU here")
    local_rank = int(os.environ.get("LOCAL_RANK", rank))  # not every launcher says it
    device = torch.device(kind, local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 images of 8 x 8 pixels in training and test images and labels, alike on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    a, b, c, d = map(torch.from_numpy, parts)
    return a.float(), b.float(), c, d


def train(model: nn.Module, images: Tensor, labels: Tensor, *, distributed: bool) -> None:
    """Train on this rank's share of every batch, or, not distributed, on all of it."""
    rank, world_size = (allfold.rank(), allfold.world_size()) if distributed else (0, 1)
    gradients = flat_gradients(model, images.device, in_arena=distributed)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    for epoch in epochs(show=distributed and rank == 0):
        # The generator has the same seed on every rank, and so the batches are the same.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            share = batch[rank::world_size]
            gradients.zero_()
            loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
            # The last shares may be shorter. Scaled like this, the mean over the ranks is the
            # mean over the images of the batch all the same.
            (loss * world_size / len(batch)).backward()
            if distributed:
                allfold.all_reduce(gradients, "mean")
            optimizer.step()


def flat_gradients(model: nn.Module, device: torch.device, *, in_arena: bool) -> Tensor:
    """One tensor of which the gradient of every parameter is a view.

    One collective moves them all, and in the arena, the memory that a rank shares with its node
    agent, nothing is copied on the way. Clear it with ``zero_()``: ``optimizer.zero_grad()`` would
    drop the views.
    """
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    empty = allfold.empty if in_arena else torch.empty
    flat: Tensor = empty(sum(sizes), dtype=torch.float32, device=device)
    for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    return flat


def epochs(*, show: bool) -> Iterator[int]:
    """Count the epochs, with a bar on a terminal (if rich is installed) or a few plain lines."""
    numbers = range(1, EPOCHS + 1)
    if show and sys.stdout.isatty() and find_spec("rich"):
        from rich.progress import track

        yield from track(numbers, "training")
        return
    for number in numbers:
        yield number
        if show and number % 2 == 0:
            print(f"epoch {number} of {EPOCHS}", flush=True)


def is_identical_on_all_ranks(weights: Tensor) -> bool:
    """Tell if all ranks have the same bits. As integers, for -0.0 equals 0.0 and no NaN itself."""
    bits = weights.view(torch.int32)
    lowest, highest = (allfold.all_reduce(bits.clone(), op) for op in ("min", "max"))
    return torch.equal(lowest, highest)


def report(accuracy: float, identical: bool, drift: float) -> None:
    """Print the outcome; raises SystemExit if a check failed."""
    print(f"largest difference from a single process: {drift:.1e} (allowed: {TOLERANCE:.0e})")
    failures = []
    if accuracy < MIN_ACCURACY:
        failures.append(f"accuracy {accuracy:.4f} is below {MIN_ACCURACY}")
    if not identical:
        failures.append("the ranks hold different weights")
    if not drift <= TOLERANCE:
        failures.append(f"the weights differ from a single process's by {drift:.1e}")
    if failures:
        print(f"demo: FAILED {'; '.join(failures)}", flush=True)
        sys.exit(1)
    print(f"demo: ok accuracy={accuracy:.4f} ranks_identical=yes", flush=True)


if __name__ == "__main__":
    main()
