"""Train the tests' LayerNorm model: a small GPT-NeoX on the docstrings of the installed packages.

    python benchmarks/train_neox.py --output neox            # the fixture: about 25 minutes on one core
    python benchmarks/train_neox.py --output neox --minutes 2

No small trained model with a LayerNorm can be had without a model hub, and a random one has a norm, a
spectrum and predictions unlike any that was learned. The text is what every installation of csprune for
development has: docstrings of Python's library and of the packages below, read without importing
them. Python's documentation topics are left out, for csprune's own `demo` text is made of them.
The seed is fixed, but other versions of the packages are another text.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

import csprune

# Module -> (package, licence of its text); the order is the order of the text.
PACKAGES = {
    "numpy": ("numpy", "BSD-3-Clause"),
    "scipy": ("scipy", "BSD-3-Clause"),
    "pandas": ("pandas", "BSD-3-Clause"),
    "matplotlib": ("matplotlib", "PSF-based"),
    "sklearn": ("scikit-learn", "BSD-3-Clause"),
    "networkx": ("networkx", "BSD-3-Clause"),
    "sympy": ("sympy", "BSD-3-Clause"),
    "nltk": ("nltk", "Apache-2.0"),
    "torch": ("torch", "BSD-3-Clause"),
    "transformers": ("transformers", "Apache-2.0"),
    "datasets": ("datasets", "Apache-2.0"),
    "huggingface_hub": ("huggingface-hub", "Apache-2.0"),
    "accelerate": ("accelerate", "Apache-2.0"),
    "peft": ("peft", "Apache-2.0"),
}
# pydoc_data is the `demo` text; the others are not the package's own prose.
LEFT_OUT = {"pydoc_data", "site-packages", "dist-packages", "test", "tests", "_vendor", "externals"}
SHORTEST = 300  # characters of a docstring that is a document
PROSE = 0.85  # of a paragraph's characters, at least, are letters and spaces
HELD_OUT = 50  # one docstring in so many is kept for judging

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 4096, 192, 4, 4, 128
BATCH, STEPS, WARM_UP = 8, 4500, 0.03  # windows, steps, share of the steps
LEARNING_RATE, BETAS, WEIGHT_DECAY, SEED = 3e-3, (0.9, 0.98), 0.1, 0
END = "<|endoftext|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the folder to write; must not exist")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=STEPS, help=f"default {STEPS}")
    length.add_argument("--minutes", type=float, help="instead of steps: as many as fit")
    options = parser.parse_args()
    if options.output.exists():
        parser.error(f"{options.output} exists: give a new folder")
    if options.steps < 1 or (options.minutes is not None and options.minutes <= 0):
        parser.error("train for at least one step or a fraction of a minute")

    console = Console(stderr=True)
    torch.manual_seed(SEED)
    documents = list(read_docstrings())
    held_out = [text for text in documents if is_held_out(text)]
    training = [text for text in documents if not is_held_out(text)]
    console.print(f"{len(training):,} docstrings to train on, {len(held_out):,} to judge by")
    tokenizer = train_tokenizer(training)
    blocks = pack(tokenizer, training)
    console.print(f"{blocks.numel():,} tokens in blocks of {blocks.shape[1]}")

    model = GPTNeoXForCausalLM(configuration())
    texts = {"held-out docstrings": held_out, "Python's documentation topics (`demo`)": "demo"}
    read = functools.partial(csprune.read_windows, tokenizer, documents=256, sequence_length=CONTEXT)
    windows = {name: read(text) for name, text in texts.items()}
    started = time.monotonic()
    steps = train(model, blocks, options, windows, console)
    minutes = (time.monotonic() - started) / 60

    model.half().save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    # Judged as it lies on disk, in float16.
    stored = AutoModelForCausalLM.from_pretrained(options.output, dtype=torch.float32)
    losses = {name: loss(stored, each) for name, each in windows.items()}
    card = describe(stored, losses, steps=steps, characters=sum(map(len, training)))
    (options.output / "README.md").write_text(card, encoding="utf-8")
    console.print(card)
    console.print(f"{minutes:.1f} minutes, {steps * BATCH * CONTEXT / minutes / 60:,.0f} tokens/s")


# --- The text -------------------------------------------------------------------------------------


def read_docstrings() -> Iterator[str]:
    """The docstrings of some length, prose only, in a fixed order; no paragraph comes twice."""
    seen: set[str] = set()
    for path in source_files():
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # templates, and files for other versions of Python
            continue
        for node in documented(tree):
            paragraphs = (ast.get_docstring(node) or "").split("\n\n")
            new = [text for text in paragraphs if text not in seen and is_prose(text)]
            seen.update(new)
            document = "\n\n".join(new).strip()
            if len(document) >= SHORTEST:
                yield document


def documented(node: Any) -> Iterator[Any]:
    """A module and the classes and functions in it, at any depth, in the order of the file."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield node
    for statement in getattr(node, "body", ()):
        yield from documented(statement)


