"""Benchmark truncated checkpoints beside their original in lm-evaluation-harness, item by item."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from csprune.bench import harness
from csprune.bench.files import KIND, SCHEMA, check_bench_target, items_table, write_bench
from csprune.bench.harness import Options, Scores
from csprune.bench.paired import check_pairs
from csprune.bench.picture import forest
from csprune.bench.report import group_entries, task_entries
from csprune.bench.tables import bench_markdown
from csprune.bench.tasks import Tasks, find_tasks
from csprune.checkpoint import Checkpoint, weights_digest
from csprune.companions import Output, check_made_from, is_output, read_output
from csprune.errors import InputError
from csprune.identity import versions
from csprune.models import DTYPES, LOADING_ERRORS, locate_model, usable_device
from csprune.pages import theme
from csprune.preparation import Progress
from csprune.settings import check_target


@dataclass(frozen=True)
class Contender:
    """A checkpoint to evaluate.

    Attributes:
        name: What the report calls it.
        folder: Where it is.
        output: What csprune did to it; None if it is not csprune's.
    """

    name: str
    folder: Path
    output: Output | None


def bench_job(
    model: str,
    outputs: Sequence[str],
    tasks: Sequence[str],
    out: Path | None,
    progress: Progress,
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    dtype: str | None = None,
    device: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    seed: int | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """`csprune bench`: run tasks on the original and on others, pair their items, write the report.

    One model is in memory at a time. Each is loaded and scored as `lm_eval --model hf --model_args
    pretrained=FOLDER` does it, so its values are those that lm-eval gives by itself.

    Args:
        model: The original: a local folder, a hub id, or "demo".
        outputs: Folders of checkpoints to compare with it: csprune's or any others.
        tasks: Names of tasks, groups and tags of lm-eval's; a comma separates several in one string.
        out: The folder of the report; None to write none.
        progress: Where to show how far it is.
        include_path: A folder of task files.
        limit: The first items of each task only.
        num_fewshot: Examples before each item; by default the task's own number.
        batch_size: Requests at a time.
        dtype: A key of `csprune.models.DTYPES`; by default the checkpoints' own, which must be one.
        device: A torch device; by default CUDA where there is one, as lm-eval's.
        revision: Of the original's hub repository.
        trust_remote_code: Run code that comes with a checkpoint.
        seed: Of lm-eval and of the paired bootstrap; by default lm-eval's own seeds, and 0.
        overwrite: Replace an earlier benchmark in `out`.

    Returns:
        The content of `bench.json`.

    Raises:
        InputError: What can be told before the first model is loaded.
        CspruneError: What shows only then: the models did not answer the same items, for instance.
    """
    if out is not None:
        check_target(out, "folder")
        check_bench_target(out, overwrite)
    contenders = _contenders(model, outputs, revision)
    if limit is not None and limit < 2:
        raise InputError(f"--limit {limit} leaves no standard error: give 2 items at least")
    options = Options(
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        dtype=dtype,
        # lm-eval would quietly take another device.
        device=str(usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)),
        trust_remote_code=trust_remote_code,
        seed=seed,
    )
    _check_dtypes(contenders, dtype)
    _check_bos(contenders, trust_remote_code)
    names = [name.strip() for each in tasks for name in each.split(",") if name.strip()]
    with progress.stage("Loading tasks"):
        # Tasks that make their data by a tokenizer get the original's for every model.
        metadata = {"pretrained": str(contenders[0].folder.resolve())}
        found = find_tasks(names, include_path, metadata)
    if short := [name for name in found.leaves if found.items(name, limit) < 2]:
        raise InputError(f"{', '.join(short)} have less than 2 items: no standard error can be had")
    scores: list[Scores] = []
    for each in contenders:
        with progress.stage(f"Scoring {each.name}") as step:
            scores.append(harness.score(each.folder, found, options, step))
        _check_like_the_original(each, scores, found)
    with progress.stage("Pairing items"):
        report = _report(contenders, found, scores, options)
        report["settings"] |= {
            "tasks": names,
            "include_path": None if include_path is None else str(include_path),
            "revision": revision,
        }
        if out is not None:
            with theme.drawing():
                figure = forest(report)
                pictures = (theme.svg_file(figure), theme.png_file(figure))
            items = items_table([each.name for each in contenders], scores)
            write_bench(out, report, items, bench_markdown(report), pictures)
    return report


def _contenders(model: str, outputs: Sequence[str], revision: str | None) -> list[Contender]:
    """The original first."""
    if not outputs:
        raise InputError("there is nothing to compare the original with: give one OUT at least")
    folders = [locate_model(model, revision=revision)]
    for output in outputs:
        folder = Path(output).expanduser()
        if not folder.is_dir():
            raise InputError(f"there is no folder {output}: give the OUT of `csprune compress`")
        folders.append(folder)
    for place, folder in enumerate(folders):
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder} has no config.json: give the folder of a transformers checkpoint")
        if folder.resolve() in [each.resolve() for each in folders[:place]]:
            raise InputError(f"{outputs[place - 1]} is given twice: compare different checkpoints")
        Checkpoint.open(folder)
        if place and is_output(folder):
            check_made_from(folders[0], str(folder))
    short = [model, *(folder.resolve().name for folder in folders[1:])]
    full = [model, *outputs]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, full, strict=True)]
    return [
        Contender(name, folder, read_output(str(folder)) if is_output(folder) else None)
        for name, folder in zip(names, folders, strict=True)
    ]


def _check_dtypes(contenders: Sequence[Contender], dtype: str | None) -> None:
    """Refuse checkpoints of different dtypes, whose difference would be rounding's too."""
    if dtype is not None:
        if dtype not in DTYPES:
            raise InputError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
        return
    stored = {each.name: _stored_dtype(each.folder) for each in contenders}
    if len(set(stored.values()) - {None}) > 1:
        found = ", ".join(f"{name} {value}" for name, value in stored.items())
        raise InputError(f"the checkpoints are stored in different dtypes ({found}): give one by --dtype")


