"""Tiny models of many families, whose windows, chunks and RoPE limits are shorter than the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

LIMIT = 8
"""Tokens of each window and chunk, and of the shorter of two sets of rotary frequencies."""

VOCABULARY = 64

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
HEADS_OF_8 = {**SIZES, "head_dim": 8}
OTHER_NAMES = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
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
WINDOW = {"sliding_window": LIMIT}
WINDOW_THEN_FULL = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_ATTENTION = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
STATE = {**OTHER_NAMES, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}

FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_sliding": lambda: hf.Qwen2Config(
        **FOUR_LAYERS, use_sliding_window=True, sliding_window=LIMIT, max_window_layers=2
    ),
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=16),
    "qwen3": lambda: hf.Qwen3Config(**HEADS_OF_8),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**HEADS_OF_8, **EXPERTS),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **{**FOUR_LAYERS, "head_dim": 8},
        **EXPERTS,
        **LINEAR_ATTENTION,
        shared_expert_intermediate_size=16,
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**{**FOUR_LAYERS, "head_dim": 8}, **LINEAR_ATTENTION),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **{**FOUR_LAYERS, "head_dim": 8},
        **EXPERTS,
        **LINEAR_ATTENTION,
        shared_expert_intermediate_size=16,
    ),
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "llama3_rope": lambda: hf.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "llama_dynamic_rope": lambda: hf.LlamaConfig(
        **{**SIZES, "max_position_embeddings": LIMIT},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **FOUR_LAYERS,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=LIMIT,
        floor_scale=LIMIT,
        no_rope_layers=[1, 0, 1, 0],
    ),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=LIMIT),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, **LOCAL_EXPERTS, sliding_window=LIMIT),
    "ministral": lambda: hf.MinistralConfig(**HEADS_OF_8, **WINDOW_THEN_FULL),
    "ministral3": lambda: hf.Ministral3Config(
        **HEADS_OF_8, rope_parameters={**YARN, "llama_4_scaling_beta": 0.5}
    ),
    "gemma": lambda: hf.GemmaConfig(**HEADS_OF_8),
    "gemma2": lambda: hf.Gemma2Config(
        **HEADS_OF_8, sliding_window=LIMIT, attn_logit_softcapping=0.5, final_logit_softcapping=0.8
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**HEADS_OF_8, **WINDOW_THEN_FULL),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **{**FOUR_LAYERS, "head_dim": 8},
        **WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **{**FOUR_LAYERS, "head_dim": 8},
        **WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        global_head_dim=8,
    ),
    "phi": lambda: hf.PhiConfig(**SIZES),  # an output layer with a bias
    "phi3": lambda: hf.Phi3Config(**SIZES, sliding_window=LIMIT),
    "phi3_longrope": lambda: hf.Phi3Config(
        **SIZES,
        sliding_window=LIMIT,
        original_max_position_embeddings=LIMIT,
        rope_parameters=LONGROPE,
    ),
    "phimoe": lambda: hf.PhimoeConfig(**SIZES, **LOCAL_EXPERTS, sliding_window=LIMIT),
    "gpt_oss": lambda: hf.GptOssConfig(
        **HEADS_OF_8, **LOCAL_EXPERTS, sliding_window=LIMIT, rope_parameters=YARN
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **SAME_HEADS, **LATENT, **ROUTED_EXPERTS, topk_method="greedy"
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **SAME_HEADS,
        **LATENT,
        **ROUTED_EXPERTS,
        rope_parameters={**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek_v32": lambda: hf.DeepseekV32Config(
        **SAME_HEADS,
        **{**ROUTED_EXPERTS, "q_lora_rank": 16, "kv_lora_rank": 16},
        index_head_dim=64,
        index_n_heads=2,
    ),
    "gpt2": lambda: hf.GPT2Config(
        **OTHER_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),  # learned positions, dropout
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(
        **OTHER_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
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
    "gptj": lambda: hf.GPTJConfig(
        **OTHER_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
    ),
    "codegen": lambda: hf.CodeGenConfig(
        **OTHER_NAMES, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
    ),
    "opt": lambda: hf.OPTConfig(**{**SIZES, "pad_token_id": 1}, ffn_dim=48, word_embed_proj_dim=32),
    "falcon": lambda: hf.FalconConfig(**SIZES, alibi=False),
    "falcon_new": lambda: hf.FalconConfig(
        **SIZES, alibi=False, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon_alibi": lambda: hf.FalconConfig(**SIZES, alibi=True, multi_query=False),
    "bloom": lambda: hf.BloomConfig(**OTHER_NAMES, hidden_size=32, n_layer=2, n_head=4),  # ALiBi
    "mpt": lambda: hf.MptConfig(
        **OTHER_NAMES, d_model=32, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64
    ),
    "stablelm": lambda: hf.StableLmConfig(**SIZES),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZES, sliding_window=LIMIT),
    "olmo": lambda: hf.OlmoConfig(**SIZES, clip_qkv=0.5),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "olmo3": lambda: hf.Olmo3Config(**SIZES, **WINDOW_THEN_FULL),
    "olmoe": lambda: hf.OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "granite": lambda: hf.GraniteConfig(**SIZES, logits_scaling=4.0),
    "granitemoe": lambda: hf.GraniteMoeConfig(**SIZES, **LOCAL_EXPERTS),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **SIZES,
        **LOCAL_EXPERTS,
        shared_intermediate_size=48,
        layer_types=["mamba", "attention"],
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
    ),
    "cohere": lambda: hf.CohereConfig(**SIZES, logit_scale=0.5),
    "cohere2": lambda: hf.Cohere2Config(**FOUR_LAYERS, **WINDOW, logit_scale=0.5),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES, no_rope_layers=[1, 0]),
    "exaone4": lambda: hf.Exaone4Config(**SIZES, **WINDOW_THEN_FULL),
    "nemotron": lambda: hf.NemotronConfig(**HEADS_OF_8),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **{**HEADS_OF_8, "num_hidden_layers": 3},
        hybrid_override_pattern="M*-",
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=1,
    ),
    "glm": lambda: hf.GlmConfig(**HEADS_OF_8),
    "glm4": lambda: hf.Glm4Config(**HEADS_OF_8),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**HEADS_OF_8, **ROUTED_EXPERTS),
    "minimax": lambda: hf.MiniMaxConfig(
        **HEADS_OF_8,
        **LOCAL_EXPERTS,
        block_size=LIMIT,
        layer_types=["linear_attention", "full_attention"],
    ),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**HEADS_OF_8, **LOCAL_EXPERTS),
    "ernie4_5": lambda: hf.Ernie4_5Config(**HEADS_OF_8),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=1
    ),
    "hunyuan_v1_dense": lambda: hf.HunYuanDenseV1Config(**HEADS_OF_8),
    "seed_oss": lambda: hf.SeedOssConfig(**HEADS_OF_8),
    "apertus": lambda: hf.ApertusConfig(**SIZES),
    "arcee": lambda: hf.ArceeConfig(**SIZES),
    "dots1": lambda: hf.Dots1Config(**HEADS_OF_8, **ROUTED_EXPERTS, n_shared_experts=1),
    "diffllama": lambda: hf.DiffLlamaConfig(**SIZES),  # attends twice a layer
    "lfm2": lambda: hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
    "jamba": lambda: hf.JambaConfig(
        **SIZES,
        num_experts=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "mamba": lambda: hf.MambaConfig(**STATE, time_step_rank=4),
    "mamba2": lambda: hf.Mamba2Config(
        **STATE, num_heads=8, head_dim=8, n_groups=1, chunk_size=LIMIT
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **{**HEADS_OF_8, "num_hidden_layers": 3},
        attention_window_size=LIMIT,
        lru_width=32,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(
        **HEADS_OF_8,
        mamba_d_ssm=64,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=LIMIT,
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **SIZES, **LINEAR_ATTENTION, layer_types=["linear_attention", "full_attention"]
    ),
    "kimi_linear": lambda: hf.KimiLinearConfig(
        **SAME_HEADS,
        **LOCAL_EXPERTS,
        **{**LATENT, "q_lora_rank": None},
        moe_intermediate_size=16,
        linear_head_dim=8,
        linear_num_heads=4,
        layer_types=["linear_attention", "full_attention"],
    ),
    "zamba2": lambda: hf.Zamba2Config(
        **SAME_HEADS,
        layers_block_type=["linear_attention", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        chunk_size=LIMIT,
        use_mamba_kernels=False,
    ),
    "xlstm": lambda: hf.xLSTMConfig(
        **OTHER_NAMES,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        chunk_size=LIMIT,
        ffn_round_up_to_multiple_of=8,
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(**SAME_HEADS, **LATENT),
    "glm4_moe_lite": lambda: hf.Glm4MoeLiteConfig(**SAME_HEADS, **LATENT, **ROUTED_EXPERTS),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashConfig(
        **{**HEADS_OF_8, **ROUTED_EXPERTS, **WINDOW_THEN_FULL},
        v_head_dim=12,
        mlp_layer_types=["sparse", "dense"],
    ),
    "minimax_m3": lambda: hf.MiniMaxM3VLTextConfig(
        **HEADS_OF_8,
        **LOCAL_EXPERTS,
        index_block_size=2,
        index_topk_blocks=2,
        layer_types=["full_attention", "minimax_m3_sparse"],
    ),
    "nanochat": lambda: hf.NanoChatConfig(**HEADS_OF_8),
    "modernbert_decoder": lambda: hf.ModernBertDecoderConfig(
        **SIZES,
        cls_token_id=0,
        sep_token_id=0,
        local_attention=2 * LIMIT,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "bert": lambda: hf.BertConfig(**SIZES),  # each token attends to all
    "rwkv": lambda: hf.RwkvConfig(
        **OTHER_NAMES, hidden_size=32, num_hidden_layers=2, context_length=64
    ),
}


GENTLER = {"gemma4": 2.0, "mamba": 2.0, "minicpm3": 2.0, "recurrent_gemma": 2.0, "rwkv": 1.5}
"""They multiply rounding: with larger weights float32 is no longer near float64."""

OWN_ATTENTION = {"falcon_alibi"}
"""transformers' plain attention rounds its bias to bfloat16, and so differs from its fast one."""


def build(family: str) -> Any:
    """A causal language model with random weights that make its attention matter."""
    scale = GENTLER.get(family, 4.0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32)
        for parameter in model.parameters():  # initial weights hide mistakes
            parameter.mul_(scale) if parameter.dim() > 1 else parameter.add_(
                0.3 * torch.rand_like(parameter)
            )
    return model.eval()
