"""Digits that a refactoring must keep: what a fixed list of commands writes, on the CPU, by one `sieve` and by another.

    guard.py keep BINARY FOLDER       runs the list and keeps in FOLDER what each row wrote
    guard.py compare BINARY FOLDER    runs the list and says for each row "equal" or its first difference

`compare` exits with 1 on any difference. Training, checkpoints, logits, exports, selectors, evaluations, generated
tokens, plans and recipe keys; one thread, fixed seeds, everything made up here. Numbers are compared digit by digit,
tensors by the hash of their bytes. A row whose command goes away is one line of ROWS: without it `compare` says "gone".
About a minute on one core. Times, rates and memory at hand are left out of what is kept (SKIP).
"""

import hashlib
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

# Keys of JSON that differ from run to run, or that name a version or a machine.
SKIP = re.compile(
    r"seconds|_ms$|_ms_range$|per_second|tflops|^memory_|version|checksums|^data_fingerprint$|^threads$")

RECIPE = """
model = { hidden_size = 64, intermediate_size = 128, num_hidden_layers = 2, num_attention_heads = 4, \
num_key_value_heads = 2, head_dim = 16, max_position_embeddings = 1024 }
attention = { kind = "mha" }
tokenizer = { train = { vocab_size = 400, sample_bytes = 100_000 } }
data = { paths = ["corpus/*.txt"], validation_fraction = 0.1, cache_dir = "shards" }
training = { steps = 50, seq_len = 256, local_batch_size = 2, global_batch_size = 4, seed = 3, deterministic = true }
optimizer = { lr = 1e-2 }
lr_scheduler = { warmup_steps = 4, decay_ratio = 0.25 }
checkpoint = { interval = 25 }
metrics = { log_freq = 1 }
"""

MQAR = """
model = { hidden_size = 64, num_hidden_layers = 2, num_attention_heads = 2, num_key_value_heads = 2 }
attention = { kind = "dma", keep_window_size = 16, preset = "paper" }
tokenizer = { numbers = 64 }
data = { format = "mqar", mqar = { vocab_size = 64, seq_lens = [16, 32], num_pairs = [2, 4], \
num_samples = [2000, 2000], num_test_samples = 50 } }
training = { steps = 50, seq_len = 64, local_batch_size = 8, deterministic = true }
optimizer = { lr = 3e-3 }
"""

# Each kind of model and the keys that make it of RECIPE.
KINDS = {
    "mha": "attention.kind=mha",
    "swa": "attention.kind=swa attention.sliding_window=32",
    "dma": "attention.kind=dma",
    "dma_paper": "attention.kind=dma attention.preset=paper attention.keep_window_size=48",
    "dma_linear": "attention.kind=dma attention.keep_window_size=48 attention.bias=linear attention.a_init=0.5",
    "nsa": "attention.kind=nsa",
    "nsa_mlp": "attention.kind=nsa attention.compress=mlp attention.shared_kv=false attention.compress_block_size=16",
    "mla": "attention.kind=mla",
    "mla_plain": "attention.kind=mla attention.qk_norm=false",
    "infllm_v2": "attention.kind=infllm_v2 attention.num_selected_blocks=3",
    "moba": "attention.kind=moba attention.num_selected_blocks=3",
    "msa": "attention.kind=msa attention.select_block_size=16 attention.num_selected_blocks=3",
    "msa_qsa": "attention.kind=msa attention.indexer=qsa attention.select_block_size=16 attention.num_selected_blocks=3",
    "msa_shared": "attention.kind=msa attention.select_block_size=16 attention.num_selected_blocks=3 "
                  'model.layer_types=["sparse","shared"]',
    "cowa": "attention.kind=cowa attention.near_window=32",
    "sinks": "attention.kind=swa attention.sliding_window=32 model.attention_sinks=true",
    "hybrid_dma": 'attention.kind=dma model.layer_types=["sparse","mha"] model.residual_scale=true',
    "hybrid_swa": 'attention.kind=swa model.layer_types=["mha","sparse"] model.tie_word_embeddings=false',
    "fp8": "attention.kind=mha training.precision=fp8 training.steps=10",
    "documents": "attention.kind=dma training.one_document_per_row=true training.seq_len=64",
}
PARTED = ["mha", "swa", "nsa", "nsa_mlp", "mla", "mla_plain", "infllm_v2", "moba", "msa", "cowa"]
OF_SEVERAL = ["mha", "swa", "dma", "dma_paper", "nsa", "mla", "hybrid_dma"]

