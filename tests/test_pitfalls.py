"""What users of neighbouring tools report, each a case for us, in the order of that list.

Cases that another file tests are named here or in the docstrings, and not repeated:

3: test_cli.py: test_compress_shows_what_a_person_asks_for; the stored sizes in the export's tests.
4: test_demo_model.py: the peak of a calibration; the export's own tests: the peak of an export.
8: test_lm_eval.py (the harness ties again whatever says so) and the export's tests.
9: test_models.py: test_a_bias_that_the_class_would_leave_out; ours is called `offset` (test_hf.py).
10: test_unembedding.py and test_changes.py; full rank gives the original logits: test_truncation.py.
14: No tokenizer, `.bin` only, encoder-decoder, masked, truncated before: test_models.py.
"""

from __future__ import annotations

import ast
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from commands import csprune_command, write_jsonl
from safetensors.torch import load_file, save_file

import csprune
from csprune import CspruneError, InputError

SHORT = ("--sequence-length", "16")


def windows(tokenizer: Any, count: int = 12, length: int = 32, seed: int = 0) -> csprune.Windows:
    return csprune.read_windows(tokenizer, tiny.texts(count, seed=seed), sequence_length=length)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in a folder whose name says nothing, with texts."""
    folder = tmp_path_factory.mktemp("pitfalls")
    tiny.save(tiny.make("llama"), folder / "x (1), ü")
    write_jsonl(folder / "docs.jsonl", tiny.texts(30))
    return folder


def test_1_a_singular_second_moment_is_no_obstacle() -> None:
    """Fewer calibration tokens than directions: Cholesky fails there; the effective rank is reported."""
    model = tiny.make("llama")
    readout = csprune.load_readout(model)
    texts = [text[100:] for text in tiny.texts(3)]  # they begin alike
    few = csprune.read_windows(tiny.tokenizer(), texts, sequence_length=8)
    calibration = csprune.calibrate(model, few, readout=readout)
    tokens = calibration.details["tokens"]
    assert tokens < calibration.width
    with pytest.raises(torch.linalg.LinAlgError):  # control
        torch.linalg.cholesky(calibration.second_moment)
    for method in ("whitened", "fisher-whitened"):
        truncation = csprune.truncate(readout, calibration, method, 0.5)
        # The states about their mean span one dimension less.
        assert truncation.effective_rank == tokens - 1
        projection = truncation.projection.dense()
        assert torch.isfinite(projection).all()
        held_out = windows(tiny.tokenizer(), seed=1)
        report = csprune.summarise(csprune.evaluate(model, held_out, [truncation]), draws=50)
        assert report["truncations"][0]["loss_change"]["mean"] < 1e3
    plenty = csprune.calibrate(model, windows(tiny.tokenizer()), readout=readout)
    assert csprune.truncate(readout, plenty, "whitened", 0.5).effective_rank == plenty.width


def test_1_the_command_says_that_more_text_is_wanted(folder: Path, tmp_path: Path) -> None:
    command = ("evaluate", folder / "x (1), ü", "--rank", "0.5", "--method", "whitened")
    data = ("--data", folder / "docs.jsonl")
    few = csprune_command(*command, *data, "--sequence-length", "8", "--documents", "2", "-o", tmp_path / "a")
    assert few.status == 0 and re.search(r"span \d+ of 32 directions", few.out)
    many = csprune_command(*command, *data, *SHORT, "-o", tmp_path / "b")
    assert many.status == 0 and "directions" not in many.out


@pytest.mark.parametrize("key", ["layers.1.mlp.down_proj", "norm", "lm_head", "embed_tokens"])
def test_2_weights_that_are_not_finite_are_an_error(key: str, folder: Path, tmp_path: Path) -> None:
    """An error with counts, and no report."""
    key = f"{key}.weight" if key == "lm_head" else f"model.{key}.weight"
    broken = Path(tmp_path / "broken")
    broken.mkdir()
    for file in (folder / "x (1), ü").iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors[key].view(-1)[5 * tiny.WIDTH % tensors[key].numel()] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    run = csprune_command("evaluate", broken, "--data", folder / "docs.jsonl", *SHORT, "-o", tmp_path / "r")
    assert run.status in (1, 2)
    assert "not finite" in run.message and any(c.isdigit() for c in run.message)
    assert not (tmp_path / "r").exists()


def test_2_no_document_is_dropped_for_its_value() -> None:
    """Every document asked for is in the result; a value that is not finite is an error (test_report)."""
    model = tiny.make("llama")
    held_out = windows(tiny.tokenizer(), 7, seed=1)
    readout = csprune.load_readout(model)
    calibration = csprune.calibrate(model, windows(tiny.tokenizer()), readout=readout)
    truncation = csprune.truncate(readout, calibration, "singular", 0.5)
    evaluation = csprune.evaluate(model, held_out, [truncation])
    assert evaluation.document_ids == held_out.document_ids
    evaluation.measurements[0].values["loss_change"][3] = float("nan")
    with pytest.raises(CspruneError, match="1 of 7 documents"):
        csprune.summarise(evaluation)


@pytest.mark.parametrize("bos", [True, False])
def test_5_bos_comes_once_or_never_and_is_recorded(bos: bool, tmp_path: Path) -> None:
    """(Its loss of 2 nats on Gemma was a BOS left out; lm-evaluation-harness: test_lm_eval.py.)"""
    tokenizer = tiny.tokenizer(bos=bos)
    read = windows(tokenizer, 5)
    ids = torch.cat([read.input_ids, read.target_ids[:, -1:]], 1)
    assert (ids == tokenizer.bos_token_id).sum(1).tolist() == [int(bos)] * 5
    assert bool((ids[:, 0] == tokenizer.bos_token_id).all()) == bos
    model = tiny.save(tiny.make("llama"), tmp_path / "model", "bos" if bos else "plain")
    data = write_jsonl(tmp_path / "docs.jsonl", tiny.texts(30))
    run = csprune_command(
        *("evaluate", model, "--data", data, *SHORT, "--method", "fisher", "--rank", "0.5"),
        *("-o", tmp_path / "r", "--json"),
    )
    protocol = json.loads(run.out)["protocol"]
    assert protocol["evaluation"]["bos"] == protocol["calibration"]["bos"] == bos


def test_5_a_calibration_with_another_bos_policy_is_refused(tmp_path: Path) -> None:
    model = tiny.save(tiny.make("llama"), tmp_path / "model")
    data = ("--data", write_jsonl(tmp_path / "docs.jsonl", tiny.texts(30)))
    assert csprune_command("calibrate", model, *data, *SHORT, "-o", tmp_path / "c").status == 0
    command = (
        "evaluate",
        model,
        *data,
        "--calibration",
        tmp_path / "c",
        "--rank",
        "0.5",
        "-o",
        tmp_path / "r",
    )
    tiny.tokenizer(bos=True).save_pretrained(model)
    refused = csprune_command(*command)
    assert refused.status == 2 and "beginning-of-sequence" in refused.message
    tiny.tokenizer().save_pretrained(model)
    assert csprune_command(*command).status == 0


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gemma2", "bloom"])
def test_6_nothing_goes_by_names(kind: str, tmp_path: Path) -> None:
    """A folder's name need not contain a family's, nor lie; the tokenizer's class is the checkpoint's."""
    for name in ("a", "opt-but-not-really", "weights (copy) ü"):
        folder = tiny.save(tiny.make(kind), tmp_path / name)
        loaded = csprune.load_model(str(folder))
        assert csprune.load_readout(loaded.model).error < 1e-4
        assert loaded.tokenizer("abc")["input_ids"] == tiny.tokenizer()("abc")["input_ids"]


def test_7_nothing_is_pickled() -> None:
    """No module imports pickle or torch's pickling; that none is read: test_models.py."""

    def offences(source: str) -> list[str]:
        found: list[str] = []
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                found += [name for name in names if name.split(".")[0] in ("pickle", "joblib", "dill")]
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                found.append(ast.unparse(node))
        return found

    for path in Path(csprune.__file__).parent.glob("*.py"):
        assert offences(path.read_text()) == [], path.name
    assert offences("import pickle\ntorch.load(x)") == ["pickle", "torch.load"]  # control


