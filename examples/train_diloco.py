"""A language model of characters, trained on sites between which a line carries little.

    allfold run --nodes 4 --nproc-per-node 1 examples/train_diloco.py
    allfold run --nodes 4 --nproc-per-node 1 examples/train_diloco.py --mode ddp

With ``--mode diloco`` ranks train by themselves and agree every ``--every`` steps, in the
background; with ``--mode ddp`` they average the gradients of every step, in bfloat16. Both see the
same tokens. Ranks may die and join meanwhile. Rank 0 prints a line of JSON at each evaluation:

    step, ranks    how far it is, and how many train
    seconds        since it began, without evaluations
    loss           of held-out text, per character
    bytes          that this rank's node has sent
    computing      the share of the seconds in which this rank did not wait for others
    hidden         the share of the rounds' time in which it did not

The text is the reference of Python's own help, which every Python has. It needs torch. ``make
demo-wan`` runs it over lines of 50 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import allfold
from allfold.diloco import DiLoCo

CONTEXT, WIDTH, LAYERS, HEADS = 64, 128, 2, 4
BATCH = 8  # sequences of a rank in a step
HELD_OUT = 64
LEARNING_RATE = 3e-3


def main() -> None:
    """Train; rank 0 says how it goes."""
    options = arguments()
    torch.set_num_threads(1)  # there are as many ranks as cores, or more
    torch.manual_seed(options.seed)
    text = Text(options.seed)
    model = Model(text.characters)
    steps = MODES[options.mode](model, options)
    group = allfold.init(
        max_world=options.max_world, on_loss="shrink", traffic="background", state=steps.state
    )
    print(f"rank {group.rank} of {group.world_size} begins at step {steps.state.step}", flush=True)
    train(group, text, model, steps, options)
    allfold.shutdown()


class Text:
    """Characters as numbers, of which the last ones are held out."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        text = "\n".join(topics[name] for name in sorted(topics))
        alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
        numbers = torch.tensor([alphabet[character] for character in text])
        self.characters = len(alphabet)
        held_out = HELD_OUT * (CONTEXT + 1)
        self._trained = numbers[:-held_out]
        self.held_out = numbers[-held_out:].reshape(HELD_OUT, CONTEXT + 1)

    def batch(self, step: int, rank: int) -> Tensor:
        """Return the sequences of a rank in a step, which are the same in both modes."""
        generator = torch.Generator().manual_seed(self._seed * 10**9 + step * 1000 + rank)
        starts = torch.randint(len(self._trained) - CONTEXT, (BATCH, 1), generator=generator)
        return self._trained[starts + torch.arange(CONTEXT + 1)]


class Model(nn.Module):
    """A small transformer."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(characters, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def loss(self, sequences: Tensor) -> Tensor:
        """Return the mean loss of predicting each character from those before it."""
        inputs, targets = sequences[:, :-1], sequences[:, 1:]
        hidden = self.layers(self.tokens(inputs) + self.places, mask=self.mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


class LocalSteps:
    """Each rank trains by itself, with an inner optimizer of its own; rounds bring them together.

    Attributes:
        state: what a rank that joins takes over.
        agreed: a context in which the model is that of all ranks.
        waited: seconds of this rank for others, so far.
    """

    def __init__(self, model: Model, options: argparse.Namespace) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        self.diloco = DiLoCo(
            model,
            every=options.every,
            fragments=options.fragments,
            delay=options.delay,
            wire=options.wire,
        )
        self.state = allfold.State(diloco=self.diloco, step=0)
        self.agreed: Callable[[], AbstractContextManager[None]] = self.diloco.synchronized
        self.waited = 0.0
        self._last = options.steps

    def step(self, group: allfold.Group) -> list[allfold.RoundResult]:
        self.optimizer.step()
        self.state.step += 1
        began = time.monotonic()
        results = self.diloco.step()
        if self.state.step == self._last:
            results += self.diloco.flush()
        if results and not self.diloco.in_flight:
            self.state.commit(group)  # here others may join
        self.waited += time.monotonic() - began
        return results


class CommonSteps:
    """All ranks do the same steps, with the mean of their gradients, as in DDP.

    Attributes:
        state, agreed, waited: as above.
    """

    def __init__(self, model: Model, _: argparse.Namespace) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
        self.state = allfold.State(model=model, optimizer=self.optimizer, step=0)
        self.agreed: Callable[[], AbstractContextManager[None]] = nullcontext
        self.waited = 0.0
        self._parameters = list(model.parameters())

    def step(self, group: allfold.Group) -> list[allfold.RoundResult]:
        gradients = [each.grad for each in self._parameters]
        began = time.monotonic()
        result = group.start_round(gradients, "mean", wire="bfloat16").wait()
        self.waited += time.monotonic() - began
        self.optimizer.step()
        self.state.step += 1
        self.state.commit(group)
        return [result]


Steps = LocalSteps | CommonSteps
MODES: dict[str, Callable[[Model, argparse.Namespace], Steps]]
MODES = {"diloco": LocalSteps, "ddp": CommonSteps}


def train(
    group: allfold.Group,
    text: Text,
    model: Model,
    steps: Steps,
    options: argparse.Namespace,
) -> None:
    """Train to the last step, from wherever the others are; evaluate now and then."""
    figures = Figures(options)
    while steps.state.step < options.steps:
        began = time.monotonic()
        loss = model.loss(text.batch(steps.state.step, group.rank))
        steps.optimizer.zero_grad()
        loss.backward()
        results = steps.step(group)
        figures.count(results, time.monotonic() - began)
        if group.rank == 0 and steps.state.step % options.evaluate == 0:
            with steps.agreed(), torch.no_grad():
                held_out = model.loss(text.held_out).item()
            figures.report(steps.state.step, group.world_size, held_out, steps.waited)


class Figures:
    """The costs of a rank so far: seconds, and bytes that its node has sent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._mode, self._file = options.mode, options.json
        self._sent = 0
        self._seconds = self._rounds = self._hidden = 0.0

    def count(self, results: list[allfold.RoundResult], seconds: float) -> None:
        """Add those of a step."""
        self._seconds += seconds
        for result in results:
            self._sent += result.bytes
            self._rounds += result.seconds
            self._hidden += result.hidden_seconds

    def report(self, step: int, ranks: int, loss: float, waited: float) -> None:
        """Print a line, and write it to the file."""
        line: dict[str, Any] = {
            "mode": self._mode,
            "step": step,
            "ranks": ranks,
            "seconds": round(self._seconds, 3),
            "loss": round(loss, 4),
            "bytes": self._sent,
            "computing": round(1 - waited / self._seconds, 4),
            "hidden": round(self._hidden / self._rounds, 4) if self._rounds else 0.0,
        }
        text = json.dumps(line)
        print(text, flush=True)
        if self._file:
            with self._file.open("a") as file:
                file.write(text + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--mode", choices=MODES, default="diloco")
    add("--steps", type=int, default=240, help="of each rank  [%(default)s]")
    add("--seed", type=int, default=0, help="of the model and the samples  [%(default)s]")
    add("--every", type=int, default=20, help="steps from round to round  [%(default)s]")
    add("--fragments", type=int, default=2, help="which take turns  [%(default)s]")
    add("--delay", type=int, default=5, help="steps until a round is waited for  [%(default)s]")
    add("--wire", default="int4", help="format of the rounds between nodes  [%(default)s]")
    add("--max-world", type=int, default=16, help="let no more ranks join  [%(default)s]")
    add("--evaluate", type=int, default=20, help="steps between two evaluations  [%(default)s]")
    add("--json", type=Path, help="write the lines to this file, too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
