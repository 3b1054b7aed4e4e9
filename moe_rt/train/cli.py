"""The command line: one option for each field of TrainConfig."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from moe_rt.errors import MoeRtError
from moe_rt.train.config import TrainConfig
from moe_rt.train.loop import train


def _options(command: Callable[..., None]) -> Callable[..., None]:
    hints = get_type_hints(TrainConfig)
    for field in reversed(dataclasses.fields(TrainConfig)):
        flag, kind = f"--{field.name.replace('_', '-')}", hints[field.name]
        settings: dict[str, Any] = {"default": field.default, "help": field.metadata["help"]}
        if kind is bool:
            settings["is_flag"] = True
        else:
            settings.update(type=_click_type(kind), show_default=field.default is not None)
        command = click.option(flag, **settings)(command)
    return command


def _click_type(kind: Any) -> Any:
    if get_origin(kind) in (Union, types.UnionType):  # X | None
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    return click.Path(path_type=Path) if kind is Path else kind


@click.command()
@_options
def main(**values: Any) -> None:
    """Train a byte-level mixture-of-experts language model, alone or under torchrun with its experts spread over ranks."""
    try:
        train(TrainConfig(**values))
    except MoeRtError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
