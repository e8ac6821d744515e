"""Windows of lm-evaluation-harness's rolling likelihood: tests/golden/rolling_windows.json.

    pip install lm_eval==0.4.13
    python rolling_windows.py OUT

Token 0 is the prefix, tokens 1, 2, … are the text. Each window is what `loglikelihood_rolling` gives to the model: the
context, then the tokens that are predicted.
"""
import json
import sys

from lm_eval.utils import get_rolling_token_windows, make_disjoint_window


def windows(num_tokens, context):
    tokens = list(range(1, num_tokens + 1))
    rolling = get_rolling_token_windows(tokens, prefix_token=0, max_seq_len=context, context_len=1)
    return [make_disjoint_window(window) for window in rolling]


def main(out):
    sizes = [(tokens, context) for context in (1, 2, 3, 7, 8) for tokens in (0, 1, 2, 3, 6, 7, 8, 9, 14, 15, 16, 17, 23)]
    cases = [{"num_tokens": tokens, "context": context, "windows": windows(tokens, context)} for tokens, context in sizes]
    with open(out, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
    sys.exit(__doc__)
main(sys.argv[1])
