"""Every knob of a training run, in one frozen dataclass that the command line is made from."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from moe_rt.errors import InvalidConfig

VOCAB_SIZE = 256

# What a checkpoint's tensors and the function they compute depend on; a resumed run must have the same.
MODEL_FIELDS = (
    "num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "tie_embeddings",
)  # fmt: skip


def _knob(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """What to train, on what, for how long. Each field's meaning is the help text of its command-line option."""

    out: Path = _knob(Path("runs/train"), "Directory for metrics, plots, text sample and checkpoints.")
    data: Path | None = _knob(None, "File or directory to train on; default: this Python's standard library.")
    resume: bool = _knob(False, "Go on from the newest checkpoint under --out, if there is one.")
    seed: int = _knob(0, "Seeds the initial weights, the order of the data and the text sample.")

    num_layers: int = _knob(4, "Decoder blocks.")
    hidden: int = _knob(128, "Width of the residual stream.")
    num_heads: int = _knob(4, "Attention heads.")
    intermediate: int = _knob(128, "Width of one expert.")
    num_experts: int = _knob(8, "Experts of a layer, over all ranks of an expert-parallel group.")
    num_topk: int = _knob(2, "Experts that a token visits.")
    seq_len: int = _knob(256, "Bytes of a sequence.")
    tie_embeddings: bool = _knob(False, "Use the embedding as the output head, too.")
    aux_loss_coef: float = _knob(0.01, "Weight of the load-balancing loss.")
    z_loss_coef: float = _knob(0.001, "Weight of the router's z-loss.")
    dtype: Literal["fp32", "bf16"] = _knob("fp32", "What is computed in; parameters are always fp32.")

    ep: int | None = _knob(None, "Ranks that share one set of experts, a divisor of the world size; default: all.")
    timeout_s: float = _knob(120.0, "Seconds that a rank waits for a peer before it gives up.")

    steps: int = _knob(400, "Optimizer steps.")
    batch_size: int = _knob(16, "Sequences of a step, over all ranks.")
    lr: float = _knob(3e-3, "Peak learning rate.")
    min_lr_ratio: float = _knob(0.1, "Final learning rate as a fraction of the peak.")
    warmup_steps: int = _knob(40, "Steps of linear warm-up before the cosine decay.")
    weight_decay: float = _knob(0.1, "AdamW's weight decay; norms have none.")
    grad_clip: float = _knob(1.0, "Largest global gradient norm.")

    val_every: int = _knob(50, "Steps between validations; the first and last step always have one.")
    val_sequences: int = _knob(128, "Sequences of the validation set.")
    checkpoint_every: int = _knob(200, "Steps between checkpoints; the last step always has one.")
    prompt: str = _knob("def ", "Text that the sample starts with.")
    sample_bytes: int = _knob(400, "Length of the text sample; 0 for none.")
    temperature: float = _knob(0.8, "Temperature of the text sample; 0 takes the likeliest byte.")

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "seq_len"):
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ("steps", "batch_size", "val_every", "val_sequences", "checkpoint_every"):
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ("seed", "aux_loss_coef", "z_loss_coef", "warmup_steps", "weight_decay", "sample_bytes"):
            self._expect(getattr(self, name) >= 0, name, "at least 0")
        for name in ("lr", "grad_clip", "timeout_s"):
            self._expect(getattr(self, name) > 0, name, "above 0")
        self._expect(self.hidden % (2 * self.num_heads) == 0, "hidden", f"a multiple of 2 * num_heads = {2 * self.num_heads}")
        self._expect(self.num_topk <= self.num_experts, "num_topk", f"at most num_experts = {self.num_experts}")
        self._expect(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1")
        self._expect(self.temperature >= 0, "temperature", "at least 0")
        self._expect(self.dtype in ("fp32", "bf16"), "dtype", '"fp32" or "bf16"')
        self._expect(bool(self.prompt), "prompt", "at least one character")

    def check_world(self, world_size: int) -> int:
        """Whether this many ranks can run it; returns the size of an expert-parallel group.

        Raises:
            InvalidConfig: the ranks cannot be grouped, or the batch cannot be shared out evenly.
        """
        ep = world_size if self.ep is None else self.ep
        self._expect(ep >= 1 and world_size % ep == 0, "ep", f"a divisor of the world size {world_size}")
        self._expect(self.num_experts >= ep, "num_experts", f"at least one for each of {ep} expert-parallel ranks")
        self._expect(self.batch_size % world_size == 0, "batch_size", f"a multiple of the world size {world_size}")
        return ep

    def record(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise InvalidConfig(f"{name}: got {getattr(self, name)}, expected {expected}")
