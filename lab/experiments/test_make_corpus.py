"""Checks make_corpus.py on a small registry made here.

    python lab/experiments/test_make_corpus.py
"""

import hashlib
import json
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).with_name("make_corpus.py")
CODE = "/// One of many lines that are long enough for a file to be taken.\npub fn f() {}\n" * 4


class MakeCorpus(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.cache = self.folder / "registry/cache/index"
        self.cache.mkdir(parents=True)
        self.lock, self.out = self.folder / "crates.lock", self.folder / "out.jsonl"
        self.add("alpha", "0.9.0", {"src/lib.rs": "// old\n" + CODE})
        self.add("alpha", "0.10.0", {"src/lib.rs": "// alpha\r\n" + CODE, "README.md": CODE, "src/a.rs": "short"})
        self.add("beta", "1.0.0+c", {"src/lib.rs": "// bêta\n" + CODE, "copy.md": CODE})
        self.add("gamma", "2.0.0", {"src/lib.rs": "// gamma\n" + CODE}, licence="GPL-3.0")
        ran = self.run_script("--lock", self.lock, "--cargo-lock", self.folder / "Cargo.lock", "--out", self.out)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.text = self.out.read_bytes()
        self.out.unlink()

    def add(self, name, version, files, licence="MIT OR Apache-2.0"):
        """Puts a crate into the registry and into Cargo.lock."""
        package = self.folder / f"{name}-{version}"
        for path, text in {"Cargo.toml": f'[package]\nlicense = "{licence}"\n', **files}.items():
            (package / path).parent.mkdir(parents=True, exist_ok=True)
            (package / path).write_bytes(text.encode())
        crate = self.cache / f"{package.name}.crate"
        with tarfile.open(crate, "w:gz") as archive:
            archive.add(package, package.name)
        checksum = hashlib.sha256(crate.read_bytes()).hexdigest()
        with open(self.folder / "Cargo.lock", "a") as lock:
            lock.write(f'[[package]]\nname = "{name}"\nversion = "{version}"\n')
            lock.write(f'source = "registry+https://example.org"\nchecksum = "{checksum}"\n\n')

    def run_script(self, *arguments):
        command = [sys.executable, SCRIPT, *arguments, "--registry", self.folder / "registry", "--offline"]
        return subprocess.run(command, capture_output=True, text=True)

    def rebuild(self):
        return self.run_script("--from", self.lock, "--out", self.out)

    def test_a_text_is_rebuilt_byte_for_byte_whatever_the_registry_holds_besides(self):
        documents = sorted(json.loads(line)["text"] for line in self.text.splitlines())
        self.assertEqual([len(documents), documents[0].count("// alpha/")], [2, 2])
        self.assertIn("// alpha\n", documents[0])
        self.assertIn("bêta", documents[1])
        self.assertEqual("".join(documents).count("copy.md") + "".join(documents).count("README.md"), 1, "a text twice")
        self.add("alpha", "0.11.0", {"src/lib.rs": "// newer\n" + CODE})
        self.add("delta", "0.1.0", {"src/lib.rs": CODE})
        ran = self.rebuild()
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertEqual(self.out.read_bytes(), self.text)

    def test_another_crate_file_is_refused_by_name(self):
        self.add("beta", "1.0.0+c", {"src/lib.rs": "// changed\n" + CODE})
        ran = self.rebuild()
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("beta 1.0.0+c", ran.stderr)
        self.assertFalse(self.out.exists())

    def test_another_document_is_refused_by_name(self):
        lines = self.lock.read_text().splitlines()
        alpha = next(index for index, line in enumerate(lines) if line.startswith("alpha "))
        lines[alpha] = lines[alpha][:-64] + "0" * 64
        self.lock.write_text("\n".join(lines))
        ran = self.rebuild()
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("alpha 0.10.0", ran.stderr)
        self.assertNotIn("beta", ran.stderr)
        self.assertFalse(self.out.exists())

    def test_another_order_is_refused(self):
        head, whole, *rows = self.lock.read_text().splitlines()
        self.lock.write_text("\n".join([head, whole, *reversed(rows)]))
        ran = self.rebuild()
        self.assertNotEqual(ran.returncode, 0)
        self.assertFalse(self.out.exists())

    def test_a_missing_crate_is_named_with_the_way_to_get_it(self):
        (self.cache / "alpha-0.10.0.crate").unlink()
        ran = self.rebuild()
        self.assertNotEqual(ran.returncode, 0)
        self.assertIn("alpha 0.10.0", ran.stderr)
        self.assertIn("without --offline cargo fetches", ran.stderr)


if __name__ == "__main__":
    unittest.main()
