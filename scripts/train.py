#!/usr/bin/env python
"""Train a small transformer with FSDP2 and save it asynchronously: a script to copy from.

    torchrun --nproc-per-node 4 scripts/train.py --checkpoints /shared/run --steps 100
    torchrun ... scripts/train.py --checkpoints s3://bucket/run --tp 2

Start it again, on as many ranks as you like, and it goes on from its newest complete checkpoint. On
the same layout of ranks the loss of every step is the same, to the last bit, as if it had never
been stopped. torchrun starts it again by itself when a rank dies:

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --max-restarts 3 ...

Without that variable the new ranks may find the addresses of the dead ones in torchrun's store and
wait for them (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Runs from a checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from train_model import Transformer, batch_of_step, read_text, shard

from mpwriter import FsspecReader, MPFsspecWriter

logger = logging.getLogger("train")

# Torch before 2.9 has it not: there `async_save` returns when the copy is done.
ASYNC_STAGING = hasattr(state_dict_saver, "AsyncSaveResponse")


class TrainState(Stateful):
    """All that a run needs to go on; data order depends on the step alone."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


class Checkpoints:
    """The checkpoints of a run, `step-00000020` and so on below one URL.

    One writer for the whole run. At most one save is on its way: a new one waits for it.
    """

    def __init__(self, given: argparse.Namespace, group: dist.ProcessGroup) -> None:
        self._url, self._options = given.checkpoints.rstrip("/"), given.storage_options
        self._keep, self._timeout_s = given.keep, given.timeout_s
        # DCP's collectives run in a thread beside the training's, so they need a group of their
        # own: two threads that use one group can meet each other's messages.
        self._group = group
        self._writer = MPFsspecWriter(
            self._url,
            num_workers=given.workers,
            timeout_s=given.timeout_s,
            async_staging=ASYNC_STAGING,
            **self._options,
        )
        self._staged: Any = None
        self._saved: Any = None
        self._saving: int | None = None

    def load_newest(self, state: TrainState) -> None:
        """Go on from the newest complete checkpoint, if there is one."""
        found: list[int | None] = [None]
        if dist.get_rank() == 0:
            complete, _ = self._find()
            found = [max(complete, default=None)]
        # One rank looks: on a shared disk the others may not see yet what it sees.
        dist.broadcast_object_list(found, src=0, group=self._group)
        if found[0] is not None:
            reader = FsspecReader(self._at(found[0]), timeout_s=self._timeout_s, **self._options)
            dcp.load({"train": state}, storage_reader=reader, process_group=self._group)
            logger.info("resumed from step %d", found[0])

    def save(self, state: TrainState) -> None:
        """Begin to save; the copy goes on until `wait_until_staged`, the rest behind it."""
        self.wait_until_saved()
        self._saving = state.step
        response: Any = dcp.async_save(
            {"train": state},
            checkpoint_id=self._at(state.step),
            storage_writer=self._writer,
            process_group=self._group,
        )
        if ASYNC_STAGING:
            self._staged, self._saved = response.staging_completion, response.upload_completion
        else:
            self._saved = response

    def wait_until_staged(self) -> None:
        """Until the values may change: just before `optimizer.step()`."""
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.result()

    def wait_until_saved(self) -> None:
        """Until the last save is complete on all ranks; then remove what is not to be kept.

        Raises:
            CheckpointException: it failed, on whichever rank. The job should end, and go on from
                the checkpoint before; torchrun's `--max-restarts` does that.
        """
        self.wait_until_staged()
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.result()
            self._saving = None
            if dist.get_rank() == 0:
                self._remove_old()

    def close(self) -> None:
        self.wait_until_saved()
        self._writer.close()

    def _remove_old(self) -> None:
        """Keep the newest complete checkpoints and whatever is being written.

        What killed saves have left goes when a later checkpoint is complete.
        """
        try:
            complete, incomplete = self._find()
            old = sorted(complete)[: -self._keep]  # `keep` is 1 or more, so one always stays
            old += [step for step in incomplete if step < max(complete, default=0)]
            for step in old:
                if step != self._saving:
                    self._remove(step)
        except Exception as error:  # no reason to stop training
            logger.warning("old checkpoints could not be removed: %s", error)

    def _remove(self, step: int) -> None:
        fs, path = self._filesystem(self._at(step))
        # `.metadata` first: half removed, it must not look complete.
        if fs.exists(f"{path}/.metadata"):
            fs.rm_file(f"{path}/.metadata")
        fs.rm(path, recursive=True)

    def _find(self) -> tuple[list[int], list[int]]:
        """Steps of complete and of incomplete checkpoints."""
        fs, root = self._filesystem(self._url)
        fs.invalidate_cache()
        try:
            names = [path.rstrip("/").rpartition("/")[2] for path in fs.ls(root, detail=False)]
        except FileNotFoundError:
            names = []
        steps = [int(name[5:]) for name in names if re.fullmatch(r"step-\d{8}", name)]
        # A checkpoint exists when its `.metadata` does: it is written last.
        complete = [
            step for step in steps if fs.exists(f"{self._filesystem(self._at(step))[1]}/.metadata")
        ]
        return complete, [step for step in steps if step not in complete]

    def _at(self, step: int) -> str:
        return f"{self._url}/step-{step:08}"

    def _filesystem(self, url: str) -> tuple[Any, str]:
        fs, path = fsspec.core.url_to_fs(url, **self._options)
        return fs, path


