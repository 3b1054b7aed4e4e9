"""Lightning, DeepSpeed, Prodigy and D-Adaptation with experts that are distributed over ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas.cases_replicas import Net, batch, local, loss_of, net, same_on_all, trained

from moe_rt.parallel import prepare, whole_state_dict

os.environ.setdefault("DS_ACCELERATOR", "cpu")


def optimizer_class(name: str) -> Any:
    if name == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy
    from dadaptation import DAdaptAdam, DAdaptSGD

    return {"dadapt adam": DAdaptAdam, "dadapt sgd": DAdaptSGD}[name]


def optimizer(group: Any, name: str) -> list[float]:
    """Return the step size that the optimizer finds, and sums of all weights; copies must be equal."""
    made: list[Any] = []

    def make(params: Any) -> Any:
        made.append(optimizer_class(name)(params, lr=1.0))
        return made[0]

    weights = trained(group, make)
    assert group is None or same_on_all(group, weights["a.weight"])
    return [made[0].param_groups[0]["d"], *(t.double().abs().sum().item() for t in weights.values())]


def optimizer_alone(name: str) -> list[float]:
    return optimizer(None, name)


def deepspeed(group: Any, stage: int) -> str:
    """Raise what `initialize` raises; experts must be unchanged."""
    import deepspeed as ds

    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, and is not needed
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    rank = str(group.rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    with net(group) as model:
        before = local(model.experts.down_proj)
        try:
            ds.initialize(
                model=model, model_parameters=list(model.parameters()), dist_init_required=False, config=config
            )
        finally:
            assert torch.equal(local(model.experts.down_proj), before)
    return "not refused"


def lightning(group: Any, directory: str, recipe: bool) -> Any:
    """Train two steps with a checkpoint, load the file on every rank, and return the result."""
    import lightning.pytorch as pl
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    rank = str(group.rank())
    os.environ.update(
        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", GROUP_RANK="0", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )  # fmt: skip

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(group)
            prepare(self)  # DistributedDataParallel wraps this module

        def training_step(self, index: torch.Tensor, _: int) -> torch.Tensor:
            return loss_of(self.net, int(index[0]), group.rank(), 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(4))

    class Whole(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:  # runs on every rank
            checkpoint["state_dict"] = whole_state_dict(self)
            checkpoint["optimizer_states"] = [whole_state_dict(o) for o in self.trainer.optimizers]

    def trainer(**options: Any) -> Any:
        return pl.Trainer(
            strategy="ddp", accelerator="cpu", devices=2, logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=directory, plugins=[TorchElasticEnvironment()], **options,
        )  # fmt: skip

    saver = pl.callbacks.ModelCheckpoint(directory, filename="last", save_top_k=-1)
    module = Whole() if recipe else Module()
    trainer(max_steps=2, max_epochs=1, callbacks=[saver]).fit(module)
    trained_to = {name: local(p) for name, p in module.named_parameters()}
    dist.barrier()
    path = Path(directory) / "last.ckpt"
    if not recipe:
        module.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
        return "not refused"
    other = Whole()
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    resumed = trainer(max_steps=3, max_epochs=3, enable_checkpointing=False)
    resumed.fit(other, ckpt_path=str(path), weights_only=False)
    step = torch.stack([(local(p) - trained_to[name]).abs().max() for name, p in other.named_parameters()])
    module.net.moe.buffer.close()
    return [
        resumed.global_step,
        bool((step > 0).all()),
        step.max().item() < 0.05,
        batch(0, 0, 1).isfinite().all().item(),
    ]
