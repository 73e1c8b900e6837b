"""The digits again, with torch's own DistributedDataParallel or FSDP2 on backend ``allfold``.

    allfold run --nodes 2 --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --fsdp
    allfold run --nproc-per-node 2 examples/train_ddp.py --device cuda

Nothing in this program knows of Allfold but one import and one word: ``--backend gloo`` runs the
same on Gloo, and finds the same losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from train_digits import BATCH, LEARNING_RATE, MIN_ACCURACY, device_of_rank, load_data

import allfold.torch

EPOCHS = 8


def main() -> None:
    """Train; rank 0 says how it went, with status 1 if it did not."""
    options = arguments()
    device = device_of_rank(options.device, int(os.environ.get("RANK", "0")))
    dist.init_process_group(options.backend)
    torch.set_num_threads(1)  # more would only wait for each other: the network is too small
    torch.manual_seed(0)
    images, test_images, labels, test_labels = (each.to(device) for each in load_data())
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = shard(network, device) if options.fsdp else DistributedDataParallel(network)
    losses = train(model, images, labels, options.epochs)
    with torch.no_grad():  # every rank calls a sharded model
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    if options.losses and dist.get_rank() == 0:
        options.losses.write_text(json.dumps(losses))
    dist.destroy_process_group()
    if options.epochs >= EPOCHS and accuracy < MIN_ACCURACY:
        sys.exit(f"accuracy {accuracy:.4f} is below {MIN_ACCURACY}")
    if int(os.environ.get("RANK", "0")) == 0:
        name = "fsdp2" if options.fsdp else "ddp"
        print(f"{name} on {options.backend}: ok accuracy={accuracy:.4f} loss={losses[-1]:.6f}")


def shard(network: nn.Sequential, device: torch.device) -> nn.Module:
    """Each parameter lies in equal parts on the ranks, and is gathered when it is used."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in network:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


def train(model: nn.Module, images: Tensor, labels: Tensor, epochs: int) -> list[float]:
    """The mean loss of every step, over the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=0.9)
    losses = []
    for epoch in range(epochs):
        # The generator has the same seed on every rank, and so the batches are the same.
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            share = batch[: len(batch) // world_size * world_size][rank::world_size]
            loss = cross_entropy(model(images[share]), labels[share])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world_size)
    return losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default=allfold.torch.BACKEND, help="or gloo")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--fsdp", action="store_true", help="shard the parameters")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument(
        "--losses", type=Path, help="write the loss of every step to this file, as JSON"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
