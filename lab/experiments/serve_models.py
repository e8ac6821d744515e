"""Exports with random weights, for measuring `sieve serve`: serve_models.py SIEVE OUT [--models 80m-mha 1p7b-dma …]
[--device cuda] [--context 32768]

For each model, SIZE-KIND, it trains one step of four layers of the recipe that `sieve recipe new` makes, exports them,
and repeats their weights up to the recipe's number of layers; the folder is OUT/SIZE-KIND. A step of all layers of 1.7B
parameters, and its checkpoint, would take minutes. The tokens are 32,768 numbers, so that each token is a text.
"""

import argparse
import json
import pathlib
import random
import re
import shutil
import struct
import subprocess

LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..*)$")
TRAINED = 4  # as many as the longest `layer_types` of these recipes
TOKENS = 32_768


def text(path):
    """A text of random numbers, some of a document's tokens at a time."""
    draw = random.Random(5)
    with open(path, "w") as file:
        for _ in range(100):
            file.write(" ".join(str(draw.randrange(1, TOKENS)) for _ in range(400)) + "\n")


def repeated(source, out, layers):
    """Writes the safetensors file `source` with the weights of its layers repeated up to `layers`, layer i from layer
    i modulo TRAINED."""
    with open(source, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        metadata, begin = header.pop("__metadata__", None), 8 + size
        plan, names = [], sorted(header, key=lambda name: header[name]["data_offsets"])
        for name in names:
            found = LAYER.match(name)
            copies = range(int(found[2]), layers, TRAINED) if found else [None]
            plan += [(name, name if copy is None else f"{found[1]}{copy}{found[3]}") for copy in copies]
        wanted, at = {"__metadata__": metadata} if metadata else {}, 0
        for name, copy in plan:
            first, last = header[name]["data_offsets"]
            wanted[copy] = {**header[name], "data_offsets": [at, at + last - first]}
            at += last - first
        head = json.dumps(wanted).encode()
        head += b" " * (-len(head) % 8)
        with open(out, "wb") as written:
            written.write(struct.pack("<Q", len(head)) + head)
            for name, _ in plan:
                first, last = header[name]["data_offsets"]
                file.seek(begin + first)
                written.write(file.read(last - first))


def grown(config, layers):
    """The configuration with so many layers; what is said of each layer is repeated."""
    of_layers = [key for key in ("dense_layers", "shared_layers", "layer_types") if len(config.get(key, [])) == TRAINED]
    config = {**config, **{key: [config[key][at % TRAINED] for at in range(layers)] for key in of_layers}}
    return {**config, "num_hidden_layers": layers}


def make(words, model, data):
    """Makes OUT/MODEL."""
    size, kind = model.split("-")
    out, work = words.out / model, words.out / f"{model}.work"
    recipe = words.out / f"{model}.toml"

    def run(*command):
        done = subprocess.run([words.sieve, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise SystemExit(f"{command[0]} for {model} failed:\n{done.stdout[-2000:]}")

    recipe.unlink(missing_ok=True)
    # Of a text that is not there `recipe new` does not say that it is too short for the size.
    run("recipe", "new", "--size", size, "--kind", kind, "--context", words.context, "--data", words.out / "none", "--out", recipe)
    lines = recipe.read_text()
    layers = int(re.search(r"^num_hidden_layers = (\d+)", lines, re.M)[1])
    lines = re.sub(r"^train = .*$", f"numbers = {TOKENS}", lines, flags=re.M)
    # The export of a model whose indexer warms up is refused.
    recipe.write_text(lines.replace("index_warmup = true", "index_warmup = false"))
    sets = [f"model.num_hidden_layers={TRAINED}", f'data.cache_dir="{work}.cache"', f'data.paths=["{data}"]', "training.seq_len=1024",
            "training.global_batch_size=1", "training.local_batch_size=1"]
    run("train", "--recipe", recipe, "--device", words.device, "--out", work, "--stop-after", 1, "--overwrite",
        *(part for pair in sets for part in ("--set", pair)))
    export = words.out / f"{model}.export"
    form = ["--form", "sieve"] if kind == "msa" else []
    run("export", "--checkpoint", work, "--out", export, "--dtype", "bf16", *form)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(export, out, ignore=shutil.ignore_patterns("*.safetensors"))
    repeated(export / "model.safetensors", out / "model.safetensors", layers)
    config = grown(json.loads((export / "config.json").read_text()), layers)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    for folder in (work, export):
        shutil.rmtree(folder)
    print(f"{model}: {layers} layers, {(out / 'model.safetensors').stat().st_size >> 20} MiB", flush=True)


def main():
    """Makes the models."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("sieve")
    words.add_argument("out", type=pathlib.Path)
    models = [f"{size}-{kind}" for size in ("80m", "1p7b") for kind in ("mha", "dma", "msa")]
    words.add_argument("--models", nargs="+", default=models)
    words.add_argument("--device", default="cuda")
    words.add_argument("--context", type=int, default=32_768)
    words = words.parse_args()
    words.out.mkdir(parents=True, exist_ok=True)
    data = words.out / "numbers.txt"
    text(data)
    for model in words.models:
        make(words, model, data)


if __name__ == "__main__":
    main()
