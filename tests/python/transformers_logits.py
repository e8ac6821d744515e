"""Logits of exported models by Hugging Face transformers: CPU, float32, eager attention.

usage: transformers_logits.py TOKENS TEXT FOLDER...

TOKENS is a list of token ids separated by commas. For each FOLDER the file FOLDER/transformers.safetensors is written with
the tensor "logits", float32 [1, tokens, vocabulary]; one JSON line a folder goes to standard output: the classes that
transformers chose, the parameters it missed or did not expect, and the ids that its tokenizer gives for TEXT.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import save_file


def main() -> None:
    tokens, text, folders = sys.argv[1], sys.argv[2], sys.argv[3:]
    input_ids = torch.tensor([[int(token) for token in tokens.split(",")]])
    for folder in folders:
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", torch_dtype=torch.float32, output_loading_info=True, trust_remote_code=True
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        model.eval()
        with torch.no_grad():
            logits = model(input_ids, use_cache=False).logits
        save_file({"logits": logits.float().contiguous()}, f"{folder}/transformers.safetensors")
        print(
            json.dumps(
                {
                    "model": type(model).__name__,
                    "transformers": transformers.__version__,
                    "torch": torch.__version__,
                    "missing": sorted(loading["missing_keys"]),
                    "unexpected": sorted(loading["unexpected_keys"]),
                    "num_parameters": sum(p.numel() for p in model.parameters()),
                    "text_ids": tokenizer(text)["input_ids"],
                    "eos_token_id": model.config.eos_token_id,
                }
            )
        )


if __name__ == "__main__":
    main()
