"""The digits once more, with torchft: replicas may die and be started again at any time.

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 --bind 127.0.0.1:29510
    export TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510
    python examples/train_torchft.py --replica 0      # in shells of their own, where an agent runs
    python examples/train_torchft.py --replica 1
    python examples/train_torchft.py --replica 2

Kill one: the others go on with its share of the batch. Start it again: it takes over their weights
and has its share back. Each step is of one whole batch, however many replicas there are, so the
training ends as if nothing had happened. ``--backend gloo`` runs the same on Gloo.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.nn.functional import cross_entropy
from torchft import Manager, Optimizer, ProcessGroupGloo
from train_digits import BATCH, LEARNING_RATE, MIN_ACCURACY, load_data

from allfold.torchft import DistributedDataParallel, ProcessGroupAllfold

STEPS = 230
GROUPS = {"allfold": ProcessGroupAllfold, "gloo": ProcessGroupGloo}


def main() -> None:
    """Train until so many steps are committed, then say how it went."""
    options = arguments()
    torch.set_num_threads(1)  # more would only wait for each other: the network is too small
    torch.manual_seed(options.replica)  # every replica starts elsewhere; torchft evens that out
    images, test_images, labels, test_labels = load_data()
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    momentum = torch.optim.SGD(network.parameters(), LEARNING_RATE, momentum=0.9)

    store = TCPStore(options.host, 0, is_master=True, wait_for_workers=False)
    manager = manager_of(options, store, {"network": network, "optimizer": momentum})
    model, optimizer = DistributedDataParallel(manager, network), Optimizer(manager, momentum)
    train(manager, model, optimizer, images, labels, options)
    manager.shutdown()

    with torch.no_grad():
        accuracy = (network(test_images).argmax(1) == test_labels).float().mean().item()
        weights = nn.utils.parameters_to_vector(network.parameters()).double().sum().item()
    print(f"ok accuracy={accuracy:.4f} weights={weights:.12f}", flush=True)
    if options.steps >= STEPS and accuracy < MIN_ACCURACY:
        sys.exit(f"accuracy {accuracy:.4f} is below {MIN_ACCURACY}")


def manager_of(options: argparse.Namespace, store: TCPStore, state: dict[str, Any]) -> Manager:
    """Return the manager of a replica that has one process."""

    def load(found: dict[str, Any]) -> None:
        for name, each in state.items():
            each.load_state_dict(found[name])

    return Manager(
        pg=GROUPS[options.backend](timeout=timedelta(seconds=options.timeout)),
        state_dict=lambda: {name: each.state_dict() for name, each in state.items()},
        load_state_dict=load,
        min_replica_size=1,
        timeout=timedelta(seconds=options.timeout),
        replica_id=f"replica{options.replica}",
        rank=0,
        world_size=1,
        store_addr=options.host,
        store_port=store.port,
        hostname=options.host,
    )


def train(
    manager: Manager,
    model: nn.Module,
    optimizer: Optimizer,
    images: Tensor,
    labels: Tensor,
    options: argparse.Namespace,
) -> None:
    """Do steps, and those again that were not committed."""
    while manager.current_step() < options.steps:
        began = time.monotonic()
        optimizer.zero_grad()  # asks for the next quorum
        # One that is still to take over the weights of the others has no share yet.
        rank, replicas = manager.participating_rank() or 0, manager.num_participants()
        step = manager.current_step()
        batch = batch_of(step, len(images))
        share = batch[rank::replicas]
        loss = cross_entropy(model(images[share]), labels[share], reduction="sum")
        # torchft divides by the number of replicas: this becomes the mean over the batch.
        (loss * replicas / len(batch)).backward()
        optimizer.step()  # if all went well
        outcome = "committed" if manager.current_step() > step else "to be done again"
        print(f"step {step} of {replicas} replicas: {outcome}", flush=True)
        time.sleep(max(0.0, began + options.step_seconds - time.monotonic()))


def batch_of(step: int, length: int) -> Tensor:
    """Return the batch of a step: the same on every replica."""
    steps_per_epoch = length // BATCH
    epoch, number = divmod(step, steps_per_epoch)
    order = torch.randperm(length, generator=torch.Generator().manual_seed(epoch))
    return order[number * BATCH : (number + 1) * BATCH]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--replica", type=int, required=True, help="its number: any, each once")
    parser.add_argument("--backend", choices=GROUPS, default="allfold")
    parser.add_argument("--host", default="127.0.0.1", help="of this process, for the others")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--timeout", type=float, default=20.0, help="of an op, in seconds")
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="each takes that long: as a larger model"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
