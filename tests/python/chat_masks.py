"""Writes or compares which tokens of chats transformers takes for the assistant's.

Usage: python chat_masks.py FOLDER [--write]   (needs transformers, jinja2)

FOLDER holds templates with {% generation %} blocks. Tokenizers are the byte-level one of chat_masks, which --write makes
again if it is not there, and FOLDER/../llama_tokenizer.json, whose words begin with U+2581. Chats are those below, or
the rows of FOLDER/rows.json: messages with more keys, and what apply_chat_template takes beside them (`tools`,
`documents`, and each key that the template reads as a variable). A message of weight 0 (or train, trainable: false) has
no label: the tokens of its block are taken out of the mask."""

import json
import sys
from pathlib import Path

import jinja2.meta
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import _cached_compile_jinja_template, render_jinja_template

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
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def messages(chat):
    return [{"role": ROLES[turn], "content": SAY[turn]} for turn in chat]


def make(path, folder):
    texts = [" ".join(SAY.values())] + [file.read_text() for file in sorted(folder.glob("*.jinja"))]
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(texts, vocab_size=340, min_frequency=2, special_tokens=SPECIAL)
    made.save(str(path))


def variables(template):
    """Variables that a template reads and does not make itself."""
    environment = _cached_compile_jinja_template(template).environment
    return jinja2.meta.find_undeclared_variables(environment.parse(template))


def is_trained(message):
    weights = [message.get(key) for key in ("weight", "train", "trainable")]
    return message["role"] == "assistant" and all(weight is None or weight for weight in weights)


def without_labels(tokenizer, row, beside, out):
    """The mask without the blocks of messages that are not to be trained on."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in row["messages"]]
    answers = [message for message in messages if message["role"] == "assistant"]
    if all(is_trained(message) for message in answers):
        return out["assistant_masks"]
    [text], [blocks] = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, return_assistant_tokens_mask=True, **NAMES, **beside
    )
    assert len(blocks) == len(answers), "a block for each answer"
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    mask = list(out["assistant_masks"])
    for (start, end), message in zip(blocks, answers):
        if not is_trained(message):
            mask = [0 if start < stop and begin < end else bit for (begin, stop), bit in zip(offsets, mask)]
    return mask


def found(tokenizer, row):
    """Tokens and mask of a row, or none where the template refuses it."""
    names = variables(tokenizer.chat_template) - {"messages", "add_generation_prompt"}
    beside = {key: value for key, value in row.items() if key in names}
    out = tokenizer.apply_chat_template(
        row["messages"], return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False, **beside
    )
    return {"tokens": out["input_ids"], "mask": without_labels(tokenizer, row, beside, out)}


def rows(folder, name, file):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file), **NAMES)
    stored = folder / "rows.json"
    chats = json.loads(stored.read_text()) if stored.exists() else [{"messages": messages(chat)} for chat in CHATS]
    for path in sorted(folder.glob("*.jinja")):
        tokenizer.chat_template = path.read_text()
        for number, chat in enumerate(chats):
            row = {"template": path.name, "tokenizer": name}
            row |= {"row": number} if stored.exists() else chat
            try:
                row |= found(tokenizer, chat)
            except Exception as error:
                print(f"{path.name} {number}: {type(error).__name__}: {error}")
                row |= {"tokens": None}
            yield row


def main():
    folder = Path(sys.argv[1])
    own = folder.parent / "chat_masks/tokenizer.json"
    if "--write" in sys.argv and not own.exists():
        make(own, folder)
    files = {"tokenizer.json": own}
    if not (folder / "rows.json").exists():
        files["../llama_tokenizer.json"] = folder.parent / "llama_tokenizer.json"
    all_rows = [row for name, file in files.items() for row in rows(folder, name, file)]
    kept = folder / "masks.json"
    if "--write" in sys.argv:
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in all_rows)
        kept.write_text(f"[\n{lines}\n]\n")
    same = json.loads(kept.read_text()) == all_rows
    print(f"{len(all_rows)} chats, {'equal' if same else 'NOT EQUAL'}")
    sys.exit(not same)


main()
