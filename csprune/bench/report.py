"""The report of a benchmark: every task's and group's metrics with their paired differences."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Sequence
from typing import Any

from csprune.bench.harness import MARGIN, Item, Scores
from csprune.bench.paired import DRAWS, SLOW_DRAWS, Difference, check_value, combine, compare, flips, flips_of
from csprune.bench.tasks import Aggregation, GroupMean, Tasks

_MARGIN_MEAN = Aggregation("mean", statistics.fmean)


def task_entries(tasks: Tasks, scores: Sequence[Scores], seed: int) -> list[dict[str, Any]]:
    """The report's tasks, in lm-eval's order.

    Args:
        tasks: What was run.
        scores: By model, the original first; their items are pairs.
        seed: Of the paired bootstrap.

    Raises:
        CspruneError: A metric that cannot be paired.
    """
    return [_task_entry(name, tasks, scores, seed) for name in tasks.leaves]


def _task_entry(name: str, tasks: Tasks, scores: Sequence[Scores], seed: int) -> dict[str, Any]:
    results = scores[0].results
    config = json.loads(json.dumps(results["configs"][name], default=str))
    for local in ("pretrained", "config_source"):  # paths of this machine: no part of what the task is
        (config.get("metadata") or {}).pop(local, None)
    # A function without a source is written with its address, another one in each process.
    canonical = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(config, sort_keys=True))
    items = scores[0].items[name]
    columns = dict.fromkeys((metric, item.filter) for item in items for metric in item.values)
    return {
        "task": name,
        "version": results["versions"].get(name),
        "num_fewshot": results["n-shot"].get(name),
        "output_type": tasks.leaves[name].OUTPUT_TYPE,
        "items": len({item.doc_id for item in items}),
        "items_in_task": results["n-samples"][name]["original"],
        "config_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "config": config,
        "metrics": [_metric_entry(name, metric, filter, tasks, scores, seed) for metric, filter in columns],
    }


def _metric_entry(
    name: str, metric: str, filter: str, tasks: Tasks, scores: Sequence[Scores], seed: int
) -> dict[str, Any]:
    """A metric under a filter: each model's value, and each difference from the original's."""
    what = f"{metric},{filter} of {name}"
    columns = [column(each.items[name], metric, filter) for each in scores]
    if metric == MARGIN and f"{metric},{filter}" not in scores[0].results["results"][name]:
        aggregation, author, better = _MARGIN_MEAN, "csprune", True
        reported = [_mean(each) for each in columns]
    else:
        aggregation, author = tasks.aggregation(name, metric), "lm_eval"
        better = scores[0].results["higher_is_better"].get(name, {}).get(metric)
        reported = [_reported(each.results["results"][name], metric, filter) for each in scores]
        for values, own in zip(columns, reported, strict=True):
            check_value(what, own["value"], aggregation.function(list(values)), len(values))
    differences = compare(what, aggregation, columns[0], columns[1:], seed)
    outputs: list[dict[str, Any]] = []
    for values, own, change in zip(columns[1:], reported[1:], differences, strict=True):
        flipped = flips(columns[0], values) if aggregation.name == "mean" else None
        outputs.append({**own, **_change(change), "flips": None if flipped is None else vars(flipped)})
    mean = aggregation.name == "mean"
    return {
        "metric": metric,
        "filter": filter,
        "by": author,
        "aggregation": aggregation.name or "of the task's own",
        "higher_is_better": better,
        "items": len(columns[0]),
        "bootstrap_draws": None if mean else SLOW_DRAWS.get(aggregation.name or "", DRAWS),
        "original": reported[0],
        "outputs": outputs,
    }


def _all_flips(parts: Sequence[tuple[int, dict[str, Any]]], place: int) -> dict[str, Any] | None:
    """Those of all tasks together, where each has them."""
    found = [entry["outputs"][place]["flips"] for _, entry in parts]
    if None in found:
        return None
    gained, lost = (sum(each[side] for each in found) for side in ("gained", "lost"))
    return vars(flips_of(gained, lost, sum(entry["items"] for _, entry in parts)))


def column(items: Sequence[Item], metric: str, filter: str) -> list[Any]:
    """What a metric has of each item under a filter."""
    return [each.values[metric] for each in items if each.filter == filter and metric in each.values]


def _reported(results: dict[str, Any], metric: str, filter: str) -> dict[str, Any]:
    """A value and its unpaired standard error as lm-eval gives them; None where it gives none."""
    stderr = results.get(f"{metric}_stderr,{filter}")
    known = isinstance(stderr, int | float)
    return {"value": float(results[f"{metric},{filter}"]), "stderr": float(stderr) if known else None}


def _mean(values: Sequence[float]) -> dict[str, Any]:
    spread = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"value": statistics.fmean(values), "stderr": spread}


def _change(change: Difference) -> dict[str, Any]:
    return {
        "difference": change.value,
        "difference_stderr": change.stderr,
        "difference_ci95": list(change.interval),
    }


def group_entries(
    tasks: Tasks, scores: Sequence[Scores], entries: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The groups that lm-eval aggregates, and the paired difference of what it makes of them.

    A group's value is a mean of its tasks' values; as tasks share no item, the standard errors of their
    differences add as independent ones. `choice_margin` is averaged as the group's first metric is.

    Args:
        tasks: What was run.
        scores: By model, the original first.
        entries: What `task_entries` made of them.

    Raises:
        CspruneError: The tasks do not give a group's value.
    """
    found: list[dict[str, Any]] = []
    for group in tasks.groups:
        leaves = [entry for entry in entries if entry["task"] in tasks.group_leaves(group)]
        means = tasks.group_means(group)
        if not means:
            continue
        if not any(each.metric == MARGIN for each in means):
            means.append(GroupMean(MARGIN, None, means[0].by_size))
        metrics = [entry for mean in means for entry in _group_metrics(group, mean, leaves, scores)]
        found.append(
            {
                "group": group,
                "tasks": [entry["task"] for entry in leaves],
                "version": scores[0].results["versions"].get(group),
                "items": sum(entry["items"] for entry in leaves),
                "metrics": metrics,
            }
        )
    return found


