"""Makes the text of the 80M experiments from packages that anyone can have again: Debian's, and crates.

    python3 lab/experiments/text/make_text.py --from lab/experiments/text/packages.lock --out data/text
    python3 lab/experiments/text/make_text.py --lock lab/experiments/text/packages.lock --pins name=version …
    python3 lab/experiments/text/make_text.py --check data/text

`--from` gets the packages that the lock names into OUT/packages (`apt-get download` of Debian 12, and `cargo fetch`),
checks the SHA-256 of each, and writes `train.jsonl`, `heldout.jsonl` and `manifest.json`, byte for byte the same each
time. Where Debian has a newer version already, snapshot.debian.org has the file: put it into OUT/packages.
`--lock` downloads the named packages and writes the lock; its crates are those of lab/experiments/crates_scaling.lock.
`--check` compares a folder's text and tokenizer with the checksums of lab/experiments/text/manifest.json.

A document is a file: sources, documentation, and HTML without its tags. Left out: what is not UTF-8, has fewer than 200
bytes or more than a megabyte, a line of more than 1000 characters, a third of digits, or says that it is generated; and
a text that was there before. Dictionaries are cut at line ends into documents of 20,000 characters. The files of a
folder stay together, which packs better, and folders are in the order of a hash of their names, so that every stretch
of the text has all domains; of a package with more text than MOST the first folders are taken. A document is held out
where its SHA-256 begins with a byte of zero, one in 256: the same ones whatever else the text has. Needs Debian's
dpkg-deb, and nothing of Python but its library.
"""

import argparse
import collections
import gzip
import hashlib
import html
import io
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "lab/experiments"))

import make_corpus  # noqa: E402

CRATES = ROOT / "lab/experiments/crates_scaling.lock"
# At most this much text of a package, in the order of its folders: Linux alone has more than all others.
MOST = collections.defaultdict(lambda: 130_000_000, {"linux-source-6.12": 450_000_000, "crates": 250_000_000})
CODE = set(
    ".c .h .cc .cpp .hpp .hh .ipp .S .rs .go .java .py .pyx .pxd .el .ml .mli .erl .hrl .lisp .pl .pm .pod .js .ts .sh "
    ".awk .vim .lua .rb .R .tcl .y .l .md .rst .txt .texi .tex .texinfo .rkt .scrbl .hs .cmake .am .ac .mk .dtsi .dts "
    ".yaml .page .dd .exp .proto .pas .pp .inc .org .s .def .opt .td .1 .2 .3 .4 .5 .7 .8 .xsl".split()
)
PAGES = {".html", ".htm", ".xhtml"}
# Register lists, tables, tests of single features, translations and changes already told by the code.
SKIPPED = re.compile(
    r"drivers/gpu/drm/amd/include/|/testsuite/|localedata/|/po/|ChangeLog|/config\.(guess|sub)$|/ltmain\.sh$|"
    r"/(genindex|py-modindex|search|implementors|_modules|_images|_static|_downloads)\b|/gnome/help/[^/]+/(?!C/)|"
    r"arch/[^/]+/boot/dts/|/selftests/|sanitizer_common|/src-[^/]*/|\.dfsg|copyright$|/man/[a-z]{2}(_[A-Z]{2})?/"
)
NOISE = re.compile(r"(?is)<(script|style|head|nav|svg|footer)\b.*?</\1\s*>|<!--.*?-->")
BREAK = re.compile(r"(?i)<(?:br|/p|/div|/li|/tr|/h[1-6]|/dt|/dd|/table|/section|/ul|/ol)\b[^>]*>")
MANIFEST = pathlib.Path(__file__).with_name("manifest.json")
TOKENIZER = "545176e4be8f347e"  # how the SHA-256 of the tokenizer begins
HINT = """  hint: python3 lab/experiments/text/make_text.py --from lab/experiments/text/packages.lock --out {folder}
        sieve tokenizer train --data {folder}/train.jsonl --vocab-size 50277 --sample-bytes 100000000 \\
          --out {folder}/tokenizer.json"""
TAG = re.compile(r"<[^>]{0,4000}>")
Package = collections.namedtuple("Package", "name version sha256")
Row = collections.namedtuple("Row", "unit path number package offset length is_held")


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def members(stream, prefix=""):
    """The files of a tar stream with their paths, and those of archives of sources in it."""
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            if not member.isfile():
                continue
            path = prefix + member.name.removeprefix("./")
            if re.search(r"^usr/src/([^/]+/)?[^/]+\.tar(\.(xz|gz|bz2))?$", path):
                yield from members(archive.extractfile(member), path + "/")
            elif path.endswith("src.zip"):
                with zipfile.ZipFile(io.BytesIO(archive.extractfile(member).read())) as inner:
                    for name in inner.namelist():
                        yield f"{path}/{name}", inner.read(name)
            elif not SKIPPED.search(path) and member.size <= 60_000_000:
                yield path, archive.extractfile(member).read()


