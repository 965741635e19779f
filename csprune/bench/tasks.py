"""Tasks of lm-evaluation-harness, found and loaded before any model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from csprune.bench.quiet import quiet
from csprune.errors import InputError


@dataclass(frozen=True)
class Aggregation:
    """How a metric's items become its value.

    Attributes:
        name: lm-eval's name of it; None for a function of the task's own.
        function: Of the list of an item's values each.
    """

    name: str | None
    function: Callable[[list[Any]], float]


@dataclass(frozen=True)
class GroupMean:
    """A group's value: a mean of its tasks'.

    Attributes:
        metric: Its name.
        filters: Of the answers; None for all that there are.
        by_size: Whether a task counts as often as it has items, or once.
    """

    metric: str
    filters: tuple[str, ...] | None
    by_size: bool


@dataclass(frozen=True)
class Tasks:
    """What lm-eval is asked for.

    Attributes:
        names: Of tasks, groups and tags, without wildcards.
        leaves: lm-eval's task objects that have items, by name.
        groups: lm-eval's groups, by name.
        manager: lm-eval's own, that found them.
    """

    names: tuple[str, ...]
    leaves: dict[str, Any]
    groups: dict[str, Any]
    manager: Any

    def items(self, name: str, limit: int | None = None) -> int:
        """How many items of a task are evaluated."""
        there = len(self.leaves[name].eval_docs)
        return there if limit is None else min(limit, there)

    def aggregation(self, name: str, metric: str) -> Aggregation:
        """How a task makes a metric's value of its items; lm-eval's mean where the task does not say."""
        from lm_eval.api.metrics import mean
        from lm_eval.api.registry import AGGREGATION_REGISTRY

        function = self.leaves[name].aggregation().get(metric, mean)
        known = {value: key for key, value in AGGREGATION_REGISTRY.items()}
        return Aggregation(known.get(function), function)

    def group_leaves(self, group: str) -> list[str]:
        """The names of all tasks in a group, those of its groups too."""
        return [task.task_name for task in self.groups[group].get_all_tasks()]

    def group_means(self, group: str) -> list[GroupMean]:
        """Which metrics a group aggregates, and how."""
        return [
            GroupMean(
                each.metric,
                None if each.filter_list is None else tuple(each.filter_list),
                each.weight_by_size,
            )
            for each in self.groups[group].aggregate_metric_list or ()
        ]


def find_tasks(
    names: Sequence[str], include_path: Path | None = None, metadata: dict[str, Any] | None = None
) -> Tasks:
    """Find tasks by name and load their data.

    With a folder of task files lm-eval's own thousands are read only if a name is not in that folder.

    Args:
        names: Of tasks, groups and tags; `*` and `?` stand for anything, as on lm-eval's command line.
        include_path: A folder of task files; its tasks come before lm-eval's own of the same name.
        metadata: What tasks that make their data are told, such as the model they are made for.

    Raises:
        InputError: No such folder or task, a task that cannot be loaded (offline, for instance), or one that
            csprune does not run: with images or sound, or that executes what the model writes.
    """
    names = list(dict.fromkeys(names))
    if not names:
        raise InputError("no task was named: give --tasks")
    if include_path is not None and not include_path.is_dir():
        raise InputError(f"there is no folder {include_path}: --include-path takes a folder of task files")
    with quiet():
        own = None if include_path is None else _manager(include_path, False, metadata)
        found = None if own is None else _load_own(names, own)
        if found is None:
            there = "" if own is None else f"{include_path} has {', '.join(own.all_tasks) or 'none'}; "
            found = _load(names, _manager(include_path, True, metadata), there)
    for name, task in found.leaves.items():
        if getattr(task, "MULTIMODAL", False):
            raise InputError(f"the task {name} needs images or sound: csprune compares language models")
        if getattr(task, "UNSAFE_CODE", False):
            raise InputError(
                f"the task {name} runs code that the model writes: csprune does not run such tasks"
            )
    return found


def _manager(include_path: Path | None, defaults: bool, metadata: dict[str, Any] | None) -> Any:
    """lm-eval's index of a folder's tasks, after its own if they are wanted."""
    from lm_eval.tasks import TaskManager

    folder = None if include_path is None else str(include_path)
    return TaskManager(include_path=folder, include_defaults=defaults, metadata=metadata)


def _load_own(names: list[str], own: Any) -> Tasks | None:
    """The tasks, if the folder has all that is needed."""
    if not all(own.match_tasks([name]) for name in names):
        return None
    try:
        return _load(names, own, "")
    except InputError:  # a group may name lm-eval's tasks; what is wrong either way is said the second time
        return None


def _load(names: list[str], manager: Any, there: str) -> Tasks:
    """Load what a manager knows; `there` says in a message which tasks the user has."""
    matched: list[str] = []
    for name in names:
        if not (matches := manager.match_tasks([name])):
            raise InputError(f"there is no task {name!r}: {there}`lm_eval ls tasks` lists lm-eval's own")
        matched += matches
    matched = list(dict.fromkeys(matched))
    try:
        loaded = manager.load(matched)
    except Exception as error:  # a task runs code of its own, and its data come from anywhere
        reason = " ".join(str(error).split()) or type(error).__name__
        if reason.startswith("Duplicate task"):
            raise InputError(f"a task is named twice ({reason}): give the group or the task") from error
        raise InputError(
            f"lm-eval cannot load {', '.join(matched)} ({type(error).__name__}: {reason[:300]}): most tasks "
            "get their data from the hub; check the network, or give tasks with data of their own by "
            "--include-path"
        ) from error
    return Tasks(tuple(matched), dict(loaded["tasks"]), dict(loaded.get("groups") or {}), manager)
