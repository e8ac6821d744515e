"""Clients of `sieve serve`: OpenAI's package, lm-evaluation-harness, and many clients at once.

usage: serve_clients.py SIEVE CHECKPOINT [new tokens, 64]

Needs `pip install openai lm_eval[api]`. Prints what each client got beside what `sieve generate` and `sieve eval tasks`
give, and tokens a second with 1, 16 and 64 clients beside one batch of `sieve generate`. CHECKPOINT is a run or an
export with a tokenizer.json. The settings of lm-evaluation-harness are those of the command in docs/serving.md; they are
also tried on an export of CHECKPOINT whose tokenizer puts a token before each text.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROMPTS = ["fn main", "The ", "use std::", "# A page\n\nIt begins with", "for x in", "let mut"]
ENDINGS = [" text of the page", "() {"]


def start(sieve, checkpoint):
    """Starts a server on a free port. Returns the process and the address."""
    command = [sieve, "serve", "--checkpoint", checkpoint, "--name", "served", "--port", "0", "--device", "cpu"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    for line in server.stdout:
        if "/v1:" in line:
            return server, line.split("http://")[1].split("/v1")[0]
    raise SystemExit("the server ended")


def generated(sieve, checkpoint, prompts, tokens, samples=1):
    """What `sieve generate` writes after prompts, and seconds that the texts took, their prompts included."""
    command = [sieve, "generate", "--checkpoint", checkpoint, "--device", "cpu", "--json", "--temperature", "0"]
    command += ["--max-new-tokens", str(tokens), "--samples", str(samples)]
    for prompt in prompts:
        command += ["--prompt", prompt]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def check_openai(client, sieve, checkpoint, tokens):
    """Whole answers, streams, errors of OpenAI's client."""
    import openai

    same = 0
    for prompt in PROMPTS:
        own = generated(sieve, checkpoint, [prompt], tokens)[0]["text"]
        ask = dict(model="served", prompt=prompt, max_tokens=tokens, temperature=0)
        whole = client.completions.create(**ask)
        stream = "".join(chunk.choices[0].text for chunk in client.completions.create(**ask, stream=True))
        same += whole.choices[0].text == own == stream
    assert [model.id for model in client.models.list()] == ["served"]
    for error, ask in [(openai.NotFoundError, {"model": "gpt"}), (openai.BadRequestError, {"max_tokens": 10**6})]:
        try:
            client.completions.create(**{"model": "served", "prompt": "x", **ask})
            raise SystemExit(f"no {error.__name__}")
        except error:
            pass
    print(f"openai: {same} of {len(PROMPTS)} texts are those of generate, whole and as a stream")
    assert same == len(PROMPTS)


def page_arguments():
    """The `--model_args` of the command in docs/serving.md, without its addresses and names."""
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    arguments = re.search(r"lm_eval --model local-completions.*--model_args[\s\\]+(\S+)", page).group(1)
    pairs = dict(pair.split("=", 1) for pair in arguments.split(","))
    values = {"True": True, "False": False}
    named = ["model", "base_url", "tokenizer"]
    return {key: int(value) if value.isdigit() else values.get(value, value) for key, value in pairs.items() if key not in named}


def with_first_token(sieve, checkpoint, folder):
    """An export of a checkpoint whose tokenizer puts the end token before each text, as Llama's puts its `<s>`."""
    if (Path(checkpoint) / "config.json").is_file():
        shutil.copytree(checkpoint, folder)
    else:
        subprocess.run([sieve, "export", "--checkpoint", checkpoint, "--out", folder], check=True, capture_output=True)
    path = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    first = next(token for token in tokenizer["added_tokens"] if token["content"] == "<|endoftext|>")
    name, id = first["content"], first["id"]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, text],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [id], "tokens": [name]}},
    }
    path.write_text(json.dumps(tokenizer))


def check_harness(address, sieve, checkpoint, tokenizer):
    """Likelihoods by lm-evaluation-harness's client beside those of `sieve eval tasks`."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(
        model="served",
        base_url=f"http://{address}/v1/completions",
        tokenizer=tokenizer,
        tokenizer_backend="huggingface",
        max_length=128,
        **page_arguments(),
    )
    pairs = [(prompt, ending) for prompt in PROMPTS for ending in ENDINGS]
    asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
    likelihoods = model.loglikelihood(asked)
    with tempfile.TemporaryDirectory() as folder:
        task, rows, samples = (os.path.join(folder, name) for name in ["mine.toml", "rows.jsonl", "samples.jsonl"])
        with open(task, "w") as file:
            file.write('measure = "choices"\nprompt = "{q}"\nchoices = "c"\nlabel = "{a}"\ndelimiter = ""\n')
        with open(rows, "w") as file:
            file.writelines(json.dumps({"q": prompt, "c": ENDINGS, "a": 0}) + "\n" for prompt in PROMPTS)
        command = [sieve, "eval", "tasks", "--checkpoint", checkpoint, "--device", "cpu", "--samples", samples]
        subprocess.run(command + ["--data", f"{task}={rows}"], check=True, capture_output=True)
        with open(samples) as file:
            own = [answer["log_likelihood"] for line in file for answer in json.loads(line)["likelihoods"]]
    worst = max(abs(harness[0] - other) / max(1, abs(other)) for harness, other in zip(likelihoods, own, strict=True))
    print(f"lm_eval: {len(likelihoods)} likelihoods, largest difference from eval tasks {worst:.1e}")
    assert worst < 1e-5


def speed(client, sieve, checkpoint, tokens):
    """Tokens a second of all clients together."""
    def ask(n):
        prompt = PROMPTS[n % len(PROMPTS)]
        answer = client.completions.create(model="served", prompt=prompt, max_tokens=tokens, temperature=0)
        return answer.usage.completion_tokens

    for clients in [1, 16, 64]:
        with ThreadPoolExecutor(clients) as pool:
            begun = time.monotonic()
            total = sum(pool.map(ask, range(max(clients, 4))))
            seconds = time.monotonic() - begun
        print(f"{clients} clients: {total / seconds:.1f} tokens a second")
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(64)]
    texts = generated(sieve, checkpoint, prompts, tokens)
    total = sum(text["new_tokens"] for text in texts)
    seconds = max(text["prompt_seconds"] + text["new_tokens"] / text["tokens_per_second"] for text in texts)
    print(f"generate, 64 texts in one batch: {total / seconds:.1f} tokens a second")


def main():
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    sieve, checkpoint = sys.argv[1:3]
    tokens = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    import openai

    server, address = start(sieve, checkpoint)
    try:
        client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=600)
        check_openai(client, sieve, checkpoint, tokens)
        check_harness(address, sieve, checkpoint, checkpoint)
        speed(client, sieve, checkpoint, tokens)
    finally:
        server.terminate()
    assert server.wait() == 0
    folder = tempfile.mkdtemp()
    server = None
    try:
        exported = os.path.join(folder, "exported")
        with_first_token(sieve, checkpoint, exported)
        server, address = start(sieve, exported)
        print("with a tokenizer that puts a token before each text:")
        check_harness(address, sieve, exported, exported)
    finally:
        if server:
            server.terminate()
            server.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
