"""Draws docs/masks.svg, which keys each kind of attention reads, and docs/way.svg, from text to a served model.

    python3 lab/experiments/pictures.py            writes both
    python3 lab/experiments/pictures.py --check    ends with 1 where a stored picture is not what this file draws

The masks are computed: 36 queries and keys of width 6, drawn from a seed, go through small forms of the rules that
python/sieve_attention/definitions.py has in torch. Needs nothing but Python.
"""

import argparse
import math
import pathlib
import random
import sys

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
WIDTH = 830
LIGHT = {"page": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "rule": "#d1d9e0", "box": "#f6f8fa",
         "place": "#0969da", "content": "#d9730d", "whole": "#a6b4c4"}
DARK = {"page": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "rule": "#3d444d", "box": "#151b23",
        "place": "#4493f8", "content": "#f0883e", "whole": "#4a5562"}
TOKENS, BLOCK, COLUMNS = 36, 4, 6
PLACE, CONTENT, WHOLE = "place", "content", "whole"  # why a key is read; WHOLE: within a mean or as a latent


def vectors(draw, smooth):
    """A vector for each token; neighbours resemble each other by `smooth`."""
    vectors_made = [[draw.gauss(0, 1) for _ in range(COLUMNS)]]
    while len(vectors_made) < TOKENS:
        vectors_made.append([smooth * old + math.sqrt(1 - smooth**2) * draw.gauss(0, 1) for old in vectors_made[-1]])
    return vectors_made


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def mean(rows):
    return [sum(column) / len(rows) for column in zip(*rows)]


def best(scores, count):
    """The `count` entries of most score, of equal ones the later."""
    return set(sorted(scores, key=lambda place: (scores[place], place))[-count:]) if count else set()


def keys_of(blocks, query):
    return {key for block in blocks for key in range(block * BLOCK, min((block + 1) * BLOCK, query + 1))}


def window(query, width):
    return dict.fromkeys(range(max(query + 1 - width, 0), query + 1), PLACE)


def by_blocks(query, importance, count, first=0, local=1):
    """`count` blocks: the first ones and the last ones in any case, the others by importance."""
    own = query // BLOCK
    forced = {block for block in range(own + 1) if block < first or block > own - local}
    chosen = best({block: importance(block) for block in range(own + 1) if block not in forced}, count - len(forced))
    return dict.fromkeys(keys_of(chosen, query), CONTENT) | dict.fromkeys(keys_of(forced, query), PLACE)


def masks():
    """Of each kind a function from a query to {key: why it is read}."""
    draw = random.Random(6)
    q, k, index_q, index_k = (vectors(draw, smooth) for smooth in (0.8, 0.3, 0.8, 0.3))
    rank = [draw.gauss(0, 1) + token / 12 for token in range(TOKENS)]  # DMA's score of a key, with its slope

    def slot(query, start, size=BLOCK):
        """exp(q . mean key) of `size` keys that end at the query or before it: a compressed key's weight."""
        return math.exp(dot(q[query], mean(k[start : start + size]))) if 0 <= start <= query + 1 - size else 0.0

    def dma(query):
        last = window(query, 4)
        older = {key: rank[key] for key in range(query + 1) if key not in last}
        return dict.fromkeys(best(older, 8), CONTENT) | last

    def nsa(query):
        compressed = dict.fromkeys(range((query + 1) // BLOCK * BLOCK), WHOLE)
        chosen = by_blocks(query, lambda block: slot(query, block * BLOCK), 4, first=1, local=2)
        return compressed | chosen | window(query, 8)

    def infllm_v2(query):
        largest = lambda block: max(slot(query, block * BLOCK + start) for start in (-2, 0, 2))
        return by_blocks(query, largest, 5, first=1, local=2)

    def moba(query):
        return by_blocks(query, lambda block: dot(q[query], mean(k[block * BLOCK : (block + 1) * BLOCK])), 4)

    def msa(query):
        keys = lambda block: range(block * BLOCK, min((block + 1) * BLOCK, query + 1))
        return by_blocks(query, lambda block: max(dot(index_q[query], index_k[key]) for key in keys(block)), 4, local=2)

    return {
        "mha": (("every earlier key",), lambda query: window(query, TOKENS)),
        "swa": (("the last keys",), lambda query: window(query, 12)),
        "dma": (("the last keys,", "and the best older ones"), dma),
        "nsa": (("a window, first and chosen", "blocks, the means of all"), nsa),
        "mla": (("every earlier key,", "as a narrow latent"), lambda query: dict.fromkeys(range(query + 1), WHOLE)),
        "infllm_v2": (("the first and last blocks,", "others by their pooled keys"), infllm_v2),
        "moba": (("the query's own block,", "others by their mean key"), moba),
        "msa": (("the last blocks,", "others by an indexer"), msa),
    }


def text(x, y, words, size=14, anchor="start", colour="ink", weight=400, family=""):
    family = f' font-family="{family}"' if family else ""
    return (f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"{family} '
            f'fill="var(--{colour})">{words}</text>')


def rectangle(x, y, width, height, colour, rest=""):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="var(--{colour})"{rest}/>'


def picture(height, parts, title, shape="auto"):
    colours = lambda palette: " ".join(f"--{name}: {value};" for name, value in palette.items())
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, sans-serif" shape-rendering="{shape}" role="img"><title>{title}</title>',
        f"<style>svg {{ {colours(LIGHT)} }} @media (prefers-color-scheme: dark) {{ svg {{ {colours(DARK)} }} }}</style>",
        rectangle(0, 0, WIDTH, height, "page"), *parts, "</svg>", ""])


