"""Saves and loads tensor slices with torch.distributed.checkpoint, with a checksum for each.

Files are in torch's format, which `torch.distributed.checkpoint` of any torch version can read. Its index is a pickle: it is
unpickled with an allow-list of the few classes that an index needs.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ultrascale.parallel.torch_private import StorageInfo
from ultrascale.specs.errors import SpecError
from ultrascale.specs.files import open_regular, read_bytes
from ultrascale.train.checkpoint import Sums

INDEX = ".metadata"
MAX_INDEX_BYTES = 2**30  # of the index, which is read into memory


@dataclass(frozen=True)
class TensorSlice:
    """A rectangular slice of a whole tensor. `tensor` is called when the slice is written or read."""

    shape: tuple[int, ...]
    """shape of the whole tensor"""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Callable[[], torch.Tensor]
    dtype: torch.dtype = torch.float32

    @classmethod
    def whole(
        cls, shape: tuple[int, ...], tensor: Callable[[], torch.Tensor], dtype: torch.dtype = torch.float32
    ) -> TensorSlice:
        return cls(shape, (0,) * len(shape), shape, tensor, dtype)

    # The protocol of torch.distributed.checkpoint for objects that describe their own chunks.
    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
        return [WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))]

    def size(self) -> torch.Size:
        return torch.Size(self.shape)


class _SavePlanner(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        return _tensor(self.state_dict, index)


class _LoadPlanner(DefaultLoadPlanner):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The default planner searches objects for tensors to move; a TensorSlice is not one.
        pieces = {f"{section}.{name}": piece for section, named in state_dict.items() for name, piece in named.items()}
        entries = metadata.state_dict_metadata if metadata is not None else {}
        for name, piece in pieces.items():
            entry = entries.get(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise SpecError(f"checkpoint {self.folder} has no {name} but this run needs it: try another")
            if tuple(entry.size) != piece.shape:
                raise SpecError(
                    f"checkpoint {self.folder}: {name} is {list(entry.size)} but this run has {list(piece.shape)}: try another"
                )
        self.flatten_state_dict = False
        self.state_dict, self.metadata, self.is_coordinator = pieces, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _tensor(self.state_dict, index)


def _tensor(pieces: Mapping[str, Any], index: MetadataIndex) -> torch.Tensor:
    piece = pieces[index.fqn]
    assert isinstance(piece, TensorSlice)
    return piece.tensor()


Pieces = dict[str, dict[str, TensorSlice]]
"""by section (model, optimizer moments, random states) and name"""


def save(pieces: Pieces, folder: Path, commit: Callable[[Sums], None], group: ProcessGroup | None) -> None:
    """Every rank writes its pieces; `commit(sums)` runs on the first rank after all are on the disk."""
    writer = ShardWriter(folder, commit)
    with _unwrap_failures():
        dcp_save(pieces, storage_writer=writer, planner=_SavePlanner(), process_group=group, no_dist=group is None)


def load(
    pieces: Pieces,
    folder: Path,
    sums: Sums,
    group: ProcessGroup | None,
    moving: Callable[[], None] | None = None,
) -> None:
    """Every rank reads its pieces into their tensors, however the tensors were sliced when they were written.

    `moving` is called after every part that was read.
    """
    reader = ShardReader(folder, sums, moving)
    with _unwrap_failures():
        dcp_load(pieces, storage_reader=reader, planner=_LoadPlanner(folder), process_group=group, no_dist=group is None)


@contextmanager
def _unwrap_failures() -> Iterator[None]:
    """Raises the failure of any rank on all ranks as the original SpecError or OSError."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as failed:
        rank, (error, _) = min(failed.failures.items())
        if isinstance(error, (SpecError, OSError)):
            raise error from None
        raise RuntimeError(f"rank {rank}: {type(error).__name__}: {error}") from failed


@dataclass
class _Stored(StorageInfo):
    """The location of a part and its checksum, sent to the rank that writes the index."""

    checksum: int = 0


class ShardWriter(FileSystemWriter):
    """Writes one file per rank; `commit(sums)` is called on the rank that writes the index after all are on the disk."""

    def __init__(self, folder: Path, commit: Callable[[Sums], None]) -> None:
        super().__init__(folder, single_file_per_rank=True, overwrite=True)
        self.folder, self.commit = folder, commit

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            with (self.folder / name).open("wb") as file:
                results += [_write(file, name, item, planner) for item in plan.items]
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        sums: Sums = {}
        plain = []
        for result in (one for each in results for one in each):
            stored = result.storage_data
            assert isinstance(stored, _Stored)
            sums.setdefault(stored.relative_path, []).append((stored.offset, stored.length, stored.checksum))
            place = StorageInfo(stored.relative_path, stored.offset, stored.length)
            plain.append(WriteResult(result.index, result.size_in_bytes, place))
        super().finish(metadata, [plain])
        index = (self.folder / INDEX).read_bytes()
        sums[INDEX] = [(0, len(index), zlib.crc32(index))]
        self.commit(sums)