def source_files() -> Iterator[Path]:
    """The .py files of Python's library and of the packages, sorted within each."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    for module, (package, _) in PACKAGES.items():
        spec = importlib.util.find_spec(module)
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit(f"the package {package} is not installed: run scripts/setup first")
        roots.append(Path(spec.submodule_search_locations[0]))
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            if not LEFT_OUT.intersection(path.relative_to(root).parts):
                yield path


def is_prose(paragraph: str) -> bool:
    """Mostly words: no session of the interpreter, no table, no drawing."""
    letters = sum(character.isalpha() or character.isspace() for character in paragraph)
    return ">>>" not in paragraph and letters >= PROSE * max(len(paragraph), 1)


def is_held_out(text: str) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") % HELD_OUT == 0


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, as Pythia's: nothing is unknown, and nothing is added to a text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=END, eos_token=END, unk_token=END, model_max_length=CONTEXT
    )


def pack(tokenizer: Any, texts: list[str]) -> torch.Tensor:
    """All documents one after another, int64 [blocks, CONTEXT + 1]: inputs and the token after."""
    encoded = tokenizer([text + END for text in texts], verbose=False)["input_ids"]
    stream = torch.cat([torch.tensor(ids) for ids in encoded])
    length = CONTEXT + 1
    return stream[: len(stream) // length * length].view(-1, length)


# --- The model ------------------------------------------------------------------------------------


def configuration() -> GPTNeoXConfig:
    """Pythia's shape, small: untied head without bias, LayerNorm with gain and bias."""
    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        max_position_embeddings=CONTEXT,
        use_parallel_residual=True,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def train(
    model: GPTNeoXForCausalLM,
    blocks: torch.Tensor,
    options: argparse.Namespace,
    windows: dict[str, csprune.Windows],
    console: Console,
) -> int:
    """AdamW in float32 with warm-up and a cosine down to nothing; the number of steps done."""
    # A norm's gain or a bias that decays would not be what the text taught it.
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS)
    columns = (
        TextColumn("Training"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%, loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    generator = torch.Generator().manual_seed(SEED)
    started, step, reported, average = time.monotonic(), 0, 0, math.log(VOCABULARY)
    order = torch.empty(0, dtype=torch.int64)
    model.train()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=1.0, loss=average)
        while True:
            elapsed = (time.monotonic() - started) / 60
            done = step / options.steps if options.minutes is None else elapsed / options.minutes
            if int(10 * done) > reported:
                reported = int(10 * done)
                judged = ", ".join(f"{name} {loss(model, each):.3f}" for name, each in windows.items())
                console.print(f"{step} steps, {elapsed:.1f} minutes: {judged}")
            if done >= 1:
                return step
            for group in optimizer.param_groups:
                cosine = 0.5 * (1 + math.cos(math.pi * done))
                group["lr"] = LEARNING_RATE * min((done + 1e-3) / WARM_UP, cosine)
            if len(order) < BATCH:
                order = torch.randperm(len(blocks), generator=generator)
            rows, order = blocks[order[:BATCH]], order[BATCH:]
            nats = token_loss(model, rows[:, :-1], rows[:, 1:])
            nats.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            average += (nats.item() - average) / min(step + 1, 100)
            step += 1
            progress.update(task, completed=done, loss=average)


def token_loss(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean nats for each token."""
    logits = model(input_ids=inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def loss(model: Any, windows: csprune.Windows) -> float:
    batches = zip(windows.input_ids.split(32), windows.target_ids.split(32), strict=True)
    total = sum(float(token_loss(model, inputs, targets)) * len(inputs) for inputs, targets in batches)
    return total / len(windows)


def describe(model: Any, losses: dict[str, float], *, steps: int, characters: int) -> str:
    """The card of the folder."""
    norm, size = model.gpt_neox.final_layer_norm, model.num_parameters() / 1e6
    both = (norm.weight, norm.bias)
    gain, bias = (f"{p.min():.2f} to {p.max():.2f} (standard deviation {p.std():.2f})" for p in both)
    rows = [f"| {name} | {value:.3f} |" for name, value in losses.items()]
    sources = [f"- Python {platform.python_version()}, its library (PSF-2.0)"]
    for package, licence in PACKAGES.values():
        sources.append(f"- {package} {importlib.metadata.version(package)} ({licence})")
    return f"""\
# A small GPT-NeoX with learned LayerNorms

For the tests of csprune; made by `benchmarks/train_neox.py`: {size:.2f} million parameters
({LAYERS} layers, width {WIDTH}, vocabulary {VOCABULARY:,}, head untied), stored in float16. Trained for
{steps:,} steps of {BATCH * CONTEXT:,} tokens with AdamW, without weight decay on gains and biases.

| text, {CONTEXT}-token windows | loss, nats for each token |
|---|---|
{chr(10).join(rows)}

The final norm's gain is {gain}, its bias {bias}.

## Text

{characters / 1e6:.1f} million characters: prose paragraphs of docstrings of the packages below, all of them
under licences that permit use and redistribution with notice. Held out: one docstring in {HELD_OUT},
and all of Python's documentation topics (`pydoc_data`).

{chr(10).join(sources)}
"""


if __name__ == "__main__":
    main()
