"""How the package is built: layers, size, what is public, and what is said of it."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import csprune

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "csprune"
LONGEST = 320  # lines

# One line for each module, in the order in which they may import: each only from those before it.
LISTED = re.findall(r"^- `([\w/]+)\.py`: (.+)$", (PACKAGE / "README.md").read_text(encoding="utf-8"), re.M)


def order() -> list[str]:
    """Modules from the first to the last; a sub-package's own comes before its modules."""
    layers: list[str] = []
    for path, _ in LISTED:
        name = path.replace("/", ".")
        if name == "settings":  # the package's own is made of all before its jobs
            layers.append("__init__")
        package, _, rest = name.rpartition(".")
        if rest and package and f"{package}.__init__" not in layers:
            layers.append(f"{package}.__init__")
        layers.append(name)
    return [*layers, "__main__"]


LAYERS = order()


def modules() -> dict[str, str]:
    """Sources by name within the package: `report`, `pages.page`."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def imports(source: str, known: set[str]) -> set[str]:
    """Modules of the package that a source imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "csprune":
                parts = rest.split(".")
                longest = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
                candidates = (each for one in longest for each in (one, f"{one}.__init__"))
                found.add(next((each for each in candidates if each in known), "__init__"))
    return found


def upward(sources: dict[str, str], layers: list[str]) -> list[str]:
    """Imports against the order."""
    place = {name: index for index, name in enumerate(layers)}
    return [
        f"{name} imports {other}"
        for name, source in sources.items()
        for other in sorted(imports(source, set(sources)))
        if place[other] >= place[name]
    ]


def test_each_module_imports_only_from_those_before_it() -> None:
    sources = modules()
    assert sorted(LAYERS) == sorted(sources)
    assert upward(sources, LAYERS) == []
    # Controls: an import within a function, of a later module, and of the package itself are seen.
    for line in (
        "from csprune.cli import main",
        "import csprune.jobs",
        "from csprune import evaluate",
        "from csprune.pages.page import page",
        "from csprune.bench import job",
        "from csprune import bench",
    ):
        changed = {**sources, "linalg": f"{sources['linalg']}\ndef f():\n    {line}\n"}
        assert len(upward(changed, LAYERS)) == 1


@pytest.mark.parametrize("name", LAYERS)
def test_modules_are_small_and_say_what_they_are(name: str) -> None:
    source = modules()[name]
    assert len(source.splitlines()) <= LONGEST
    assert ast.get_docstring(ast.parse(source))


def acting(source: str) -> list[str]:
    """Top-level statements that do more than define."""
    found: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue  # a docstring, also of a constant
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            continue
        found.append(ast.unparse(node).splitlines()[0])
    return found


def test_importing_does_nothing_but_register_the_loader() -> None:
    for name, source in modules().items():
        found = acting(source)
        # How it guards itself is hf's own business; that it is one guarded statement is not.
        assert found == [] or (name == "hf" and len(found) == 1 and found[0].startswith("if ")), (name, found)
    assert acting("import torch\ntorch.set_num_threads(1)") == ["torch.set_num_threads(1)"]  # control


_STATE = """
import json, os, signal, warnings
import numpy, torch, transformers
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING, AUTO_QUANTIZATION_CONFIG_MAPPING
def state():
    return [
        sorted(os.environ.items()), os.listdir("."), len(warnings.filters), torch.get_num_threads(),
        str(torch.get_default_dtype()), torch.is_grad_enabled(), int(torch.initial_seed()),
        transformers.logging.get_verbosity(), repr(signal.getsignal(signal.SIGTERM)),
        float(numpy.random.get_state()[1][0]),
    ]
before, mapped = state(), set(AUTO_QUANTIZER_MAPPING)
IMPORT
after = state()
changed = [place for place, value in enumerate(after) if value != before[place]]
print(json.dumps([changed, sorted(set(AUTO_QUANTIZER_MAPPING) - mapped)]))
"""


def test_importing_changes_no_global_state(tmp_path: Path) -> None:
    script = _STATE.replace("IMPORT", "import csprune")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert json.loads(done.stdout) == [[], ["csprune"]]
    assert done.stderr == ""


def test_the_public_api_is_there_and_documented() -> None:
    contract = {"read_windows", "load_readout", "calibrate", "truncate", "apply", "evaluate", "export"}
    assert contract <= set(csprune.__all__)
    assert csprune.__all__ == sorted(csprune.__all__, key=lambda n: (not n.isupper(), n[0].islower(), n))
    for name in csprune.__all__:
        value = getattr(csprune, name)
        if inspect.isfunction(value):
            text = inspect.getdoc(value) or ""
            arguments = [p for p in inspect.signature(value).parameters if not p.startswith("_")]
            missing = [a for a in arguments if not re.search(rf"^\s+{a}: ", text, re.M)]
            # A sentence that names its only argument says enough.
            missing = [a for a in missing if len(arguments) > 1 or a not in text]
            assert not missing, f"{name} does not say what {missing} are"
            assert inspect.signature(value).return_annotation is not inspect.Signature.empty
        elif inspect.isclass(value):
            assert inspect.getdoc(value)


def test_every_module_is_listed_once_as_what_it_says_it_is() -> None:
    sources = modules()
    assert len(LISTED) == len(set(LISTED)) == len({path for path, _ in LISTED})
    for path, text in LISTED:
        first = (ast.get_docstring(ast.parse(sources[path.replace("/", ".")])) or "").splitlines()[0]
        assert text == first[0].lower() + first[1:], path


def files() -> list[Path]:
    """What the repository has, or would have once added."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


# Written in pieces, for this file is looked through too.
_PRIVATE = ["/wo" + "rk/", "../sha" + "red", "/ro" + "ot/", "/ho" + "me/", "/far" + "m/"]
_HOSTS = {
    "huggingface.co",
    "ai.google.dev",
    "arxiv.org",
    "github.com",
    "docs.python.org",
    "pypi.org",
    "keepachangelog.com",
    "semver.org",
    "www.w3.org",  # names of formats
    "example.com",
    "example.org",
}


def foreign(text: str) -> list[str]:
    """Paths of somebody's machine, and hosts that not everybody can reach."""
    found = [piece for piece in _PRIVATE if piece in text]
    hosts = set(re.findall(r"https?:" + r"//([\w.-]+)", text))
    return found + sorted(hosts - _HOSTS)


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        assert foreign(text) == [], path.relative_to(ROOT)
    assert foreign("see /wo" + "rk/x and http:" + "//10.0.0.1:8080/simple") == ["/wo" + "rk/", "10.0.0.1"]
