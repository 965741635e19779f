"""Tasks of every kind of aggregation, and folders of tiny models, for the tests of benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from exports import export_quickly, truncated

TASKS = Path(__file__).parents[1] / "benchmarks/tasks"
AGREEMENT = "csprune_agreement"

_DATA = '''
import json
from pathlib import Path
from datasets import Dataset

def load(count=12, shift=0, **_metadata):
    words = "river stone city table window letter engine garden teacher number".split()
    rows = [
        {
            "place": i,
            "text": f"{i} the {words[i % 10]} holds {words[(3 * i + shift) % 10]} and {words[(7 * i) % 10]}",
            "choices": [words[(i + 1) % 10], words[(i + 5) % 10]],
            "label": (i // 2) % 2,
        }
        for i in range(count)
    ]
    return {"test": Dataset.from_list(rows)}

def by_pretrained(pretrained, **_metadata):
    """Data that depend on the model, as some of lm-eval's tasks make them."""
    return load(count=len(Path(pretrained).name))

def length(doc, results):
    return {"length": len(results[0])}

def middle(values):
    return sorted(values)[len(values) // 2]
'''
_COMMON = "custom_dataset: !function data.load\ntest_split: test\n"
_TASKS = {
    "tiny_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "tiny_choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "tiny_mcc": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: label
metric_list:
  - metric: mcc
""",
    "tiny_generate": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "e"
generation_kwargs: {max_gen_toks: 3, until: ["."]}
filter_list:
  - name: first
    filter:
      - function: regex
        regex_pattern: "([a-z])"
      - function: take_first
  - name: whole
    filter:
      - function: take_first
metric_list:
  - metric: exact_match
""",
    "tiny_own": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "e"
generation_kwargs: {max_gen_toks: 9, until: ["."]}
process_results: !function data.length
metric_list:
  - metric: length
    aggregation: !function data.middle
    higher_is_better: true
""",
}


def write_tasks(folder: Path) -> Path:
    """A folder of tasks with data of their own, one for each kind of aggregation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.py").write_text(_DATA)
    for name, body in _TASKS.items():
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_COMMON}{body}")
    (folder / "tiny_group.yaml").write_text(
        "group: tiny_group\ntask: [tiny_choice, tiny_more]\n"
        "aggregate_metric_list:\n  - {metric: acc, weight_by_size: false}\n"
    )
    made = f"task: tiny_made\n{_COMMON}{_TASKS['tiny_choice']}".replace("data.load", "data.by_pretrained")
    (folder / "tiny_made.yaml").write_text(made)
    more = _TASKS["tiny_choice"] + "dataset_kwargs: {count: 20, shift: 1}\n"
    (folder / "tiny_more.yaml").write_text(f"task: tiny_more\n{_COMMON}{more}")
    return folder


def make_models(folder: Path) -> tuple[Path, Path]:
    """A tiny model's folder, and an export of it with half of its directions removed."""
    source = tiny.save(tiny.make("llama"), folder / "source")
    export_quickly(source, truncated(tiny.make("llama"), "singular", 0.5), folder / "out")
    return source, folder / "out"


def broken_model(folder: Path) -> Path:
    """A model whose every logit of one token is NaN."""
    model: Any = tiny.make("llama")
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    return tiny.save(model, folder)


@contextmanager
def brief() -> Iterator[None]:
    """Without lm-eval's description of the machine, which takes a second or more for every model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda _results: None)
        yield
