"""Checks that a checkpoint of torch.distributed.checkpoint fits a model, before anything is loaded."""

from __future__ import annotations

import os
import pickletools
import re
from pathlib import Path

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from moe_rt.errors import CorruptCheckpoint, InvalidConfig
from moe_rt.nn.layer import MoELayer

# Path components that wrappers add and torch.distributed.checkpoint.state_dict removes.
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module)\.")


def check_checkpoint(model: nn.Module, path: str | os.PathLike[str], prefix: str = "model.") -> None:
    """Compare every MoELayer of `model` with a checkpoint's index, and the index with the existing files.

    Local: every rank reads the same index. Contents of tensors are not read, so a flipped bit in them is not found.

    Args:
        model: a model with MoELayers.
        path: the checkpoint's directory. Its index is a pickle, so check and load only checkpoints that you trust.
        prefix: prefix of the model's entries; "model." for `{"model": get_model_state_dict(model), ...}`.

    Raises:
        CorruptCheckpoint: on every rank, if a file is missing or too short or the index cannot be read; names it.
        InvalidConfig: on every rank, if a size differs; names the field or the parameter.
    """
    saved = _read_index(Path(path))
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        for name, p in layer.named_parameters():
            key = prefix + _WRAPPERS.sub("", f"{layer_name}.{name}".lstrip("."))
            size = saved.get(key)
            if size is None:
                raise InvalidConfig(f"{key}: got no such tensor in the checkpoint {path}, expected one")
            if name == "router.weight" and size[:1] != p.shape[:1]:
                got = layer.config.num_experts
                raise InvalidConfig(
                    f"num_experts: got {got}, expected {size[:1].numel()} as in {key} of the checkpoint {path}"
                )
            if size != p.shape:
                raise InvalidConfig(f"{key}: got {list(p.shape)}, expected {list(size)} as in the checkpoint {path}")


def _read_index(path: Path) -> dict[str, torch.Size]:
    """Return the sizes of a checkpoint's tensors, after checking that its files are long enough to hold them."""
    ends: dict[Path, int] = {}  # bytes that each file must have according to the index
    try:
        _refuse_large_memo((path / ".metadata").read_bytes())
        index = FileSystemReader(path).read_metadata()
        tensors = {
            name: torch.Size(tensor.size)
            for name, tensor in index.state_dict_metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        for place in index.storage_data.values():
            file = path / place.relative_path
            ends[file] = max(ends.get(file, 0), place.offset + place.length)
        sizes = {file: file.stat().st_size if file.is_file() else 0 for file in ends}
    except Exception as error:  # a damaged pickle raises anything, or returns another object
        got = f"{type(error).__name__}: {error}"
        raise CorruptCheckpoint(f"{path / '.metadata'}: got {got}, expected an index that can be read") from error
    for file, end in ends.items():
        if sizes[file] < end:
            raise CorruptCheckpoint(f"{file}: got {sizes[file]} bytes, expected at least {end}")
    return tensors


def _refuse_large_memo(data: bytes) -> None:
    """Raise ValueError if the data is not a pickle, or if a flipped bit would make the unpickler fill all memory.

    Three opcodes name the index of a memo entry, and the unpickler makes its memo table that long.
    """
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and int(argument or 0) > len(data):
            raise ValueError(f"a table of {argument} entries for {len(data)} bytes")
