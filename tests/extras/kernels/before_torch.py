"""To be imported before torch: loads what answers for CUDA. DEEPNMT_FAKE_CUDA names the library of fake_cuda.cpp."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

assert "torch" not in sys.modules
torch = importlib.util.find_spec("torch")
assert torch is not None and torch.origin is not None
for library in (Path(torch.origin).parent / "lib" / "libtorch_cpu.so", Path(os.environ["DEEPNMT_FAKE_CUDA"])):
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
os.environ.update(DS_ACCELERATOR="cuda", OMP_NUM_THREADS="1")