def test_11_logits_are_float32_products_not_rounded_ones() -> None:
    model = tiny.make("llama").to(torch.bfloat16)
    read = windows(tiny.tokenizer())
    readout = csprune.load_readout(model, read.input_ids)
    u = readout.states(read.input_ids[:2]).flatten(0, 1)
    logits = readout.unembedding.logits(u)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    exact = readout.unembedding.lift(u) * readout.norm.gain + readout.norm.bias
    exact = exact @ model.lm_head.weight.double().mT
    error, rounding = (logits - exact).norm(), (exact.bfloat16() - exact).norm()
    assert error < 1e-3 * rounding


def test_12_local_text_asks_no_network(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """(No lm-evaluation-harness score is reported yet, so no version of it is recorded.)"""

    def connect(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the network was asked")

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    command = ("evaluate", folder / "x (1), ü", *SHORT, "--rank", "0.5", "--method", "fisher")
    for number, source in enumerate((folder / "docs.jsonl", "demo")):
        run = csprune_command(*command, "--data", source, "-o", tmp_path / str(number))
        assert run.status == 0, run.err
    with pytest.raises(AssertionError, match="network"):  # control
        socket.create_connection(("example.org", 80))


@pytest.mark.parametrize("limit", [10**30, 512, 5])
def test_13_the_tokenizers_maximum_length_changes_nothing(limit: int) -> None:
    tokenizer = tiny.tokenizer()
    assert tokenizer.model_max_length > 10**29  # what transformers makes of an unset one
    expected = windows(tokenizer).identity
    tokenizer.model_max_length = limit
    assert windows(tokenizer).identity == expected


def test_14_padded_vocabulary_rows() -> None:
    """The model has more rows than the tokenizer: each takes part, and nothing is cut."""
    model = tiny.make("llama", vocab_size=112)
    read = windows(tiny.tokenizer(97))
    readout = csprune.load_readout(model, read.input_ids)
    assert readout.unembedding.vocabulary == 112
    calibration = csprune.calibrate(model, read, readout=readout)
    truncation = csprune.truncate(readout, calibration, "fisher", 0.5)
    evaluation = csprune.evaluate(model, windows(tiny.tokenizer(97), seed=1), [truncation])
    csprune.summarise(evaluation, draws=50)
    with csprune.apply(model, truncation):
        assert model(input_ids=read.input_ids[:1]).logits.shape[-1] == 112


def test_14_a_tokenizer_larger_or_smaller_than_the_head() -> None:
    model = tiny.make("llama")
    with pytest.raises(InputError, match="97 embedding rows"):
        csprune.calibrate(model, windows(tiny.tokenizer(300)))
    # Larger, but no id of the text is beyond the rows: nothing is wrong.
    tokenizer = tiny.tokenizer(97)
    tokenizer.add_tokens(["<never used>"])
    assert len(tokenizer) > model.config.vocab_size
    assert csprune.calibrate(model, windows(tokenizer)).details["corpus"]["tokenizer_size"] == 98
    csprune.calibrate(model, windows(tiny.tokenizer(60)))


def test_14_short_and_empty_documents_are_counted(folder: Path, tmp_path: Path) -> None:
    documents = [*tiny.texts(6), "", "short", *tiny.texts(6, seed=3)]
    text = ("--calibration-data", write_jsonl(tmp_path / "c.jsonl", documents))
    text += ("--evaluation-data", write_jsonl(tmp_path / "e.jsonl", tiny.texts(9, seed=4)))
    command = ("evaluate", folder / "x (1), ü", *SHORT, "--rank", "0.5", "--method", "fisher", *text)
    run = csprune_command(*command, "-o", tmp_path / "r")
    assert "2 of 14 calibration documents were shorter than 17 tokens" in run.out
    assert "evaluation documents were" not in run.out
    corpus = json.loads((tmp_path / "r/report.json").read_text())["protocol"]["calibration"]["corpus"]
    assert (corpus["documents"], corpus["too_short"], corpus["seen"]) == (12, 2, 14)
