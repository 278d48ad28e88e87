#!/usr/bin/env python
"""MPFsspecWriter on a real model: train, save, load, compare, and time it beside torch's own.

Ends with status 0 when everything that was loaded is bit for bit what was saved, 1 when
something differs, 2 when the weights are missing.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import demo_model
import torch.distributed.checkpoint as dcp

from mpwriter import FsspecReader, MPFsspecWriter
from mpwriter._compat import StockFsspecReader
from mpwriter.bench.options import Options, parse_options
from mpwriter.bench.places import Place, open_place
from mpwriter.bench.progress import ProgressBar
from mpwriter.bench.states import measure_state
from mpwriter.bench.subjects import choose_subjects
from mpwriter.bench.sync_mode import StateFigures, time_state
from mpwriter.bench.sync_report import LEGEND, findings, timing_table
from mpwriter.bench.table import format_bytes, format_seconds
from mpwriter.bench.verify import differences, load_into

NUM_STEPS = 5
SCALE = 5.0  # of the scores; at the usual 20 this model has nothing left to learn here
PAIRS = [
    ("A man is eating food.", "A man eats a piece of bread."),
    ("The stock market fell sharply today.", "Shares dropped at the exchange."),
    ("A checkpoint is written while training goes on.", "Training continues during the save."),
    ("The cat sleeps on the warm roof.", "On the hot tiles a cat is napping."),
    ("She plays the violin in an orchestra.", "A violinist performs with an ensemble."),
    ("Heavy rain flooded the valley.", "The valley was under water after the storm."),
    ("The train to the coast leaves at noon.", "At twelve a train departs for the sea."),
    ("Bees pollinate most of our fruit trees.", "Fruit depends on visits from bees."),
]

Trainer = tuple[demo_model.MiniLM, torch.optim.AdamW]


class MismatchError(Exception):
    """Something that was loaded is not what was saved."""


def main() -> int:
    given = _parse()
    logging.basicConfig(format="    %(name)s: %(message)s", stream=sys.stdout)
    logging.getLogger("mpwriter").setLevel(logging.INFO)  # a line a save
    # There is one process here, and DCP says so at every step.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        weights = demo_model.find_weights(given.weights)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    with open_place(given.url, {}) as place:
        try:
            _run(weights, place, given.workers, given.rounds)
        except MismatchError as error:
            print(f"\nFAILED: {error}", file=sys.stderr)
            return 1
    print("\nAll values are bit for bit what was saved.")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="where to save below (the temporary directory)")
    parser.add_argument("--weights", type=Path, help="directory with model.safetensors")
    parser.add_argument("--workers", type=int, default=2, help="worker processes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of the table (%(default)s)")
    return parser.parse_args()


def _run(weights: Path, place: Place, num_workers: int, num_rounds: int) -> None:
    with _step(f"Load the weights of all-MiniLM-L6-v2 from {weights.name}/model.safetensors"):
        trainer = _new_trainer()
        trainer[0].load_state_dict(demo_model.load_weights(weights))
        tokenizer = demo_model.Tokenizer(weights / "vocab.txt")
        batches = tokenizer([left for left, _ in PAIRS]), tokenizer([right for _, right in PAIRS])
    _show_similarity(trainer[0], tokenizer)
    with _step(f"Train {NUM_STEPS} steps with AdamW on {len(PAIRS)} pairs of sentences"):
        losses = [_train_step(trainer, batches) for _ in range(NUM_STEPS)]
        print("    loss " + " ".join(f"{loss:.4f}" for loss in losses))

    state = _state_of(trainer)
    measured = measure_state("MiniLM with AdamW", state)
    size = f"{measured.num_tensors} tensors, {format_bytes(measured.nbytes)}"
    url = place.fresh_url()
    with _step(f"Save model and optimizer ({size}) with {num_workers} worker processes"):
        dcp.save(state, storage_writer=MPFsspecWriter(url, num_workers=num_workers))
    _list_files(place, url)

    readers = {"mpwriter's FsspecReader": FsspecReader, "torch's FsspecReader": StockFsspecReader}
    resumed = []
    for name, reader in readers.items():
        with _step(f"Load into a new model and optimizer with {name}, compare every bit"):
            resumed.append(_resume(state, reader(url)))
    with _step("Train one more step in all three, compare every bit"):
        _compare_next_step([trainer, *resumed], batches)
    place.remove(url)

    print(f"\n==> Side by side, {num_rounds} rounds after a warm-up, everybody in every round\n")
    logging.getLogger("mpwriter").setLevel(logging.WARNING)  # a line a save breaks the bar
    figures = StateFigures(measured.name, measured.num_tensors, measured.nbytes)
    options = _table_options(num_workers, num_rounds)
    subjects = choose_subjects(
        options.families,
        options.workers,
        options.threads,
        local=place.local_path is not None,
    )
    with ProgressBar(len(subjects) * (num_rounds + 1)) as bar:
        figures.timing = time_state(measured, subjects, place, options, bar)
    print(f"{LEGEND}\n{timing_table(figures)}\n")
    print("\n".join(findings([figures])))


def _table_options(num_workers: int, num_rounds: int) -> Options:
    argv = ["--workers", str(num_workers), "--rounds", str(num_rounds), "--threads", "1", "2"]
    return parse_options(argv, ["sync"])


@contextmanager
def _step(text: str) -> Iterator[None]:
    print(f"\n==> {text}", flush=True)
    began = time.perf_counter()
    yield
    print(f"    {format_seconds(time.perf_counter() - began)}", flush=True)


def _new_trainer() -> Trainer:
    model = demo_model.MiniLM()
    model.pooler.requires_grad_(False)  # it plays no part in the loss
    return model, torch.optim.AdamW(model.parameters(), lr=2e-5)


def _train_step(trainer: Trainer, batches: tuple[torch.Tensor, torch.Tensor]) -> float:
    """One step of contrastive learning: each sentence is to find its partner in the batch."""
    model, optimizer = trainer
    scores = model(batches[0]) @ model(batches[1]).T * SCALE
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(len(scores)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def _show_similarity(model: demo_model.MiniLM, tokenizer: demo_model.Tokenizer) -> None:
    """The model must know that two sentences mean the same: the weights are in their places."""
    (left, right), (other, _) = PAIRS[0], PAIRS[1]
    vectors = model(tokenizer([left, right, other]))
    alike, unlike = (vectors[0] @ vectors[1]).item(), (vectors[0] @ vectors[2]).item()
    print(f"    similarity {alike:.2f}: {left!r} {right!r}")
    print(f"    similarity {unlike:.2f}: {left!r} {other!r}")
    if not alike > unlike + 0.3:
        raise MismatchError("the model does not tell like sentences from unlike ones")


def _state_of(trainer: Trainer) -> dict[str, Any]:
    model, optimizer = get_state_dict(*trainer)
    return {"model": model, "optim": optimizer}


def _resume(saved: dict[str, Any], reader: dcp.StorageReader) -> Trainer:
    trainer = _new_trainer()
    state = _state_of(trainer)
    load_into(state, reader)
    set_state_dict(*trainer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    _must_equal(saved, _state_of(trainer), "what was loaded")
    return trainer


def _compare_next_step(trainers: list[Trainer], batches: tuple[torch.Tensor, torch.Tensor]) -> None:
    losses = [_train_step(trainer, batches) for trainer in trainers]
    print("    loss " + " ".join(f"{loss:.4f}" for loss in losses))
    first, *others = (_state_of(trainer) for trainer in trainers)
    for other in others:
        _must_equal(first, other, "the next training step")


def _must_equal(expected: dict[str, Any], found: dict[str, Any], what: str) -> None:
    different = differences(expected, found)
    if different:
        raise MismatchError(f"{what} differs in {len(different)} values: {different[:5]}")


def _list_files(place: Place, url: str) -> None:
    if place.local_path is None:
        return
    for path in sorted(Path(url).iterdir()):
        print(f"    {path.name}  {format_bytes(path.stat().st_size)}")


if __name__ == "__main__":
    sys.exit(main())
