"""Writes or compares what transformers makes of the chat templates in a folder.

Usage: python chat_templates.py FOLDER [--write]   (needs transformers, jinja2)"""

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

SAY = {
    "s": "Be  brief. ",
    "u": " Hello,\nwho are you?\n",
    "a": "<think>\nHm\n</think>\n\nNo one. ",
    "U": "It's \"fine\" & <é>",
}
ROLES = {"s": "system", "u": "user", "a": "assistant", "U": "user"}
CHATS = ["u", "U", "su", "uaU", "suaU", "uU", "sua", "suauaU"]


def messages(chat):
    return [{"role": ROLES[turn], "content": SAY[turn]} for turn in chat]


def rendered(path):
    with tempfile.TemporaryDirectory() as folder:
        Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>")).save(folder + "/tokenizer.json")
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=folder + "/tokenizer.json", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = path.read_text()
    for chat in CHATS:
        try:
            text = tokenizer.apply_chat_template(messages(chat), tokenize=False, add_generation_prompt=True)
        except Exception as error:
            print(f"{path.name} {chat}: {type(error).__name__}: {error}")
            text = None
        yield {"template": path.name, "messages": messages(chat), "text": text}


def main():
    folder = Path(sys.argv[1])
    texts = [row for path in sorted(folder.glob("*.jinja")) for row in rendered(path)]
    kept = folder / "rendered.json"
    if "--write" in sys.argv:
        kept.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    same = json.loads(kept.read_text()) == texts
    print(f"{len(texts)} texts, {'equal' if same else 'NOT EQUAL'}")
    sys.exit(not same)


main()
