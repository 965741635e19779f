"""csprune: compress a language model's unembedding by what matters least to its predictions.

    windows = read_windows(tokenizer, "demo", block="calibration")
    readout = load_readout(model)
    calibration = calibrate(model, windows)
    truncation = truncate(readout, calibration, "fisher", 0.2)
    with apply(model, truncation):
        ...

Importing csprune registers the loader of truncated checkpoints with transformers.
"""

from importlib.metadata import version

from csprune import hf as _hf  # noqa: F401  registers the loader
from csprune.calibration import Calibration, calibrate
from csprune.comparisons import summarise
from csprune.corpus import Windows, read_windows
from csprune.errors import CspruneError, InputError
from csprune.evaluation import evaluate
from csprune.export import export
from csprune.head import apply
from csprune.measurement import Evaluation
from csprune.models import load_model
from csprune.readout import Readout, load_readout
from csprune.tables import table
from csprune.truncation import STRATEGIES, Truncation, overlap, truncate

__version__ = version("csprune")

__all__ = [
    "STRATEGIES",
    "Calibration",
    "CspruneError",
    "Evaluation",
    "InputError",
    "Readout",
    "Truncation",
    "Windows",
    "apply",
    "calibrate",
    "evaluate",
    "export",
    "load_model",
    "load_readout",
    "overlap",
    "read_windows",
    "summarise",
    "table",
    "truncate",
]
