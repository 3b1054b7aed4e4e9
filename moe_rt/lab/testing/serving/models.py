"""Makes small mixture-of-experts models with random weights by the installed Transformers, and saves them for vLLM."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

VOCABULARY = 512
_COMMON: dict[str, Any] = dict(vocab_size=VOCABULARY, hidden_size=256, initializer_range=0.08)
_COMMON |= dict(max_position_embeddings=4096, bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False)


def _config(name: str, **sizes: Any) -> Any:
    import transformers

    return getattr(transformers, name)(**_COMMON, **sizes)


def qwen3_moe() -> Any:
    return _config(
        "Qwen3MoeConfig", num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=256, norm_topk_prob=True,
    )  # fmt: skip


def uneven() -> Any:
    """Return qwen3_moe with experts that two ranks do not share evenly."""
    config = qwen3_moe()
    config.num_experts, config.num_experts_per_tok = 7, 3
    return config


def mixtral() -> Any:
    return _config(
        "MixtralConfig", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=8,
        num_experts_per_tok=2, intermediate_size=128,
    )  # fmt: skip


def deepseek_v3() -> Any:
    """Return a model with latent attention, a dense first layer, a shared expert, expert groups and scaled outputs."""
    return _config(
        "DeepseekV3Config", num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=64, v_head_dim=64, n_routed_experts=8,
        num_experts_per_tok=2, n_group=2, topk_group=1, n_shared_experts=1, moe_intermediate_size=128,
        intermediate_size=256, first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True,
        topk_method="noaux_tc", scoring_func="sigmoid",
    )  # fmt: skip


def one_sided() -> Any:
    """Return deepseek_v3, whose tokens all choose the first two experts; see `save`."""
    return deepseek_v3()


def llama() -> Any:
    """Return a model without experts."""
    return _config(
        "LlamaConfig", num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256
    )


def save_apart(family: str, path: Path, **sizes: Any) -> Path:
    """Run `save` in a new process: its progress bars start a thread, and engines are forked from one without."""
    saving = multiprocessing.get_context("fork").Process(target=save, args=(family, path), kwargs=sizes)
    saving.start()
    saving.join()
    if saving.exitcode != 0:
        raise RuntimeError(f"no model was saved; the process ended with {saving.exitcode}")
    return path


def save(family: str, path: Path, **sizes: Any) -> Path:
    """Save a model of a family above, with a tokenizer of bytes, in `path`. `sizes` replace the family's."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = globals()[family]()
    for name, size in sizes.items():
        setattr(config, name, size)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if family == "one_sided":
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[:2] = 100.0
    model.save_pretrained(path)
    document = json.loads((path / "config.json").read_text())
    if document["model_type"] == "deepseek_v3":  # Transformers omits it, and vLLM needs it
        document["topk_method"] = "noaux_tc"
    (path / "config.json").write_text(json.dumps(document))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", "<pad>", *letters]
    words += [f"<{i}>" for i in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(path)
    return path
