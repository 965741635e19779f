"""Settings for every test, and the real model for the slow ones."""

import os
from pathlib import Path

# Before anything imports torch, and inherited by the processes that tests start. Two threads, so
# that the same sums come out on every machine; passive, so that they do not slow other processes.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import pytest
from hypothesis import settings

import csprune.demo

# Timing says nothing about correctness on a shared machine; CI must not fail by the luck of a draw.
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """SmolLM2-135M-Instruct, fetched once into the user's cache: for slow tests only."""
    return csprune.demo.fetch()
