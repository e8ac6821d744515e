"""What dry.py finds in scripts, on lines with planted faults."""

import pathlib
import tempfile
import unittest

import dry


class Planted:
    """Helps of a program with one command."""

    def of(self, words):
        return {"--device", "--out"} if words == ["train"] else {"--prompt"} if words == ["generate"] else None


class Dry(unittest.TestCase):
    def found(self, script):
        with tempfile.TemporaryDirectory(dir=dry.ROOT / "target") as folder:
            path = pathlib.Path(folder) / "planted.sh"
            path.write_text(script)
            return dry.shell_problems(path, Planted())

    def test_a_flag_that_is_gone_is_found(self):
        self.assertEqual(self.found('"$sieve" train --out "$out" --device cpu | tail -1\n'), ([], 1))
        for line in ('"$sieve" train --outt x', 'train=(train --outt "$x")', '"$sieve" train --out x \\\n  --outt y'):
            problems, _ = self.found(line + "\n")
            self.assertEqual(len(problems), 1, line)
            self.assertIn("no --outt", problems[0])

    def test_behind_two_dashes_a_command_of_its_own_begins(self):
        problems, count = self.found('"$sieve" train --out x -- generate --promt y\n')
        self.assertEqual((count, [p.split(": ")[-1] for p in problems]), (2, ["no --promt"]))

    def test_a_command_that_is_gone_is_found(self):
        problems, _ = self.found('"$sieve" trian --out x\n')
        self.assertIn("no such command", problems[0])

    def test_a_script_that_does_not_parse_is_found(self):
        self.assertEqual(len(self.found("if true; then\n")[0]), 1)

    def test_a_name_that_an_imported_file_lacks_is_found(self):
        with tempfile.TemporaryDirectory(dir=dry.ROOT / "target") as folder:
            (pathlib.Path(folder) / "beside.py").write_text("def one(): pass\n")
            path = pathlib.Path(folder) / "planted.py"
            path.write_text("from beside import one, two\nimport torch\n")
            self.assertEqual([p.split(": ")[-1] for p in dry.python_problems(path)], ["beside.py has no two"])

    def test_an_imported_file_that_is_not_on_the_script_s_path_is_found(self):
        with tempfile.TemporaryDirectory(dir=dry.ROOT / "target") as folder:
            path = pathlib.Path(folder) / "planted.py"
            adds = 'import sys, pathlib\nsys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))\n'
            for script in ("import dry\n", "def late():\n    from dry import imported\n", "import beside, dry\n"):
                (pathlib.Path(folder) / "beside.py").write_text("import re\n")
                path.write_text(script)
                problems = dry.python_problems(path)
                self.assertEqual([p.split(": ")[-1] for p in problems],
                                 ["dry.py is in tests/python, which is not on its path"], script)  # fmt: skip
                path.write_text(adds + script)
                self.assertEqual(dry.python_problems(path), [], script)
            # A module beside it adds the folder for both.
            (pathlib.Path(folder) / "beside.py").write_text(adds)
            path.write_text("import beside, dry\n")
            self.assertEqual(dry.python_problems(path), [])


if __name__ == "__main__":
    unittest.main()
