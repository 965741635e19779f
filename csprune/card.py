"""The model card of a truncated checkpoint: what was done, what it cost, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from csprune.tables import markdown

_LOADING = """## Loading

With csprune installed:

```python
import csprune  # registers the truncated head with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```

Without it, the checkpoint's own `csprune_hf.py` does the same:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
```

    lm_eval --model hf --model_args pretrained=FOLDER,trust_remote_code=True --tasks ...

Loading it without either fails (a shape mismatch of the head in transformers, "Unknown quantization type" in
lm-evaluation-harness): the stored head is not the stock class's.
"""


def model_card(details: Mapping[str, Any], report: dict[str, Any] | None, original: str | None) -> str:
    """The README.md of an exported checkpoint.

    Args:
        details: Of the export, as in `report.json` under "export".
        report: Of the evaluation, or None where none was made.
        original: The source's README.md, whose licence, languages and tags are carried over.
    """
    from csprune.demo import DEMO_ALIAS, DEMO_NAME  # as in csprune.models

    front = _front_matter(original)
    tags = front.get("tags")
    tags = [tags] if isinstance(tags, str) else list(tags or [])
    kept_fields = {k: front[k] for k in ("license", "license_name", "license_link", "language") if k in front}
    base = details["base_model"]
    if base == DEMO_ALIAS or Path(base).expanduser().exists():
        # Where it lay concerns nobody else; what it was made of may stand in its own card.
        shown = f"{DEMO_NAME} (see README.original.md)" if base == DEMO_ALIAS else Path(base).resolve().name
        origin = front.get("base_model")
    else:
        shown = origin = base
    metadata = {
        **kept_fields,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        **({"base_model": origin} if origin else {}),
        "tags": [*tags, *(t for t in ("csprune", "low-rank") if t not in tags)],
    }
    sizes = details["sizes"]
    before, after = sizes["before"], sizes["after"]
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).strip(),
        "---",
        "",
        f"# {details['name']}",
        "",
        f"{shown} with a truncated head: {details['removed']} of the {details['removed'] + details['kept']} "
        f"directions that its unembedding reads (rank {details['rank']:g}) were removed by the method "
        f"`{details['method']}` and replaced by their mean "
        "over the calibration text in a corrected bias. The final norm's gain is now part of the head; all "
        "other weights are unchanged.",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| head parameters | {before['head_parameters']:,} | {after['head_parameters']:,} |",
        f"| head bytes read per token | {before['head_bytes']:,} | {after['head_bytes']:,} |",
        f"| weights on disk, bytes | {before['bytes_on_disk']:,} | {after['bytes_on_disk']:,} |",
        "",
    ]
    if details["tied"]:
        lines += [
            "The original's head shares its weight with the input embedding. The truncated head cannot, so "
            "this checkpoint is *larger* on disk; what shrinks is the work and memory traffic of each token.",
            "",
        ]
    lines += ["## What it costs", ""]
    if report is None:
        lines += ["Not measured: `csprune evaluate` does.", ""]
    else:
        lines += [
            markdown(report),
            *_evaluation(report, details),
            "Every figure and its interval is in `report.json`, every document's in `documents.parquet`.",
            "",
        ]
    lines += _calibration(details["calibration"])
    visited, width = details.get("effective_rank"), details["removed"] + details["kept"]
    if visited is not None and visited < width:
        lines += [
            f"**The calibration states span only {visited} of the {width} directions**; the others were "
            "taken as never used. Calibrate on more text.",
            "",
        ]
    lines += [
        _LOADING.replace("FOLDER", details["name"]),
        "The final norm's gain and bias are folded into the head, so `hidden_states[-1]` is the normalised "
        "state without them.",
        "",
        f"Made with csprune {details['versions']['csprune']}, torch {details['versions']['torch']}, "
        f"transformers {details['versions']['transformers']}.",
    ]
    return "\n".join(lines) + "\n"


def _evaluation(report: Mapping[str, Any], details: Mapping[str, Any]) -> list[str]:
    """On what text, and what storing the head in its dtype changes."""
    lines = []
    corpus = report["protocol"].get("evaluation")
    if corpus:
        lines.append(f"Evaluated on {corpus['documents']} documents of `{corpus['source']}`.")
    if details.get("stored_loss_change") is not None:
        lines.append(
            f"These figures are the truncation's own. With its factors rounded to {details['dtype']}, "
            f"as they are stored here, the loss change is {details['stored_loss_change']:+.4f} nats."
        )
    return [" ".join(lines), ""] if lines else []


def _calibration(calibration: Mapping[str, Any]) -> list[str]:
    corpus = calibration["corpus"]
    text = f"`{corpus['source']}`" if "source" in corpus else "several texts, merged"
    skipped = f", the first {calibration['skip_first']} left out" if calibration["skip_first"] else ""
    return [
        "## Calibration",
        "",
        f"{calibration['fisher_tokens']:,} predictions and {calibration['tokens']:,} states of windows of "
        f"{calibration['sequence_length']} tokens of {text} (positions: {calibration['positions']}{skipped}; "
        f"{'with' if calibration['bos'] else 'without'} a beginning-of-sequence token), the model run in "
        f"{calibration['dtype']}.",
        "",
    ]


def _front_matter(text: str | None) -> dict[str, Any]:
    """The YAML block at the top of a card; nothing where there is none or it is no YAML."""
    if not text or not text.startswith("---\n"):
        return {}
    block = text[4:].split("\n---", 1)[0]
    try:
        value = yaml.safe_load(block)
    except yaml.YAMLError:
        return {}
    return value if isinstance(value, dict) else {}
