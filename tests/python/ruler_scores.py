"""RULER's scores of answers, by lm-evaluation-harness's ruler/common_utils.py: tests/golden/ruler_scores.json.

    pip install lm_eval==0.4.13 transformers
    sieve eval ruler … --samples-file SAMPLES
    python ruler_scores.py SAMPLES OUT

Of each sample: the model's own answer, whose score must be Sieve's, and three made-up ones. Where a question has several
answers, RULER counts the best of them (scripts/eval/synthetic/constants.py) and the harness their share; here the harness
is asked with each answer alone, and the best counts.
"""
import collections
import json
import random
import sys

from lm_eval.tasks.ruler.common_utils import process_results, process_results_part

QUESTIONS = ("qa_1", "qa_2")


def score(task, references, text):
    if task not in QUESTIONS:
        return process_results({"max_length": 4096, "outputs": references}, [text])["4096"]
    shares = [process_results_part({"max_length": 4096, "outputs": [reference]}, [text])["4096"]
              for reference in references]
    share = process_results_part({"max_length": 4096, "outputs": references}, [text])["4096"]
    assert abs(share - sum(shares) / len(shares)) < 1e-12
    return max(shares)


def made_up(draw, references):
    """Some references among other words, in another case, cut, or with control characters around them."""
    pieces = []
    for reference in draw.sample(references, draw.randint(0, len(references))):
        change = draw.choice([str, str, str.upper, str.title, lambda text: text[:-1], lambda text: text + text])
        pieces += [change(reference), draw.choice([", ", "\n", "\t", "\x00", " and the ", ""])]
    return draw.choice(["", " ", "\n\n", "Answer: "]) + "".join(pieces) + draw.choice(["", ".", "\x1b", " ."])


def main(samples, out):
    draw, cases, equal = random.Random("ruler"), [], collections.Counter()
    for line in open(samples, encoding="utf-8"):
        sample = json.loads(line)
        task, references = sample["task"], sample["references"]
        if abs(score(task, references, sample["answer"]) - sample["score"]) > 1e-12:
            sys.exit(f"{sample} has another score than the harness's")
        equal[task] += 1
        for text in [sample["answer"]] + [made_up(draw, references) for _ in range(3)]:
            value = score(task, references, text)
            cases.append({"task": task, "text": text, "references": references, "value": value})
    with open(out, "w", encoding="utf-8") as file:
        json.dump(cases, file, ensure_ascii=True, indent=0)
        file.write("\n")
    between = sum(0 < case["value"] < 1 for case in cases)
    print(f"{sum(equal.values())} samples of {len(equal)} tasks have equal scores; {len(cases)} cases, "
          f"{sum(case['value'] == 1 for case in cases)} of them 1, {between} between 0 and 1")


if len(sys.argv) != 3:
    sys.exit(__doc__)
main(*sys.argv[1:])
