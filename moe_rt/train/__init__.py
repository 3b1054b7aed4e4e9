"""A small byte-level language model trainer with experts spread over ranks: `python -m moe_rt.train --help`."""

from moe_rt.train.config import TrainConfig
from moe_rt.train.loop import train

__all__ = ["TrainConfig", "train"]
