"""Sizes of mixture-of-experts models: a table of well-known ones, and Hugging Face's config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from moe_rt.errors import InvalidConfig, expect


@dataclass(frozen=True)
class Model:
    """Sizes of a model's expert layers.

    Attributes:
        hidden, intermediate: elements of a token, and inner size of a routed expert.
        experts, topk: routed experts of a layer, and those of a token.
        layers: layers with experts.
        groups, topk_groups: groups of experts, and the number that a token may choose from; 1 and 1 without a limit.
        shared: inner size of the shared experts together; 0 without.
        source: the public config.json of these sizes.
    """

    name: str
    hidden: int
    intermediate: int
    experts: int
    topk: int
    layers: int
    groups: int = 1
    topk_groups: int = 1
    shared: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "topk", "layers", "groups", "topk_groups"):
            value = getattr(self, name)
            expect(isinstance(value, int) and value > 0, name, value, "a positive number")
        expect(self.topk <= self.experts, "topk", self.topk, f"at most experts = {self.experts}")
        expect(self.experts % self.groups == 0, "groups", self.groups, f"a divisor of experts = {self.experts}")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights in bf16: gate, up and down."""
        return 3 * self.hidden * self.intermediate * 2


# Sizes from config.json of the repositories on Hugging Face that each row names.
MODELS = {
    model.name: model
    for model in (
        Model("deepseek-v3", 7168, 2048, 256, 8, 58, 8, 4, 2048, source="deepseek-ai/DeepSeek-V3"),
        Model("deepseek-v2", 5120, 1536, 160, 6, 59, 8, 3, 3072, source="deepseek-ai/DeepSeek-V2"),
        Model("deepseek-v2-lite", 2048, 1408, 64, 6, 26, 1, 1, 2816, source="deepseek-ai/DeepSeek-V2-Lite"),
        Model("kimi-k2", 7168, 2048, 384, 8, 60, 1, 1, 2048, source="moonshotai/Kimi-K2-Instruct"),
        Model("qwen3-30b-a3b", 2048, 768, 128, 8, 48, source="Qwen/Qwen3-30B-A3B"),
        Model("qwen3-235b-a22b", 4096, 1536, 128, 8, 94, source="Qwen/Qwen3-235B-A22B"),
        Model("qwen3-next-80b-a3b", 2048, 512, 512, 10, 48, 1, 1, 512, source="Qwen/Qwen3-Next-80B-A3B-Instruct"),
        Model("glm-4.5", 5120, 1536, 160, 8, 89, 1, 1, 1536, source="zai-org/GLM-4.5"),
        Model("glm-4.5-air", 4096, 1408, 128, 8, 45, 1, 1, 1408, source="zai-org/GLM-4.5-Air"),
        Model("gpt-oss-120b", 2880, 2880, 128, 4, 36, source="openai/gpt-oss-120b"),
        Model("gpt-oss-20b", 2880, 2880, 32, 4, 24, source="openai/gpt-oss-20b"),
        Model("mixtral-8x7b", 4096, 14336, 8, 2, 32, source="mistralai/Mixtral-8x7B-v0.1"),
        Model("mixtral-8x22b", 6144, 16384, 8, 2, 56, source="mistralai/Mixtral-8x22B-v0.1"),
        Model(
            "llama4-maverick",
            5120,
            8192,
            128,
            1,
            24,
            1,
            1,
            8192,
            source="meta-llama/Llama-4-Maverick-17B-128E-Instruct",
        ),
        Model("llama4-scout", 5120, 8192, 16, 1, 48, 1, 1, 8192, source="meta-llama/Llama-4-Scout-17B-16E-Instruct"),
        Model("minimax-m2", 3072, 1536, 256, 8, 62, source="MiniMaxAI/MiniMax-M2"),
    )
}
# Field of Model -> names of it in config.json, by model family.
_FIELDS = {
    "hidden": ("hidden_size", "d_model"),
    "intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_dim"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"),
    "layers": ("num_hidden_layers", "n_layer"),
    "groups": ("n_group",),
    "topk_groups": ("topk_group",),
}


def find_model(name: str) -> Model:
    """Return the model of a name in MODELS, or of the config.json at a path.

    Raises:
        InvalidConfig: neither exists, or the file describes a dense model or lacks a field.
    """
    if (model := MODELS.get(name.lower())) is not None:
        return model
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if path.is_file():
        return read_config(path)
    near = get_close_matches(name.lower(), MODELS, 3, 0.3)
    known = f"did you mean {' or '.join(near)}? " if near else ""
    raise InvalidConfig(
        f"model: got {name}, expected a path of a config.json or a known name; {known}known are {', '.join(MODELS)}"
    )


def read_config(path: Path) -> Model:
    """Return the sizes in a Hugging Face config.json; layers that its fields call dense do not count.

    Raises:
        InvalidConfig: the file is no JSON object, describes a dense model, or lacks a field.
    """
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config") or config
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidConfig(f"model {path}: got {error}, expected a JSON object") from error
    found: dict[str, Any] = {
        field: next((config[name] for name in names if config.get(name) is not None), None)
        for field, names in _FIELDS.items()
    }
    dense = not isinstance(found["experts"], int) or found["experts"] <= 1
    expect(not dense, f"model {path}: experts", "a dense model", f"one of {', '.join(_FIELDS['experts'])} above 1")
    for field in ("hidden", "intermediate", "topk", "layers"):
        expect(found[field] is not None, f"model {path}: {field}", "nothing", f"one of {', '.join(_FIELDS[field])}")
    found["layers"] -= int(config.get("first_k_dense_replace") or 0)
    shared = int(config.get("n_shared_experts") or 0) * found["intermediate"]
    sizes = {field: value for field, value in found.items() if value is not None}
    return Model(name=str(config.get("model_type") or path.stem), shared=shared, **sizes)
