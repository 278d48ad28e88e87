"""From the bytes of one stored item to the values that a planner waits for.

Runs in: trainer.

    bytes --transforms backwards--> container --decode, CRC--> tensor --narrow, shapes--> copy_
                                              `-- raw (safetensors) --'
                                              `-- torch.load(weights_only=True): other shapes

Nothing is copied into a target before the item's CRCs and both shapes have been compared, but for
what `mpwriter._fetch_place` reads straight into it.
"""

from __future__ import annotations

import io
import math
import sys
import zipfile
from collections.abc import Mapping
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from mpwriter._compat import ExtensionRegistry, StreamTransformExtension, narrow_tensor_by_index
from mpwriter._decode import ContainerError, DecodedTensor, decode
from mpwriter._fetch_landing import Landings
from mpwriter._fetch_place import Place, place_for
from mpwriter._fetch_plan import SAFETENSORS_SUFFIX, StoredItem, chunk_of
from mpwriter.errors import CorruptCheckpointError, ShapeMismatchError

__all__ = ["Delivery", "Prepared"]

# A container that has been read and checked before; None where torch.load has to say what it is.
Prepared = tuple[DecodedTensor | None]

_ZIP_BEGIN, _ZIP_END, _ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22


class Delivery:
    """Decodes stored items and hands them to one planner. Not thread-safe, as planners are not.

    Args:
        planner: of this load.
        entries: Metadata.state_dict_metadata; says what raw items are.
        verify: compare the CRCs of what is read.
        extensions: makes the stream transforms that an item's descriptors name.
        landings: for targets on accelerators; None for those of their own devices.

    Attributes:
        entries: as above.
        num_items: delivered so far.
        num_unverified: of these, how many should have been, and had no CRC to compare.
    """

    def __init__(
        self,
        planner: LoadPlanner,
        entries: Mapping[str, Any],
        *,
        verify: bool,
        extensions: ExtensionRegistry,
        landings: Landings | None = None,
    ) -> None:
        self._planner = planner
        self._landings = landings or Landings()
        self.entries = entries
        self._verify = verify
        self._extensions = extensions
        self._targets: dict[int, torch.Tensor] = {}
        self.num_items = 0
        self.num_unverified = 0

    def place(self, name: str, item: StoredItem) -> Place | None:
        """Where `item` can be read straight into its target; None where it has to be delivered.

        Args:
            name: of the file.
        """
        wants_all = len(item.reads) == 1 and not item.descriptors
        if not wants_all or item.reads[0].type == LoadItemType.BYTE_IO:
            return None
        read = item.reads[0]
        entry = self.entries.get(read.storage_index.fqn)
        return place_for(
            name, item, entry, lambda: self._target(read), self._landings, verify=self._verify
        )

    def finish(self, item: StoredItem, place: Place, path: str) -> None:
        """The item has been read into its place.

        Raises:
            Exception: what the planner raises, or a copy to an accelerator.
        """
        read = item.reads[0]
        try:
            place.land()
        except Exception as error:
            _add_note(error, f"mpwriter: while loading {item.key!r} from {path}")
            raise
        if not place.target.is_inference():
            # It was changed behind autograd's back, which keeps count of changes.
            torch.autograd.graph.increment_version(place.target)
        self._planner.commit_tensor(read, self._targets.pop(id(read)))
        self.num_items += 1
        self.num_unverified += self._verify and not place.checked

    def prepare(self, item: StoredItem, stored: memoryview, path: str) -> Prepared | None:
        """Do the part of `deliver` that takes long and needs no planner. Thread-safe.

        Returns:
            For `deliver`; None where there is no such part.

        Raises:
            CorruptCheckpointError: the bytes are not what was written.
        """
        is_tensor = all(read.type != LoadItemType.BYTE_IO for read in item.reads)
        if item.descriptors or item.elements or not is_tensor or path.endswith(SAFETENSORS_SUFFIX):
            return None
        return (self._decode(item, stored, path),)

    def deliver(
        self, item: StoredItem, stored: memoryview, path: str, prepared: Prepared | None = None
    ) -> None:
        """Serve every read of `item`.

        Args:
            item: what is delivered.
            stored: its bytes in the file, writable; not kept.
            path: of the file, for errors.
            prepared: what `prepare` gave for these bytes.

        Raises:
            CorruptCheckpointError: the bytes are not what was written.
            ShapeMismatchError: the target has another shape; it was not touched.
            Exception: what the planner, torch.load or copy_ raises, as with stock.
        """
        if item.descriptors:
            stored = self._undo_transforms(item, stored, path)
        wants_bytes = [read for read in item.reads if read.type == LoadItemType.BYTE_IO]
        if wants_bytes:
            self._deliver_bytes(item, wants_bytes, stored, path)
        if len(wants_bytes) < len(item.reads):
            self._deliver_tensor(item, stored, path, prepared)
        self.num_items += 1

    def _target(self, read: ReadItem) -> torch.Tensor:
        """The planner's target; it is asked once for each read."""
        target = self._targets.get(id(read))
        if target is None:
            target = self._targets[id(read)] = self._planner.resolve_tensor(read).detach()
        return target

    def _undo_transforms(self, item: StoredItem, stored: memoryview, path: str) -> memoryview:
        try:
            extensions = self._extensions.from_descriptor_list(item.descriptors)
        except Exception as error:
            _add_note(error, f"mpwriter: while loading {item.key!r} from {path}")
            raise
        stream = cast(IO[bytes], io.BytesIO(stored))
        try:
            for extension in extensions:
                if isinstance(extension, StreamTransformExtension):
                    stream = extension.transform_from(stream)
            return memoryview(bytearray(stream.read(-1)))
        except Exception as error:  # each library has errors of its own for damaged streams
            raise _corrupt(
                item.key, path, f"{type(error).__name__} in {item.descriptors}: {error}"
            ) from error

    def _deliver_bytes(
        self, item: StoredItem, reads: list[ReadItem], stored: memoryview, path: str
    ) -> None:
        fault = _fault_of(stored) if self._verify else None
        if fault is not None and _may_be_zip(stored) and not _is_sound_zip(stored):
            raise _corrupt(item.key, path, fault)
        for read in reads:
            try:
                self._planner.load_bytes(read, io.BytesIO(stored))
            except Exception as error:
                fault = fault or _fault_of(stored)
                if fault is not None:
                    text = f"{fault}; {type(error).__name__}: {error}"
                    raise _corrupt(item.key, path, text) from error
                _add_note(error, f"mpwriter: while loading {item.key!r} from {path}")
                raise

    def _deliver_tensor(
        self, item: StoredItem, stored: memoryview, path: str, prepared: Prepared | None
    ) -> None:
        reads = [read for read in item.reads if read.type != LoadItemType.BYTE_IO]
        if item.elements is not None:
            self.num_unverified += self._verify
            for read in reads:
                self._put(read, _elements(stored, item.elements).view(tuple(read.lengths)), path)
        elif path.endswith(SAFETENSORS_SUFFIX):
            self.num_unverified += self._verify
            for read in reads:
                self._copy(read, self._raw_tensor(read.storage_index, stored, path), path)
        else:
            decoded = self._decode(item, stored, path) if prepared is None else prepared[0]
            tensor = self._decoded_tensor(decoded, item, stored, path)
            for read in reads:
                self._copy(read, tensor, path)

    def _decode(self, item: StoredItem, stored: memoryview, path: str) -> DecodedTensor | None:
        try:
            return decode(stored, verify=self._verify)
        except ContainerError as error:
            raise _corrupt(item.key, path, str(error)) from error

    def _decoded_tensor(
        self, decoded: DecodedTensor | None, item: StoredItem, stored: memoryview, path: str
    ) -> torch.Tensor:
        dtype = getattr(torch, decoded.dtype, None) if decoded is not None else None
        if decoded is None or not isinstance(dtype, torch.dtype):
            return _torch_load(item.key, stored, path)
        self.num_unverified += self._verify and not decoded.checked
        return _as_tensor(decoded, dtype)

    def _raw_tensor(self, index: MetadataIndex, stored: memoryview, path: str) -> torch.Tensor:
        """A safetensors file's payload: what it is says the metadata."""
        entry = self.entries.get(index.fqn)
        chunk = chunk_of(entry, index)
        if entry is None or chunk is None:
            text = f"the metadata says nothing of this tensor's chunk at {index.offset}"
            raise _corrupt(index.fqn, path, text)
        shape, dtype = tuple(chunk.sizes), entry.properties.dtype
        expected = math.prod(shape) * dtype.itemsize
        if expected != len(stored):
            text = f"expected {expected} bytes of {dtype} {shape}, found {len(stored)}"
            raise _corrupt(index.fqn, path, text)
        if not expected:
            return torch.empty(shape, dtype=dtype)
        return _elements(stored, dtype).view(shape)

    def _copy(self, read: ReadItem, tensor: torch.Tensor, path: str) -> None:
        key = read.storage_index.fqn
        try:
            piece = narrow_tensor_by_index(tensor, read.storage_offsets, read.lengths)
        except (RuntimeError, IndexError) as error:
            raise ShapeMismatchError(
                f"{key}: {path} holds shape {tuple(tensor.shape)}, which has no part "
                f"{tuple(read.lengths)} at {tuple(read.storage_offsets)}",
                path=path,
                key=key,
            ) from error
        self._put(read, piece, path)

    def _put(self, read: ReadItem, piece: torch.Tensor, path: str) -> None:
        key = read.storage_index.fqn
        target = self._target(read)
        del self._targets[id(read)]
        if target.size() != piece.size():
            raise ShapeMismatchError(
                f"{key}: {path} holds shape {tuple(piece.shape)}, its target has shape "
                f"{tuple(target.shape)}",
                path=path,
                key=key,
            )
        try:
            target.copy_(piece)
        except Exception as error:
            _add_note(error, f"mpwriter: while loading {key!r} from {path}")
            raise
        self._planner.commit_tensor(read, target)


