"""A checkpoint's index as JSON: file and position of each tensor, for torch.distributed.checkpoint.

torch.distributed.checkpoint keeps its index in `.metadata`, a pickle, which runs code when it is read. That file is
also written, for tools that need it, but the trainer reads this index, and tensors with `weights_only=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

Index = dict[str, dict[str, Any]]  # tensor name -> dtype, size, chunks


@dataclass(frozen=True)
class _Place:
    """Position of a chunk's bytes, with the field names of FileSystemReader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class IndexedWriter(FileSystemWriter):
    """Writes tensors, and keeps their index on the coordinating rank for the caller to write."""

    index: Index

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:  # from torch.save, which hides the system's error
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.index = {
            name: _record(name, tensor, metadata)
            for name, tensor in metadata.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)  # global_state has nothing else
        }


class IndexedReader(FileSystemReader):
    """Reads tensors by an index that the caller has read; supports no entries but tensors."""

    def __init__(self, directory: Path, index: Index) -> None:
        super().__init__(directory)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        places = {}
        for name, record in self._index.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"]))
                for chunk in record["chunks"]
            ]
            properties = TensorProperties(dtype=getattr(torch, record["dtype"]))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(record["size"]), chunks)
            for place, chunk in zip(record["chunks"], chunks, strict=True):
                places[MetadataIndex(name, chunk.offsets)] = _Place(place["file"], place["start"], place["bytes"])
        return Metadata(tensors, storage_data=places)


def _record(name: str, tensor: TensorStorageMetadata, metadata: Metadata) -> dict[str, Any]:
    chunks = []
    for chunk in tensor.chunks:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        where = {"file": place.relative_path, "start": place.offset, "bytes": place.length}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "size": list(tensor.size), "chunks": chunks}
