"""What a structure of the answer costs `sieve serve`: tokens a second with and without one.

    serve_structures.py SIEVE CHECKPOINT [--clients 1 8] [--tokens 128] [--device cpu] [more flags of serve]

Starts the server, and prints a line of JSON for the seconds of the first answers of one token, without and with a
structure, the first of which makes the trie of all tokens; then one for each number of clients and each sampling: tokens
a second of all clients together, for free text, any JSON object, and a schema of long strings. Then the longest pause in a
free stream alone, and beside seven answers with the schema.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

from serve_waits import parser_of, pauses, run

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "story": {"type": "string", "minLength": 2000},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
    },
    "required": ["name", "story", "born"],
    "additionalProperties": False,
}
FORMATS = {
    "free": {},
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
}
PROMPT = "A long life of a sailor, as JSON:\n"
SAMPLINGS = {"greedy": {"temperature": 0}, "default": {"temperature": 1}}


def body(words, **more):
    return {"prompt": PROMPT, "max_tokens": words.tokens, **more}


def rate(server, words, clients, format, sampling):
    """Tokens a second of all clients together."""
    with ThreadPoolExecutor(clients) as pool:
        begun = time.monotonic()
        asks = [body(words, seed=seed, **FORMATS[format], **SAMPLINGS[sampling]) for seed in range(clients)]
        answers = list(pool.map(server.ask, asks))
        seconds = time.monotonic() - begun
    return round(sum(answer["usage"]["completion_tokens"] for answer, _ in answers) / seconds, 1)


def measure(server, words):
    """Prints one JSON object a measure: seconds of the first requests, tokens a second by clients, sampling and structure,
    and the pauses of a stream alone and beside seven others."""
    firsts = [server.ask({**body(words), "max_tokens": 1, **FORMATS[name]})[1] for name in ["free", "free", *FORMATS]]
    names = ["first", "second", "third", "first_object", "first_schema"]
    print(json.dumps({name: round(seconds, 3) for name, seconds in zip(names, firsts)}), flush=True)
    for clients in words.clients:
        for sampling in SAMPLINGS:
            rates = {format: rate(server, words, clients, format, sampling) for format in FORMATS}
            print(json.dumps({"clients": clients, "sampling": sampling, **rates}), flush=True)
    stream = body(words, temperature=0)
    with ThreadPoolExecutor(7) as pool:
        alone = pauses(server.stream(stream))
        beside = {}
        for format in ["free", "json_schema"]:
            others = [pool.submit(server.ask, body(words, seed=seed, **FORMATS[format])) for seed in range(7)]
            beside[format] = pauses(server.stream(stream))
            [other.result() for other in others]
    print(json.dumps({"stream_alone": alone, "stream_beside": beside}), flush=True)


def main():
    """Measures a server."""
    words = parser_of(__doc__)
    words.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    words.add_argument("--tokens", type=int, default=128)
    run(words, measure)


if __name__ == "__main__":
    main()