PREFILL = """
bfla:block=32,group=8,tile=8,local_tokens=16,keep_mass=0.7
bfla:block=32,group=8,tile=8,local_tokens=0,keep_mass=0.3,stride=5,prob=0.1,gqa=per_query
bfla:block=16,pooling=maxabs,group=8,tile=16,local_tokens=8,keep_mass=0.5,gqa=mean
bfla:block=16,pooling=mean,group=8,tile=8,local_tokens=8,keep_mass=0.3,prob=0.1,hash=linear
bfla:block=16,pooling=center,group=8,tile=8,local_tokens=8,keep_mass=0.3,stride=7,rescue_grid=block
momo:gamma=4,beta=8,chi=16,k=3,k_exact=1,first_dense_layers=0
momo:gamma=32,beta=16,chi=16,k=2,k_exact=1,topk=tree,first_dense_layers=0,gqa=union,score=normalised
delta:base=streamingllm,base.n_local=16,base.min_prefill_tokens=0,gamma=8,dense_tail=false
delta:base=meanpool,base.block=16,base.tau=0.3,base.min_prefill_tokens=0,gamma=16,mode=recompute
ba_att:block=16,segment=32
ba_att:block=16,segment=32,sort=k,compensation=variance,compensate_layers=all,gqa=mean,sparsity=0.7
pbs:block=16,segment=32,tau=0.5 pbs:block=16,segment=32,tau=0.5,select=xattention,stride=4,gqa=union
pbs:block=16,segment=32,tau=0.5,permute=queries
pbs:block=16,segment=32,tau=0.5,permute=both,order=queries_first,perm=query xattention:block=16,stride=4,tau=0.5
xattention:block=16,stride=4,tau=0.5,mode=random,gqa=mean
xattention:block=16,stride=8,tau=0.4,mode=slash,norm=0.5,gqa=union minference:pattern=pattern.json
vertical_slash:vertical=16,slash=64 block_sparse:block=32,topk=3 a_shape:n_init=16,n_local=64
tri_shape:n_init=16,n_local=64,n_last=20 flexprefill:block=16,min_budget=16,gamma=0.5
flexprefill:block=16,min_budget=16,gamma=0.5,tau=1,gqa=union meanpool:block=16,tau=0.5 meanpool:block=16,top_k=3
streamingllm:n_init=4,n_local=64
infinitehip:block=8,stride_1=2,chunk_1=16,budget_2=64,stride_2=2,chunk_2=8,budget_3=32,chunk_3=4,budget=16,sink=8,\
window=16,prefill_dense_below=0,first_dense_layers=0
oracle_topk:block=16,k=3 oracle_topk:block=16,tau=0.5
0=dense/1-=bfla:block=16,group=8,tile=16,local_tokens=8,keep_mass=0.5
""".split()

DECODE = """
h2o:heavy=0.1,recent=0.1 h2o:heavy=16,recent=8 snapkv:window=8,capacity=64 snapkv:window=4,capacity=32,kernel=3,pool=max
quest:page=8,budget=64,dense_layers=1 infllm:init=16,local=64,block=16,topk=2,repr=4 dam:capture=128,density=0.3
dam:map=dam.json exact_top:k=32 dma:keep_window_size=48 dma:keep_window_size=48,bias=linear
streamingllm:n_init=4,n_local=32,reindex=true
""".split()

TEXT = "corpus/00.txt corpus/01.txt corpus/02.txt"
PROMPT = "prompt.txt"


def short(selector):
    """A name for a row: the method, and a hash of its settings."""
    return f"{selector.split(':')[0].replace('/', '+')} {hashlib.sha256(selector.encode()).hexdigest()[:4]}"


