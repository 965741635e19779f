"""Reload an exported checkpoint in a fresh process and compare its logits with what they should be.

Run by `export` as a script, never imported: the checkpoint must load from its own files alone, with
`trust_remote_code=True` and without csprune, exactly as where csprune is not installed.

    python verify.py FOLDER EXPECTED.safetensors DTYPE
"""

import json
import sys
from typing import Any


def main(folder: str, expected_file: str, dtype: str) -> None:
    """Print a JSON object: the RMS errors of the centred logits, relative, and the largest difference."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    expected = load_file(expected_file)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        trust_remote_code=True,
        local_files_only=True,
        output_loading_info=True,
    )
    model, info = loaded
    model.eval()
    result: dict[str, Any] = {
        key: sorted(map(str, info.get(key) or ()))
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }

    def compare() -> dict[str, float]:
        with torch.no_grad():
            logits = model(input_ids=expected["input_ids"]).logits.double()
        theirs = expected["logits"].double()
        difference = logits - theirs
        centred = theirs - theirs.mean(-1, keepdim=True)
        shape = difference - difference.mean(-1, keepdim=True)
        return {
            "rms_error": float(shape.norm() / centred.norm()),
            "largest_difference": float(difference.abs().max()),
        }

    result["loaded"] = compare()
    model.tie_weights()  # lm-evaluation-harness does; it must not bring the original head back
    result["after_tie_weights"] = compare()
    print(json.dumps(result))


if __name__ == "__main__":
    sys.path.pop(0)  # this script's folder is csprune's: its modules must not shadow anybody's
    main(*sys.argv[1:])