def _write(file: BinaryIO, name: str, item: WriteItem, planner: SavePlanner) -> WriteResult:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    # A view of a larger tensor would be saved with all of that tensor's storage.
    owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
    summed = _ChecksumFile(file)
    try:
        torch.save(tensor.detach().contiguous() if owns_storage else tensor.detach().clone(), cast(IO[bytes], summed))
    except RuntimeError:
        # After a failed write torch still closes its archive, and then raises its own error about the archive's length.
        if summed.error is not None:
            raise summed.error from None
        raise
    return WriteResult(item.index, summed.length, _Stored(name, summed.offset, summed.length, checksum=summed.checksum))


class _ChecksumFile(io.RawIOBase):
    """A file that computes a checksum of what is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.offset, self.length, self.checksum = file.tell(), 0, 0
        self.error: OSError | None = None
        """the first error of the file"""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        self.length += len(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise


class ShardReader(FileSystemReader):
    """Reads parts and verifies their checksums; raises SpecError for a mismatch."""

    def __init__(self, folder: Path, sums: Sums, moving: Callable[[], None] | None = None) -> None:
        super().__init__(folder)
        self.folder = folder
        self.moving = moving or (lambda: None)
        self.sums = {(name, offset): (length, sum) for name, parts in sums.items() for offset, length, sum in parts}

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        path = self.folder / INDEX
        try:
            data = read_bytes(path, MAX_INDEX_BYTES)
        except OSError as error:
            raise SpecError(f"checkpoint {self.folder} has no readable {INDEX} ({error.strerror}): try another") from None
        self._check(INDEX, 0, data, "its index")
        try:
            metadata = _IndexUnpickler(io.BytesIO(data)).load()
            problem = _problem(metadata) if isinstance(metadata, Metadata) else "it is of another kind"
        except Exception as error:  # a pickle can contain any object in any field
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        if problem:
            raise SpecError(f"checkpoint {self.folder} has an index that cannot be used ({problem}): try another")
        return cast(Metadata, metadata)

    def _refuse_special(self, names: Iterable[str]) -> None:
        """Refuses files that are not regular: torch opens them itself, and would block on a FIFO."""
        for name in names:
            try:
                open_regular(self.folder / name).close()
            except OSError as error:
                raise SpecError(f"checkpoint {self.folder}: {name} cannot be read ({error.strerror}): try another") from None

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._refuse_special({self.storage_data[item.storage_index].relative_path for item in plan.items})
        try:
            return super().read_data(plan, planner)
        except OSError as error:
            name = Path(str(error.filename)).name if error.filename else "a file"
            raise SpecError(f"checkpoint {self.folder}: {name} cannot be read ({error.strerror}): try another") from None

    def _slice_file(self, file: Any, place: StorageInfo) -> io.BytesIO:
        file.seek(place.offset)
        data = file.read(place.length)
        self._check(place.relative_path, place.offset, data, f"what lies at byte {place.offset:,}")
        self.moving()
        return io.BytesIO(data)

    def _check(self, name: str, offset: int, data: bytes, what: str) -> None:
        length, checksum = self.sums.get((name, offset), (-1, 0))
        if len(data) < length:
            raise SpecError(f"checkpoint {self.folder}: {name} ends early ({len(data):,} of {length:,} bytes of {what})")
        if len(data) != length or zlib.crc32(data) != checksum:
            raise SpecError(f"checkpoint {self.folder}: {name} is damaged: {what} is not what was written")


def _problem(metadata: Metadata) -> str:
    """Describes what in an index is not as `save` writes it; empty if it is valid."""
    places: Mapping[Any, Any] = metadata.storage_data
    for name, entry in metadata.state_dict_metadata.items():
        if not _NAME.fullmatch(name) or not isinstance(entry, TensorStorageMetadata):
            return f"it names {name!r:.60}, which is no part of a run"
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            return f"its parts of {name:.60} are not the whole"
        for chunk in entry.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            if not isinstance(place, StorageInfo):
                return f"it does not say where {name:.60} lies"
            if Path(place.relative_path).name != place.relative_path:
                return f"{name:.60} lies in {place.relative_path:.60}, outside the folder"
    return ""


_NAME = re.compile(r"(model|optimizer\.\w+)\..+|random\.rank-\d+(-cuda)?")
_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "ChunkStorageMetadata",
        "TensorProperties",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "torch": {"Size", "float32", "uint8", "bfloat16", "float16", "float64", "int64", "strided"},
    "collections": {"OrderedDict"},
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX_CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
