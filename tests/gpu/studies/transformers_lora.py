"""Time LoRA training steps of Qwen3-8B in transformers and peft.

    python tests/gpu/studies/transformers_lora.py [--compile]

This is the peer of `throughput llama --model qwen3-8b --lora` in docs/results.md. It uses one GPU,
random weights and tokens, bf16, SDPA and fused AdamW, without recomputation.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3Config

SEQUENCE, VOCABULARY = 8192, 151936
WARMUP, STEPS = 2, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = get_peft_model(
            base(),
            LoraConfig(
                r=16,
                lora_alpha=32,
                lora_dropout=0.1,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            ),
        )
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    called = torch.compile(model) if options.compile else model
    seconds = []
    for _ in range(WARMUP + STEPS):
        tokens = torch.randint(0, VOCABULARY, (1, SEQUENCE), device="cuda")
        torch.cuda.synchronize()
        began = time.monotonic()
        called(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    median = statistics.median(seconds[WARMUP:])
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"transformers and peft: {SEQUENCE / median:,.0f} tok/s, {1e3 * median:.1f} ms (median of "
        f"{STEPS}), peak {peak:.1f} GiB"
    )


def base() -> torch.nn.Module:
    """Return a model with random weights of Qwen3-8B's shape (Qwen/Qwen3-8B, config.json)."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "vocab_size": VOCABULARY,
    }
    heads = {
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
    }
    config = Qwen3Config(
        **sizes, **heads, tie_word_embeddings=False, max_position_embeddings=40960, use_cache=False
    )
    return AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.bfloat16
    )


if __name__ == "__main__":
    main()
