"""Checks prose.py on pages made here.

    python tests/python/test_prose.py
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

import prose

PAGE = """# A heading of many words that nobody counts
**Bold.** One sentence has `a span of code` and 2 numbers, 80M and [a link](a/long/target.md). Another, of
arXiv:2508.02124 on an H200, has none.
```
code. More code. 1 2 3
```
- an item
- two sentences. In an item

    an indented block. 4 5 6

| head | of a table |
|---|---|
| [cell](target.md) | `a \\| b` 7 8 |
"""


class Prose(unittest.TestCase):
    def counts(self, text, name="page.md"):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, name)
            page.write_text(text, encoding="utf-8")
            return prose.counts(page)[0]

    def test_only_running_text_is_counted(self):
        numbers = self.counts(PAGE)
        self.assertEqual(numbers["sentences"], 6)
        self.assertEqual(numbers["longest"], 11)

    def test_a_cell_is_as_long_as_its_text_without_targets(self):
        self.assertEqual(self.counts(PAGE)["cell"], len("`a \\| b` 7 8"))

    def test_readme_has_its_lines_and_its_first_paragraph_counted(self):
        numbers = self.counts("# Title\nFour words are here. And four are there.\n\nMore.\n", "README.md")
        self.assertEqual((numbers["lines"], numbers["first"]), (4, 8))

    def test_a_page_over_its_budget_ends_with_status_1(self):
        script = pathlib.Path(prose.__file__)
        for text, status, said in [("word " * 40 + ".", 0, "within"), ("word " * 41 + ".", 1, "longest 41, at most 40"),
                                   (f"| a |\n|---|\n| {'x' * 161} |\n", 1, "cell 161, at most 160")]:
            with tempfile.TemporaryDirectory() as folder:
                page = pathlib.Path(folder, "page.md")
                page.write_text(text, encoding="utf-8")
                ran = subprocess.run([sys.executable, script, page], capture_output=True, text=True, check=False)
            self.assertEqual(ran.returncode, status, ran.stdout + ran.stderr)
            self.assertIn(said, ran.stdout)


if __name__ == "__main__":
    unittest.main()
