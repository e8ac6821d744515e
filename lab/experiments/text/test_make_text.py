"""Checks make_text.py on texts made here.

    python3 lab/experiments/text/test_make_text.py
"""

import gzip
import io
import json
import pathlib
import tempfile
import unittest

import make_text

CODE = "/* One of many lines that are long enough. */\nint function(void);\n" * 5


class MakeText(unittest.TestCase):
    def made(self, files):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            spool = io.BytesIO()
            lines, given = make_text.write(make_text.gather([("package", files)], spool), spool, out)
            texts = [json.loads(line)["text"] for line in (out / "train.jsonl").read_text().splitlines()]
            held = [json.loads(line)["text"] for line in (out / "heldout.jsonl").read_text().splitlines()]
            self.assertEqual(lines[0]["documents"], len(texts))
            return texts, held, given

    def test_a_text_is_taken_once_and_noise_never(self):
        files = [("a/one.c", CODE), ("b/copy.c", CODE), ("a/short.c", "int a;"), ("a/long.c", CODE + "x" * 1001),
                 ("a/table.c", "0123456789, " * 100 + "\n"), ("a/made.c", "/* Generated, do not edit */\n" + CODE),
                 ("a/one.bin", CODE), ("a/two.c.gz", None)]
        packed = gzip.compress(("// packed\n" + CODE).encode())
        texts, _, given = self.made([(path, packed if text is None else text.encode()) for path, text in files])
        self.assertEqual(sorted(texts), sorted([CODE, "// packed\n" + CODE]))
        self.assertEqual(given["package"]["documents"], 2)

    def test_a_page_is_its_words(self):
        page = "<html><head><title>T</title></head><body><p>One &amp; <b>two</b></p><script>x()</script><p>3</p></body>"
        self.assertEqual(make_text.plain(page), "One & two\n3\n")

    def test_the_held_out_documents_depend_on_their_own_text_alone(self):
        files = [(f"a/{n}.c", (f"// {n}\n" + CODE).encode()) for n in range(2000)]
        texts, held, _ = self.made(files)
        self.assertEqual(len(texts) + len(held), 2000)
        self.assertTrue(0 < len(held) < 30)
        _, half, _ = self.made(files[:1000])
        self.assertEqual(set(half), set(held) & {text.decode() for _, text in files[:1000]})

    def test_a_package_gives_no_more_than_its_share(self):
        files = [(f"folder-{n}/a.c", (f"// {n}\n" + CODE).encode()) for n in range(100)]
        make_text.MOST["package"] = 10_000
        self.addCleanup(make_text.MOST.pop, "package")
        texts, held, given = self.made(files)
        size = sum(len(text) for text in texts + held)
        self.assertTrue(9_000 < size <= 10_000)
        self.assertEqual(given["package"]["text_bytes"], size)

    def test_a_dictionary_is_cut_at_line_ends(self):
        parts = list(make_text.cut("a line of a dictionary\n" * 3000))
        self.assertEqual(len(parts), 4)
        self.assertEqual("".join(parts), "a line of a dictionary\n" * 3000)


if __name__ == "__main__":
    unittest.main()
