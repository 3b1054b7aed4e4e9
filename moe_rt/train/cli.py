"""The command line: one option for each field of TrainConfig."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import torch

from moe_rt.errors import MoeRtError
from moe_rt.train.config import TrainConfig
from moe_rt.train.loop import train


def _options(command: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(TrainConfig, include_extras=True)
    for field in reversed(dataclasses.fields(TrainConfig)):
        kind, text = get_args(hints[field.name])
        flag = f"--{field.name.replace('_', '-')}"
        option = click.option(
            flag, type=_click_type(kind), is_flag=kind is bool, default=field.default, show_default=True, help=text
        )
        command = option(command)
    return command


def _click_type(kind: Any) -> Any:
    if get_origin(kind) is types.UnionType:  # X | None
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    return click.Path(path_type=Path) if kind is Path else kind


@click.command()
@_options
def main(**values: Any) -> None:
    """Train a byte-level mixture-of-experts language model; under torchrun its experts are spread over ranks."""
    try:
        config = TrainConfig(**values)
        if config.sums == "invariant" and config.device == "cpu":
            torch.set_num_threads(1)  # as products demand; torchrun sets it only for several ranks
        train(config)
    except (MoeRtError, OSError) as error:  # on a full disk, writing the metrics may fail first
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
