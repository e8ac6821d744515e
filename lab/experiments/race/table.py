"""The page of the race and its picture, from lab/rows/race.jsonl.

    python3 lab/experiments/race/table.py ROWS.jsonl    adds a run's rows, in place of stored ones of the same shape
    python3 lab/experiments/race/table.py               writes lab/docs/race.md and, where there are times, lab/docs/race.svg
    python3 lab/experiments/race/table.py --check       names the files that differ instead; ends with 1 where one does

Only what has rows is on the page. Needs nothing but Python.
"""

import argparse
import html
import json
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[3]
ROWS, PAGE, PICTURE = (ROOT / path for path in ("lab/rows/race.jsonl", "lab/docs/race.md", "lab/docs/race.svg"))
# Each task's heading and what is computed.
TASKS = {
    "dense": ("Dense", "Causal attention."),
    "window": ("Windows", "Each query sees the last 1024 keys."),
    "bands": ("Windows and bands (CoWindow)", "Each query sees the last 1024 keys, the first 64, and its KV head's band, "
              "one of eight up to the row's end. With one KV head it is the nearest band."),
    "selected": ("Chosen blocks", "Each query and KV head has 16 blocks of 64 keys: its own, the first, the others "
                 "random."),
    "shared": ("Chosen blocks, keys that are values", "The same with one KV head that serves as keys and values."),
    "tiles": ("Tiles", "Each head and tile of 128 queries sees 16 random earlier tiles of 128 keys."),
    "expiring": ("Keys by rank (DMA)", "Each KV head keeps the 1024 best-ranked keys, the last 128 in any case; the "
                 "rank is a bias. Ours selects the keys in the time; FlexAttention's mask is made before. "
                 "`dense` is cuDNN's."),
    "own": ("Whole methods", "Each method chooses its keys itself, in the time. They read different keys, so the times "
            "are no ranking. flash_nsa's windows are FlashAttention-4's."),
}
# What a task is called in the tables of all tasks, where that is not its key.
SHORT = {"selected": "chosen blocks", "shared": "keys that are values", "expiring": "keys by rank",
         "own": "whole methods"}
# Of these both passes are also compared with cuDNN's dense attention, as README and the other pages tell it.
SPARSE = ("expiring", "own")
LENGTHS = (8192, 32768, 131072)
HEADS = ("16/8", "64/4", "16/16", "32/2", "128/1", "64/1", "16/1")
HEAD = """# The race
    python3 lab/experiments/race/race.py --out ROWS.jsonl    # on one Hopper GPU, four minutes
    python3 lab/experiments/race/table.py ROWS.jsonl         # this page and its picture

How fast are Sieve's attention kernels beside the others that can be had, on the same inputs of one GPU?
{answer}

Inputs are bf16, one row, heads of 128; 16/8 heads are 16 query and 8 KV heads. Times are medians in milliseconds on the
GPU's clock, with the L2 flushed before each. Every rival runs in a process of its own, and the others are stopped while
it is timed. `both` is a forward and a backward pass, `forward` one without gradients. MiB (the most beside the inputs)
and the ratio to ours are of both passes at 32,768 tokens. Ours sum in a fixed order; the others sum as they do by
default, where no other order is named.

Not decided: the rivals that gave [no time](#without-a-time), GPUs that are not of the Hopper family, and how much a
second call would differ. An empty cell was not taken, or not reached in time.
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
    texts = ["| " + " | ".join(line) + " |" for line in (head, *lines)]
    return [texts[0], "|" + "---|" * len(head), *texts[1:], ""]


def wrapped(text, indent=""):
    """A paragraph in lines of the pages' width."""
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def short(task):
    return SHORT.get(task, task)


def is_ours(rival):
    return rival.startswith("Sieve")


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
        return f" One {names[0]}, one call."
    return f" {'s, '.join(dict.fromkeys(names))}s, {len(calls)} calls."


