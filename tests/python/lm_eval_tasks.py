"""lm-evaluation-harness on local files, for comparison with `sieve eval tasks`.

    lm_eval_tasks.py rows DIR                 made-up rows: DIR/TASK.jsonl, and DIR/TASK.train.jsonl for examples
    lm_eval_tasks.py score K MODEL DIR OUT …  the harness on DIR with K examples a question, OUT a JSON file; prints seconds
    lm_eval_tasks.py compare OUT REPORT SAMPLES    what `sieve eval tasks --json --samples` wrote beside OUT
    lm_eval_tasks.py chats OUT                the texts that the harness asks with --apply_chat_template, of a few rows

The tasks are the harness's own YAML files: only the data set is replaced by the local files, the default sampler of examples
by its `first_n`, and the number of generated tokens by GENERATED.
"""
import functools
import json
import math
import os
import random
import sys
import time
from pathlib import Path

YAML = {
    "lambada_openai": "lambada/lambada_openai.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "arc_easy": "arc/arc_easy.yaml",
    "arc_challenge": "arc/arc_challenge.yaml",
    "winogrande": "winogrande/default.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "sciq": "sciq/sciq.yaml",
    "mmlu": "mmlu/default/mmlu_abstract_algebra.yaml",
    "triviaqa": "triviaqa/default.yaml",
    "gsm8k": "gsm8k/gsm8k.yaml",
    "longbench2": "longbench2/academic_single.yaml",
}
GENERATED = 256
SCORES = ["acc", "acc_norm", "perplexity", "exact_match"]
NUM_ROWS = {"triviaqa": 40, "gsm8k": 20, "longbench2": 40}
WORDS = """the a fox dog sees runs over under tree river stone quick lazy Ann Eve water boils when heat is high low north
magnet pulls iron plant needs light and air because it grows slowly in winter naïve café Zürich 北京 42 7 3.5 (or) "so" it's""".split()


class Rows:
    """Draws the rows of each task, in the columns of its data set."""

    def __init__(self, task):
        self.random = random.Random(f"sieve {task}")

    def words(self, least, most):
        return " ".join(self.random.choices(WORDS, k=self.random.randint(least, most)))

    def sentence(self):
        return self.words(4, 14).capitalize() + "."

    def lettered(self, numbers_too):
        num = self.random.choice([3, 4, 4, 4, 5])
        labels = list("12345" if numbers_too and self.random.random() < 0.2 else "ABCDE")[:num]
        choices = {"text": [self.words(1, 6) for _ in labels], "label": labels}
        return choices, self.random.choice(labels)

    def lambada_openai(self):
        return {"text": self.sentence() + " " + self.words(5, 30)}

    def ending(self, mark):
        return " " + self.words(2, 10) + mark() + self.random.choice([".", " " + self.sentence()])

    def hellaswag(self):
        marks = ["", " [title]", " [step]", "  ", " [header] How to"]
        mark = lambda: self.random.choice(marks)
        return {
            "activity_label": self.words(1, 3),
            "ctx_a": self.sentence() + mark() + " " + self.words(2, 8),
            "ctx_b": self.random.choice(["", self.words(1, 4)]),
            "endings": [self.ending(mark) for _ in range(4)],
            "label": str(self.random.randrange(4)),
        }

    def piqa(self):
        goal, sol1, sol2 = self.words(3, 12), self.words(2, 12), self.words(2, 12)
        return {"goal": goal, "sol1": sol1, "sol2": sol2, "label": self.random.randrange(2)}

    def arc_easy(self):
        choices, answer = self.lettered(True)
        question = self.sentence() + " " + self.words(3, 9) + "?"
        return {"id": "x", "question": question, "choices": choices, "answerKey": answer}

    arc_challenge = arc_easy

    def winogrande(self):
        first, second = self.random.sample(["Ann", "Eve", "the fox", "the dog"], 2)
        sentence = f"{self.words(2, 8)} {first} {self.words(1, 4)} {second} {self.words(1, 4)} _ {self.words(1, 6)}."
        return {"sentence": sentence, "option1": first, "option2": second, "answer": self.random.choice("12")}

    def boolq(self):
        passage = " ".join(self.sentence() for _ in range(self.random.randint(1, 5)))
        return {"question": self.words(4, 9), "passage": passage, "idx": 0, "label": self.random.randrange(2)}

    def openbookqa(self):
        choices, answer = self.lettered(False)
        # Some answers of the published rows begin with a space.
        stem, answer = self.words(3, 12), self.random.choice(["", " "]) + answer
        return {"id": "x", "question_stem": stem, "choices": choices, "answerKey": answer}

    def sciq(self):
        row = {name: self.words(1, 4) for name in ["distractor1", "distractor2", "distractor3", "correct_answer"]}
        support = self.random.choice(["", " " + self.sentence(), self.sentence() + " " + self.sentence()])
        return {"question": self.sentence(), **row, "support": support}

    def mmlu(self):
        choices = [self.words(1, 5) for _ in range(4)]
        question = self.sentence() + self.random.choice(["", "\n", " "])
        return {"question": question, "subject": "abstract_algebra", "choices": choices, "answer": self.random.randrange(4)}

    def longbench2(self):
        choices = [self.words(1, 5) for _ in range(4)]
        context, question = "\n".join(self.sentence() for _ in range(3)), self.sentence() + self.random.choice(["", " "])
        return {"context": context, "question": question, "choices": choices, "answer": self.random.randrange(4)}

    def triviaqa(self):
        aliases = [self.words(1, 3) for _ in range(3)]
        return {"question": self.words(4, 9), "question_id": "x", "answer": {"aliases": aliases, "value": aliases[0]}}

    def gsm8k(self):
        return {"question": self.sentence(), "answer": f"{self.sentence()} <<2*3=6>>6\n#### {self.random.randrange(5000):,}"}


