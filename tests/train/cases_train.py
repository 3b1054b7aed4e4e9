"""A tiny model, and functions that ranks run in the trainer's tests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel.clip import clip_grad_norm_
from moe_rt.train import TrainConfig, checkpoint, data, train
from moe_rt.train.loop import Trainer, learning_rate, make_optimizer, moe_factory
from moe_rt.train.model import Decoder
from moe_rt.train.parallel import Gradients, Ranks, moe_layers, open_buffers, process_group

TINY: dict[str, Any] = dict(
    data=Path(asyncio.__file__).parent,
    num_layers=2,
    hidden=32,
    num_heads=2,
    intermediate=32,
    num_experts=6,  # not a multiple of four ranks
    num_topk=2,
    seq_len=32,
    batch_size=12,
    steps=50,
    warmup_steps=5,
    val_every=25,
    val_sequences=20,  # not a multiple of the batch
    sample_bytes=5,
    timeout_s=60.0,
)


def tiny(**changes: Any) -> TrainConfig:
    return TrainConfig(**{**TINY, **changes})


def run(group: Any, changes: dict[str, Any]) -> None:
    train(tiny(**changes))


def rows_of_steps(group: Any, changes: dict[str, Any]) -> list[tuple[dict[str, Any], list[list[int]]]]:
    """Return what each of two steps reports, and how many tokens of this rank chose each expert, by layer."""
    config = tiny(**changes)
    with process_group(config.device, config.timeout_s):
        ranks = Ranks.make(config.check_world(dist.get_world_size()))
        torch.manual_seed(config.seed)
        model = Decoder(config, moe_factory(config, ranks))
        counts: list[list[int]] = []

        def count(router: Any, given: Any, chosen: tuple[torch.Tensor, ...]) -> None:
            counts.append(chosen[0].flatten().bincount(minlength=config.num_experts).tolist())

        with open_buffers(model):
            for layer in moe_layers(model):
                layer.router.register_forward_hook(count)
            trainer, rows = Trainer(config, ranks, data.load(config.data, config.seq_len), model), []
            for step in (1, 2):
                row = trainer._train_step(step)
                rates = {group["lr"] for group in trainer.optimizer.param_groups}
                assert rates == {row["lr"]} == {learning_rate(step, config)}
                rows.append((row, counts.copy()))
                counts.clear()
            return rows


def loaded(group: Any, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return this rank's state after loading the newest checkpoint into a model with other weights."""
    config = tiny(**changes)
    with process_group(config.device, config.timeout_s):
        ranks = Ranks.make(config.check_world(dist.get_world_size()))
        torch.manual_seed(12345)
        model = Decoder(config, moe_factory(config, ranks))
        with open_buffers(model):
            optimizer = make_optimizer(model, config)
            checkpoint.load(config.out / "checkpoints", model, optimizer, config)
            return {
                f"{kind}.{name}": tensor.numpy().copy()
                for kind, tensors in checkpoint.global_state(model, optimizer).items()
                for name, tensor in tensors.items()
            }


def initial_weights(group: Any) -> dict[str, np.ndarray]:
    """Return the weights by names that do not depend on the number of ranks."""
    config = tiny()
    with process_group(config.device, config.timeout_s):
        torch.manual_seed(7)
        model = Decoder(config, moe_factory(config, Ranks.make(dist.get_world_size())))
        with open_buffers(model):
            state = checkpoint.global_state(model, make_optimizer(model, config))["model"]
            return {name: tensor.numpy().copy() for name, tensor in state.items()}


def _one_layer(ranks: Ranks, **changes: Any) -> MoELayer:
    sizes = dict(hidden=2, intermediate=4, num_experts=4, num_topk=1, num_max_tokens_per_rank=1)
    return MoELayer(MoEConfig(**{**sizes, **changes}), ranks.ep_group)


def reloaded_bias(group: Any, directory: Path) -> list[float]:
    """Return the router's balance_bias of a layer that loaded another layer's checkpoint."""
    config, ranks = tiny(), Ranks.make(dist.get_world_size())
    saved, loaded = (_one_layer(ranks, balance_bias=True) for _ in range(2))
    with open_buffers(saved):
        saved.router.update_bias(torch.tensor([4, 3, 2, 1]))
        checkpoint.save(directory, 1, saved, make_optimizer(saved, config), config)
        checkpoint.load(directory, loaded, make_optimizer(loaded, config), config)
        return loaded.router.balance_bias.tolist()


def clipped_norm(group: Any, squares: list[float]) -> tuple[float, float]:
    """Clip gradients of experts with these squared norms by rank, others zero; return the norm and this rank's part."""
    ranks = Ranks.make(len(squares))
    layer = _one_layer(ranks)
    with open_buffers(layer):
        Gradients(layer, ranks).zero()
        experts = list(layer.experts.parameters())
        for p in experts:
            p.grad.fill_((squares[ranks.rank] / sum(e.numel() for e in experts)) ** 0.5)
        norm = clip_grad_norm_(layer, 1.0).item()
        return norm, sum(p.grad.square().sum().item() for p in experts)


def added_up(group: Any, ep: int) -> tuple[float, float]:
    """Add up gradients of r for shared parameters and of 10 r for experts on rank r; return one element of each."""
    ranks = Ranks.make(ep)
    layer = _one_layer(ranks)
    with open_buffers(layer):
        gradients = Gradients(layer, ranks)
        layer.router.weight.grad.fill_(ranks.rank)
        for p in layer.experts.parameters():
            p.grad.fill_(10 * ranks.rank)
        gradients.add_up()
        (only,) = moe_layers(layer)
        return only.router.weight.grad[0, 0].item(), only.experts.down_proj.grad[0, 0, 0].item()
