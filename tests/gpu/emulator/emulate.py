"""Compiles a kernel's text for the CPU emulator and runs it on torch CPU tensors. See README.md."""

import ctypes
import hashlib
import os
import re
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "../../../kernels")
BUILD = os.path.join(HERE, "../../../target/emulator")


def read(path):
    with open(path) as f:
        return f.read()


def replacement(name, seen):
    """Text that stands in for a header of PTX wrappers, or None."""
    types = [] if "types.cuh" in seen else expand(os.path.join(KERNELS, "common/types.cuh"), seen)
    seen.add("types.cuh")
    if name == "async_copy.cuh":
        return types + [line for line in read(os.path.join(HERE, name)).splitlines(True) if not line.startswith("#include")]
    if name == "mma.cuh":
        text = read(os.path.join(KERNELS, "common/mma.cuh"))
        return types + [read(os.path.join(HERE, "mma_ops.h")), text[text.index("// A tile of ROW_ELEMENTS") :]]
    return [] if name == "reduce_add.cuh" else None  # reduce_add is in mma_ops.h


def expand(path, seen):
    """Lines of a kernel file with its includes, once each, in place."""
    out = []
    for line in read(path).splitlines(True):
        include = re.match(r'#include "common/(.*)"', line)
        if not include:
            out.append(line)
        elif include[1] not in seen:
            name = include[1]
            if name in ("async_copy.cuh", "mma.cuh", "reduce_add.cuh"):
                text = replacement(name, seen)
                seen.add(name)
                out += text
            else:
                seen.add(name)
                out += expand(os.path.join(KERNELS, "common", name), seen)
    return [line for line in out if "#pragma" not in line]


_built = {}


def build(file, entry, defines):
    """The shared library of one specialisation."""
    key = (file, entry, tuple(sorted(defines.items())))
    if key in _built:
        return _built[key]
    body = "".join(expand(os.path.join(KERNELS, file), set()))
    body = re.sub(r"extern __shared__ .*?;", "", body)  # runner.h defines shared_memory
    text = '#include "emu.h"\n' + "".join(f"#define {k} {v}\n" for k, v in defines.items()) + body
    os.makedirs(BUILD, exist_ok=True)
    tag = hashlib.sha1(("fma" + text + entry + read(os.path.join(HERE, "emu.h")) + read(os.path.join(HERE, "runner.h"))).encode()).hexdigest()[:16]
    library = os.path.join(BUILD, f"{entry}_{tag}.so")
    if not os.path.exists(library):
        source = os.path.join(BUILD, f"{entry}_{tag}_{os.getpid()}.cpp")
        with open(source, "w") as f:
            f.write(text)
        # The entry's signature, as the defines leave it, gives the casts of the call.
        preprocessed = subprocess.run(["g++", "-std=c++17", "-E", "-P", f"-I{HERE}", source], capture_output=True, text=True, check=True).stdout
        signature = re.search(r'extern "C"[^;{]*?\b' + entry + r"\s*\(([^)]*)\)", preprocessed)[1]
        arguments = []
        for index, parameter in enumerate(re.sub(r"\s+", " ", p.strip()) for p in signature.split(",")):
            kind = re.sub(r"\b\w+$", "", parameter).strip()
            arguments.append(f"({kind})pointers[{index}]" if "*" in parameter else f"*(const {kind.replace('const', '').strip()}*)words")
        with open(source, "a") as f:
            f.write(f'''
#include "runner.h"
extern "C" int run_kernel(void** pointers, unsigned long long* words, int x, int y, int z, int threads, int shared, int seed) {{
  return emu::run({{(unsigned)x, (unsigned)y, (unsigned)z}}, threads, shared, seed, [&]() {{ {entry}({", ".join(arguments)}); }});
}}
''')
        # Without -fno-gnu-unique the static variables of inline functions, which stand for shared memory, would be one for all specialisations.
        # Multiply-adds as nvcc makes them: a large product that cancels shows its rounding error only so.
        command = ["g++", "-std=c++17", "-O2", "-mfma", "-ffp-contract=fast", "-w", "-fno-gnu-unique", "-shared", "-fPIC", f"-I{HERE}", "-o", f"{source}.so", source]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr[:4000])
        os.replace(f"{source}.so", library)
        os.remove(source)
    _built[key] = ctypes.CDLL(library)
    return _built[key]


class EmulatorRuntime:
    """A runtime for attention_kernels.py; every launch gets another order of warps."""

    device = "cpu"
    FAILURES = {2: "deadlock", 3: "wrote past its dynamic shared memory"}

    def __init__(self):
        self.seed = 0

    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        self.seed += 1
        pointers = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
        params = (ctypes.c_ulonglong * len(words))(*[int(w) for w in words])
        code = build(file, entry, defines).run_kernel(pointers, params, *grid, threads, shared, self.seed)
        if code:
            raise RuntimeError(f"{entry} {defines}: {self.FAILURES.get(code, code)}")

    def synchronize(self):
        pass
