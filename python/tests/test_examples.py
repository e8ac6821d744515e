"""The calls in the docstrings, small_gpt.py and the notebook, as a reader without a GPU runs them."""

import doctest
import runpy
import subprocess
import sys

import notebook
import pytest
import torch
from conftest import DEVICE, ROOT

import sieve_attention as sieve
from sieve_attention import _library

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="of a machine without a GPU")
# What is called by other calls' examples alone.
EXAMPLE = ROOT / "python/examples/small_gpt.py"
WITHOUT = {"BlockMask", "NsaBlocks", "Selection", "SieveError"}


@pytest.mark.parametrize("name", sorted(set(sieve.__all__) - WITHOUT))
def test_docstrings_have_calls_that_run(name, monkeypatch):
    monkeypatch.setattr(_library.Op, "emulator", None)
    text = getattr(sieve, name).__doc__
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "sieve": sieve}, name, None, 0)
    assert test.examples, "no example"
    torch.manual_seed(0)
    with sieve.on_cpu():
        said = []
        result = doctest.DocTestRunner().run(test, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize("layer", runpy.run_path(str(EXAMPLE))["LAYERS"])
def test_the_small_gpt_learns_with_each_layer(layer):
    """By its help, twelve steps: from 5.5 nats a byte to below 4."""
    command = [
        sys.executable,
        EXAMPLE,
        "--layer",
        layer,
        "--steps",
        "12",
        "--device",
        "cpu",
    ]
    environment = {**notebook.environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--context", "64"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    assert "parameters on cpu" in lines[0] and lines[1].startswith("step    0  loss 5."), done.stdout
    assert float(lines[-1].split()[2].rstrip(",")) < 4.0 and "tokens/s" in lines[-1], done.stdout


def test_a_layer_in_torchtitans_model_learns_as_its_own_attention():
    """With the same weights; and a layer of another kind, whose own weights begin on the device meta."""
    pytest.importorskip("torchtitan")
    environment = {**notebook.environment(), "OMP_NUM_THREADS": "1"}
    for layer, steps in (("dense", 3), ("dma", 2)):
        command = [sys.executable, EXAMPLE.with_name("torchtitan_layer.py"), "--layer", layer, "--device", "cpu"]
        command += ["--steps", str(steps), "--depth", "1", "--context", "64"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        rows = [line.split() for line in done.stdout.splitlines()[1:3]]
        for own, ours in ((float(row[1]), float(row[2])) for row in rows):
            assert abs(own - ours) <= (2e-4 if layer == "dense" else 0.2), done.stdout


def test_the_notebook_runs_from_top_to_bottom(monkeypatch):
    """Its kept outputs are what its cells print, but for the last digits of numbers."""
    monkeypatch.setattr(_library.Op, "emulator", None)
    pytest.importorskip("transformers")
    path = ROOT / "docs/pytorch.ipynb"
    for at, (kept, printed) in enumerate(zip(notebook.outputs(path), notebook.run(path))):
        assert notebook.rounded(kept) == notebook.rounded(printed), f"cell {at}"
