"""A truncated checkpoint loads as what it was in memory, by every route, or not at all."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import exports
import pytest
import tiny
import torch
from exports import IDS, load, logits, relative_error
from safetensors.torch import save_file
from transformers import AutoModel
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

import csprune
from csprune import hf

EXACT = 1e-6
FAR = 1e-2  # what the truncation changes is far above rounding, so that the original would be noticed


@dataclass(frozen=True)
class Case:
    kind: str
    source: Path
    out: Path
    again: Path  # loaded and saved again, in small shards
    logits: torch.Tensor  # of the truncation in memory
    original: torch.Tensor
    generated: torch.Tensor


def _generate(model: Any) -> torch.Tensor:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), **options)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every tiny architecture, exported, and saved again from the loaded model."""
    made = {}
    for kind in tiny.KINDS:
        folder = tmp_path_factory.mktemp(kind)
        source = tiny.save(tiny.make(kind), folder / "source")
        model = load(source)
        truncation = exports.truncated(model)
        with csprune.apply(model, truncation):
            want, generated = logits(model), _generate(model)
        out = exports.export_quickly(source, truncation, folder / "out")
        load(out).save_pretrained(folder / "again", max_shard_size="10KB")
        case = Case(kind, source, out, folder / "again", want, logits(model), generated)
        save_file({"ids": IDS, "logits": want, "original": case.original}, folder / "expected.safetensors")
        made[kind] = case
    return made


@pytest.fixture(scope="module")
def llama(cases: dict[str, Case]) -> Case:
    return cases["llama"]


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_import_csprune_gives_the_truncation(cases: dict[str, Case], kind: str):
    case = cases[kind]
    model = load(case.out)
    assert relative_error(logits(model), case.logits) < EXACT
    assert torch.allclose(logits(model), case.logits, atol=1e-4)  # constants of a token too
    assert relative_error(logits(model), case.original) > FAR
    model.tie_weights()
    assert relative_error(logits(model), case.logits) < EXACT
    assert torch.equal(_generate(model), case.generated)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_saved_again_it_is_the_same(cases: dict[str, Case], kind: str):
    case = cases[kind]
    assert len(list(case.again.glob("*.safetensors"))) > 3
    model = load(case.again)
    assert relative_error(logits(model), case.logits) < EXACT
    model.tie_weights()
    assert relative_error(logits(model), case.logits) < EXACT


_ELSEWHERE = """
import json, sys
sys.modules["csprune"] = None  # as where it is not installed
from pathlib import Path
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

def error(a, b):
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    return float((a - b).norm() / b.norm())

def logits(model, ids):
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits.double()

results = {}
for folder in map(Path, sys.argv[1:]):  # first, for the first trusted checkpoint registers the loader
    expected = load_file(folder / "expected.safetensors")
    result = results[folder.name] = {}
    try:
        AutoModelForCausalLM.from_pretrained(folder / "out")
        result["stock"] = "loaded"
    except Exception as e:
        result["stock"] = f"{type(e).__name__}: {e}"
    try:
        model = AutoModelForCausalLM.from_pretrained(folder / "out", ignore_mismatched_sizes=True)
        result["forced"] = error(logits(model, expected["ids"]), expected["original"])
    except Exception as e:
        result["forced"] = 1.0
for folder in map(Path, sys.argv[1:]):
    expected = load_file(folder / "expected.safetensors")
    result = results[folder.name]
    for name in ("out", "again"):
        model = AutoModelForCausalLM.from_pretrained(folder / name, trust_remote_code=True)
        result[name] = error(logits(model, expected["ids"]), expected["logits"])
        model.tie_weights()
        result[name + " tied"] = error(logits(model, expected["ids"]), expected["logits"])
    model.save_pretrained(folder / "third", max_shard_size="10KB")
    model = AutoModelForCausalLM.from_pretrained(folder / "third", trust_remote_code=True)
    result["third"] = error(logits(model, expected["ids"]), expected["logits"])
    if folder == Path(sys.argv[-1]):
        generated = model.generate(expected["ids"], max_new_tokens=3, do_sample=False, eos_token_id=None)
        result["generated"] = list(generated.shape)
    result["original"] = error(logits(model, expected["ids"]), expected["original"])
print(json.dumps(results))
"""


