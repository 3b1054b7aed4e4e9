"""The training loop: the same steps on every rank, their optimizer, and reports and a sample of text from rank 0."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt import diagnostics, routes
from moe_rt.config.codec import Codec
from moe_rt.errors import MoeRtError
from moe_rt.extras import require
from moe_rt.nn.layer import MoEConfig, MoELayer
from moe_rt.ops.tree_sums import tree_all_reduce, tree_sum
from moe_rt.parallel.clip import clip_grad_norm_
from moe_rt.train import checkpoint, data
from moe_rt.train.config import TrainConfig
from moe_rt.train.metrics import Reporter, Row, refuse_to_overwrite
from moe_rt.train.model import Decoder, DecoderOutput, MakeMoE
from moe_rt.train.parallel import Gradients, Ranks, moe_layers, open_buffers, process_group


def train(config: TrainConfig, make_moe: MakeMoE | None = None) -> None:
    """Run a whole training. Collective over torchrun's world, or on a single rank without torchrun.

    Args:
        config: identical on all ranks.
        make_moe: makes the mixture of each layer; default: moe_rt.MoELayer.

    Raises:
        InvalidConfig: a value is invalid, or does not fit the number of ranks, the data or the checkpoint.
        MissingPackage: matplotlib, which draws the curves at the end, is not installed.
        MoeRtError: a peer failed (see moe_rt.errors), or the loss is no longer finite.
    """
    require("matplotlib", "train", "training draws its curves")
    with process_group(config.device, config.timeout_s):
        ranks = Ranks.make(config.check_world(dist.get_world_size()), config.device)
        for part in ("metrics.jsonl", "checkpoints"):
            refuse_to_overwrite(config.out / part, config.resume)
        corpus = data.load(config.data, config.seq_len)
        dist.barrier()  # no rank writes before all ranks have found their inputs, and no earlier run in the way
        torch.manual_seed(config.seed)
        model = Decoder(config, make_moe or moe_factory(config, ranks)).to(config.device)
        with open_buffers(model):
            Trainer(config, ranks, corpus, model).run()


def moe_factory(config: TrainConfig, ranks: Ranks) -> MakeMoE:
    codec = Codec[config.codec.upper()]
    moe = MoEConfig(
        hidden=config.hidden,
        intermediate=config.intermediate,
        num_experts=config.num_experts,
        num_topk=config.num_topk,
        num_max_tokens_per_rank=len(ranks.share(config.batch_size)) * config.seq_len,
        dtype=torch.bfloat16 if config.dtype == "bf16" else torch.float32,
        aux_loss_coef=config.aux_loss_coef,
        z_loss_coef=config.z_loss_coef,
        timeout_s=config.timeout_s,
        dispatch_dtype=codec.dtype,
        combine_dtype=codec.dtype,
        sums=config.sums,
    )
    return lambda layer: MoELayer(moe, ranks.ep_group)


class Trainer:
    """One rank's state of a run."""

    def __init__(self, config: TrainConfig, ranks: Ranks, corpus: data.Corpus, model: Decoder) -> None:
        self.config, self.ranks, self.corpus, self.model = config, ranks, corpus, model
        self.rows = ranks.share(config.batch_size)
        self.gradients = Gradients(model, ranks)
        self.optimizer = make_optimizer(model, config)
        group, recorded = dist.group.WORLD, config.replay_routes
        self.recording = None if config.record_routes is None else routes.record(model, group=group)
        self.replay = None if recorded is None else routes.replay(recorded, model, group=group)
        self.val_batches = corpus.val_batches(
            num_sequences=config.val_sequences, batch_size=config.batch_size, rows=self.rows, seq_len=config.seq_len
        )

    def run(self) -> None:
        config, checkpoints = self.config, self.config.out / "checkpoints"
        first = checkpoint.load(checkpoints, self.model, self.optimizer, config) if config.resume else 0
        digests = contextlib.nullcontext() if config.digests is None else diagnostics.digest(self.model, config.digests)
        with self._reporter(first) as reporter, digests:
            if first == 0:
                self._validate(0, reporter)
            for step in range(first + 1, config.steps + 1):
                row = self._train_step(step)
                if reporter:
                    reporter.training(row)
                if step % config.val_every == 0 or step == config.steps:
                    self._validate(step, reporter)
                if step % config.checkpoint_every == 0 or step == config.steps:
                    checkpoint.save(checkpoints, step, self.model, self.optimizer, config)
        if self.recording is not None and config.record_routes is not None:
            self.recording.save(config.record_routes)
        text = generate(
            self._forward,
            config.prompt,
            num_bytes=config.sample_bytes,
            seq_len=config.seq_len,
            temperature=config.temperature,
            seed=config.seed,
        )
        if self.ranks.rank == 0:
            (config.out / "sample.txt").write_text(text + "\n")
            from moe_rt.train import plots  # matplotlib takes a second to import

            plots.draw(config.out, self._title(), step_bytes=config.batch_size * config.seq_len)
            print(f"\n{text}\n")
            for name in ("metrics.jsonl", "loss.png", "expert_load.png", "sample.txt", "checkpoints"):
                print(f"{name:<16} {config.out / name}")

    def _train_step(self, step: int) -> Row:
        config, began = self.config, time.perf_counter()
        num_tokens, num_ranks = config.batch_size * config.seq_len, self.ranks.world_size
        x, y = self.corpus.train_batch(seed=config.seed, step=step, indices=self.rows, seq_len=config.seq_len)
        self.gradients.zero()
        with self.recording or contextlib.nullcontext(), self.replay or contextlib.nullcontext():
            out = self._forward(x)
            losses = _losses(out.logits, y.to(config.device))
            # This rank's part of the means over all ranks: gradients have one scale on any number of ranks.
            (losses.sum() / num_tokens + out.aux_loss / num_ranks).backward()
        self.gradients.add_up()
        grad_norm = clip_grad_norm_(self.model, config.grad_clip)
        lr = learning_rate(step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

        # The only place where a step's numbers are read on the host.
        counts = out.tokens_per_expert.double()
        own = torch.stack([tree_sum(losses.detach().double().sum(1)), out.aux_loss.detach().double()])
        sums = torch.cat([own, counts.flatten()])
        tree_all_reduce(sums)
        loss, aux_loss = (sums[:2] / sums.new_tensor([num_tokens, num_ranks])).tolist()
        norm, load = grad_norm.item(), sums[2:].view_as(counts)
        if not math.isfinite(loss + norm):
            raise MoeRtError(f"step {step}: got loss {loss} and gradient norm {norm}, expected finite numbers")
        return {
            "step": step,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens_per_s": num_tokens / (time.perf_counter() - began),
            "aux_loss": aux_loss,
            "expert_load": (load / load.sum(1, keepdim=True)).tolist(),
        }

    @torch.no_grad()
    def _validate(self, step: int, reporter: Reporter | None) -> None:
        sums = []  # for each batch: loss, bytes
        for x, targets in self.val_batches:
            y = targets.to(self.config.device)
            losses = _losses(self._forward(x).logits, y)
            sums.append(tree_sum(torch.stack([losses.double().sum(1), (y != data.IGNORE).double().sum(1)], 1)))
        of_batches = torch.stack(sums)
        tree_all_reduce(of_batches)
        loss, num_bytes = of_batches.sum(0).tolist()
        val_loss = loss / num_bytes
        if reporter:
            reporter.validation({"step": step, "val_loss": val_loss, "val_bpb": val_loss / math.log(2)})

    def _forward(self, tokens: Tensor) -> DecoderOutput:
        with torch.autocast(self.config.device, torch.bfloat16, enabled=self.config.dtype == "bf16"):
            return self.model(tokens.to(self.config.device))

    def _reporter(self, first: int) -> contextlib.AbstractContextManager[Reporter | None]:
        if self.ranks.rank != 0:
            return contextlib.nullcontext()
        return Reporter(self.config.out / "metrics.jsonl", first_step=first, steps=self.config.steps)

    def _title(self) -> str:
        config = self.config
        expert = 3 * config.hidden * config.intermediate
        local = sum(p.numel() for layer in moe_layers(self.model) for p in layer.experts.parameters())
        shared = sum(p.numel() for p in self.model.parameters()) - local
        total, active = (shared + config.num_layers * n * expert for n in (config.num_experts, config.num_topk))
        return (
            f"{total / 1e6:.2f} M parameters, {active / 1e6:.2f} M active: {config.num_layers} layers, "
            f"{config.num_experts} experts, top-{config.num_topk}"
        )


def _losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each token's loss, fp32 [B, S], from logits [B, S, V]; zero where the target is IGNORE."""
    of_tokens = F.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), ignore_index=data.IGNORE, reduction="none"
    )
    return of_tokens.view_as(targets)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Make AdamW with its state in place, so that a checkpoint can be loaded into it."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
    for p in parameters:
        optimizer.state[p] = {
            "step": torch.zeros((), device=p.device),  # where the fused update expects it
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    return optimizer


def learning_rate(step: int, config: TrainConfig) -> float:
    """Learning rate of the step-th update, counted from one: linear warm-up, then a cosine down to lr *
    min_lr_ratio."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], DecoderOutput],
    prompt: str,
    *,
    num_bytes: int,
    seq_len: int,
    temperature: float,
    seed: int,
) -> str:
    """Sample text: return `prompt` and `num_bytes` more; temperature 0 takes the likeliest byte.

    Collective, since the experts are spread over all ranks: the arguments must be identical on all of them. Characters
    that a terminal cannot print are replaced.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        logits = forward(tokens[:, -seq_len:]).logits[:, -1].float().cpu()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, token], dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
