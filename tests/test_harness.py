"""lm-evaluation-harness as csprune runs it: nothing but what it does by itself, and every item kept."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from exports import load
from harness_cases import AGREEMENT, TASKS, brief, broken_model, make_models, write_tasks

from csprune import CspruneError, InputError
from csprune.bench.harness import MARGIN, Options, Scores, score
from csprune.bench.quiet import quiet
from csprune.bench.tasks import Tasks, find_tasks


@pytest.fixture(scope="module", autouse=True)
def no_description() -> Iterator[None]:
    with brief():
        yield


@pytest.fixture(scope="module")
def own_tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def agreement() -> Tasks:
    return find_tasks([AGREEMENT], TASKS)


@pytest.fixture(scope="module")
def scores(models: tuple[Path, Path], agreement: Tasks) -> list[Scores]:
    return [score(folder, agreement, Options(limit=10, batch_size=8)) for folder in models]


def metrics(results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        task: {key: value for key, value in found.items() if "," in key} for task, found in results.items()
    }


def test_the_values_are_those_of_lm_eval_itself(
    models: tuple[Path, Path], agreement: Tasks, scores: list[Scores]
) -> None:
    """`model="hf"` with `model_args`, as its command line calls it, for the original and the export."""
    from lm_eval.evaluator import simple_evaluate

    evaluate: Any = simple_evaluate
    found: list[dict[str, Any]] = []
    for folder in models:
        with quiet():
            result = evaluate(
                model="hf",
                model_args={"pretrained": str(folder)},
                tasks=[AGREEMENT],
                task_manager=agreement.manager,
                device="cpu",
                batch_size=8,
                limit=10,
            )
        found.append(metrics(result["results"]))
    assert found == [metrics(each.results["results"]) for each in scores]
    assert len(found[0]) == 5  # four tasks and their group
    assert found[0] != found[1]  # control: truncation shows


def test_a_choice_margin_is_what_the_model_says(models: tuple[Path, Path], scores: list[Scores]) -> None:
    """From the logits of the whole sentence, character by character; `acc` is its sign."""
    model, tokenizer = load(models[0]), tiny.tokenizer()

    @torch.no_grad()
    def log_likelihood(context: str, choice: str) -> float:
        ids = torch.tensor([tokenizer.encode(f"{context} {choice}")])
        rows = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        steps = rows.gather(1, ids[0, 1:, None])[:, 0]
        return float(steps[len(tokenizer.encode(context)) - 1 :].sum())

    tasks = find_tasks(["csprune_agreement_reflexive"], TASKS)
    documents = tasks.leaves["csprune_agreement_reflexive"].eval_docs
    for item in scores[0].items["csprune_agreement_reflexive"]:
        document = documents[item.doc_id]
        right, wrong = document["choices"][document["label"]], document["choices"][1 - document["label"]]
        expected = log_likelihood(document["context"], right) - log_likelihood(document["context"], wrong)
        assert item.values[MARGIN] == pytest.approx(expected, abs=1e-4)
    items = [item for each in scores for task in each.items.values() for item in task]
    assert len(items) == 2 * 4 * 10
    assert all((item.values[MARGIN] > 0) == (item.values["acc"] == 1) for item in items)
    assert 0 < sum(item.values["acc"] for item in items) < len(items)  # control: both happen


def test_log_likelihoods_that_are_no_numbers_are_counted(tmp_path: Path, own_tasks: Path) -> None:
    folder = broken_model(tmp_path / "broken")
    for task, count in (("tiny_choice", 10), ("tiny_rolling", 5)):
        with pytest.raises(CspruneError, match=f"{count} of {count} log-likelihoods of .*broken on {task}"):
            score(folder, find_tasks([task], own_tasks), Options(limit=5))


def test_what_begins_a_prompt_is_recorded(tmp_path: Path, own_tasks: Path) -> None:
    """As lm-eval encodes it; a text that is scored whole is always given the token before it."""
    names = ["tiny_choice", "tiny_rolling", "tiny_generate"]
    tasks = find_tasks(names, own_tasks)
    for kind, begins in (("plain", False), ("bos", True)):
        folder = tiny.save(tiny.make("llama"), tmp_path / kind, tokenizer=kind)
        found = score(folder, tasks, Options(limit=2)).loaded
        assert found["bos"] == {
            "add_bos_token": None,
            "token": "<s>",
            "begins_prompt": {
                "generate_until": begins,
                "loglikelihood": begins,
                "loglikelihood_rolling": True,
            },
        }
        assert (found["dtype"], found["device"]) == ("float32", "cpu")


def test_the_dtype_is_the_checkpoints_unless_one_is_given(tmp_path: Path, own_tasks: Path) -> None:
    folder = tiny.save(tiny.make("llama").bfloat16(), tmp_path / "model")
    tasks = find_tasks(["tiny_choice"], own_tasks)
    assert score(folder, tasks, Options(limit=2)).loaded["dtype"] == "bfloat16"
    assert score(folder, tasks, Options(limit=2, dtype="float32")).loaded["dtype"] == "float32"


def test_progress_counts_up_to_the_requests(models: tuple[Path, Path], own_tasks: Path) -> None:
    tasks = find_tasks(["tiny_choice", "tiny_rolling", "tiny_generate"], own_tasks)
    seen: list[tuple[int, int]] = []
    score(models[0], tasks, Options(batch_size=5), lambda done, asked: seen.append((done, asked)))
    assert seen == sorted(seen) and len(seen) > 6
    assert {asked: done for done, asked in seen} == {
        24: 24,
        36: 36,
        48: 48,
    }  # kind after kind, each to its end


def test_a_model_is_released(models: tuple[Path, Path], own_tasks: Path) -> None:
    import gc

    def count() -> int:
        gc.collect()
        return sum(type(each).__name__ == "LlamaForCausalLM" for each in gc.get_objects())

    before = count()
    score(models[0], find_tasks(["tiny_choice"], own_tasks), Options(limit=2))
    assert count() == before
    kept = load(models[0])
    assert count() == before + 1 and kept is not None  # control


def test_a_checkpoint_that_does_not_load_is_one_error(tmp_path: Path, own_tasks: Path) -> None:
    folder = tiny.save(tiny.make("llama"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CspruneError, match=r"lm-eval cannot load .*model \(OSError: ") as caught:
        score(folder, find_tasks(["tiny_choice"], own_tasks), Options())
    assert "\n" not in str(caught.value)


# --- tasks ---------------------------------------------------------------------------------------


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each TaskManager was to read lm-eval's own thousands; it never does."""
    import lm_eval.tasks

    real, seen = lm_eval.tasks.TaskManager, list[bool]()

    def manager(*, include_defaults: bool = True, **options: Any) -> Any:
        seen.append(include_defaults)
        return real(include_defaults=False, **options)

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    return seen


