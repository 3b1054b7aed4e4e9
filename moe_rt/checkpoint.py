"""Whether a checkpoint of torch.distributed.checkpoint fits a model: a typed error before anything of it is loaded."""

from __future__ import annotations

import os
import re

from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from moe_rt.errors import InvalidConfig
from moe_rt.layer import MoELayer

# What wrappers add to a module's path, and torch.distributed.checkpoint.state_dict takes off again.
_WRAPPERS = re.compile(r"(?:_orig_mod|_checkpoint_wrapped_module)\.")


def check_checkpoint(model: nn.Module, path: str | os.PathLike[str], prefix: str = "model.") -> None:
    """Compares every MoELayer of `model` with a checkpoint's index. Local: every rank reads the same index.

    Args:
        path: the checkpoint's directory. Its index is a pickle, so check and load only those that you trust.
        prefix: of the model's entries; "model." for `{"model": get_model_state_dict(model), ...}`.

    Raises:
        InvalidConfig: naming the field that differs, or the parameter; on every rank alike.
    """
    saved = FileSystemReader(path).read_metadata().state_dict_metadata
    for layer_name, layer in model.named_modules():
        if not isinstance(layer, MoELayer):
            continue
        for name, p in layer.named_parameters():
            key = prefix + _WRAPPERS.sub("", f"{layer_name}.{name}".lstrip("."))
            size = getattr(saved.get(key), "size", None)
            if size is None:
                raise InvalidConfig(f"{key}: got no such tensor in the checkpoint {path}, expected one")
            if name == "router.weight" and size[0] != layer.config.num_experts:
                got = layer.config.num_experts
                raise InvalidConfig(f"num_experts: got {got}, expected {size[0]} as in {key} of the checkpoint {path}")
            if size != p.shape:
                raise InvalidConfig(f"{key}: got {list(p.shape)}, expected {list(size)} as in the checkpoint {path}")
