"""Exported models in Hugging Face transformers: CPU, float32.

usage: transformers_logits.py TOKENS TEXT FOLDER...

TOKENS is a list of token ids separated by commas. For each FOLDER the file FOLDER/transformers.safetensors is written
with the tensor "logits", float32 [1, tokens, vocabulary]; one JSON line a folder goes to standard output: the classes
that transformers chose, the parameters it missed or did not expect, the ids that its tokenizer gives for TEXT, and of
all classes but Doge, which leaves open which of equal keys it keeps:

- generated: what a greedy, cached, left-padded batch of the first PROMPTS tokens goes on with, times a whole number
  that grows with TOKENS. MiniMax-M3 gets each prompt alone: its blocks begin at the padding;
- worst: the largest differences of logits from those of the whole pass, by what was done otherwise.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

PROMPTS = [5, 16, 11]
NEW = 12


def load(folder, **options):
    """The model of a folder; only one with code of its own is trusted."""
    has_code = "auto_map" in json.loads(Path(folder, "config.json").read_text())
    name = "dtype" if int(transformers.__version__.split(".")[0]) >= 5 else "torch_dtype"
    options = {name: torch.float32, "trust_remote_code": has_code, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def prompts(ids):
    """Lengths of the prompts."""
    return [length * (ids.shape[1] // 48) for length in PROMPTS]


def pads_left(model):
    return model.config.model_type != "minimax_m3_vl_text"


def padded(ids, side):
    """The prompts as rows with their masks; padding is token 0, which is no stranger to the model."""
    lengths = prompts(ids)
    width = max(lengths) + 1
    rows, mask = torch.zeros(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        here = slice(width - length, width) if side == "left" else slice(0, length)
        rows[row, here], mask[row, here] = ids[0, :length], 1
    return rows, mask


def differences(model, ids, logits):
    """Largest difference from `logits`, of the whole pass, by what was done otherwise."""
    apart = {}
    cache, parts = None, []
    long = (ids.shape[1] - 48) // 48
    for part in ids.split([7, 1, 1, 5] + [48] * long + [1] * (ids.shape[1] - 14 - 48 * long), 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    apart["cached"] = (torch.cat(parts, 1) - logits).abs().max()
    embeds = model.get_input_embeddings()(ids)
    apart["inputs_embeds"] = (model(inputs_embeds=embeds, use_cache=False).logits - logits).abs().max()
    for side in ("left", "right") if pads_left(model) else ("right",):
        rows, mask = padded(ids, side)
        # Stock classes do not count positions by the mask.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(rows, attention_mask=mask, position_ids=positions, use_cache=True)
        apart[f"{side} padding"] = max(
            (out.logits[row][mask[row].bool()] - logits[0, :length]).abs().max()
            for row, length in enumerate(prompts(ids))
        )
        # A stock window counts the padding behind a row's tokens as tokens.
        if side == "right" and type(model).__name__ != "SieveForCausalLM":
            continue
        # Two more tokens behind rows of different lengths, reordered as a beam search does.
        order = torch.tensor([2, 0, 1])
        cache = out.past_key_values
        cache.reorder_cache(order)
        lengths = [prompts(ids)[row] for row in order]
        more = torch.stack([ids[0, n : n + 2] for n in lengths])
        mask, later = torch.cat([mask[order], torch.ones_like(more)], 1), []
        for step in range(2):
            until = mask[:, : rows.shape[1] + step + 1]
            positions = until.sum(1, keepdim=True) - 1
            later.append(model(more[:, step : step + 1], until, positions, cache, use_cache=True).logits)
        later = torch.cat(later, 1)
        apart[f"{side} padding, cached"] = max(
            (later[row] - logits[0, n : n + 2]).abs().max() for row, n in enumerate(lengths)
        )
    return {name: float(value) for name, value in apart.items()}


def generated(model, ids):
    """Greedy tokens of a left-padded batch; the best beams with a cache must be those without."""
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    if not pads_left(model):
        rows = [ids[:, :length] for length in prompts(ids)]
        # Without a mask generate() takes token 0 for padding.
        texts = [model.generate(row, attention_mask=torch.ones_like(row), **options)[0] for row in rows]
        return [text[row.shape[1] :].tolist() for text, row in zip(texts, rows)]
    rows, mask = padded(ids, "left")
    beams = [
        model.generate(rows, attention_mask=mask, num_beams=3, use_cache=use_cache, **options).tolist()
        for use_cache in (True, False)
    ]
    assert beams[0] == beams[1], beams
    return model.generate(rows, attention_mask=mask, **options)[:, rows.shape[1] :].tolist()


def refusals(model, ids):
    """What would give wrong numbers is refused with the reason."""
    packed = torch.arange(ids.shape[1])[None] % 9
    for options, reason in [
        ({"position_ids": packed}, 'pad on the left (tokenizer.padding_side = "left")'),
        ({"input_ids": ids[:0]}, "must have at least one"),
        ({"attention_mask": torch.ones(1, 1, *packed.shape)}, "earlier tokens + new ones"),
        ({"past_key_values": transformers.StaticCache(model.config, 64)}, "StaticCache is not supported"),
        ({"output_attentions": True}, "output_attentions is not supported"),
    ]:
        try:
            model(**{"input_ids": ids, **options})
        except ValueError as error:
            assert reason in str(error), error
        else:
            raise AssertionError(f"not refused: {options}")


def sieve_alone(folder, model, ids, logits):
    """What the exported modeling_sieve.py must do besides: compiled, without SDPA, checkpointed gradients, bf16."""
    apart = {}
    refusals(model, ids)
    with torch.no_grad():
        compiled = torch.compile(model.model, backend="eager", fullgraph=True)
        hidden = compiled(ids, use_cache=False).last_hidden_state
        apart["compiled"] = (model.lm_head(hidden) - logits).abs().max()
        eager = load(folder, attn_implementation="eager").eval()
        apart["eager"] = (eager(ids).logits - logits).abs().max()
    gradients = []
    for checkpointed in (False, True):
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        # An indexer has no gradient: it learns in sieve train alone.
        learning = (named for named in model.named_parameters() if ".index_" not in named[0])
        gradients.append({name: p.grad.clone() for name, p in learning})
    model.gradient_checkpointing_disable()
    model.eval()
    apart["checkpointed"] = max((gradients[0][name] - grad).abs().max() for name, grad in gradients[1].items())
    with torch.no_grad():
        half = model.to(torch.bfloat16)
        options = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
        out = half.generate(ids[:, :8], max_new_tokens=4, **options)
        assert all(torch.isfinite(score).all() for score in out.scores)
    return {name: float(value) for name, value in apart.items()}


def main() -> None:
    if any(word.startswith("-") for word in sys.argv[1:2]):
        sys.exit(__doc__)
    tokens, text, folders = sys.argv[1], sys.argv[2], sys.argv[3:]
    ids = torch.tensor([[int(token) for token in tokens.split(",")]])
    for folder in folders:
        model_type = json.loads(Path(folder, "config.json").read_text())["model_type"]
        is_doge = model_type == "doge"
        # Stock Doge loses its mask with SDPA in some releases (5.10.4: other logits altogether).
        options = {"attn_implementation": "eager"} if is_doge else {}
        model, loading = load(folder, output_loading_info=True, **options)
        # Of Qwen2 the automatic choice takes Qwen2's own tokenizer, whatever tokenizer_config.json says (5.23.0).
        is_qwen2 = model_type == "qwen2"
        tokenizers = transformers.PreTrainedTokenizerFast if is_qwen2 else transformers.AutoTokenizer
        # Without trust, as it has no code of its own; where nobody answers the question none is run. The question goes
        # to standard output.
        with contextlib.redirect_stdout(sys.stderr):
            tokenizer = tokenizers.from_pretrained(folder)
        model.eval()
        eos_token_id, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
        name = type(model).__name__
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits
            save_file({"logits": logits.float().contiguous()}, f"{folder}/transformers.safetensors")
            worst = {} if is_doge else differences(model, ids, logits)
            tokens = None if is_doge else generated(model, ids)
        if not pads_left(model):
            model.save_pretrained(f"{folder}-saved")
        if name == "SieveForCausalLM":
            worst |= sieve_alone(folder, model, ids, logits)
        print(
            json.dumps(
                {
                    "model": name,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                    "missing": sorted(loading["missing_keys"]),
                    "unexpected": sorted(loading["unexpected_keys"]),
                    "num_parameters": sum(p.numel() for p in model.parameters()),
                    "text_ids": tokenizer(text)["input_ids"],
                    "eos_token_id": eos_token_id,
                    "generated": tokens,
                    "worst": worst,
                }
            )
        )


if __name__ == "__main__":
    main()
