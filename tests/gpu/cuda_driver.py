"""The CUDA driver through ctypes: device arrays, cubins, launches with a params struct by value, event times. numpy only."""

import ctypes
import os

import numpy as np

c_u64, c_void_p, byref = ctypes.c_ulonglong, ctypes.c_void_p, ctypes.byref


def ceil_div(a, b):
    return -(-a // b)


def f32_word(x):
    """An f32 as a 64-bit params word: its bits are the lower half."""
    return int(np.float32(x).view(np.uint32))


class Array:
    """A device array of a numpy dtype; freed with its Python object."""

    def __init__(self, cuda, shape, dtype):
        self.cuda, self.shape, self.dtype = cuda, tuple(int(s) for s in np.atleast_1d(shape)), np.dtype(dtype)
        self.nbytes = max(int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize, 16)
        self.pointer = c_u64()
        cuda.call("cuMemAlloc_v2", byref(self.pointer), ctypes.c_size_t(self.nbytes))

    def set(self, values):
        values = np.ascontiguousarray(values, dtype=self.dtype)
        assert values.shape == self.shape, (values.shape, self.shape)
        self.cuda.call("cuMemcpyHtoD_v2", self.pointer, values.ctypes.data_as(c_void_p), ctypes.c_size_t(values.nbytes))
        return self

    def fill(self, byte):
        """Sets every byte; 255 makes every float a NaN and every integer -1."""
        self.cuda.call("cuMemsetD8_v2", self.pointer, ctypes.c_ubyte(byte), ctypes.c_size_t(self.nbytes))
        return self

    def get(self):
        values = np.empty(self.shape, self.dtype)
        self.cuda.call("cuMemcpyDtoH_v2", values.ctypes.data_as(c_void_p), self.pointer, ctypes.c_size_t(values.nbytes))
        return values

    def __del__(self):
        self.cuda.driver.cuMemFree_v2(self.pointer)


class Cuda:
    """Device 0 and the cubins of one folder."""

    def __init__(self, folder):
        self.folder, self.functions = folder, {}
        self.driver = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), device)
        self.call("cuCtxSetCurrent", self.context)
        count = ctypes.c_int()
        self.call("cuDeviceGetAttribute", byref(count), 16, device)
        self.multiprocessors = count.value

    def call(self, name, *arguments):
        code = getattr(self.driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self.driver.cuGetErrorString(code, byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else code}")

    def array(self, values, dtype=None):
        values = np.asarray(values, dtype=dtype)
        return Array(self, values.shape, values.dtype).set(values)

    def empty(self, shape, dtype, byte=255):
        return Array(self, shape, dtype).fill(byte)

    def function(self, name, entry, shared):
        key = (name, shared)
        if key not in self.functions:
            module, function = c_void_p(), c_void_p()
            with open(os.path.join(self.folder, name + ".cubin"), "rb") as file:
                image = file.read()
            self.call("cuModuleLoadData", byref(module), image)
            self.call("cuModuleGetFunction", byref(function), module, entry.encode())
            self.call("cuFuncSetAttribute", function, 8, shared)  # maximum dynamic shared memory
            self.functions[key] = function
        return self.functions[key]

    def prepare(self, name, entry, grid, threads, shared, arrays, words):
        """A launch ready to be called many times: cubin `name`, kernel `entry`, buffers, then the words of the params struct."""
        function = self.function(name, entry, shared)
        struct = (c_u64 * len(words))(*[int(word) for word in words])
        pointers = [byref(array.pointer) for array in arrays] + [byref(struct)]
        table = (c_void_p * len(pointers))(*[ctypes.cast(p, c_void_p) for p in pointers])
        launch = self.driver.cuLaunchKernel
        grid = [ctypes.c_uint(int(g)) for g in grid]

        def run(keep=(arrays, struct, pointers)):
            code = launch(function, *grid, threads, 1, 1, shared, None, table, None)
            if code:
                raise RuntimeError(f"{entry} {[g.value for g in grid]}: launch error {code}")

        return run

    def synchronize(self):
        self.call("cuCtxSynchronize")

    def reader(self, nbytes=1 << 29):
        """A call that reads `nbytes` and so throws everything else out of the L2; it leaves nothing dirty there, as a fill would."""
        array, out = self.empty((nbytes,), np.uint8, 1), self.empty((4,), np.uint32)
        return self.prepare("read_flush", "read_flush", (2 * self.multiprocessors, 1, 1), 1024, 0, [array, out], [nbytes // 16])

    def time_ms(self, run, repeats=30, warm=3, flush=None):
        """Median, 10th and 90th percentile of the time of `run()`, after `flush()` each time.

        The flush is asynchronous and long: the launches behind it are queued while it runs, so gaps on the host do not count.
        """
        start, stop = c_void_p(), c_void_p()
        self.call("cuEventCreate", byref(start), 0)
        self.call("cuEventCreate", byref(stop), 0)
        times = []
        for repeat in range(warm + repeats):
            if flush is not None:
                flush()
            self.call("cuEventRecord", start, None)
            run()
            self.call("cuEventRecord", stop, None)
            self.call("cuEventSynchronize", stop)
            elapsed = ctypes.c_float()
            self.call("cuEventElapsedTime", byref(elapsed), start, stop)
            if repeat >= warm:
                times.append(elapsed.value)
        self.call("cuEventDestroy_v2", start)
        self.call("cuEventDestroy_v2", stop)
        return tuple(float(np.percentile(times, p)) for p in (50, 10, 90))
