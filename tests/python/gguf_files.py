"""GGUF files by the converter of a folder of llama.cpp."""

import subprocess
import sys


def convert(llama, folder, out, dtype):
    """Converts a folder of transformers' layout; the finished process. The converter knows the tokenizers of published
    models alone, so the type of this one is named.
    """
    code = (
        f"import sys; sys.path[:0] = [{str(llama)!r}, {str(llama / 'gguf-py')!r}]\n"
        "import convert_hf_to_gguf, conversion.base\n"
        "conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: 'gpt-2'\n"
        "convert_hf_to_gguf.main()\n"
    )
    command = [sys.executable, "-c", code, folder, "--outfile", out, "--outtype", dtype]
    return subprocess.run(command, capture_output=True, text=True)
