"""Asks `sieve serve` with several clients at once: clients.py ADDRESS EXPORT PROMPT NEW OUT.json CLIENTS…

Each client sends one request of PROMPT token ids and reads NEW greedy tokens. Prints tokens a second of all together.
"""

import http.client
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from prompts import prompts, write


def ask(address, prompt, new):
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


address, export, prompt, new, out = sys.argv[1:6]
counts = [int(count) for count in sys.argv[6:]]
MODEL = name(address)
asked = prompts(export, max(counts), int(prompt))
# The first requests compile kernels and capture graphs.
ask(address, asked[0], int(new))
rates, texts = {}, []
for count in counts:
    with ThreadPoolExecutor(count) as pool:
        begun = time.monotonic()
        answers = list(pool.map(lambda prompt: ask(address, prompt, int(new)), asked[:count]))
        seconds = time.monotonic() - begun
    rates[count] = sum(tokens for _, tokens in answers) / seconds
    texts = [text for text, _ in answers]
    print(f"sieve serve, {count} clients: {rates[count]:.1f} tokens a second", flush=True)
write(out, "sieve", rates, texts)