def rows():
    """(name, words of the command, files it writes that are kept). Later rows read what earlier ones wrote."""
    for kind, keys in KINDS.items():
        sets = " ".join(f"--set {key}" for key in keys.split())
        steps = 10 if kind == "fp8" else 50
        files = [f"{kind}/metrics.jsonl", *(f"{kind}/checkpoint/step-{steps}/{name}" for name in
                 ("model.safetensors", "optimizer.safetensors", "state.json"))]
        yield f"train {kind}", f"-q train --recipe tiny.toml --out {kind} {sets}", files
    yield "train mqar", "-q train --recipe mqar.toml --out mqar", ["mqar/metrics.jsonl"]
    yield "resume dma", "-q train --recipe tiny.toml --out again --resume-from dma/checkpoint/step-25 " \
        "--set attention.kind=dma", ["again/metrics.jsonl", "again/checkpoint/step-50/model.safetensors"]
    for name, more in [("2 ranks", ""), ("context parallel", "--set parallelism.context_parallel_degree=2")]:
        out = name.replace(" ", "_")
        yield f"train {name}", f"-q launch --nproc 2 -- train --recipe tiny.toml --out {out} {more} " \
            "--set attention.kind=dma --set training.steps=20", [f"{out}/metrics.jsonl"]
    # DMA exchanges keys, above. These exchange heads, each its own way.
    for kind in PARTED:
        yield f"train {kind} in parts of rows", f"-q launch --nproc 2 -- train --recipe tiny.toml --out parts_{kind} " \
            "--set parallelism.context_parallel_degree=2 --set training.steps=8 " \
            + " ".join(f"--set {key}" for key in KINDS[kind].split()), [f"parts_{kind}/metrics.jsonl"]
    for kind in KINDS:
        yield f"logits {kind}", f"logits --checkpoint {kind} --tokens-file tokens.txt --out {kind}.safetensors", \
            [f"{kind}.safetensors"]
        yield f"export {kind}", f"-q export --checkpoint {kind} --out exports/{kind}", \
            [f"exports/{kind}/model.safetensors", f"exports/{kind}/config.json"]
        yield f"ppl {kind}", f"eval ppl --checkpoint {kind} --data {TEXT} --max-tokens 600 --by-position --json", []
        yield f"generate {kind}", f"generate --checkpoint {kind} --prompt-file {PROMPT} --max-new-tokens 40 " \
            "--seed 5 --samples 2 --json", []
    yield "export bf16", "-q export --checkpoint dma --dtype bf16 --out exports/bf16", \
        ["exports/bf16/model.safetensors", "exports/bf16/config.json"]
    yield "export doge", "-q export --checkpoint dma_paper --form doge --out exports/doge", \
        ["exports/doge/model.safetensors", "exports/doge/config.json"]
    yield "import mha", "-q import --from exports/mha --out imported", ["imported/step-0/model.safetensors"]
    for kind in OF_SEVERAL:
        yield f"attention {kind}", f"eval attention --checkpoint {kind} --data {TEXT} --length 128 --json", []
    yield "mqar", "eval mqar --checkpoint mqar --json", []
    yield "extrapolate", f"eval ppl --checkpoint mha --data {TEXT} --max-tokens 300 --extrapolate --far 64 --json", []
    yield "needle", "eval needle --checkpoint mha --lengths 512 --depths 0,50 --json", []
    yield "ruler", "eval ruler --checkpoint mha --tasks niah_single_1,vt --lengths 900 --samples 2 --json", []
    for method in ("minference", "dam"):
        yield f"patterns {method}", f"eval patterns --checkpoint mha --data {TEXT} --method {method} --length 256 " \
            f"--out {method}.json", [f"{method}.json"]
    compare = "--compare swa --compare dma --compare nsa"
    yield "models", f"eval selectors --checkpoint mha --data {TEXT} --lengths 512 --windows 1 --selector " \
        f"oracle_topk:block=16,k=3 {compare} --json", []
    for selector in PREFILL + DECODE:
        measure = f"eval selectors --checkpoint mha --data {TEXT} --lengths 512 --windows 1 --selector {selector}"
        yield f"selector {short(selector)}", f"{measure} --json", []
        if selector in PREFILL:
            maps = f"maps/{short(selector).replace(' ', '-')}"
            yield f"kept blocks {short(selector)}", f"{measure} --maps {maps}", [maps]
        yield f"generate {short(selector)}", f"generate --checkpoint mha --prompt-file {PROMPT} --max-new-tokens 20 " \
            f"--temperature 0 --selector {selector} --json", []
    yield "chunks", f"eval ppl --checkpoint mha --data {TEXT} --context 512 --max-tokens 600 --chunk 128 --selector " \
        "meanpool:block=16,tau=0.5,min_prefill_tokens=0 --json", []
    for kind in OF_SEVERAL:
        sets = " ".join(f"--set {key}" for key in KINDS[kind].split())
        yield f"plan {kind}", f"plan --recipe tiny.toml --gpu h200 {sets} --json", []
    yield "batch", "data batch --recipe tiny.toml --step 7 --data-dir shards --out batch.safetensors", \
        ["batch.safetensors"]
    yield "recipe keys", "recipe keys", []
    yield "recipe schema", "recipe schema", []
    yield "selector help", "generate --checkpoint none --selector help", []


