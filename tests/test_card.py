"""The model card: a front matter that the hub reads, the figures, and a way to load that works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import exports
import pytest
import tiny
import torch
import yaml
from exports import load, logits

from csprune.card import model_card

DETAILS: dict[str, Any] = {
    "name": "out",
    "base_model": "owner/model",
    "method": "fisher",
    "rank": 0.2,
    "removed": 115,
    "kept": 461,
    "tied": True,
    "sizes": {
        "before": {"head_parameters": 28311552, "head_bytes": 113246208, "bytes_on_disk": 1000},
        "after": {"head_parameters": 22973840, "head_bytes": 91895360, "bytes_on_disk": 2000},
    },
    "calibration": {
        "corpus": {"source": "demo"},
        "skip_first": 0,
        "fisher_tokens": 16384,
        "tokens": 16384,
        "sequence_length": 128,
        "positions": "all",
        "bos": False,
        "dtype": "float32",
    },
    "versions": {"csprune": "0.1.0", "torch": "2", "transformers": "5"},
}


def _front(card: str) -> dict[str, Any]:
    opening, block, _ = card.split("---\n", 2)
    assert opening == ""
    return yaml.safe_load(block)


ORIGINAL = """---
license: other
license_name: gemma
license_link: https://example.org/terms
language: [en, fr]
tags: [chat, low-rank]
base_model: somebody/else
pipeline_tag: text-generation
model-index: [{name: x}]
---
# The original
"""


def test_front_matter_carries_the_licence():
    front = _front(model_card(DETAILS, None, ORIGINAL))
    assert front["license"] == "other" and front["license_name"] == "gemma"
    assert front["license_link"] == "https://example.org/terms"
    assert front["language"] == ["en", "fr"]
    assert front["tags"] == ["chat", "low-rank", "csprune"]  # each once
    assert front["base_model"] == "owner/model"
    assert front["library_name"] == "transformers"
    assert "model-index" not in front  # the original's results are not this model's


@pytest.mark.parametrize(
    "original",
    [None, "", "# No front matter", "---\n: [broken\n---\n", "---\n- a list\n---\n", "---\ntags: one\n"],
)
def test_front_matter_of_an_original_without(original: str | None):
    """No licence is made up where none is stated."""
    front = _front(model_card(DETAILS, None, original))
    assert "license" not in front
    assert {"csprune", "low-rank"} <= set(front["tags"])


def test_a_local_folder_is_no_base_model(tmp_path: Path):
    """Nor does the card tell the world where it lay."""
    card = model_card({**DETAILS, "base_model": str(tmp_path / "..")}, None, None)
    assert "base_model" not in _front(card) and str(tmp_path) not in card
    assert "base_model" not in _front(model_card({**DETAILS, "base_model": "demo"}, None, None))
    made_of = "---\nbase_model: someone/original\n---\n"
    assert (
        _front(model_card({**DETAILS, "base_model": "demo"}, None, made_of))["base_model"]
        == "someone/original"
    )


def test_what_was_done_and_what_it_costs():
    card = model_card(DETAILS, None, None)
    for text in ("115 of the 576", "rank 0.2", "`fisher`", "28,311,552", "91,895,360", "16,384", "`demo`"):
        assert text in card
    assert "*larger* on disk" in card and "Not measured" in card
    assert "*larger* on disk" not in model_card({**DETAILS, "tied": False}, None, None)


def test_the_loading_snippets_work(tmp_path: Path):
    """Each snippet of a real card is run as it stands."""
    source = tiny.save(tiny.make("llama"), tmp_path / "source")
    truncation = exports.truncated(load(source))
    out = exports.export_quickly(source, truncation, tmp_path / "out")
    snippets = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    assert len(snippets) == 2
    for snippet, needle in zip(snippets, ("import csprune", "trust_remote_code=True"), strict=True):
        assert needle in snippet and out.name in snippet
        names: dict[str, Any] = {}
        exec(snippet.replace(f'"{out.name}"', repr(str(out))), names)
        assert torch.allclose(logits(names["model"]), exports.truncated_logits(truncation), atol=1e-4)
        assert len(names["tokenizer"]) == tiny.VOCABULARY
