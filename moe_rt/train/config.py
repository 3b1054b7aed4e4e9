"""All options of a training run, in one frozen dataclass that the command line is generated from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from moe_rt.config.options import Sums
from moe_rt.errors import InvalidConfig

VOCAB_SIZE = 256

# Options that a checkpoint's tensors and the model's function depend on. A resumed run must use the same values.
MODEL_FIELDS = (
    "num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "tie_embeddings",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Model, data and schedule of a run. Each field's meaning is the help text of its command-line option."""

    out: Annotated[Path, "Directory for metrics, plots, text sample and checkpoints."] = Path("runs/train")
    data: Annotated[Path | None, "File or directory to train on; default: this Python's standard library."] = None
    resume: Annotated[bool, "Continue from the newest checkpoint under --out, if there is one."] = False
    seed: Annotated[int, "Seeds the initial weights, the order of the data and the text sample."] = 0

    num_layers: Annotated[int, "Decoder blocks."] = 4
    hidden: Annotated[int, "Width of the residual stream."] = 128
    num_heads: Annotated[int, "Attention heads."] = 4
    intermediate: Annotated[int, "Width of one expert."] = 128
    num_experts: Annotated[int, "Experts of a layer, over all ranks of an expert-parallel group."] = 8
    num_topk: Annotated[int, "Experts that a token visits."] = 2
    seq_len: Annotated[int, "Bytes of a sequence."] = 256
    tie_embeddings: Annotated[bool, "Also use the embedding as the output head."] = False
    aux_loss_coef: Annotated[float, "Weight of the load-balancing loss."] = 0.01
    z_loss_coef: Annotated[float, "Weight of the router's z-loss."] = 0.001
    dtype: Annotated[Literal["fp32", "bf16"], "Type of computation; parameters are always fp32."] = "fp32"

    codec: Annotated[Literal["raw", "fp8", "int8"], "Encoding of rows in transit; gradients are not encoded."] = "raw"
    sums: Annotated[Sums, "Order of combine's sums; invariant: the same bits for any number of ranks."] = "ranked"
    device: Annotated[Literal["cpu", "cuda"], "Device of the ranks; with cuda each rank has its own GPU."] = "cpu"
    ep: Annotated[int | None, "Ranks that share one set of experts, a divisor of the world size; default: all."] = None
    timeout_s: Annotated[float, "Seconds that a rank waits for a peer before it gives up."] = 120.0

    steps: Annotated[int, "Optimizer steps."] = 600
    batch_size: Annotated[int, "Sequences of a step, over all ranks."] = 8
    lr: Annotated[float, "Peak learning rate."] = 3e-3
    min_lr_ratio: Annotated[float, "Final learning rate as a fraction of the peak."] = 0.1
    warmup_steps: Annotated[int, "Steps of linear warm-up before the cosine decay."] = 40
    weight_decay: Annotated[float, "AdamW's weight decay; norms have none."] = 0.1
    grad_clip: Annotated[float, "Largest global gradient norm."] = 1.0

    val_every: Annotated[int, "Steps between validations; the first and last step always have one."] = 100
    val_sequences: Annotated[int, "Sequences of the validation set."] = 128
    checkpoint_every: Annotated[int, "Steps between checkpoints; the last step always has one."] = 200
    record_routes: Annotated[Path | None, "File to write the experts of all training steps to."] = None
    replay_routes: Annotated[Path | None, "File of routes to train with, in place of the routers' choices."] = None
    digests: Annotated[Path | None, "Directory to write digests of all ops to; moe-rt diff compares two runs."] = None
    prompt: Annotated[str, "Text that the sample starts with."] = "def "
    sample_bytes: Annotated[int, "Length of the text sample; 0 for none."] = 400
    temperature: Annotated[float, "Temperature of the text sample; 0 takes the likeliest byte."] = 0.8

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "num_heads", "intermediate", "num_experts", "num_topk", "seq_len"):
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ("steps", "batch_size", "val_every", "val_sequences", "checkpoint_every"):
            self._expect(getattr(self, name) >= 1, name, "at least 1")
        for name in ("seed", "aux_loss_coef", "z_loss_coef", "warmup_steps", "weight_decay", "sample_bytes"):
            self._expect(getattr(self, name) >= 0, name, "at least 0")
        for name in ("lr", "grad_clip", "timeout_s"):
            self._expect(getattr(self, name) > 0, name, "above 0")
        self._expect(
            self.hidden % (2 * self.num_heads) == 0, "hidden", f"a multiple of 2 * num_heads = {2 * self.num_heads}"
        )
        self._expect(self.num_topk <= self.num_experts, "num_topk", f"at most num_experts = {self.num_experts}")
        self._expect(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", "between 0 and 1")
        self._expect(self.temperature >= 0, "temperature", "at least 0")
        self._expect(self.dtype in ("fp32", "bf16"), "dtype", '"fp32" or "bf16"')
        self._expect(self.device in ("cpu", "cuda"), "device", '"cpu" or "cuda"')
        self._expect(self.codec in ("raw", "fp8", "int8"), "codec", '"raw", "fp8" or "int8"')
        self._expect(self.sums in get_args(Sums), "sums", f"one of {get_args(Sums)}")
        if self.record_routes is not None or self.replay_routes is not None:
            self._expect(not self.resume, "resume", "a whole run, whose routes are recorded or replayed")
        self._expect(bool(self.prompt), "prompt", "at least one character")

    def check_world(self, world_size: int) -> int:
        """Check that this many ranks can run it, and return the size of an expert-parallel group.

        Raises:
            InvalidConfig: the ranks cannot be grouped, or the batch cannot be divided evenly.
        """
        ep = world_size if self.ep is None else self.ep
        self._expect(ep >= 1 and world_size % ep == 0, "ep", f"a divisor of the world size {world_size}")
        self._expect(self.num_experts >= ep, "num_experts", f"at least one for each of {ep} expert-parallel ranks")
        self._expect(self.batch_size % world_size == 0, "batch_size", f"a multiple of the world size {world_size}")
        return ep

    def record(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in asdict(self).items()}

    def _expect(self, condition: bool, name: str, expected: str) -> None:
        if not condition:
            raise InvalidConfig(f"{name}: got {getattr(self, name)}, expected {expected}")
