"""Train a small transformer on the Mess3 process, and look at its predictive subspaces at every site.

    python benchmarks/mess3.py --model mess3-model -o benchmarks/results/mess3

The transformer (width 64, MLP 256 with an exact GELU, RMSNorm; `ArceeForCausalLM`) learns from fresh samples
in some four minutes on one core, unless `--model` has been trained before. What is judged is judged exactly,
over every history of the process up to the context's length.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from mess3_note import reproduce
from mess3_process import CONTEXT, TOKENS, Mess3
from rich.console import Console
from rich.progress import track
from transformers import ArceeConfig, ArceeForCausalLM

WIDTH, HIDDEN, LAYERS, HEADS = 64, 256, 1, 4
BATCH, STEPS, WARM_UP = 128, 8000, 0.02  # sequences, steps, share of the steps
LEARNING_RATE, SEED = 2e-3, 0
console = Console(stderr=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="its folder; trained if it does not exist")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"default {LAYERS}")
    options = parser.parse_args()
    process = Mess3()
    if not options.model.exists():
        started = time.monotonic()
        model = train(process, options.steps, options.layers)
        model.save_pretrained(options.model)
        console.print(f"trained in {(time.monotonic() - started) / 60:.1f} minutes")
    model = ArceeForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    console.print(reproduce(process, model, options.output))


def configuration(layers: int) -> ArceeConfig:
    return ArceeConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        hidden_act="gelu",
        mlp_bias=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def train(process: Mess3, steps: int, layers: int = LAYERS, seed: int = SEED) -> ArceeForCausalLM:
    """Adam in float32 on fresh samples, with warm-up and a cosine down to nothing; in evaluation mode."""
    torch.manual_seed(seed)
    model: Any = ArceeForCausalLM(configuration(layers)).float().train()
    # Weights that decay would soon leave an MLP idle that other layers can do without.
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    for step in track(range(steps), "Training", console=console):
        done = step / steps
        for group in optimizer.param_groups:
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            group["lr"] = LEARNING_RATE * min((done + 1 / steps) / WARM_UP, cosine)
        rows = process.sample(BATCH, CONTEXT + 1, generator)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model.eval()


if __name__ == "__main__":
    main()
