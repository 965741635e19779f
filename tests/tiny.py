"""Tiny random causal LMs, a tiny tokenizer and pseudo-English text; independent of the package.

No convenient zeros: every norm gain, bias, soft cap and logit scale is random or odd, so that code
which forgets one of them gives visibly wrong numbers; V = 97 is prime and differs from every other
size. `parts` names by hand where each model keeps its readout (the answer that the package has to
find by itself).
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, processors

VOCABULARY, WIDTH, LAYERS, POSITIONS = 97, 32, 2, 64
# Standard deviation of the logits over the vocabulary: the most likely token has probability one
# half, more or less, and the next ones are not negligible.
SPREAD = 3.0

_LLAMA_LIKE = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
_NEOX_LIKE = {k: v for k, v in _LLAMA_LIKE.items() if k != "num_key_value_heads"}
_OPT_LIKE = {
    "hidden_size": WIDTH,
    "ffn_dim": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "dropout": 0.0,
}
_HEAD_DIM = {"head_dim": 8}
_GEMMA = {**_LLAMA_LIKE, **_HEAD_DIM, "query_pre_attn_scalar": 8, "sliding_window": 16}
_BERT = {**_NEOX_LIKE, "type_vocab_size": 2}

# kind -> (model class, configuration class, settings)
_RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA_LIKE, "tie_word_embeddings": False}),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_LLAMA_LIKE, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA_LIKE),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA_LIKE, **_HEAD_DIM}),
    "qwen3_tied": (
        "Qwen3ForCausalLM",
        "Qwen3Config",
        {**_LLAMA_LIKE, **_HEAD_DIM, "tie_word_embeddings": True},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_GEMMA, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA_LIKE, "sliding_window": None}),
    "phi": ("PhiForCausalLM", "PhiConfig", _NEOX_LIKE),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _NEOX_LIKE),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"n_embd": WIDTH, "n_inner": 48, "n_layer": LAYERS, "n_head": 4, "n_positions": POSITIONS},
    ),
    "opt": ("OPTForCausalLM", "OPTConfig", {**_OPT_LIKE, "do_layer_norm_before": True}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {
            "hidden_size": WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "max_position_embeddings": POSITIONS,
        },
    ),
    "cohere": ("CohereForCausalLM", "CohereConfig", {**_LLAMA_LIKE, "logit_scale": 0.3125}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {**_LLAMA_LIKE, "logits_scaling": 8.0}),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _LLAMA_LIKE),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _LLAMA_LIKE),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": 4},
    ),
    # To be refused.
    "bert_masked": ("BertLMHeadModel", "BertConfig", {**_BERT, "is_decoder": False}),
    "bert_mlm": ("BertForMaskedLM", "BertConfig", {**_BERT, "is_decoder": False}),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "d_model": WIDTH,
            "d_ff": 48,
            "d_kv": 8,
            "num_layers": LAYERS,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "opt_no_norm": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_OPT_LIKE, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
}
NEGATIVE_KINDS = ("bert_masked", "bert_mlm", "t5", "opt_no_norm")
KINDS = tuple(kind for kind in _RECIPES if kind not in NEGATIVE_KINDS)


def make(kind: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random model in eval mode, float32; the global random state is left as it was.

    Args:
        kind: one of KINDS (ordinary causal LMs) or NEGATIVE_KINDS (to be refused).
        seed: the same seed gives the same weights.
        **overrides: settings of the configuration class.
    """
    model_class, config_class, settings = _RECIPES[kind]
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = getattr(hf, config_class)(**{"vocab_size": VOCABULARY, **special, **settings, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(hf, model_class)(config).float().eval()
        with torch.no_grad():
            for parameter in model.parameters():  # tied ones are listed once
                if parameter.ndim == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(8.0)
            if kind in KINDS:
                _spread_logits(model)
    return model


def _spread_logits(model: Any) -> None:
    """Scale the final norm so that the logits (before a cap) spread by SPREAD.

    The norm rather than the head: a tied embedding that grew would drown the blocks, and the model
    would predict its own input.
    """
    found = parts(model)
    minus_one = float(model.config.model_type.startswith("gemma"))  # stored as the gain minus 1
    ids = torch.randint(4, model.config.vocab_size, (8, 32))
    seen: list[torch.Tensor] = []
    hook = found.head.register_forward_hook(lambda _module, _args, out: seen.append(out))
    for _ in range(3):  # the biases do not grow with the gain, so one step is not enough
        model(input_ids=ids)
        scale = SPREAD / (found.factor * float(seen[-1].std(dim=-1).mean()))
        found.norm.weight.copy_(scale * (found.norm.weight + minus_one) - minus_one)
    hook.remove()


@dataclass(frozen=True)
class Parts:
    """Where a tiny model keeps its readout, and what the readout is (float64 tensors).

    `gamma` is the effective gain (Gemma: the stored value plus 1). `norm_name` and `head_name` are
    module paths in the model.
    """

    norm_name: str
    head_name: str
    norm: Any  # modules
    head: Any
    kind: str
    eps: float
    gamma: torch.Tensor
    beta: torch.Tensor | None
    weight: torch.Tensor
    bias: torch.Tensor | None
    factor: float
    cap: float | None


_NORMS = {  # model_type -> (the final norm's path, its kind); the rest: model.norm, RMSNorm
    "phi": ("model.final_layernorm", "layernorm"),
    "gpt_neox": ("gpt_neox.final_layer_norm", "layernorm"),
    "gpt2": ("transformer.ln_f", "layernorm"),
    "opt": ("model.decoder.final_layer_norm", "layernorm"),
    "falcon": ("transformer.ln_f", "layernorm"),
    "cohere": ("model.norm", "layernorm"),
    "stablelm": ("model.norm", "layernorm"),
    "bloom": ("transformer.ln_f", "layernorm"),
}


def parts(model: Any) -> Parts:
    """The readout of a model of `make(kind)`, kind in KINDS, named by hand."""

    def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.detach().double().clone()

    config = model.config
    norm_name, kind = _NORMS.get(config.model_type, ("model.norm", "rmsnorm"))
    head_name = "embed_out" if hasattr(model, "embed_out") else "lm_head"
    norm, head = model.get_submodule(norm_name), model.get_submodule(head_name)
    gamma, weight = double(norm.weight), double(head.weight)
    assert gamma is not None and weight is not None
    if config.model_type.startswith("gemma"):
        gamma = gamma + 1.0
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    factor = getattr(config, "logit_scale", None) or 1.0
    factor /= getattr(config, "logits_scaling", None) or 1.0
    return Parts(
        norm_name=norm_name,
        head_name=head_name,
        norm=norm,
        head=head,
        kind=kind,
        eps=float(eps),
        gamma=gamma,
        beta=double(getattr(norm, "bias", None)),
        weight=weight,
        bias=double(head.bias),
        factor=float(factor),
        cap=getattr(config, "final_logit_softcapping", None),
    )


def tokenizer(vocab_size: int = VOCABULARY, bos: bool = False) -> hf.PreTrainedTokenizerFast:
    """A character-level tokenizer with ids below `vocab_size`; what it lacks becomes `<unk>`.

    Ids 0 to 3 are `<pad> <s> </s> <unk>`; up to 93 characters follow, then, where `vocab_size` is
    above 97, pairs of lower-case letters as BPE merges. A vocabulary of less than 97 lacks the last
    characters.

    Args:
        vocab_size: number of tokens, `len(tokenizer)`, at least 8 and at most 773.
        bos: put `<s>` before every text, by a post-processor as real tokenizers do.
    """
    lower = "etaoinshrdlcumwfgypbvkjxqz"
    # Of printable ASCII only ~ ` ^ are missing: 93 characters in all, with the newline.
    characters = " " + lower + "\n.,;:'\"!?-()" + lower.upper() + "0123456789" + "_/*+=<>[]{}@#$%&\\|"
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    pairs = [(a, b) for a in lower for b in lower]
    room = vocab_size - len(special)
    merges = pairs[: max(0, room - len(characters))]
    tokens = [*special, *characters[:room], *(a + b for a, b in merges)]
    if len(tokens) != vocab_size or vocab_size < 8:
        raise ValueError(f"vocab_size {vocab_size} is not between 8 and 773")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    if bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def save(
    model: Any,
    folder: str | Path,
    tokenizer: hf.PreTrainedTokenizerFast | str | None = "plain",
    **save_arguments: Any,
) -> Path:
    """Save model and tokenizer as `from_pretrained` reads them; gives the folder.

    Args:
        model: a model of `make`.
        folder: created if need be.
        tokenizer: "plain", "bos" (of the model's vocabulary size), a tokenizer, or None for none.
        **save_arguments: for `model.save_pretrained`, such as `max_shard_size="10KB"`.
    """
    folder = Path(folder)
    model.save_pretrained(folder, **save_arguments)
    if isinstance(tokenizer, str):
        if tokenizer not in ("plain", "bos"):
            raise ValueError(f"tokenizer {tokenizer!r} is neither 'plain' nor 'bos'")
        tokenizer = _tokenizer(model.config.vocab_size, bos=tokenizer == "bos")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


_tokenizer = tokenizer  # `save` has a parameter of that name

_WORDS = re.findall(
    r"\w+",
    """
    the a this every some no old new small bright river stone city table window letter engine
    garden teacher number winter machine paper road bridge sailor question answer moves holds
    finds writes builds reads opens measures follows quickly slowly often never under over
    beside after before because while and but with without green quiet heavy simple careful
    eight twelve Paris London
    """,
)


def texts(n: int, seed: int = 0, characters: int = 600) -> list[str]:
    """`n` distinct pseudo-English documents of one paragraph, `characters` or a little more each.

    The first ones do not depend on `n`. No blank line inside: each stays one piece of a text file
    cut at blank lines.
    """
    generator = random.Random(seed)
    documents: list[str] = []
    for index in range(n):
        sentences = [f"Document {index} of series {seed} begins here."]
        while sum(map(len, sentences)) + len(sentences) - 1 < characters:
            words = generator.choices(_WORDS, k=generator.randint(4, 12))
            sentences.append(" ".join(words).capitalize() + generator.choice(".....?!"))
        documents.append(" ".join(sentences))
    return documents
