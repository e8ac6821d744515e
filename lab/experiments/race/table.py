"""The page of the race and its picture, from lab/rows/race.jsonl.

    python3 lab/experiments/race/table.py ROWS.jsonl    adds a run's rows, in place of stored ones of the same shape
    python3 lab/experiments/race/table.py               writes lab/docs/race.md and, where there are times, lab/docs/race.svg
    python3 lab/experiments/race/table.py --check       names the files that differ instead; ends with 1 where one does

Only what has rows is on the page. Needs nothing but Python.
"""

import html
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROWS, PAGE, PICTURE = (ROOT / path for path in ("lab/rows/race.jsonl", "lab/docs/race.md", "lab/docs/race.svg"))
# Each task's heading and what is computed.
TASKS = {
    "dense": ("Dense", "Causal attention."),
    "window": ("Windows", "Each query sees the last 1024 keys."),
    "bands": ("Windows and bands (CoWindow)", "Each query sees the last 1024 keys, the first 64, and its KV head's band, "
              "one of eight up to the row's end. Of one KV head it is the nearest band."),
    "selected": ("Chosen blocks", "Each query and KV head has 16 blocks of 64 keys: its own, the first, the others "
                 "random."),
    "shared": ("Chosen blocks, keys that are values", "As before, of one KV head whose keys are its values too."),
    "tiles": ("Tiles", "Each head and tile of 128 queries sees 16 random earlier tiles of 128 keys."),
    "expiring": ("Keys by rank (DMA)", "Each KV head keeps the 1024 best-ranked keys, the last 128 in any case; the "
                 "rank is a bias. Ours selects the keys in the time; FlexAttention's mask is made before."),
    "own": ("Whole methods", "Each method chooses its keys itself, in the time. They read different keys, so that the "
            "times are no ranking. The windows of fla and flash_nsa are FlashAttention-4's."),
}
# Of these both passes are also compared with cuDNN's dense attention, as README and the other pages tell it.
SPARSE = ("expiring", "own")
LENGTHS = (8192, 32768, 131072)
HEADS = ("16/8", "64/4", "16/16", "32/2", "128/1", "64/1", "16/1")
HEAD = """# The race
    python3 lab/experiments/race/race.py --out ROWS.jsonl    # on one Hopper GPU, four minutes
    python3 lab/experiments/race/table.py ROWS.jsonl         # this page and its picture

Sieve's kernels and the others that can be had, on the same inputs of one GPU. Every rival runs in a process of its own,
and while one is timed the others are stopped. Inputs are bf16, one row, heads of 128. Times are medians on the GPU's
clock, with the L2 flushed before each. Ours sum in a fixed order; the others sum as they do by default, where no other
order is named.
`forward` is a pass without gradients. `both` is a forward and a backward pass. MiB are the most that both passes take
beside their inputs. A cell without a number was not taken, or not reached in time.

lab/experiments/race/pack.sh packs the rivals for a machine without a network.
"""


def stored():
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def place(row):
    """What a row is about: a later row of the same place replaces it, a refusal too."""
    documents = row.get("documents")
    return (row.get("of", row["kind"]), row["rival"], row["task"], row.get("heads"), row.get("tokens"),
            tuple(documents) if documents else None)


def merged(old, new):
    """Rows of a new run in place of those of the same rivals and shapes. What the old rows have no number of, because
    it came too late, is gone where the rival ran again."""
    new = [row for row in new if row["kind"] != "end"]
    again = {(row["rival"], row["task"]) for row in new if row["kind"] != "about"}
    places = {place(row) for row in new if row["kind"] != "about"}
    kept = [row for row in old if row["kind"] == "about" or place(row) not in places
            and not (row["kind"] in ("late", "absent") and (row["rival"], row["task"]) in again)]
    return kept + new


def of(rows, kind, task=None):
    return [row for row in rows if row["kind"] == kind and (task is None or row["task"] == task)]


def table(head, lines):
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines)] + [""]


def number(value):
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def small(value):
    """An error as 1.6e-3."""
    return f"{value:.1e}".replace("e-0", "e-")


def by_place(rows):
    """Times by task, rival, heads and tokens."""
    return {(row["task"], row["rival"], row["heads"], row["tokens"]): row for row in of(rows, "time")}