def over_ours(rows, task, column="both_ms"):
    """The other's time over ours of each rival of a task, at all shapes that both have, the fastest rival first."""
    timed, ratios = by_place(rows), {}
    for (of_task, rival, heads, tokens), row in timed.items():
        ours = timed.get((task, "Sieve", heads, tokens))
        if of_task == task and ours and not rival.startswith("Sieve"):
            ratios.setdefault(rival, []).append(row[column] / ours[column])
    return dict(sorted(ratios.items(), key=lambda pair: min(pair[1])))


def span(values):
    """The least and the most of these ratios, one number where they are equal."""
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def named(rival):
    """A rival in a sentence, whose commas separate rivals."""
    return rival.replace(", fixed order", " in a fixed order").replace(", Triton", "'s Triton kernels")


def linked(heading):
    """A link to a section of the page."""
    return f"[{heading}](#{re.sub(r'[^a-z0-9 -]', '', heading.lower()).replace(' ', '-')})"


def listed(parts):
    return ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]


def answer(rows, task):
    """The sentence that a task's section begins with: the worst beside the best of all its shapes."""
    if task == "own":
        timed = by_place(rows)
        over = {(rival, heads, tokens): ratio for name, rival, heads, tokens in timed if name == task
                and (ratio := over_cudnn(timed, task, rival, heads, tokens))}
        ours = sorted((place for place in over if place[0].startswith("Sieve")), key=over.get)
        others = {}
        for place in over.keys() - set(ours):
            others.setdefault(place[0], []).append(over[place])
        ends = [f"{over[place]:.2f} times as long as {place[0]} ({place[1]} heads, {place[2]:,} tokens)"
                for place in ours[:1] + ours[-1:]]
        beside = [f"Beside {rival} they take {span(ratios)} times as long." for rival, ratios in sorted(others.items())]
        whole = [f"Both passes of cuDNN's dense attention take {' to '.join(ends)}.", *beside]
        return " ".join(whole) if ends else ""
    ratios = [f"{span(of_rival)}{'' if at else ' times as long as ours'} by {named(rival)}"
              for at, (rival, of_rival) in enumerate(over_ours(rows, task).items())]
    return f"Both passes take {listed(ratios)}." if ratios else ""


def best_and_worst(rows):
    """The page's answer: the rival that is furthest ahead of our both passes, and the one that is furthest behind."""
    ratios = [(ratio, linked(TASKS[task][0]), rival) for task in TASKS if task != "own"
              for rival, of_rival in over_ours(rows, task).items() for ratio in (min(of_rival), max(of_rival))]
    if not ratios:
        return ""
    (least, worst, ahead), (most, best, behind_us) = min(ratios), max(ratios)
    return (f"At worst both passes of another take {least:.2f} times as long as ours ({ahead}, {worst}), at best "
            f"{most:.2f} times ({behind_us}, {best}). {linked('Where others are faster')} has every task in which one "
            f"leads. {linked(TASKS['own'][0])} are compared with cuDNN's dense attention.")


def times(rows, task):
    """The Markdown table of a task: times by heads and rival, ours first, memory, and both passes over ours at 32,768
    tokens; a sentence where one shape alone was timed, no lines where none was."""
    timed = of(rows, "time", task)
    if not timed:
        return []
    if len(timed) == 1:
        (row,) = timed
        forward, both = number(row["forward_ms"]), number(row["both_ms"])
        return wrapped(f"{row['heads']} heads at {row['tokens']:,} tokens: {row['rival']} takes {forward} ms forward, "
                       f"{both} ms for both passes and {row.get('peak_mib', 0):,.0f} MiB. No rival gave a time.") + [""]
    rows_by_place = {(row["heads"], row["rival"], row["tokens"]): row for row in timed}
    every, lines, before = by_place(rows), [], None
    lengths = [length for length in LENGTHS if any(row["tokens"] == length for row in timed)]
    against = {row["heads"] for row in timed if task == "own" or not row["rival"].startswith("Sieve")}
    for heads, rival in (key for key in order(timed) if key[0] in against or not against):
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
    head = ["heads", "rival", *(what for length in lengths for what in (f"{length:,} forward", "both")), "MiB"]
    head += ["over ours"] if task != "own" else []
    return table([*head, *(f"dense over it at {length:,}" for length in lengths if task in SPARSE)], lines)