def _group_metrics(
    group: str, mean: GroupMean, leaves: Sequence[dict[str, Any]], scores: Sequence[Scores]
) -> list[dict[str, Any]]:
    """One entry for each filter under which the group's tasks have the metric."""
    own = [(leaf, entry) for leaf in leaves for entry in leaf["metrics"] if entry["metric"] == mean.metric]
    filters = dict.fromkeys(entry["filter"] for _, entry in own)
    found: list[dict[str, Any]] = []
    for filter in filters if mean.filters is None else mean.filters:
        parts = [(leaf["items"], entry) for leaf, entry in own if entry["filter"] == filter]
        if parts:
            found.append(_group_entry(group, mean, filter, parts, scores))
    return found


def _group_entry(
    group: str,
    mean: GroupMean,
    filter: str,
    parts: Sequence[tuple[int, dict[str, Any]]],
    scores: Sequence[Scores],
) -> dict[str, Any]:
    sizes = [items for items, _ in parts]  # what lm-eval weighs by, whatever the metric has
    counts = [entry["items"] for _, entry in parts]
    weights = [items / sum(sizes) if mean.by_size else 1 / len(sizes) for items in sizes]
    first = parts[0][1]
    ours = first["by"] == "csprune"
    models: list[dict[str, Any]] = []
    for place, each in enumerate(scores):
        values = [(entry["original"], *entry["outputs"])[place] for _, entry in parts]
        value = sum(weight * own["value"] for weight, own in zip(weights, values, strict=True))
        if ours:
            spread = [(weight * own["stderr"]) ** 2 for weight, own in zip(weights, values, strict=True)]
            models.append({"value": value, "stderr": sum(spread) ** 0.5})
            continue
        models.append(_reported(each.results["results"][group], mean.metric, filter))
        what = f"{mean.metric},{filter} of the group {group}"
        check_value(what, models[-1]["value"], value, sum(counts))
    outputs: list[dict[str, Any]] = []
    for place, own in enumerate(models[1:]):
        changes = [
            Difference(change["difference"], change["difference_stderr"], tuple(change["difference_ci95"]))
            for change in (entry["outputs"][place] for _, entry in parts)
        ]
        outputs.append(
            {**own, **_change(combine(changes, weights, counts)), "flips": _all_flips(parts, place)}
        )
    return {
        "metric": mean.metric,
        "filter": filter,
        "by": first["by"],
        "aggregation": "mean of tasks by size" if mean.by_size else "mean of tasks",
        "higher_is_better": first["higher_is_better"],
        "items": sum(counts),
        "bootstrap_draws": None,
        "original": models[0],
        "outputs": outputs,
    }