def over_cudnn(timed, task, rival, heads, tokens):
    """cuDNN's time of dense attention over this one's, both passes; None where one of them is not there."""
    dense, ours = timed.get(("dense", "cuDNN", heads, tokens)), timed.get((task, rival, heads, tokens))
    return dense["both_ms"] / ours["both_ms"] if dense and ours else None


def order(rows):
    """Heads and rivals, equal heads together, ours first."""
    return sorted(dict.fromkeys((row["heads"], row["rival"]) for row in rows), key=lambda key: turn(*key))


def turn(heads, rival):
    """Where a rival's row with such heads stands: by heads as HEADS has them, ours first, then by name."""
    return HEADS.index(heads) if heads in HEADS else len(HEADS), not rival.startswith("Sieve"), rival


def in_turn(rows):
    """Rows by task and rival, then heads."""
    tasks = list(TASKS)
    return sorted(rows, key=lambda row: (tasks.index(row["task"]), *turn(row["heads"], row["rival"])[1:],
                                         turn(row["heads"], row["rival"])[0]))


def measured_on(rows, task):
    """On which cards a task's times were taken, and in how many calls. A call's first row says what it is about."""
    calls, about = [], None
    for row in rows:
        if row["kind"] == "about":
            about = row
        elif row["kind"] == "time" and row["task"] == task and about and about not in calls:
            calls.append(about)
    if not calls:
        return ""
    names = [call.get("card", call["device"]).removeprefix("NVIDIA ").split(" ")[0] for call in calls]
    if len(calls) == 1:
        return f" On one {names[0]}, in one call."
    return f" On {'s, '.join(dict.fromkeys(names))}s, in {len(calls)} calls."


def times(rows, task):
    """The Markdown table of a task: times by heads and rival, ours first, memory, and both passes over ours at 32,768
    tokens; no lines where nothing was timed."""
    timed = of(rows, "time", task)
    if not timed:
        return []
    rows_by_place = {(row["heads"], row["rival"], row["tokens"]): row for row in timed}
    every, lines, before = by_place(rows), [], None
    lengths = [length for length in LENGTHS if any(row["tokens"] == length for row in timed)]
    for heads, rival in order(timed):
        cells = [rows_by_place.get((heads, rival, length)) for length in lengths]
        middle = rows_by_place.get((heads, rival, LENGTHS[1])) or {}
        ours = rows_by_place.get((heads, "Sieve", LENGTHS[1]))
        beside_ours = ours and middle and not rival.startswith("Sieve")
        ratio = f"{middle['both_ms'] / ours['both_ms']:.2f}" if beside_ours else ""
        lines.append([
            heads if heads != before else "", rival,
            *(number(row[column]) if row else "" for row in cells for column in ("forward_ms", "both_ms")),
            f"{middle['peak_mib']:,.0f}" if "peak_mib" in middle else "", *([ratio] if task != "own" else []),
            *(f"{beside:.2f}" if (beside := over_cudnn(every, task, rival, heads, length)) else ""
              for length in lengths if task in SPARSE)])
        before = heads
    head = ["heads", "rival", *(f"{length:,}: {what}, ms" for length in lengths for what in ("forward", "both")),
            "MiB at 32,768"]
    head += ["over ours, both, at 32,768"] if task != "own" else []
    return table([*head, *(f"cuDNN's dense over it, {length:,}" for length in lengths if task in SPARSE)], lines)


# Why, by task: what is known of our kernel, so that a losing row is not left without a word.
REASONS = {
    "dense": "It sums dq in any order by default; ours has a fixed order. Its fixed order is slower than ours. "
             "Forward, thirty-six variants of what is done inside a tile gained nothing (lab/notes/experiments.md).",
    "tiles": "It sums dq in any order; ours has a fixed order, in which tiles of keys wait for their turn. The rows of "
             "ours in any order have no such turns. By ncu (64/4, 32,768 tokens, an H100) both are bound by the L2 "
             "cache: its backward kernel takes 9.6 ms at 74 % of the cache's rate. A form of ours in any order takes "
             "9.9 ms at 83 %; turns cost 10 to 19 % more.",
    "selected": "Groups of 16 query heads fill its tile; ours writes block sums beside the output.",
}


