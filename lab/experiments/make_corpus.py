"""Gathers the sources and Markdown of crates into one JSONL file, a document a crate: the text of lab/docs/results.md.

    python lab/experiments/make_corpus.py --from lab/experiments/crates.lock --out data/crates.jsonl
    python lab/experiments/make_corpus.py --lock lab/experiments/crates.lock

`--from` makes the text that a lock file names, byte for byte, whatever else cargo's registry holds. Crate files come
from the registry's cache; `cargo fetch` gets the missing ones. Every crate file, every document and the whole text must
have the checksum in the lock.

`--lock` chooses crates and writes a lock file: the newest version of each crate that Cargo.lock names and the registry
holds, where its Cargo.toml names permissive licences only (MIT, Apache-2.0, BSD, ISC, Zlib, Unlicense, CC0, BSL-1.0,
Unicode). A document has the crate's files of 200 bytes to 1 MB, in the order of their paths, each after a line with its
path, each text once; no file with a line of more than 1000 characters and none that says it is generated; the first
12 MB of a crate. Documents are in the order of the hashes of their crates' names, so that the held-out ones are a draw
of whole crates.

Both print what the text has.
"""

import argparse
import collections
import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

PERMISSIVE = re.compile(r"MIT|Apache-2\.0|BSD|ISC|Zlib|Unlicense|CC0|BSL-1\.0|Unicode")
LICENCE = re.compile(r'^license\s*=\s*"([^"]+)"', re.M)
PACKAGE = re.compile(r'name = "(.+)"\nversion = "(.+)"\nsource = "registry\+.+"\nchecksum = "(.+)"')
SOURCE = "registry+https://github.com/rust-lang/crates.io-index"
MOST_BYTES = 12_000_000  # of one crate: bindings to a whole operating system would be a third of everything
GENERATED = ("do not edit", "automatically", "auto-generated", "@generated")
SUFFIXES = (".rs", ".md", ".c", ".h", ".cc", ".cpp", ".hpp", ".py", ".js", ".sh")

# `sha256` is the checksum of the crate file, as in Cargo.lock.
Crate = collections.namedtuple("Crate", "name version sha256")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def crate_file(registry, crate):
    """The crate's file in the registry's cache, or None."""
    return next(registry.glob(f"cache/*/{crate.name}-{crate.version}.crate"), None)


def choose(cargo_lock, registry):
    """The newest version of each crate that Cargo.lock names and the registry holds, in the order of the documents."""
    newest = {}
    for crate in map(Crate._make, PACKAGE.findall(cargo_lock.read_text())):
        if crate_file(registry, crate):
            version = [int(part) if part.isdigit() else -1 for part in re.split(r"[.\-+]", crate.version)]
            newest[crate.name] = max(newest.get(crate.name, ([], None)), (version, crate), key=lambda x: x[0])
    return sorted((crate for _, crate in newest.values()), key=lambda crate: sha256(crate.name.encode()))


def fetch(crates, registry):
    """Has cargo download crates: the dependencies of a package made for this."""
    manifest = '[package]\nname = "text"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\n'
    # With an entry in Cargo.lock cargo takes a yanked version too.
    lock = f'version = 4\n[[package]]\nname = "text"\nversion = "0.0.0"\ndependencies = {[c.name for c in crates]}\n'
    for crate in crates:
        manifest += f'{crate.name} = {{ version = "={crate.version}", default-features = false }}\n'
        lock += f'[[package]]\nname = "{crate.name}"\nversion = "{crate.version}"\nchecksum = "{crate.sha256}"\n'
        lock += f'source = "{SOURCE}"\n'
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder)
        (package / "src").mkdir()
        (package / "src/lib.rs").touch()
        (package / "Cargo.toml").write_text(manifest)
        (package / "Cargo.lock").write_text(lock)
        command = ["cargo", "fetch", "--target", "x86_64-unknown-linux-gnu"]
        home = {"CARGO_HOME": str(registry.resolve().parent)}
        try:
            ran = subprocess.run(command, cwd=package, env=os.environ | home, capture_output=True, text=True)
        except FileNotFoundError:
            sys.exit(f"cargo is not in PATH; it fetches {named(crates)}")
    if ran.returncode != 0:
        sys.exit(f"cargo could not fetch {named(crates)}:\n{ran.stderr}")


def named(crates):
    return ", ".join(f"{crate.name} {crate.version}" for crate in crates)


def is_permissive(manifest):
    licence = LICENCE.search(manifest)
    # "A OR B" lets one choose; every part of an AND must do.
    choices = re.split(r" OR |/", licence.group(1)) if licence else []
    return any(all(PERMISSIVE.search(part) for part in choice.split(" AND ")) for choice in choices)


