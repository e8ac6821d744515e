"""A second text: Linux, C sources with their documentation, a document a folder. It checks that what lab/docs/results.md finds
on Rust crates holds elsewhere.

    apt-get download linux-source-6.1 && dpkg-deb --fsys-tarfile linux-source-6.1_*.deb > linux.tar
    python3 lab/experiments/kernel_corpus.py --from linux.tar --out data/linux.jsonl

A document holds the files of one folder, chosen by make_corpus.py's rules, up to 2 MB. Folders below the third level join
their folder of that level; folders of less than 100 kB are left out. Documents are sorted by the hashes of the folders'
names, up to --megabytes. Prints the version of Linux and the size of the text. Needs nothing but Python.
"""

import argparse
import collections
import json
import pathlib
import sys
import tarfile

from make_corpus import sha256, texts

DEPTH, LEAST, MOST = 3, 100_000, 2_000_000


def sources(path):
    """The tree's files by path, without the name of the folder around them."""
    with tarfile.open(path) as package:
        inner = next((member for member in package if member.name.endswith(".tar.xz")), None)
        if inner is None:
            sys.exit(f"{path}: holds no .tar.xz; take `dpkg-deb --fsys-tarfile` of Debian's linux-source-6.1")
        with tarfile.open(fileobj=package.extractfile(inner), mode="r|xz") as tree:
            for member in tree:
                if member.isfile():
                    name = pathlib.PurePosixPath(*pathlib.PurePosixPath(member.name).parts[1:])
                    yield name, tree.extractfile(member).read()


def documents(files, limit):
    """The documents, by the hashes of their folders' names."""
    folders = collections.defaultdict(dict)
    for path, data in files:
        folders[path.parts[:-1][:DEPTH]][path] = data
    for folder in sorted(folders, key=lambda parts: sha256("/".join(parts).encode())):
        parts, size = [], 0
        for path, text in texts(folders[folder]):
            size += len(text.encode())
            if size <= MOST:
                parts.append(f"// {path}\n{text}\n")
        if size >= LEAST:
            yield "".join(parts)
            limit -= min(size, MOST)
            if limit <= 0:
                return


def main():
    """Writes the documents as JSON lines and prints Linux's version, their number, size and SHA-256."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", required=True, type=pathlib.Path, help="the package's files as a tar")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    parser.add_argument("--megabytes", type=float, default=120)
    arguments = parser.parse_args()
    if arguments.megabytes <= 0:
        parser.error(f"--megabytes {arguments.megabytes:g}: how much text to write, above 0")
    try:
        files = dict(sources(arguments.source))
    except (OSError, tarfile.TarError) as error:
        parser.error(f"--from {arguments.source}: {str(error).splitlines()[0]}; take what `dpkg-deb --fsys-tarfile` writes")
    makefile = files[pathlib.PurePosixPath("Makefile")].decode()
    version = ".".join(line.split(" = ")[1] for line in makefile.splitlines()[1:4])
    data = "".join(json.dumps({"text": text}) + "\n" for text in documents(files.items(), arguments.megabytes * 1e6)).encode()
    arguments.out.write_bytes(data)
    print(f"Linux {version}: {len(data.splitlines())} documents, {len(data) / 1e6:.1f} MB, SHA-256 {sha256(data)}")


if __name__ == "__main__":
    main()