def plain(page):
    """A page of HTML as text."""
    text = html.unescape(TAG.sub("", BREAK.sub("\n", NOISE.sub("", page))))
    text = re.sub(r"[ \t\xa0]+\n", "\n", text.replace("¶", ""))
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def cut(text):
    """A long text in documents of whole lines."""
    part, size = [], 0
    for line in text.splitlines(keepends=True):
        part.append(line)
        size += len(line)
        if size >= 20_000:
            yield "".join(part)
            part, size = [], 0
    yield "".join(part)


def texts(path, data):
    """The texts of a file before they are judged: none, one, or the parts of a book."""
    suffix = pathlib.PurePosixPath(path).suffix
    if suffix == ".gz" or suffix == ".dz":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError):
            return
        if suffix == ".gz":
            path, suffix = path[:-3], pathlib.PurePosixPath(path[:-3]).suffix
    if suffix not in CODE and suffix not in PAGES and suffix != ".dz":
        return
    try:
        text = data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError:
        return
    if suffix in PAGES:
        yield plain(text)
    elif suffix == ".dz":
        yield from cut(text)
    else:
        yield text


def is_wanted(text):
    """Whether a text is kept: 200 to 1,000,000 letters, not generated, with no line over 1000 letters and no broken
    letter; digits are at most a third of what is no space."""
    size = len(text)
    if not 200 <= size <= 1_000_000:
        return False
    head = text[:2000].lower()
    if "generated" in head and any(mark in head for mark in make_corpus.GENERATED):
        return False
    if max(map(len, text.splitlines()), default=0) > 1000 or "\0" in text or "\ufffd" in text:
        return False
    sample = text[:200_000]
    digits = sum(sample.count(digit) for digit in "0123456789")
    return 3 * digits <= len(sample) - sample.count(" ") - sample.count("\n")


def of_debian(package, folder):
    """The files of a Debian package."""
    path = deb(package, folder)
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", path], stdout=subprocess.PIPE) as ran:
        yield from members(ran.stdout)


def of_crates(registry):
    """The files of the crates that make_corpus.py's lock names."""
    crates = list(make_corpus.read_lock(CRATES)[1])
    missing = [crate for crate in crates if not make_corpus.crate_file(registry, crate)]
    if missing:
        make_corpus.fetch(missing, registry)
    for crate in crates:
        files = make_corpus.read_crate(make_corpus.crate_file(registry, crate), crate)
        if make_corpus.is_permissive(files[pathlib.PurePosixPath("Cargo.toml")].decode(errors="replace")):
            size = 0
            for path, data in sorted(files.items()):
                size += len(data) if path.suffix in make_corpus.SUFFIXES else 0
                if path.suffix in make_corpus.SUFFIXES and size <= make_corpus.MOST_BYTES:
                    yield f"{crate.name}/{path}", data


def deb(package, folder):
    """The file of a package in `folder`, checked."""
    version = package.version.replace(":", "%3a")
    path = next(folder.glob(f"{package.name}_{version}_*.deb"), None)
    if path is None:
        sys.exit(f"{folder}: no {package.name} {package.version}\n  hint: snapshot.debian.org has every version")
    if package.sha256 and sha256(path.read_bytes()) != package.sha256:
        sys.exit(f"{path}: another file than the lock's\n  hint: delete it, apt-get downloads it again")
    return path


