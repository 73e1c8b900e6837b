"""Training on machines that come and go: ranks may die, leave and join while it runs.

    allfold run --nproc-per-node 4 --keep-going examples/train_elastic.py

Kill a rank, start the program once more beside it: the training goes on with those who are there.
The batches stay the same whoever computes them, and a rank that joins takes over the weights, the
optimizer and the position in the data from the others. In the end the program shows that every
image was used once per epoch, by a count that travels with the gradients of each step. It needs
torch and scikit-learn (whose copy of the images is used: nothing is downloaded).
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import allfold

BATCH = 64
LEARNING_RATE = 0.2
MIN_ACCURACY = 0.95


def main() -> None:
    """Train, check, and say how it went; a failed check ends the rank with status 1."""
    options = arguments()
    torch.set_num_threads(1)  # more would only wait for each other: the network is too small
    torch.manual_seed(0)
    train_images, test_images, train_labels, test_labels = load_data()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    state = allfold.State(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9),
        sampler=allfold.ElasticSampler(len(train_images), BATCH),
        counts=np.zeros(len(train_images), np.int64),
    )
    group = allfold.init(
        min_world=options.min_world,
        max_world=options.max_world,
        on_loss="shrink",
        state=state,  # whoever joins a training that runs has that of the others from here on
    )
    train(group, state, train_images, train_labels, options)
    if group.rank == 0:
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
        report(accuracy, state.counts, options.epochs)
    allfold.shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--min-world", type=int, default=1, help="train with no fewer ranks")
    parser.add_argument("--max-world", type=int, default=16, help="let no more ranks join")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds per step, to have time to join and leave"
    )
    return parser.parse_args()


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1797 images of 8 x 8 pixels in training and test images and labels, alike on every rank."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.2, random_state=0, stratify=labels)
    a, b, c, d = map(torch.from_numpy, parts)
    return a.float(), b.float(), c, d


def train(
    group: allfold.Group,
    state: allfold.State,
    images: Tensor,
    labels: Tensor,
    options: argparse.Namespace,
) -> None:
    """Train until all epochs are done, from wherever the state is."""
    gradients = flat_gradients(group, state.model)
    used = group.empty(len(images), np.int64)
    ranks = 0
    while state.sampler.epoch < options.epochs:
        for batch in state.sampler:
            if group.rank == 0 and group.world_size != ranks:
                ranks = group.world_size
                print(f"epoch {batch.epoch + 1} of {options.epochs}, ranks: {ranks}", flush=True)
            time.sleep(options.pause)
            gradients.zero_()
            output = state.model(images[batch.indices])
            loss = cross_entropy(output, labels[batch.indices], reduction="sum")
            (loss / batch.size).backward()
            used[:] = 0
            used[batch.indices] = 1
            try:
                group.all_reduce(gradients)
                group.all_reduce(used)
            except allfold.PeerLost as error:  # below --min-world: the next op waits
                print(error, flush=True)
                continue
            # False if a rank has come or gone in this step: then its batch comes again.
            if state.sampler.commit():
                state.optimizer.step()
                state.counts += used
            state.commit()  # here ranks join, and leave


def flat_gradients(group: allfold.Group, model: nn.Module) -> Tensor:
    """One tensor of which the gradient of every parameter is a view, so one op moves them all."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    flat: Tensor = group.empty(sum(sizes), torch.float32)
    for parameter, gradient in zip(parameters, flat.split(sizes), strict=True):
        parameter.grad = gradient.view_as(parameter)
    return flat


def report(accuracy: float, counts: np.ndarray, epochs: int) -> None:
    """Print the outcome; raises SystemExit if a check failed."""
    failures = []
    if accuracy < MIN_ACCURACY:
        failures.append(f"accuracy {accuracy:.4f} is below {MIN_ACCURACY}")
    if not (counts == epochs).all():
        failures.append(
            f"in {epochs} epochs an image was used {counts.min()} to {counts.max()} times"
        )
    if failures:
        print(f"elastic: FAILED {'; '.join(failures)}", flush=True)
        sys.exit(1)
    print(f"elastic: ok accuracy={accuracy:.4f} each_image_once_per_epoch=yes", flush=True)


if __name__ == "__main__":
    main()