def _corrupt(key: str, path: str, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{key}: damaged in {path}: {what}", path=path, key=key)


def _add_note(error: BaseException, text: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(text)


def _elements(payload: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A view of the payload; a copy where it does not lie as its elements have to.

    Stock's files and safetensors hold payloads at any offset, and torch copies complex128 with
    instructions that end the process at an address that is no multiple of 16.
    """
    found = torch.frombuffer(payload, dtype=dtype)
    if found.data_ptr() % dtype.itemsize == 0:
        return found
    moved = torch.frombuffer(payload, dtype=torch.uint8).clone()
    return torch.empty(0, dtype=dtype).set_(moved.untyped_storage())


def _as_tensor(decoded: DecodedTensor, dtype: torch.dtype) -> torch.Tensor:
    if len(decoded.payload):
        storage = _elements(decoded.payload, dtype)
    else:
        storage = torch.empty(0, dtype=dtype)
    return storage.as_strided(decoded.shape, decoded.stride, decoded.storage_offset)


def _torch_load(key: str, stored: memoryview, path: str) -> torch.Tensor:
    """What `decode` has no name for; its CRCs have been compared."""
    try:
        tensor = torch.load(io.BytesIO(stored), map_location="cpu", weights_only=True)
    except Exception as error:
        _add_note(error, f"mpwriter: while loading {key!r} from {path}")
        raise
    if not isinstance(tensor, torch.Tensor):
        raise _corrupt(key, path, f"expected a tensor, found a {type(tensor).__name__}")
    return tensor


def _fault_of(stored: memoryview) -> str | None:
    """What is wrong with these bytes, if torch.save made them; CRCs are compared."""
    try:
        decode(stored, verify=True)
    except ContainerError as error:
        return str(error)
    return None


def _may_be_zip(stored: memoryview) -> bool:
    """Whether one end looks so: the other may be damaged. A planner may store other bytes."""
    begins = stored[: len(_ZIP_BEGIN)] == _ZIP_BEGIN
    return begins or stored[-_ZIP_END_BYTES:][: len(_ZIP_END)] == _ZIP_END


def _is_sound_zip(stored: memoryview) -> bool:
    """A planner may store a zip that torch.save would not make: its content must be right."""
    try:
        with zipfile.ZipFile(io.BytesIO(stored)) as archive:
            return archive.testzip() is None
    except Exception:
        return False
