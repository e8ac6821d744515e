"""Writes or compares which tokens of chats transformers takes for the assistant's.

Usage: python chat_masks.py FOLDER [--write]   (needs transformers, jinja2)

FOLDER holds templates with {% generation %} blocks and, beside them, a byte-level tokenizer.json; a second tokenizer,
whose words begin with U+2581, is FOLDER/../llama_tokenizer.json. --write makes the first again if it is not there."""

import json
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

SAY = {
    "s": "Be  brief. ",
    "u": " Hello,\nwho are you?\n",
    "U": "It's \"fine\" & <é> 🙂",
    "a": "No one. 🙂🙃",
    "A": "  I said: it's Wörter\n\n",
    "e": "",
    "t": "{\"found\": 3}",
}
ROLES = {"s": "system", "u": "user", "U": "user", "a": "assistant", "A": "assistant", "e": "assistant", "t": "tool"}
CHATS = ["ua", "sua", "uAUa", "suaUA", "uaU", "uaUe", "a", "sA", "uaA", "utA", "ue"]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def messages(chat):
    return [{"role": ROLES[turn], "content": SAY[turn]} for turn in chat]


def make(path, folder):
    texts = [" ".join(SAY.values())] + [file.read_text() for file in sorted(folder.glob("*.jinja"))]
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=340, min_frequency=2, special_tokens=SPECIAL)
    made.save(str(path))


def rows(folder, name, file):
    found = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<s>", eos_token="</s>")
    for path in sorted(folder.glob("*.jinja")):
        found.chat_template = path.read_text()
        for chat in CHATS:
            row = {"template": path.name, "tokenizer": name, "messages": messages(chat)}
            try:
                out = found.apply_chat_template(
                    messages(chat), return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
                )
                row |= {"tokens": out["input_ids"], "mask": out["assistant_masks"]}
            except Exception as error:
                print(f"{path.name} {chat}: {type(error).__name__}: {error}")
                row |= {"tokens": None}
            yield row


def main():
    folder = Path(sys.argv[1])
    own = folder / "tokenizer.json"
    if "--write" in sys.argv and not own.exists():
        make(own, folder)
    files = {"tokenizer.json": own, "../llama_tokenizer.json": folder.parent / "llama_tokenizer.json"}
    found = [row for name, file in files.items() for row in rows(folder, name, file)]
    kept = folder / "masks.json"
    if "--write" in sys.argv:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in found)
        kept.write_text(f"[\n{lines}\n]\n")
    same = json.loads(kept.read_text()) == found
    print(f"{len(found)} chats, {'equal' if same else 'NOT EQUAL'}")
    sys.exit(not same)


main()