def _stored_dtype(folder: Path) -> str | None:
    """What a config says of its weights' dtype."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        levels = (config, config.get("text_config") or {})
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / 'config.json'} cannot be read: download the checkpoint again") from error
    return next((level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key)), None)


def _check_bos(contenders: Sequence[Contender], trust_remote_code: bool) -> None:
    """Refuse tokenizers of which one adds a beginning-of-sequence token and another does not."""
    found: dict[str, bool] = {}
    words: list[dict[str, int]] = []
    for each in contenders:
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                each.folder, trust_remote_code=trust_remote_code, local_files_only=True
            )
            begins = tokenizer("a")["input_ids"][:1]
            vocabulary = tokenizer.get_vocab()
        except LOADING_ERRORS as error:
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"{each.folder} has no tokenizer that transformers can load ({reason}): save the model's "
                "tokenizer into the same folder"
            ) from error
        words.append(vocabulary)
        if each.output is not None and vocabulary != words[0]:
            raise InputError(
                f"{each.folder} has another tokenizer than the original: give it the original's files"
            )
        found[each.name] = tokenizer.bos_token_id is not None and begins == [tokenizer.bos_token_id]
    if len(set(found.values())) > 1:
        raise _different_bos(found)


def _different_bos(found: dict[str, Any]) -> InputError:
    policies = ", ".join(f"{name}: {value}" for name, value in found.items())
    return InputError(
        f"the checkpoints differ in whether a prompt begins with a beginning-of-sequence token ({policies}): "
        "give each the original's tokenizer files"
    )


def _check_like_the_original(each: Contender, scores: Sequence[Scores], tasks: Tasks) -> None:
    """Refuse a model that was run unlike the original, as soon as it was."""
    first, last = scores[0].loaded, scores[-1].loaded
    policies = [{k: v for k, v in loaded["bos"].items() if k != "token"} for loaded in (first, last)]
    if policies[0] != policies[1]:
        raise _different_bos({"original": policies[0], each.name: policies[1]})
    if first["dtype"] != last["dtype"]:
        raise InputError(
            f"the original was loaded in {first['dtype']} and {each.name} in {last['dtype']}: give one dtype "
            "by --dtype"
        )
    for name in tasks.leaves:
        check_pairs(name, scores[0].items[name], scores[-1].items[name], each.name)


def _report(
    contenders: Sequence[Contender], tasks: Tasks, scores: Sequence[Scores], options: Options
) -> dict[str, Any]:
    ran = scores[0].results["config"]
    entries = task_entries(tasks, scores, options.seed or 0)
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "settings": {
            "limit": options.limit,
            "num_fewshot": options.num_fewshot,
            "batch_size": options.batch_size,
            "dtype": scores[0].loaded["dtype"],
            "device": scores[0].loaded["device"],
            "trust_remote_code": options.trust_remote_code,
            "seeds": {
                **{name: ran[f"{name}_seed"] for name in ("random", "numpy", "torch", "fewshot")},
                "paired_bootstrap": options.seed or 0,
            },
            "lm_eval_bootstrap_draws": harness.BOOTSTRAP_DRAWS,
        },
        "versions": {**versions(), **harness.versions()},
        "models": [
            {
                "name": each.name,
                "path": str(each.folder),
                "weights_sha256": weights_digest(each.folder),
                "csprune": _truncation(each.output),
                **found.loaded,
            }
            for each, found in zip(contenders, scores, strict=True)
        ],
        "tasks": entries,
        "groups": group_entries(tasks, scores, entries),
    }


def _truncation(output: Output | None) -> dict[str, Any] | None:
    if output is None:
        return None
    return {name: getattr(output, name) for name in ("method", "rank", "removed", "kept")}
