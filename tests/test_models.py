"""Loading a model: what is refused, in one line that helps, and that no foreign code runs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from csprune import InputError, load_model, load_readout
from csprune.models import locate_model

Change = Callable[[dict[str, torch.Tensor]], Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.make("llama"), tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def refusal(name: str | Path, **options: Any) -> str:
    """The message of the refusal: one line that names the place."""
    with pytest.raises(InputError) as caught:
        load_model(str(name), **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 700
    return message


def reconfigure(folder: Path, file: str = "config.json", **entries: Any) -> None:
    config = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**config, **entries}))


def reweigh(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# --- What works -----------------------------------------------------------------------------------


def test_a_folder_gives_its_own_model(checkpoint: Path) -> None:
    loaded = load_model(str(checkpoint))
    stored = load_file(checkpoint / "model.safetensors")
    assert (loaded.folder, loaded.name) == (checkpoint, str(checkpoint))
    assert not loaded.model.training
    assert len(loaded.tokenizer) == tiny.VOCABULARY
    state = loaded.model.state_dict()
    assert set(state) == set(stored)
    assert all(torch.equal(state[key], value) for key, value in stored.items())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_the_body_is_float32_whatever_the_checkpoint(tmp_path: Path, stored: torch.dtype) -> None:
    folder = tiny.save(tiny.make("gpt2").to(stored), tmp_path / "model")
    assert load_model(str(folder)).model.dtype == torch.float32
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_a_tied_head_is_not_missing(tmp_path: Path) -> None:
    folder = tiny.save(tiny.make("llama_tied"), tmp_path / "tied")
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_readout(load_model(str(folder)).model).tied


def test_a_folder_may_be_given_from_home(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert locate_model("~/model") == checkpoint


# --- Names ----------------------------------------------------------------------------------------


def test_demo_without_cache_and_hub_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = refusal("demo")
    assert "python -m csprune.demo" in message and "HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_demo_is_the_cached_model(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint, tmp_path / "SmolLM2-135M-Instruct")
    monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path))
    loaded = load_model("demo")
    assert (loaded.name, loaded.folder) == ("demo", tmp_path / "SmolLM2-135M-Instruct")
    assert "--revision" in refusal("demo", revision="main")


@pytest.mark.parametrize("name", ["org/name", "gpt2", "org/name-1.5B"])
def test_a_hub_id_out_of_reach(name: str) -> None:
    message = refusal(name)
    assert name in message and "--revision" in message and "no folder" in message


@pytest.mark.parametrize("name", ["a/b/c", "./missing", "missing/", "/no/such/model", "", "org/na me"])
def test_what_is_neither_folder_nor_hub_id(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", asked)
    monkeypatch.chdir(tmp_path)
    assert re.search("folder|config.json", refusal(name))


def test_a_file_is_no_folder(checkpoint: Path) -> None:
    assert "is a file" in refusal(checkpoint / "config.json")


def test_a_folder_has_no_revision(checkpoint: Path) -> None:
    assert "--revision" in refusal(checkpoint, revision="v1.0")


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_an_unusable_device_is_refused_before_loading(
    device: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("csprune.models.AutoModelForCausalLM.from_pretrained", loaded)
    assert repr(device) in refusal(checkpoint, device=device)
    with pytest.raises(AssertionError, match="was loaded"):
        load_model(str(checkpoint), device="cpu")


def test_an_unknown_dtype(checkpoint: Path) -> None:
    assert "float32, bfloat16, float16" in refusal(checkpoint, dtype="int8")


# --- Checkpoints ----------------------------------------------------------------------------------


def test_a_folder_without_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    assert "config.json" in refusal(copy)


def test_an_unknown_architecture(copy: Path) -> None:
    reconfigure(copy, model_type="from-the-future")
    assert "from-the-future" in refusal(copy)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "falcon"])
def test_a_folder_without_tokenizer(kind: str, tmp_path: Path) -> None:
    """For GPT-2 transformers gives an empty tokenizer, which would see one token everywhere."""
    folder = tiny.save(tiny.make(kind), tmp_path / "model", tokenizer=None)
    assert "tokenizer" in refusal(folder) and "same folder" in refusal(folder)
    tiny.tokenizer().save_pretrained(folder)
    assert len(load_model(str(folder)).tokenizer) == tiny.VOCABULARY


def test_pickled_weights_are_never_loaded(copy: Path, tmp_path: Path) -> None:
    """The pickle would write a file as soon as anything unpickled it."""
    marker = tmp_path / "unpickled"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    torch.save(Payload(), copy / "pytorch_model.bin")
    (copy / "model.safetensors").rename(copy / "elsewhere")
    message = refusal(copy)
    assert "pytorch_model.bin" in message and "pickled" in message and "never loads" in message
    # Beside safetensors it is passed over.
    (copy / "elsewhere").rename(copy / "model.safetensors")
    load_model(str(copy))
    assert not marker.exists()
    torch.load(copy / "pytorch_model.bin", weights_only=False)  # control: it does what it says
    assert marker.exists()


@pytest.mark.parametrize("key", ["lm_head.weight", "model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_missing_tensor_is_never_initialised(key: str, copy: Path) -> None:
    reweigh(copy, lambda tensors: tensors.pop(key))
    message = refusal(copy)
    assert key in message and "random" in message


def test_a_head_of_another_shape(copy: Path) -> None:
    reweigh(copy, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(90, tiny.WIDTH)}))
    assert str(copy) in refusal(copy)


def test_a_bias_that_the_class_would_leave_out(copy: Path) -> None:
    reweigh(copy, lambda tensors: tensors.update({"lm_head.bias": torch.ones(tiny.VOCABULARY)}))
    assert "lm_head.bias" in refusal(copy)
    # Control: other surplus tensors, such as another task's, are no reason to refuse.
    reweigh(copy, lambda tensors: tensors.update({"rotary.inv_freq": tensors.pop("lm_head.bias")}))
    load_model(str(copy))


def test_an_encoder_decoder(tmp_path: Path) -> None:
    folder = tiny.save(tiny.make("t5"), tmp_path / "t5")
    assert "encoder-decoder" in refusal(folder) and "causal" in refusal(folder)


@pytest.mark.parametrize("kind", ["bert_mlm", "bert_masked"])
def test_a_masked_model(kind: str, tmp_path: Path) -> None:
    """It loads as a causal class; that it sees later tokens is what gives it away."""
    folder = tiny.save(tiny.make(kind), tmp_path / kind)
    with pytest.raises(InputError, match="causal"):
        load_readout(load_model(str(folder)).model)


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", "fp8"])
def test_a_quantised_checkpoint(method: str, copy: Path) -> None:
    reconfigure(copy, quantization_config={"quant_method": method, "bits": 4})
    assert method in refusal(copy) and "unquantised" in refusal(copy)


def test_a_head_truncated_before(copy: Path) -> None:
    reconfigure(copy, quantization_config={"quant_method": "csprune", "kept": 8})
    assert "truncated before" in refusal(copy) and "original" in refusal(copy)


# --- Code that comes with a checkpoint ------------------------------------------------------------

OWN_CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
AUTO_MAPS = {
    "model and config": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    "model": {"AutoModelForCausalLM": "own.OwnModel"},
    "config": {"AutoConfig": "own.OwnConfig"},
    "tokenizer": {},
}


@pytest.mark.parametrize("which", AUTO_MAPS)
def test_own_code_runs_only_when_trusted(
    which: str, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "executed"
    (copy / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    if which == "tokenizer":
        own = {"AutoTokenizer": ["own.OwnTokenizer", "own.OwnTokenizer"]}
        reconfigure(copy, "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=own)
    else:
        kind = "own" if "config" in which else "llama"
        reconfigure(copy, model_type=kind, architectures=["OwnModel"], auto_map=AUTO_MAPS[which])
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # nobody is asked either
    if which == "model":  # transformers knows a llama: its own class is used
        assert type(load_model(str(copy)).model).__module__.startswith("transformers.models.llama")
    else:
        message = refusal(copy)
        assert "own code" in message and "--trust-remote-code" in message
    assert not marker.exists()
    # Control: with the flag it is executed, so the marker can tell.
    try:
        load_model(str(copy), trust_remote_code=True)
    except InputError:
        assert which == "config"  # a config class without a model class is no causal model
    assert marker.exists()