def download(packages, folder):
    """Has apt get what `folder` lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [p for p in packages if not list(folder.glob(f"{p.name}_{p.version.replace(':', '%3a')}_*.deb"))]
    if missing:
        command = ["apt-get", "download", *(f"{p.name}={p.version}" for p in missing)]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if ran.returncode != 0:
            sys.exit(f"{' '.join(command)}:\n{ran.stderr}  hint: Debian 12 has them, or snapshot.debian.org")


def unit(name, path):
    """What stays together: the files of a folder."""
    return f"{name}/{path.rpartition('/')[0]}"


def gather(sources, spool):
    """Writes every wanted text once to `spool`; returns where each lies, with what orders it."""
    digests, rows = set(), []
    offset = 0
    for name, files in sources:
        count = collections.Counter()
        for path, data in files:
            for number, text in enumerate(texts(path, data)):
                if not is_wanted(text):
                    count["refused"] += 1
                    continue
                raw = text.encode()
                digest = hashlib.sha256(raw).digest()
                if digest in digests:
                    count["repeated"] += 1
                    continue
                digests.add(digest)
                spool.write(raw)
                rows.append(Row(unit(name, path), path, number, name, offset, len(raw), digest[0] == 0))
                offset += len(raw)
                count["documents"] += 1
                count["bytes"] += len(raw)
        print(f"{name}: {dict(count)}", flush=True)
    return rows


class Lines:
    """A file of JSON lines with its checksum."""

    def __init__(self, path):
        self.path, self.file, self.sha = path, open(path, "wb"), hashlib.sha256()
        self.documents = self.size = self.text = 0

    def add(self, raw):
        line = (json.dumps({"text": raw.decode()}, ensure_ascii=False) + "\n").encode()
        self.file.write(line)
        self.sha.update(line)
        self.documents += 1
        self.size += len(line)
        self.text += len(raw)

    def close(self):
        self.file.close()
        return {"file": self.path.name, "documents": self.documents, "text_bytes": self.text, "bytes": self.size,
                "sha256": self.sha.hexdigest()}


def write(rows, spool, out):
    """The text and the held-out documents, each with its line of the manifest, and what each package gave."""
    rows.sort(key=lambda row: (sha256(row.unit.encode()), *row[:3]))
    train, held = Lines(out / "train.jsonl"), Lines(out / "heldout.jsonl")
    given = {}
    for row in rows:
        count = given.setdefault(row.package, collections.Counter())
        if count["text_bytes"] + row.length > MOST[row.package]:
            count["left_out_bytes"] += row.length
            continue
        count["documents"] += 1
        count["text_bytes"] += row.length
        spool.seek(row.offset)
        raw = spool.read(row.length)
        (held if row.is_held else train).add(raw)
    return [train.close(), held.close()], given


def read_lock(path):
    lines = [line.split() for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [Package(*line) for line in lines]


def checked(folder):
    """The SHA-256 of the training text in `folder`; ends the program where the text, the held-out text or the tokenizer
    is another than the one that the stored runs read, and says how to make it."""
    wanted = {entry["file"]: entry["sha256"] for entry in json.loads(MANIFEST.read_text())["files"]}
    for name, digest in {**wanted, "tokenizer.json": TOKENIZER}.items():
        path = folder / name
        if not path.is_file():
            sys.exit(f"{path}: there is no such file\n{HINT.format(folder=folder)}")
        sha = hashlib.sha256()
        with open(path, "rb") as file:
            for part in iter(lambda: file.read(1 << 20), b""):
                sha.update(part)
        digest_of_file = sha.hexdigest()
        if not digest_of_file.startswith(digest):
            hint = HINT.format(folder=folder)
            sys.exit(f"{path}: its SHA-256 is {digest_of_file}, that of the stored runs is {digest}\n{hint}")
    return wanted["train.jsonl"]


def main():
    """Makes the text of a lock's packages and its manifest; or writes a lock, or
    with --check compares a folder's checksums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lock = parser.add_mutually_exclusive_group(required=True)
    lock.add_argument("--from", dest="source", type=pathlib.Path, metavar="FILE", help="the lock of the packages")
    lock.add_argument("--lock", type=pathlib.Path, metavar="FILE", help="write a lock of the packages of --pins")
    lock.add_argument("--check", type=pathlib.Path, metavar="FOLDER", help="compare its text with the checksums")
    parser.add_argument("--pins", nargs="+", default=[], metavar="NAME=VERSION")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data/text"), help="%(default)s")
    parser.add_argument("--packages", type=pathlib.Path, help="where Debian's packages are kept (OUT/packages)")
    parser.add_argument("--registry", type=pathlib.Path, default=pathlib.Path.home() / ".cargo/registry")
    args = parser.parse_args()
    if args.check:
        print(f"{args.check}: the text of the stored runs, SHA-256 {checked(args.check)}")
        return
    folder = args.packages or args.out / "packages"
    if args.lock:
        packages = [Package(*pin.split("=", 1), "") for pin in args.pins]
        download(packages, folder)
        rows = [f"{p.name} {p.version} {sha256(deb(p, folder).read_bytes())}" for p in packages]
        head = "# Made by lab/experiments/text/make_text.py --lock: Debian 12's package, version, SHA-256 of its file."
        args.lock.write_text("\n".join([head, *rows]) + "\n")
        return
    packages = read_lock(args.source)
    download(packages, folder)
    args.out.mkdir(parents=True, exist_ok=True)
    sources = [(package.name, of_debian(package, folder)) for package in packages]
    sources.append(("crates", of_crates(args.registry)))
    with open(args.out / "spool", "w+b") as spool:
        files, given = write(gather(sources, spool), spool, args.out)
    (args.out / "spool").unlink()
    manifest = {"files": files, "packages": given}
    (args.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    total = sum(file["text_bytes"] for file in files)
    print(f"{sum(file['documents'] for file in files)} documents, {total / 1e6:.1f} MB of text")


if __name__ == "__main__":
    main()
