"""The checks of on_gpu.py without a GPU: their imports, arguments and names, so that the next GPU finds them working.

`generate` needs the program, and runs where it was built.
"""

import os
import subprocess
import sys
from pathlib import Path

import on_gpu
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "target/release/sieve"


@pytest.mark.parametrize("check", [check.__name__ for check in on_gpu.CHECKS])
def test_each_check_makes_its_calls_without_a_gpu(check):
    if check == "generate" and not PROGRAM.is_file():
        pytest.skip(f"{PROGRAM} is missing: cargo build --release")
    paths = os.pathsep.join([str(ROOT / "python"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "SIEVE_PROGRAM": str(PROGRAM), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "on_gpu.py", "--dry", check], cwd=Path(__file__).parent, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"{check}: " in done.stdout
