"""Checks draw_for_readers.py on sources made here.

    python tests/python/test_draw_for_readers.py
"""

import random
import unittest

import draw_for_readers as draws

BODY = "".join(f"    step_{n}();\n" for n in range(8))
RUST = f"""//! The file.
/// Drawn.
pub(crate) fn drawn() {{
{BODY}}}

trait Declares {{
    fn declared(&self) -> u32;
}}

/// Of a test.
#[test]
fn checked() {{
{BODY}}}

#[cfg(all(test, unix))]
mod checks {{
    // Of tests.
    fn helper() {{
    {BODY.replace("    step", "        step")}    }}
}}

#[cfg(any(feature = "cuda", test))]
fn also_drawn() {{
{BODY}}}
#[cfg(test)]
mod matrix;
"""
CUDA = f"""// Kernels.
extern "C" __global__ void kernel(int n) {{
{BODY}}}
template <int N>
DEVICE void on_device(
    int n) {{
{BODY}}}
void of_the_host() {{
{BODY}}}
DEVICE int too_short() {{ return 0; }}
"""
PYTHON = f'''#!/usr/bin/env python3
"""The file."""
# A comment.
@decorated
def drawn():
    """Drawn."""
{BODY.replace(";", "")}
class TestThings:
    def helper(self):
        """Of tests."""
{BODY.replace("    step", "        step").replace(";", "")}
def test_it():
{BODY.replace(";", "")}'''


class Draws(unittest.TestCase):
    def first_lines(self, files, what):
        return {
            name: [lines[0].strip() for _, _, lines in pool] for name, pool in draws.drawn_from(files)[what].items()
        }

    def test_functions_of_three_languages_and_none_of_tests(self):
        files = {"crates/a/src/lib.rs": RUST, "kernels/a.cu": CUDA, "kernels/common/a.cuh": CUDA, "lab/a.py": PYTHON}
        of_cuda = ['extern "C" __global__ void kernel(int n) {', "template <int N>"]
        self.assertEqual(
            self.first_lines(files, "function"),
            {"Rust": ["pub(crate) fn drawn() {", "fn also_drawn() {"], "CUDA": of_cuda * 2, "Python": ["@decorated"]},
        )

    def test_comments_and_docstrings_and_none_of_tests(self):
        self.assertEqual(
            self.first_lines({"crates/a/src/lib.rs": RUST, "kernels/a.cu": CUDA, "python/a.py": PYTHON}, "comment"),
            {
                "Rust": ["//! The file."],
                "CUDA": ["// Kernels."],
                "Python": ['"""The file."""', "# A comment.", '"""Drawn."""'],
            },
        )

    def test_a_file_of_tests_is_left_out_by_its_name_or_its_declaration(self):
        of_tests = (
            "crates/a/src/matrix.rs",
            "crates/a/src/matrix/deep.rs",
            "crates/a/tests/b.rs",
            "crates/a/src/tests.rs",
            "python/tests/a.py",
            "python/b/conftest.py",
            "lab/test_a.py",
            "tests/python/a.py",
        )
        drawn_from = ("crates/b/src/matrix.rs", "crates/a/src/latest.rs", "lab/fastest.py")
        sources = {".rs": "fn f() {\n" + BODY + "}\n", ".py": PYTHON}
        files = {path: sources[path[-3:]] for path in (*of_tests, *drawn_from)}
        pools = draws.drawn_from({"crates/a/src/lib.rs": RUST.replace("fn ", "let "), **files})["function"].values()
        self.assertEqual(sorted(path for pool in pools for path, *_ in pool), sorted(drawn_from))

    def test_a_seed_draws_the_same_of_each_stratum_in_turn(self):
        pools = {"Rust": list(range(100)), "CUDA": list(range(100, 102)), "Python": list(range(200, 300))}
        first, second, other = (draws.draw(pools, 9, random.Random(seed)) for seed in (1, 1, 2))
        self.assertEqual(first, second)
        self.assertNotEqual(first, other)
        self.assertEqual([x // 100 for x in first[:6]], [0, 1, 2] * 2)
        self.assertEqual(len(set(first)), 9)


if __name__ == "__main__":
    unittest.main()
