"""The calibration's statistics against the float64 oracle; files, merging, resuming, refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import safetensors
import safetensors.torch
import tiny
import torch

import csprune.calibration
import csprune.persistence
from csprune.calibration import Calibration, calibrate
from csprune.corpus import Windows, read_windows
from csprune.errors import CspruneError, InputError
from csprune.identity import fingerprint
from csprune.readout import load_readout

LENGTH = 24


def read(documents: int = 10, seed: int = 0, length: int = LENGTH, bos: bool = False) -> Windows:
    tokenizer = tiny.tokenizer(bos=bos)
    texts = tiny.texts(documents, seed=seed, characters=200)
    return read_windows(tokenizer, texts, documents=documents, sequence_length=length)


def part(windows: Windows, rows: slice) -> Windows:
    """Some of the documents."""
    return dataclasses.replace(
        windows,
        input_ids=windows.input_ids[rows],
        target_ids=windows.target_ids[rows],
        document_ids=windows.document_ids[rows],
        blocks=windows.blocks[rows],
    )


@pytest.fixture(scope="module")
def windows() -> Windows:
    return read()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny.make("llama")


@pytest.fixture(scope="module")
def calibration(llama: Any, windows: Windows) -> Calibration:
    return calibrate(llama, windows)


class Known:
    """The oracle's statistics of a model in the package's basis of the states."""

    def __init__(self, model: Any, windows: Windows, **settings: Any) -> None:
        p = tiny.parts(model)
        folded = oracle.fold(p.weight, p.bias, p.gamma, p.beta, p.kind, factor=p.factor, cap=p.cap)
        residuals = [oracle.capture(model, row, p.norm, p.head).residual for row in windows.input_ids]
        states = [oracle.states(r, p.kind, p.eps) for r in residuals]
        found = oracle.statistics(folded, states, explicit=False, **settings)
        unembedding = load_readout(model).unembedding
        q = unembedding.lift(torch.eye(unembedding.width).double()).mT.numpy().T @ folded.basis
        self.mean_state = q @ found.mean_state
        self.second_moment = q @ found.second_moment @ q.T
        self.mean_fisher = q @ found.mean_fisher @ q.T
        self.saliency, self.singular_values = found.saliency, found.singular_values
        self.counts = (found.moment_count, found.fisher_count)

    def errors(self, model: Any, calibration: Calibration) -> dict[str, float]:
        """The largest difference of each statistic, in units of its largest entry."""
        found = {
            "mean_state": calibration.mean_state,
            "second_moment": calibration.second_moment,
            "mean_fisher": calibration.mean_fisher(load_readout(model).unembedding),
            "saliency": calibration.saliency,
            "singular_values": calibration.singular_values,
        }
        return {k: error(v.numpy(), getattr(self, k)) for k, v in found.items()}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


# --- The statistics -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "allowed", "settings"),
    [
        (torch.float64, 1e-6, {}),
        (torch.float64, 1e-6, {"positions": "last"}),
        (torch.float64, 1e-6, {"positions": "all", "skip_first": 5}),
        (torch.float32, 2e-5, {"positions": "last", "skip_first": 5}),
    ],
)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_statistic_is_the_oracles(
    kind: str, dtype: torch.dtype, allowed: float, settings: dict[str, Any], windows: Windows
) -> None:
    model = tiny.make(kind).to(dtype)
    found = calibrate(model, windows, **settings)
    known = Known(model, windows, **settings)
    assert (int(found.moments.count), int(found.fisher.count)) == known.counts
    assert (found.details["tokens"], found.details["fisher_tokens"]) == known.counts
    errors = known.errors(model, found)
    assert max(errors.values()) < allowed, errors
    # Control: other positions give other statistics; a forgotten mean gives another saliency.
    others = {"positions": "last"} if not settings else {}
    wrong = Known(model, windows, **others).errors(model, found)
    assert all(wrong[k] > 100 * allowed for k in ("mean_state", "mean_fisher", "saliency")), wrong
    about_zero = (found.fisher.variance_state2 / (2 * found.fisher.count)).numpy()
    assert error(about_zero, known.saliency) > 100 * allowed


def test_saliency_of_each_direction_not_only_of_the_largest(windows: Windows) -> None:
    model = tiny.make("gpt2").double()
    found, known = calibrate(model, windows), Known(model, windows)
    np.testing.assert_allclose(found.saliency.numpy(), known.saliency, rtol=1e-6)
    shuffled = found.saliency.numpy()[::-1]  # Control
    assert not np.allclose(shuffled, known.saliency, rtol=0.1)


def test_under_last_the_moment_is_over_all_positions_about_the_last_ones_mean(
    llama: Any, windows: Windows
) -> None:
    found = calibrate(llama, windows, "last", 3)
    u = load_readout(llama).states(windows.input_ids)[:, 3:]
    mu = u[:, -1].mean(0)
    deviation = (u - mu).flatten(0, 1)
    torch.testing.assert_close(found.mean_state, mu, rtol=0, atol=1e-6)
    expected = deviation.mT @ deviation / len(deviation)
    torch.testing.assert_close(found.second_moment, expected, rtol=0, atol=1e-5)
    about_own_mean = torch.cov(u.flatten(0, 1).mT, correction=0)  # Control
    assert float((found.second_moment - about_own_mean).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_neither_batches_nor_chunks_of_the_vocabulary_matter(
    kind: str, windows: Windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny.make(kind).double()
    whole = calibrate(model, windows, batch_size=10)
    monkeypatch.setattr(csprune.calibration, "CHUNK_ELEMENTS", 5 * tiny.VOCABULARY + 3)
    pieces = calibrate(model, windows, batch_size=3)
    for a, b in ((whole.moments, pieces.moments), (whole.fisher, pieces.fisher)):
        for name, value in a.tensors().items():
            torch.testing.assert_close(b.tensors()[name], value, rtol=1e-6, atol=1e-6)
    fewer = calibrate(model, part(windows, slice(0, 9)), batch_size=3)  # Control
    assert not torch.allclose(fewer.fisher.probability, whole.fisher.probability, rtol=1e-3)


def test_padded_rows_take_part(windows: Windows) -> None:
    model = tiny.make("llama")
    model.resize_token_embeddings(104, mean_resizing=False)
    found = calibrate(model, windows)
    assert max(Known(model, windows).errors(model, found).values()) < 2e-5
    assert float(found.fisher.probability[97:].sum()) > 1e-3  # Control: they have probability


def test_a_bfloat16_body_keeps_float32_predictions(windows: Windows) -> None:
    model = tiny.make("llama").bfloat16()
    found = calibrate(model, windows)
    assert found.details["dtype"] == "bfloat16"
    assert max(Known(model, windows).errors(model, found).values()) < 2e-5


def test_what_is_recorded(llama: Any, windows: Windows, calibration: Calibration) -> None:
    details = calibration.details
    assert details["model"] == "LlamaForCausalLM" and details["corpus"] == windows.describe()
    assert details["fingerprint"] == fingerprint(load_readout(llama))
    assert details["bos"] is False and details["sequence_length"] == LENGTH
    assert set(details["versions"]) == {"csprune", "torch", "transformers", "tokenizers", "python"}
    assert calibration.documents == windows.document_ids and calibration.width == tiny.WIDTH
    with_bos = calibrate(llama, read(bos=True), "last", 2, name="mine", batch_size=4).details  # Control
    changed = {"bos": True, "positions": "last", "skip_first": 2, "model": "mine", "batch_size": 4}
    assert {k: with_bos[k] for k in changed} == changed


# --- Files ----------------------------------------------------------------------------------------


def saved(calibration: Calibration, folder: Path, name: str = "c.safetensors") -> bytes:
    calibration.save(folder / name)
    return (folder / name).read_bytes()


def test_two_runs_and_two_round_trips_give_the_same_bytes(
    llama: Any, windows: Windows, calibration: Calibration, tmp_path: Path
) -> None:
    first = saved(calibration, tmp_path)
    assert saved(calibrate(tiny.make("llama"), windows), tmp_path, "again") == first
    loaded = Calibration.load(tmp_path / "c.safetensors")
    assert saved(loaded, tmp_path, "round") == first
    assert saved(Calibration.load(tmp_path / "round"), tmp_path, "trip") == first
    assert loaded.documents == calibration.documents and loaded.details == calibration.details
    for name in ("mean_state", "second_moment", "saliency"):
        assert torch.equal(getattr(loaded, name), getattr(calibration, name))
    loaded.check_model(load_readout(llama))
    assert saved(calibrate(tiny.make("llama", seed=1), windows), tmp_path, "other") != first  # Control
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "c.safetensors", "other", "round", "trip"]


def load_refused(path: Path, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        Calibration.load(path)
    message = str(caught.value)
    assert str(path) in message and expected in message and "\n" not in message


def test_what_is_no_calibration_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    load_refused(path, "no calibration file")
    load_refused(tmp_path, "no calibration file")
    path.write_bytes(b"\x08\x00\x00\x00garbage that is no safetensors file")
    load_refused(path, "cannot be read")
    path.write_bytes(b"")
    load_refused(path, "cannot be read")
    safetensors.torch.save_file({"lm_head.weight": torch.ones(3, 3)}, path)
    load_refused(path, "is not a csprune calibration")
    whole = saved(calibration, tmp_path)
    path.write_bytes(whole[:-100])
    load_refused(path, "cannot be read")
    path.write_bytes(whole)
    Calibration.load(path)  # Control


def rewritten(path: Path, change: Any) -> None:
    """Change header and tensors of a calibration file in place."""
    with safetensors.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["csprune_calibration"])
        tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118
    change(header, tensors)
    safetensors.torch.save_file(tensors, path, {"csprune_calibration": json.dumps(header)})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda h, _t: h.update(schema=2), "has schema 2, this csprune reads 1"),
        (lambda h, _t: h.pop("schema"), "has schema None"),
        (lambda h, _t: h.pop("details"), "lacks statistics ('details')"),
        (lambda _h, t: t.pop("fisher.variance"), "lacks statistics"),
        (lambda _h, t: t.pop("directions"), "lacks statistics ('directions')"),
        (lambda _h, t: t["fisher.outer"][1].fill_(float("nan")), "has 32 values that are not finite"),
    ],
)
def test_damaged_files_are_refused(
    change: Any, expected: str, calibration: Calibration, tmp_path: Path
) -> None:
    path = tmp_path / "c.safetensors"
    calibration.save(path)
    rewritten(path, lambda _h, _t: None)
    Calibration.load(path)  # Control
    rewritten(path, change)
    load_refused(path, expected)


def test_saving_where_there_is_no_folder_is_refused(calibration: Calibration, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        calibration.save(tmp_path / "missing" / "c.safetensors")


# --- Whose calibration it is ----------------------------------------------------------------------


def test_a_calibration_belongs_to_one_models_weights(calibration: Calibration) -> None:
    calibration.check_model(load_readout(tiny.make("llama")))
    names = [n for n, p in tiny.make("llama").named_parameters() if "input_layernorm" not in n]
    assert "lm_head.weight" in names and "model.norm.weight" in names
    for name in names:
        other = tiny.make("llama")
        other.get_parameter(name).data.view(-1)[-1] += 0.1
        with pytest.raises(InputError) as caught:
            calibration.check_model(load_readout(other))
        assert "whose weights differ" in str(caught.value) and "\n" not in str(caught.value)


def test_the_whole_of_a_large_tensor_is_sampled() -> None:
    model = tiny.make("llama", vocab_size=251)
    assert 4096 < model.lm_head.weight.numel() < 2 * 4096
    before = fingerprint(load_readout(model))
    model.lm_head.weight.data[-1] += 0.1  # a row at the very end
    assert fingerprint(load_readout(model)) != before
    model.lm_head.weight.data[-1] = tiny.make("llama", vocab_size=251).lm_head.weight.data[-1]
    assert fingerprint(load_readout(model)) == before  # Control


def test_another_architecture_with_the_same_tensors_is_another_model() -> None:
    llama, mistral = tiny.make("llama"), tiny.make("mistral")
    mistral.load_state_dict(llama.state_dict())
    assert fingerprint(load_readout(llama)) != fingerprint(load_readout(mistral))


# --- Merging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", ["all", "last"])
def test_merged_calibrations_are_that_of_both_texts(positions: str, windows: Windows) -> None:
    model = tiny.make("gpt2").double()
    first, second = part(windows, slice(0, 4)), part(windows, slice(4, None))
    a, b = calibrate(model, first, positions), calibrate(model, second, positions)
    whole = calibrate(model, windows, positions)
    before = a.saliency.clone()
    for merged in (a.merge(b), b.merge(a)):
        for name in ("mean_state", "second_moment", "saliency"):
            expected = getattr(whole, name)
            torch.testing.assert_close(getattr(merged, name), expected, rtol=1e-6, atol=1e-7)
        assert sorted(merged.documents) == sorted(windows.document_ids)
        for key in ("tokens", "fisher_tokens"):
            assert merged.details[key] == whole.details[key]
    merged = a.merge(b)
    assert merged.details["corpus"] == {"merged": [first.describe(), second.describe()]}
    assert torch.equal(a.saliency, before) and int(a.fisher.count) < int(merged.fisher.count)
    # Control: a mean of the two saliencies is not the saliency of both.
    mean = (4 * a.saliency + 6 * b.saliency) / 10
    assert not torch.allclose(mean, whole.saliency, rtol=1e-4)


def test_what_must_not_be_merged(llama: Any, windows: Windows, tmp_path: Path) -> None:
    first, second = part(windows, slice(0, 5)), part(windows, slice(5, None))
    a = calibrate(llama, first)

    def refused(other: Calibration, expected: str) -> None:
        with pytest.raises(InputError, match=expected):
            a.merge(other)

    refused(calibrate(llama, part(windows, slice(3, None))), r"^2 documents stand in both")
    refused(calibrate(llama, second, "last"), "different positions")
    refused(calibrate(llama, second, skip_first=1), "different skip_first")
    refused(calibrate(llama, part(read(length=20), slice(5, None))), "different sequence_length")
    refused(calibrate(llama, read(5, seed=1, bos=True)), "different bos")
    refused(calibrate(tiny.make("llama", seed=1), second), "different fingerprint")
    refused(calibrate(tiny.make("llama").double(), second), "different dtype")
    other = calibrate(llama, second)
    refused(dataclasses.replace(other, directions=-other.directions), "different directions")
    a.merge(other).save(tmp_path / "c")  # Control
    assert Calibration.load(tmp_path / "c").details["tokens"] == 10 * LENGTH


# --- Resuming -------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupt_after(documents: int):
    def progress(done: int, _total: int) -> None:
        if done >= documents:
            raise Interrupted

    return progress


@pytest.fixture
def every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csprune.persistence, "SAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("every_batch")
@pytest.mark.parametrize("documents", [2, 6, 10])
@pytest.mark.parametrize("positions", ["all", "last"])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    documents: int, positions: str, llama: Any, windows: Windows, tmp_path: Path
) -> None:
    partial = tmp_path / "c.partial"
    settings: dict[str, Any] = {"positions": positions, "batch_size": 2}
    uninterrupted = saved(calibrate(llama, windows, **settings), tmp_path)
    with pytest.raises(Interrupted):
        calibrate(llama, windows, **settings, partial=partial, progress=interrupt_after(documents))
    assert partial.exists()
    steps: list[tuple[int, int]] = []
    resumed = calibrate(
        tiny.make("llama"), windows, **settings, partial=partial, progress=lambda *s: steps.append(s)
    )
    assert not partial.exists()
    assert saved(resumed, tmp_path, "resumed") == uninterrupted
    # Control: it did resume, and did not start again.
    assert steps[0] == (documents, 10) and steps[-1] == (10, 10)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["c.safetensors", "resumed"]


def test_a_run_that_takes_no_time_writes_no_partial_file(
    llama: Any, windows: Windows, tmp_path: Path
) -> None:
    partial = tmp_path / "c.partial"
    with pytest.raises(Interrupted):
        calibrate(llama, windows, batch_size=2, partial=partial, progress=interrupt_after(10))
    assert not partial.exists()


@pytest.mark.usefixtures("every_batch")
def test_the_partial_file_of_another_run_is_refused_and_left(
    llama: Any, windows: Windows, tmp_path: Path
) -> None:
    partial = tmp_path / "c.partial"
    with pytest.raises(Interrupted):
        calibrate(llama, windows, batch_size=2, partial=partial, progress=interrupt_after(4))
    kept = partial.read_bytes()
    others: list[tuple[Any, Windows, dict[str, Any]]] = [
        (llama, windows, {"positions": "last", "batch_size": 2}),
        (llama, windows, {"skip_first": 1, "batch_size": 2}),
        (llama, windows, {"batch_size": 3}),
        (llama, read(seed=1), {"batch_size": 2}),
        (tiny.make("llama", seed=1), windows, {"batch_size": 2}),
        (tiny.make("llama").double(), windows, {"batch_size": 2}),
    ]
    for model, text, settings in others:
        with pytest.raises(
            InputError, match=r"c\.partial was left by a calibration of another model, text or"
        ):
            calibrate(model, text, **settings, partial=partial)
        assert partial.read_bytes() == kept
    partial.write_bytes(kept[:50])
    with pytest.raises(InputError, match=r"c\.partial cannot be read .*: delete it"):
        calibrate(llama, windows, batch_size=2, partial=partial)
    partial.write_bytes(kept)
    load_refused(partial, "is not a csprune calibration")  # half a calibration is none
    calibrate(llama, windows, batch_size=2, partial=partial)  # Control


# --- Refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"positions": "first"}, "unknown positions 'first': choose one of all, last"),
        ({"skip_first": LENGTH}, f"skip_first {LENGTH} leaves none of {LENGTH} positions"),
        ({"skip_first": -1}, "skip_first -1"),
        ({"batch_size": 0}, "batch size 0 is not positive"),
    ],
)
def test_impossible_settings_are_refused(
    settings: dict[str, Any], expected: str, llama: Any, windows: Windows
) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(llama, windows, **settings)
    assert str(caught.value).startswith(expected) and "\n" not in str(caught.value)


def test_text_that_the_model_cannot_read_is_refused(llama: Any, windows: Windows) -> None:
    with pytest.raises(InputError, match="1 document of texts is too few"):
        calibrate(llama, part(windows, slice(0, 1)))
    with pytest.raises(InputError, match="gives token id .* but the model has 50 embedding rows"):
        calibrate(tiny.make("llama", vocab_size=50), windows)
    with pytest.raises(InputError, match="more than the 16 positions"):
        calibrate(tiny.make("llama", max_position_embeddings=16), windows)
    calibrate(llama, part(windows, slice(0, 2)), skip_first=LENGTH - 1)  # Control


def test_a_readout_of_another_model_is_refused(llama: Any, windows: Windows) -> None:
    other = load_readout(tiny.make("llama"))
    with pytest.raises(InputError, match="the readout is of another model object"):
        calibrate(llama, windows, readout=other)
    calibrate(llama, windows, readout=load_readout(llama))  # Control


def test_a_model_in_training_mode_is_refused(windows: Windows) -> None:
    model = tiny.make("gpt2")
    readout = load_readout(model)
    model.train()
    with pytest.raises(InputError, match=r"call model\.eval\(\)"):
        calibrate(model, windows, readout=readout)


def test_states_that_are_not_finite_stop_the_run_with_counts(windows: Windows) -> None:
    model = tiny.make("llama")
    readout = load_readout(model)
    token = int(windows.input_ids[3, 7])
    model.model.embed_tokens.weight.data[token] = float("inf")
    bad = int((windows.input_ids[:8] == token).any(1).sum())
    with pytest.raises(CspruneError, match=f"the states of {bad} of 8 documents"):
        calibrate(model, windows, readout=readout)


def test_logits_that_overflow_stop_the_run_with_counts(windows: Windows) -> None:
    model = tiny.make("llama")
    readout = load_readout(model)
    calibrate(model, windows, readout=readout)  # Control; and the decomposition, which would be refused first
    model.lm_head.weight.data[5] = float("inf")
    tokens = 8 * LENGTH
    with pytest.raises(CspruneError, match=f"the logits of {tokens} of {tokens} tokens .* are not finite"):
        calibrate(model, windows, readout=readout)


def test_one_changed_row_of_a_large_head_is_another_model() -> None:
    """Rows of a head are edited one by one (new tokens): all of them take part in the fingerprint."""
    options = {"vocab_size": 773, "hidden_size": 64}
    before = fingerprint(load_readout(tiny.make("llama", **options)))
    for row in (1, 400, 771):
        model = tiny.make("llama", **options)
        model.lm_head.weight.data[row, 5] += 2
        assert fingerprint(load_readout(model)) != before
    assert fingerprint(load_readout(tiny.make("llama", **options))) == before