def behind(rows):
    """The rows in which another kernel is faster in both passes, or forward, by more than two percent."""
    timed = {(row["task"], row["heads"], row["tokens"], row["rival"]): row for row in of(rows, "time")}
    lines = []
    for (task, heads, tokens, rival), row in timed.items():
        ours = timed.get((task, heads, tokens, "Sieve"))
        if task == "own" or rival.startswith("Sieve") or not ours:
            continue
        ratios = [row[column] / ours[column] for column in ("forward_ms", "both_ms")]
        if min(ratios) < 0.98:
            lines.append([task, heads, f"{tokens:,}", rival, *(f"{ratio:.2f}" for ratio in ratios)])
    if not lines:
        return []
    lines.sort(key=lambda line: float(line[-1]))
    text = ["## Where others are faster", "", "The other's time over ours. Below 1 the other is faster.", ""]
    text += table(["task", "heads", "tokens", "rival", "forward", "both"], lines)
    return text + [*(f"- {task}: {REASONS[task]}" for task in dict.fromkeys(line[0] for line in lines)
                     if task in REASONS), ""]


def checks(rows):
    """The section on errors against f64, no lines without any; "dkv" of keys that are values stands under dk."""
    errors = in_turn(of(rows, "error"))
    if not errors:
        return []
    columns = ["o", "dq", "dk", "dv"]
    text = ["## Errors against f64", "",
            "The norm of the difference over the norm, of all numbers of a result. dk of keys that are values is both.",
            ""]
    lines = [[row["task"], row["rival"], row["heads"], f"{row['tokens']:,}",
              *(small(value) if (value := row.get(name, row.get("dkv") if name == "dk" else None)) is not None else ""
                for name in columns)] for row in errors]
    return text + table(["task", "rival", "heads", "tokens", *columns], lines)


def repeats(rows):
    repeated = in_turn(of(rows, "repeats"))
    text = ["## Repeated passes", "",
            "How many of the passes gave o and gradients equal to those of the first, to the bit.", ""]
    lines = [[row["task"], row["rival"], row["heads"], f"{row['equal']} of {row['passes']}"] for row in repeated]
    return text + table(["task", "rival", "heads", "equal"], lines) if repeated else []


def host(rows):
    """The section on the time of a call on the host, in microseconds."""
    timed = of(rows, "host")
    text = ["## Time on the host", "",
            "Of a call at 256 tokens in PyTorch, in microseconds: the median of 1,000, the GPU kept busy so that "
            "nothing waits for it.", ""]
    lines = [[row["task"], row["rival"], row["heads"], f"{row['forward_us']:.0f}", f"{row['both_us']:.0f}"]
             for row in in_turn(timed)]
    return text + table(["task", "rival", "heads", "forward, us", "both, us"], lines) if timed else []


def steps(rows):
    """The section on a decoding step."""
    timed = of(rows, "step")
    lengths = sorted({row["tokens"] for row in timed})
    at = {(row["task"], row["rival"], row["heads"], row["tokens"]): row for row in timed}
    text = ["## A decoding step", "",
            "The attention of one token of one text over its cache, in microseconds on the GPU's clock, and the error "
            "of its output against f64 at the longest cache. Ours writes the token's key and value too.", ""]
    lines = []
    for key in dict.fromkeys((row["task"], row["rival"], row["heads"]) for row in in_turn(timed)):
        cells = [at.get((*key, length)) for length in lengths]
        last = next((row for row in reversed(cells) if row), {})
        lines.append([*key, *(number(row["us"]) if row else "" for row in cells), small(last["o"])])
    head = ["task", "rival", "heads", *(f"{length:,} tokens, us" for length in lengths), "error"]
    return text + table(head, lines) if timed else []


def odd(rows):
    """Odd shapes by rival: right, wrong, refused, or not offered."""
    given = {"507": "507 tokens", "1": "one key", "documents": "empty documents"}
    verdicts = {}
    cases = [row for row in rows if row["kind"] in ("odd", "refused", "not offered") and "heads" in row]
    for row in in_turn(cases):
        if row["kind"] == "odd" or row.get("of") == "odd" and row["kind"] in ("refused", "not offered"):
            case = row.get("case") or given["documents" if row.get("documents") else str(row["tokens"])]
            verdicts.setdefault((row["task"], row["rival"]), {})[case] = row.get("verdict") or row["kind"]
    if not verdicts:
        return []
    text = ["## Odd shapes", "",
            "Right is an error of o and of all gradients below 0.02. A row of documents holds five, of which two are "
            "empty.", ""]
    lines = [[*key, *(cells.get(case, "") for case in given.values())] for key, cells in verdicts.items()]
    return text + table(["task", "rival", *given.values()], lines)


