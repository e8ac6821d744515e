"""Checks houses.py on sources made here.

    python tests/python/test_houses.py
"""

import unittest

import houses

RING = {
    "lib.rs": "mod a;\nmod b;\nmod c;\npub use a::One;\n",
    "a.rs": "use crate::b::Two;\npub struct One(Two);\n",
    "b.rs": "pub struct Two(crate::c::Three);\n",
    "c.rs": "use super::One;\npub struct Three(Option<Box<One>>);\n",
}


class Houses(unittest.TestCase):
    def test_three_files_that_use_each_other_are_a_circle(self):
        self.assertEqual(houses.Crate(RING).circles(), [[("a",), ("b",), ("c",)]])

    def test_two_files_and_tests_are_none(self):
        two = {**RING, "c.rs": "pub struct Three;\n#[cfg(test)]\nmod tests {\n    use super::super::One;\n}\n"}
        self.assertEqual(houses.Crate(two).circles(), [])
        self.assertEqual(houses.Crate({**two, "b.rs": "pub struct Two(Box<crate::a::One>);\n"}).circles(), [])

    def test_a_module_written_out_is_its_file(self):
        inner = {**RING, "c.rs": "pub struct Three;\npub mod cpu {\n    use super::*;\n    use super::Three;\n}\n"}
        self.assertEqual(houses.Crate(inner).circles(), [])
        beyond = {**RING, "c.rs": "pub struct Three;\nmod cpu {\n    use super::super::One;\n}\n"}
        self.assertEqual(houses.Crate(beyond).circles(), [[("a",), ("b",), ("c",)]])
        by_name = {**RING, "lib.rs": "mod a;\nmod b;\nmod c;\npub mod all {\n    pub use crate::a::One;\n}\n"}
        by_name["c.rs"] = "pub struct Three(Option<Box<crate::all::One>>);\n"
        self.assertEqual(houses.Crate(by_name).circles(), [[("a",), ("b",), ("c",)]])

    def test_a_name_counts_for_the_file_that_has_it(self):
        lent = {**RING, "lib.rs": "mod a;\nmod b;\nmod c;\nuse b::Two;\n", "a.rs": "pub struct One(super::Two);\n"}
        lent["c.rs"] = "use crate::a::One;\npub struct Three(Option<Box<One>>);\n"
        self.assertEqual(houses.Crate(lent).circles(), [[("a",), ("b",), ("c",)]])

    def test_a_comment_a_string_and_who_may_see_use_nothing(self):
        quiet = {**RING, "c.rs": '// crate::a::One\npub const THREE: &str = "crate::a::One";\n'}
        self.assertEqual(houses.Crate(quiet).circles(), [])
        files = {**RING, "c.rs": "pub(in crate::a) struct Three;\n"}
        self.assertEqual(houses.Crate(files).circles(), [])

    def test_functions_are_measured_from_their_first_line_to_their_last(self):
        function = lambda lines: "    pub fn long(\n" + "        x,\n" * (lines - 2) + "    }\nfn next() {}\n"  # noqa: E731
        self.assertEqual(houses.long_functions(function(110)), [])
        self.assertEqual(houses.long_functions(function(111)), ["long, 111 lines"])

    def test_a_word_must_share_a_word_with_its_value(self):
        launch = "params!(XParams {\n keep_window_size: num_ranked,\n first_query: queries.start,\n flag: true,\n})"
        self.assertEqual(houses.other_names(launch), ["XParams.keep_window_size: num_ranked"])
        self.assertEqual(houses.other_names(launch.replace("num_ranked", "spec.keep_window_size")), [])

    def test_what_names_a_kind_is_found_outside_its_rooms_alone(self):
        text = "fn f() { Attention::Moba(x) }"
        files = {path: text for path in ("crates/sieve-plan/src/a.rs", "crates/sieve-core/src/kinds/moba.rs", "tests/b.rs")}
        numbers = houses.measured(files)
        self.assertEqual(numbers["Rust files that name a variant"], ["crates/sieve-plan/src/a.rs"])
        self.assertEqual(len(numbers["Rust files with moba"]), 3)

    def test_every_number_has_a_limit(self):
        self.assertEqual(set(houses.measured({})), set(houses.LIMITS))


if __name__ == "__main__":
    unittest.main()