def _python(code: str, *arguments: object, **environment: str) -> Any:
    """What a fresh process prints last, read as JSON."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def elsewhere(cases: dict[str, Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """Every checkpoint loaded in one process that cannot import csprune."""
    modules = tmp_path_factory.mktemp("modules")
    found = _python(_ELSEWHERE, *(case.out.parent for case in cases.values()), HF_MODULES_CACHE=str(modules))
    return {kind: found[case.out.parent.name] for kind, case in cases.items()}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_without_csprune_remote_code_gives_the_truncation(elsewhere: dict[str, dict], kind: str):
    result = elsewhere[kind]
    for name in ("out", "again", "out tied", "again tied", "third"):
        assert result[name] < EXACT, name
    assert result["original"] > FAR
    assert result.get("generated") in (None, [3, 19])


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_without_csprune_and_without_trust_it_fails(elsewhere: dict[str, dict], kind: str):
    result = elsewhere[kind]
    assert "size" in result["stock"] and "mismatch" in result["stock"], result["stock"]
    assert result["forced"] > FAR  # even then the original's logits are not what comes out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_low_precision_errs_as_the_original_does(cases: dict[str, Case], kind: str, dtype: torch.dtype):
    case = cases[kind]
    model = load(case.out, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    ours = relative_error(logits(model), case.logits)
    theirs = relative_error(logits(load(case.source, dtype=dtype)), case.original)
    assert ours < 2 * theirs


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "gpt2"])
def test_device_map(cases: dict[str, Case], kind: str, tmp_path: Path):
    case = cases[kind]
    assert relative_error(logits(load(case.out, device_map="auto")), case.logits) < EXACT
    # Memory for a part of the model: the rest, head and all, is read from disk when it is needed.
    limited = load(case.out, device_map="auto", max_memory={"cpu": "60KB"}, offload_folder=tmp_path)
    assert "disk" in map(str, limited.hf_device_map.values())
    assert relative_error(logits(limited), case.logits) < EXACT


def test_copies_and_pickles(llama: Case):
    model = load(llama.out)
    assert relative_error(logits(copy.deepcopy(model)), llama.logits) < EXACT
    assert relative_error(logits(pickle.loads(pickle.dumps(model))), llama.logits) < EXACT


def test_two_checkpoints_of_remote_code_in_one_process(cases: dict[str, Case]):
    """After `import csprune` as before it, the copies that come with checkpoints do no harm."""
    a, b = cases["llama"], cases["gpt_neox"]
    models = [load(case.out, trust_remote_code=True) for case in (a, b)]
    for case, model in zip((a, b), models, strict=True):
        assert relative_error(logits(model), case.logits) < EXACT
        assert AUTO_QUANTIZER_MAPPING["csprune"] is hf.CspruneQuantizer


_COPY_FIRST = """
import json, sys
from transformers import AutoModelForCausalLM, AutoConfig
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
a, b, source = sys.argv[1:]
first = AutoModelForCausalLM.from_pretrained(a, trust_remote_code=True)
second = AutoModelForCausalLM.from_pretrained(b, trust_remote_code=True)
assert "csprune" not in sys.modules
import csprune, torch
from csprune import hf
third = AutoModelForCausalLM.from_pretrained(a)
ids = torch.arange(4, 20)[None]
equal = torch.equal(first(input_ids=ids).logits, third(input_ids=ids).logits)
heads = [isinstance(m.get_output_embeddings(), hf.FactorizedHead) for m in (first, second, third)]
plain = AutoModelForCausalLM.from_pretrained(source).get_output_embeddings()
plain = isinstance(plain, hf.FactorizedHead)
third.save_pretrained(a + "-third")
fourth = AutoModelForCausalLM.from_pretrained(a + "-third", trust_remote_code=True)
equal &= torch.equal(first(input_ids=ids).logits, fourth(input_ids=ids).logits)
refused = []
for model in (first, third):
    try:
        csprune.load_readout(model)
        refused.append(False)
    except csprune.InputError as error:
        refused.append("was truncated before" in str(error))