def write_rows(folder):
    os.makedirs(folder, exist_ok=True)
    for task in YAML:
        rows = Rows(task)
        for name, num in [(task, NUM_ROWS.get(task, 200)), (task + ".train", 8)]:
            lines = [json.dumps(getattr(rows, task)(), ensure_ascii=False) + "\n" for _ in range(num)]
            Path(folder, name + ".jsonl").write_text("".join(lines), encoding="utf-8")


def config(task, folder, fewshot):
    """The harness's own task, with the local files in place of its data set."""
    import lm_eval
    from lm_eval.tasks import _yaml_loader

    path = Path(lm_eval.__file__).parent / "tasks" / YAML[task]
    settings = dict(_yaml_loader.load_yaml(path, resolve_func=True))
    for key in ("include", "tag", "group", "training_split"):
        settings.pop(key, None)
    split = settings.get("test_split") or settings["validation_split"]
    files = {split: str(Path(folder, task + ".jsonl").resolve())}
    examples = Path(folder, task + ".train.jsonl").resolve()
    if examples.exists() and split != "train":
        files["train"] = str(examples)
        settings["training_split"] = settings["fewshot_split"] = "train"
    if settings.get("validation_split") != split:
        settings.pop("validation_split", None)
    settings.update(
        task="local_" + task,
        dataset_path="json",
        dataset_name=None,
        dataset_kwargs={"data_files": files},
        fewshot_config={"sampler": "first_n"},
        num_fewshot=fewshot,
    )
    if "generation_kwargs" in settings:
        settings["generation_kwargs"] = {**settings["generation_kwargs"], "max_gen_toks": GENERATED}
    return settings


@functools.cache
def loaded(task, folder, fewshot):
    """A task of the harness with its rows, for `lm_eval.evaluate`."""
    from lm_eval.tasks import TaskManager

    # The harness's own manager parses all of its 13,000 YAML files: 16 seconds of a processor for each task and model.
    return TaskManager(include_defaults=False).load([config(task, folder, fewshot)])


def score(model, folder, out, fewshot):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tasks = [task for task in YAML if Path(folder, task + ".jsonl").exists()]
    # Of Qwen2 the automatic choice takes Qwen2's own tokenizer, whatever tokenizer_config.json says.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    harness = HFLM(pretrained=model, tokenizer=tokenizer, device="cpu", dtype="float32", batch_size=8, trust_remote_code=True)
    report = {}
    for task in tasks:
        started = time.perf_counter(), time.process_time()
        results = lm_eval.evaluate(harness, loaded(task, folder, fewshot), log_samples=True, bootstrap_iters=0)
        print(f"{task:<16}{time.perf_counter() - started[0]:>8.1f} s, {time.process_time() - started[1]:.1f} s of processors")
        values_of = results["results"]["local_" + task]
        scores = {name.split(",")[0]: value for name, value in values_of.items() if "stderr" not in name and isinstance(value, float)}
        samples = {}
        for sample in results["samples"]["local_" + task]:
            first = sample["resps"][0][0]
            if isinstance(first, str):
                samples[sample["doc_id"]] = first
            else:
                samples[sample["doc_id"]] = [[float(resp[0][0]), bool(resp[0][1])] for resp in sample["resps"]]
        if "exact_match,strict-match" in values_of:
            scores["exact_match"] = values_of["exact_match,strict-match"]
        scores = {name: scores[name] for name in SCORES if name in scores}
        report[task] = {"scores": scores, "rows": [samples[n] for n in sorted(samples)]}
    Path(out).write_text(json.dumps(report))


