"""Run lm-evaluation-harness on a checkpoint as its own command line does, item by item."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from csprune import hf as _hf  # noqa: F401  registers the loader of truncated heads
from csprune.bench.quiet import quiet, without_git
from csprune.bench.tasks import Tasks
from csprune.errors import CspruneError
from csprune.models import LOADING_ERRORS

BOOTSTRAP_DRAWS = 1000
"""Draws of lm-eval's own bootstrap, for metrics whose standard error has no closed form."""

MARGIN = "choice_margin"
"""csprune's own metric of multiple choice: `log p(right choice) - max log p(wrong choice)`, in nats.

Both are the log-likelihoods that lm-eval compares for `acc`, given the prompt and summed over the choice's
tokens: an item's `acc` is 1 where its margin is positive. It moves with every change of the prediction, `acc`
only where the order changes. Tasks with several right choices for an item have none.
"""

_KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


@dataclass(frozen=True)
class Options:
    """How the harness is run, the same for every model of a comparison.

    Attributes:
        limit: The first items of each task only.
        num_fewshot: Examples before each item; None for the task's own number.
        batch_size: Requests at a time.
        dtype: A name of torch's; None for the checkpoint's own, as lm-eval's "auto".
        device: A torch device.
        trust_remote_code: Run code that comes with a checkpoint.
        seed: For everything in lm-eval that is random; None for its own seeds.
    """

    limit: int | None = None
    num_fewshot: int | None = None
    batch_size: int = 1
    dtype: str | None = None
    device: str = "cpu"
    trust_remote_code: bool = False
    seed: int | None = None


@dataclass(frozen=True)
class Item:
    """One document of a task under one filter of its answers.

    Attributes:
        doc_id: Its place in the task.
        filter: How the answer was read from what the model gave.
        hashes: SHA-256 of the document, the prompt and the target, as lm-eval takes them.
        values: By metric: a number, or what the metric's aggregation takes of an item.
    """

    doc_id: int
    filter: str
    hashes: tuple[str, str, str]
    values: dict[str, Any]


@dataclass(frozen=True)
class Scores:
    """What lm-eval found about one model.

    Attributes:
        results: As `simple_evaluate` returns them, without the samples.
        items: By task.
        loaded: The model as it was run: dtype, device, longest input, and what begins its prompts.
    """

    results: dict[str, Any]
    items: dict[str, list[Item]]
    loaded: dict[str, Any]


def score(
    folder: Path, tasks: Tasks, options: Options, progress: Callable[[int, int], None] | None = None
) -> Scores:
    """Evaluate one checkpoint as `lm_eval --model hf --model_args pretrained=FOLDER` does.

    The model is loaded by lm-eval itself, and released at the end.

    Args:
        folder: The checkpoint.
        tasks: What to evaluate it on.
        options: How.
        progress: Called with the sequences that were run and the requests there are. The two agree at the
            end, unless requests share a prompt: lm-eval then runs one sequence for all of them.

    Raises:
        CspruneError: lm-eval cannot load or evaluate the checkpoint, or a log-likelihood is not finite.
    """
    arguments = {
        "pretrained": str(folder.resolve()),
        "trust_remote_code": options.trust_remote_code,
        "dtype": options.dtype or "auto",
    }
    additional = {"batch_size": options.batch_size, "device": options.device}
    with quiet(), _reported(folder, "load"):
        from lm_eval.api.registry import get_model

        model: Any = get_model("hf").create_from_arg_obj(arguments, additional)
    watch = _Watch(model, progress)
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        with quiet(), _reported(folder, "evaluate"):
            from lm_eval import evaluator

            evaluate: Any = evaluator.simple_evaluate  # a decorator hides its parameters
            with without_git(evaluator):
                results: Any = evaluate(
                    model=model,
                    tasks=list(tasks.names),
                    task_manager=tasks.manager,
                    num_fewshot=options.num_fewshot,
                    limit=options.limit,
                    batch_size=options.batch_size,
                    device=options.device,
                    bootstrap_iters=BOOTSTRAP_DRAWS,
                    log_samples=True,
                    **({} if options.seed is None else dict.fromkeys(seeds, options.seed)),
                )
        samples = results.pop("samples")
        items = {name: _items(folder, name, tasks, samples[name]) for name in tasks.leaves}
        return Scores(results, items, watch.describe())
    finally:
        watch.release()
        del model, watch
        gc.collect()
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Of lm-eval and the library its data come by."""
    return {name: version(name) for name in ("lm_eval", "datasets")}


def _items(folder: Path, name: str, tasks: Tasks, samples: list[dict[str, Any]]) -> list[Item]:
    """A task's samples without documents and prompts."""
    task = tasks.leaves[name]
    _check_finite(folder, name, task.OUTPUT_TYPE, samples)
    right = [_right_choice(task, sample) for sample in samples]
    choice_margins = None not in right and MARGIN not in samples[0]
    items: list[Item] = []
    for sample, place in zip(samples, right, strict=True):
        values = {metric: sample[metric] for metric in sample["metrics"]}
        if choice_margins and place is not None:
            values[MARGIN] = _margin(task, sample, place)
        hashes = (sample["doc_hash"], sample["prompt_hash"], sample["target_hash"])
        items.append(Item(int(sample["doc_id"]), sample["filter"], hashes, values))
    return items


