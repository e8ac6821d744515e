"""Asks `sieve serve` with several clients at once:

    clients.py ADDRESS EXPORT PROMPT "NEW…" OUT.json "CLIENTS…"

Each client sends one request of PROMPT token ids and reads NEW greedy tokens, a number for each of CLIENTS. Prints
tokens a second of all together.
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from prompts import pairs, prompts, write


def ask(address, prompt, new):
    """The greedy text behind a prompt of token ids and its number of tokens, `new` at most."""
    connection = http.client.HTTPConnection(address, timeout=600)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": new, "temperature": 0}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = json.loads(connection.getresponse().read())
    if "choices" not in answer:
        raise SystemExit(f"the server says {answer}")
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"]


def name(address):
    connection = http.client.HTTPConnection(address, timeout=600)
    connection.request("GET", "/v1/models")
    return json.loads(connection.getresponse().read())["data"][0]["id"]


if len(sys.argv) != 7:
    sys.exit(__doc__)
address, export, prompt, new, out, clients = sys.argv[1:]
counts = pairs(clients, new)
MODEL = name(address)
asked = prompts(export, counts[-1][0], int(prompt))
# The first requests compile kernels and capture graphs.
ask(address, asked[0], counts[0][1])
rates, texts = {}, {}
for count, tokens in counts:
    with ThreadPoolExecutor(count) as pool:
        begun = time.monotonic()
        answers = list(pool.map(lambda prompt: ask(address, prompt, tokens), asked[:count]))
        seconds = time.monotonic() - begun
    rates[count] = [tokens, sum(got for _, got in answers) / seconds]
    texts[count] = [text for text, _ in answers]
    print(f"sieve serve, {count} clients, {tokens} tokens each: {rates[count][1]:.1f} tokens a second", flush=True)
    write(out, "sieve", rates, texts)