def texts(files):
    """Path and text of the files that count, in the order of their paths: UTF-8 of 200 bytes to 1 MB with a known
    suffix, not generated and with no line over 1000 letters. `files`: bytes by path."""
    for path, data in sorted(files.items(), key=lambda item: item[0].parts):
        if path.suffix not in SUFFIXES or not 200 <= len(data) <= 1_000_000:
            continue
        try:
            text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError:
            continue
        head = text[:2000].lower()
        if "generated" in head and any(mark in head for mark in GENERATED):
            continue
        if max(map(len, text.splitlines()), default=0) <= 1000:
            yield path, text


def read_crate(path, crate):
    """The files of a crate by their path in it."""
    data = path.read_bytes()
    if sha256(data) != crate.sha256:
        sys.exit(
            f"{path}: not the file of {named([crate])}, its checksum is {sha256(data)}\n"
            "  hint: delete the file, cargo fetches it again"
        )
    top = f"{crate.name}-{crate.version}"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = [member for member in archive if member.isfile()]
        return {pathlib.PurePosixPath(m.name).relative_to(top): archive.extractfile(m).read() for m in members}


def documents(crates, registry, sizes):
    """Each crate with its document, empty where there is nothing to take; counts bytes by the suffix of their file."""
    unique = set()
    for crate in crates:
        files = read_crate(crate_file(registry, crate), crate)
        parts, size = [], 0
        if is_permissive(files[pathlib.PurePosixPath("Cargo.toml")].decode(errors="replace")):
            for path, text in texts(files):
                size += len(text.encode())
                if text not in unique and size <= MOST_BYTES:
                    unique.add(text)
                    parts.append(f"// {crate.name}/{path}\n{text}\n")
                    sizes[path.suffix] += len(parts[-1].encode())
        yield crate, "".join(parts)


def read_lock(path):
    """The line of the whole text, and each crate with the checksum of its document."""
    whole, *rows = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return whole, {Crate(*row.split()[:3]): row.split()[3] for row in rows}


def write_lock(path, whole, sums):
    head = "# Made by lab/experiments/make_corpus.py --lock: crate, version, SHA-256 of its file, SHA-256 of its document."
    rows = [f"{crate.name} {crate.version} {crate.sha256} {document}" for crate, document in sums.items()]
    path.write_text("\n".join([head, whole, *rows]) + "\n")


def check(path, whole, sums):
    """The text must be the one the lock at `path` names."""
    locked_whole, locked = read_lock(path)
    changed = [crate for crate in sums if sums[crate] != locked[crate]]
    if changed:
        sys.exit(
            f"{path}: another document than the lock's: {named(changed)}\n"
            "  hint: the rules of make_corpus.py have changed since; take the commit that wrote the lock"
        )
    if whole != locked_whole:
        sys.exit(f"{path}: every document is the lock's, the whole is not: {whole}\n  hint: restore the lock's lines")


def main():
    """Makes the text of a lock and checks it against the lock's sums, or chooses
    crates and writes a lock; prints MB by suffix."""
    home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    lock = parser.add_mutually_exclusive_group(required=True)
    lock.add_argument("--from", dest="source", type=pathlib.Path, metavar="FILE", help="the lock that names the text")
    lock.add_argument("--lock", type=pathlib.Path, metavar="FILE", help="choose crates and write a lock file")
    parser.add_argument("--out", type=pathlib.Path, help="where the text goes; without it, the text is only checked")
    parser.add_argument("--cargo-lock", type=pathlib.Path, default="Cargo.lock", help="what --lock chooses from")
    parser.add_argument("--registry", type=pathlib.Path, default=home / "registry", help="%(default)s")
    parser.add_argument("--offline", action="store_true", help="fetch nothing")
    args = parser.parse_args()

    if args.lock:
        crates = choose(args.cargo_lock, args.registry)
        if not crates:
            parser.error(f"--registry {args.registry}: no crate of {args.cargo_lock}; cargo build gets them")
    else:
        crates = list(read_lock(args.source)[1])
        missing = [crate for crate in crates if not crate_file(args.registry, crate)]
        if missing and args.offline:
            sys.exit(f"{args.registry}: not there: {named(missing)}\n  hint: without --offline cargo fetches them")
        if missing:
            fetch(missing, args.registry)

    sizes = collections.Counter()
    made = {crate: text for crate, text in documents(crates, args.registry, sizes) if text or args.source}
    data = "".join(json.dumps({"text": text}) + "\n" for text in made.values()).encode()
    whole = f"text {len(data)} bytes, SHA-256 {sha256(data)}"
    sums = {crate: sha256(text.encode()) for crate, text in made.items()}
    if args.lock:
        write_lock(args.lock, whole, sums)
    else:
        check(args.source, whole, sums)
    if args.out:
        args.out.write_bytes(data)
    files = ", ".join(f"{size / 1e6:.1f} of {suffix}" for suffix, size in sizes.most_common())
    print(f"{len(made)} crates, {sum(sizes.values()) / 1e6:.1f} MB: {files}")


if __name__ == "__main__":
    main()
