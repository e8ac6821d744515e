"""Checks race.py and table.py: on lines made here, and with the program's path as an argument by a small race on a CPU
that is cut off and goes on.

    python3 lab/experiments/table4/test_race.py [SIEVE]
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest
import unittest.mock

import race
import table

SIEVE = None


def line(kind, seed, loss, **more):
    return {"size": "80m", "kind": kind, "seed": seed, "steps": 2700,
            "recipe": race.recipe_of(race.Job("80m", kind, 0, 0)), "loss": loss, "perplexity": 4.0, "bits_per_byte": 0.6, "tokens": 353894400, "parameters": 85e6,
            "tokens_per_second": {"2048": 500_000}, "validations": [[0, 11.0], [1000, 1.9], [2000, 1.7], [2700, loss]],
            "ppl": {"loss": loss}, "needles": {"512": [3, 4, 1.5]}, "needles_prose": {"512": [1, 4, 2.5]},
            "ruler": {"vt": {"512": [0.5, 2.0]}}} | more


class Tables(unittest.TestCase):
    def test_a_kind_is_apart_where_no_seed_of_it_is_within_the_seeds_above(self):
        rows = [line("mha", 0, 1.50), line("mha", 1, 1.54), line("swa", 0, 1.53), line("swa", 1, 1.60),
                line("nsa", 0, 1.61), line("nsa", 1, 1.62), line("dma_paper", 0, 1.70)]
        (kinds,) = table.races(rows).values()
        head, lines = table.losses(kinds)
        cells = [dict(zip(head, line)) for line in lines]
        self.assertEqual([line["beside the row above"] for line in cells], ["", "overlaps", "apart", "one seed"])
        self.assertEqual([line["seeds"] for line in cells], ["0, 1", "0, 1", "0, 1", "0"])
        self.assertEqual([cells[0][name] for name in head[1:4]], ["1.5200", "1.5000", "1.5400"])
        self.assertEqual([line["run to its end, step 2,000"] for line in cells], ["1.6534", "-", "-", "1.7103"])
        self.assertEqual([line["run to its end, step 3,000"] for line in cells], ["1.5592", "-", "-", "1.6080"])

    def test_other_heads_are_another_kind_and_have_no_run_to_its_end(self):
        (kinds,) = table.races([line("mha", 0, 1.5), line("mha/kv6", 0, 1.4)]).values()
        self.assertEqual([line[0] for line in table.losses(kinds)[1]], ["dense (MHA), 6 KV heads", "dense (MHA)"])
        self.assertEqual(table.losses(kinds)[1][0][-1], "-")

    def test_the_picture_has_a_band_for_each_kind_of_several_seeds(self):
        (kinds,) = table.races([line("mha", 0, 1.5), line("mha", 1, 1.54), line("nsa", 0, 1.6)]).values()
        drawn = table.picture_of_race(kinds)
        self.assertEqual((drawn.count("<polygon"), drawn.count("<polyline")), (1, 2))
        self.assertEqual(drawn.count("<circle"), 3)  # dense attention's long run after 1,000 to 3,000 steps

    def test_the_page_has_a_table_for_what_has_lines_and_none_for_what_has_not(self):
        tried = [line(kind, 0, 7.0, size="1p7b", steps=50, memory_gib=40.0, card="a card",
                      tokens_per_second={"2048": 30_000, "8192": 20_000}) for kind in ("mha", "nsa")]
        for row in tried:
            del row["ppl"]
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "table4.jsonl")
            for rows, names in (([], []), ([line("mha", 0, 1.5)], ["table4_race", "table4_scores"]),
                                (tried, ["table4_try"])):
                path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                with unittest.mock.patch.object(table, "stored", lambda stored=table.stored: stored(path)):
                    made = table.tables()
                    self.assertEqual(list(made), names)
                    for head, lines in (make() for make in made.values()):
                        self.assertTrue(lines and all(len(line) == len(head) for line in lines))


class Race(unittest.TestCase):
    def given(self, **more):
        return argparse.Namespace(**{"tries": False, "tiny": False, "set": [], "folder": pathlib.Path("/text"),
                                     "out": pathlib.Path("/out"), "sieve": SIEVE} | more)

    def test_each_kind_names_a_shipped_recipe(self):
        for kind, recipe in (("mha", "mha_80m.toml"), ("dma_paper", "dma_80m_paper.toml"), ("dma", "dma_80m.toml"),
                             ("dma_paper/kv6", "dma_80m_paper.toml"), ("infllm_v2", "infllm_v2_80m.toml")):
            self.assertEqual(race.recipe_of(race.Job("80m", kind, 0, 0)), recipe)
            if SIEVE or (race.ROOT / "recipes" / recipe).is_file():
                self.assertIn("steps", race.recipe_text(self.given(), race.Job("80m", kind, 0, 0))["training"])
        keys = race.keys_of(self.given(), race.Job("80m", "dma_paper/kv6", 1, 2700))
        self.assertIn("model.num_key_value_heads=6", keys)
        self.assertIn("training.seed=1", keys)

    def test_a_recipe_keeps_its_warm_up_unless_that_is_most_of_the_run(self):
        keys = lambda steps: [key for key in race.keys_of(self.given(), race.Job("80m", "mha", 0, steps))  # noqa: E731
                              if key.startswith("lr_scheduler")]
        self.assertEqual((keys(2700), keys(50)), ([], ["lr_scheduler.warmup_steps=10"]))

    def test_steps_are_shared_over_stages(self):
        job = race.Job("1p7b", "mha", 0, 8001)
        keys = race.keys_of(self.given(), job)
        self.assertLessEqual({"stage.1.steps=6401", "stage.2.steps=1600", "data.weights=[1.0]"}, set(keys))
        keys = race.keys_of(self.given(tries=True), job._replace(steps=50))
        self.assertLessEqual({"stage.1.steps=25", "stage.2.steps=25", "stage.1.global_batch_size=16",
                              "stage.2.global_batch_size=4"}, set(keys))

    def test_another_text_is_refused_with_the_way_to_make_it(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            with self.assertRaisesRegex(SystemExit, "no such file\n  hint: python3 lab/experiments/text/make_text.py"):
                race.make_text.checked(folder)
            (folder / "train.jsonl").write_text("{}\n", encoding="utf-8")
            with self.assertRaisesRegex(SystemExit, "its SHA-256 is ca3d163b"):
                race.make_text.checked(folder)

    def test_weights_go_back_within_what_a_call_gives_and_each_piece_once(self):
        with tempfile.TemporaryDirectory() as name:
            out = pathlib.Path(name)
            (out / "weights").mkdir()
            (out / "table4.jsonl").write_text("{}\n", encoding="utf-8")
            wanted = set()
            for model, pieces in (("80m-mha", 12), ("80m-nsa", 3), ("80m-swa", 2)):
                for number in range(pieces):
                    with open(out / f"weights/{model}.tar.xz.{number:02}", "wb") as piece:
                        piece.truncate(15 << 20)
                if model != "80m-swa":  # which is being packed
                    (out / f"weights/{model}.sha256").write_text("sums", encoding="utf-8")
                    wanted |= {f"{model}.sha256", *(f"{model}.tar.xz.{number:02}" for number in range(pieces))}
            taken = []
            for call in range(5):
                given = self.given(out=out, back=out / f"back{call}")
                race.back(given, out / "table4.jsonl")
                files = list(given.back.iterdir())
                self.assertLessEqual(len(files), 8)
                self.assertLessEqual(sum(file.stat().st_size for file in files), 64 << 20)
                taken += [file.name for file in files if file.name not in ("table4.jsonl", "logs.tar.xz")]
            self.assertEqual(sorted(taken), sorted(wanted))


class Tiny(unittest.TestCase):
    def race(self, out, *words):
        command = [sys.executable, race.__file__, "--sieve", SIEVE, "--out", out, "--tiny", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    def test_a_race_that_was_cut_off_goes_on_and_ends_as_one_that_was_not(self):
        if not SIEVE:
            self.skipTest("no program was named")
        with tempfile.TemporaryDirectory() as name:
            whole, cut = pathlib.Path(name, "whole"), pathlib.Path(name, "cut")
            code, said = self.race(whole, "--seeds", "0")
            self.assertEqual(code, 0, said)
            rows = {row["kind"]: row for row in table.stored(whole / "table4.jsonl")}
            self.assertEqual(list(rows), race.KINDS)
            for row in rows.values():
                self.assertTrue(row["loss"] < row["validations"][0][1], row)
                self.assertLessEqual({"ppl", "needles", "needles_prose", "ruler", "commit", "card", "date"}, row.keys())
                self.assertEqual(row["command"].split()[:3], ["sieve", "train", "--recipe"])
                name = f"80m-{row['kind']}-0-{row['steps']}"
                sums = (whole / "weights" / f"{name}.sha256").read_text(encoding="utf-8")
                self.assertIn(f"{name}.tar.xz.00", sums)
            # Nothing that has a line is done again.
            code, said = self.race(whole, "--seeds", "0", "--seconds", "0")
            self.assertEqual((code, "5 of 5 runs" in said), (0, True), said)
            only = ("--seeds", "0", "--kinds", "dma_paper", "--steps", "60")
            code, said = self.race(whole, *only)
            self.assertEqual(code, 0, said)
            (wanted,) = (row for row in table.stored(whole / "table4.jsonl") if row["steps"] == 60)
            # Calls become longer by less than the training takes, so that one of them ends amid its steps.
            seconds, code = 1.0, 1
            while code and seconds < 30:
                code, said = self.race(cut, *only, "--seconds", str(seconds))
                seconds += 0.5
            self.assertEqual(code, 0, said)
            log = next((cut / "runs").glob("*.log")).read_text(encoding="utf-8")
            self.assertIn("stopped at the deadline", log)
            self.assertRegex(log, "resum")
            (row,) = table.stored(cut / "table4.jsonl")
            same = ("loss", "perplexity", "validations", "ppl", "needles", "ruler", "parameters", "tokens")
            self.assertEqual({key: row[key] for key in same}, {key: wanted[key] for key in same})


if __name__ == "__main__":
    SIEVE = sys.argv.pop(1) if len(sys.argv) > 1 and not sys.argv[1].startswith("-") else None
    unittest.main()