def test_own_tasks_need_none_of_lm_evals(managers: list[bool], own_tasks: Path) -> None:
    found = find_tasks(["tiny_choice", "tiny_rolling", "tiny_choice"], own_tasks)
    assert found.names == ("tiny_choice", "tiny_rolling") and managers == [False]
    assert (found.items("tiny_choice"), found.items("tiny_choice", 5)) == (12, 5)
    found = find_tasks(["tiny_r*", "tiny_gr?up"], own_tasks)
    assert list(found.leaves) == ["tiny_rolling", "tiny_choice", "tiny_more"] and list(found.groups) == [
        "tiny_group"
    ]
    assert managers == [False] * 2
    with pytest.raises(InputError):
        find_tasks(["hellaswag"], own_tasks)
    assert managers[2:4] == [False, True]  # control: another name is looked for among lm-eval's


def test_an_unknown_task_is_named_beside_those_there_are(managers: list[bool], own_tasks: Path) -> None:
    with pytest.raises(InputError, match="no task 'tiny_choise': .* has tiny_choice, .*`lm_eval ls tasks`"):
        find_tasks(["tiny_choice", "tiny_choise"], own_tasks)
    with pytest.raises(InputError, match="no task 'x': `lm_eval ls"):
        find_tasks(["x"])


def test_tasks_that_cannot_be_run_are_refused(managers: list[bool], tmp_path: Path) -> None:
    write_tasks(tmp_path)
    choice = (tmp_path / "tiny_choice.yaml").read_text()
    (tmp_path / "tiny_code.yaml").write_text(
        choice.replace("tiny_choice", "tiny_code") + "unsafe_code: true\n"
    )
    (tmp_path / "tiny_bad.yaml").write_text(
        choice.replace("tiny_choice", "tiny_bad").replace("data.load", "data.missing")
    )
    for names, message in (
        (["tiny_code"], "tiny_code runs code"),
        (["tiny_bad"], r"cannot load tiny_bad \(AttributeError: .*missing"),
        (["tiny_group", "tiny_choice"], "a task is named twice .*tiny_choice.*: give the group or the task"),
        ([], "give --tasks"),
    ):
        with pytest.raises(InputError, match=message):
            find_tasks(names, tmp_path)
    with pytest.raises(InputError, match="no folder .*nowhere"):
        find_tasks(["tiny_choice"], tmp_path / "nowhere")


def test_aggregations_are_known_by_their_names(own_tasks: Path) -> None:
    found = find_tasks(["tiny_group", "tiny_rolling", "tiny_mcc", "tiny_own"], own_tasks)
    names = {
        (task, metric): found.aggregation(task, metric).name
        for task, metric in (
            ("tiny_choice", "acc"),
            ("tiny_mcc", "mcc"),
            ("tiny_rolling", "word_perplexity"),
            ("tiny_rolling", "bits_per_byte"),
            ("tiny_own", "length"),
        )
    }
    assert list(names.values()) == ["mean", "matthews_corrcoef", "weighted_perplexity", "bits_per_byte", None]
    assert found.aggregation("tiny_own", "length").function([5, 1, 3]) == 3
    (mean,) = found.group_means("tiny_group")
    assert (mean.metric, mean.filters, mean.by_size) == ("acc", None, False)
    assert found.group_leaves("tiny_group") == ["tiny_choice", "tiny_more"]


# --- quiet ---------------------------------------------------------------------------------------


def chatter() -> tuple[str, str]:
    from tqdm import tqdm

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        handler = logging.StreamHandler(err)
        logger = logging.getLogger("lm_eval")
        logger.addHandler(handler)
        try:
            print("printed")
            logger.warning("warned")
            logger.error("an error")
            list(tqdm(range(3), disable=False))
        finally:
            logger.removeHandler(handler)
    return out.getvalue(), err.getvalue()


def test_chatter_is_kept_away_and_errors_are_not() -> None:
    with quiet():
        err = chatter()[1]
    assert err == "an error\n"
    out, err = chatter()  # control: outside everything is heard again
    assert "printed" in out and "warned" in err and "3/3" in err


def test_quiet_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    import tqdm.std

    def state() -> tuple[Any, ...]:
        return (
            tqdm.std.tqdm.__init__,
            logging.getLogger("lm_eval").level,
            os.environ.get("DISABLE_MULTIPROC"),
        )

    for value in (None, "yes"):
        if value:
            monkeypatch.setenv("DISABLE_MULTIPROC", value)
        else:
            monkeypatch.delenv("DISABLE_MULTIPROC", raising=False)
        before = state()
        with pytest.raises(ZeroDivisionError), quiet():
            assert state() != before
            raise ZeroDivisionError
        assert state() == before
