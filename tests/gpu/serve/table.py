"""The numbers of several programs side by side: table.py FILE.json…"""

import json
import pathlib
import sys

found = {pathlib.Path(path).stem: json.loads(pathlib.Path(path).read_text()) for path in sys.argv[1:]}
counts = next(iter(found.values()))["rates"].keys()
print(f"{'clients':>8}" + "".join(f"{name:>16}" for name in found))
for count in counts:
    print(f"{count:>8}" + "".join(f"{one['rates'][count]:>16.1f}" for one in found.values()))
own = found.get("sieve", {}).get("texts", [])
for name, one in found.items():
    if name != "sieve" and own:
        same = sum(a == b for a, b in zip(own, one["texts"]))
        print(f"{name}: {same} of {len(own)} greedy texts are those of sieve")