def refusals(rows):
    """What gave no number, once for each rival, task and reason."""
    by_reason = {}
    for row in rows:
        if row["kind"] in ("absent", "refused", "not offered", "late") and row.get("of") != "odd":
            place = f"{row['heads']} heads" if "heads" in row else ""
            by_reason.setdefault((row["task"], row["rival"], row["why"]), dict.fromkeys([place]))[place] = None
    if not by_reason:
        return []
    lines = [[task, rival, ", ".join(filter(None, places)), why.replace("|", "\\|").replace("<", "&lt;")]
             for (task, rival, why), places in by_reason.items()]
    return ["## Without a number", ""] + table(["task", "rival", "where", "why"], lines)


def measured(rows):
    """A column for each call of race.py: some tasks have a later one, whose rows replace the earlier ones."""
    calls = of(rows, "about")
    if not calls:
        return []
    tasks = [row.get("note") or row["command"].partition("--only ")[2].split(" ")[0].replace("|", " ") or "all tasks"
             for row in calls]
    names = {"day": "date", "commit": "commit", "driver": "driver", "PyTorch": "torch", "Triton": "triton"}
    names |= {key: key for row in calls for key in row if key.startswith(("flash", "fla-", "attn", "nvidia"))}
    lines = [["card", *(row.get("card", row["device"]) for row in calls)]]
    lines += [[name, *(row.get(key, "") for row in calls)] for name, key in names.items()
              if any(row.get(key) for row in calls)]
    return ["## Measured with", "A later call has the tasks or parts that it names.", "", *table(["", *tasks], lines)]


def page(rows):
    """The whole page in Markdown: a section a task that was timed, then the parts that have rows."""
    lines = HEAD.splitlines()
    if of(rows, "time"):
        lines += ["", "![both passes at 32,768 tokens, by task](race.svg)"]
    lines.append("")
    for task, (heading, meaning) in TASKS.items():
        if made := times(rows, task):
            lines += [f"## {heading}", meaning + measured_on(rows, task), "", *made]
    for part in (behind, checks, repeats, host, steps, odd, refusals, measured):
        lines += part(rows)
    return "\n".join(lines).rstrip() + "\n"


def picture(rows):
    """Bars of both passes at 32,768 tokens and 64/4 heads (64/1 where keys are values), a group a task."""
    timed = [row for row in of(rows, "time") if row["tokens"] == LENGTHS[1] and row["heads"] in ("64/4", "64/1")]
    drawn, y, longest = [], 24, 420
    for task, (heading, _) in TASKS.items():
        group = sorted((row for row in timed if row["task"] == task), key=lambda row: row["both_ms"])
        if not group:
            continue
        drawn.append(f'<text x="10" y="{y}" font-weight="bold">{heading}</text>')
        most = group[-1]["both_ms"]
        for row in group:
            y += 20
            width = max(longest * row["both_ms"] / most, 1)
            color = "#c0392b" if row["rival"].startswith("Sieve") else "#7f8c8d"
            drawn += [f'<text x="205" y="{y}" text-anchor="end">{html.escape(row["rival"])}</text>',
                      f'<rect x="212" y="{y - 11}" width="{width:.1f}" height="14" fill="{color}"/>',
                      f'<text x="{218 + width:.1f}" y="{y}">{number(row["both_ms"])} ms</text>']
        y += 34
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {y}" font-family="sans-serif" font-size="12">\n'
            f'<rect width="720" height="{y}" fill="white"/>\n' + "\n".join(drawn) + "\n</svg>\n")


def files(rows):
    """What the page and, where there are times, the picture must hold."""
    return {PAGE: page(rows)} | ({PICTURE: picture(rows)} if of(rows, "time") else {})


def main():
    """Merges a run's rows into the stored ones where a file is named, then writes, or
    with --check compares, page and picture."""
    words = sys.argv[1:]
    if words and words[0] not in ("--check",):
        new = pathlib.Path(words[0]).read_text(encoding="utf-8").splitlines()
        kept = merged(stored(), [json.loads(line) for line in new])
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    wanted = files(stored())
    if "--check" in words:
        wrong = [str(path.relative_to(ROOT)) for path, text in wanted.items()
                 if not path.is_file() or path.read_text(encoding="utf-8") != text]
        sys.exit(f"not what the rows give: {', '.join(wrong)}\n  hint: run lab/experiments/race/table.py" if wrong else 0)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