# Why, by task: what is known of our kernel, so that a losing row is not left without a word.
REASONS = {
    "dense": "it sums dq in any order by default, ours in a fixed one; its own fixed order is slower than ours in both "
             "passes. Forward, thirty-six variants of what is done inside a tile gained nothing "
             "(lab/notes/experiments.md).",
    "tiles": "it sums dq in any order. In our fixed order tiles of keys wait for their turn; the rows of ours in any "
             "order have no turns. Both are bound by the L2 cache.",
    "selected": "groups of 16 query heads fill its tile; ours writes block sums beside the output.",
}


def behind(rows):
    """The tasks in which another kernel is faster by more than two percent at some shape, in both passes or forward."""
    lines = []
    for task in TASKS:
        both, forward = over_ours(rows, task), over_ours(rows, task, "forward_ms")
        for rival in both if task != "own" else ():
            ahead = sum(min(pair) < 0.98 for pair in zip(both[rival], forward[rival]))
            if ahead:
                leads = f"{ahead} of {len(both[rival])}"
                lines.append([short(task), rival, leads, span(forward[rival]), span(both[rival])])
    if not lines:
        return []
    lines.sort(key=lambda line: float(line[-1].split(" ")[0]))
    _, rival, _, _, both = lines[0]
    text = ["## Where others are faster", *wrapped(
        f"{named(rival)} leads most, with {both} of our time in both passes ({lines[0][0]}). A rival is here if it is "
        "more than 2 % faster at some shape, forward or in both passes. Its time over ours, of all its shapes:"), ""]
    text += table(["task", "rival", "leads at", "forward", "both"], lines)
    shown = {line[0] for line in lines}
    return text + [*(line for task, reason in REASONS.items() if (name := short(task)) in shown
                     for line in wrapped(f"- {name}: {reason}", "  ")), ""]


RESULTS = ("o", "dq", "dk", "dv")
ODD = {"507": "507 tokens", "1": "one key", "documents": "empty documents"}


def largest_errors(rows):
    """By task and rival the largest error over all heads of o and each gradient; "dkv" counts as dk."""
    errors = {}
    for row in of(rows, "error"):
        largest = errors.setdefault((row["task"], row["rival"]), {})
        for name in RESULTS:
            value = row.get(name, row.get("dkv") if name == "dk" else None)
            if value is not None:
                largest[name] = max(value, largest.get(name, 0.0))
    return errors


def verdicts(rows):
    """Odd shapes by task and rival: right, wrong, refused, or not offered."""
    by_rival = {}
    for row in rows:
        is_case = row["kind"] == "odd" or row.get("of") == "odd" and row["kind"] in ("refused", "not offered")
        if is_case and "heads" in row:
            case = row.get("case") or ODD["documents" if row.get("documents") else str(row["tokens"])]
            by_rival.setdefault((row["task"], row["rival"]), {})[case] = row.get("verdict") or row["kind"]
    return by_rival


