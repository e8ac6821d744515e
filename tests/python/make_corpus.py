"""Gathers the sources and Markdown of the crates in cargo's registry into one JSONL file, a document a crate, for docs/results.md.

    python tests/python/make_corpus.py --registry ~/.cargo/registry/src --out corpus.jsonl

The newest version of each crate whose Cargo.toml names permissive licences only (MIT, Apache-2.0, BSD, ISC, Zlib, Unlicense, CC0, BSL-1.0,
Unicode); files of 200 bytes to 1 MB, in the order of their paths, each after a line with its path, each text once; no file with a line
of more than 1000 characters and none that says it is generated; the first 12 MB of a crate. Documents are in the order of the hashes of their crates' names, so
that the held-out ones are a draw of whole crates. Prints what it took.
"""

import argparse
import collections
import hashlib
import json
import pathlib
import re

PERMISSIVE = re.compile(r"MIT|Apache-2\.0|BSD|ISC|Zlib|Unlicense|CC0|BSL-1\.0|Unicode")
LICENCE = re.compile(r'^license\s*=\s*"([^"]+)"', re.M)
MOST_BYTES = 12_000_000  # of one crate: bindings to a whole operating system would be a third of everything
SUFFIXES = (".rs", ".md", ".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".js", ".sh")


def newest(registry):
    """Folder of the newest version by crate name."""
    found = {}
    for crate in registry.glob("*/*"):
        name = re.match(r"(.+?)-(\d+\.[^/]*)$", crate.name)
        if name and crate.is_dir():
            version = [int(part) if part.isdigit() else -1 for part in re.split(r"[.\-+]", name[2])]
            found[name[1]] = max(found.get(name[1], ([], None)), (version, crate), key=lambda x: x[0])
    return {name: crate for name, (_, crate) in found.items()}


def is_permissive(crate):
    manifest = crate / "Cargo.toml"
    if not manifest.exists():
        return False
    found = LICENCE.search(manifest.read_text(errors="replace"))
    # "A OR B" lets one choose; every part of an AND must do.
    return bool(found) and any(all(PERMISSIVE.search(part) for part in choice.split(" AND ")) for choice in re.split(r" OR |/", found.group(1)))


def texts(crate):
    for path in sorted(crate.rglob("*")):
        if path.suffix not in SUFFIXES or not path.is_file() or not 200 <= path.stat().st_size <= 1_000_000:
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        head = text[:2000].lower()
        if "generated" in head and ("do not edit" in head or "automatically" in head or "auto-generated" in head or "@generated" in head):
            continue
        if max(map(len, text.splitlines()), default=0) <= 1000:
            yield path, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--registry", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    found = newest(args.registry)
    if not found:
        parser.error(f"--registry {args.registry}: no crates there; cargo keeps them in ~/.cargo/registry/src, by host")
    seen, sizes, crates, files = set(), collections.Counter(), 0, 0
    with open(args.out, "w") as out:
        for name, crate in sorted(found.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()):
            if not is_permissive(crate):
                continue
            parts, size = [], 0
            for path, text in texts(crate):
                key = hashlib.sha256(text.encode()).digest()
                size += len(text.encode())
                if key not in seen and size <= MOST_BYTES:
                    seen.add(key)
                    parts.append(f"// {name}/{path.relative_to(crate)}\n{text}\n")
                    sizes[path.suffix] += len(parts[-1].encode())
            if parts:
                crates, files = crates + 1, files + len(parts)
                out.write(json.dumps({"text": "".join(parts)}) + "\n")
    print(f"{crates} crates, {files} files, {sum(sizes.values()) / 1e6:.1f} MB: " + ", ".join(f"{size / 1e6:.1f} of {suffix}" for suffix, size in sizes.most_common()))


if __name__ == "__main__":
    main()
