"""Checks that the pages show the rows of lab/rows, and that lab/experiments/tables.py finds what does not.

    python lab/experiments/test_tables.py
"""

import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "lab/experiments"))

import claims  # noqa: E402
import papers  # noqa: E402
import papers_rows  # noqa: E402
import provenance  # noqa: E402
import run_tables  # noqa: E402
import shared  # noqa: E402
import tables  # noqa: E402
from race import table as race_table  # noqa: E402

KEYS = {"about", *provenance.KEYS, "not_kept", "seeds", "columns", "once", "note"}


@functools.cache
def help_of(script):
    """What a script of Python prints about itself; its text where it needs what this Python has not, such as torch."""
    said = subprocess.run([sys.executable, "-B", script, "--help"], capture_output=True, text=True, check=False)
    return script.read_text(encoding="utf-8") if said.returncode else said.stdout


def claims_of_all():
    return [claim for of_paper in papers.PAPERS.values() for claim in of_paper()]


class Tables(unittest.TestCase):
    def of_page(self, text):
        with tempfile.TemporaryDirectory() as folder:
            page = pathlib.Path(folder, "page.md")
            page.write_text(text, encoding="utf-8")
            return tables.filled(page)

    def test_each_page_is_what_the_rows_give(self):
        for name in tables.PAGES:
            page = tables.ROOT / name
            text, different, unknown = tables.filled(page)
            self.assertEqual(different + unknown, [], f"run {pathlib.Path(tables.__file__).name}")
            self.assertEqual(text, page.read_text(encoding="utf-8"))

    def test_each_stored_table_is_shown_once(self):
        pages = [(ROOT / name).read_text(encoding="utf-8") for name in tables.PAGES]
        shown = [mark for page in pages for mark in tables.MARK.findall(page)]
        self.assertEqual(sorted(shown), sorted({*tables.COMPUTED, *tables.noted()}))

    def test_a_changed_cell_and_a_missing_row_are_found(self):
        table = "\n".join(tables.made("nsa"))
        right = f"<!-- table nsa -->\n{table}\n\n{provenance.LEGEND}.\n"
        self.assertEqual(self.of_page(right), (right, [], []))
        shorter = right.replace(table, table[:table.rindex("\n")])
        for wrong in (right.replace("0.755", "0.754"), right.replace("0.91", "0.92"), shorter):
            text, different, unknown = self.of_page(wrong)
            self.assertEqual((text, len(different), unknown), (right, 1, []))

    def test_a_number_without_a_row_is_found_and_settings_are_not(self):
        table = "| what | ms |\n|---|---|\n| a | 1.5 |\n| b | about 2 |\n"
        self.assertEqual(self.of_page(table)[2], ["page.md:3: a number without a stored row: 1.5"])
        self.assertEqual(self.of_page(f"{tables.SETTINGS}\n{table}")[2], [])

    def test_a_noted_row_has_what_its_table_names_and_no_more(self):
        for name, (about, rows) in tables.noted().items():
            self.assertTrue(rows, name)
            self.assertLessEqual(about.keys(), KEYS, name)
            stored = {column for column in about["columns"] if (name, column) not in tables.DERIVED}
            derived = {column for table, column in tables.DERIVED if table == name}
            for row in rows:
                self.assertLessEqual(stored, row.keys(), name)
                self.assertLessEqual(row.keys() - {"table", "since"}, stored | derived, name)
        self.assertLessEqual({table for table, _ in tables.DERIVED}, tables.noted().keys())

    def test_a_sentence_that_says_another_number_than_rows_or_pages_is_found(self):
        pages = [(page.name, page.read_text(encoding="utf-8")) for page in tables.ALL]
        self.assertEqual(shared.faults(pages), [])
        count = 0
        for pattern, _ in shared.FACTS:
            for at, (name, text) in enumerate(pages):
                for place in re.finditer(pattern, shared.said(text)):
                    # Each number of each place, told as another one, on this page alone.
                    number = next(filter(None, place.groups()))
                    wrong = pages[:at] + [(name, shared.said(text).replace(place[0], place[0].replace(
                        number, f"{number}1", 1)))] + pages[at + 1:]
                    self.assertTrue(any(fault.startswith(f"{name}: ") for fault in shared.faults(wrong)), place[0])
                    count += 1
            without = [(name, re.sub(pattern, "", shared.said(text))) for name, text in pages]
            self.assertTrue(any("no page says" in fault for fault in shared.faults(without)), pattern)
        self.assertGreater(count, len(shared.FACTS))

    def test_one_speed_has_one_number_on_all_pages(self):
        best = "DMA is 10.7 to 11.0 times as fast as cuDNN's dense attention."
        page = pathlib.Path(tables.ROOT, "README.md").read_text(encoding="utf-8")
        faults = [fault for fault in shared.faults([("README.md", f"{page}\n{best}\n")]) if "cuDNN" in fault]
        self.assertEqual(faults, ["README.md: '10.7 to 11.0 times as fast as cuDNN's dense attention' is no number of "
                                  "lab/experiments/speeds.py"])

    def test_each_table_has_card_date_commit_and_command_or_says_which_were_not_kept(self):
        for name, (about, _) in tables.noted().items():
            lost = about.get("not_kept", [])
            self.assertEqual(sorted([*(about.keys() & set(provenance.KEYS)), *lost]), sorted(provenance.KEYS), name)
            self.assertRegex(about["date"], r"^(by )?20\d\d-\d\d-\d\d", name)
        for file in provenance.of_files():
            self.assertEqual(provenance.missing(file), [], file)
        # Every table is noted, made from a file of runs, or composed of such tables' rows on another page.
        composed = {*papers.TABLES, *tables.choose_tables.TABLES, "speed", "advice"}
        self.assertEqual(tables.COMPUTED.keys() - composed - provenance.tables_of_runs().keys(), set())

    def test_a_table_without_its_commit_is_marked_on_the_page(self):
        marked = [name for name in (*tables.COMPUTED, *tables.noted()) if f" {provenance.SIGN} |" in tables.made(name)[0]
                  or tables.made(name)[0].startswith(f"| {provenance.SIGN} |")]
        self.assertEqual(set(marked), {name for name in (*tables.COMPUTED, *tables.noted()) if provenance.not_kept(name)})
        table = "\n".join(tables.made("nsa"))
        unknown = self.of_page(f"<!-- table nsa -->\n{table}\n")[2]
        self.assertEqual(len(unknown), 1)
        self.assertIn(provenance.LEGEND, unknown[0])

    def test_what_is_computed_follows_its_row(self):
        (row, *_) = tables.noted()["nsa"][1]
        self.assertEqual(tables.DERIVED["nsa", "cuDNN / NSA"](row), "0.91")
        self.assertEqual(tables.DERIVED["nsa", "cuDNN / NSA"](row | {"cuDNN dense, both": 3.744}), "1.82")
        # Four multiplications a pair of causal attention: 2 x 16 heads, 8192² / 2 pairs of 128 columns.
        (row, *_) = tables.noted()["attention"][1]
        self.assertEqual(tables.rate_of(row | {"ours": 1}, None), f"{4 * 128 * 32 * 8192 ** 2 / 2 / 1e9:.0f}")

    def test_a_claim_of_a_paper_names_rows_and_scripts_that_are_there(self):
        for claim in claims_of_all():
            named = papers.rows_of(claim)
            self.assertLessEqual(set(named), {*tables.COMPUTED, *tables.noted()}, claim)
            self.assertEqual(bool(named), bool(claim.holds), claim)
            self.assertIn(claim.apart, ("", *claims.APART), claim)
            for path in re.findall(r"`(lab/experiments/[\w./]+)`", claim.differs):
                self.assertTrue((ROOT / path).is_file(), path)

    def test_rows_of_a_claim_and_of_a_noted_table_have_a_command_that_can_run(self):
        decide = {name for claim in claims_of_all() for name in papers.rows_of(claim)}
        self.assertLessEqual(set(papers.MEASURES), decide)
        noted = [about["command"] for about, _ in tables.noted().values() if "command" in about]
        noted += [line["command"] for line in provenance.of_files().values() if "command" in line]
        count = 0
        for command in [papers.command(name) for name in decide] + noted:
            self.assertTrue(command)
            for part in re.split(r" && |; ", command.partition("#")[0]):
                count += self.can_run(part)
        self.assertGreaterEqual(count, 60)

    def can_run(self, command):
        """Whether `command` is of a script, which must be there and know each flag; flags of `sieve` are tried by
        tests/command_line.rs."""
        script = re.search(r"(?<!\S)(?:tests|python|lab|experiments)/[\w./]+\.(?:py|sh)", command)
        if not script:
            return False
        # A stored row names its script by where it lay at the row's commit.
        places = [script[0], f"lab/{script[0]}", script[0].replace("tests/gpu/rivals", "lab/rivals"),
                  script[0].replace("tests/gpu", "lab/rivals"), script[0].replace("tests/python", "lab/experiments")]
        path = next((ROOT / place for place in places if (ROOT / place).is_file()), ROOT / script[0])
        self.assertTrue(path.is_file(), command)
        if path.suffix == ".sh":
            self.assertEqual(subprocess.run(["bash", "-n", path], check=False).returncode, 0, command)
            return True
        help_text = help_of(path)
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]+", command[script.end():]):
            self.assertRegex(help_text, rf'{flag}\b', command)
        return True

    def test_verdicts_follow_from_conditions_alone(self):
        for held, verdict in (([True, True], "reproduced"), ([True, False], "partly"), ([False, False], "not reproduced"),
                              ([True, None], "partly"), ([False, None], "not reproduced"), ([None], "not comparable"),
                              ([], "not run")):
            claim = claims.Claim("it is fast", holds=dict(enumerate(held)))
            self.assertEqual(claim.verdict, verdict, held)
            self.assertIn(claim.verdict, claims.VERDICTS)
            self.assertEqual(claim.cells()[3], f"**{verdict}**" if held else verdict)
        # Only the paper's own setting refutes, and another quantity decides nothing, whichever way it went.
        self.assertEqual(claims.Claim("it is fast", holds={"a": False}, own_setting=True).verdict, "refuted")
        for held in (True, False):
            apart = claims.Claim("it is fast", holds={"a": held}, apart="quantity")
            self.assertEqual((apart.verdict, apart.cells()[3]), ("not comparable", "**not comparable**: quantity"))

    def test_no_verdict_is_written_by_hand(self):
        """Every measured claim has conditions that the rows decided; a claim without one has no number either."""
        for claim in claims_of_all():
            self.assertLessEqual({type(held) for held in claim.holds.values()}, {bool, type(None)}, claim)
            self.assertEqual(claim.here == "-", not claim.holds, claim)

    def test_every_row_of_a_setting_is_a_condition(self):
        """Where the project has two models or several lengths, a verdict reads both: the worst and the best."""
        long = len(papers.of_long("ba_att"))
        count = {claim.says: len(claim.holds) for claim in claims_of_all()}
        for says, conditions in {"Half of the pairs dropped: nearly as good as dense": 1 + long, "The same on needles": 1 + long,
                                 "Tables 3, 5: nearly as good as dense": 4 + long, "Table 2: RULER 89.49 for 89.73": long + 2,
                                 "Figure 5: above the window and NSA": 12, "Figure 4: the lowest perplexity at each size, "
                                 "80M to 1.7B": 6, "6.95 times FlashAttention at 256K, 5.70 with compensation": 4}.items():
            self.assertEqual(count[says], conditions, says)

    def test_cells_of_mqar_in_which_dense_attention_fails_judge_no_kind(self):
        for claim in papers.figure5():
            for (length, width), held in zip(papers.CELLS, claim.holds.values()):
                dense = [row["accuracy"] for row in run_tables.runs("mqar", kind="dense", length=length, width=width)]
                self.assertEqual(held is None, min(dense) <= 0.9, (length, width))

    def test_kinds_of_the_hard_form_are_compared_after_equal_steps(self):
        lines = tables.COMPUTED["mqar_hard"]()[1]
        longer = [line[0] for line in lines if line[1] != f"{run_tables.EQUAL_STEPS:,}"]
        self.assertEqual(longer, ["DMA as published, for longer"])
        self.assertEqual(papers.hard_form().verdict, "not comparable")
        # Three seeds of DMA after the others' steps would decide it.
        rows = run_tables.runs("mqar_hard")
        rows += [row | {"steps": 4000} for row in rows if row["kind"] == "DMA as published" and row["steps"] == 12000]
        stored = lambda name, **values: sorted((row for row in rows if all(
            row.get(key) == value for key, value in values.items())), key=lambda row: row["seed"])
        with unittest.mock.patch.object(run_tables, "runs", stored), unittest.mock.patch.object(papers, "runs", stored):
            claim = papers.hard_form()
        self.assertEqual((claim.verdict, len(claim.holds)), ("partly", 3))

    def test_the_command_of_the_page_prints_every_verdict(self):
        script = [sys.executable, papers.__file__]
        said = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual([line.split("  ")[0].strip() for line in said], [claim.verdict for claim in claims_of_all()])
        why = subprocess.run([*script, "--why"], capture_output=True, text=True, check=True).stdout.splitlines()
        self.assertEqual(len(why), len(said) + sum(len(claim.holds) for claim in claims_of_all()))
        said = subprocess.run([*script, "--commands"], capture_output=True, text=True, check=True).stdout
        for name in {name for claim in claims_of_all() for name in papers.rows_of(claim)}:
            self.assertIn(f"{name}: {papers.command(name)}\n", said)

    def test_what_one_gpu_measures_decides_a_claim(self):
        ms = {"momo:first_dense_layers=0": (50.0, 20.0), "momo:topk=tree,first_dense_layers=0": (70.0, 40.0),
              "momo:topk=exact,first_dense_layers=0": (60.0, 30.0),
              "momo:k_trim=1024,first_dense_layers=0": (150.0, 20.0)}
        rows = [{"method": "dense", "tokens": 131072, "whole_ms": 211.0}] + [
            {"method": method, "tokens": 131072, "heads": 32, "density": 0.2, "probe_density": 0.06, "mass": 0.9, "dense_ms": 211.0,
             "whole_ms": whole, "selection_ms": select} for method, (whole, select) in ms.items()]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "topk.json")
            path.write_text(json.dumps({"device": "a card", "selectors": rows}), encoding="utf-8")
            name, rows, columns, card, lacks, _ = papers_rows.selectors(path.parent)
        self.assertEqual((name, card, len(rows), lacks), ("selectors_alone", "a card", 4, [
            "trim", "permute", "far", "million", "more"]))
        self.assertEqual({"table", *columns}, rows[0].keys())
        none = {table: rows for table, rows in tables.noted().items() if table != name}
        both = []
        for stored in (none, none | {name: ({"columns": columns}, rows)}):
            with unittest.mock.patch.object(papers, "noted", lambda: stored):
                both.append({claim.says: claim for claim in papers.momo()})
        before, after = both
        changed = {says.partition(":")[0]: claim for says, claim in after.items() if claim != before[says]}
        self.assertEqual({says: (claim.here, claim.verdict) for says, claim in changed.items()}, {
            "Table 1": ("150.0 to 50.0 ms, dense 211.0", "partly"),
            "Figure 4": ("20.0, 40.0, 30.0 ms at 131,072 tokens", "partly")})

    def test_pairs_of_an_older_program_have_the_probes_that_it_did_not_count(self):
        older = {"method": "momo:first_dense_layers=0", "tokens": 1048576, "density": 0.0159}
        for method, wanted in ((older, (7.84, 6.25)), (older | {"method": "bfla"}, (1.59, 0.0)),
                               (older | {"density": 0.0784, "probe_density": 0.0625}, (7.84, 6.25))):
            self.assertEqual(tuple(round(share, 2) for share in papers_rows.pairs(method)), wanted, method)

    def test_what_figure2_draws_decides_its_claim(self):
        with tempfile.TemporaryDirectory() as folder:
            out, tasks = pathlib.Path(folder), []
            for task, score, inside in (("copy", 0.95, 0.5), ("select", 0.4, 0.95)):
                tasks.append({"task": task, "lengths": [{"length": n, "score": score} for n in (512, 1024)]})
                layers = [{"chosen": {"in_window": share}} for share in (inside, 1.0)]
                (out / f"paper-{task}.json").write_text(json.dumps({"layers": layers}), encoding="utf-8")
                (out / f"dense-{task}.json").write_text(json.dumps({"layers": [{"chosen": None}]}), encoding="utf-8")
            for kind in ("paper", "dense"):
                (out / f"{kind}-ruler.json").write_text(json.dumps({"step": 700, "methods": [{"tasks": tasks}]}),
                                                        encoding="utf-8")
            name, rows, columns, _, lacks, _ = papers_rows.figure2(out)
        self.assertEqual(lacks, ["slope"])
        self.assertEqual([list(row.values())[1:] for row in rows if row["form"] == "dense"],
                         [["dense", "copy", "answers", 700, 95.0, 95.0, "-"], ["dense", "select", "answers", 700, 40.0, 40.0, "-"]])
        with unittest.mock.patch.object(papers, "noted", lambda: {name: ({"columns": columns}, rows)}):
            claim = papers.figure2()
        self.assertEqual((claim.here, claim.verdict), (
            "copy: 95 % answered, 50 % of the keys; select: 40 % answered, 5 % of the keys", "partly"))
        self.assertIn("700 steps", claim.differs)
        # A form that answers nothing cannot show which keys it needs.
        unlearned = [row | {"answered, % at 512": 0.0} for row in rows]
        with unittest.mock.patch.object(papers, "noted", lambda: {name: ({"columns": columns}, unlearned)}):
            self.assertEqual(papers.figure2().verdict, "not comparable")

    def test_the_race_page_is_what_its_rows_give(self):
        for path, text in race_table.files(race_table.stored()).items():
            self.assertEqual(path.read_text(encoding="utf-8"), text, "run lab/experiments/race/table.py")

    def test_a_row_of_the_race_is_shown_where_it_belongs(self):
        place = {"task": "dense", "heads": "64/4", "tokens": 32768}
        rows = [{"kind": "time", "rival": rival, "forward_ms": ms / 4, "both_ms": ms, "peak_mib": 1.0} | place
                for rival, ms in (("Sieve", 8.0), ("Another", 10.0))]
        rows += [{"kind": "refused", "rival": "Third", "of": "time", "why": "RuntimeError: no"} | place,
                 place | {"kind": "odd", "rival": "Sieve", "case": "one key", "verdict": "wrong", "tokens": 1}]
        page = race_table.page(rows)
        for line in ("| 64/4 | Sieve | 2 | 8 | 1 |  |", "|  | Another | 2.5 | 10 | 1 | 1.25 |",
                     "| dense | Third | 64/4 heads: RuntimeError: no |", "| dense | Sieve |  |  | one key wrong |",
                     "Both passes take 1.25 times as long as ours by Another. Causal attention."):
            self.assertIn(line, page.splitlines())
        self.assertIn("10 ms", race_table.picture(rows))

    def test_scripts_of_stored_commands_are_in_the_tree(self):
        """A command that a page shows is one that a reader can type."""
        scripts = re.compile(r"(?<![\w/.-])((?:lab|tests|experiments|recipes|python)/[\w/.-]+\.(?:py|sh|toml))")
        absent = {(path.name, script) for path in tables.ROWS.glob("*.jsonl")
                  for script in scripts.findall(path.read_text(encoding="utf-8"))
                  if not (ROOT / script).exists() and not script.startswith("recipes/")}
        self.assertEqual(absent, set())
        self.assertTrue(scripts.findall((tables.ROWS / "runs.jsonl").read_text(encoding="utf-8")))

    def test_files_of_rows_are_lines_of_json(self):
        for path in tables.ROWS.glob("*.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines():
                self.assertIsInstance(json.loads(line), dict, path.name)

    def test_the_folders_page_says_what_each_file_of_rows_is(self):
        page = (tables.ROWS / "README.md").read_text(encoding="utf-8")
        self.assertEqual([path.name for path in tables.ROWS.glob("*.jsonl") if path.name not in page], [])

    def test_every_entry_of_the_experiments_is_in_their_index(self):
        text = (ROOT / "lab/notes/experiments.md").read_text(encoding="utf-8")
        index, _, entries = text.partition("\n## Moved from the book")
        indexed = {line.removeprefix("- ").rstrip(".") for line in index.splitlines()}
        titles = re.findall(r"^## (\d\d-\d\d .*)$", entries, re.MULTILINE)
        self.assertGreater(len(titles), 60)
        self.assertEqual([title for title in titles if title.rstrip(".") not in indexed], [])


if __name__ == "__main__":
    unittest.main()