def checks(rows):
    """The section on errors against f64, repeated passes and odd shapes, a line a task and rival; none without rows."""
    errors, shapes = largest_errors(rows), verdicts(rows)
    repeated = {(row["task"], row["rival"]): row for row in of(rows, "repeats")}
    tasks = list(TASKS)
    keys = sorted(errors.keys() | shapes.keys() | repeated.keys(),
                  key=lambda key: (tasks.index(key[0]), not key[1].startswith("Sieve"), key[1]))
    if not keys:
        return []
    said = []
    if errors:
        each = [(value, key, name) for key, of_key in errors.items() for name, value in of_key.items()]
        ends = [max(one for one in each if is_ours(one[1][1]) == ours) for ours in (True, False)
                if any(is_ours(key[1]) == ours for key in errors)]
        parts = [f"{small(value)} {'of ours' if is_ours(key[1]) else 'of the others'} ({name} of {short(key[0])}, "
                 f"{named(key[1])})" for value, key, name in ends]
        said.append(f"The largest error is {listed(parts)}.")
    if repeated:
        equal = lambda some: f"{sum(repeated[key]['equal'] == repeated[key]['passes'] for key in some)} of {len(some)}"
        ours = [key for key in repeated if is_ours(key[1]) and "any order" not in key[1]]
        said.append(f"Every pass has the same bits in {equal(ours)} of ours in a fixed order and in "
                    f"{equal([key for key in repeated if not is_ours(key[1])])} of the others.")
    said.append("An error is the norm of the difference to f64 over the norm, the largest of all heads; "
                "lab/rows/race.jsonl has each. `equal` counts passes with the bits of the first, o and gradients. Odd "
                "shapes are 507 tokens, one key, and five documents, two of them empty; right is an error below 0.02.")
    alike = {}
    for key in keys:
        if key not in errors and key not in shapes:
            alike.setdefault(f"{repeated[key]['equal']} of {repeated[key]['passes']}", []).append(named(key[1]))
    if alike:
        said.append("Rivals without a line: " + listed([f"{count} equal ({', '.join(rivals)})"
                                                        for count, rivals in alike.items()]) + ".")
    lines, before = [], None
    for key in (key for key in keys if key in errors or key in shapes):
        cells = shapes.get(key, {})
        wrong = [f"{case} {cells[case]}" for case in ODD.values() if cells.get(case, "right") != "right"]
        right = sum(verdict == "right" for verdict in cells.values())
        lines.append([short(key[0]) if key[0] != before else "", key[1],
                      ", ".join(f"{1000 * errors[key][name]:.1f}" for name in RESULTS if name in errors.get(key, {})),
                      f"{repeated[key]['equal']}/{repeated[key]['passes']}" if key in repeated else "",
                      "; ".join(([str(right)] if right else []) + wrong)])
        before = key[0]
    return ["## Errors, repeats, odd shapes", *wrapped(" ".join(said)), "",
            *table(["task", "rival", "errors of o, dq, dk, dv, 1e-3", "equal", "odd shapes right"], lines)]


def host(rows):
    """The section on the time of a call on the host, in microseconds; none where ours alone were timed."""
    timed = in_turn(of(rows, "host"))
    if all(row["rival"].startswith("Sieve") for row in timed):
        return []
    lines = [[short(row["task"]), row["rival"], row["heads"], f"{row['forward_us']:.0f}", f"{row['both_us']:.0f}"]
             for row in timed]
    return ["## Time on the host", *wrapped(
        "The host's time for a call at 256 tokens in PyTorch, in microseconds: the median of 1,000, the GPU kept busy "
        "so that nothing waits for it."), "", *table(["task", "rival", "heads", "forward", "both"], lines)]


def steps(rows):
    """The section on a decoding step."""
    timed = of(rows, "step")
    lengths = sorted({row["tokens"] for row in timed})
    at = {(row["task"], row["rival"], row["heads"], row["tokens"]): row for row in timed}
    ratios = {}
    for (task, rival, heads, tokens), row in at.items():
        if not rival.startswith("Sieve") and (ours := at.get((task, "Sieve", heads, tokens))):
            ratios.setdefault(rival, []).append(row["us"] / ours["us"])
    text = ["## A decoding step", *wrapped(" ".join([
        *(f"{named(rival)} take {span(of_rival)} times as long as ours." for rival, of_rival in ratios.items()),
        "A step is the attention of one token of one text over its cache, in microseconds on the GPU's clock; its error "
        "is of the output against f64 at the longest cache. Ours writes the token's key and value too."])), ""]
    lines = []
    for key in dict.fromkeys((row["task"], row["rival"], row["heads"]) for row in in_turn(timed)):
        cells = [at.get((*key, length)) for length in lengths]
        last = next((row for row in reversed(cells) if row), {})
        lines.append([*key, *(number(row["us"]) if row else "" for row in cells), small(last["o"])])
    head = ["task", "rival", "heads", *(f"{length:,} tokens" for length in lengths), "error"]
    return text + table(head, lines) if timed else []