def main() -> None:
    given = parse()
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    # The others would say the same.
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING)
    with_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if with_cuda else torch.device("cpu")
    if with_cuda:
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=given.timeout_s)
    dist.init_process_group("nccl" if with_cuda else "gloo", timeout=timeout)
    # For DCP. Here the ranks wait for the slowest one's writes, which may take `timeout_s` to fail:
    # with the same timeout they would say that they have waited in vain, and not what for.
    group = dist.new_group(backend="gloo", timeout=3 * timeout)
    try:
        train(given, device, group)
    except BaseException:
        # End now, so that torchrun sees it and ends the others, who wait for this rank: the usual
        # way out would first complete the save in flight, and that one needs them all.
        logger.exception("rank %d failed", rank)
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()


def train(given: argparse.Namespace, device: torch.device, group: dist.ProcessGroup) -> None:
    mesh = make_mesh(given, device)
    torch.manual_seed(given.seed)  # the same weights on every rank
    model = Transformer(given.width, given.layers, given.heads, given.length).to(device)
    shard(model, mesh)
    # foreach=False: it cannot take parameters of two meshes at once, and with `--tp` there are.
    optimizer = torch.optim.AdamW(model.parameters(), lr=given.lr, foreach=given.tp == 1)
    state, checkpoints = TrainState(model, optimizer), Checkpoints(given, group)
    checkpoints.load_newest(state)

    text, part = read_text(), part_of_batch(given)
    while state.step < given.steps:
        batch = batch_of_step(text, given.seed, state.step, given.batch, given.length, part)
        loss = model(batch.to(device))
        loss.backward()
        checkpoints.wait_until_staged()
        optimizer.step()
        optimizer.zero_grad()
        state.step += 1
        report(state.step, given.steps, loss.detach())
        if state.step % given.save_every == 0 or state.step == given.steps:
            checkpoints.save(state)
    checkpoints.close()


def make_mesh(given: argparse.Namespace, device: torch.device) -> DeviceMesh:
    """Replicas between the nodes, shards within them, tensor parallelism among neighbours."""
    world = dist.get_world_size()
    num_nodes = world // int(os.environ["LOCAL_WORLD_SIZE"])
    replicas = max(2, num_nodes) if given.hsdp else 1
    if world % (replicas * given.tp):
        raise ValueError(f"{world} ranks do not make {replicas} replicas x --tp {given.tp}")
    sizes = {"replicate": replicas, "shard": world // (replicas * given.tp), "tp": given.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def part_of_batch(given: argparse.Namespace) -> slice:
    """The sequences of this rank; those of one tensor-parallel group have the same."""
    readers = dist.get_world_size() // given.tp
    if given.batch % readers:
        raise ValueError(f"--batch {given.batch} cannot be shared evenly by {readers} ranks")
    size, number = given.batch // readers, dist.get_rank() // given.tp
    return slice(number * size, (number + 1) * size)


def report(step: int, steps: int, loss: torch.Tensor) -> None:
    """The loss of the whole batch, on rank 0; a bar where somebody watches."""
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step} loss {loss.item() / dist.get_world_size()!r}", flush=True)
        if sys.stderr.isatty():
            bar = "#" * (40 * step // steps)
            sys.stderr.write(f"[{bar:40}] {step}/{steps}" + ("\n" if step == steps else "\r"))
            sys.stderr.flush()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--checkpoints", required=True, help="directory or URL that all ranks reach")
    add("--storage-options", type=json.loads, default={}, help="for fsspec, as JSON")
    add("--steps", type=int, default=100)
    add("--save-every", type=int, default=20, help="steps")
    add("--keep", type=int, default=2, help="complete checkpoints to keep, 1 or more")
    add("--tp", type=int, default=1, help="ranks of a tensor-parallel group")
    add("--hsdp", action="store_true", help="a replica per node (two on a single node)")
    add("--workers", type=int, help="of the writer, per rank (its share of the cores)")
    add("--timeout-s", type=float, default=600, help="of collectives, and of writes and reads")
    add("--batch", type=int, default=24, help="sequences of a step, on all ranks together")
    add("--length", type=int, default=128, help="bytes of a sequence")
    add("--width", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=1e-3)
    add("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.keep < 1:
        parser.error("--keep must be 1 or more")
    return given


if __name__ == "__main__":
    main()
