"""Checkpoints are read and rewritten tensor by tensor, and refused in one line where they are not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from csprune.checkpoint import INDEX, SINGLE, Checkpoint, rewrite
from csprune.errors import InputError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def _tensor(generator: torch.Generator, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return (10 * torch.randn(shape, generator=generator)).abs().to(dtype)


def _raw(path: Path) -> dict[str, bytes]:
    """The bytes of every tensor, read by hand."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {k: data[start + v["data_offsets"][0] : start + v["data_offsets"][1]] for k, v in header.items()}


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_rewrite_changes_what_is_asked_and_nothing_else(tmp_path: Path, data: st.DataObject):
    """safetensors' own reader finds the old tensors bit for bit, and the new ones."""
    names = data.draw(st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=6))
    new_names = data.draw(st.lists(st.sampled_from("abcdefghijklmn"), unique=True, max_size=4))
    drop = set(data.draw(st.lists(st.sampled_from("abcdefghijz"), unique=True, max_size=3))) - set(new_names)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    shapes = st.lists(st.integers(0, 5), max_size=3)
    old = {n: _tensor(generator, data.draw(shapes), data.draw(st.sampled_from(DTYPES))) for n in names}
    new = {
        n: _tensor(generator, data.draw(shapes), data.draw(st.sampled_from(DTYPES[:4]))) for n in new_names
    }
    metadata = data.draw(st.sampled_from([None, {"format": "pt", "note": "é"}]))
    source, target = tmp_path / "source.safetensors", tmp_path / "target.safetensors"
    save_file(old, source, metadata=metadata)
    rewrite(source, target, new, drop)
    want = {n: t for n, t in (old | new).items() if n not in drop}
    got = load_file(target)
    assert set(got) == set(want)
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)
    before, after = _raw(source), _raw(target)
    assert all(after[n] == before[n] for n in set(names) - set(new_names) - drop)
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == metadata


