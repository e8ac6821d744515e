"""Compiles a kernel for the CPU emulator and runs it on torch CPU tensors."""
import ctypes, hashlib, os, re, subprocess
HERE = os.path.dirname(os.path.abspath(__file__))
KERNELS = os.path.join(HERE, "../../../kernels")
BUILD = os.path.join(HERE, "../../../target/emulator")
def expand(path, seen):
    out = []
    for line in open(path):
        m = re.match(r'#include "common/(.*)"', line)
        if m:
            name = m[1]
            if name in seen: continue
            seen.add(name)
            if name == "async_copy.cuh":
                out += expand(f"{KERNELS}/common/types.cuh", seen) if "types.cuh" not in seen else []; seen.add("types.cuh")
                out += [l for l in open(f"{HERE}/async_copy.cuh") if not l.startswith("#include")]
            elif name == "reduce_add.cuh": pass
            elif name == "mma.cuh":
                out += expand(f"{KERNELS}/common/types.cuh", seen) if "types.cuh" not in seen else []; seen.add("types.cuh")
                text = open(f"{KERNELS}/common/mma.cuh").read()
                out.append(open(f"{HERE}/mma_ops.h").read())
                out.append(text[text.index("// A tile of ROW_ELEMENTS"):])
            else: out += expand(f"{KERNELS}/common/{name}", seen)
        else: out.append(line)
    return [l for l in out if "#pragma once" not in l and "#pragma unroll" not in l]
_cache = {}
def build(file, entry, defines):
    key = (file, entry, tuple(sorted(defines.items())))
    if key in _cache: return _cache[key]
    body = "".join(expand(f"{KERNELS}/{file}", set()))
    body = body.replace("extern __shared__ __align__(128) unsigned char shared_memory[];", "").replace("extern __shared__", "//")
    defs = "".join(f"#define {k} {v}\n" for k, v in defines.items())
    # find entry signature (after preprocessing): use the preprocessor to strip #if in the signature
    text = '#include "emu.h"\n' + "#define EMULATED 1\n" + defs + body
    os.makedirs(BUILD, exist_ok=True)
    tag = hashlib.sha1((text + entry + open(f"{HERE}/emu.h").read() + open(f"{HERE}/runner.h").read()).encode()).hexdigest()[:16]
    so = f"{BUILD}/{entry}_{tag}.so"
    if not os.path.exists(so):
        cpp = f"{BUILD}/{entry}_{tag}.cpp"
        open(cpp, "w").write(text)
        pre = subprocess.run(["g++", "-std=c++17", "-E", "-P", f"-I{HERE}", cpp], capture_output=True, text=True, check=True).stdout
        m = re.search(r'extern "C"[^;{]*?\b' + entry + r'\s*\(([^)]*)\)', pre)
        params = [re.sub(r"\s+", " ", p.strip()) for p in m[1].split(",")]
        args = []
        for i, p in enumerate(params):
            ty = re.sub(r"\b\w+$", "", p).strip()
            args.append(f"({ty})pointers[{i}]" if "*" in p else f"*(const {ty.replace('const', '').strip()}*)words")
        text += f'\n#include "runner.h"\nextern "C" int run_kernel(void** pointers, unsigned long long* words, int gx, int gy, int gz, int threads, int shared, int seed) {{ return emu::run({{(unsigned)gx,(unsigned)gy,(unsigned)gz}}, threads, shared, seed, [&]() {{ {entry}({", ".join(args)}); }}); }}\n'
        open(cpp, "w").write(text)
        r = subprocess.run(["g++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{HERE}", "-o", so + ".tmp", cpp], capture_output=True, text=True)
        if r.returncode: raise RuntimeError(r.stderr[:4000])
        os.replace(so + ".tmp", so)
    lib = ctypes.CDLL(so); _cache[key] = lib
    return lib
def launch(file, entry, defines, grid, threads, shared, tensors, words, seed=0):
    lib = build(file, entry, defines)
    ptrs = (ctypes.c_void_p * len(tensors))(*[t.data_ptr() for t in tensors])
    ws = (ctypes.c_ulonglong * len(words))(*[int(w) & (2**64 - 1) for w in words])
    r = lib.run_kernel(ptrs, ws, *grid, threads, shared, seed)
    if r: raise RuntimeError(f"{entry}: emulator returned {r}")


class EmulatorRuntime:
    device = "cpu"
    def __init__(self): self.seed = 0
    def launch(self, file, entry, defines, grid, threads, shared, tensors, words):
        self.seed += 1
        launch(file, entry, defines, grid, threads, shared, tensors, words, self.seed)
    def synchronize(self): pass