def triangle(x, y, side, reads):
    """A row a query from above, a column a key; neighbouring keys of one colour are one rectangle."""
    cell = side / TOKENS
    edge = f"{x:g},{y:g} {x:g},{y + side:g} {x + side:g},{y + side:g}"
    parts = [f'<polygon points="{edge}" fill="var(--box)" stroke="var(--rule)"/>']
    for query in range(TOKENS):
        why, key = reads(query), 0
        while key <= query:
            end = key + 1
            while end <= query and why.get(end) == why.get(key):
                end += 1
            if key in why:
                parts.append(rectangle(round(x + key * cell, 2), round(y + query * cell, 2), round((end - key) * cell, 2),
                                       cell, why[key]))
            key = end
    return parts


def draw_masks():
    """The picture of eight kinds of attention, a triangle each: which keys a query reads, and by colour why."""
    side, step, parts = 180, 204, []
    for at, (name, (about, reads)) in enumerate(masks().items()):
        x, y = 14 + at % 4 * step, 44 + at // 4 * 236
        parts += triangle(x, y, side, reads)
        parts.append(text(x + side, y + 18, name, 17, "end", weight=600))
        parts += [text(x, y + side + 18 + 16 * number, words, 13, colour="soft") for number, words in enumerate(about)]
    parts.append(text(14, 24, "Which keys a query reads: queries from top to bottom, keys from left to right", 15, weight=600))
    x, y = 14, 44 + 2 * 236 - 2
    for colour, words in ((PLACE, "read for its position"), (CONTENT, "chosen by its content"),
                          (WHOLE, "read as a latent, or in the mean of a block")):
        parts += [rectangle(x, y, 14, 14, colour), text(x + 20, y + 12, words, 13)]
        x += 50 + 7.0 * len(words)
    return picture(y + 30, parts, "The masks of eight kinds of attention", "crispEdges")


def box(x, y, width, height, name, lines):
    parts = [rectangle(x, y, width, height, "box", ' rx="8" stroke="var(--rule)"'),
             text(x + width / 2, y + 26, name, 16, "middle", weight=600)]
    return parts + [text(x + width / 2, y + 47 + 17 * at, line, 12, "middle", "soft", family="ui-monospace, monospace"
                         if line.startswith(("sieve", "--")) else "") for at, line in enumerate(lines)]


def arrow(x, y, to_x, to_y):
    angle = math.atan2(to_y - y, to_x - x)
    tip = " ".join(f"{to_x - 9 * math.cos(angle + turn):.1f},{to_y - 9 * math.sin(angle + turn):.1f}" for turn in (-0.45, 0.45))
    return [f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="var(--place)" stroke-width="2"/>',
            f'<polygon points="{to_x:g},{to_y:g} {tip}" fill="var(--place)"/>']


def draw_way():
    """The picture of the commands between a text and a served model."""
    parts = []
    for x, width, name, lines in (
            (10, 130, "text", ("files, folders,", "data sets")),
            (186, 150, "recipe", ("sieve recipe new", "every key explained")),
            (392, 160, "train", ("sieve train", "kinds and seeds swept"))):
        parts += box(x, 102, width, 78, name, lines)
    parts += box(640, 12, 180, 78, "compare", ("sieve eval …", "sieve compare"))
    parts += box(640, 102, 180, 78, "generate, serve", ("sieve generate", "sieve serve"))
    parts += box(640, 192, 180, 78, "export", ("sieve export", "transformers, vLLM"))
    parts += box(186, 204, 150, 62, "trained model", ("sieve import",))
    parts += arrow(140, 141, 186, 141) + arrow(336, 141, 392, 141)
    parts += arrow(552, 122, 640, 62) + arrow(552, 141, 640, 141) + arrow(552, 160, 640, 220)
    parts += arrow(336, 226, 416, 182)
    return picture(284, parts, "From text to a served model")


def main():
    """Writes both pictures to the docs, or with --check ends with 1 where a stored one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check, different = parser.parse_args().check, []
    for name, drawn in (("masks.svg", draw_masks()), ("way.svg", draw_way())):
        if not check:
            (DOCS / name).write_text(drawn, encoding="utf-8")
        elif (DOCS / name).read_text(encoding="utf-8") != drawn:
            different.append(name)
    print(", ".join(different) + " differ: run lab/experiments/pictures.py" if different else "masks.svg, way.svg are as drawn")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