def test_rewrite_copies_nan_payloads_and_unknown_dtypes(tmp_path: Path):
    """What does not change is bytes: a copy through numbers would lose these."""
    payload = torch.tensor([0x7FC01234, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    low = torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn)
    save_file({"nan": payload, "low": low, "w": torch.ones(2)}, tmp_path / "a")
    rewrite(tmp_path / "a", tmp_path / "b", {"w": torch.zeros(3)})
    before, after = _raw(tmp_path / "a"), _raw(tmp_path / "b")
    assert after["nan"] == before["nan"] and after["low"] == before["low"]
    assert after["w"] == bytes(12)


def test_rewrite_takes_any_layout(tmp_path: Path):
    save_file({"x": torch.ones(1)}, tmp_path / "a")
    tensor = torch.arange(12.0).reshape(3, 4).mT.requires_grad_()
    rewrite(tmp_path / "a", tmp_path / "b", {"x": tensor, "scalar": torch.tensor(2.0)})
    got = load_file(tmp_path / "b")
    assert torch.equal(got["x"], tensor.detach()) and got["scalar"] == 2


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of two shards."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"a": torch.ones(2, 3).bfloat16()}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(5), "c": torch.ones(1)}, tmp_path / "two.safetensors")
    _write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


def _write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_open(folder: Path):
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.files == ["one.safetensors", "two.safetensors"]
    assert checkpoint.shapes == {"a": (2, 3), "b": (5,), "c": (1,)}
    assert checkpoint.dtypes == {"a": "BF16", "b": "F32", "c": "F32"}
    assert checkpoint.nbytes == {"a": 12, "b": 20, "c": 4}
    assert torch.equal(checkpoint.tensor("a"), torch.ones(2, 3).bfloat16())
    assert checkpoint.bytes_on_disk == sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_a_single_file_comes_before_an_index(folder: Path):
    """As in transformers: the other choice would truncate weights that nobody loads."""
    save_file({"x": torch.ones(1)}, folder / SINGLE)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.weight_map == {"x": SINGLE} and checkpoint.index is None


def _refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as caught:
        Checkpoint.open(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(folder), *words):
        assert word in message


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "..\\x.safetensors",
        "C:\\x.safetensors",
        "C:x.safetensors",
        "sub/x.safetensors",
        "./one.safetensors",
        "..",
        ".",
        "",
        None,
        3,
    ],
)
def test_an_index_that_leaves_the_folder_is_refused(folder: Path, name: Any):
    (folder / "sub").mkdir()
    for place in (folder.parent / "x.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"b": torch.ones(5)}, place)
    Checkpoint.open(folder)  # as it stands it is good
    _write_index(folder, {"a": "one.safetensors", "b": name})
    _refused(folder, INDEX)


@pytest.mark.parametrize("content", ["", "[]", "{", "{}", '{"weight_map": {}}', '{"weight_map": []}', "\xff"])
def test_a_damaged_index_is_refused(folder: Path, content: str):
    (folder / INDEX).write_bytes(content.encode("latin-1"))
    _refused(folder, INDEX, "download the checkpoint again")


def test_missing_shard(folder: Path):
    (folder / "two.safetensors").unlink()
    _refused(folder, "two.safetensors", "download it again")


def test_missing_tensor(folder: Path):
    _write_index(folder, {"a": "one.safetensors", "b": "one.safetensors"})
    _refused(folder, "one.safetensors", " b ")


def _header(text: str | dict, data: int = 8) -> bytes:
    body = (json.dumps(text) if isinstance(text, dict) else text).encode()
    return len(body).to_bytes(8, "little") + body + bytes(data)


_F32 = {"dtype": "F32", "shape": [2]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        b"garbage, and a lot of it",
        (1 << 40).to_bytes(8, "little") + b"{}",
        _header("[1]"),
        _header("{"),
        _header("[" * 100_000),
        _header({"a": 3}),
        _header({"a": _F32}),
        _header({"a": {**_F32, "data_offsets": [0]}}),
        _header({"a": {**_F32, "data_offsets": "08"}}),
        _header({"a": {"dtype": "F32", "data_offsets": [0, 8]}}),
        _header({"a": {"shape": [2], "data_offsets": [0, 8]}}),
        _header({"a": {**_F32, "data_offsets": [0, 8]}}, data=7),
        _header({"a": {**_F32, "data_offsets": [0, 8]}}, data=9),
        _header({"a": {**_F32, "data_offsets": [8, 0]}}, data=0),
        _header({"a": {**_F32, "data_offsets": [0, 8]}, "b": {**_F32, "data_offsets": [4, 8]}}),
        _header({"a": {**_F32, "data_offsets": [-8, 8]}}),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, content: bytes):
    (folder / "one.safetensors").write_bytes(content)
    _refused(folder, "one.safetensors", "download the checkpoint again")


def test_a_file_cut_short_is_refused(folder: Path):
    path = folder / "two.safetensors"
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) // 2, 9, 4):
        path.write_bytes(whole[:size])
        _refused(folder, "two.safetensors")
    path.write_bytes(whole)
    Checkpoint.open(folder)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not an endless loop, nor a silently short copy."""
    from csprune import checkpoint

    source = folder / "two.safetensors"
    header = checkpoint._Header.read(source)
    source.write_bytes(source.read_bytes()[:-6])
    monkeypatch.setattr(checkpoint._Header, "read", lambda _path: header)
    with pytest.raises(OSError, match="shorter"):
        rewrite(source, tmp_path / "target", {})


def test_no_config(folder: Path):
    (folder / "config.json").unlink()
    _refused(folder, "config.json", "give the folder of a transformers checkpoint")
    (folder / "config.json").write_text("[1]")
    _refused(folder, "config.json")


def test_pickled_weights_are_refused_unread(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    _refused(tmp_path, "no model.safetensors")
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "run").encode() + b"'\ntR."  # would run if unpickled
    (tmp_path / "pytorch_model.bin").write_bytes(bomb)
    _refused(tmp_path, "pytorch_model.bin", "never loads")
    assert not (tmp_path / "run").exists()


def test_no_such_folder(tmp_path: Path):
    _refused(tmp_path / "nowhere", "config.json")
