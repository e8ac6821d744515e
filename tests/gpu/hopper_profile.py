"""One launch of each main Hopper kernel, for a profiler: ncu --clock-control none -k regex:hopper ... python3 hopper_profile.py CUBINS"""

import multiprocessing
import sys

import torch

from attention_bench import Inputs, make_lists
from hopper_kernels import HopperRuntime

pool = multiprocessing.get_context("fork").Pool(8)
rt = HopperRuntime(sys.argv[1])
x = Inputs("cuda", 1, 8192, 128)
x.forward(rt)
x.backward(rt)
lists = make_lists(pool, "rising", 8192, 1024, "cuda")
x.dma_forward(rt, lists)
x.dma_backward(rt, lists, None, False, 8)
torch.cuda.synchronize()