print(json.dumps({"equal": equal, "heads": heads, "plain": plain, "refused": refused}))
"""


def test_import_csprune_after_a_checkpoint_of_remote_code(cases: dict[str, Case], tmp_path: Path):
    a, b = (shutil.copytree(cases[kind].out, tmp_path / kind) for kind in ("llama", "phi"))
    result = _python(_COPY_FIRST, a, b, cases["llama"].source, HF_MODULES_CACHE=str(tmp_path / "modules"))
    assert result == {"equal": True, "heads": [True] * 3, "plain": False, "refused": [True, True]}


def test_the_newest_loader_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A checkpoint of a newer csprune brings a loader that an older installed one must not keep out."""
    for mapping in (AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.setitem(mapping, "csprune", mapping["csprune"])  # put back at the end
    text = Path(hf.__file__).read_text()

    def run(revision: int) -> Any:
        path = tmp_path / f"revision{revision}.py"
        path.write_text(text.replace(f"REVISION = {hf.REVISION}\n", f"REVISION = {revision}\n"))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    run(hf.REVISION)
    run(hf.REVISION - 1)
    assert AUTO_QUANTIZER_MAPPING["csprune"] is hf.CspruneQuantizer
    newer = run(hf.REVISION + 1)
    assert AUTO_QUANTIZER_MAPPING["csprune"] is newer.CspruneQuantizer
    assert AUTO_QUANTIZATION_CONFIG_MAPPING["csprune"] is newer.CspruneConfig


def test_dequantize_is_refused(llama: Case):
    model = load(llama.out)
    with pytest.raises(NotImplementedError, match="load the original model"):
        model.dequantize()
    assert relative_error(logits(model), llama.logits) < EXACT


@pytest.mark.parametrize("kind", ["llama", "llama_tied"])
def test_resizing_the_vocabulary_is_refused_before_anything_changes(cases: dict[str, Case], kind: str):
    for model in (load(cases[kind].out), copy.deepcopy(load(cases[kind].out))):
        with pytest.raises(NotImplementedError, match="truncate it again"):
            model.resize_token_embeddings(200)
        assert model.get_input_embeddings().weight.shape[0] == tiny.VOCABULARY
        assert relative_error(logits(model), cases[kind].logits) < EXACT


def test_a_model_without_head_is_refused(llama: Case):
    """Its final norm has no gain: such hidden states would be wrong without a word."""
    with pytest.raises(ValueError, match="AutoModelForCausalLM"):
        AutoModel.from_pretrained(llama.out)


def _with_config(case: Case, folder: Path, **fields: Any) -> Path:
    shutil.copytree(case.out, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))
    return folder


def test_fields_of_another_version(llama: Case, tmp_path: Path):
    folder = _with_config(llama, tmp_path / "newer", version="99.1", something_new=[1])
    assert relative_error(logits(load(folder)), llama.logits) < EXACT
    folder = _with_config(llama, tmp_path / "format", format="holographic")
    with pytest.raises(ValueError, match=r"'holographic' needs a newer csprune"):
        load(folder)
    folder = _with_config(llama, tmp_path / "rank", kept=5)
    with pytest.raises(RuntimeError, match="mismatch"):
        load(folder)


def test_only_csprune_makes_such_a_checkpoint(llama: Case):
    """The config is no request to quantise while loading."""
    with pytest.raises(ValueError, match="pre-quantized"):
        load(llama.source, quantization_config=hf.CspruneConfig(kept=5))


def test_the_loader_imports_nothing_of_csprune():
    text = Path(hf.__file__).read_text()
    assert "import csprune\n" not in text.replace("`import csprune`", "")
    assert "from csprune" not in text and "from ." not in text


def test_factorized_head():
    head = hf.FactorizedHead(5, 11, 3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    x = torch.randn(2, 4, 5)
    want = x @ (head.weight @ head.down).mT + head.offset
    assert torch.allclose(head(x), want, atol=1e-5)
    assert "hidden=5, vocabulary=11, kept=3" in repr(head)
    assert not isinstance(torch.nn.Linear(5, 11), hf.FactorizedHead)
