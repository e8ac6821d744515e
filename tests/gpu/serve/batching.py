"""The same texts by transformers: batching.py EXPORT DEVICE PROMPT NEW OUT.json CLIENTS…

`generate_batch` is its continuous batching with paged attention. All prompts are there from the beginning, so nothing
is lost to a server. Prints tokens a second.
"""

import sys
import time

import torch
import transformers
from prompts import prompts, write

export, device, prompt, new, out = sys.argv[1:6]
counts = [int(count) for count in sys.argv[6:]]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=dtype).to(device).eval()
tokenizer = transformers.AutoTokenizer.from_pretrained(export)
asked = prompts(export, max(counts), int(prompt))
ends = model.generation_config.eos_token_id
blocks = {} if device == "cuda" else {"num_blocks": 512, "max_batch_tokens": 512}
settings = transformers.GenerationConfig(
    max_new_tokens=int(new), do_sample=False, eos_token_id=ends, pad_token_id=0, **blocks
)


def together(asked):
    found = model.generate_batch(inputs=asked, generation_config=settings, progress_bar=False)
    found = sorted(found.items(), key=lambda one: int("".join(filter(str.isdigit, str(one[0]))) or 0))
    return [list(text.generated_tokens) for _, text in found]


together(asked[:1])
rates, texts = {}, []
for count in counts:
    begun = time.monotonic()
    texts = together(asked[:count])
    rates[count] = sum(map(len, texts)) / (time.monotonic() - begun)
    if not all(texts):
        raise SystemExit("continuous batching returned empty texts")
    print(f"transformers {transformers.__version__}, {count} texts: {rates[count]:.1f} tokens a second", flush=True)
ended = ends if isinstance(ends, list) else [ends]
words = [tokenizer.decode([token for token in text if token not in ended]) for text in texts]
write(out, f"transformers {transformers.__version__}", rates, words)
