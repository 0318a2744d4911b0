"""Tiny models of many families, whose windows, chunks and RoPE limits are shorter than the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

LIMIT = 8
"""Tokens of each window and chunk, and of the shorter of two sets of rotary frequencies."""

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
SAME_HEADS = {**SIZES, "num_key_value_heads": 4}
FOUR_LAYERS = {**SIZES, "num_hidden_layers": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": LIMIT,
}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": LIMIT,
}
OTHER_NAMES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama3_rope": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "qwen2_sliding": lambda: hf.Qwen2Config(
        **FOUR_LAYERS, use_sliding_window=True, sliding_window=LIMIT, max_window_layers=2
    ),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=8),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **FOUR_LAYERS,
        **EXPERTS,
        head_dim=8,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=LIMIT),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, sliding_window=LIMIT),
    "gemma2": lambda: hf.Gemma2Config(**SIZES, head_dim=8, sliding_window=LIMIT),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **SIZES,
        head_dim=8,
        sliding_window=LIMIT,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": lambda: hf.PhiConfig(**SIZES),  # an output layer with a bias
    "phi3_longrope": lambda: hf.Phi3Config(**SIZES, sliding_window=LIMIT, rope_parameters=LONGROPE),
    "llama4": lambda: hf.Llama4TextConfig(
        **FOUR_LAYERS,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=LIMIT,
        floor_scale=LIMIT,
        no_rope_layers=[1, 0, 1, 0],
    ),
    "gpt2": lambda: hf.GPT2Config(
        **OTHER_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),  # learned positions, dropout
    "gpt_neox": lambda: hf.GPTNeoXConfig(**SAME_HEADS),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        **OTHER_NAMES,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=LIMIT,
        max_position_embeddings=64,
    ),
    "bloom": lambda: hf.BloomConfig(**OTHER_NAMES, hidden_size=32, n_layer=2, n_head=4),  # ALiBi
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "granite": lambda: hf.GraniteConfig(**SIZES, logits_scaling=4.0),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **SAME_HEADS,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "gpt_oss": lambda: hf.GptOssConfig(
        **SIZES,
        head_dim=8,
        sliding_window=LIMIT,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=YARN,
    ),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "cohere2": lambda: hf.Cohere2Config(**FOUR_LAYERS, sliding_window=LIMIT),
    "glm4": lambda: hf.Glm4Config(**SIZES, head_dim=8),
    "ministral3": lambda: hf.Ministral3Config(
        **SIZES, head_dim=8, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5}
    ),
    "diffllama": lambda: hf.DiffLlamaConfig(**SIZES),  # attends twice a layer
}


def build(family: str) -> Any:
    """A causal language model with random weights that make its attention matter."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
        for parameter in model.parameters():  # initial weights hide mistakes
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(
                0.3 * torch.rand_like(parameter)
            )
    return model.eval()
