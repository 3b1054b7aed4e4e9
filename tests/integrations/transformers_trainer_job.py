"""Train a saved model for a few steps with Transformers' Trainer, in one process or under torchrun; print the losses.

[torchrun --nproc-per-node W] transformers_trainer_job.py MODEL OUT
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from integrations.transformers_models import VOCABULARY
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig

import moe_rt.integrations.transformers  # noqa: F401  registers "moe_rt"

STEPS, GLOBAL_BATCH, LENGTH = 3, 4, 12


def main(path: str, out: str) -> None:
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="moe_rt") if world > 1 else None
    model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)
    tokens = torch.randint(1, VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(4))
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=GLOBAL_BATCH // world,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
    trainer.train()
    if trainer.is_world_process_zero():
        rows = [row for row in trainer.state.log_history if "loss" in row]
        print("RESULT", json.dumps([[row["loss"], row["grad_norm"]] for row in rows]))
    trainer.save_model(f"{out}/final")
    if world > 1:
        dist.barrier()  # ranks that write nothing would exit while gloo's threads still hold gathered data, and abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
