"""An export is whole or absent, changes the head and the final norm alone, and refuses what it cannot do."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import pytest
import tiny
import torch
import transformers
from exports import IDS, export_module, export_quickly, load, logits, relative_error
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import csprune
from csprune.errors import CspruneError, InputError
from csprune.hf import FactorizedHead

EXACT = 1e-6


def _save(kind: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    return tiny.save(tiny.make(kind).to(dtype), folder, **options)


def _truncation(source: Path, **options: Any) -> csprune.Truncation:
    return exports.truncated(load(source, dtype=torch.float32), **options)


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return _save("llama", tmp_path / "source")


@pytest.fixture
def truncation(source: Path) -> csprune.Truncation:
    return _truncation(source)


# --- What is written ------------------------------------------------------------------------------------


def _stored(folder: Path) -> dict[str, tuple[str, str, bytes, tuple[int, ...]]]:
    """File, dtype, bytes and shape of every tensor, read by hand."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert header.pop("__metadata__") == {"format": "pt"}
        for name, entry in header.items():
            begin, end = (8 + length + x for x in entry["data_offsets"])
            found[name] = (path.name, entry["dtype"], data[begin:end], tuple(entry["shape"]))
    return found


@pytest.mark.parametrize("shards", [None, "10KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gemma2", "phi", "gpt2"])
def test_only_head_and_norm_change(tmp_path: Path, kind: str, dtype: torch.dtype, shards: str | None):
    source = _save(kind, tmp_path / "source", dtype, **({"max_shard_size": shards} if shards else {}))
    truncation = _truncation(source)
    model = truncation.readout.model
    out = export_quickly(source, truncation, tmp_path / "out")
    before, after = _stored(source), _stored(out)
    head, norm = tiny.parts(model).head_name, tiny.parts(model).norm_name
    changed = {f"{norm}.weight", f"{norm}.bias"} & set(before)
    new = {f"{head}.weight", f"{head}.down", f"{head}.offset"}
    dropped = {f"{head}.bias"} & set(before)
    assert bool(dropped) == (kind == "phi")
    assert set(after) == (set(before) | new) - dropped
    for name in set(before) - changed - new - dropped:
        assert after[name] == before[name], name
    code = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert {after[name][1] for name in new | changed} == {code}
    vocabulary, hidden, kept = tiny.VOCABULARY, tiny.WIDTH, truncation.kept
    assert [after[n][3] for n in sorted(new)] == [(kept, hidden), (vocabulary,), (vocabulary, kept)]
    gain = load_file(out / after[f"{norm}.weight"][0])[f"{norm}.weight"]
    assert set(gain.tolist()) == {0.0 if kind == "gemma2" else 1.0}
    factors = truncation.factors(dtype)
    assert torch.equal(load_file(out / after[f"{head}.down"][0])[f"{head}.down"], factors.down)
    assert {p.name for p in out.glob("*.safetensors")} == {p.name for p in source.glob("*.safetensors")}
    index = out / "model.safetensors.index.json"
    assert index.exists() == bool(shards)
    if shards:
        content = json.loads(index.read_text())
        assert content["weight_map"] == {name: entry[0] for name, entry in after.items()}
        assert content["metadata"]["total_size"] == sum(len(entry[2]) for entry in after.values())
        sizes = {"F32": 4, "BF16": 2, "F16": 2}
        total = sum(len(entry[2]) // sizes[entry[1]] for entry in after.values())
        assert content["metadata"]["total_parameters"] == total
    # In the stored dtype, the factors' rounding and nothing else.
    error = relative_error(logits(load(out, dtype=torch.float32)), exports.truncated_logits(truncation))
    assert error < {"F32": EXACT, "BF16": 2e-2, "F16": 2e-3}[code]


def test_sizes_are_those_on_disk(tmp_path: Path):
    source = _save("phi", tmp_path / "source", torch.bfloat16, max_shard_size="10KB")
    truncation = _truncation(source)
    with exports.unverified():
        details = csprune.export(source, truncation, tmp_path / "out")
    vocabulary, hidden, kept = tiny.VOCABULARY, tiny.WIDTH, truncation.kept
    before, after = details["sizes"]["before"], details["sizes"]["after"]
    assert before["head_parameters"] == vocabulary * hidden + vocabulary
    assert after["head_parameters"] == vocabulary * kept + kept * hidden + vocabulary
    assert after["head_bytes"] == 2 * after["head_parameters"]
    for sizes, folder in ((before, source), (after, tmp_path / "out")):
        assert sizes["bytes_on_disk"] == sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def test_every_other_file_is_carried_over(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    kept = {
        "LICENSE": "terms",
        "chat_template.jinja": "{{ messages }}",
        "merges.txt": "a b",
        "sub/deep/notes.json": '{"x": 1}',
        "sub/config.json": "{}",
        "sub/README.md": "of the sub-folder",
        "generation_config.json": '{"temperature": 0.5, "do_sample": true}',
    }
    not_kept = ["pytorch_model.bin", "tf_model.h5", "model.gguf", "onnx/model.onnx", "onnx/model.onnx_data"]
    not_kept += ["original/consolidated.00.pth", "pytorch_model.bin.index.json", ".cache/x", ".gitattributes"]
    for name in [*kept, *not_kept]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(kept.get(name, "weights of the original"))
    (source / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Source\n")
    (tmp_path / "blob").write_text("linked")
    (source / "linked.txt").symlink_to(tmp_path / "blob")  # as in the hub's cache
    out = export_quickly(source, truncation, tmp_path / "out")
    for name, text in kept.items():
        assert (out / name).read_text() == text
    assert not any((out / name).exists() for name in not_kept)
    assert (out / "linked.txt").read_text() == "linked" and not (out / "linked.txt").is_symlink()
    assert (out / "README.original.md").read_text() == (source / "README.md").read_text()
    assert "license: apache-2.0" in (out / "README.md").read_text()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_config(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    out = export_quickly(source, truncation, tmp_path / "out")
    before, after = (json.loads((f / "config.json").read_text()) for f in (source, out))
    assert after.pop("quantization_config") == {
        "quant_method": "csprune",
        "kept": truncation.kept,
        "removed": truncation.removed,
        "rank": 0.3,
        "method": "fisher",
        "format": "factorized",
        "version": csprune.__version__,
    }
    assert after.pop("auto_map") == {"AutoConfig": "csprune_hf.LlamaConfig"}
    assert after.pop("tie_word_embeddings") is False
    before.pop("tie_word_embeddings", None)
    assert after == before


def test_code_that_transformers_does_not_need_is_left_behind(tmp_path: Path, source: Path):
    """Hub folders of models that transformers knows by now still name their old code."""
    stale = {
        "AutoConfig": "old.Config",
        "AutoModelForCausalLM": "old.Model",
        "AutoTokenizer": ["old.T", None],
    }
    _edit_config(source, auto_map=stale)
    out = export_quickly(source, _truncation(source), tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"] == {"AutoConfig": "csprune_hf.LlamaConfig", "AutoTokenizer": ["old.T", None]}
    # Control: where that code would have made the model, the export is refused.
    refusal = "own model class"
    _refused(lambda: export_module.check_export(source, tmp_path / "x", trust_remote_code=True), refusal)


@pytest.fixture
def composite(tmp_path: Path) -> Path:
    """A tied text model within a composite config, whose class transformers has under its own type."""
    text = tiny.make("gemma3").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return tiny.save(model, tmp_path / "source", tiny.tokenizer())


def test_composite_config(tmp_path: Path, composite: Path):
    config = json.loads((composite / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (composite / "config.json").write_text(json.dumps(config))
    truncation = _truncation(composite)
    assert truncation.readout.tied
    out = export_quickly(composite, truncation, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False and config["text_config"]["tie_word_embeddings"] is False
    assert config["auto_map"] == {"AutoConfig": "csprune_hf.Gemma3Config"}
    model = load(out)
    model.tie_weights()
    assert isinstance(model.get_output_embeddings(), FactorizedHead)
    assert relative_error(logits(model), exports.truncated_logits(truncation)) < EXACT


def _rename(folder: Path, rename: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({rename(n): t for n, t in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize("untrained_norms", [False, True])
@pytest.mark.parametrize(
    "kind, rename, head",
    [
        ("gpt2", lambda n: n.removeprefix("transformer."), "lm_head"),
        ("llama_tied", lambda n: n.removeprefix("model."), "lm_head"),
        ("bloom", lambda n: n.removeprefix("transformer."), "lm_head"),
        ("gpt_neox", lambda n: n.replace("lm_head.", "embed_out."), "embed_out"),
    ],
)
def test_stored_names_that_differ_from_the_modules(
    tmp_path: Path, kind: str, rename: Callable[[str], str], head: str, untrained_norms: bool
):
    """As on the hub: GPT-2 without `transformer.`, GPT-NeoX with `embed_out`, bare models."""
    model = tiny.make(kind)
    if untrained_norms:  # all equal: the name has to tell them apart
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in name or "ln_" in name):
                torch.nn.init.constant_(parameter, 1.0 if name.endswith("weight") else 0.0)
    source = tiny.save(model, tmp_path / "source")
    _rename(source, rename)
    before = set(load_file(source / "model.safetensors"))
    assert before != set(model.state_dict())
    truncation = _truncation(source)
    out = export_quickly(source, truncation, tmp_path / "out")
    with safe_open(out / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == before | {f"{head}.weight", f"{head}.down", f"{head}.offset"}
    loaded = load(out)
    loaded.tie_weights()
    assert relative_error(logits(loaded), exports.truncated_logits(truncation)) < EXACT


def test_a_tied_table_that_is_stored_twice(tmp_path: Path):
    source = _save("llama_tied", tmp_path / "source")
    path = source / "model.safetensors"
    tensors = load_file(path)
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path, {"format": "pt"}
    )
    truncation = _truncation(source)
    out = export_quickly(source, truncation, tmp_path / "out")
    assert relative_error(logits(load(out)), exports.truncated_logits(truncation)) < EXACT


def test_an_untied_head_of_the_tables_values(tmp_path: Path):
    """Equal values do not make them one: the table is left alone."""
    model = tiny.make("gpt_neox")
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(model.get_input_embeddings().weight)
    source = tiny.save(model, tmp_path / "source")
    _rename(source, lambda n: n.replace("lm_head.", "embed_out."))
    truncation = _truncation(source)
    out = export_quickly(source, truncation, tmp_path / "out")
    name = "gpt_neox.embed_in.weight"
    assert _stored(out)[name] == _stored(source)[name]
    assert relative_error(logits(load(out)), exports.truncated_logits(truncation)) < EXACT


# --- Verification ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama_tied", "phi"])
def test_verification_reloads_the_checkpoint(tmp_path: Path, kind: str):
    source = _save(kind, tmp_path / "source", torch.bfloat16, max_shard_size="10KB")
    truncation = _truncation(source)
    details = csprune.export(source, truncation, tmp_path / "out", input_ids=IDS)
    for when in ("loaded", "after_tie_weights"):
        assert details["verification"][when]["rms_error"] < EXACT
    assert details["verification"]["tokens"] == 2 * IDS.shape[1]
    assert _names(tmp_path) == ["out", "source"]
    # The model is as it was: its own head in place.
    assert not isinstance(truncation.readout.model.get_output_embeddings(), FactorizedHead)


def _corrupt_factor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.down"][0, 0] += 0.05
    save_file(tensors, path, metadata={"format": "pt"})


def _tie_again(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))


def _break_code(folder: Path) -> None:
    (folder / "csprune_hf.py").write_text("raise ImportError('broken\\non two lines')")


@pytest.mark.parametrize(
    "damage, message",
    [
        (_corrupt_factor, "differs from the truncation"),
        (_tie_again, "does not load|differs from the truncation"),
        (_break_code, "does not load"),
    ],
)
def test_verification_refuses_a_wrong_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None], message: str
):
    source = _save("llama_tied", tmp_path / "source")
    truncation = _truncation(source)
    verify = export_module._verify

    def damaged(folder: Path, *rest: Any) -> Any:
        damage(folder)
        return verify(folder, *rest)

    monkeypatch.setattr(export_module, "_verify", damaged)
    with pytest.raises(CspruneError, match=message) as caught:
        csprune.export(source, truncation, tmp_path / "out", input_ids=IDS)
    assert not isinstance(caught.value, InputError) and "\n" not in str(caught.value)
    assert _names(tmp_path) == ["source"]


# --- Refusals -------------------------------------------------------------------------------------------


def _refused(call: Callable[[], Any], *words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def _edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda f: (f / "config.json").unlink(), ("config.json",)),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), ("pickled",)),
        (lambda f: os.truncate(f / "model.safetensors", 999), ("model.safetensors", "complete")),
        (lambda f: _edit_config(f, quantization_config={"quant_method": "gptq"}), ("gptq",)),
        (lambda f: _edit_config(f, quantization_config={"quant_method": "csprune"}), ("truncated before",)),
        (lambda f: _edit_config(f, is_encoder_decoder=True), ("encoder-decoder",)),
        (
            lambda f: _edit_config(f, model_type="own", auto_map={"AutoConfig": "own.Config"}),
            ("own model class",),
        ),
        (lambda f: shutil.rmtree(f), ("config.json",)),
    ],
)
def test_bad_sources_are_refused(
    tmp_path: Path, source: Path, truncation: csprune.Truncation, damage: Callable[[Path], Any], words: tuple
):
    damage(source)
    _refused(lambda: csprune.export(source, truncation, tmp_path / "out"), str(source), *words)
    assert not (tmp_path / "out").exists()


def test_changed_or_foreign_weights_are_refused(tmp_path: Path, source: Path):
    out = tmp_path / "out"
    other = _save("qwen2", tmp_path / "other")
    truncation = _truncation(source)
    _refused(lambda: csprune.export(other, truncation, out), str(other), "not what the truncated model")
    for module in ("lm_head", "model.norm"):
        truncation = _truncation(source)
        # Through .data the weights' count of writes stays as it was: only the values tell.
        truncation.readout.model.get_submodule(module).weight.data.view(-1)[3] += 1e-3
        _refused(lambda t=truncation: csprune.export(source, t, out), str(source), "the model was changed")
        truncation = _truncation(source)
        with torch.no_grad():
            truncation.readout.model.get_submodule(module).weight.view(-1)[3] += 1e-3
        _refused(lambda t=truncation: csprune.export(source, t, out), "changed since its readout was loaded")
    assert _names(tmp_path) == ["other", "source"]
    export_quickly(source, _truncation(source), out)  # unchanged, it is taken


def test_nothing_removed_is_refused(tmp_path: Path, source: Path):
    """A of k = d would fit the stock class, which would leave the other factor out without a word."""
    truncation = _truncation(source)
    whole = csprune.truncate(truncation.readout, truncation.calibration, "fisher", removed=0)
    assert whole.kept == tiny.WIDTH
    _refused(lambda: csprune.export(source, whole, tmp_path / "out"), "remove at least one")
    one = csprune.truncate(truncation.readout, truncation.calibration, "fisher", removed=1)
    export_quickly(source, one, tmp_path / "out")


def test_unknown_format(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    _refused(lambda: csprune.export(source, truncation, tmp_path / "out", "gguf"), "'gguf'", "factorized")


def test_an_applied_truncation_is_no_original(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    """Exporting while it is applied must not write the truncated norm and head twice folded."""
    want = exports.truncated_logits(truncation)
    with csprune.apply(truncation.readout.model, truncation):
        try:
            export_quickly(source, truncation, tmp_path / "out")
        except InputError:
            return
    assert relative_error(logits(load(tmp_path / "out")), want) < EXACT


def test_places_that_would_lose_something(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    def refused(out: Path, *words: str, overwrite: bool = False) -> None:
        _refused(lambda: csprune.export(source, truncation, out, overwrite=overwrite), "-o", *words)

    before = _stored(source)
    for overwrite in (False, True):
        for out in (source, source / "out", tmp_path, source / ".." / "source"):
            refused(out, "contain one another", overwrite=overwrite)
    (tmp_path / "link").symlink_to(source)
    refused(tmp_path / "link", "contain one another", overwrite=True)
    (tmp_path / "file").write_text("mine")
    refused(tmp_path / "file", "not a folder", overwrite=True)
    refused(tmp_path / "file" / "out", "cannot be written")
    refused(Path("/dev/null"), "not a folder", overwrite=True)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "diary.txt").write_text("mine")
    refused(foreign, "not empty", "--overwrite")
    refused(foreign, "not an output of csprune", overwrite=True)
    (foreign / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    refused(foreign, "not an output of csprune", overwrite=True)
    assert (foreign / "diary.txt").read_text() == "mine" and (tmp_path / "file").read_text() == "mine"
    assert _stored(source) == before
    assert _names(tmp_path) == ["file", "foreign", "link", "source"]


def test_a_mount_point_is_refused_at_once(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch):
    """It cannot be renamed away: better said before the calibration than after it."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda self: self == tmp_path / "out")
    _refused(lambda: export_module.check_export(source, tmp_path / "out"), "mount point")
    monkeypatch.undo()
    export_module.check_export(source, tmp_path / "out")


def test_overwriting_an_earlier_output(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    out = export_quickly(source, truncation, tmp_path / "out")
    (out / "stale.txt").touch()
    _refused(lambda: csprune.export(source, truncation, out), "not empty", "--overwrite")
    smaller = _truncation(source, rank=0.5)
    export_quickly(source, smaller, out, overwrite=True)
    assert relative_error(logits(load(out)), exports.truncated_logits(smaller)) < EXACT
    assert not (out / "stale.txt").exists() and _names(tmp_path) == ["out", "source"]
    empty = tmp_path / "empty"
    empty.mkdir()
    export_quickly(source, truncation, empty)


def test_what_appears_in_the_place_meanwhile_is_not_lost(
    tmp_path: Path, source: Path, truncation: csprune.Truncation, monkeypatch: pytest.MonkeyPatch
):
    def meanwhile(*_args: Any) -> dict:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "diary.txt").write_text("mine")
        return {}

    monkeypatch.setattr(export_module, "_verify", meanwhile)
    _refused(lambda: csprune.export(source, truncation, tmp_path / "out"), "not empty")
    assert _names(tmp_path / "out") == ["diary.txt"] and _names(tmp_path) == ["out", "source"]


@pytest.mark.parametrize("step", ["_write_weights", "write_json", "carry_over", "_verify", "_write_card"])
@pytest.mark.parametrize("old", [False, True])
def test_a_full_disk_leaves_what_there_was(
    tmp_path: Path,
    source: Path,
    truncation: csprune.Truncation,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    old: bool,
):
    out = tmp_path / "out"
    if old:
        export_quickly(source, truncation, out)
    before = {p.name: p.read_bytes() for p in out.iterdir()} if old else {}

    def full(*_args: Any, **_options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(export_module, "_verify", lambda *_: {})
    monkeypatch.setattr(export_module, step, full)
    with pytest.raises(CspruneError, match="No space left") as caught:
        csprune.export(source, truncation, out, overwrite=old)
    assert "\n" not in str(caught.value)
    assert _names(tmp_path) == (["out"] if old else []) + ["source"]
    assert not old or {p.name: p.read_bytes() for p in out.iterdir()} == before


# --- Killed ---------------------------------------------------------------------------------------------

_EXPORTER = """
import os, signal, sys, time
from pathlib import Path
import exports, csprune
from csprune.errors import CspruneError
root = Path(sys.argv[1])
truncation = exports.truncated(exports.load(root / "source"))
module = exports.export_module
real = module._verify
def brief(*args):
    time.sleep(0.03)  # the verification's process is a long time in which nothing is written
    return {}
module._verify = brief
def run(out, overwrite):
    try:
        csprune.export(root / "source", truncation, root / out, overwrite=overwrite)
        return "done"
    except CspruneError as error:
        return f"refused: {error}"
# One process forks one child for each line, so that the imports are paid once.
for line in iter(sys.stdin.readline, ""):
    out, overwrite = line.split()
    print("ready", flush=True)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = 3
        try:
            status = 0 if run(out, overwrite == "overwrite") == "done" else 2
        except KeyboardInterrupt:
            status = 4
        finally:
            os._exit(status)
    print(child, flush=True)
    sys.stdin.readline()  # until it is waited for, its id is nobody else's
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


class _Exporter:
    """A process that exports at command, in a child that can be killed."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        # A forked child has none of its parent's OpenMP threads, and would wait for them for ever.
        environment |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-c", _EXPORTER, str(root)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment, **pipes)

    def __enter__(self) -> _Exporter:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def run(self, out: str, overwrite: bool, after: float = 0, how: int | None = None) -> tuple[int, float]:
        """Export, the child signalled after so many seconds: its exit status, and how long it ran."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{out} {'overwrite' if overwrite else 'new'}\n")
        stdin.flush()
        assert stdout.readline() == "ready\n"
        child = int(stdout.readline())
        begin = time.perf_counter()
        if how is not None:
            time.sleep(after)
            os.kill(child, how)
        stdin.write("wait\n")
        stdin.flush()
        return int(stdout.readline()), time.perf_counter() - begin


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_at_any_moment_the_output_is_absent_or_whole(tmp_path: Path, how: int):
    source = _save("llama", tmp_path / "source", max_shard_size="4KB")
    truncation = _truncation(source)
    new = exports.truncated_logits(truncation)
    earlier = _truncation(source, method="singular", rank=0.5)
    old = exports.truncated_logits(earlier)
    export_quickly(source, earlier, tmp_path / "earlier")
    out = tmp_path / "out"
    generator = random.Random(how)
    seen = {"killed": 0, "absent": 0, "old": 0, "new": 0}
    with _Exporter(tmp_path) as exporter:
        duration = min(exporter.run("trial", overwrite=True)[1] for _ in range(3))
        shutil.rmtree(tmp_path / "trial")
        for trial in range(20):
            overwrite = trial % 2 == 1
            shutil.rmtree(out, ignore_errors=True)
            if overwrite:
                shutil.copytree(tmp_path / "earlier", out)
            status, _ = exporter.run("out", overwrite, generator.uniform(0, duration), how)
            seen["killed"] += status != 0
            if how == signal.SIGINT:  # Ctrl-C tidies up behind itself
                assert not list(tmp_path.glob(".*"))
            if out.exists():
                got = logits(load(out))
                which = "new" if relative_error(got, new) < EXACT else "old"
                assert which == "new" or (overwrite and relative_error(got, old) < EXACT)
                seen[which] += 1
            else:
                seen["absent"] += 1
        # The next run clears away what all of them left.
        assert exporter.run("out", overwrite=True)[0] == 0
    assert _names(tmp_path) == ["earlier", "out", "source"]
    assert relative_error(logits(load(out)), new) < EXACT
    assert seen["killed"] >= 5 and seen["absent"] and seen["old"], seen  # or nothing was tried


def test_two_runs_at_once(tmp_path: Path, source: Path, truncation: csprune.Truncation):
    """The second one says so in one line, and the first one's output is whole."""
    messages = []

    def second(*_args: Any) -> dict:
        with pytest.raises(InputError, match="another run is writing") as caught:
            csprune.export(source, truncation, tmp_path / "out")
        messages.append(str(caught.value))
        return {}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_module, "_verify", second)
        csprune.export(source, truncation, tmp_path / "out")
    assert len(messages) == 1 and "\n" not in messages[0]
    assert relative_error(logits(load(tmp_path / "out")), exports.truncated_logits(truncation)) < EXACT
    assert _names(tmp_path) == ["out", "source"]


# --- Precision and memory -------------------------------------------------------------------------------


def _bf16_ratio(source: Path, truncation: csprune.Truncation, out: Path, ids: torch.Tensor) -> float:
    """RMS error of the export's centred logits in bfloat16, in units of the original's.

    Each against the same weights run in float32: the truncation with exact factors, and the original.
    """

    def rms(ours: torch.Tensor, theirs: torch.Tensor) -> float:
        difference = ours - theirs
        return float((difference - difference.mean(-1, keepdim=True)).square().mean().sqrt())

    model = truncation.readout.model
    original = rms(logits(load(source, dtype=torch.bfloat16), ids), logits(model, ids))
    exported = rms(logits(load(out, dtype=torch.bfloat16), ids), exports.truncated_logits(truncation, ids))
    return exported / original


@pytest.mark.parametrize("method", ["fisher", "fisher-whitened"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_bfloat16_error_beside_the_originals(tmp_path: Path, kind: str, method: str):
    source = _save(kind, tmp_path / "source", torch.bfloat16)
    truncation = _truncation(source, method=method, rank=0.2)
    out = export_quickly(source, truncation, tmp_path / "out")
    assert _bf16_ratio(source, truncation, out, IDS) < 1.5


_MEMORY = """
import gc, json, sys, threading, time
import torch, csprune
from csprune.demo import demo_folder

def resident():
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if ":" in line)
    return int(lines["RssAnon"].split()[0]) + int(lines["RssFile"].split()[0])

loaded = csprune.load_model(sys.argv[1])
windows = csprune.read_windows(loaded.tokenizer, "demo", documents=8, sequence_length=128)
readout = csprune.load_readout(loaded.model)
truncation = csprune.truncate(readout, csprune.calibrate(loaded.model, windows), "fisher", 0.2)
gc.collect()
before, peak, over = resident(), 0, threading.Event()
def watch():
    global peak
    while not over.is_set():
        peak = max(peak, resident())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
csprune.export(loaded.folder, truncation, sys.argv[2], input_ids=windows.input_ids)
over.set()
thread.join()
head = readout.unembedding.weight.numel() * 4
print(json.dumps({"ratio": (peak - before) * 1024 / head}))
"""


@pytest.mark.slow
def test_memory_of_an_export(demo_folder: Path, tmp_path: Path):
    """At most 4 times the head's float32 size above what the process held before, mapped files included."""
    command = [sys.executable, "-c", _MEMORY, str(demo_folder), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    ratio = json.loads(done.stdout.splitlines()[-1])["ratio"]
    print(f"peak memory of the export: {ratio:.2f} times the head")
    assert 0.5 < ratio < 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fisher", "fisher-whitened"])
def test_bfloat16_error_beside_the_originals_on_the_demo_model(
    demo_folder: Path, tmp_path: Path, method: str
):
    source = tmp_path / "source"
    shutil.copytree(demo_folder, source, ignore=shutil.ignore_patterns("*.safetensors"))
    load(demo_folder, dtype=torch.bfloat16).save_pretrained(source)
    loaded = csprune.load_model(str(source))
    windows = csprune.read_windows(loaded.tokenizer, "demo", documents=16, sequence_length=128)
    readout = csprune.load_readout(loaded.model)
    calibration = csprune.calibrate(loaded.model, windows)
    for rank in (0.05, 0.2):
        truncation = csprune.truncate(readout, calibration, method, rank)
        out = export_quickly(source, truncation, tmp_path / f"out-{rank}")
        ratio = _bf16_ratio(source, truncation, out, windows.input_ids[:2])
        print(f"{method} {rank}: bfloat16 error {ratio:.3f} times the original's")
        assert ratio < 1.5