def _check_finite(folder: Path, name: str, kind: str, samples: list[dict[str, Any]]) -> None:
    """lm-eval would count a NaN as a wrong answer."""
    if kind == "generate_until":
        return
    answers = [answer for sample in samples for request in sample["resps"] for answer in request]
    found = [float(answer[0] if isinstance(answer, tuple | list) else answer) for answer in answers]
    if bad := sum(not math.isfinite(each) for each in found):
        raise CspruneError(
            f"{bad} of {len(found)} log-likelihoods of {folder} on {name} are not finite: the checkpoint "
            "or its dtype overflows; try --dtype float32"
        )


def _right_choice(task: Any, sample: dict[str, Any]) -> int | None:
    """The place of the right choice as lm-eval's `acc` takes it; None where it is not one of them."""
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        return None
    if callable(task.config.process_results):
        return None
    document = sample["doc"]
    right: Any = task.doc_to_text(document) if task.multiple_input else sample["target"]
    choices = task.doc_to_choice(document)
    if isinstance(right, str):
        right = choices.index(right) if right in choices else None
    is_place = isinstance(right, int) and 0 <= right < len(choices) and len(choices) > 1
    return right if is_place else None


def _margin(task: Any, sample: dict[str, Any], right: int) -> float:
    count = len(task.doc_to_choice(sample["doc"]))  # what follows is for lm-eval's mutual information
    scores = [float(answer[0]) for answer in sample["filtered_resps"][:count]]
    return scores[right] - max(each for place, each in enumerate(scores) if place != right)


class _Watch:
    """What a model is asked: counted for the progress bar, and how its first prompt begins.

    Args:
        model: lm-eval's; its three kinds of request are wrapped on the instance.
        progress: As `score` takes it.
    """

    def __init__(self, model: Any, progress: Callable[[int, int], None] | None) -> None:
        self._model: Any = model
        self._progress = progress
        self._asked = self._done = 0
        self._begins: dict[str, bool] = {}
        for kind in _KINDS:
            setattr(model, kind, functools.partial(self._answer, kind, getattr(model, kind)))
        self._hook = model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _answer(self, kind: str, method: Any, requests: list[Any], *args: Any, **options: Any) -> Any:
        self._asked += len(requests)
        tokens = self._first_tokens(kind, requests[0].args[0])
        beginning = self._model.tokenizer.bos_token_id
        self._begins[kind] = beginning is not None and tokens[:1] == [beginning]
        return method(requests, *args, **options)

    def _first_tokens(self, kind: str, text: str) -> list[int]:
        if kind == "loglikelihood_rolling" or text == "":
            return [self._model.prefix_token_id]
        if kind == "generate_until":
            return self._model.tok_batch_encode([text])[0][0].tolist()
        return self._model.tok_encode(text)

    def _count(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = args[0] if args else kwargs.get("input_ids")
        # A step of generation, one token wide, continues a sequence that was counted.
        if self._progress is None or tokens is None or tokens.shape[1] == 1:
            return
        self._done = min(self._asked, self._done + len(tokens))
        self._progress(self._done, self._asked)

    def describe(self) -> dict[str, Any]:
        """The model as it was run."""
        model = self._model
        return {
            "dtype": str(model.model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "max_length": model.max_length,
            "bos": {
                "add_bos_token": model.add_bos_token,
                "token": model.tokenizer.bos_token,
                "begins_prompt": dict(sorted(self._begins.items())),
            },
        }

    def release(self) -> None:
        """Let the model go: wrapped methods and hook would keep it."""
        self._hook.remove()
        for kind in _KINDS:
            vars(self._model).pop(kind, None)
        self._model = None


@contextlib.contextmanager
def _reported(folder: Path, what: str) -> Iterator[None]:
    """One line for the many errors of loading and running a model."""
    try:
        yield
    except (CspruneError, torch.OutOfMemoryError):
        raise
    except LOADING_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CspruneError(
            f"lm-eval cannot {what} {folder} ({type(error).__name__}: {reason[:300]})"
        ) from error
