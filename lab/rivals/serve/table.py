"""The numbers of several programs side by side: table.py FILE.json… A dash is what a program did not come to."""

import argparse
import json
import pathlib

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.json", help="what clients.py or a rival wrote")
found = {path.stem: json.loads(path.read_text()) for path in parser.parse_args().files}
rows = {}
for name, one in found.items():
    for count, (tokens, rate) in one["rates"].items():
        rows.setdefault((int(count), tokens), {})[name] = rate
print(f"{'clients':>8}{'tokens each':>12}" + "".join(f"{name:>16}" for name in found))
for (count, tokens), rates in sorted(rows.items()):
    cells = [f"{rates[name]:.1f}" if name in rates else "-" for name in found]
    print(f"{count:>8}{tokens:>12}" + "".join(f"{cell:>16}" for cell in cells))
own = found.get("sieve", {}).get("texts", {})
for name, one in found.items():
    for count in one["texts"] if name != "sieve" else []:
        if count in own:
            same = sum(a == b for a, b in zip(own[count], one["texts"][count]))
            print(f"{name}: {same} of {len(own[count])} greedy texts of {count} clients are those of sieve")
