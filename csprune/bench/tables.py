"""The report of a benchmark as tables for a person: Markdown and the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_DASH = "\N{EN DASH}"

# Sentences of one line each, so that none is broken in a terminal of 80 columns.
_LEGEND = (
    "difference: less the original, the same items paired, with its standard error.",
    "+/-: items gained and lost; where none is, the error is not 0 but unknown.",
    "p: McNemar's exact test that an item is as likely to be gained as to be lost.",
    "choice_margin (csprune's): log p(right choice) - max log p(wrong choice), nats.",
    "Every other value is lm-eval's; groups average their tasks as it does.",
)


def bench_table(report: dict[str, Any]) -> Group:
    """The report for the terminal: a table for each checkpoint beside the original; it fits 80 columns."""
    original, *others = report["models"]
    parts: list[RenderableType] = []
    for place, model in enumerate(others):
        body = Table(box=SIMPLE_HEAD, show_edge=False, padding=0)
        body.add_column("task, metric", overflow="fold")
        for heading in ("before", "after", "difference", "+/-", "p"):
            body.add_column(heading, justify="right", no_wrap=True)
        for name, metrics in _sections(report):
            body.add_row(Text(name, style="bold"))
            for metric in metrics:
                own = metric["outputs"][place]
                body.add_row(
                    f"  {metric_name(metric)}",
                    figure(metric["original"]["value"]),
                    figure(own["value"]),
                    f"{figure(own['difference'], '+')} ± {figure(own['difference_stderr'])}",
                    _flips(own),
                    _p_value(own, smallest=0.001),
                )
        parts += [Text(f"{original['name']} and {describe(model)}", style="bold"), Text(), body, Text()]
    return Group(*parts, *(Text(line, style="dim") for line in _LEGEND))


def bench_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown: how it was measured, and a table for each checkpoint beside the original."""
    original, *others = report["models"]
    settings, versions = report["settings"], report["versions"]
    lines = [
        f"# {original['name']} beside {', '.join(model['name'] for model in others)}",
        "",
        f"lm-evaluation-harness {versions['lm_eval']}, transformers {versions['transformers']}, torch "
        f"{versions['torch']}, csprune {versions['csprune']}; {settings['dtype']} on {settings['device']}, "
        f"batch size {settings['batch_size']}, "
        + ("all items" if settings["limit"] is None else f"the first {settings['limit']} items of each task")
        + f"; prompts begin with a BOS token: {_bos(original)}.",
    ]
    headings = (
        "task | metric | items | original | changed | difference | SE | 95% interval | gained | lost | p"
    )
    for place, model in enumerate(others):
        lines += ["", f"## {describe(model)}", "", f"| {headings} |", "|---|---|" + "---:|" * 9]
        for name, metrics in _sections(report):
            for metric in metrics:
                own = metric["outputs"][place]
                low, high = own["difference_ci95"]
                flips = own["flips"] or {}
                cells = [
                    name,
                    metric_name(metric),
                    f"{metric['items']:,}",
                    figure(metric["original"]["value"]),
                    figure(own["value"]),
                    figure(own["difference"], "+"),
                    figure(own["difference_stderr"]),
                    f"[{figure(low, '+')}, {figure(high, '+')}]",
                    str(flips.get("gained", _DASH)),
                    str(flips.get("lost", _DASH)),
                    _p_value(own) or _DASH,
                ]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", " ".join(_LEGEND)]) + "\n"


def describe(model: dict[str, Any]) -> str:
    """A checkpoint's name, with what csprune did to it."""
    made = model["csprune"]
    return f"{model['name']} ({made['method']} {made['rank']:g})" if made else model["name"]


def metric_name(metric: dict[str, Any]) -> str:
    """A metric, with the filter of its answers where it has a name."""
    filter = metric["filter"]
    return metric["metric"] if filter == "none" else f"{metric['metric']} ({filter})"


def figure(value: float, sign: str = "") -> str:
    """Four decimals below ten, then fewer: accuracies, nats, perplexities."""
    if abs(value) < 9.99995:
        return f"{value:{sign}.4f}"
    return f"{value:{sign}.2f}" if abs(value) < 9999.995 else f"{value:{sign}.3g}"


def _sections(report: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Name and metrics of each task, then of each group."""
    for entry in report["tasks"]:
        yield entry["task"], entry["metrics"]
    for entry in report["groups"]:
        yield f"{entry['group']} (group)", entry["metrics"]


def _flips(own: dict[str, Any]) -> str:
    flips = own["flips"]
    return f"+{flips['gained']} -{flips['lost']}" if flips else ""


def _p_value(own: dict[str, Any], smallest: float = 0.0) -> str:
    flips = own["flips"]
    if flips is None:
        return ""
    return f"{flips['p_value']:.2g}" if flips["p_value"] >= smallest else f"<{smallest:g}"


def _bos(model: dict[str, Any]) -> str:
    kinds = sorted(set(model["bos"]["begins_prompt"].values()))
    return " and ".join("yes" if begins else "no" for begins in kinds) or "no"