def compare(out, report, samples):
    """A line a task; fails where a score or a text differs, or a log-likelihood by more than 1e-4 of its size."""
    expected = json.loads(Path(out).read_text())
    tasks_by_name = {task["task"]: task for task in json.loads(Path(report).read_text().splitlines()[-1])["tasks"]}
    lines = [json.loads(line) for line in Path(samples).read_text().splitlines()]
    failed = []
    for task, theirs in expected.items():
        rows = [line for line in lines if line["task"] == task]
        assert len(rows) == len(theirs["rows"]), task
        worst, differing = 0.0, 0
        for row, wanted in zip(rows, theirs["rows"]):
            if isinstance(wanted, str):
                differing += row["answer"] != wanted
                continue
            assert len(row["likelihoods"]) == len(wanted), (task, row)
            for ours, (log_likelihood, is_greedy) in zip(row["likelihoods"], wanted):
                worst = max(worst, abs(ours["log_likelihood"] - log_likelihood) / max(1.0, abs(log_likelihood)))
                differing += ours.get("is_greedy", is_greedy) != is_greedy
        values = {score["name"]: score["value"] for score in tasks_by_name[task]["scores"]}
        for name, value in theirs["scores"].items():
            # Accuracies are counts; a perplexity carries the rounding of its sums.
            limit = 1e-4 * value if name == "perplexity" else 1e-9
            if not abs(values[name] - value) <= limit or math.isnan(value):
                failed.append(f"{task} {name}: {values[name]} and {value}")
        if differing or worst > 1e-4:
            failed.append(f"{task}: {differing} rows differ, a log-likelihood by {worst:.1e}")
        scores = ", ".join(f"{name} {value:.4f}" for name, value in theirs["scores"].items())
        print(f"{task:<16}{len(rows):>5} rows  {scores}; largest relative difference {worst:.1e}, {differing} differ")
    assert not failed, "\n".join(failed)


# ChatML, and a template that refuses a system message, as Gemma's does.
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATES = {
    "chatml": CHATML,
    "no_system": "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML,
}
CHAT_TASKS = ["lambada_openai", "hellaswag", "piqa", "arc_easy", "winogrande", "boolq", "mmlu", "triviaqa", "gsm8k"]
CHAT_ROWS = 3


def chats(out):
    """For each task, template, system message and number of examples: rows, and (context, continuation) of each request."""
    import tempfile
    from types import SimpleNamespace

    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    golden = Path(__file__).parent.parent / "golden"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(golden / "llama_tokenizer.json"))
    model = SimpleNamespace(tokenizer=tokenizer, chat_template_args={})
    render = lambda *args, **kwargs: HFLM.apply_chat_template(model, *args, **kwargs)
    cases, tables = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for task in CHAT_TASKS:
            rows = Rows(task)
            tables[task] = [[getattr(rows, task)() for _ in range(num)] for num in (CHAT_ROWS, 2)]
            for name, table in zip([task, task + ".train"], tables[task]):
                lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in table]
                Path(folder, name + ".jsonl").write_text("".join(lines), encoding="utf-8")
            for template, text in TEMPLATES.items():
                tokenizer.chat_template = text
                for system in (None, "Be brief."):
                    for fewshot in (0, 2):
                        made = ConfigurableTask(config=config(task, folder, fewshot))
                        made.build_all_requests(
                            system_instruction=system,
                            apply_chat_template=True,
                            fewshot_as_multiturn=True,
                            chat_template=render,
                            tokenizer_name=template,
                        )
                        # A generation has its settings in place of a continuation.
                        requests = [[r.args[0], r.args[1] if isinstance(r.args[1], str) else None] for r in made.instances]
                        case = {"task": task, "template": template, "system": system, "fewshot": fewshot}
                        cases.append({**case, "requests": requests})
    tables = {task: {"rows": rows, "examples": examples} for task, (rows, examples) in tables.items()}
    Path(out).write_text(json.dumps({"tables": tables, "cases": cases}, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["chats", out]:
            chats(out)
        case ["rows", folder]:
            write_rows(folder)
        case ["score", fewshot, *models] if len(models) % 3 == 0:
            for number in range(0, len(models), 3):
                print(models[number], flush=True)
                score(*models[number : number + 3], int(fewshot))
        case ["compare", out, report, samples]:
            compare(out, report, samples)
        case _:
            sys.exit(__doc__)
