"""The tests need no GPU: plans of portable kernels run on the CPU emulator (the example `emulate_plan` of sieve-bench).

With a GPU (`SIEVE_TEST_DEVICE=cuda`) the same tests run the kernels themselves.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EMULATOR = ROOT / "target/release/examples/emulate_plan"
DEVICE = os.environ.get("SIEVE_TEST_DEVICE", "cpu")

sys.path.insert(0, str(ROOT / "python"))
os.environ.setdefault("SIEVE_ATTENTION_LIBRARY", str(ROOT / "target/release/libsieve_capi.so"))

from sieve_attention import _library  # noqa: E402


def emulate(plan, inputs):
    """Outputs of a plan by the emulator; inputs that a kernel writes in place change."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "request.json").write_text(json.dumps(plan.request))
        if plan.capacity_of is not None:
            (folder / "capacity").write_text(str(inputs[plan.capacity_of].shape[2]))
        for index, x in enumerate(inputs):
            # The bytes from the first element to the last: a strided tensor's buffer.
            size = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
            flat = x.detach().as_strided((size,), (1,), x.storage_offset())
            (folder / str(index)).write_bytes(flat.contiguous().view(torch.uint8).numpy().tobytes())
        done = subprocess.run([EMULATOR, folder], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

        def written(index, shape, dtype):
            data = bytearray((folder / str(index)).read_bytes())
            return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)

        for index, x in enumerate(inputs):
            if "decode" in next(iter(plan.request["call"])) and x.is_contiguous():
                x.data.copy_(written(index, x.shape, x.dtype))
        return [written(index, shape, dtype) for index, (_, shape, dtype) in enumerate(plan.outputs, len(inputs))]


@pytest.fixture(autouse=DEVICE == "cpu")
def emulator(monkeypatch):
    if not EMULATOR.is_file():
        pytest.fail(f"{EMULATOR} is missing: cargo build --release --example emulate_plan")
    monkeypatch.setattr(_library.Op, "emulator", staticmethod(emulate))


@pytest.fixture
def device():
    return DEVICE


@pytest.fixture
def no_emulator(monkeypatch):
    monkeypatch.setattr(_library.Op, "emulator", None)
