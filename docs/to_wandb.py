"""Sends a run's metrics.jsonl to Weights & Biases: python3 docs/to_wandb.py RUN_FOLDER PROJECT

WANDB_MODE=offline writes files alone. The run's id is made of its first line, which stays when a run is resumed or
extended: a second call continues that run, and sends no step again. Needs Python 3.11 and `pip install wandb`.
"""
import hashlib
import json
import pathlib
import sys
import tomllib

import wandb

folder, project = pathlib.Path(sys.argv[1]), sys.argv[2]
lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
if not lines:
    sys.exit(f"{folder}/metrics.jsonl holds nothing yet")
recipe = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
run_id = hashlib.sha256(lines[0].encode()).hexdigest()[:16]
run = wandb.init(project=project, name=folder.name, id=run_id, resume="allow", config=recipe)


def flat(values, prefix):
    """The numbers of a line, {"attention": {"density": 1}} as attention/density."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield prefix + key, value


steps = {}
for line in map(json.loads, lines):
    kind = line.pop("kind")
    steps.setdefault(line.pop("step"), {}).update(flat(line, "" if kind == "step" else f"{kind}/"))
for step in sorted(step for step in steps if step >= run.step):
    run.log(steps[step], step=step)
run.finish()
