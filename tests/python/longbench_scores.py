"""LongBench's scores of made-up texts, by lm-evaluation-harness's longbench/metrics.py: tests/golden/longbench_scores.json.

    pip install lm_eval==0.4.13 rouge==1.0.1 fuzzywuzzy jieba
    python longbench_scores.py OUT

fuzzywuzzy must be without python-Levenshtein, whose ratio is another one.
"""
import json
import random
import sys

from lm_eval.tasks.longbench import metrics

WORDS = "the a an of cat dog sat on mat red blue river it's U.S. 12 3 7 Paragraph naïve 北京 The, an. x_y (and) – fox".split()
CLASSES = ["Number of something", "Number", "Person", "Group of person", "Other location", "City", "person"]
CODE = ["    return x + 1", "for (int i = 0; i < n; i++) {", "# a comment", "let y = foo(a, b);", "```python", "", "// note", "self.len()"]


def main(out):
    draw = random.Random("longbench")
    words = lambda least, most: " ".join(draw.choices(WORDS, k=draw.randint(least, most)))
    cases = []

    def add(score, text, answers, classes=()):
        doc = {"answers": answers, "all_classes": list(classes)}
        function = {
            "qa_f1": metrics.get_qa_f1_score,
            "rouge_l": metrics.get_rouge_score,
            "classification": metrics.get_classification_score,
            "retrieval": metrics.get_retrieval_score,
            "count": metrics.get_count_score,
            "code_similarity": metrics.get_code_sim_score,
        }[score]
        (value,) = function(doc, [text]).values()
        cases.append({"score": score, "text": text, "answers": answers, "classes": list(classes), "value": float(value)})

    for n in range(60):
        add("qa_f1", words(0, 9), [words(1, 6) for _ in range(1 + n % 3)])
        text = ". ".join(words(0, 9) for _ in range(n % 5)) + draw.choice(["", ".", " . .", "\n\n"])
        add("rouge_l", text, [". ".join(words(1, 9) for _ in range(1 + n % 4))])
        named = draw.sample(CLASSES, draw.randint(0, 4))
        add("classification", ", ".join(named), [draw.choice(CLASSES)], CLASSES)
        numbers = [str(draw.randint(1, 4)) for _ in range(draw.randint(0, 4))]
        add("retrieval", "Paragraph " + ", ".join(numbers), [f"Paragraph {draw.randint(1, 4)}"])
        add("count", " and ".join(numbers), [str(draw.randint(1, 4))])
        lines = draw.choices(CODE, k=draw.randint(0, 4))
        add("code_similarity", "\n".join(lines), [draw.choice(CODE[:2] + CODE[3:4]) + draw.choice(["", ";", " x"])])
    for _ in range(6):
        # Long enough for difflib's popular characters.
        long = lambda: "".join(draw.choices("abcdefgh ", k=draw.randint(180, 320)))
        add("code_similarity", long(), [long()])
    with open(out, "w", encoding="utf-8") as file:
        json.dump(cases, file, ensure_ascii=False, indent=0)
        file.write("\n")


if len(sys.argv) != 2:
    sys.exit(__doc__)
main(sys.argv[1])