def write_inputs(folder):
    draw = random.Random(5)
    words = {
        "who": "the cat|a dog|my aunt|the pilot|some child|the old king|a teacher|nobody".split("|"),
        "does": "sees follows paints forgets likes draws finds carries".split(),
        "what": "the river|a red apple|seven stones|the long road|her letter|an empty house|two birds".split("|"),
    }
    (folder / "corpus").mkdir()
    for number in range(60):
        sentences = (" ".join([*(draw.choice(choices) for choices in words.values()), f"{draw.randrange(1000)}."])
                     for _ in range(draw.randrange(20, 200)))
        (folder / f"corpus/{number:02}.txt").write_text(" ".join(sentences))
    (folder / "prompt.txt").write_text((folder / "corpus/03.txt").read_text()[:1200])
    (folder / "tokens.txt").write_text(" ".join(str(draw.randrange(1, 390)) for _ in range(97)))
    heads = {"0": ["stream_llm", 16, 64], "1": ["vertical_and_slash", 16, 64], "2": ["block_sparse", 3, 0],
             "3": ["vertical_and_slash", 8, 32]}
    (folder / "pattern.json").write_text(json.dumps([heads, heads]))
    (folder / "tiny.toml").write_text(RECIPE)
    (folder / "mqar.toml").write_text(MQAR)


def tensors(path):
    """Type, shape and hash of each tensor of a safetensors file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, digests = json.loads(data[8 : 8 + length]), {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = (8 + length + at for at in entry["data_offsets"])
        digests[name] = f"{entry['dtype']} {entry['shape']} {hashlib.sha256(data[begin:end]).hexdigest()[:20]}"
    return digests


def cleaned(value):
    if isinstance(value, dict):
        return {key: cleaned(inner) for key, inner in value.items() if not SKIP.search(key)}
    return [cleaned(inner) for inner in value] if isinstance(value, list) else value


def texts(text):
    """JSON, or lines of which each may be JSON."""
    try:
        return cleaned(json.loads(text))
    except ValueError:
        return [cleaned(json.loads(line)) if line.startswith("{") else line for line in text.splitlines()]


def contents(path):
    if path.is_dir():
        return {inner.name: contents(inner) for inner in sorted(path.iterdir())}
    if path.suffix == ".svg":
        # The maps of blocks inside, not the drawing around them.
        images = re.findall(r"base64,([^\"]+)", path.read_text())
        return [hashlib.sha256(image.encode()).hexdigest()[:20] for image in images]
    return tensors(path) if path.suffix == ".safetensors" else texts(path.read_text())


def difference(kept, new, at=""):
    """The first difference in words, or None."""
    if isinstance(kept, dict) and isinstance(new, dict):
        pairs = [(key, kept.get(key), new.get(key)) for key in [*kept, *(key for key in new if key not in kept)]]
    elif isinstance(kept, list) and isinstance(new, list) and len(kept) == len(new):
        pairs = [(index, *both) for index, both in enumerate(zip(kept, new))]
    else:
        # NaN is written as null; 1 and 1.0 differ in their text.
        return None if json.dumps(kept) == json.dumps(new) else f"{at}: {str(kept)[:160]} became {str(new)[:160]}"
    return next((problem for key, *both in pairs if (problem := difference(*both, f"{at}/{key}"))), None)


def run(binary, folder, command, files):
    has_device = not re.match(r"(-q )?(export|import|plan|data|recipe) |generate --checkpoint none", command)
    command += " --device cpu" if has_device else ""
    done = subprocess.run([binary, *command.split()], cwd=folder, capture_output=True, text=True,
                          env=os.environ | {"RAYON_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL)
    missing = [name for name in files if not (folder / name).exists()]
    if done.returncode or missing:
        return {"exit status": done.returncode, "missing": missing, "error": done.stderr.strip().splitlines()[-4:]}
    result = {name: contents(folder / name) for name in files}
    # Without --json a command with files prints where they are and how long it took.
    if not files or "--json" in command:
        result["printed"] = texts(done.stdout)
    return result


def main(action, binary, kept):
    binary, kept = pathlib.Path(binary).resolve(), pathlib.Path(kept).resolve()
    kept.mkdir(parents=True, exist_ok=True)
    begin, wrong, paths = time.time(), 0, set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        write_inputs(folder)
        for name, command, files in rows():
            result = run(binary, folder, command, files)
            path = kept / f"{name.replace(' ', '_')}.json"
            paths.add(path)
            if action == "keep":
                if "exit status" in result:
                    sys.exit(f"{name}: sieve {command}\n{result}")
                path.write_text(json.dumps(result, indent=0))
                continue
            problem = difference(json.loads(path.read_text()), result) if path.exists() else "was not kept"
            wrong += problem is not None
            print(f"{name}: {problem or 'equal'}", flush=True)
    gone = sorted(path.stem for path in kept.glob("*.json") if path not in paths)
    if action == "keep":
        print(f"{len(paths)} rows kept in {time.time() - begin:.0f} s")
        return 0
    print(*(f"{name}: gone, no row runs it" for name in gone), sep="\n", end="\n" if gone else "")
    print(f"{len(paths) - wrong} rows equal, {wrong} differ, {len(gone)} gone, in {time.time() - begin:.0f} s")
    return min(wrong, 1)


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("keep", "compare"):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
