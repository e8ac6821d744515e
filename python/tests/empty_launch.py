"""An empty launch, for on_gpu.py to time: what no call of a kernel can cost less than."""

import ctypes

import torch

from sieve_attention import _library


def empty_launch():
    """A call of cuLaunchKernelEx for a kernel that does nothing, and a driver call that does nothing."""
    nvrtc, cuda = ctypes.CDLL(str(_library.nvrtc_path() or "libnvrtc.so")), ctypes.CDLL("libcuda.so.1")
    program, size, module, function = (ctypes.c_void_p() for _ in range(4))
    source = b'extern "C" __global__ void empty() {}'
    assert not nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"empty.cu", 0, None, None)
    assert not nvrtc.nvrtcCompileProgram(program, 0, None)
    assert not nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    assert not nvrtc.nvrtcGetPTX(program, text)
    torch.zeros(1, device="cuda")
    assert not cuda.cuModuleLoadData(ctypes.byref(module), text)
    assert not cuda.cuModuleGetFunction(ctypes.byref(function), module, b"empty")

    class Config(ctypes.Structure):  # CUlaunchConfig
        _fields_ = [("sizes", ctypes.c_uint * 7), ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p),
                    ("count", ctypes.c_uint)]  # fmt: skip

    config = Config((ctypes.c_uint * 7)(1, 1, 1, 32, 1, 1, 0), torch.cuda.current_stream().cuda_stream or None, None, 0)
    config, nothing = ctypes.byref(config), ctypes.byref(ctypes.c_int())
    launch, version = cuda.cuLaunchKernelEx, cuda.cuDriverGetVersion
    launch(config, function, None, None)
    torch.cuda.synchronize()
    return lambda: launch(config, function, None, None), lambda: version(nothing)
