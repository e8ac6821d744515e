"""The same texts by transformers: batching.py EXPORT DEVICE PROMPT "NEW…" OUT.json "CLIENTS…"

`generate_batch` is its continuous batching with paged attention. All prompts are there from the beginning, so nothing
is lost to a server. Prints tokens a second.
"""

import sys
import time

import torch
import transformers
from prompts import pairs, prompts, write

if len(sys.argv) != 7:
    sys.exit(__doc__)
export, device, prompt, new, out, clients = sys.argv[1:]
counts = pairs(clients, new)
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(export)
asked = prompts(export, counts[-1][0], int(prompt))
ends = model.generation_config.eos_token_id
blocks = {} if device == "cuda" else {"num_blocks": 512, "max_batch_tokens": 512}
ended = ends if isinstance(ends, list) else [ends]


def together(asked, new):
    settings = transformers.GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=ends, pad_token_id=0, **blocks
    )
    found = model.generate_batch(inputs=asked, generation_config=settings, progress_bar=False)
    found = sorted(found.items(), key=lambda one: int("".join(filter(str.isdigit, str(one[0]))) or 0))
    return [list(text.generated_tokens) for _, text in found]


together(asked[:1], 8)
rates, texts = {}, {}
for count, tokens in counts:
    begun = time.monotonic()
    found = together(asked[:count], tokens)
    rates[count] = [tokens, sum(map(len, found)) / (time.monotonic() - begun)]
    if not all(found):
        raise SystemExit("continuous batching returned empty texts")
    texts[count] = [tokenizer.decode([token for token in text if token not in ended]) for text in found]
    name = f"transformers {transformers.__version__}"
    print(f"{name}, {count} texts of {tokens} tokens: {rates[count][1]:.1f} tokens a second", flush=True)
    write(out, name, rates, texts)
