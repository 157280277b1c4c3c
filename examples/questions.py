"""Questions about stories, answered by an end-to-end memory network with three hops.

The stories are those of the first three bAbI tasks (Weston et al., arXiv 1502.05698), made by a
grammar of a small world, as in the paper: people go from room to room, take things and leave them.
Where is Mary? Her last move tells. Where is the milk? That takes two facts: who had it last, and
where that person went. Where was the milk before the kitchen? Three: who carried it, and two moves
with it. The stories are shorter than the paper's.

One network (Sukhbaatar et al., arXiv 1503.08895) learns all three tasks and is asked about new
stories. As in the paper, its softmax is left out at first, and empty sentences are inserted at
random, so that it does not learn single time vectors by heart.
"""

import random
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from command import command

import graphgen as gg
from graphgen.models.memory_network import MemoryNetwork, inputs

PERSONS = "mary john daniel sandra".split()
ROOMS = "bathroom bedroom garden hallway kitchen office".split()
THINGS = "apple football milk".split()
GO = ["moved to", "went to", "went back to", "journeyed to", "travelled to"]
TAKE = ["got", "grabbed", "picked up", "took"]
LEAVE = ["discarded", "dropped", "left", "put down"]
ASK = ["where is the", "where was the before there"]
WORDS = ["", *sorted({*" ".join(PERSONS + ROOMS + THINGS + GO + TAKE + LEAVE + ASK).split()})]
IDS = {word: number for number, word in enumerate(WORDS)}
SENTENCES = {1: (2, 10), 2: (4, 20), 3: (6, 30)}
"""The fewest and most sentences of a story, by the number of facts that an answer takes."""
LENGTH = 40  # sentences of a story, with empty ones
STEPS, RATE = 12_000, 3e-3


class World:
    """Who is where, who has what, the rooms that each thing has been in, and what was told."""

    def __init__(self, rng: random.Random):
        self.rng, self.told = rng, list[str]()
        self.room, self.owner = dict[str, str](), dict[str, str]()
        self.been: dict[str, list[str]] = {thing: [] for thing in THINGS}

    def go(self) -> None:
        """Someone goes to another room, with what they have."""
        person = self.rng.choice(PERSONS)
        room = self.rng.choice([room for room in ROOMS if room != self.room.get(person)])
        self.room[person] = room
        for thing, owner in self.owner.items():
            if owner == person:
                self.been[thing].append(room)
        self.told.append(f"{person} {self.rng.choice(GO)} the {room}")

    def handle(self) -> None:
        """Someone leaves a thing, or takes one that is there; no thing has a room at first."""
        person, thing = self.rng.choice(PERSONS), self.rng.choice(THINGS)
        here, been = self.room.get(person), self.been[thing]
        if self.owner.get(thing) == person:
            del self.owner[thing]
            self.told.append(f"{person} {self.rng.choice(LEAVE)} the {thing} there")
        elif here is not None and thing not in self.owner and been[-1:] in ([], [here]):
            self.owner[thing] = person
            self.been[thing] = been or [here]
            self.told.append(f"{person} {self.rng.choice(TAKE)} the {thing} there")


def story(rng: random.Random, facts: int) -> tuple[list[str], str, str]:
    """The sentences of a story, a question whose answer takes so many facts, and the answer."""
    while True:
        world, length = World(rng), rng.randint(*SENTENCES[facts])
        while len(world.told) < length:
            world.go() if facts == 1 or rng.random() < 0.4 else world.handle()
        if facts == 1:
            person = rng.choice([*world.room])
            return world.told, f"where is {person}", world.room[person]
        if things := [thing for thing in THINGS if len(world.been[thing]) >= facts - 1]:
            thing = rng.choice(things)
            been = world.been[thing]
            if facts == 2:
                return world.told, f"where is the {thing}", been[-1]
            # Of a room that it was in several times, the last is meant.
            at = len(been) - 1 - been[::-1].index(rng.choice(been[1:]))
            return world.told, f"where was the {thing} before the {been[at]}", been[at - 1]