def refusals(rows):
    """What gave no number, once for each task and reason."""
    by_reason = {}
    for row in rows:
        if row["kind"] in ("absent", "refused", "not offered", "late") and row.get("of") != "odd":
            tasks, rivals, heads = by_reason.setdefault(row["why"], ({}, {}, {}))
            tasks[row["task"]], rivals[row["rival"]] = None, None
            if "heads" in row:
                heads[row["heads"]] = None
    if not by_reason:
        return []
    lines = []
    for why, (tasks, rivals, heads) in by_reason.items():
        where = f"{', '.join(heads)} heads: " if heads else ""
        said = where + why.replace("|", "\\|").replace("<", "&lt;")
        lines.append([", ".join(map(short, tasks)), ", ".join(rivals), said])
    rivals = {row["rival"] for row in rows if row["kind"] in ("absent", "late", "not offered", "refused")}
    missing = sorted(rivals - {row["rival"] for row in of(rows, "time")})
    said = f"Whether {len(missing)} of these are faster is not decided: they gave no time at all." if missing else ""
    return ["## Without a time", *wrapped(said), "", *table(["task", "rival", "why"], lines)]


def measured(rows):
    """A line for each call of race.py: some tasks have a later one, whose rows replace the earlier ones."""
    calls = of(rows, "about")
    if not calls:
        return []
    is_package = lambda key: key in ("driver", "torch", "triton") or key.startswith(("flash", "fla-", "attn", "nvidia"))
    packages = dict.fromkeys(key for row in calls for key in row if is_package(key))
    versions = {key: list(dict.fromkeys(row[key] for row in calls if row.get(key))) for key in packages}
    lines = []
    for row in calls:
        only = row["command"].partition("--only ")[2].split(" ")[0].replace("|", " ")
        card = row.get("card", row["device"]).removeprefix("NVIDIA ").split(" ")[0]
        lines.append([row.get("note") or only or "all tasks", card, row["date"], row["commit"]])
    return ["## Measured with", *wrapped("A later call has the tasks or parts that it names. Packages: " + ", ".join(
        f"{key} {' or '.join(of_key)}" for key, of_key in versions.items()) + "."), "",
            *table(["call", "card", "day", "commit"], lines)]


def page(rows):
    """The whole page in Markdown: a section a task that was timed, then the parts that have rows."""
    lines = HEAD.format(answer="\n".join(wrapped(best_and_worst(rows)))).splitlines()
    if of(rows, "time"):
        lines += ["", "![both passes at 32,768 tokens, by task](race.svg)"]
    lines.append("")
    for task, (heading, meaning) in TASKS.items():
        if made := times(rows, task):
            said = " ".join(filter(None, [answer(rows, task), meaning])) + measured_on(rows, task)
            lines += [f"## {heading}", *wrapped(said), "", *made]
    for part in (behind, checks, host, steps, refusals, measured):
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="?", type=pathlib.Path, help="the rows of a run, a line of JSON each")
    parser.add_argument("--check", action="store_true", help="write nothing, and name the files that differ")
    words = parser.parse_args()
    if words.rows:
        new = words.rows.read_text(encoding="utf-8").splitlines()
        kept = merged(stored(), [json.loads(line) for line in new])
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    wanted = files(stored())
    if words.check:
        wrong = [str(path.relative_to(ROOT)) for path, text in wanted.items()
                 if not path.is_file() or path.read_text(encoding="utf-8") != text]
        sys.exit(f"not what the rows give: {', '.join(wrong)}\n  hint: run lab/experiments/race/table.py" if wrong else 0)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