def arrays(rng: random.Random, facts: int, count: int) -> dict[str, Any]:
    """Stories, their last sentence first, (count, 40, 6), questions, (count, 7), and answers."""
    found = {
        "story_ids": np.zeros((count, LENGTH, 6), np.int64),
        "question_ids": np.zeros((count, 7), np.int64),
        "labels": np.zeros(count, np.int64),
    }
    for row in range(count):
        told, question, answer = story(rng, facts)
        places = [(found["story_ids"][row, i], text) for i, text in enumerate(told[::-1])]
        for place, text in [*places, (found["question_ids"][row], question)]:
            ids = [IDS[word] for word in text.split()]
            place[: len(ids)] = ids
        found["labels"][row] = IDS[answer]
    return found


def batches(data: dict[int, Any], seed: tuple[int, ...], size: int) -> Iterator[dict[str, Any]]:
    """Batches for ever, of each task in turn, with empty sentences between a tenth of all."""
    rng = np.random.default_rng(seed)
    while True:
        for facts, known in data.items():
            chosen = rng.integers(len(known["labels"]), size=size)
            batch = {name: array[chosen] for name, array in known.items()}
            length = SENTENCES[facts][1]
            empty = np.cumsum(rng.random((size, length)) < 0.1, axis=1)
            places = np.minimum(np.arange(length) + empty, LENGTH - 1)
            stories = np.zeros_like(batch["story_ids"])
            stories[np.arange(size)[:, None], places] = batch["story_ids"][:, :length]
            yield {**batch, "story_ids": stories[:, : length * LENGTH // 30]}


def train(
    sizes: dict[str, Any], folder: Path, data: Any, options: Namespace, weights: Any, size: int
) -> dict[str, Any]:
    """Half of the steps, with the softmax or without; returns the weights."""
    model, steps = MemoryNetwork(len(WORDS), **sizes), options.steps // 2 + 1
    gg.artifacts(
        gg.build(model, training=True, seed=options.seed, weights=weights, **inputs()),
        folder,
        optimizer=gg.AdamW(weight_decay=0.0, clip_norm=1.0),
    )
    schedule = gg.schedule.cosine(RATE, warmup=steps // 20, steps=steps)
    trainer = gg.Trainer(folder, schedule=schedule, threads=options.threads)
    seed = (options.seed, int(weights is None))
    trainer.fit(lambda: batches(data, seed, size), steps=steps)
    return trainer.parameters


def run(options: Namespace) -> tuple[float, str]:
    """Train without the softmax, then with it; export, fuse, and ask about new stories."""
    features, known, asked, size = (8, 20, 20, 8) if options.quick else (32, 10_000, 1000, 32)
    rng = random.Random(options.seed)
    data = {facts: arrays(rng, facts, known) for facts in SENTENCES}
    sizes: dict[str, Any] = {"features": features, "hops": 3, "length": LENGTH}
    folder, weights = options.output, None
    for name, linear in (("linear", True), ("softmax", False)):
        weights = train({**sizes, "linear": linear}, folder / name, data, options, weights, size)
    best = gg.optimize(gg.build(MemoryNetwork(len(WORDS), **sizes), weights=weights, **inputs()))
    session = gg.Session(gg.export(best, folder / "questions.onnx"), threads=options.threads)
    shares = []
    for facts in SENTENCES:
        test = arrays(rng, facts, asked)
        labels = test.pop("labels")
        found = session(test)[0].argmax(axis=-1)
        shares.append(float(np.mean(found == labels)))
        show(test, found, labels)
    told = ", ".join(f"{share:.1%} with {n}" for n, share in enumerate(shares, 1))
    return shares[0], f"of {asked:,} answers each are right {told} facts"


def show(test: dict[str, Any], found: Any, labels: Any) -> None:
    """The end of the first story, with its question and answer."""
    for sentence in [*test["story_ids"][0, :4][::-1], test["question_ids"][0]]:
        print("   ", " ".join(WORDS[i] for i in sentence if i))
    print(f"->  {WORDS[found[0]]} ({WORDS[labels[0]]} is right)\n")


if __name__ == "__main__":
    command(run, about=str(__doc__).splitlines()[0], steps=STEPS, wanted=0.95)
